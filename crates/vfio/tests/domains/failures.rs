//! After a failure, nothing is left.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use ringfence_dma::{Device, Direction, DmaBuffer, DmaConfig, Policy};
use ringfence_iommu::{Domain, Error, HostAddr, Prot};
use ringfence_iova::{Aperture, Slabs};
use ringfence_sync::cpu::OsCpu;
use ringfence_vfio::{
    DirtyMap, Tuning, Type1,
    kernel::{
        Bitmap, Extension, KernelResult, Locked, MapFlags, Type1Info, Type1Kernel, UnmapFlags,
    },
};
use ringfence_vfio_testing::fake::Step;
use rustix::io::Errno;

use crate::common::{GIB, Kernel, MERGE, PAGE, kernel, map, range, to, type1, unmap};

const CHUNKED: Tuning = Tuning { merge: false, chunk: 4 * PAGE };

#[test]
fn whatever_fails_nothing_is_left_of_a_map() {
    // rule L33, rule L53
    for step in [Step::Record, Step::Pin, Step::Table, Step::Map] {
        for nth in 1.. {
            let (fake, owner) = kernel(1000);
            let domain = type1(&fake, CHUNKED);
            map(&domain, range(100, 1), 0).unwrap();
            let before = (fake.mappings(), fake.pinned(), owner.used(), domain.usage());
            fake.fail(step, nth);
            let made = map(&domain, range(0, 16), PAGE);
            if fake.heal() {
                assert_eq!(made, Ok(()), "{step:?}: there are {} such steps", nth - 1);
                assert!(nth > 1);
                break;
            }
            assert!(made.is_err(), "{step:?} {nth}");
            let after = (fake.mappings(), fake.pinned(), owner.used(), domain.usage());
            assert_eq!(before, after, "{step:?} {nth}");
            assert_eq!(domain.iova_to_phys(range(0, 1).first()), None);
            map(&domain, range(0, 16), PAGE).unwrap();
        }
    }
}

#[test]
fn a_batch_is_all_or_nothing() {
    let (fake, owner) = kernel(6);
    let domain = type1(&fake, Tuning::default());
    let part = |page, target| to(range(page, 2), HostAddr(target * PAGE), Prot::RW);
    let batch = [part(0, 0), part(2, 2), part(8, 20), part(16, 40)];
    assert!(domain.map_batch(&batch).is_err());
    assert_eq!((fake.mappings(), owner.used()), (0, 0));
    owner.set_limit(8);
    domain.map_batch(&batch).unwrap();
    assert_eq!((fake.mappings(), owner.used()), (3, 8));
    assert!(matches!(domain.map_batch(&batch[..1]), Err(Error::Exists { .. })));
}

#[test]
fn what_fails_at_the_sync_is_reported_there_and_is_not_mapped() {
    // rule L34
    let (fake, _) = kernel(3);
    let domain = type1(&fake, MERGE);
    for (page, target) in [(0, 0), (1, 1), (4, 10), (5, 11)] {
        domain.map(to(range(page, 1), HostAddr(target * PAGE), Prot::RW)).unwrap();
    }
    let result = domain.iotlb_sync_map(range(0, 8));
    let limit = 3 * PAGE;
    assert!(matches!(result, Err(Error::Full { limit: held, .. }) if held == limit), "{result:?}");
    assert_eq!(fake.mappings(), 1, "one run had its pages");
    let there = |page| domain.iova_to_phys(range(page, 1).first()).is_some();
    assert_eq!([0, 1, 4, 5].map(there), [true, true, false, false]);
    // The caller gets rid of everything by unmapping everything.
    assert_eq!(unmap(&domain, range(0, 8)), Ok(2 * u128::from(PAGE)));
    assert_eq!(domain.iotlb_sync_map(range(0, 8)).map(drop), Ok(()), "reported once");
}

/// A kernel whose UNMAP misbehaves on demand.
#[derive(Clone)]
struct Odd(Arc<Parts>);

struct Parts {
    kernel: Kernel,
    /// The nth UNMAP from now on, or GET_BITMAP, fails; 0: none.
    fails: AtomicU64,
    /// Every UNMAP fails.
    sticks: AtomicBool,
    /// UNMAP removes only the first page's mapping at a time.
    slow: AtomicBool,
    /// UNMAP returns one byte, whatever it does.
    wrong_count: AtomicBool,
    locked: Option<Locked>,
}

impl std::ops::Deref for Odd {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl Odd {
    fn new(locked: Option<Locked>, pages: u64) -> Odd {
        let (fails, sticks, slow, wrong_count) = Default::default();
        let kernel = kernel(pages).0;
        Odd(Arc::new(Parts { kernel, fails, sticks, slow, wrong_count, locked }))
    }

    fn fault(&self) -> KernelResult<()> {
        let relaxed = Ordering::Relaxed;
        let left = self.fails.fetch_update(relaxed, relaxed, |left| left.checked_sub(1));
        if left == Ok(1) { Err(Errno::FAULT) } else { Ok(()) }
    }
}

impl Type1Kernel for Odd {
    fn info(&self) -> KernelResult<Type1Info> {
        self.kernel.info()
    }
    fn has(&self, extension: Extension) -> bool {
        extension == Extension::UnmapAll
    }
    unsafe fn map(&self, flags: MapFlags, iova: u64, vaddr: u64, size: u64) -> KernelResult<()> {
        // SAFETY: the caller's promise.
        unsafe { self.kernel.map(flags, iova, vaddr, size) }
    }
    fn unmap(
        &self,
        flags: UnmapFlags,
        iova: u64,
        size: u64,
        dirty: Option<Bitmap<'_>>,
    ) -> KernelResult<u64> {
        self.fault()?;
        if self.sticks.load(Ordering::Relaxed) {
            return Err(Errno::FAULT);
        }
        if self.slow.load(Ordering::Relaxed) {
            let all = flags.contains(UnmapFlags::ALL);
            let (flags, size) = if all { (UnmapFlags::empty(), 64 * PAGE) } else { (flags, size) };
            for page in 0..size / PAGE {
                let mut bit = [0];
                let bitmap = dirty.is_some().then_some(Bitmap { page: PAGE, words: &mut bit });
                let removed = self.kernel.unmap(flags, iova + page * PAGE, PAGE, bitmap)?;
                if removed > 0 {
                    if let Some(dirty) = dirty {
                        dirty.words[0] |= bit[0] << page;
                    }
                    return Ok(removed);
                }
            }
            return Ok(0);
        }
        let removed = self.kernel.unmap(flags, iova, size, dirty)?;
        Ok(if self.wrong_count.load(Ordering::Relaxed) { 1 } else { removed })
    }
    fn track_dirty(&self, on: bool) -> KernelResult<()> {
        self.kernel.track_dirty(on)
    }
    fn dirty(&self, iova: u64, size: u64, dirty: Bitmap<'_>) -> KernelResult<()> {
        self.fault()?;
        self.kernel.dirty(iova, size, dirty)
    }
    fn locked(&self) -> Option<Locked> {
        self.locked
    }
}

fn over(odd: &Odd, tuning: Tuning) -> Type1<Odd> {
    Type1::new(odd.clone(), tuning).unwrap()
}

#[test]
fn an_unmap_that_fails_keeps_what_it_did_not_remove() {
    let odd = Odd::new(None, 1000);
    let domain = over(&odd, CHUNKED);
    for first in [0, 4, 8] {
        map(&domain, range(first, 4), first * PAGE).unwrap();
    }
    odd.fails.store(2, Ordering::Relaxed);
    let failed = unmap(&domain, range(0, 12));
    assert!(matches!(failed, Err(Error::Kernel { errno: 14, .. })), "{failed:?}");
    assert_eq!((odd.kernel.mappings(), domain.usage().entries), (2, 2));
    let there = |page| domain.iova_to_phys(range(page, 1).first()).is_some();
    assert_eq!([0, 4, 8].map(there), [false, true, true]);
    let taken = map(&domain, range(4, 1), 0);
    assert!(matches!(taken, Err(Error::Exists { .. })), "its address is not given away: {taken:?}");
    assert_eq!(unmap(&domain, range(0, 12)), Ok(8 * u128::from(PAGE)));
    assert_eq!(odd.kernel.mappings(), 0);

    // Half of a mapping of two entries is removed, and then the other half.
    map(&domain, range(0, 8), 0).unwrap();
    odd.fails.store(2, Ordering::Relaxed);
    assert!(unmap(&domain, range(0, 8)).is_err());
    assert_eq!((odd.kernel.mappings(), domain.usage().mappings), (1, 1));
    assert_eq!(unmap(&domain, range(0, 8)), Ok(8 * u128::from(PAGE)));
    assert_eq!((odd.kernel.mappings(), domain.usage().entries), (0, 0));
    assert_eq!(domain.usage().mismatches, 1, "half was gone already");
}

#[test]
fn a_map_that_cannot_be_undone_keeps_its_address() {
    let odd = Odd::new(None, 6);
    let domain = over(&odd, CHUNKED);
    odd.fails.store(1, Ordering::Relaxed);
    let failed = Err(Error::NoMemory { operation: "map", range: range(0, 8) });
    assert_eq!(map(&domain, range(0, 8), 0), failed);
    assert!(matches!(map(&domain, range(4, 1), 0), Err(Error::Exists { .. })));
    unmap(&domain, range(0, 8)).unwrap();
    assert_eq!(odd.kernel.mappings(), 0);
    map(&domain, range(4, 1), 0).unwrap();
}

#[test]
fn a_map_that_cannot_be_undone_fails_at_its_sync_so_that_its_caller_unmaps_it() {
    // rule L33, rule L34
    let odd = Odd::new(None, 6);
    let domain = over(&odd, CHUNKED);
    odd.fails.store(1, Ordering::Relaxed);
    domain.map(to(range(0, 8), HostAddr(0), Prot::RW)).unwrap();
    let failed = Err(Error::NoMemory { operation: "map", range: range(0, 8) });
    for _ in 0..2 {
        assert_eq!(domain.iotlb_sync_map(range(0, 8)), failed, "some of it is there");
    }
    domain.iotlb_sync_map(range(8, 1)).unwrap();
    unmap(&domain, range(0, 8)).unwrap();
    assert_eq!((odd.kernel.mappings(), domain.iotlb_sync_map(range(0, 8)).map(drop)), (0, Ok(())));
    map(&domain, range(0, 6), 0).unwrap();
}

/// A length of pretended memory in bytes.
struct Pretended(u64);

// SAFETY: there is no memory that could be used otherwise.
unsafe impl DmaBuffer<HostAddr> for Pretended {
    fn for_each_segment(&self, each: &mut dyn FnMut(HostAddr, u64)) {
        each(HostAddr(PAGE), self.0);
    }
}

#[test]
fn a_buffer_that_the_device_may_reach_in_part_is_not_given_back() {
    // rule L29, rule L33
    // The undo within the domain fails, and then that of the DMA API too, or not.
    for undone in [true, false] {
        let odd = Odd::new(None, 6);
        let domain = Arc::new(over(&odd, CHUNKED));
        let allocator = Slabs::new(Aperture::new(0, (1 << 39) - 1, PAGE).unwrap(), OsCpu::new());
        let config = DmaConfig::new(Policy::Strict);
        let device = Device::builder(Arc::clone(&domain))
            .allocator(allocator)
            .config(config)
            .build()
            .unwrap();
        odd.fails.store(1, Ordering::Relaxed);
        odd.sticks.store(!undone, Ordering::Relaxed);
        let failed = device.map(Pretended(8 * PAGE), Direction::ToDevice).unwrap_err();
        assert_eq!(failed.into_buffer().is_some(), undone);
        assert_eq!(odd.kernel.mappings(), usize::from(!undone));
        odd.sticks.store(false, Ordering::Relaxed);
    }
}

#[test]
fn a_short_unmap_is_tried_again() {
    // rule L55
    let odd = Odd::new(None, 1000);
    let domain = over(&odd, Tuning::default());
    let whole = range(0, 4);
    let fill = || (0..4).for_each(|page| map(&domain, range(page, 1), page * PAGE).unwrap());
    fill();
    odd.slow.store(true, Ordering::Relaxed);
    assert_eq!(unmap(&domain, whole), Ok(whole.len()));
    assert_eq!((odd.kernel.mappings(), domain.usage().mismatches), (0, 0));
    fill();
    assert_eq!(domain.unmap_all(), Ok(whole.len()));
    assert_eq!((odd.kernel.mappings(), domain.usage().mismatches), (0, 0));
    odd.slow.store(false, Ordering::Relaxed);

    // Another caller has removed a page: all is gone, and the result is what was mapped here.
    fill();
    odd.kernel.unmap(UnmapFlags::empty(), 2 * PAGE, PAGE, None).unwrap();
    assert_eq!(unmap(&domain, whole), Ok(whole.len()));
    let usage = domain.usage();
    assert_eq!((usage.mappings, usage.entries, usage.mismatches), (0, 0, 1));

    // A kernel that returns one byte for ever is not asked for ever.
    fill();
    odd.wrong_count.store(true, Ordering::Relaxed);
    let _ = unmap(&domain, whole);
    odd.wrong_count.store(false, Ordering::Relaxed);
    unmap(&domain, whole).unwrap();
    assert_eq!(odd.kernel.mappings(), 0);
}

#[test]
fn an_exceeded_limit_is_named_with_the_excess() {
    // rule L53
    let odd = Odd::new(Some(Locked { used: 2 * PAGE, limit: 3 * PAGE }), 1);
    let result = map(&over(&odd, MERGE), range(0, 2), 0);
    let error =
        Error::Full { what: "bytes of locked memory (ulimit -l)", used: 2 * PAGE, limit: 3 * PAGE };
    assert_eq!(result, Err(error));
    assert!(error.to_string().contains("8192 of 12288"), "{error}");
    // With locked memory to spare, the error is not the limit's.
    let odd = Odd::new(Some(Locked { used: 0, limit: GIB }), 1);
    let failed = Err(Error::NoMemory { operation: "map", range: range(0, 2) });
    assert_eq!(map(&over(&odd, MERGE), range(0, 2), 0), failed);
}

#[test]
fn everything_goes_at_one_go_where_the_kernel_can() {
    // rule L56
    let (fake, owner) = kernel(1000);
    let domain = type1(&fake, CHUNKED);
    map(&domain, range(0, 9), 0).unwrap();
    map(&domain, range(20, 1), 0).unwrap();
    assert_eq!(domain.unmap_all(), Ok(10 * u128::from(PAGE)));
    assert_eq!((fake.mappings(), owner.used(), domain.usage()), (0, 0, Default::default()));
    let odd = Odd::new(None, 1000);
    let domain = over(&odd, CHUNKED);
    map(&domain, range(0, 9), 0).unwrap();
    assert_eq!(domain.unmap_all(), Ok(9 * u128::from(PAGE)));
    assert_eq!(odd.kernel.mappings(), 0);
}

#[test]
fn threads_that_map_and_unmap_at_once_keep_what_is_theirs() {
    let (fake, owner) = kernel(1 << 20);
    for tuning in [CHUNKED, Tuning { merge: true, chunk: 4 * PAGE }] {
        let domain = type1(&fake, tuning);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let domain = &domain;
                scope.spawn(move || {
                    for round in 0..200 {
                        // Adjacent, page by page.
                        let place = range(round % 8 * 40 + thread * 10, 1 + round % 9);
                        map(domain, place, round * PAGE).unwrap();
                        assert!(domain.iova_to_phys(place.last()).is_some());
                        assert_eq!(unmap(domain, place), Ok(place.len()));
                        assert!(domain.iova_to_phys(place.last()).is_none());
                    }
                });
            }
        });
        assert_eq!((fake.mappings(), owner.used(), domain.usage()), (0, 0, Default::default()));
    }
}

#[test]
fn bits_that_were_read_before_a_failure_are_kept() {
    // rule L63
    let odd = Odd::new(None, 1000);
    let domain = over(&odd, CHUNKED);
    let whole = range(0, 12);
    let refill = || map(&domain, whole, 0).unwrap();
    refill();
    domain.start_dirty().unwrap();
    let mut dirty = DirtyMap::new(whole, PAGE).unwrap();
    odd.fails.store(3, Ordering::Relaxed);
    assert!(domain.read_dirty(whole, &mut dirty).is_err());
    assert_eq!(dirty.count(), 8, "hardware without dirty tracking may have written anywhere");
    dirty.clear();
    odd.fails.store(2, Ordering::Relaxed);
    assert!(domain.unmap_dirty(whole, &mut dirty).is_err());
    assert_eq!((dirty.count(), odd.kernel.mappings()), (4, 2));
    assert_eq!(domain.unmap_dirty(whole, &mut dirty), Ok(whole.len()));
    assert_eq!((dirty.count(), odd.kernel.mappings()), (12, 0));
}

#[test]
fn bits_of_a_piece_that_is_removed_in_part_are_kept() {
    // rule L63
    let odd = Odd::new(None, 1000);
    let domain = over(&odd, CHUNKED);
    let whole = range(0, 4);
    (0..4).for_each(|page| map(&domain, range(page, 1), page * PAGE).unwrap());
    domain.start_dirty().unwrap();
    let mut dirty = DirtyMap::new(whole, PAGE).unwrap();
    odd.slow.store(true, Ordering::Relaxed);
    odd.fails.store(3, Ordering::Relaxed);
    assert!(domain.unmap_dirty(whole, &mut dirty).is_err());
    assert_eq!((dirty.count(), odd.kernel.mappings()), (2, 2));
    assert_eq!(domain.unmap_dirty(whole, &mut dirty), Ok(whole.len()));
    assert_eq!((dirty.count(), odd.kernel.mappings()), (4, 0));
}
