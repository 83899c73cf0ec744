//! Placing the pieces of a buffer: mapping them, or copying them to a slot.

use ringfence_iommu::{Address, Domain, Iova, Range};
use ringfence_iova::{Align, Allocator, Request};

use crate::{
    Device, Error, Policy, Trust,
    bounce::Bounced,
    counter::Count,
    flush::Span,
    map_call::{Failed, Lasting, MapCall, Measured, Pieces, measure},
    mapper::Mapper,
    placed::Placed,
};

impl<D: Domain + 'static, A: Allocator + 'static> Device<D, A> {
    pub(crate) fn place(&self, wanted: &MapCall<'_, D::Target>) -> Result<Placed, Failed> {
        let (shared, counters) = (self.shared(), &*self.port().counters);
        let start = shared.sampler.start(counters.maps.get());
        let placed = if shared.mode.get().policy == Policy::Off {
            self.place_unmapped(wanted.pieces)
        } else {
            self.place_protected(wanted)
        };
        if let Ok(placed) = &placed {
            counters.maps.add(1);
            counters.bytes.add(placed.len);
        }
        shared.sampler.stop(start, &counters.map_time);
        placed
    }

    /// Policy `off`: the device uses the buffer's own addresses.
    fn place_unmapped(&self, pieces: Pieces<'_, D::Target>) -> Result<Placed, Failed> {
        let limits = self.shared().limits;
        let mut placed = Placed::new();
        let segments = &mut placed.segments;
        let mut len = Some(0u64);
        pieces(&mut |target, piece| {
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
        placed.iova = Iova(placed.segments.as_slice().first().ok_or(Error::Empty)?.addr);
        Ok(placed)
    }

    /// Maps the pieces, or copies them to a slot.
    fn place_protected(&self, wanted: &MapCall<'_, D::Target>) -> Result<Placed, Failed> {
        let shared = self.shared();
        let measured = measure(shared.limits, wanted.pieces)?;
        // Rules L48, L50: a buffer that would expose its neighbours to an untrusted device is
        // copied, or not mapped at all.
        if shared.means.trust != Trust::Trusted && !measured.fills {
            return Ok(self.place_bounced(wanted, &measured)?);
        }
        let mode = shared.mode.get();
        let Some(bouncer) = &shared.bouncer else { return self.place_mapped(wanted, measured) };
        if !mode.policy.bounces() || wanted.lasting == Lasting::Long {
            return self.place_mapped(wanted, measured);
        }
        let (choice, cell) = bouncer.decide(mode, wanted, &measured);
        let bounced = choice.copy.then(|| self.place_bounced(wanted, &measured));
        let mut placed = match bounced {
            Some(Ok(placed)) => placed,
            Some(Err(_)) => {
                self.port().counters.not_bounced.add(1);
                self.place_mapped(wanted, measured)?
            }
            None => self.place_mapped(wanted, measured)?,
        };
        // Also if a copy was chosen and failed: failures count in the result of copying.
        placed.slice = choice.slice;
        if let (Some(cell), Some(tally)) = (cell, &self.port().counters.tally) {
            // A sync waits for a time slice only if another thread does the work. A domain that
            // cannot defer flushes, such as one behind system calls, has finished the sync when it
            // returns.
            let waits = || shared.means.deferred_flush && shared.sampler.is_shared();
            bouncer.auto.note(
                cell,
                placed.bounced.is_some(),
                tally,
                || shared.clock.now_ns(),
                waits,
            );
        }
        Ok(placed)
    }

    /// Copies the pieces to a slot.
    fn place_bounced(
        &self,
        wanted: &MapCall<'_, D::Target>,
        measured: &Measured,
    ) -> Result<Placed, Error> {
        let (shared, counters) = (self.shared(), &*self.port().counters);
        let granule = shared.limits.granule();
        let Some(bouncer) = &shared.bouncer else { return Err(Error::Neighbours { granule }) };
        if wanted.lasting == Lasting::Long {
            return Err(Error::Uncopied { granule });
        }
        let len = measured.len;
        let slot = bouncer.client.take(len, wanted.direction.prot(), wanted.at)?;
        let mut bounced = Bounced::new(slot, len, wanted.direction);
        match bounced.load(wanted.direction, bouncer.config.written, wanted.slices) {
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
        let (shared, pieces) = (self.shared(), wanted.pieces);
        let Measured { size, len, .. } = measured;
        let base = self.allocate(size)?;
        let Some(range) = Range::from_len(Iova(base), size) else {
            // An allocator whose range would pass 2^64 is broken: do not use the range.
            return Err(Error::TooLong.into());
        };
        let (direction, sync) = (wanted.direction, wanted.sync);
        let mut placed = Placed::new();
        let (counters, segments) = (&self.port().counters, &mut placed.segments);
        let mut mapper = Mapper::new(shared, counters, range, direction, sync, segments);
        match mapper.map(pieces) {
            Ok(()) => {
                let (mapped, synced) = (mapper.mapped, mapper.is_synced());
                let first = placed.segments.as_slice().first();
                placed.iova = Iova(first.map_or(base, |first| first.addr));
                placed.span = Some(Span { range, mapped });
                (placed.len, placed.synced) = (len, synced);
                Ok(placed)
            }
            Err(error) => {
                let undone = if mapper.any {
                    shared.unwind(range, &self.port().counters)
                } else {
                    shared.free_counted(range, &self.port().counters);
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
        let counters = &*self.port().counters;
        let number = counters.maps.get();
        let alloc = |calls| {
            let (sampler, time) = (&shared.brief_sampler, &counters.alloc_time);
            sampler.time(number, calls, time, || shared.allocator.alloc(&request))
        };
        let allocated = match alloc(1) {
            Ok(base) => Ok(base),
            // Queued entries hold IOVAs that only wait for a flush: flush now rather than fail.
            Err(error) if !error.reason.is_invalid() && shared.has_queued() => {
                shared.flush_for_room(counters)?;
                alloc(0)
            }
            Err(error) if !error.reason.is_invalid() && shared.free_held() => alloc(0),
            Err(error) => Err(error),
        };
        allocated.map_err(|error| Error::no_iova(error, &shared.allocator))
    }
}
