//! A log of the latest invalidations, which the readers replay.

use alloc::boxed::Box;

use ringfence_sync::{
    CachePadded,
    atomic::{AtomicU64, Ordering, fence},
};

use crate::{Iova, Range};

/// How many invalidated ranges the log holds. A reader that falls further behind drops everything.
/// (Under the model checker fewer, so that it can explore lapping.)
pub(super) const LOG: usize = if cfg!(loom) { 2 } else { 256 };

/// The last invalidated ranges, in a ring.
///
/// Writers take turns (by the lock of [`Shootdown::pending`]); readers take no lock, so an entry
/// may be overwritten while they read it. `claimed` shows that: it is raised before an entry is
/// overwritten, and `written` after.
pub(super) struct Log {
    claimed: CachePadded<AtomicU64>,
    written: AtomicU64,
    entries: Box<[LogEntry]>,
}

struct LogEntry {
    first: AtomicU64,
    last: AtomicU64,
}

impl Log {
    pub(super) fn new() -> Log {
        let entry = |_| LogEntry { first: AtomicU64::new(0), last: AtomicU64::new(0) };
        Log {
            claimed: CachePadded::new(AtomicU64::new(0)),
            written: AtomicU64::new(0),
            entries: (0..LOG).map(entry).collect(),
        }
    }

    /// How many ranges were logged so far. Acquire: the caller sees all that was done before they
    /// were logged.
    pub(super) fn position(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    fn entry(&self, position: u64) -> &LogEntry {
        &self.entries[(position % LOG as u64) as usize]
    }

    /// One writer at a time.
    pub(super) fn push(&self, range: Range) {
        let position = self.written.load(Ordering::Relaxed);
        self.claimed.store(position + 1, Ordering::Relaxed);
        // Pairs with the fence in `get`: a reader that sees one of the two stores below sees the
        // claim above.
        fence(Ordering::Release);
        let entry = self.entry(position);
        entry.first.store(range.first().0, Ordering::Relaxed);
        entry.last.store(range.last().0, Ordering::Relaxed);
        // Release: a reader that sees the position sees the range, and what was removed before.
        self.written.store(position + 1, Ordering::Release);
    }

    /// The range at `position`, which has been written; `None` if it was overwritten.
    #[inline]
    fn get(&self, position: u64) -> Option<Range> {
        let entry = self.entry(position);
        let first = entry.first.load(Ordering::Relaxed);
        let last = entry.last.load(Ordering::Relaxed);
        // Pairs with the fence in `push`.
        fence(Ordering::Acquire);
        if self.claimed.load(Ordering::Relaxed) - position > LOG as u64 {
            return None;
        }
        Range::new(Iova(first), Iova(last))
    }

    /// Calls `f` with every range from `*replayed` on, and moves `*replayed` to the end.
    #[inline(never)]
    pub(super) fn replay(&self, replayed: &mut u64, mut f: impl FnMut(Range)) {
        let end = self.position();
        // If `f` panics, the reader stays where it was and will replay everything again.
        for position in *replayed..end {
            let gone = self.get(position).unwrap_or(Range::ALL);
            f(gone);
            // It includes everything that follows, and everything that was overwritten if we were
            // lapped.
            if gone == Range::ALL {
                break;
            }
        }
        *replayed = end;
    }
}
