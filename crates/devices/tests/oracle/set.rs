//! The set of bytes that the device may touch, as the user of the DMA API is entitled to see it.

use ringfence_dma::{Direction, Segment};
use ringfence_iommu::Prot;

use crate::history::History;

/// Bytes of a buffer that lie side by side, in I/O virtual addresses and in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) iova: u64,
    pub(crate) gpa: u64,
    pub(crate) len: u64,
}

impl Run {
    pub(crate) fn last(&self) -> u64 {
        self.iova + (self.len - 1)
    }

    /// Where `addr` leads, if it lies in a granule of this run.
    fn gpa_of(&self, addr: u64, granule: u64) -> Option<u64> {
        let (first, last) = (self.iova & !(granule - 1), self.last() | (granule - 1));
        (first..=last).contains(&addr).then(|| self.gpa.wrapping_add(addr.wrapping_sub(self.iova)))
    }

    fn holds(&self, addr: u64) -> bool {
        (self.iova..=self.last()).contains(&addr)
    }
}

/// Where each byte of the pieces is: that follows from the segments alone. `None` if these are not
/// as long as the pieces.
pub(crate) fn runs(segments: &[Segment], pieces: &[(u64, u64)]) -> Option<Vec<Run>> {
    let mut segments = segments.iter().map(|segment| (segment.addr, segment.len));
    let (mut iova, mut left) = segments.next()?;
    let mut runs = Vec::new();
    for &(gpa, len) in pieces {
        let mut done = 0;
        while done < len {
            if left == 0 {
                (iova, left) = segments.next()?;
            }
            let take = left.min(len - done);
            runs.push(Run { iova, gpa: gpa + done, len: take });
            // The last byte may be the last address of all.
            (iova, left, done) = (iova.wrapping_add(take), left - take, done + take);
        }
    }
    (left == 0 && segments.next().is_none()).then_some(runs)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// In a batch: requested, and not handed out yet.
    Coming,
    Live,
    /// In a batch, after its invalidation has begun. Granules that are not shared are over then,
    /// and under a lazy policy the addresses may be free before the buffer is handed out.
    Going,
    /// Unmapped lazily, or not known to be unmapped: reachable until the history closes it.
    Stale,
    /// As stale, and its addresses are never to be used again.
    Quarantined,
    /// Unreachable.
    Gone,
}

/// A mapping as it was made.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) runs: Vec<Run>,
    pub(crate) prot: Prot,
    pub(crate) state: State,
    /// Its pieces in the history.
    pub(crate) pieces: Vec<usize>,
    /// Whether a watcher keeps its addresses from being used.
    pub(crate) watched: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It must succeed, here.
    Must(u64),
    /// If it succeeds, then here: it shares a granule with a buffer, or is in a batch under way.
    May(u64),
    /// If it succeeds, then here: it was unmapped, and no invalidation has completed since.
    Stale(u64),
    Never,
}

pub(crate) struct Set {
    granule: u64,
    pub(crate) entries: Vec<Entry>,
}

impl Set {
    pub(crate) fn new(granule: u64) -> Set {
        Set { granule, entries: Vec::new() }
    }

    /// What is to become of an access to the byte at `addr`.
    pub(crate) fn verdict(&self, addr: u64, write: bool) -> Verdict {
        let wanted = if write { Prot::WRITE } else { Prot::READ };
        let mut verdict = Verdict::Never;
        for entry in self.entries.iter().filter(|entry| entry.state != State::Gone) {
            let here = entry.runs.iter().find_map(|run| run.gpa_of(addr, self.granule));
            let Some(gpa) = here.filter(|_| entry.prot.allows(wanted)) else { continue };
            verdict = match entry.state {
                State::Live if entry.runs.iter().any(|run| run.holds(addr)) => {
                    return Verdict::Must(gpa);
                }
                State::Coming | State::Live | State::Going => Verdict::May(gpa),
                _ => Verdict::Stale(gpa),
            };
        }
        verdict
    }

    /// Whether the byte at `addr` is mapped, and not for this access.
    pub(crate) fn is_for_another(&self, addr: u64, write: bool) -> bool {
        matches!(self.verdict(addr, write), Verdict::Never)
            && !matches!(self.verdict(addr, !write), Verdict::Never)
    }

    /// Adds a mapping; its number.
    ///
    /// # Errors
    /// Its addresses are in use, or not free yet.
    pub(crate) fn add(
        &mut self,
        runs: Vec<Run>,
        direction: Direction,
        pieces: Vec<usize>,
    ) -> Result<usize, String> {
        self.check_free(&runs)?;
        let (prot, state) = (direction.prot(), State::Live);
        self.entries.push(Entry { runs, prot, state, pieces, watched: false });
        Ok(self.entries.len() - 1)
    }

    fn check_free(&self, runs: &[Run]) -> Result<(), String> {
        for run in runs {
            let taken = self.entries.iter().find(|entry| {
                (entry.state != State::Gone || entry.watched)
                    && entry.runs.iter().any(|held| {
                        let first = held.iova & !(self.granule - 1);
                        let last = held.last() | (self.granule - 1);
                        first <= run.last() && run.iova <= last
                    })
            });
            if let Some(taken) = taken {
                return Err(format!("{run:x?} was handed out, but there is still {taken:x?}"));
            }
            // (Slots begin on a granule, and so do copies in them.)
            if (run.iova ^ run.gpa) & (self.granule - 1) != 0 {
                return Err(format!("{run:x?} lost its offset in the granule"));
            }
        }
        Ok(())
    }

    /// Notes what invalidations have finished since. Calls `each` with the number of what is gone
    /// by that.
    pub(crate) fn settle(&mut self, history: &History, mut each: impl FnMut(usize)) {
        for (number, entry) in self.entries.iter_mut().enumerate() {
            if matches!(entry.state, State::Going | State::Stale | State::Quarantined)
                && history.closed(&entry.pieces)
            {
                // What is quarantined keeps its addresses, reachable or not.
                entry.watched |= entry.state == State::Quarantined;
                entry.state = State::Gone;
                each(number);
            }
        }
    }
}
