//! Requests to the kernel (ioctl).

use std::os::fd::{AsFd, AsRawFd};

use iommufd_bindings::IOMMUFD_TYPE;
use rustix::io::{Errno, retry_on_intr};
use vfio_bindings::bindings::vfio::{VFIO_BASE, VFIO_TYPE};

use super::{KernelResult, chain::u32_at};

/// The number of request `n` of VFIO: `_IO(';', 100 + n)`.
pub(super) const fn vfio(n: u32) -> u32 {
    (VFIO_TYPE as u32) << 8 | (VFIO_BASE + n)
}

/// The number of request `n` of iommufd: `_IO(';', n)`.
pub(super) const fn iommufd(n: u32) -> u32 {
    (IOMMUFD_TYPE as u32) << 8 | n
}

/// The size that a structure has to state.
pub(super) const fn size<T>() -> u32 {
    size_of::<T>() as u32
}

/// Makes a request whose argument is a number, or nothing.
pub(super) fn number(file: impl AsFd, request: u32, argument: usize) -> KernelResult<i32> {
    // SAFETY: the requests that this is used for take a number, or nothing, and touch no memory.
    again(|| unsafe { libc::ioctl(file.as_fd().as_raw_fd(), request as _, argument) })
}

/// Makes a request whose argument lies in memory.
///
/// # Safety
/// `argument` begins with what the request expects, and every address and length in it is of memory
/// that the kernel may read or write meanwhile.
pub(super) unsafe fn memory<T: ?Sized>(
    file: impl AsFd,
    request: u32,
    argument: &mut T,
) -> KernelResult<i32> {
    let at: *mut T = argument;
    // SAFETY: the caller's promise; the argument itself is borrowed meanwhile.
    again(|| unsafe { libc::ioctl(file.as_fd().as_raw_fd(), request as _, at.cast::<u8>()) })
}

/// More bytes than any reply has.
const LARGEST_REPLY: usize = 1 << 20;

/// Makes a request whose structure begins with its size; returns the structure as the kernel has
/// filled it in, with the capabilities behind it. `index` is its third number.
pub(super) fn reply(file: impl AsFd, request: u32, index: u32) -> KernelResult<Vec<u8>> {
    let mut room = 256;
    loop {
        let mut reply = vec![0_u8; room];
        reply[..4].copy_from_slice(&(room as u32).to_ne_bytes());
        reply[8..12].copy_from_slice(&index.to_ne_bytes());
        // SAFETY: the buffer begins with the request's structure, which states the buffer's size.
        unsafe { memory(&file, request, &mut reply[..]) }?;
        match u32_at(&reply, 0).unwrap_or(0) as usize {
            needed if needed <= room => return Ok(reply),
            needed if needed > LARGEST_REPLY => return Err(Errno::TOOBIG),
            needed => room = needed,
        }
    }
}

/// Repeats a request that a signal interrupted: it has changed nothing.
fn again(mut call: impl FnMut() -> i32) -> KernelResult<i32> {
    retry_on_intr(|| match call() {
        result @ 0.. => Ok(result),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_numbers_of_the_uapi() {
        assert_eq!((vfio(0), vfio(14), iommufd(0x85)), (0x3b64, 0x3b72, 0x3b85));
    }

    #[test]
    fn a_file_that_is_not_vfio_says_so() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(number(&file, vfio(0), 0), Err(Errno::NOTTY));
        let mut nothing = [0_u8; 64];
        // SAFETY: a regular file rejects every VFIO request, and touches no memory.
        assert_eq!(unsafe { memory(&file, vfio(12), &mut nothing[..]) }, Err(Errno::NOTTY));
    }
}
