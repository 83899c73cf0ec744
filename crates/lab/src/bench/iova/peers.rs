//! What is measured: the allocators of this workspace, and peers from elsewhere.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use ringfence_iova::{Allocator, Aperture, Placement, Request, SlabConfig, Slabs};
use ringfence_sync::{CachePadded, cpu::OsCpu};
use vm_allocator::{AddressAllocator, AllocPolicy, RangeInclusive};

use super::GRANULE;
use crate::{allocators::AllocatorKind, list::named, ranges::Ranges};

/// What the benchmark needs of an allocator. All numbers are granules.
pub(super) trait Subject: Sync {
    /// A range aligned to its size, rounded up to a power of two: its first granule.
    fn take(&self, granules: u64) -> Option<u64>;
    /// Frees it; false if that was refused.
    fn give(&self, first: u64, granules: u64) -> bool;
    /// Takes exactly this range; false if it is not free, or the implementation cannot do this.
    fn place(&self, _first: u64, _granules: u64) -> bool {
        false
    }
}

impl Subject for dyn Allocator + '_ {
    #[inline]
    fn take(&self, granules: u64) -> Option<u64> {
        self.alloc(&Request::new(granules * GRANULE)).ok().map(|iova| iova / GRANULE)
    }

    #[inline]
    fn give(&self, first: u64, granules: u64) -> bool {
        self.free(first * GRANULE, granules * GRANULE).is_ok()
    }
}

named! {
    /// An implementation by name: ours first, then the other allocators of this workspace.
    Implementation, "unknown allocator {:?}: there are {}":
    /// Ours, the base of ratios.
    Ringfence = "ringfence",
    /// Ours without its checks: each free is believed, and no size is recorded.
    Unchecked = "unchecked",
    /// The red-black tree alone.
    RbTree = "rbtree",
    /// The bitmap, next fit.
    Bitmap = "bitmap",
    /// The tree with Linux's magazines in front.
    Magazines = "magazines",
    /// rust-vmm's interval tree: every VMM's allocator of MMIO ranges. First match; a mutex around
    /// it.
    VmAllocator = "vm-allocator",
    /// What one writes in an afternoon: a `BTreeMap` of the free ranges, first fit from the top,
    /// neighbours merged; a mutex around it.
    BTreeMap = "btreemap",
    /// No allocator: an atomic operation on a cache line of the thread's own for an alloc, and one
    /// for a free. Its time is the pattern's own cost, and its scaling is the best possible on this
    /// machine.
    Control = "control",
}

impl Implementation {
    /// Whether it can be filled range by range at given places, since its search is too slow to
    /// fill it by requests.
    pub(super) fn is_placed(self) -> bool {
        matches!(self, Implementation::VmAllocator | Implementation::BTreeMap)
    }

    /// A fresh one over granules 1 to 2^bits / 4096 - 1.
    pub(super) fn make(self, aperture: Aperture) -> Contender {
        let (first, last) = (aperture.first() / GRANULE, aperture.last() / GRANULE);
        let own =
            |kind: AllocatorKind| Contender::Allocator(kind.make(aperture, Placement::default()));
        match self {
            Implementation::Ringfence => own(AllocatorKind::Ringfence),
            Implementation::Unchecked => Contender::Allocator(Box::new(Slabs::unchecked(
                aperture,
                OsCpu::new(),
                SlabConfig::default(),
            ))),
            Implementation::RbTree => own(AllocatorKind::RbTree),
            Implementation::Bitmap => own(AllocatorKind::Bitmap),
            Implementation::Magazines => own(AllocatorKind::Magazines),
            Implementation::VmAllocator => Contender::VmAllocator(VmAllocator::new(first, last)),
            Implementation::BTreeMap => Contender::FreeRanges(FreeRanges::new(first, last)),
            Implementation::Control => Contender::Control(Control),
        }
    }
}

/// An implementation that is measured. Patterns run over the type within, so that none pays for
/// another's dispatch; allocators of this workspace are called through their trait, as a DMA device
/// calls them.
pub(super) enum Contender {
    Allocator(Box<dyn Allocator>),
    VmAllocator(VmAllocator),
    FreeRanges(FreeRanges),
    Control(Control),
}

/// Calls `$body` with `$subject` as what the contender holds.
macro_rules! with_subject {
    ($contender:expr, $subject:ident => $body:expr) => {
        match $contender {
            Contender::Allocator($subject) => {
                let $subject: &dyn ringfence_iova::Allocator = &**$subject;
                $body
            }
            Contender::VmAllocator($subject) => $body,
            Contender::FreeRanges($subject) => $body,
            Contender::Control($subject) => $body,
        }
    };
}
pub(super) use with_subject;

impl Contender {
    /// Whether it really allocates.
    pub(super) fn allocates(&self) -> bool {
        !matches!(self, Contender::Control(_))
    }
}

/// rust-vmm's `AddressAllocator`, in bytes as its users have it.
pub(super) struct VmAllocator(Mutex<AddressAllocator>);

impl VmAllocator {
    fn new(first: u64, last: u64) -> VmAllocator {
        let size = (last - first + 1) * GRANULE;
        let inner = AddressAllocator::new(first * GRANULE, size);
        VmAllocator(Mutex::new(inner.expect("an aperture is neither empty nor wraps")))
    }
}

impl Subject for VmAllocator {
    fn take(&self, granules: u64) -> Option<u64> {
        let policy = AllocPolicy::FirstMatch;
        let range = self.0.lock().allocate(granules * GRANULE, align(granules) * GRANULE, policy);
        range.ok().map(|range| range.start() / GRANULE)
    }

    fn give(&self, first: u64, granules: u64) -> bool {
        let range = RangeInclusive::new(first * GRANULE, (first + granules) * GRANULE - 1);
        range.is_ok_and(|range| self.0.lock().free(&range).is_ok())
    }

    fn place(&self, first: u64, granules: u64) -> bool {
        let policy = AllocPolicy::ExactMatch(first * GRANULE);
        self.0.lock().allocate(granules * GRANULE, align(granules) * GRANULE, policy).is_ok()
    }
}

/// The free granules.
pub(super) struct FreeRanges(Mutex<Ranges>);

impl FreeRanges {
    fn new(first: u64, last: u64) -> FreeRanges {
        FreeRanges(Mutex::new(Ranges([(first, last)].into())))
    }
}

impl Subject for FreeRanges {
    fn take(&self, granules: u64) -> Option<u64> {
        let mut free = self.0.lock();
        let mask = align(granules) - 1;
        let (place, hole) = free.0.iter().rev().find_map(|(&first, &last)| {
            let place = (last + 1).checked_sub(granules)? & !mask;
            (place >= first).then_some((place, (first, last)))
        })?;
        free.cut(hole, (place, place + granules - 1));
        Some(place)
    }

    fn give(&self, first: u64, granules: u64) -> bool {
        self.0.lock().insert(first, first + granules - 1).is_some()
    }

    fn place(&self, place: u64, granules: u64) -> bool {
        self.0.lock().remove(place, place + granules - 1)
    }
}

thread_local! {
    /// A cache line a thread, counting what it has taken.
    static LINE: CachePadded<AtomicU64> = const { CachePadded::new(AtomicU64::new(0)) };
}

/// Counts on a line of the thread's own.
pub(super) struct Control;

impl Subject for Control {
    #[inline]
    fn take(&self, _granules: u64) -> Option<u64> {
        // Ordering: what an allocator at least does, for the price of it.
        Some(LINE.with(|line| line.fetch_add(1, Ordering::AcqRel)))
    }

    #[inline]
    fn give(&self, _first: u64, _granules: u64) -> bool {
        // Ordering: see `take`.
        LINE.with(|line| line.fetch_sub(1, Ordering::AcqRel));
        true
    }
}

/// What a range of so many granules is aligned to.
pub(super) fn align(granules: u64) -> u64 {
    granules.next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free_ranges(subject: &FreeRanges) -> Vec<(u64, u64)> {
        subject.0.lock().0.iter().map(|(first, last)| (*first, *last)).collect()
    }

    #[test]
    fn free_ranges_are_taken_from_the_top_and_merge_again() {
        let subject = FreeRanges::new(1, 63);
        assert_eq!(subject.take(16), Some(48));
        assert_eq!(subject.take(3), Some(44));
        assert_eq!(free_ranges(&subject), [(1, 43), (47, 47)]);
        assert_eq!(subject.take(1), Some(47));
        assert!(subject.give(48, 16));
        assert!(!subject.give(48, 16), "freed twice");
        assert!(subject.give(44, 3));
        assert!(subject.give(47, 1));
        assert_eq!(free_ranges(&subject), [(1, 63)]);
        assert_eq!(subject.take(64), None);
        assert_eq!(subject.take(32), Some(32));
        assert_eq!(subject.take(32), None, "granule 0 is none of it");
    }

    #[test]
    fn every_implementation_hands_out_aligned_ranges_within_its_aperture() {
        let aperture = Aperture::new(0, (1 << 32) - 1, GRANULE).unwrap();
        for one in Implementation::ALL {
            assert_eq!(one.name().parse(), Ok(one));
            let contender = one.make(aperture);
            if !contender.allocates() {
                continue;
            }
            with_subject!(&contender, subject => {
                for granules in [1, 3, 16, 500] {
                    let first = subject.take(granules).unwrap();
                    assert_eq!(first % align(granules), 0, "{one}");
                    assert!(first > 0 && first + granules <= 1 << 20, "{one}");
                    assert!(subject.give(first, granules), "{one}");
                }
            });
        }
        assert!("slab".parse::<Implementation>().unwrap_err().contains("vm-allocator"));
    }

    #[test]
    fn peers_with_slow_searches_are_filled_place_by_place() {
        for one in Implementation::ALL {
            let contender = one.make(Aperture::new(0, 0xffff, GRANULE).unwrap());
            with_subject!(&contender, subject => {
                assert_eq!(subject.place(4, 4), one.is_placed(), "{one}");
                if one.is_placed() {
                    assert!(!subject.place(4, 4), "it is taken");
                    assert!(!subject.place(12, 5), "it ends beyond");
                    assert!(subject.give(4, 4));
                    assert!(subject.place(8, 8));
                }
            });
        }
    }
}
