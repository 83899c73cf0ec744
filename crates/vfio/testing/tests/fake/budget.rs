//! 64 GiB.

use std::ptr;

use ringfence_vfio::kernel::{Type1Kernel, UnmapFlags};
use ringfence_vfio_testing::fake::Type1;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::common::{RW, assert_invalidated_before_unpin};

const GIB: u64 = 1 << 30;

// rules L51, L57
#[test]
fn memory_of_64_gib_costs_one_unit_a_call_and_is_given_back_whole() {
    let len = 64 * GIB as usize;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: new memory, which is never accessed.
    let memory =
        unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), flags) }.unwrap();
    let vaddr = memory.expose_provenance() as u64;
    let kernel = Type1::default();
    for at in (0..64).map(|n| n * GIB) {
        // SAFETY: the memory exists until everything is unmapped, and there is no device.
        unsafe { kernel.map(RW, 4 * GIB + at, vaddr + at, GIB) }.unwrap();
    }
    assert_eq!(kernel.info().unwrap().available, Some(65_535 - 64));
    assert_eq!(kernel.pinned(), 64 << 18);
    assert_eq!(kernel.unmap(UnmapFlags::ALL, 0, 0, None), Ok(64 * GIB));
    assert_eq!((kernel.pinned(), kernel.info().unwrap().available), (0, Some(65_535)));
    assert_invalidated_before_unpin(&kernel.events());
    // SAFETY: it is mapped nowhere any more.
    unsafe { munmap(memory, len) }.unwrap();
}
