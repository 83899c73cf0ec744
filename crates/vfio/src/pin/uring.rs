//! Pages held as registered buffers of an io_uring.

use std::{
    cell::Cell,
    ffi::c_void,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    ptr,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use ringfence_iommu::{HostAddr, Prot};
use rustix::io::Errno;
use rustix::io_uring::{
    IoringRegisterFlags, IoringRegisterOp, IoringRsrcFlags, io_uring_params, io_uring_ptr,
    io_uring_register, io_uring_register_with, io_uring_rsrc_register, io_uring_rsrc_update,
    io_uring_rsrc_update2, io_uring_setup,
};

use super::backing::{Backing, HoldError, Limits, Release, Run, page_size};
use super::process::Process;

/// Slots of the first ring. Few live pins, or long ones, fit there.
const FIRST: u32 = 8;
/// Slots of each further ring: for every huge page that it pins, the kernel searches the whole
/// table of the ring, empty slots too (one page: 0.8 µs with 64 slots, 27 µs with 16,384). The
/// first slot numbers of two consecutive rings also differ by this.
const RING: u32 = CALL as u32;
/// Slots of all rings by default: with 64 a ring, these take a quarter of the files that a process
/// may usually have open.
const SLOTS: u32 = 1 << 14;
/// Most slots of one call: the length of [`EMPTY`].
const CALL: usize = 64;
/// The content of an empty slot: an iovec with a null base.
static EMPTY: [Run; CALL] = [Run { addr: HostAddr(0), len: 0 }; CALL];

// The kernel reads runs as iovecs.
const _: () = assert!(size_of::<Run>() == size_of::<libc::iovec>());
const _: () = assert!(std::mem::offset_of!(Run, len) == std::mem::offset_of!(libc::iovec, iov_len));

/// Holds pages as registered buffers of io_urings: the kernel's long-term pins, the same that VFIO
/// takes, on every machine and without privileges.
///
/// Its limits:
/// - it gives no DMA address by which a device could find the memory;
/// - it always pins for writing, so memory that this process may not write cannot be held;
/// - a run is a slot in a table, of up to 1 GiB, and is released as a whole; 64 slots are a ring, a
///   file descriptor (the first ring has 8);
/// - the kernel does not say which page of a run is not memory: a run that fails is split in
///   halves;
/// - without CAP_IPC_LOCK the kernel charges held pages to the user, against RLIMIT_MEMLOCK, all
///   processes together, and a huge page as soon as a page of it is held.
///
/// The first ring is a registered ring of the thread that used it first, which saves the kernel a
/// file lookup; it takes one of the 16 places of that thread. If another thread drops it, it
/// occupies the place until the first thread ends (but holds no pages any more).
///
/// Pins end with the process, however it ends, when the kernel has closed its files.
///
/// They are of the memory of the process that made the value. The child of a fork shares its rings:
/// in the child, holding fails (EPERM), and nothing that the parent holds is released, whether the
/// value is dropped or not.
pub struct Uring {
    rings: Vec<OwnedFd>,
    /// The first ring as registered by a thread.
    named: Option<Named>,
    slots: u32,
    page: u64,
    /// The process whose memory is held.
    process: Process,
}

impl Uring {
    /// Up to 16,384 slots: 257 rings, made as they are needed.
    ///
    /// # Errors
    /// The kernel's: EPERM where io_uring is forbidden (`kernel.io_uring_disabled`, seccomp),
    /// ENOSYS where it does not exist, EINVAL before Linux 5.19, ENOMEM.
    pub fn new() -> Result<Uring, Errno> {
        Uring::with_slots(SLOTS)
    }

    /// As many rings as `slots` slots (at least 1) take; the first is made now, others when they
    /// are needed.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_slots(slots: u32) -> Result<Uring, Errno> {
        // A pinner uses the highest slot numbers for something else.
        let slots = slots.clamp(1, u32::MAX - 128);
        // Room for all rings, within the usual limit of open files: pinning allocates nothing.
        let others = slots.saturating_sub(FIRST).div_ceil(RING);
        let mut rings = Vec::with_capacity(others.min(1023) as usize + 1);
        let process = Process::this()?;
        rings.push(ring(slots.min(FIRST))?);
        Ok(Uring { rings, named: None, slots, page: page_size(), process })
    }

    /// Fills slots from `slot` with `runs`; returns how many.
    #[inline(always)]
    fn update(&self, slot: u32, runs: &[Run]) -> Result<usize, Errno> {
        let mut update = io_uring_rsrc_update2::default();
        update.offset = slot % RING;
        update.data = io_uring_ptr::new(runs.as_ptr().cast_mut().cast());
        update.nr = runs.len() as u32;
        let (arg, size) = ((&raw const update).cast::<c_void>(), size_of_val(&update) as u32);
        let op = IoringRegisterOp::RegisterBuffersUpdate;
        // SAFETY: the kernel reads `update` and the runs, which have the layout of iovecs, during
        // the call. It pins the pages of the runs and does nothing to them: no I/O is ever
        // submitted. The registered number of the first ring belongs to it as long as it is
        // `named`.
        let done = unsafe {
            match self.named {
                Some(named) if slot < RING && named.thread == this_thread() => {
                    let flags = IoringRegisterFlags::USE_REGISTERED_RING;
                    let ring = BorrowedFd::borrow_raw(named.number);
                    io_uring_register_with(ring, op, flags, arg, size)?
                }
                _ => io_uring_register(&self.rings[(slot / RING) as usize], op, arg, size)?,
            }
        };
        Ok(done as usize)
    }

    /// Registers the first ring for the calling thread.
    #[cold]
    fn name(&mut self) {
        let Some(ring) = self.rings.first() else { return };
        let mut update = io_uring_rsrc_update::default();
        // Any free place.
        update.offset = u32::MAX;
        update.data = io_uring_ptr::new(ptr::without_provenance_mut(ring.as_raw_fd() as usize));
        // SAFETY: the kernel reads one such structure, and writes the place into it.
        let done = unsafe { register_place(ring, IoringRegisterOp::RegisterRingFds, &mut update) };
        if done == Ok(1) {
            self.named = Some(Named { thread: this_thread(), number: update.offset as i32 });
            // Before Linux 6.3 a ring can be registered, but not used for this call. Every slot is
            // still empty.
            if self.update(0, &EMPTY[..1]).is_ok() {
                return;
            }
            self.forget_name();
        }
        self.named = Some(Named { thread: NO_THREAD, number: -1 });
    }

    /// Gives the place back, if this is the thread that has it.
    fn forget_name(&mut self) {
        let (Some(named), Some(ring)) = (self.named.take(), self.rings.first()) else { return };
        if named.thread == this_thread() {
            let mut update = io_uring_rsrc_update::default();
            update.offset = named.number as u32;
            // SAFETY: the kernel reads one such structure; the place is ours.
            let _ =
                unsafe { register_place(ring, IoringRegisterOp::UnregisterRingFds, &mut update) };
        }
    }

    /// Makes the rings up to that of `slot`.
    #[cold]
    fn grow(&mut self, slot: u32) -> Result<(), Errno> {
        while self.rings.len() as u32 <= slot / RING {
            let left = self.slots - FIRST - (self.rings.len() as u32 - 1) * RING;
            self.rings.push(ring(left.min(RING))?);
        }
        Ok(())
    }

    /// Finds how much of a run can be held that cannot be held as a whole.
    #[cold]
    #[inline(never)]
    fn halve(&self, slot: u32, run: &mut Run, mut errno: Errno) -> Result<usize, HoldError> {
        // With ENOMEM, the limit may be at fault rather than a page.
        while run.len > self.page && errno != Errno::NOMEM {
            run.len = (run.len / self.page).div_ceil(2) * self.page;
            match self.update(slot, &[*run]) {
                Ok(_) => return Ok(1),
                Err(why) => errno = why,
            }
        }
        Err(HoldError { addr: run.addr, errno })
    }
}

impl Backing for Uring {
    fn limits(&self) -> Limits {
        Limits { page: self.page, run: 1 << 30, runs: CALL, slots: self.slots, first: FIRST }
    }

    #[inline(always)]
    fn hold(&mut self, slot: u32, runs: &mut [Run], _prot: Prot) -> Result<usize, HoldError> {
        if !self.process.is_here() {
            // It would replace the parent's pages by the child's.
            return Err(HoldError { addr: runs[0].addr, errno: Errno::PERM });
        }
        if (slot / RING) as usize >= self.rings.len()
            && let Err(errno) = self.grow(slot)
        {
            return Err(HoldError { addr: runs[0].addr, errno });
        }
        if self.named.is_none() {
            self.name();
        }
        match self.update(slot, runs) {
            Ok(done) => Ok(done),
            Err(errno) => self.halve(slot, &mut runs[0], errno),
        }
    }

    #[inline(always)]
    fn release(&mut self, what: Release) {
        if !self.process.is_here() {
            // The parent holds the pages. The child's descriptors close when they are dropped,
            // which ends nothing: the parent has the same files.
            return;
        }
        match what {
            Release::Slots(slots) => {
                let mut left = slots.clone();
                while !left.is_empty() {
                    match self.update(left.start, &EMPTY[..left.len()]) {
                        // The kernel may stop before the last slot.
                        Ok(done) if done > 0 => left.start += done as u32,
                        // They stay pinned until the slot is taken again, which replaces its
                        // content.
                        failed => {
                            tracing::error!(slots = ?left, ?failed, "pages stay pinned");
                            break;
                        }
                    }
                }
            }
            Release::All => {
                self.forget_name();
                self.rings.drain(..).for_each(forget);
            }
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.release(Release::All);
    }
}

/// A ring as registered by a thread.
#[derive(Clone, Copy)]
struct Named {
    thread: u64,
    number: i32,
}

/// No thread has this number.
const NO_THREAD: u64 = 0;

/// A number that no other thread ever has.
#[inline(always)]
fn this_thread() -> u64 {
    thread_local!(static THREAD: Cell<u64> = const { Cell::new(NO_THREAD) });
    // While a thread ends, its number may be gone.
    THREAD
        .try_with(|thread| if thread.get() == NO_THREAD { number(thread) } else { thread.get() })
        .unwrap_or(u64::MAX)
}

#[cold]
fn number(thread: &Cell<u64>) -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(NO_THREAD);
    thread.set(LAST.fetch_add(1, Relaxed) + 1);
    thread.get()
}

/// Registers or unregisters a ring in one of this thread's places.
///
/// # Safety
/// The operation takes this structure.
unsafe fn register_place(
    ring: &OwnedFd,
    op: IoringRegisterOp,
    update: &mut io_uring_rsrc_update,
) -> Result<u32, Errno> {
    // SAFETY: the caller's promise.
    unsafe { io_uring_register(ring, op, ptr::from_mut(update).cast(), 1) }
}

/// Releases at once all pages of a ring: closing the file releases them only later.
fn forget(ring: OwnedFd) {
    let op = IoringRegisterOp::UnregisterBuffers;
    // SAFETY: it ends the holds of this ring's slots.
    if let Err(errno) = unsafe { io_uring_register(&ring, op, ptr::null(), 0) } {
        tracing::warn!(%errno, "pages stay pinned until the kernel has closed the ring");
    }
}

/// Makes a ring whose table has `slots` empty slots.
fn ring(slots: u32) -> Result<OwnedFd, Errno> {
    let mut params = io_uring_params::default();
    // SAFETY: the kernel reads and writes the parameters, and makes a file.
    let ring = unsafe { io_uring_setup(1, &mut params)? };
    let mut table = io_uring_rsrc_register::default();
    table.nr = slots;
    table.flags = IoringRsrcFlags::REGISTER_SPARSE;
    let (arg, size) = ((&raw const table).cast::<c_void>(), size_of_val(&table) as u32);
    // SAFETY: the kernel reads `table`; a sparse one names no memory.
    unsafe { io_uring_register(&ring, IoringRegisterOp::RegisterBuffers2, arg, size)? };
    Ok(ring)
}
