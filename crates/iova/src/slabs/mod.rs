//! The default allocator: slabs of equal ranges per CPU, cut from one radix tree.

mod core;
mod cpu;
mod index;
mod key;
mod paths;
mod slab;
mod tree;

use ::core::fmt;
use alloc::{boxed::Box, vec::Vec};

use ringfence_sync::{
    CachePadded,
    atomic::{AtomicBool, AtomicU64, Ordering},
    cpu::CpuId,
    lock::SpinLock,
};

use self::core::Core;
use crate::{
    Align, AllocError, Allocator, Aperture, FreeError, FreeReason, Request, ReserveError, Stats,
    aperture::GranuleRequest,
};
use cpu::{Bin, Cpu, MAX_CLASSES, MAX_ZONES};
use index::Index;
use key::{Key, SLOT_BITS, SLOTS, slot_of};
use slab::{Freed, Handle, MOST_SHORTER};
use tree::{Tree, order_of};

/// The largest size class: 1 GiB, what the largest page of an IOMMU maps. Larger ranges are few and
/// live long; they come from the tree.
const LARGEST_CLASS: u64 = 1 << 30;
/// A slab is at most this part of the aperture, so that a few classes and CPUs do not use up a
/// small one: 1/1024 allows 32 ranges of 32 pages in a 32-bit aperture.
const SLAB_SHARE_BITS: u32 = 10;
/// And at most this part of the largest hole.
const HOLE_SHARE_BITS: u32 = 2;
/// How many slabs are kept although all free, for each CPU and class: 4096 ranges, so that queues
/// of some thousand requests drain and fill again without the tree.
const IDLE_SLABS: u32 = 128;
/// They are at most this part of the aperture.
const IDLE_SHARE_BITS: u32 = 6;

/// Where [`Slabs`] place ranges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Placement {
    /// Ranges of one size class side by side, from the top of the aperture down, each CPU in slabs
    /// of its own. The fastest.
    #[default]
    SizeAligned,
    /// Always the lowest place that meets the request, with nothing kept for later requests.
    Lowest,
    /// Always the highest place that meets the request, with nothing kept for later requests.
    Highest,
}

/// How [`Slabs`] are set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlabConfig {
    /// Where ranges go.
    pub placement: Placement,
    /// The DMA masks of the devices that use the allocator, besides the end of the aperture: the
    /// lowest three in it, others are ignored. Default: 2^32-1, as many devices have it and
    /// [`Preferred32`](crate::Preferred32) tries it first.
    ///
    /// They cut the aperture into zones with slabs of their own. Any other [limit](Request::limit)
    /// is respected too, but by a search of the tree for each request.
    pub limits: Vec<u64>,
    /// The largest slab, in bytes. Default: 1/1024 of the aperture. A slab of fewer than 32 ranges
    /// is refilled more often.
    pub largest_slab: Option<u64>,
    /// How many slabs are kept although all free, for each CPU, size class and zone; more go back,
    /// so that other sizes can use them. In a small aperture it is less: at most 1/64 of it.
    /// Default: 128.
    pub idle_slabs: u32,
}

impl Default for SlabConfig {
    fn default() -> Self {
        SlabConfig {
            placement: Placement::default(),
            limits: Vec::from([u32::MAX.into()]),
            largest_slab: None,
            idle_slabs: IDLE_SLABS,
        }
    }
}

/// The allocator to use: slabs per CPU in front of a radix tree of the free granules.
///
/// The *class* of a size is the power of two that it rounds up to, from one granule to 1 GiB. A
/// *slab* is 32 adjacent ranges of one class, with a word that says which of them are free. Each
/// CPU takes from its current slab of the class: one compare-and-exchange, the lowest free range
/// first, so that buffers mapped one after the other are neighbours, in one page of the translation
/// table. A free finds the slab by the address and sets its bit: another exchange, which always
/// detects a double free, a wrong size and a range that was never allocated. (A wrong free that
/// meets another free of the same range at the same time may be taken for that one, or for one of the range's
/// next owner, or make that one's fail.) Neither waits for another thread.
///
/// Slabs play the part of magazines: those with free ranges wait in a list of the CPU, or are remembered by it if
/// they have but one; those that are all free are kept up to a [bound](SlabConfig::idle_slabs), beyond which
/// they go back. They come from a tree of the free granules, under one lock, in which every operation takes
/// logarithmic time: no live set makes it slow. Memory is in proportion to the most that was
/// allocated at once, not to the aperture.
///
/// When nothing is left, the allocator takes back what all CPUs keep (rule [L11]), which takes a look at every
/// slab, and then even the unused tails of ranges that are shorter than their class: a naturally aligned
/// request ([`Align::Size`]) fails only if there is no aligned hole. The same holds for other alignments,
/// but when nothing aligned to its size is left, such a request examines every hole.
///
/// Ranges larger than 1 GiB, those that are not aligned to their size, and those whose tails have been
/// cut off, are kept apart, in a sorted map; so is what is short of a class of more than 2^17 granules.
///
/// ```
/// use ringfence_iova::{Allocator, Aperture, Request, Slabs};
/// use ringfence_sync::cpu::OneCpu;
///
/// let space = Slabs::new(Aperture::new(0, (1 << 48) - 1, 4096)?, OneCpu);
/// let first = space.alloc(&Request::new(4096))?;
/// let second = space.alloc(&Request::new(4096))?;
/// assert_eq!(second, first + 4096);
/// space.free(first, 4096)?;
/// assert!(space.free(first, 4096).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// `CHECKED` is always true, but in the benchmark that measures what the checks cost.
///
/// [L11]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l11
pub struct Slabs<C: CpuId, const CHECKED: bool = true> {
    aperture: Aperture,
    shift: u32,
    /// The last granule that any range may contain.
    top: u64,
    /// The last granule of each zone; that of the last zone, and of those that are not used, is
    /// `top`.
    zones: [u64; MAX_ZONES],
    last_zone: usize,
    /// As an exponent of two, in granules.
    largest_slab: u32,
    /// As an exponent of two, in granules: a hole so large allows tails again.
    roomy: u32,
    placement: Placement,
    idle_slabs: u32,
    /// In granules.
    idle_share: u64,
    /// One for each class: none if the placement does not use slabs.
    indexes: Box<[Index]>,
    cpus: Box<[CachePadded<Cpu>]>,
    cpu: C,
    /// Taken before the lock of a CPU's lists, if both are taken. On a cache line apart from what
    /// hot paths read.
    core: CachePadded<SpinLock<Core>>,
    /// Space was so short that tails were cut off: ranges take exactly what they need.
    tight: AtomicBool,
    failures: AtomicU64,
    rejected: AtomicU64,
    drains: AtomicU64,
}

impl<C: CpuId> Slabs<C> {
    /// An allocator for all of `aperture`, for the CPUs of `cpu`, all online.
    pub fn new(aperture: Aperture, cpu: C) -> Self {
        Self::with_config(aperture, cpu, SlabConfig::default())
    }

    /// As [`new`](Self::new), set up by `config`.
    pub fn with_config(aperture: Aperture, cpu: C, config: SlabConfig) -> Self {
        Self::make(aperture, cpu, config)
    }
}

impl<C: CpuId> Slabs<C, false> {
    /// One that believes each free, keeps no record of sizes and never cuts off tails.
    #[doc(hidden)]
    pub fn unchecked(aperture: Aperture, cpu: C, config: SlabConfig) -> Self {
        Self::make(aperture, cpu, config)
    }
}

impl<C: CpuId, const CHECKED: bool> Slabs<C, CHECKED> {
    fn make(aperture: Aperture, cpu: C, config: SlabConfig) -> Self {
        let granules = aperture.high - aperture.low;
        let largest_slab = match config.largest_slab {
            Some(bytes) => (bytes >> aperture.granule().trailing_zeros()).checked_ilog2(),
            // Granule 0 is never included: this keeps 32 bits from counting as 31.
            None => Some(granules.saturating_add(2).ilog2().saturating_sub(SLAB_SHARE_BITS)),
        };
        let shift = aperture.granule().trailing_zeros();
        let classes = match config.placement {
            Placement::SizeAligned => {
                let classes = (LARGEST_CLASS >> shift).checked_ilog2().unwrap_or(0) as usize + 1;
                classes.min(MAX_CLASSES)
            }
            Placement::Lowest | Placement::Highest => 0,
        };
        let region_of_last = |class: usize| aperture.high >> class.min(63) >> SLOT_BITS;
        let zones = zones(&aperture, &config.limits);
        let mut core = Core::new(Tree::new(aperture.high));
        core.tree.give(aperture.low, granules + 1);
        let (largest_slab, all) = (largest_slab.unwrap_or(0), core.tree.fit().ilog2());
        Slabs {
            aperture,
            shift,
            top: aperture.high,
            zones,
            last_zone: zones.iter().position(|last| *last == aperture.high).unwrap_or(0),
            largest_slab,
            roomy: largest_slab.saturating_add(6).min(all.saturating_sub(2)),
            placement: config.placement,
            idle_slabs: config.idle_slabs,
            idle_share: granules >> IDLE_SHARE_BITS,
            indexes: (0..classes).map(|class| Index::new(region_of_last(class))).collect(),
            cpus: (0..cpu.count().max(1)).map(|cpu| CachePadded::new(Cpu::new(cpu))).collect(),
            cpu,
            core: CachePadded::new(SpinLock::new(core)),
            tight: AtomicBool::new(false),
            failures: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            drains: AtomicU64::new(0),
        }
    }

    /// Gives back what `cpu` keeps (rule [L9]). It keeps nothing until [`online`](Self::online): a
    /// thread that still runs there works with the tree. No effect if there is no such CPU.
    ///
    /// [L9]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l9
    pub fn offline(&self, cpu: usize) {
        let Some(cpu) = self.cpus.get(cpu) else { return };
        let mut core = self.core.lock();
        let mut lists = cpu.lists.lock();
        cpu.set_online(false);
        for bin in Bin::all() {
            while let Some(slab) = cpu.strip(&mut lists, bin) {
                core.withdraw(&self.indexes, slab);
            }
        }
        core.withdraw_loose(&self.indexes);
    }

    /// Lets `cpu` keep slabs again.
    pub fn online(&self, cpu: usize) {
        if let Some(cpu) = self.cpus.get(cpu) {
            let _lists = cpu.lists.lock();
            cpu.set_online(true);
        }
    }

    /// Takes back what all CPUs keep.
    fn withdraw_all(&self, core: &mut Core) {
        // All CPUs are asked. Loose slabs first: one that is attached meanwhile is in a list then, and what is in
        // a list does not become loose before a range of it has been taken.
        if self.cpus.iter().fold(false, |any, cpu| cpu.has_loosened() | any) {
            core.withdraw_loose(&self.indexes);
        }
        for cpu in &self.cpus {
            let mut lists = cpu.lists.lock();
            for bin in Bin::all() {
                while let Some(slab) = cpu.strip(&mut lists, bin) {
                    core.withdraw(&self.indexes, slab);
                }
            }
        }
    }

    /// The zone that a range with this last granule is in.
    #[inline]
    fn zone_of(&self, last: u64) -> usize {
        // Without a branch: the last zone has no end to compare with.
        self.zones[..MAX_ZONES - 1].iter().map(|end| usize::from(last > *end)).sum()
    }

    /// The bin of a slab.
    fn bin_of(&self, key: Key) -> Bin {
        let last = key.first() | ((1 << (key.class() + SLOT_BITS)) - 1);
        // A slab may extend beyond the top.
        Bin::new(self.zone_of(last.min(self.top)), key.class())
    }

    fn why_not_free(&self, core: &Core, iova: u64, size: u64) -> FreeReason {
        if self.aperture.range_of(iova, size).is_none() {
            // Outside, or no multiple of the granule.
            let inside = (self.aperture.first()..=self.aperture.last()).contains(&iova);
            let taken = inside && self.holder(core, self.aperture.number(iova)).is_some();
            return if taken { FreeReason::WrongRange } else { FreeReason::NotAllocated };
        }
        let number = self.aperture.number(iova);
        match self.holder(core, number) {
            Some(_) => FreeReason::WrongRange,
            None if core.is_reserved(number) => FreeReason::Reserved,
            // Taken in the tree, but by no range: a slab keeps it free.
            None if core.tree.first_taken(number, number).is_some() => FreeReason::AlreadyFree,
            None => FreeReason::NotAllocated,
        }
    }

    /// Whether an allocated range contains a granule.
    fn holder(&self, core: &Core, number: u64) -> Option<()> {
        let in_slab = self.indexes.iter().zip(0u32..).any(|(index, class)| {
            let (key, slot) = (Key::of(number, class), slot_of(number, class));
            index.with(key).is_some_and(|slab| slab.owned() & !slab.free() & 1 << slot != 0)
        });
        (in_slab || core.exact_holds(number)).then_some(())
    }
}

/// The last granule of each zone.
fn zones(aperture: &Aperture, limits: &[u64]) -> [u64; MAX_ZONES] {
    let mut ends: Vec<u64> = limits
        .iter()
        .filter_map(|limit| aperture.last_whole(*limit))
        .filter(|last| (aperture.low..aperture.high).contains(last))
        .collect();
    ends.sort_unstable();
    ends.dedup();
    ends.truncate(MAX_ZONES - 1);
    ::core::array::from_fn(|zone| ends.get(zone).copied().unwrap_or(aperture.high))
}

impl<C: CpuId, const CHECKED: bool> Allocator for Slabs<C, CHECKED> {
    #[inline]
    fn alloc(&self, request: &Request) -> Result<u64, AllocError> {
        match self.alloc_hot(request) {
            Some(iova) => Ok(iova),
            None => self.alloc_cold(request),
        }
    }

    #[inline]
    fn free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        let mut unchecked = 0;
        match self.free_hot(iova, size, &mut unchecked) {
            true => Ok(()),
            false => self.free_cold(iova, size, unchecked),
        }
    }

    fn reserve(&self, first: u64, last: u64) -> Result<(), ReserveError> {
        let Some((low, high)) = self.aperture.clip(first, last)? else { return Ok(()) };
        let mut core = self.core.lock();
        let parts = core.unreserved(low, high);
        let taken =
            |core: &Core| parts.iter().find_map(|&(low, high)| core.tree.first_taken(low, high));
        if taken(&core).is_some() {
            // The range in the way may only be kept in a slab.
            self.withdraw_all(&mut core);
            self.trim(&mut core);
        }
        if let Some(taken) = taken(&core) {
            let taken = self.aperture.start_of(taken).max(first);
            return Err(ReserveError::InUse { first, last, taken });
        }
        for (low, high) in parts {
            core.tree.take(low, high - low + 1);
        }
        core.note_reserved(low, high);
        Ok(())
    }

    fn check_free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        let core = self.core.lock();
        let fails = |reason| Err(FreeError { iova, size, reason });
        let Some((number, count)) = self.aperture.range_of(iova, size) else {
            return fails(self.why_not_free(&core, iova, size));
        };
        if core.exact.get(&number) == Some(&(number + (count - 1))) {
            return Ok(());
        }
        let class = order_of(count);
        let index = self.indexes.get(class as usize);
        let slab = index.and_then(|index| index.with(Key::of(number, class)));
        let is_it = slab.is_some_and(|slab| {
            let slot = slot_of(number, class);
            number.trailing_zeros() >= class
                && slab.owned() & !slab.free() & 1 << slot != 0
                && slab.size(slot) == count
        });
        if is_it { Ok(()) } else { fails(self.why_not_free(&core, iova, size)) }
    }

    fn granule(&self) -> u64 {
        self.aperture.granule()
    }

    fn stats(&self) -> Stats {
        let core = self.core.lock();
        let mut stats = Stats {
            failures: self.failures.load(Ordering::Relaxed),
            rejected_frees: self.rejected.load(Ordering::Relaxed),
            drains: self.drains.load(Ordering::Relaxed),
            searches: core.searches,
            ..Stats::default()
        };
        let (mut live, mut granules) = (core.exact.len() as u64, 0u64);
        for slab in core.slabs() {
            let (free, owned) = (slab.free(), slab.owned());
            stats.cached_ranges += u64::from(free.count_ones());
            stats.depot_magazines += u64::from(free == owned);
            granules += u64::from(free.count_ones()) << slab.class();
            for slot in (0..SLOTS).filter(|slot| owned & !free & 1 << slot != 0) {
                live += 1;
                granules += slab.size(slot);
            }
        }
        granules += core.exact.iter().map(|(first, last)| last - first + 1).sum::<u64>();
        stats.live_ranges = live + stats.cached_ranges;
        stats.live_bytes = granules.saturating_mul(self.granule());
        stats.allocs = self.cpus.iter().map(|cpu| cpu.allocs.load(Ordering::Relaxed)).sum();
        // Computed: counting would slow down every free.
        stats.frees = stats.allocs.saturating_sub(live);
        // Ranges that did not come from the tree came from a slab of a CPU.
        stats.cache_hits = stats.allocs.saturating_sub(core.found);
        stats
    }

    fn drain(&self) {
        self.withdraw_all(&mut self.core.lock());
    }
}

impl<C: CpuId, const CHECKED: bool> fmt::Debug for Slabs<C, CHECKED> {
    ringfence_sync::shows!(
        Slabs as it, aperture: it.aperture, placement: it.placement, stats: it.stats()
    );
}

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;
