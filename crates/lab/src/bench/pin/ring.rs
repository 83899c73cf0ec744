//! The kernel's registered buffers, by hand: what pins pages on every machine.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    ptr,
};

use anyhow::{Context, Result};

use super::set::PAGE;

// As `include/uapi/linux/io_uring.h` has them.
const REGISTER_BUFFERS: libc::c_uint = 0;
const UNREGISTER_BUFFERS: libc::c_uint = 1;
const REGISTER_BUFFERS2: libc::c_uint = 15;
const REGISTER_BUFFERS_UPDATE: libc::c_uint = 16;
const REGISTER_RING_FDS: libc::c_uint = 20;
const UNREGISTER_RING_FDS: libc::c_uint = 21;
/// The number is that of a registered ring.
const USE_REGISTERED_RING: libc::c_uint = 1 << 31;
const RSRC_REGISTER_SPARSE: u32 = 1;
/// Any place in the thread's table of registered rings.
const ANY: u32 = u32::MAX;

/// `struct io_uring_rsrc_register`.
#[derive(Default)]
#[repr(C)]
struct Register {
    count: u32,
    flags: u32,
    reserved: u64,
    data: u64,
    tags: u64,
}

/// `struct io_uring_rsrc_update2`.
#[derive(Default)]
#[repr(C)]
struct Update {
    offset: u32,
    reserved: u32,
    data: u64,
    tags: u64,
    count: u32,
    reserved2: u32,
}

/// How a ring is named in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Name {
    /// By its descriptor.
    Descriptor,
    /// By its place among the rings of the thread: the kernel need not count users of the file.
    Registered,
}

/// A ring that is used for its table of buffers only, by the thread that made it.
pub(super) struct Ring {
    fd: OwnedFd,
    /// What the calls are made with: a number, and a bit in the operation.
    name: (libc::c_int, libc::c_uint),
}

impl Ring {
    /// A ring without a table.
    ///
    /// # Errors
    /// The kernel has no io_uring, or does not allow it.
    pub(super) fn new(name: Name) -> Result<Ring> {
        let fd = open().context(
            "no ring: the kernel must have io_uring and allow it \
             (sysctl kernel.io_uring_disabled=0; in a container, its seccomp profile too)",
        )?;
        let mut ring = Ring { name: (fd.as_raw_fd(), 0), fd };
        if name == Name::Registered {
            let mut update = Update { offset: ANY, ..Update::default() };
            update.data = ring.fd.as_raw_fd() as u64;
            let at: *mut Update = &mut update;
            // SAFETY: the structure is as the kernel wants it, a `struct io_uring_rsrc_update` at
            // the beginning of the larger one; it writes the offset.
            unsafe { ring.call(REGISTER_RING_FDS, at.cast(), 1) }.context("registering a ring")?;
            ring.name = (update.offset as libc::c_int, USE_REGISTERED_RING);
        }
        Ok(ring)
    }

    /// A ring with a table of so many slots.
    pub(super) fn with_slots(name: Name, slots: usize) -> Result<Ring> {
        let ring = Ring::new(name)?;
        let mut register =
            Register { count: slots as u32, flags: RSRC_REGISTER_SPARSE, ..Register::default() };
        let at: *mut Register = &mut register;
        // SAFETY: the structure is as the kernel wants it, and there is no memory in it.
        unsafe { ring.call(REGISTER_BUFFERS2, at.cast(), size_of::<Register>() as u32) }
            .with_context(|| format!("a table of {slots} buffers"))?;
        Ok(ring)
    }

    /// Puts `buffers` into the slots from `slot` on: what is there is unpinned, what comes is
    /// pinned. An empty buffer leaves its slot empty.
    ///
    /// # Errors
    /// The kernel's; slots before the first that failed have changed.
    #[inline]
    pub(super) fn update(&self, slot: usize, buffers: &[libc::iovec]) -> io::Result<()> {
        let update = Update {
            offset: slot as u32,
            data: buffers.as_ptr() as u64,
            count: buffers.len() as u32,
            ..Update::default()
        };
        let at: *const Update = &update;
        // SAFETY: the structure is as the kernel wants it, and the buffers live as long as the call.
        // The kernel pins the memory; as this ring never does any I/O, no byte of it is touched.
        let done = unsafe {
            self.call(REGISTER_BUFFERS_UPDATE, at.cast_mut().cast(), size_of::<Update>() as u32)?
        };
        // Those that it got to.
        match done as usize == buffers.len() {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::ENOMEM)),
        }
    }

    /// Pins one buffer by making a table of it, where there is no table.
    pub(super) fn register(&self, buffer: &libc::iovec) -> io::Result<()> {
        let at: *const libc::iovec = buffer;
        // SAFETY: as in `update`.
        unsafe { self.call(REGISTER_BUFFERS, at.cast_mut().cast(), 1) }.map(drop)
    }

    /// Takes the table away, and unpins what is in it.
    pub(super) fn unregister(&self) -> io::Result<()> {
        // SAFETY: this operation has no argument.
        unsafe { self.call(UNREGISTER_BUFFERS, ptr::null_mut(), 0) }.map(drop)
    }

    /// # Safety
    /// `argument` is what the operation wants.
    #[inline]
    unsafe fn call(
        &self,
        operation: libc::c_uint,
        argument: *mut libc::c_void,
        count: u32,
    ) -> io::Result<libc::c_long> {
        let (number, bit) = self.name;
        // SAFETY: as the caller promises; the ring is open, or registered, as long as this.
        let result = unsafe {
            libc::syscall(libc::SYS_io_uring_register, number, operation | bit, argument, count)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The file lives as long as it is registered; what is pinned must not live so long.
        let _ = self.unregister();
        if let (index, USE_REGISTERED_RING) = self.name {
            let mut update = Update { offset: index as u32, ..Update::default() };
            let at: *mut Update = &mut update;
            self.name = (self.fd.as_raw_fd(), 0);
            // SAFETY: as in `new`; the number is ours.
            let _ = unsafe { self.call(UNREGISTER_RING_FDS, at.cast(), 1) };
        }
    }
}

fn open() -> io::Result<OwnedFd> {
    use std::os::fd::FromRawFd;

    /// `struct io_uring_params`, of which nothing is asked for.
    #[repr(C, align(8))]
    struct Parameters([u8; 120]);

    let mut parameters = Parameters([0; 120]);
    let at: *mut Parameters = &mut parameters;
    // SAFETY: the kernel writes the parameters, which are as large as it wants them. The rings
    // themselves are never mapped.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, at) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor, which nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// The memory of so many pages from an address on, as the kernel is told of it.
#[inline]
pub(super) fn buffer(address: usize, pages: usize) -> libc::iovec {
    libc::iovec { iov_base: address as *mut libc::c_void, iov_len: pages * PAGE }
}

/// An empty slot.
pub(super) const NOTHING: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
