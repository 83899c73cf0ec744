//! Giving slots memory, and taking it away.

use core::{ops::Range as Numbers, sync::atomic::Ordering};
use std::sync::Arc;

use ringfence_iommu::{
    Address, Error as DomainError, Gather, Map, Pending, Range, Result as DomainResult, Synced,
};

use super::{Inner, zone::Zone};
use crate::{
    Direction, Error,
    bounce::{Chunk, Slot},
};

/// How many bytes of slots are mapped together, with one sync; at least one slot.
const TOGETHER: u64 = 64 << 10;

impl<T: Address> Inner<T> {
    /// A slot of one of these zones: a free one, one that gets memory, or one with other
    /// permissions, remapped, in this order. `None` if no zone has room, even after idle slots of
    /// others were given back.
    pub(super) fn find<'a>(
        &self,
        zones: &'a [Arc<Zone<T>>],
        cpu: usize,
        kind: Direction,
    ) -> Result<Option<(&'a Zone<T>, Slot)>, Error> {
        if let Some(found) = first_of(zones, |zone| Ok(zone.pop(cpu, kind)))? {
            return Ok(Some(found));
        }
        let mut grown = first_of(zones, |zone| self.grow(zone, kind));
        if grown.as_ref().is_ok_and(Option::is_some) || grown.as_ref().is_err_and(|e| !is_full(e)) {
            return grown;
        }
        // There is no room: take what other CPUs keep in their caches.
        if let Some(found) = first_of(zones, |zone| Ok(zone.steal(|shelf| shelf.pop(kind))))? {
            return Ok(Some(found));
        }
        if let Some(found) = first_of(zones, |zone| self.remap(zone, kind))? {
            return Ok(Some(found));
        }
        let size = zones.first().map_or(0, |zone| zone.slot_bytes());
        if size > 0 && self.reclaim(size) {
            grown = first_of(zones, |zone| self.grow(zone, kind));
        }
        // The memory given back may be fragmented.
        if matches!(grown, Err(Error::Bounce(_))) && self.trim() {
            grown = first_of(zones, |zone| self.grow(zone, kind));
        }
        grown
    }

    /// Gives memory to adjacent slots of `zone`, with one sync. Returns the first of them; the
    /// others become free. `None` if all slots of the zone have memory, or the limit on memory is
    /// reached.
    fn grow(&self, zone: &Zone<T>, kind: Direction) -> Result<Option<Slot>, Error> {
        let size = zone.slot_bytes();
        let granted = self.reserve(size, (TOGETHER / size).max(1));
        if granted == 0 {
            return Ok(None);
        }
        let Some(numbers) = zone.take_bare(granted as u32) else {
            self.unreserve(size, granted);
            return Ok(None);
        };
        let start = numbers.start;
        let mut chunks = Vec::with_capacity(numbers.len());
        let mapped = self.map_run(zone, &numbers, kind, &mut chunks);
        let got = chunks.len();
        self.unreserve(size, granted - got as u64);
        zone.leave(start + got as u32..numbers.end);
        if let Err(error) = mapped {
            self.quarantine(zone, got, got);
            return Err(error);
        }
        self.usage.grown.fetch_add(got as u64, Ordering::Relaxed);
        let slot = |(number, chunk): (u32, &Chunk<T>)| Slot {
            range: zone.range_of(&(number..number + 1)),
            ptr: chunk.ptr,
            direction: kind,
            dirty: 0,
            key: 0,
        };
        let mut slots = (start..).zip(&chunks).map(slot);
        let first = slots.next();
        zone.add(start, &chunks, kind, slots.collect());
        Ok(first)
    }

    /// Maps the slots with these numbers, as many from the first on as there is memory for, and
    /// leaves their memory in `chunks`. If it fails, `chunks` holds only memory that the device may
    /// still reach.
    fn map_run(
        &self,
        zone: &Zone<T>,
        numbers: &Numbers<u32>,
        direction: Direction,
        chunks: &mut Vec<Chunk<T>>,
    ) -> Result<(), Error> {
        let start = numbers.start;
        for number in numbers.clone() {
            match self.map_slot(zone.range_of(&(number..number + 1)), direction) {
                Ok(chunk) => chunks.push(chunk),
                Err(error) if chunks.is_empty() => return Err(error),
                // Continue with fewer.
                Err(_) => break,
            }
        }
        let range = zone.range_of(&(start..start + chunks.len() as u32));
        // Rule L34: once for all; if it fails, all of them are unmapped.
        self.domain.iotlb_sync_map(range).map(drop).map_err(|error| {
            if self.unmap_now(range).is_ok() {
                chunks.drain(..).for_each(|chunk| self.give_back_memory(chunk));
            }
            error.into()
        })
    }

    pub(super) fn map_slot(&self, range: Range, direction: Direction) -> Result<Chunk<T>, Error> {
        let chunk = self.take_memory(range.extent() + 1)?;
        self.map_chunk(range, &chunk, direction).map(|()| chunk).map_err(|error| {
            self.give_back_memory(chunk);
            error.into()
        })
    }

    /// Maps memory of the pools.
    fn map_chunk(&self, range: Range, chunk: &Chunk<T>, direction: Direction) -> DomainResult<()> {
        // SAFETY: the pools own the memory, and give it back or reuse it only after they have
        // unmapped it successfully (`unmap_now`, `release`).
        self.domain.map(unsafe { Map::of(range, chunk.target, direction.prot()) })
    }

    /// Unmaps strictly.
    pub(super) fn unmap_now(&self, range: Range) -> DomainResult<Synced> {
        let mut gather = Gather::new();
        self.domain.unmap(range, &mut gather)?;
        self.domain.iotlb_sync(&mut gather)
    }

    /// Remaps a free slot that has other permissions.
    fn remap(&self, zone: &Zone<T>, kind: Direction) -> Result<Option<Slot>, Error> {
        let Some(mut slot) = zone.steal(|shelf| shelf.pop_other(kind)) else { return Ok(None) };
        let number = zone.number(slot.range.first());
        let quarantined = |error: DomainError| {
            self.quarantine(zone, 1, 0);
            Err(error.into())
        };
        if let Err(error) = self.unmap_now(slot.range) {
            return quarantined(error);
        }
        // Its contents were for a device with other permissions.
        slot.zero(0..slot.dirty);
        (slot.dirty, slot.direction) = (0, kind);
        let Some(chunk) = zone.chunk(number) else { return Ok(None) };
        let mapped = self.map_chunk(slot.range, &chunk, kind);
        if let Err(error) = mapped.and_then(|()| self.domain.iotlb_sync_map(slot.range)) {
            // Unmapping an unmapped range is not an error.
            if self.unmap_now(slot.range).is_err() {
                return quarantined(error);
            }
            self.strip(zone, number..number + 1);
            return Err(error.into());
        }
        self.usage.remapped.fetch_add(1, Ordering::Relaxed);
        Ok(Some(slot))
    }

    /// Gives back idle slots of any kind, at least `bytes` if there are that many. Returns whether
    /// there were any.
    fn reclaim(&self, bytes: u64) -> bool {
        let mut missing = bytes;
        let mut victims = Vec::new();
        for zone in self.zones() {
            let mut slots = Vec::new();
            zone.take_free(missing.div_ceil(zone.slot_bytes()) as usize, &mut slots);
            missing = missing.saturating_sub(slots.len() as u64 * zone.slot_bytes());
            victims.push((zone, slots));
        }
        self.release(victims) > 0
    }

    /// Gives back all memory that is not in use. Returns whether there was any.
    pub(super) fn trim(&self) -> bool {
        self.reclaim(u64::MAX)
    }

    /// Unmaps slots of zones, all with one sync, and gives their memory back. Returns how many; those whose
    /// unmap failed are quarantined.
    pub(super) fn release(&self, victims: Vec<(Arc<Zone<T>>, Vec<Slot>)>) -> u64 {
        let mut gather = Gather::new();
        let mut removed: Vec<(Arc<Zone<T>>, Numbers<u32>)> = Vec::new();
        for (zone, slots) in victims {
            let mut numbers: Vec<u32> =
                slots.iter().map(|slot| zone.number(slot.range.first())).collect();
            numbers.sort_unstable();
            for run in numbers.chunk_by(|one, next| one + 1 == *next) {
                let run = run[0]..run[0] + run.len() as u32;
                match self.domain.unmap(zone.range_of(&run), &mut gather) {
                    Ok(_) => removed.push((Arc::clone(&zone), run)),
                    Err(_) => self.quarantine(&zone, run.len(), 0),
                }
            }
        }
        if removed.is_empty() {
            return 0;
        }
        // Each run by itself: one whose unmap fails takes none of the others with it.
        let ranges = removed.iter().map(|(zone, run)| zone.range_of(run)).collect();
        let mut sync = Pending::unmap(&self.domain, ranges, &mut gather);
        sync.wait(&self.domain);
        let mut given_back = 0;
        for (zone, run) in removed {
            match sync.outcome(zone.range_of(&run)) {
                Some(Ok(_)) => given_back += self.strip(&zone, run),
                _ => self.quarantine(&zone, run.len(), 0),
            }
        }
        given_back
    }

    /// Gives back the memory of slots that no device reaches any more. Returns how many.
    fn strip(&self, zone: &Zone<T>, numbers: Numbers<u32>) -> u64 {
        let mut chunks = Vec::with_capacity(numbers.len());
        zone.strip(numbers, &mut chunks);
        let count = chunks.len() as u64;
        chunks.into_iter().for_each(|chunk| self.give_back_memory(chunk));
        self.unreserve(zone.slot_bytes(), count);
        self.usage.given_back.fetch_add(count, Ordering::Relaxed);
        count
    }

    /// Quarantines slots that the device may still reach, `new` of which were never in use: neither
    /// they nor their memory are used again. They count as memory of the pools for ever, so that a
    /// device that fails again and again cannot use up all memory.
    pub(super) fn quarantine(&self, zone: &Zone<T>, slots: usize, new: usize) {
        zone.quarantine(slots, new);
        self.note_quarantine(zone.slot_bytes() * slots as u64);
    }

    pub(super) fn note_quarantine(&self, bytes: u64) {
        self.usage.quarantined_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Reserves memory for up to `most` more slots of `size` bytes; returns for how many.
    fn reserve(&self, size: u64, most: u64) -> u64 {
        let (pooled, max) = (&self.usage.pooled, self.limits.max_bytes);
        let grant = |now: u64| most.min((max - now) / size);
        let relaxed = Ordering::Relaxed;
        let add = |now| (grant(now) > 0).then(|| now + grant(now) * size);
        pooled.fetch_update(relaxed, relaxed, add).map_or(0, grant)
    }

    fn unreserve(&self, size: u64, slots: u64) {
        self.usage.pooled.fetch_sub(size * slots, Ordering::Relaxed);
    }
}

/// The first result other than `None` from one of `zones`.
fn first_of<T>(
    zones: &[Arc<Zone<T>>],
    mut take: impl FnMut(&Zone<T>) -> Result<Option<Slot>, Error>,
) -> Result<Option<(&Zone<T>, Slot)>, Error> {
    for zone in zones {
        if let Some(slot) = take(zone)? {
            return Ok(Some((zone, slot)));
        }
    }
    Ok(None)
}

/// Whether giving something back might help.
fn is_full(error: &Error) -> bool {
    matches!(
        error,
        Error::Bounce(_) | Error::Domain(DomainError::Full { .. } | DomainError::NoMemory { .. })
    )
}
