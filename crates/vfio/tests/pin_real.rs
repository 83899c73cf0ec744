//! The pinner over the interfaces of this machine's kernel.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_iommu::{HostAddr, Iova, Prot, Range};
use ringfence_vfio::Account;
use ringfence_vfio::pin::{Backing, PinError, Pinner, Uring};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap,
};

/// The kernel's counts are of the whole process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many pages of this process the kernel counts as pinned for long.
fn kernel_counts() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmPin")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 4
}

/// Memory of this process, parts of which can be made inaccessible.
struct Memory(*mut u8, usize);

impl Memory {
    fn new(pages: usize) -> Memory {
        let memory = Memory::mapped(pages * 4096, MapFlags::empty());
        // SAFETY: the memory was just mapped. The kernel would count huge pages as a whole.
        unsafe { madvise(memory.0.cast(), memory.1, Advice::LinuxNoHugepage) }.unwrap();
        memory
    }

    /// Of preallocated huge pages, 2 MiB each.
    fn huge(pages: usize) -> Memory {
        Memory::mapped(pages << 21, MapFlags::HUGETLB)
    }

    fn mapped(len: usize, how: MapFlags) -> Memory {
        let rw = ProtFlags::READ | ProtFlags::WRITE;
        let how = MapFlags::PRIVATE | how;
        // SAFETY: new memory, wherever the kernel chooses.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), len, rw, how) };
        Memory(at.expect("memory, and huge pages if any").cast(), len)
    }

    fn addr(&self) -> HostAddr {
        HostAddr(self.0.expose_provenance() as u64)
    }

    fn range(&self) -> Range {
        Range::from_len(iova(0), self.1 as u64).unwrap()
    }

    /// Makes a page inaccessible.
    fn take_away(&self, page: usize) {
        // SAFETY: there is no reference to it.
        unsafe { mprotect(self.0.add(page * 4096).cast(), 4096, MprotectFlags::empty()) }.unwrap();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was mapped in `new`, and there is no reference to it.
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
fn runs_are_pinned_and_what_is_not_memory_undoes_all() {
    let _alone = alone();
    let memory = Memory::new(1024);
    let mut pinner = pinner(Uring::new().unwrap(), &memory);
    let before = kernel_counts();
    let pinned = || kernel_counts() - before;
    pinner.pin_range(iova(0), 300 * 4096, Prot::RW).unwrap();
    pinner.pin(&[iova(700), iova(3), iova(701), iova(900)], Prot::READ).unwrap();
    assert_eq!((pinner.pinned(), pinner.held(), pinner.count(iova(3))), (303, 303, 2));
    assert_eq!(pinned(), 303);
    memory.take_away(500);
    let error = pinner.pin_range(iova(250), 400 * 4096, Prot::RW).unwrap_err();
    assert!(error.to_string().contains("cannot be held"), "{error}");
    let PinError::Hold { iova: at, addr, .. } = error else { panic!("{error}") };
    assert_eq!((at, addr), (iova(500), HostAddr(memory.addr().0 + 500 * 4096)));
    assert_eq!((pinner.pinned(), pinner.account().used(), pinned()), (303, 303 * 4096, 303));
    pinner.unpin(&[iova(3), iova(900), iova(700), iova(701)]).unwrap();
    assert_eq!(pinned(), 300);
    pinner.unpin_range(iova(1), 299 * 4096).unwrap();
    assert_eq!((pinner.pinned(), pinner.held(), pinned()), (1, 300, 300), "a run goes as a whole");
    pinner.unpin(&[iova(0)]).unwrap();
    assert_eq!((pinner.pinned(), pinner.held(), pinned()), (0, 0, 0));
    assert_eq!(pinner.account().used(), 0);
}

/// Pages pin the huge page that they lie in, until the last of them is released.
// rule L62
#[test]
#[ignore = "needs four huge pages: `cargo xtask test --only huge` sets them apart, as root"]
fn huge_pages_are_not_free_before_all_pins_in_them_are_gone() {
    let _alone = alone();
    let free = || {
        let free =
            std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
        free.unwrap().trim().parse::<u64>().unwrap()
    };
    let (before, set_apart) = (kernel_counts(), free());
    let memory = Memory::huge(4);
    let mut pinner = pinner(Uring::new().unwrap(), &memory);
    // Across the border of two of them, and alone in a third.
    pinner.pin_range(iova(500), 24 * 4096, Prot::RW).unwrap();
    pinner.pin(&[iova(3), iova(1500)], Prot::RW).unwrap();
    assert_eq!((pinner.pinned(), pinner.account().used()), (26, 26 * 4096));
    assert!(kernel_counts() - before >= 26);
    drop(memory);
    assert_eq!(set_apart - free(), 3, "pinned, mapped or not");
    pinner.unpin(&[iova(1500)]).unwrap();
    assert_eq!(set_apart - free(), 2);
    pinner.unpin_range(iova(500), 24 * 4096).unwrap();
    assert_eq!(set_apart - free(), 1, "one of its pages is pinned still");
    pinner.unpin(&[iova(3)]).unwrap();
    assert_eq!((free(), kernel_counts() - before), (set_apart, 0));
    assert_eq!(pinner.account().used(), 0);
}

#[test]
fn scattered_pages_are_pinned_beyond_one_ring() {
    let _alone = alone();
    let memory = Memory::new(40_000);
    let account = Arc::new(Account::with_limit("test", 1 << 30));
    let mut pinner = Pinner::new(Uring::with_slots(19_000).unwrap(), account.clone());
    pinner.add_window(memory.range(), memory.addr(), Prot::RW).unwrap();
    let before = kernel_counts();
    let scattered = (0..19_001).map(|n| iova(n * 2)).collect::<Vec<_>>();
    assert_eq!(pinner.pin(&scattered, Prot::RW), Err(PinError::Slots(19_000)));
    assert_eq!(kernel_counts() - before, 0);
    let mut scattered = scattered[1..].to_vec();
    pinner.pin(&scattered, Prot::RW).unwrap();
    assert_eq!((account.used(), kernel_counts() - before), (19_000 * 4096, 19_000));
    // In another order, and not all.
    scattered.sort_by_key(|iova| iova.0.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    pinner.unpin(&scattered[..10_000]).unwrap();
    assert_eq!(kernel_counts() - before, 9_000);
    pinner.pin(&scattered[..5_000], Prot::RW).unwrap();
    assert_eq!(kernel_counts() - before, 14_000);
    drop(pinner);
    assert_eq!((account.used(), kernel_counts() - before), (0, 0));
}

#[test]
fn a_pinner_goes_from_thread_to_thread_and_leaves_nothing_in_one_that_stays() {
    let _alone = alone();
    let memory = Memory::new(64);
    let before = kernel_counts();
    let pinned = || kernel_counts() - before;
    // More rings than a thread can register.
    let mut many: Vec<_> = (0..20).map(|_| pinner(Uring::new().unwrap(), &memory)).collect();
    let (here, there) = (channel(), channel::<()>());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for pinner in &mut many {
                pinner.pin(&[iova(0), iova(2)], Prot::RW).unwrap();
            }
            here.0.send(many).unwrap();
            // This thread keeps its registered rings.
            let _ = there.1.recv();
        });
        let mut many = here.1.recv().unwrap();
        assert_eq!(pinned(), 40);
        for pinner in &mut many {
            pinner.pin(&[iova(4)], Prot::RW).unwrap();
            pinner.unpin(&[iova(2)]).unwrap();
        }
        assert_eq!(pinned(), 40);
        drop(many);
        assert_eq!(pinned(), 0, "the other thread is still there");
        drop(there.0);
    });
}

#[test]
fn a_forked_child_neither_unpins_its_parents_pages_nor_pins_its_own_in_their_place() {
    let _alone = alone();
    let memory = Memory::new(4);
    let mut ours = pinner(Uring::new().unwrap(), &memory);
    let before = kernel_counts();
    ours.pin_range(iova(0), 3 * 4096, Prot::RW).unwrap();
    ours.pin(&[iova(3)], Prot::RW).unwrap();
    // SAFETY: the child leaves by `_exit`, and until then uses nothing that another thread may have
    // locked: glibc keeps its allocator usable across a fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // A panic must not unwind into the harness, which belongs to the parent.
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // Pinned pages are released by slots, the rest when the pinner is dropped.
            let _ = ours.unpin(&[iova(3)]);
            let refused = ours.pin(&[iova(3)], Prot::RW).is_err();
            drop(ours);
            // A pinner made in the child works.
            let mut own = pinner(Uring::new().unwrap(), &memory);
            refused && own.pin(&[iova(2)], Prot::RW).is_ok()
        }));
        // SAFETY: it ends the child and nothing else.
        unsafe { libc::_exit(if matches!(refused, Ok(true)) { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: it waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(kernel_counts() - before, 4, "the child has changed what its parent holds");
    assert_eq!(status, 0, "the child could use its parent's pinner, or not its own");
    ours.unpin(&[iova(3)]).unwrap();
    ours.pin(&[iova(3)], Prot::RW).unwrap();
    drop(ours);
    assert_eq!(kernel_counts(), before);
}
