//! The kernel's registered buffers, by hand: what pins pages on every machine.

use std::{
    ffi::c_void,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    ptr,
};

use anyhow::{Context, Result};
use rustix::io_uring::{
    IoringRegisterFlags, IoringRegisterOp, IoringRsrcFlags, io_uring_params, io_uring_ptr,
    io_uring_register_with, io_uring_rsrc_register, io_uring_rsrc_update, io_uring_rsrc_update2,
    io_uring_setup,
};

use super::set::PAGE;

/// Any place in the thread's table of registered rings.
const ANY: u32 = u32::MAX;

/// How a ring is named in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Name {
    /// By its descriptor.
    Descriptor,
    /// By its place among the rings of the thread: the kernel need not count users of the file.
    Registered,
}

/// A ring that is used for its table of buffers only, by the thread that made it.
///
/// Calls are made in place, not through the C library's `syscall`: one more return, which some
/// processors mispredict after a system call, makes a call half as expensive again.
pub(super) struct Ring {
    fd: OwnedFd,
    /// How calls name the ring: a number, and its meaning.
    number: i32,
    flags: IoringRegisterFlags,
}

impl Ring {
    /// A ring without a table.
    ///
    /// # Errors
    /// The kernel has no io_uring, or does not allow it.
    pub(super) fn new(name: Name) -> Result<Ring> {
        let mut parameters = io_uring_params::default();
        // SAFETY: the kernel reads and writes the parameters, and makes a file, whose rings are never
        // mapped.
        let fd = unsafe { io_uring_setup(1, &mut parameters) }.context(
            "no ring: the kernel must have io_uring and allow it \
             (sysctl kernel.io_uring_disabled=0; in a container, its seccomp profile too)",
        )?;
        let number = fd.as_raw_fd();
        let mut ring = Ring { fd, number, flags: IoringRegisterFlags::empty() };
        if name == Name::Registered {
            let mut update = io_uring_rsrc_update::default();
            update.offset = ANY;
            update.data = io_uring_ptr::new(ptr::without_provenance_mut(number as usize));
            let at = (&raw mut update).cast::<c_void>();
            // SAFETY: the kernel reads one such structure, and writes the place into it.
            unsafe { ring.call(IoringRegisterOp::RegisterRingFds, at, 1) }
                .context("registering a ring")?;
            ring.number = update.offset as i32;
            ring.flags = IoringRegisterFlags::USE_REGISTERED_RING;
        }
        Ok(ring)
    }

    /// A ring with a table of so many slots.
    pub(super) fn with_slots(name: Name, slots: usize) -> Result<Ring> {
        let ring = Ring::new(name)?;
        let mut register = io_uring_rsrc_register::default();
        register.nr = slots as u32;
        register.flags = IoringRsrcFlags::REGISTER_SPARSE;
        let (at, size) = ((&raw mut register).cast(), size_of_val(&register) as u32);
        // SAFETY: the kernel reads the structure; there is no memory in it.
        unsafe { ring.call(IoringRegisterOp::RegisterBuffers2, at, size) }
            .with_context(|| format!("a table of {slots} buffers"))?;
        Ok(ring)
    }

    /// Puts `buffers` into the slots from `slot` on: their old buffers are unpinned, the new ones
    /// are pinned. An empty buffer leaves its slot empty.
    ///
    /// # Errors
    /// The kernel's; slots before the first that failed have changed.
    #[inline(always)]
    pub(super) fn update(&self, slot: usize, buffers: &[libc::iovec]) -> rustix::io::Result<()> {
        let mut update = io_uring_rsrc_update2::default();
        update.offset = slot as u32;
        update.data = io_uring_ptr::new(buffers.as_ptr().cast_mut().cast());
        update.nr = buffers.len() as u32;
        let (at, size) = ((&raw mut update).cast(), size_of_val(&update) as u32);
        // SAFETY: the kernel reads the structure and the buffers during the call. It pins the memory;
        // as this ring never does any I/O, no byte of it is touched.
        let done = unsafe { self.call(IoringRegisterOp::RegisterBuffersUpdate, at, size)? };
        // How many the kernel has updated.
        if done as usize == buffers.len() { Ok(()) } else { Err(rustix::io::Errno::NOMEM) }
    }

    /// Pins one buffer by making a table of it, where there is no table.
    #[inline(always)]
    pub(super) fn register(&self, buffer: &libc::iovec) -> rustix::io::Result<()> {
        let at = ptr::from_ref(buffer).cast_mut().cast();
        // SAFETY: as in `update`.
        unsafe { self.call(IoringRegisterOp::RegisterBuffers, at, 1) }.map(drop)
    }

    /// Removes the table, and unpins what is in it.
    #[inline(always)]
    pub(super) fn unregister(&self) -> rustix::io::Result<()> {
        // SAFETY: this operation has no argument.
        unsafe { self.call(IoringRegisterOp::UnregisterBuffers, ptr::null_mut(), 0) }.map(drop)
    }

    /// # Safety
    /// `argument` is valid for the operation.
    #[inline(always)]
    unsafe fn call(
        &self,
        operation: IoringRegisterOp,
        argument: *mut c_void,
        count: u32,
    ) -> rustix::io::Result<u32> {
        // SAFETY: `number` is a descriptor of ours or, with the flag, a place in the thread's
        // table, as long as this lives; the caller promises the rest.
        unsafe {
            let ring = BorrowedFd::borrow_raw(self.number);
            io_uring_register_with(ring, operation, self.flags, argument, count)
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The file lives as long as it is registered; pins must not live so long.
        let _ = self.unregister();
        if self.flags.contains(IoringRegisterFlags::USE_REGISTERED_RING) {
            let mut update = io_uring_rsrc_update::default();
            update.offset = self.number as u32;
            (self.number, self.flags) = (self.fd.as_raw_fd(), IoringRegisterFlags::empty());
            let at = (&raw mut update).cast::<c_void>();
            // SAFETY: as in `new`; the place is ours.
            let _ = unsafe { self.call(IoringRegisterOp::UnregisterRingFds, at, 1) };
        }
    }
}

/// The memory of so many pages from an address on, as the kernel takes it.
#[inline]
pub(super) fn buffer(address: usize, pages: usize) -> libc::iovec {
    libc::iovec { iov_base: address as *mut c_void, iov_len: pages * PAGE }
}

/// An empty slot.
pub(super) const NOTHING: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
