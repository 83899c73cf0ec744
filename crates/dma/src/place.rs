//! Placing the pieces of a buffer: mapping them, or copying them to a slot.

use arrayvec::ArrayVec;
use ringfence_iommu::{Address, Domain, Iova, Map, Partial, Range};
use ringfence_iova::{Align, Allocator, Request};
use ringfence_mem::ReadSlice;

use crate::{
    Device, Direction, DmaBuffer, Error, ErrorKind, Policy, Segment, Trust,
    auto::{Cell, Copied, Kind, Look},
    bounce::Bounced,
    counter::Count,
    flush::Span,
    layout::{Layout, Run},
    map_call::{Failed, Lasting, MapCall, Measured, Sync, measure},
    placed::Placed,
    shared::{Bouncer, Shared},
    stats::Counters,
    waits::timed,
};

impl<D: Domain + 'static, A: Allocator + 'static> Device<D, A> {
    pub(crate) fn place(&self, wanted: &MapCall<'_, D::Target>) -> Result<Placed, Failed> {
        let (shared, counters) = (self.shared(), &*self.port.counters);
        let start = shared.sampler.start(counters.maps.get());
        let placed = if shared.mode.get().policy == Policy::Off {
            self.place_unmapped(wanted.buffer)
        } else {
            self.place_protected(wanted)
        };
        if let Ok(placed) = &placed {
            counters.maps.add(1);
            counters.bytes.add(placed.len);
        }
        shared.sampler.stop(start, 1, &counters.map_time);
        placed
    }

    /// Policy `off`: the device uses the buffer's own addresses.
    fn place_unmapped(&self, buffer: &dyn DmaBuffer<D::Target>) -> Result<Placed, Failed> {
        let limits = self.shared().limits;
        let mut placed = Placed::new();
        let segments = &mut placed.segments;
        let mut len = Some(0u64);
        buffer.for_each_segment(&mut |target, piece| {
            let target = target.as_u64();
            if piece == 0 {
                return;
            }
            len = len
                .and_then(|len| len.checked_add(piece))
                .filter(|_| target.checked_add(piece - 1).is_some());
            if len.is_some() {
                limits.add(segments, target, piece);
            }
        });
        placed.len = len.ok_or(Error::TooLong)?;
        placed.iova = Iova(placed.segments.first().ok_or(Error::Empty)?.addr);
        Ok(placed)
    }

    /// Maps the pieces, or copies them to a slot.
    fn place_protected(&self, wanted: &MapCall<'_, D::Target>) -> Result<Placed, Failed> {
        let shared = self.shared();
        let measured = measure(shared.limits, wanted.buffer)?;
        // Rules L48, L50: a buffer that would expose its neighbours to an untrusted device is
        // copied, or not mapped at all.
        if shared.means.trust != Trust::Trusted && !measured.fills {
            let placed = self.place_bounced(wanted, &measured);
            if let (Err(error), Some(bouncer)) = (&placed, &shared.bouncer)
                && error.kind() == ErrorKind::BounceFull
            {
                bouncer.auto.refused(|| shared.clock.now_ns());
            }
            return Ok(placed?);
        }
        let mode = shared.mode.get();
        let Some(bouncer) = &shared.bouncer else { return self.place_mapped(wanted, measured) };
        if !mode.policy.bounces() || wanted.lasting == Lasting::Long {
            return self.place_mapped(wanted, measured);
        }
        let len = measured.len;
        let (copy, cell) = bouncer.decide(mode.policy, wanted, &measured);
        let bounced = copy.then(|| self.place_bounced(wanted, &measured));
        let (placed, copied) = match bounced {
            Some(Ok(placed)) => (placed, Copied::Yes),
            Some(Err(error)) => {
                self.port.counters.not_bounced.add(1);
                let full = error.kind() == ErrorKind::BounceFull;
                let copied = if full { Copied::NoSlot } else { Copied::No };
                (self.place_mapped(wanted, measured)?, copied)
            }
            None => (self.place_mapped(wanted, measured)?, Copied::No),
        };
        if let (Some(cell), Some(tally)) = (cell, &self.port.counters.tally) {
            // A sync waits for a time slice only if another thread does the work. A domain that
            // cannot defer flushes, such as one behind system calls, has finished the sync when it
            // returns.
            let counters = &self.port.counters;
            let look = || Look {
                now_ns: shared.clock.now_ns(),
                shared: shared.means.deferred_flush && shared.sampler.clock.is_shared(),
                mapped: counters.maps.get().saturating_sub(counters.bounced.get()),
                waited_ns: counters.waits.map.sum().wrapping_add(counters.waits.unmap.sum()),
            };
            bouncer.auto.note(cell, len, copied, tally, look);
        }
        Ok(placed)
    }

    /// Copies the pieces to a slot.
    fn place_bounced(
        &self,
        wanted: &MapCall<'_, D::Target>,
        measured: &Measured,
    ) -> Result<Placed, Error> {
        let (shared, counters) = (self.shared(), &*self.port.counters);
        let granule = shared.limits.granule();
        let Some(bouncer) = &shared.bouncer else { return Err(Error::Neighbours { granule }) };
        if wanted.lasting == Lasting::Long {
            return Err(Error::Uncopied { granule });
        }
        let len = measured.len;
        let slot = bouncer.client.take(len, wanted.direction, wanted.at)?;
        let mut bounced = Bounced::new(slot, len, wanted.direction);
        let slices = &|each: &mut dyn FnMut(ReadSlice<'_>)| wanted.buffer.for_each_slice(each);
        match bounced.load(wanted.direction, bouncer.config.written, slices) {
            Some(copied) => counters.copied_bytes.add(copied),
            None => {
                bouncer.client.give_back(bounced.finish(None).0);
                return Err(Error::Uncopied { granule });
            }
        }
        counters.bounced.add(1);
        let mut placed = Placed::new();
        (placed.iova, placed.len) = (bounced.slot.range.first(), len);
        shared.limits.add(&mut placed.segments, bounced.slot.range.first().0, len);
        placed.bounced = Some(bounced);
        Ok(placed)
    }

    fn place_mapped(
        &self,
        wanted: &MapCall<'_, D::Target>,
        measured: Measured,
    ) -> Result<Placed, Failed> {
        let shared = self.shared();
        let Measured { size, len, .. } = measured;
        let base = self.allocate(size)?;
        let Some(range) = Range::from_len(Iova(base), size) else {
            // An allocator whose range would pass 2^64 is broken: do not use the range.
            return Err(Error::TooLong.into());
        };
        let mut placed = Placed::new();
        let counters = &*self.port.counters;
        let mut mapper = Mapper {
            shared,
            counters,
            range,
            direction: wanted.direction,
            sync_each: !shared.mode.get().policy.batches_maps(),
            sync: wanted.sync,
            list: ArrayVec::new(),
            any: false,
            mapped: 0,
            segments: &mut placed.segments,
        };
        match mapper.map(wanted.buffer) {
            Ok(()) => {
                let (mapped, synced) = (mapper.mapped, mapper.is_synced());
                let first = placed.segments.first();
                placed.iova = Iova(first.map_or(base, |first| first.addr));
                placed.span = Some(Span { range, mapped });
                (placed.len, placed.synced) = (len, synced);
                Ok(placed)
            }
            Err(error) => {
                let undone = if mapper.any {
                    shared.unwind(range, counters)
                } else {
                    counters.frees.count.add(1);
                    shared.free(range);
                    true
                };
                Err(Failed { error, undone })
            }
        }
    }

    fn allocate(&self, size: u64) -> Result<u64, Error> {
        let shared = self.shared();
        let size = shared.allocation_size(size).ok_or(Error::TooLong)?;
        let request = Request {
            size,
            align: Align::Size,
            limit: shared.limit,
            boundary: shared.limits.allocation_boundary(size),
            flush: true,
        };
        let counters = &*self.port.counters;
        let number = counters.maps.get();
        let alloc = |calls| {
            let (sampler, time) = (&shared.sampler, &counters.alloc_time);
            sampler.time(number, calls, time, || shared.allocator.alloc(&request))
        };
        let allocated = match alloc(1) {
            Ok(base) => Ok(base),
            // Queued entries hold IOVAs that only wait for a flush: flush now rather than fail.
            Err(error) if !error.reason.is_invalid() && shared.has_queued() => {
                shared.flush_domain(&counters.waits.full)?;
                shared.reap_all(&counters.frees);
                alloc(0)
            }
            Err(error) if !error.reason.is_invalid() && shared.free_held() => alloc(0),
            Err(error) => Err(error),
        };
        allocated.map_err(|error| Error::no_iova(error, &shared.allocator))
    }
}

/// The longest mapping that [`Policy::Auto`] copies, in bytes: for a longer
/// one the cost of a sync is negligible.
const LONGEST: u64 = 4 << 20;

impl<T: Address> Bouncer<T> {
    /// Decides whether a streaming mapping that need not be a copy becomes one; also returns the cell
    /// that made the choice, unless the policy did.
    fn decide(
        &self,
        policy: Policy,
        wanted: &MapCall<'_, T>,
        measured: &Measured,
    ) -> (bool, Option<Cell>) {
        let &Measured { len, runs, .. } = measured;
        if policy != Policy::Auto {
            return (policy.bounces() && len <= self.config.threshold, None);
        }
        if len > LONGEST {
            return (false, None);
        }
        let &MapCall { direction, sync, .. } = wanted;
        let written = self.config.written;
        let cell = Cell::of(direction, len, runs);
        let copy = self.auto.choose(cell, || Kind { direction, len, runs, sync, written });
        (copy, Some(cell))
    }
}

/// How many runs one call of the domain maps.
const TOGETHER: usize = 32;

/// Maps the pieces of one buffer into the range that was allocated for them.
struct Mapper<'a, D: Domain, A: Allocator> {
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
    any: bool,
    mapped: u64,
    segments: &'a mut Vec<Segment>,
}

impl<'a, D: Domain, A: Allocator> Mapper<'a, D, A> {
    /// Maps all pieces. After an error, part of them may be mapped ([`any`](Self::any)).
    fn map(&mut self, buffer: &dyn DmaBuffer<D::Target>) -> Result<(), Error> {
        let mut layout = Layout::new(self.shared.limits);
        let mut result = Ok(());
        buffer.for_each_segment(&mut |target, len| {
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
        let first = self.range.first().0.checked_add(run.offset).map(Iova);
        let range = first
            .and_then(|first| Range::from_len(first, run.span))
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
    fn is_synced(&self) -> bool {
        self.sync_each || self.sync == Sync::Now
    }

    fn sync(&self, range: Range) -> Result<(), Error> {
        self.counters.map_syncs.add(1);
        let wait = || self.shared.domain.iotlb_sync_map(range);
        timed(&*self.shared.clock, &self.counters.waits.map, wait)?;
        Ok(())
    }
}
