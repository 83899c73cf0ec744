//! Pinning a page allocates nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use ringfence_iommu::{HostAddr, Iova, Prot, Range};
use ringfence_vfio::Account;
use ringfence_vfio::pin::{Pinner, Uring};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn nothing_is_allocated_for_pages_however_many() {
    let memory = vec![1_u8; 600 * 4096];
    let addr = (memory.as_ptr().expose_provenance() as u64).next_multiple_of(4096);
    let account = Arc::new(Account::with_limit("test", 1 << 30));
    let mut pinner = Pinner::new(Uring::new().unwrap(), account);
    let window = Range::from_len(Iova(1 << 40), 599 * 4096).unwrap();
    pinner.add_window(window, HostAddr(addr), Prot::RW).unwrap();
    let iovas = (0..400_u64).map(|n| Iova((1 << 40) + n * n % 599 * 4096)).collect::<Vec<_>>();
    let before = ALLOCATIONS.get();
    assert!(before > 0, "they are counted");
    pinner.pin(&iovas[..1], Prot::RW).unwrap();
    pinner.unpin(&iovas[..1]).unwrap();
    pinner.pin(&iovas, Prot::RW).unwrap();
    pinner.pin_range(Iova(1 << 40), 100 * 4096, Prot::RW).unwrap();
    pinner.unpin(&iovas).unwrap();
    pinner.unpin_range(Iova(1 << 40), 100 * 4096).unwrap();
    assert_eq!(ALLOCATIONS.get() - before, 0);
    drop(pinner);
    drop(memory);
}
