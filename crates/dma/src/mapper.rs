//! From the pieces of a buffer to the calls of a domain.

use ringfence_iommu::{Address, Domain, Range};
use ringfence_iova::Allocator;
use ringfence_sync::clock::Clock;

use crate::{
    Direction, Error,
    layout::{Layout, Limits, Run},
    segment::Segments,
    shared::Shared,
    stats::{Count, Counters},
    waits::timed,
};

/// The pieces of a buffer, or of a list of buffers, one after the other.
pub(crate) type Pieces<'a, T> = &'a dyn Fn(&mut dyn FnMut(T, u64));

/// When what a map call has queued is synced, if the policy leaves that open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sync {
    /// At the end of the call.
    Now,
    /// By the caller, with others.
    Later,
}

/// What the pieces of a buffer are together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    /// Bytes of address space that they need.
    pub(crate) size: u64,
    /// Bytes of them.
    pub(crate) len: u64,
    /// How many there are, those as one that follow each other in memory.
    pub(crate) runs: u64,
    /// Whether they fill their granules, so that nothing else lies there.
    pub(crate) fills: bool,
}

/// Measures the pieces.
pub(crate) fn measure<T: Address>(
    limits: Limits,
    pieces: Pieces<'_, T>,
) -> Result<Measured, Error> {
    let mut layout = Layout::new(limits);
    let mut len = 0u64;
    let (mut runs, mut fills) = (0, true);
    let mut count = |run: Run| {
        runs += 1;
        fills &= limits.fills_granules(run.target, run.len);
        Ok(())
    };
    let mut result = Ok(());
    pieces(&mut |target, piece| {
        if result.is_ok() {
            len = len.saturating_add(piece);
            result = layout.piece(target.as_u64(), piece, &mut count);
        }
    });
    result?;
    let size = layout.finish(&mut count)?;
    // Address space is needed for every byte, so the sum of the bytes cannot pass 2^64 here.
    if size == 0 { Err(Error::Empty) } else { Ok(Measured { size, len, runs, fills }) }
}

/// Maps the pieces of one buffer into the range that was allocated for them.
pub(crate) struct Mapper<'a, D> {
    domain: &'a D,
    clock: &'a dyn Clock,
    counters: &'a Counters,
    limits: Limits,
    range: Range,
    direction: Direction,
    /// Sync each map call by itself, rather than all at the end.
    sync_each: bool,
    sync: Sync,
    /// Runs that follow each other in IOVA and in memory, not mapped yet.
    pending: Option<(Range, u64)>,
    /// Whether anything was mapped.
    pub(crate) any: bool,
    pub(crate) mapped: u64,
    segments: &'a mut Segments,
}

impl<'a, D: Domain> Mapper<'a, D> {
    pub(crate) fn new<A: Allocator>(
        shared: &'a Shared<D, A>,
        counters: &'a Counters,
        range: Range,
        direction: Direction,
        sync: Sync,
        segments: &'a mut Segments,
    ) -> Self {
        Mapper {
            domain: &shared.domain,
            clock: &*shared.clock,
            counters,
            limits: shared.limits,
            range,
            direction,
            sync_each: !shared.mode.get().batches_maps(),
            sync,
            pending: None,
            any: false,
            mapped: 0,
            segments,
        }
    }

    /// Maps all pieces. After an error, part of them may be mapped ([`any`](Self::any)).
    pub(crate) fn map(&mut self, pieces: Pieces<'_, D::Target>) -> Result<(), Error> {
        let mut layout = Layout::new(self.limits);
        let mut result = Ok(());
        pieces(&mut |target, len| {
            if result.is_ok() {
                result = layout.piece(target.as_u64(), len, &mut |run| self.run(run));
            }
        });
        result?;
        layout.finish(&mut |run| self.run(run))?;
        self.map_pending()?;
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
        let in_granule = self.limits.offset_in_granule(run.target);
        // Rule L43: the address keeps the buffer's offset in its granule.
        self.limits.add(self.segments, range.first().0 + in_granule, run.len);
        let target = run.target - in_granule;
        if let Some((held, held_target)) = &mut self.pending
            && held.last().0.checked_add(1) == Some(range.first().0)
            && held_target.checked_add(held.extent()).and_then(|last| last.checked_add(1))
                == Some(target)
        {
            *held = held.hull(range);
            return Ok(());
        }
        self.map_pending()?;
        self.pending = Some((range, target));
        Ok(())
    }

    fn map_pending(&mut self) -> Result<(), Error> {
        let Some((range, target)) = self.pending.take() else { return Ok(()) };
        self.counters.map_calls.add(1);
        self.domain.map_pages(range, D::Target::from_u64(target), self.direction.prot())?;
        self.any = true;
        self.mapped = self.mapped.saturating_add(range.extent()).saturating_add(1);
        if self.sync_each {
            self.sync(range)?;
        }
        Ok(())
    }

    /// Whether the device knows of what was mapped; else it is for the caller to sync.
    pub(crate) fn is_synced(&self) -> bool {
        self.sync_each || self.sync == Sync::Now
    }

    fn sync(&self, range: Range) -> Result<(), Error> {
        self.counters.map_syncs.add(1);
        let wait = || self.domain.iotlb_sync_map(range);
        Ok(timed(self.clock, &self.counters.waits.map, wait)?)
    }
}
