//! The pinner over what this machine has.

use std::sync::Arc;

use ringfence_iommu::{HostAddr, Iova, Prot, Range};
use ringfence_vfio::Account;
use ringfence_vfio::pin::{Backing, PinError, Pinner, Uring};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// Memory of this process, some of which may be taken away.
struct Memory(*mut u8, usize);

impl Memory {
    fn new(pages: usize) -> Memory {
        let len = pages * 4096;
        let rw = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: new memory, wherever the kernel likes.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), len, rw, MapFlags::PRIVATE) };
        Memory(at.unwrap().cast(), len)
    }

    fn addr(&self) -> HostAddr {
        HostAddr(self.0.expose_provenance() as u64)
    }

    fn range(&self) -> Range {
        Range::from_len(iova(0), self.1 as u64).unwrap()
    }

    /// Nothing of a page can be accessed any more.
    fn take_away(&self, page: usize) {
        // SAFETY: nobody has a reference to it.
        unsafe { mprotect(self.0.add(page * 4096).cast(), 4096, MprotectFlags::empty()) }.unwrap();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was mapped in `new`, and nobody has a reference to it.
        unsafe { munmap(self.0.cast(), self.1) }.unwrap();
    }
}

fn pinner<B: Backing>(backing: B, memory: &Memory) -> Pinner<B> {
    let account = Arc::new(Account::with_limit("test", 64 << 20));
    let mut pinner = Pinner::new(backing, account);
    pinner.add_window(memory.range(), memory.addr(), Prot::RW).unwrap();
    pinner
}

fn iova(page: u64) -> Iova {
    Iova(0x10_0000 + page * 4096)
}

// rules L52, L62
#[test]
fn runs_are_pinned_and_what_is_no_memory_undoes_all() {
    let memory = Memory::new(1024);
    let mut pinner = pinner(Uring::new().unwrap(), &memory);
    pinner.pin_range(iova(0), 300 * 4096, Prot::RW).unwrap();
    pinner.pin(&[iova(700), iova(3), iova(701), iova(900)], Prot::READ).unwrap();
    assert_eq!((pinner.pinned(), pinner.held(), pinner.count(iova(3))), (303, 303, 2));
    memory.take_away(500);
    let error = pinner.pin_range(iova(250), 400 * 4096, Prot::RW).unwrap_err();
    let PinError::Hold { iova: at, .. } = error else { panic!("{error}") };
    assert_eq!(at, iova(500));
    assert_eq!((pinner.pinned(), pinner.account().used()), (303, 303 * 4096));
    pinner.unpin(&[iova(3), iova(900), iova(700), iova(701)]).unwrap();
    pinner.unpin_range(iova(0), 300 * 4096).unwrap();
    assert_eq!((pinner.pinned(), pinner.held(), pinner.account().used()), (0, 0, 0));
}
