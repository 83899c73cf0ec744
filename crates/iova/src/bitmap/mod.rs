//! One bit per granule, next fit.

mod bits;

use alloc::{boxed::Box, vec::Vec};
use core::{fmt, mem};

use bits::Bits;
use ringfence_sync::lock::SpinLock;

use crate::{
    AllocError, AllocReason, Allocator, Aperture, FreeError, FreeReason, Request, ReserveError,
    Stats, aperture::GranuleRequest,
};

/// The default window of a [`Bitmap`]: 4 GiB.
///
/// Why 4 GiB: nearly every device can address it, as few have masks below 32 bits; and at a granule
/// of 4 KiB it costs 256 KiB (in lazy mode 512 KiB) for 4 GiB of memory mapped at once, more than
/// devices usually have in flight. A device that keeps more mapped needs a larger window, which
/// costs memory and, once it is well filled, time.
pub const DEFAULT_WINDOW: u64 = 1 << 32;

/// The most granules that a window covers: 2^26, 8 MiB per bitmap (256 GiB at a granule of 4 KiB).
/// Without a bound, an aperture of 57 bits given as the window would need an enormous bitmap.
const MAX_GRANULES: u64 = 1 << 26;

/// Invalidates every cached translation of the IOMMU; a lazy [`Bitmap`] calls it once per lap.
///
/// It may free ranges of the calling bitmap, but not allocate from it.
pub trait Flush: Send + Sync {
    /// Returns once nothing that was unmapped before the call can be reached any more.
    ///
    /// # Errors
    /// The flush failed: nothing may be reused.
    fn flush(&self) -> Result<(), FlushFailed>;
}

/// A flush did not finish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the flush failed")]
pub struct FlushFailed;

impl<F: Fn() -> Result<(), FlushFailed> + Send + Sync> Flush for F {
    fn flush(&self) -> Result<(), FlushFailed> {
        self()
    }
}

/// One bit per granule, next fit, over the lowest part of an aperture: the *window*.
///
/// A search goes upwards from where the last one ended; at the end of the window it starts again at
/// the bottom: a *lap*. In lazy mode a freed range keeps its bits until the next lap; then one
/// flush invalidates everything, and all ranges freed before it become available at once (rule
/// [L16], the policy of s390 and SPARC). So the cost of one flush is spread over a whole lap of
/// mappings.
///
/// A second bitmap marks where each range ends, so that a free can be checked to cover exactly one
/// range.
///
/// [L16]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l16
pub struct Bitmap {
    window: Aperture,
    flush: Option<Box<dyn Flush>>,
    /// Held by the thread that flushes at the end of a lap; others wait for that flush. Taken
    /// before `state`.
    lap: SpinLock<()>,
    state: SpinLock<State>,
}

/// Bit `n` is the granule `n` of the window.
struct State {
    /// Taken: allocated, reserved, or freed and not flushed.
    used: Bits,
    /// The last granule of each taken range.
    ends: Bits,
    /// Reserved ranges, in order, apart from each other.
    reserved: Vec<(usize, usize)>,
    /// What was freed since the last lap's flush began.
    freed: Freed,
    /// What the running flush will release; empty if there is none.
    flushing: Freed,
    /// Where the next search starts.
    next: usize,
    stats: Stats,
}

/// Freed ranges that wait for a flush. Has no bits in a bitmap that is not lazy.
struct Freed {
    bits: Bits,
    ranges: u64,
    granules: u64,
}

impl Bitmap {
    /// A bitmap over the lowest `window` bytes of `aperture` (for the cost see [`DEFAULT_WINDOW`]);
    /// a freed range may be reused at once.
    ///
    /// The window is rounded up to whole granules and is at most 2^26 of them.
    pub fn new(aperture: Aperture, window: u64) -> Bitmap {
        Bitmap::with(aperture, window, None)
    }

    /// As [`new`](Self::new), but a freed range is reused only after the flush of the next lap
    /// (rule [L16]).
    ///
    /// [L16]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l16
    pub fn lazy(aperture: Aperture, window: u64, flush: Box<dyn Flush>) -> Bitmap {
        Bitmap::with(aperture, window, Some(flush))
    }

    fn with(aperture: Aperture, window: u64, flush: Option<Box<dyn Flush>>) -> Bitmap {
        let window = aperture.truncated(aperture.granules(window).clamp(1, MAX_GRANULES));
        let len = (window.high - window.low) as usize + 1;
        let lazy_len = if flush.is_some() { len } else { 0 };
        Bitmap {
            window,
            lap: SpinLock::new(()),
            state: SpinLock::new(State {
                used: Bits::new(len),
                ends: Bits::new(len),
                reserved: Vec::new(),
                freed: Freed::new(lazy_len),
                flushing: Freed::new(lazy_len),
                next: 0,
                stats: Stats::default(),
            }),
            flush,
        }
    }

    /// The part of the aperture from which it allocates.
    pub fn window(&self) -> Aperture {
        self.window
    }

    /// Ends the lap: everything that was freed so far is flushed and becomes free.
    ///
    /// `seen` is the number of laps when the caller found nothing; if another thread has completed
    /// a lap since, there may be free ranges without a flush.
    fn lap(
        &self,
        flush: &dyn Flush,
        wanted: &GranuleRequest,
        seen: u64,
    ) -> Result<usize, AllocReason> {
        let _turn = self.lap.lock();
        let mut state = self.state.lock();
        if state.stats.laps != seen
            && let Some(place) = state.take_from_next(&self.window, wanted)
        {
            return Ok(place);
        }
        // Ranges that are freed while the flush runs belong to the next one: this one may have
        // passed them already. There may be such ranges, as the state is not locked meanwhile.
        state.begin_flush();
        drop(state);
        let result = flush.flush();
        let mut state = self.state.lock();
        state.end_flush(result.is_ok());
        if result.is_err() {
            state.stats.failures += 1;
            return Err(AllocReason::FlushFailed);
        }
        state.take_from_bottom(&self.window, wanted)
    }
}

impl Allocator for Bitmap {
    fn alloc(&self, request: &Request) -> Result<u64, AllocError> {
        let mut state = self.state.lock();
        let wanted = self.window.wanted(request).inspect_err(|_| state.stats.failures += 1)?;
        let place = match state.take_from_next(&self.window, &wanted) {
            Some(place) => Ok(place),
            None => match self.flush.as_deref() {
                None => state.take_from_bottom(&self.window, &wanted),
                Some(flush) => {
                    let seen = state.stats.laps;
                    drop(state);
                    self.lap(flush, &wanted, seen)
                }
            },
        };
        match place {
            Ok(place) => Ok(self.window.start_of(self.window.low + place as u64)),
            Err(reason) => Err(AllocError { request: *request, reason }),
        }
    }

    fn free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        let mut state = self.state.lock();
        let freed = state.check(&self.window, iova, size);
        match freed {
            Ok((first, last)) => {
                state.free(first, last, self.flush.is_some());
                Ok(())
            }
            Err(reason) => {
                state.stats.rejected_frees += 1;
                Err(FreeError { iova, size, reason })
            }
        }
    }

    fn reserve(&self, first: u64, last: u64) -> Result<(), ReserveError> {
        let Some((low, high)) = self.window.clip(first, last)? else { return Ok(()) };
        let base = self.window.low;
        let (low, high) = ((low - base) as usize, (high - base) as usize);
        self.state.lock().reserve(low, high).map_err(|taken| ReserveError::InUse {
            first,
            last,
            taken: self.window.start_of(base + taken as u64).max(first),
        })
    }

    fn check_free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        let checked = self.state.lock().check(&self.window, iova, size);
        checked.map(drop).map_err(|reason| FreeError { iova, size, reason })
    }

    fn granule(&self) -> u64 {
        self.window.granule()
    }

    fn stats(&self) -> Stats {
        let mut stats = self.state.lock().stats;
        stats.live_bytes *= self.window.granule();
        stats
    }
}

impl fmt::Debug for Bitmap {
    ringfence_sync::shows!(Bitmap as it, window: it.window, lazy: it.flush.is_some());
}

impl Freed {
    fn new(len: usize) -> Freed {
        Freed { bits: Bits::new(len), ranges: 0, granules: 0 }
    }

    fn clear(&mut self) {
        self.bits.clear();
        self.ranges = 0;
        self.granules = 0;
    }
}

impl State {
    /// Takes the first place above the end of the last search.
    fn take_from_next(&mut self, window: &Aperture, wanted: &GranuleRequest) -> Option<usize> {
        self.take_from(window, wanted, self.next)
    }

    /// Begins a lap.
    fn take_from_bottom(
        &mut self,
        window: &Aperture,
        wanted: &GranuleRequest,
    ) -> Result<usize, AllocReason> {
        self.stats.laps += 1;
        self.next = 0;
        self.take_from(window, wanted, 0).ok_or_else(|| {
            self.stats.failures += 1;
            AllocReason::Exhausted { first: window.first(), last: window.end_of(wanted.limit) }
        })
    }

    fn take_from(
        &mut self,
        window: &Aperture,
        wanted: &GranuleRequest,
        from: usize,
    ) -> Option<usize> {
        self.stats.searches += 1;
        let base = window.low;
        // No overflow: the limit of a checked request lies within the window.
        let limit = (wanted.limit - base) as usize;
        let mut at = from;
        let (first, last) = loop {
            self.stats.search_steps += 1;
            let clear = self.used.next_clear(at, limit)?;
            // Alignment and boundary are those of the address, not of the bit.
            let place = wanted.lowest_in(base + clear as u64, wanted.limit)? - base;
            let (first, last) = (place as usize, (place + (wanted.count - 1)) as usize);
            match self.used.next_set(first, last) {
                None => break (first, last),
                Some(taken) => at = taken + 1,
            }
        };
        self.used.set_range(first, last);
        self.ends.set(last);
        self.next = last + 1;
        self.stats.allocs += 1;
        self.stats.live_ranges += 1;
        self.stats.live_bytes += wanted.count;
        Some(first)
    }

    /// The bits of the range, if it is exactly one allocated range.
    fn check(&self, window: &Aperture, iova: u64, size: u64) -> Result<(usize, usize), FreeReason> {
        let (number, count) = window.range_of(iova, size).ok_or(FreeReason::NotAllocated)?;
        let first = (number - window.low) as usize;
        let last = first + (count as usize - 1);
        if self.reserved.iter().any(|&(low, high)| low <= last && first <= high) {
            return Err(FreeReason::Reserved);
        }
        if !self.used.get(first) {
            return Err(FreeReason::NotAllocated);
        }
        if self.freed.bits.get(first) || self.flushing.bits.get(first) {
            return Err(FreeReason::AlreadyFree);
        }
        let starts = first.checked_sub(1).is_none_or(|b| !self.used.get(b) || self.ends.get(b));
        // The granules up to a range's end all belong to it.
        if starts && self.ends.next_set(first, last) == Some(last) {
            Ok((first, last))
        } else {
            Err(FreeReason::WrongRange)
        }
    }

    /// Assigns everything freed so far to the flush that follows.
    fn begin_flush(&mut self) {
        if self.flushing.ranges != 0 {
            // An earlier flush panicked: what it was to release waits for this one.
            self.end_flush(false);
        }
        mem::swap(&mut self.freed, &mut self.flushing);
    }

    /// Releases it if the flush succeeded; otherwise keeps it for the next.
    fn end_flush(&mut self, done: bool) {
        let State { used, ends, freed, flushing, stats, .. } = self;
        if done {
            used.clear_all_of(&flushing.bits);
            ends.clear_all_of(&flushing.bits);
            stats.live_ranges -= flushing.ranges;
            stats.live_bytes -= flushing.granules;
        } else {
            freed.bits.set_all_of(&flushing.bits);
            freed.ranges += flushing.ranges;
            freed.granules += flushing.granules;
        }
        flushing.clear();
    }

    fn free(&mut self, first: usize, last: usize, lazy: bool) {
        let count = (last - first) as u64 + 1;
        self.stats.frees += 1;
        if lazy {
            self.freed.bits.set_range(first, last);
            self.freed.ranges += 1;
            self.freed.granules += count;
        } else {
            self.used.clear_range(first, last);
            self.ends.clear_range(last, last);
            self.stats.live_ranges -= 1;
            self.stats.live_bytes -= count;
        }
    }

    /// Reserves `low..=high`; fails with a granule in it that is taken but not reserved.
    fn reserve(&mut self, low: usize, high: usize) -> Result<(), usize> {
        let mut at = low;
        while let Some(taken) = self.used.next_set(at, high) {
            match self.reserved.iter().find(|&&(first, last)| first <= taken && taken <= last) {
                Some(&(_, last)) => at = last + 1,
                None => return Err(taken),
            }
        }
        let (mut first, mut last) = (low, high);
        self.reserved.retain(|&(other_first, other_last)| {
            let apart = other_last < low || high < other_first;
            if !apart {
                first = first.min(other_first);
                last = last.max(other_last);
            }
            apart
        });
        let index = self.reserved.partition_point(|&(other, _)| other < first);
        self.reserved.insert(index, (first, last));
        self.used.set_range(first, last);
        self.ends.set(last);
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
