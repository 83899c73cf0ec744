//! One run: an aged allocator, streams that take from it, and a device that walks what they hold.
//!
//! A stream is a ring of buffers. The device moves a burst of one buffer, page after page in order,
//! then a burst of another stream's. A buffer that was used often enough is unmapped (its entries
//! are invalidated: strict) and freed, some at a time, as completions come; when half of the ring
//! is empty it is filled again, as drivers do. Between the two other streams allocate and free, so
//! an allocator that does not keep an order loses it here as it does in a machine.
//!
//! Before that the allocator is aged: ranges of mixed sizes come and go on all CPUs, and some stay.
//! Every placement sees the same random numbers.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
};

use anyhow::{Context, Result, anyhow};
use ringfence_iommu::{
    Iova, Prot, Range,
    table::{Limits, Table as IommuTable},
};
use ringfence_iova::{Align, Allocator, Aperture, Request, Ring};
use ringfence_sync::cpu::FixedCpu;
use serde::Serialize;

use super::{
    GRANULE, Options,
    model::{Caches, Counts, PageSize, pages, tables},
};
use crate::{
    allocators::{AllocatorKind, PlacementName},
    random::SplitMix,
};

/// CPUs of the modelled machine: streams are served by them in turn, so that per-CPU caches are
/// used as they would be, and the addresses do not depend on where this process runs.
const CPUS: usize = 4;
/// Ranges that are allocated at any time while the allocator ages, of 1 to 64 pages; half of them
/// stay. (Tests check no figure that depends on it, and age less.)
const AGED_RANGES: usize = if cfg!(test) { 256 } else { 4096 };
/// Times that ageing frees a range and allocates another.
const AGED_STEPS: usize = if cfg!(test) { 1000 } else { 40_000 };
/// The least times that a run moves all that is in flight.
pub(super) const LEAST_LAPS: u32 = 8;

/// What all streams do.
#[derive(Clone, Debug)]
pub(super) struct Pattern {
    /// Its name in rows.
    pub(super) name: &'static str,
    /// Ranges in flight of each stream.
    pub(super) slots: usize,
    /// Of a range, whole pages.
    pub(super) bytes: u64,
    /// How often a range is used before it is unmapped.
    pub(super) uses: u32,
}

/// Which stream is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Any: they drift against each other, as streams of different loads do.
    Drifting,
    /// Each in turn, all at the same place of their rings: the worst case of aliasing.
    Lockstep,
}

/// Allocators, streams and caches of one run.
pub(super) struct Machine<'a> {
    options: &'a Options,
    pattern: &'a Pattern,
    cpu: Arc<FixedCpu>,
    random: SplitMix,
    space: Arc<dyn Allocator>,
    rings: Vec<Arc<Ring<Arc<dyn Allocator>>>>,
    background: Vec<(u64, u64)>,
    streams: Vec<Stream>,
    caches: Caches,
    /// Table pages that ever were needed: level and number.
    tables: HashSet<(usize, u64)>,
    totals: Totals,
}

/// The result of a run, or of several together.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    /// Bytes.
    pub(super) moved: u64,
    pub(super) counts: Counts,
    /// Table pages that ever were needed.
    pub(super) tables_touched: u64,
    /// Summed over some moments: table pages needed, bytes of this project's table with the same
    /// mappings, and bytes mapped.
    pub(super) tables_in_flight: u64,
    pub(super) table_bytes: u64,
    pub(super) bytes_in_flight: u64,
    pub(super) fallbacks: u64,
}

/// Misses, each per page moved.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Misses {
    /// Of the IOTLB.
    pub(super) iotlb: f64,
    /// Misses that would have hit in a fully associative IOTLB of the same size.
    conflict: f64,
    /// Of the walk caches L1, L2 and L3.
    walk: [f64; 3],
    /// Memory reads that the device waits for: IOTLB misses and walk-cache misses. It is the M of the
    /// throughput model `T = p / (l0 + M * lm)`.
    reads: f64,
}

impl Totals {
    pub(super) fn misses(&self) -> Misses {
        let per_page = |n: u64| n as f64 / (self.moved as f64 / GRANULE as f64);
        let Counts { iotlb_misses, conflict_misses, walk_misses, .. } = self.counts;
        Misses {
            iotlb: per_page(iotlb_misses),
            conflict: per_page(conflict_misses),
            walk: walk_misses.map(per_page),
            reads: per_page(iotlb_misses + walk_misses.iter().sum::<u64>()),
        }
    }

    /// What was counted at some moments, a GiB that was in flight then.
    pub(super) fn per_gib(&self, n: u64) -> f64 {
        n as f64 / (self.bytes_in_flight as f64 / (1u64 << 30) as f64)
    }
}

/// One ring of buffers.
struct Stream {
    cpu: usize,
    queue: Arc<dyn Allocator>,
    align: Align,
    slots: Vec<Option<Slot>>,
    /// Used up, not yet unmapped.
    done: Vec<usize>,
    /// Unmapped, in the order in which they are filled again.
    empty: VecDeque<usize>,
    /// Where the device is.
    at: usize,
    offset: u64,
}

/// A buffer that is mapped.
#[derive(Clone, Copy)]
struct Slot {
    iova: u64,
    uses: u32,
}

impl<'a> Machine<'a> {
    /// An aged allocator, and streams that have nothing yet.
    pub(super) fn new(
        options: &'a Options,
        pattern: &'a Pattern,
        placement: &str,
        seed: u64,
    ) -> Result<Machine<'a>> {
        let last = u64::MAX >> (64 - options.aperture_bits);
        let aperture = Aperture::new(0, last, GRANULE)?;
        let cpu = Arc::new(FixedCpu::new(CPUS));
        let space = space(placement, aperture, &cpu)?;
        let mut machine =
            Machine { random: SplitMix(seed), ..Machine::over(options, pattern, cpu, space) };
        machine.age()?;
        match placement {
            "ring" => machine.make_rings(false)?,
            "ring-apart" => machine.make_rings(true)?,
            _ => {}
        }
        Ok(machine)
    }

    /// Streams over `space` as it is.
    fn over(
        options: &'a Options,
        pattern: &'a Pattern,
        cpu: Arc<FixedCpu>,
        space: Arc<dyn Allocator>,
    ) -> Machine<'a> {
        let stream = |n| Stream {
            cpu: n % CPUS,
            queue: Arc::clone(&space),
            align: Align::Size,
            slots: vec![None; pattern.slots],
            done: Vec::new(),
            empty: (0..pattern.slots).collect(),
            at: 0,
            offset: 0,
        };
        Machine {
            options,
            pattern,
            cpu,
            random: SplitMix(options.seed),
            streams: (0..options.streams).map(stream).collect(),
            space,
            rings: Vec::new(),
            background: Vec::new(),
            caches: Caches::new(options.sets, options.ways, options.walk_entries),
            tables: HashSet::new(),
            totals: Totals::default(),
        }
    }

    /// Ranges of mixed sizes come and go, so that nothing is where a fresh allocator would put it.
    fn age(&mut self) -> Result<()> {
        for step in 0..AGED_RANGES + AGED_STEPS {
            self.cpu.set(self.random.index(CPUS));
            if step >= AGED_RANGES {
                self.free_any()?;
            }
            // Small ones are more frequent; not all are powers of two.
            let most = 1 << self.random.index(7);
            let size = (1 + self.random.index(most) as u64) * GRANULE;
            self.background.push((self.space.alloc(&Request::new(size))?, size));
        }
        while self.background.len() > AGED_RANGES / 2 {
            self.free_any()?;
        }
        Ok(())
    }

    fn free_any(&mut self) -> Result<()> {
        let which = self.random.index(self.background.len());
        let (iova, size) = self.background.swap_remove(which);
        Ok(self.space.free(iova, size)?)
    }

    /// Gives each stream a chunk of its own. If they are to be `apart`, all are cut from one shared chunk,
    /// a granule apart, and buffers without more alignment than the granule's, since more would undo
    /// that.
    fn make_rings(&mut self, apart: bool) -> Result<()> {
        let Pattern { slots, bytes, .. } = *self.pattern;
        let bytes = slots as u64 * if apart { bytes } else { bytes.next_power_of_two() };
        let (mut parent, mut lead) = (Arc::clone(&self.space), 0);
        if apart {
            lead = GRANULE;
            let all = self.streams.len() as u64 * (bytes + lead);
            let device = Arc::new(Ring::new(parent, all)?);
            self.rings.push(Arc::clone(&device));
            parent = device;
        }
        for stream in &mut self.streams {
            let ring = Arc::new(Ring::with_lead(Arc::clone(&parent), bytes, lead)?);
            stream.queue = Arc::clone(&ring) as Arc<dyn Allocator>;
            stream.align = if apart { Align::Bytes(GRANULE) } else { Align::Size };
            self.rings.push(ring);
        }
        Ok(())
    }

    /// Fills the rings, lets the device run, empties them. Adds to the `totals` of other runs.
    pub(super) fn run(mut self, order: Order, totals: Totals) -> Result<Totals> {
        let in_flight = self.streams.len() as u64 * self.pattern.slots as u64 * self.pattern.bytes;
        for stream in 0..self.streams.len() {
            self.fill(stream)?;
            if order == Order::Drifting {
                self.scatter(stream);
            }
        }
        // A lap that does not count, until the caches and the allocator are as they stay.
        self.advance(order, in_flight)?;
        self.caches.restart(totals.counts);
        self.tables.clear();
        self.totals = totals;
        let moments = 8;
        let moved = in_flight * u64::from(self.pattern.uses.max(LEAST_LAPS));
        for _ in 0..moments {
            self.advance(order, moved.div_ceil(moments))?;
            self.look()?;
        }
        self.totals.counts = self.caches.counts();
        self.totals.tables_touched += self.tables.len() as u64;
        self.totals.fallbacks += self.rings.iter().map(|ring| ring.fallbacks()).sum::<u64>();
        // Frees everything: an allocator whose record is wrong fails here.
        for stream in &self.streams {
            for slot in stream.slots.iter().flatten() {
                stream.queue.free(slot.iova, self.pattern.bytes)?;
            }
        }
        for (iova, size) in self.background {
            self.space.free(iova, size)?;
        }
        Ok(self.totals)
    }

    /// The device moves `bytes`, and what is used up is replaced.
    fn advance(&mut self, order: Order, bytes: u64) -> Result<()> {
        let mut moved = 0;
        let mut turn = 0;
        while moved < bytes {
            let which = match order {
                Order::Drifting => self.random.index(self.streams.len()),
                Order::Lockstep => turn % self.streams.len(),
            };
            turn += 1;
            moved += self.burst(which)?;
        }
        self.totals.moved += moved;
        Ok(())
    }

    /// A burst of one stream: how many bytes it moved.
    fn burst(&mut self, which: usize) -> Result<u64> {
        let Pattern { bytes, slots, .. } = *self.pattern;
        let stream = &mut self.streams[which];
        // Half of the slots are filled at least: there is one.
        while stream.slots[stream.at].is_none_or(|slot| slot.uses == 0) {
            stream.at = (stream.at + 1) % slots;
        }
        let Some(slot) = stream.slots[stream.at].as_mut() else { return Ok(0) };
        let size = PageSize::of(slot.iova, bytes, stream.offset);
        self.caches.access(slot.iova + stream.offset, size);
        let burst = self.options.burst_bytes.min(bytes - stream.offset);
        stream.offset += burst;
        if stream.offset == bytes {
            slot.uses -= 1;
            let used_up = slot.uses == 0;
            if used_up {
                stream.done.push(stream.at);
            }
            (stream.offset, stream.at) = (0, (stream.at + 1) % slots);
            if used_up {
                self.complete(which)?;
            }
        }
        Ok(burst)
    }

    /// Completions are handled an eighth of a ring at a time, and half a ring is filled at once.
    fn complete(&mut self, which: usize) -> Result<()> {
        let slots = self.pattern.slots;
        if self.streams[which].done.len() < (slots / 8).max(1) {
            return Ok(());
        }
        // Strict: the entries are gone before the addresses are free.
        let stream = &mut self.streams[which];
        self.cpu.set(stream.cpu);
        for at in std::mem::take(&mut stream.done) {
            let Some(slot) = stream.slots[at].take() else { continue };
            for (iova, size) in pages(slot.iova, self.pattern.bytes) {
                self.caches.invalidate(iova, size);
            }
            stream.queue.free(slot.iova, self.pattern.bytes)?;
            stream.empty.push_back(at);
        }
        if self.streams[which].empty.len() >= (slots / 2).max(1) {
            self.fill(which)?;
        }
        Ok(())
    }

    fn fill(&mut self, which: usize) -> Result<()> {
        let stream = &mut self.streams[which];
        self.cpu.set(stream.cpu);
        let bytes = self.pattern.bytes;
        let request = Request::new(bytes).align(stream.align);
        while let Some(at) = stream.empty.pop_front() {
            let iova = stream.queue.alloc(&request)?;
            stream.slots[at] = Some(Slot { iova, uses: self.pattern.uses });
            self.tables.extend(pages(iova, bytes).flat_map(|(at, size)| tables(at, size)));
        }
        Ok(())
    }

    /// A stream that has run for a while: somewhere in its ring, its buffers of different ages.
    fn scatter(&mut self, which: usize) {
        let stream = &mut self.streams[which];
        stream.at = self.random.index(self.pattern.slots);
        for slot in stream.slots.iter_mut().flatten() {
            slot.uses -= self.random.index(self.pattern.uses as usize) as u32;
        }
    }

    /// Which tables are needed at this moment.
    fn look(&mut self) -> Result<()> {
        let mut needed = HashSet::new();
        let table = IommuTable::new(Limits::NONE);
        for slot in self.streams.iter().flat_map(|stream| stream.slots.iter().flatten()) {
            let of = pages(slot.iova, self.pattern.bytes);
            needed.extend(of.flat_map(|(at, size)| tables(at, size)));
            // Targets equal to the IOVAs: to this table targets do not matter.
            let range = Range::from_len(Iova(slot.iova), self.pattern.bytes);
            table.map(range.context("a buffer without bytes")?, slot.iova, Prot::RW)?;
            self.totals.bytes_in_flight += self.pattern.bytes;
        }
        self.totals.tables_in_flight += needed.len() as u64;
        self.totals.table_bytes += table.table_bytes();
        Ok(())
    }
}

/// The allocator of a placement, or of a peer.
fn space(placement: &str, aperture: Aperture, cpu: &Arc<FixedCpu>) -> Result<Arc<dyn Allocator>> {
    let ours = placement.trim_end_matches("-apart").parse::<PlacementName>();
    let kind = ours.as_ref().map_or_else(|_| placement.parse(), |_| Ok(AllocatorKind::Ringfence));
    let kind: AllocatorKind = kind.map_err(|_| anyhow!("unknown placement {placement:?}"))?;
    let of_ranges = ours.unwrap_or_default().of_ranges();
    Ok(Arc::from(kind.make_for(aperture, of_ranges, Arc::clone(cpu))))
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Mutex};

    use ringfence_iova::{AllocError, FreeError, FreeReason, ReserveError, Stats};

    use super::{super::streams::patterns, *};

    /// Hands out one address after the other and never the same again.
    #[derive(Default)]
    struct Bump(Mutex<(u64, BTreeMap<u64, u64>)>);

    impl Allocator for Bump {
        fn alloc(&self, request: &Request) -> Result<u64, AllocError> {
            let mut state = self.0.lock().unwrap();
            let iova = (state.0 + 1).next_multiple_of(request.size.next_power_of_two());
            state.0 = iova + (request.size - 1);
            state.1.insert(iova, request.size);
            Ok(iova)
        }
        fn free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
            let was = self.0.lock().unwrap().1.remove(&iova);
            let reason = FreeReason::NotAllocated;
            (was == Some(size)).then_some(()).ok_or(FreeError { iova, size, reason })
        }
        fn reserve(&self, _first: u64, _last: u64) -> Result<(), ReserveError> {
            Ok(())
        }
        fn check_free(&self, _iova: u64, _size: u64) -> Result<(), FreeError> {
            Ok(())
        }
        fn granule(&self) -> u64 {
            GRANULE
        }
        fn stats(&self) -> Stats {
            Stats::default()
        }
    }

    fn options(streams: usize, buffers: usize, bytes: u64) -> Options {
        Options { streams, buffers, buffer_bytes: bytes, ..Options::default() }
    }

    fn bump(options: &Options, pattern: &Pattern, order: Order) -> Totals {
        let space = Arc::new(Bump::default());
        let cpu = Arc::new(FixedCpu::new(CPUS));
        let shared = Arc::clone(&space) as Arc<dyn Allocator>;
        let machine = Machine::over(options, pattern, cpu, shared);
        let totals = machine.run(order, Totals::default()).unwrap();
        assert!(space.0.lock().unwrap().1.is_empty(), "all was freed, by its right size");
        totals
    }

    #[test]
    fn one_strict_stream_misses_each_page_once() {
        let options = options(1, 8, 16 * GRANULE);
        for pattern in patterns(&options).iter().filter(|pattern| pattern.uses == 1) {
            for order in [Order::Drifting, Order::Lockstep] {
                let totals = bump(&options, pattern, order);
                assert_eq!(totals.moved, u64::from(LEAST_LAPS) * 8 * 16 * GRANULE);
                assert_eq!(totals.counts.accesses, totals.moved / options.burst_bytes);
                assert_eq!(totals.counts.iotlb_misses, totals.moved / GRANULE);
                assert_eq!(totals.counts.conflict_misses, 0);
                // Addresses that only go up meet each table once.
                let tables = totals.moved.div_ceil(2 << 20);
                assert!(totals.counts.walk_misses[2] <= tables + 1, "{totals:?}");
            }
        }
    }

    #[test]
    fn all_orders_move_the_same() {
        let options = options(3, 4, 4 * GRANULE);
        for pattern in &patterns(&options) {
            let drifting = bump(&options, pattern, Order::Drifting);
            let lockstep = bump(&options, pattern, Order::Lockstep);
            assert_eq!(drifting.moved, lockstep.moved);
            assert_eq!(drifting.counts.accesses, lockstep.counts.accesses);
        }
    }

    #[test]
    fn a_mapping_that_is_kept_and_fits_the_iotlb_misses_once_a_life() {
        let options = options(1, 4, 4 * GRANULE);
        let kept = Pattern { name: "buffers", slots: 4, bytes: 4 * GRANULE, uses: 16 };
        let totals = bump(&options, &kept, Order::Drifting);
        let misses = totals.misses();
        assert!((0.9 / 16.0..1.2 / 16.0).contains(&misses.iotlb), "{misses:?}");
    }

    #[test]
    fn buffers_of_2_mib_need_an_entry_each_and_no_leaf_tables() {
        let options = options(2, 2, 2 << 20);
        let pattern = Pattern { name: "buffers", slots: 2, bytes: 2 << 20, uses: 1 };
        let totals = bump(&options, &pattern, Order::Lockstep);
        assert_eq!(totals.counts.iotlb_misses, totals.moved / (2 << 20));
        assert_eq!(totals.counts.walk_misses[2], 0);
    }

    #[test]
    fn buffers_that_are_aligned_alike_alias_in_lockstep() {
        // Eight streams at the same page of equally aligned buffers, in sets of four ways.
        let options = options(8, 4, 16 * GRANULE);
        let pattern = &patterns(&options)[0];
        let totals = bump(&options, pattern, Order::Lockstep);
        // All but a few accesses miss: an unmap leaves room for these few.
        let counts = totals.counts;
        assert!(counts.iotlb_misses > counts.accesses / 100 * 98, "{counts:?}");
        assert!(counts.conflict_misses > counts.accesses / 8 * 6, "{counts:?}");
    }
}
