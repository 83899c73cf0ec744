//! From the pieces of a buffer to the calls of a domain.

use arrayvec::ArrayVec;
use ringfence_iommu::{Address, Domain, Map, Partial, Range};
use ringfence_iova::Allocator;

use crate::{
    Direction, Error,
    counter::Count,
    layout::{Layout, Run, Segments},
    map_call::{Pieces, Sync},
    shared::Shared,
    stats::Counters,
    waits::timed,
};

/// How many runs one call of the domain maps.
const TOGETHER: usize = 32;

/// Maps the pieces of one buffer into the range that was allocated for them.
pub(crate) struct Mapper<'a, D: Domain, A: Allocator> {
    shared: &'a Shared<D, A>,
    counters: &'a Counters,
    range: Range,
    direction: Direction,
    /// Sync each map call by itself, rather than all at the end.
    sync_each: bool,
    sync: Sync,
    /// Not mapped yet. Runs that are adjacent in IOVA and in memory are one.
    list: ArrayVec<Map<D::Target>, TOGETHER>,
    /// Whether anything was mapped.
    pub(crate) any: bool,
    pub(crate) mapped: u64,
    segments: &'a mut Segments,
}

impl<'a, D: Domain, A: Allocator> Mapper<'a, D, A> {
    pub(crate) fn new(
        shared: &'a Shared<D, A>,
        counters: &'a Counters,
        range: Range,
        direction: Direction,
        sync: Sync,
        segments: &'a mut Segments,
    ) -> Self {
        Mapper {
            shared,
            counters,
            range,
            direction,
            sync_each: !shared.mode.get().policy.batches_maps(),
            sync,
            list: ArrayVec::new(),
            any: false,
            mapped: 0,
            segments,
        }
    }

    /// Maps all pieces. After an error, part of them may be mapped ([`any`](Self::any)).
    pub(crate) fn map(&mut self, pieces: Pieces<'_, D::Target>) -> Result<(), Error> {
        let mut layout = Layout::new(self.shared.limits);
        let mut result = Ok(());
        pieces(&mut |target, len| {
            if result.is_ok() {
                result = layout.piece(target.as_u64(), len, &mut |run| self.run(run));
            }
        });
        result?;
        layout.finish(&mut |run| self.run(run))?;
        self.map_list()?;
        if !self.sync_each && self.sync == Sync::Now {
            // Rule L34: once, after all of them, over the whole range.
            self.sync(self.range)?;
        }
        Ok(())
    }

    fn run(&mut self, run: Run) -> Result<(), Error> {
        let range = run
            .range(self.range.first().0)
            .filter(|range| self.range.covers(*range))
            .ok_or(Error::Unstable)?;
        let in_granule = self.shared.limits.offset_in_granule(run.target);
        // Rule L43: the address keeps the buffer's offset in its granule.
        self.shared.limits.add(self.segments, range.first().0 + in_granule, run.len);
        let target = run.target - in_granule;
        // SAFETY: it is a piece of a buffer (`DmaBuffer`), which the mapping owns until an unmap
        // has succeeded.
        let map = |range, target| unsafe {
            Map::of(range, D::Target::from_u64(target), self.direction.prot())
        };
        if let Some(last) = self.list.last_mut()
            && let (held, held_target) = (last.range(), last.target().as_u64())
            && held.last().0.checked_add(1) == Some(range.first().0)
            && held_target.checked_add(held.extent()).and_then(|last| last.checked_add(1))
                == Some(target)
        {
            *last = map(held.hull(range), held_target);
            return Ok(());
        }
        let map = map(range, target);
        if self.list.is_full() || self.sync_each {
            self.map_list()?;
        }
        self.list.push(map);
        Ok(())
    }

    fn map_list(&mut self) -> Result<(), Error> {
        if self.list.is_empty() {
            return Ok(());
        }
        let made = match self.list[..] {
            [map] => self.shared.domain.map(map).map_err(|error| Partial { done: 0, error }),
            _ => self.shared.domain.map_pages(&self.list),
        };
        let (done, tried) = match made {
            Ok(()) => (self.list.len(), self.list.len()),
            Err(partial) => (partial.done, partial.done + 1),
        };
        self.counters.map_calls.add(tried as u64);
        self.any |= done > 0;
        for map in &self.list[..done] {
            self.mapped = self.mapped.saturating_add(map.range().extent()).saturating_add(1);
        }
        made.map_err(|partial| partial.error)?;
        // With `sync_each` this is the only element.
        let first = self.list[0].range();
        self.list.clear();
        if self.sync_each { self.sync(first) } else { Ok(()) }
    }

    /// Whether everything that was mapped is synced; if not, the caller must sync it.
    pub(crate) fn is_synced(&self) -> bool {
        self.sync_each || self.sync == Sync::Now
    }

    fn sync(&self, range: Range) -> Result<(), Error> {
        self.counters.map_syncs.add(1);
        let wait = || self.shared.domain.iotlb_sync_map(range);
        timed(&*self.shared.clock, &self.counters.waits.map, wait)?;
        Ok(())
    }
}
