//! Descriptors that notify a peer. The peer can make a write to its eventfd block: it clears
//! O_NONBLOCK, which both ends share, and fills the counter. The kernel's own way to signal an
//! eventfd never blocks, and a full counter stays full. A process reaches it by I/O that the kernel
//! completes at once.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use io_uring::{IoUring, opcode, register::Restriction};
use parking_lot::Mutex;
use rustix::net::SendFlags;

use crate::{
    PeerFd,
    restricted::{self, Pool},
};

/// Why a descriptor cannot be used to notify a peer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotifierError {
    /// Writing to anything else may block.
    #[error("it is neither an eventfd nor a Unix stream, and writing to anything else may block")]
    NoEventfd,
    /// The kernel has neither io_uring nor AIO for this process.
    #[error("the kernel lets this process signal no eventfd without blocking: {0}")]
    Kernel(#[source] io::Error),
}

/// Signals a peer's eventfd or Unix stream, without ever blocking.
pub struct Notifier(Signal);

/// Rings for future notifiers.
static SPARE: Pool = Pool::new();

/// Makes the rings for `count` notifiers that exist at the same time, for a process that then gives
/// up the right to make io_urings. Further notifiers signal by AIO, at three times the cost.
///
/// # Errors
/// The kernel has neither io_uring nor AIO for this process.
pub fn make_ahead(count: usize) -> Result<(), NotifierError> {
    let aio = Aio::get();
    SPARE
        .make_ahead(count, make)
        .or_else(|refused| aio.map(drop).map_err(|_| NotifierError::Kernel(refused)))
}

/// A ring that can do nothing but complete.
fn make() -> io::Result<IoUring> {
    let operations = [Restriction::sqe_op(opcode::Nop::CODE)];
    restricted::ring(&mut IoUring::builder(), 2, operations)
}

/// A ring whose completions signal `event`.
fn ring_for(event: RawFd) -> io::Result<IoUring> {
    let ring = SPARE.take(make)?;
    match ring.submitter().register_eventfd(event) {
        Ok(()) => Ok(ring),
        Err(error) => {
            SPARE.give_back(ring);
            Err(error)
        }
    }
}

/// By what a peer is signalled.
// One for each virtqueue, and nearly all are of the first kind.
#[allow(clippy::large_enum_variant)]
enum Signal {
    /// A ring whose completions signal the eventfd.
    Uring(Mutex<Option<IoUring>>),
    /// Where the process may have no io_uring: three times the cost.
    Aio(PeerFd),
    /// A Unix stream, as User-Mode Linux gives: sent to with MSG_DONTWAIT, which no flag of the
    /// peer's changes.
    Stream(PeerFd),
}

impl Notifier {
    /// For `event`, an eventfd or a Unix stream.
    ///
    /// # Errors
    /// It is neither, or the kernel has neither io_uring nor AIO for this process.
    pub fn new(event: PeerFd) -> Result<Notifier, NotifierError> {
        if event.is_unix_stream() {
            return Ok(Notifier(Signal::Stream(event)));
        }
        if !event.is_eventfd() {
            return Err(NotifierError::NoEventfd);
        }
        let raw = event.as_fd().as_raw_fd();
        Ok(Notifier(match ring_for(raw) {
            Ok(ring) => Signal::Uring(Mutex::new(Some(ring))),
            Err(refused) => {
                Aio::get().map_err(|_| NotifierError::Kernel(refused))?;
                Signal::Aio(event)
            }
        }))
    }

    /// Wakes the peer. A full counter means that it was woken already.
    pub fn notify(&self) {
        match &self.0 {
            Signal::Uring(ring) => ring.lock().as_mut().into_iter().for_each(complete_nothing),
            Signal::Aio(event) => {
                if let Ok(aio) = Aio::get() {
                    aio.signal(event.as_fd());
                }
            }
            // A full stream is as good as a full counter.
            Signal::Stream(stream) => {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                let _ = rustix::net::send(stream, &1u64.to_ne_bytes(), flags);
            }
        }
    }
}

impl Drop for Notifier {
    /// Leaves its ring to the next notifier.
    fn drop(&mut self) {
        let Signal::Uring(ring) = &mut self.0 else { return };
        ring.get_mut().take().into_iter().for_each(|ring| SPARE.give_back(ring));
    }
}

/// An operation without effect completes at once, and its completion signals.
fn complete_nothing(ring: &mut IoUring) {
    // SAFETY: the operation uses no memory.
    let queued = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
    debug_assert!(queued.is_ok(), "each is handed over before the next is queued");
    while let Err(error) = ring.submit() {
        match error.raw_os_error() {
            // The kernel is short of memory for a moment. A notification must not be lost.
            Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => std::thread::yield_now(),
            _ => break,
        }
    }
    ring.completion().for_each(drop);
}

/// The process's context of Linux AIO.
struct Aio {
    context: Mutex<libc::c_ulong>,
    /// A file from which a read of no bytes completes at once.
    nothing: OwnedFd,
}

/// The head of the ring that the kernel maps for a context (`struct aio_ring`).
#[repr(C)]
struct AioRing {
    _id: u32,
    _size: u32,
    head: AtomicU32,
    tail: AtomicU32,
}

/// `struct iocb` on a little-endian machine.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    signals: u32,
}

/// `IOCB_FLAG_RESFD`.
const SIGNALS: u32 = 1;

impl Aio {
    fn get() -> io::Result<&'static Aio> {
        static AIO: OnceLock<Option<Aio>> = OnceLock::new();
        AIO.get_or_init(|| Aio::new().ok())
            .as_ref()
            .ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))
    }

    fn new() -> io::Result<Aio> {
        if cfg!(target_endian = "big") {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let nothing = rustix::fs::memfd_create("nothing", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes the context's ID into `context`.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, 16, &raw mut context) };
        match made {
            0 => Ok(Aio { context: Mutex::new(context), nothing }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Completes a read of no bytes, which signals `event`.
    fn signal(&self, event: BorrowedFd<'_>) {
        let mut read = Iocb {
            // IOCB_CMD_PREAD is 0.
            file: self.nothing.as_raw_fd() as u32,
            flags: SIGNALS,
            signals: event.as_raw_fd() as u32,
            ..Iocb::default()
        };
        let mut list = [&raw mut read];
        let context = self.context.lock();
        loop {
            // SAFETY: the kernel reads one pointer and the structure behind it during the call, and writes
            // to its `key`. The read is of no bytes, so that no buffer is used.
            let done =
                unsafe { libc::syscall(libc::SYS_io_submit, *context, 1, list.as_mut_ptr()) };
            match io::Error::last_os_error().raw_os_error() {
                _ if done == 1 => break,
                Some(libc::EINTR | libc::EAGAIN) => std::thread::yield_now(),
                _ => return,
            }
        }
        // SAFETY: the ID of a context is the address of its ring, which the kernel maps into this
        // process for as long as the context exists: for ever. Both ends access its fields
        // atomically.
        let ring = unsafe { &*std::ptr::with_exposed_provenance::<AioRing>(*context as usize) };
        // Takes all completions; their results do not matter. Ordering: the other end is the kernel.
        ring.head.store(ring.tail.load(Ordering::Acquire), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event;
    use rustix::{
        event::{PollFd, PollFlags, Timespec, poll},
        fs::{OFlags, fcntl_setfl},
    };

    fn is_readable(event: &OwnedFd) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(event, PollFlags::IN)], Some(&now)) == Ok(1)
    }

    fn count(event: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(event, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    fn both(event: &OwnedFd) -> [Notifier; 2] {
        let [uring, aio] = [(); 2].map(|()| event.try_clone().unwrap());
        Aio::get().expect("this kernel has AIO");
        [Notifier::new(uring.into()).unwrap(), Notifier(Signal::Aio(aio.into()))]
    }

    #[test]
    fn a_peer_is_notified_once_for_each_call() {
        let event = event::new().unwrap();
        let [uring, aio] = both(&event);
        assert!(matches!(uring.0, Signal::Uring(_)), "this kernel has io_uring");
        for notifier in [uring, aio] {
            // More than any ring of completions holds.
            (0..10_000).for_each(|_| notifier.notify());
            assert_eq!(count(&event), 10_000);
            assert!(!is_readable(&event));
        }
    }

    #[test]
    fn a_full_counter_that_blocks_delays_no_caller() {
        let event = event::new().unwrap();
        for notifier in both(&event) {
            rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            fcntl_setfl(&event, OFlags::empty()).unwrap();
            (0..3).for_each(|_| notifier.notify());
            assert_eq!(count(&event), u64::MAX);
            // Nor does draining what the other end has drained.
            event::drain(&event);
            notifier.notify();
            assert_eq!(count(&event), 1);
            fcntl_setfl(&event, OFlags::NONBLOCK).unwrap();
        }
    }

    #[test]
    fn a_full_stream_that_blocks_delays_no_caller() {
        let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
        let notifier = Notifier::new(OwnedFd::from(writer).into()).unwrap();
        // More than any stream holds.
        (0..100_000).for_each(|_| notifier.notify());
        let mut bytes = [0; 8];
        assert_eq!(rustix::io::read(&reader, &mut bytes), Ok(8));
        assert_eq!(u64::from_ne_bytes(bytes), 1);
        drop(reader);
        notifier.notify();
    }

    #[test]
    fn nothing_else_is_written_to() {
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        let file = tempfile::tempfile().unwrap().into();
        for other in [pipe, file] {
            assert!(matches!(Notifier::new(other.into()), Err(NotifierError::NoEventfd)));
        }
    }
}
