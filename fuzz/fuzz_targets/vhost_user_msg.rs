//! Arbitrary messages, with arbitrary descriptors, to a vhost-user back end.
//!
//! The input is a row of records: how many descriptors of which kind, how many bytes, the bytes. A
//! record need not be a message: several may make one, and one may hold several. The same bytes
//! also serve as a connection that another process has saved, and that the back end resumes.

#![no_main]

mod threads;

use std::{
    io::IoSlice,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    time::Duration,
};

use libfuzzer_sys::fuzz_target;
use ringfence_mem::{DirtyLog, GuestRam, Memory};
use ringfence_run::PeerFd;
use ringfence_vhost_user::{
    F_ACCESS_PLATFORM, Handler, HandlerError, InflightError, InflightRegion, Iotlb, Offer,
    ProtocolFeatures, RingAddresses, RingSetup, SavedConnection, Server,
};
use rustix::{
    event::{EventfdFlags, eventfd},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};

const QUEUES: usize = 3;

/// A device that only checks that it gets no call that a device may not get.
#[derive(Default)]
struct Device {
    running: [bool; QUEUES],
    memory: Option<Arc<Memory>>,
    features: u64,
    log: Option<Arc<DirtyLog>>,
}

impl Handler for Device {
    fn offer(&self) -> Offer {
        let features = F_ACCESS_PLATFORM | 1 << 32 | 1 << 34;
        Offer { protocol: ProtocolFeatures::KNOWN, ..Offer::new(features, QUEUES as u16) }
    }
    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        assert_eq!(features & !self.offer().features, 0);
        self.features = features;
        Ok(())
    }
    fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError> {
        self.memory = Some(memory);
        Ok(())
    }
    fn start_ring(&mut self, ring: u16, setup: RingSetup) -> Result<(), HandlerError> {
        assert!(!self.running[ring as usize] && self.memory.is_some());
        assert!(setup.size.is_power_of_two() || self.features & 1 << 34 != 0);
        if setup.base == Some(99) {
            return Err(HandlerError::new("not there"));
        }
        self.running[ring as usize] = true;
        Ok(())
    }
    fn stop_ring(&mut self, ring: u16) -> Result<u32, HandlerError> {
        assert!(self.running[ring as usize]);
        self.running[ring as usize] = false;
        Ok(3)
    }
    fn enable_ring(&mut self, ring: u16, _: bool) -> Result<(), HandlerError> {
        assert!(self.running[ring as usize]);
        Ok(())
    }
    fn move_ring(&mut self, ring: u16, _: RingAddresses) -> Result<(), HandlerError> {
        assert!(self.running[ring as usize]);
        Ok(())
    }
    fn set_call(&mut self, ring: u16, _: Option<PeerFd>) -> Result<(), HandlerError> {
        assert!((ring as usize) < QUEUES);
        Ok(())
    }
    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        assert!(!out.is_empty() && out.len() <= 256);
        if offset > 100 { Err(HandlerError::new("beyond the end")) } else { Ok(()) }
    }
    fn set_log(&mut self, log: Option<Arc<DirtyLog>>) -> Result<(), HandlerError> {
        if let Some(log) = &log {
            log.mark(0x1234, 70_000);
        }
        self.log = log;
        Ok(())
    }
    fn set_inflight(&mut self, inflight: Arc<InflightRegion>) -> Result<(), HandlerError> {
        assert!(!self.running.contains(&true));
        let place = inflight.place();
        assert!(usize::from(place.queues) <= QUEUES && place.size <= 32768);
        if let Ok((mut queue, heads)) = inflight.split(0, place.size, 3) {
            assert!(heads.iter().all(|&head| head < place.size));
            queue.take(0);
        }
        let zero = |_| Ok::<_, InflightError>(0);
        let _ = inflight.packed(0, place.size, 0, zero);
        Ok(())
    }
    fn disconnected(&mut self) {
        assert!(self.log.is_none());
    }
    fn iotlb(&mut self, message: Iotlb) -> Result<(), HandlerError> {
        assert_ne!(self.features & F_ACCESS_PLATFORM, 0);
        match message {
            Iotlb::Update { first, last, user_addr, .. } => {
                let memory = self.memory.as_ref().expect("an update leads into memory");
                assert!(first <= last);
                assert!(memory.find_user(user_addr).is_some());
                assert!(memory.find_user(user_addr + (last - first)).is_some());
            }
            Iotlb::Invalidate { first, last } => assert!(first <= last),
            other => panic!("{other:?} is the back end's to send"),
        }
        Ok(())
    }
}

fuzz_target!(|data: &[u8]| threads::await_end(|| run(data)));

fn run(data: &[u8]) {
    let (front, back) = UnixStream::pair().expect("a socket pair");
    let ram = GuestRam::new(1 << 14, 0).expect("a memory file");
    let event = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
    let kinds = [ram.fd(), ram.fd(), event.as_fd(), front.as_fd()];
    let mut rest = data;
    while let [fds, len, bytes @ ..] = rest {
        let bytes = &bytes[..bytes.len().min(usize::from(*len))];
        rest = &rest[2 + bytes.len()..];
        send(&front, bytes, &vec![kinds[usize::from(fds >> 6)]; usize::from(fds & 15)]);
    }
    front.shutdown(std::net::Shutdown::Write).expect("it is connected");
    let mut server = Server::new(back, Device::default());
    // All that will come is there already.
    server.set_timeout(Duration::ZERO);
    let _ = server.serve();
    assert_eq!(server.into_handler().running, [false; QUEUES]);
    goes_on(data, &kinds);
}

/// Resumes a connection that another process has saved as these bytes.
fn goes_on(data: &[u8], kinds: &[BorrowedFd<'_>]) {
    let kept = [b"RFvu", &1u32.to_ne_bytes()[..], data].concat();
    for count in 0..4 {
        let fds = kinds.iter().cycle().take(count);
        let fds = fds.map(|fd| fd.try_clone_to_owned().expect("a descriptor").into());
        let Ok(saved) = SavedConnection::parse(&kept, fds.collect()) else { continue };
        let (front, back) = UnixStream::pair().expect("a socket pair");
        drop(front);
        let mut server = Server::new(back, Device::default());
        server.resume(saved);
        let _ = server.serve();
        assert_eq!(server.into_handler().running, [false; QUEUES]);
    }
}

fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(15))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !bytes.is_empty() && !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    // What finds no room is not sent.
    let _ = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags);
}
