//! One magazine, and the depot of full ones.

use alloc::vec::Vec;

use ringfence_sync::atomic::{AtomicUsize, Ordering};

/// How many ranges a magazine holds: 1 KiB with its length, as in Linux.
pub const MAGAZINE_SLOTS: usize = 127;

/// The addresses of some ranges of one size class, newest last.
///
/// Starts without memory, so that sizes a CPU never frees cost nothing.
#[derive(Default)]
pub(super) struct Magazine {
    pub(super) slots: Vec<u64>,
}

impl Magazine {
    /// A magazine with memory; `None` if the allocation fails.
    fn try_new() -> Option<Magazine> {
        let mut slots = Vec::new();
        slots.try_reserve_exact(MAGAZINE_SLOTS).ok()?;
        Some(Magazine { slots })
    }

    pub(super) fn has_memory(&self) -> bool {
        self.slots.capacity() != 0
    }

    pub(super) fn is_full(&self) -> bool {
        self.slots.len() >= MAGAZINE_SLOTS
    }

    /// Only for a magazine with memory that is not full.
    pub(super) fn push(&mut self, iova: u64) {
        debug_assert!(self.has_memory() && !self.is_full());
        self.slots.push(iova);
    }

    /// The newest range of `size` bytes that ends at or below `limit` (rule L8).
    pub(super) fn pop(&mut self, size: u64, limit: u64) -> Option<u64> {
        // Compares first addresses: ranges are aligned to their size, so their ends do not wrap.
        let highest = limit.checked_sub(size - 1)?;
        let index = self.slots.iter().rposition(|iova| *iova <= highest)?;
        Some(self.slots.swap_remove(index))
    }
}

/// Makes magazines, up to a limit.
pub(super) struct Budget {
    left: AtomicUsize,
}

impl Budget {
    pub(super) fn new(magazines: usize) -> Budget {
        Budget { left: AtomicUsize::new(magazines) }
    }

    /// A new magazine, unless the limit is reached or there is no memory.
    pub(super) fn make(&self) -> Option<Magazine> {
        // Relaxed: only a count; nothing else depends on it.
        self.left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .ok()?;
        let made = Magazine::try_new();
        if made.is_none() {
            self.left.fetch_add(1, Ordering::Relaxed);
        }
        made
    }

    /// Whether `magazine` has room for one more range; allocates its memory if it has none yet.
    pub(super) fn has_room(&self, magazine: &mut Magazine) -> bool {
        if !magazine.has_memory()
            && let Some(made) = self.make()
        {
            *magazine = made;
        }
        magazine.has_memory() && !magazine.is_full()
    }

    /// Takes back a magazine that is no longer needed.
    pub(super) fn retire(&self, magazine: Magazine) {
        if magazine.has_memory() {
            self.left.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Full magazines of one size class, for all CPUs: last in, first out.
#[derive(Default)]
pub(super) struct Depot {
    pub(super) full: Vec<Magazine>,
    trimmed_ns: Option<u64>,
}

impl Depot {
    /// Gives the magazine back if there is no memory to keep it.
    pub(super) fn push(&mut self, magazine: Magazine) -> Result<(), Magazine> {
        if self.full.try_reserve(1).is_err() {
            return Err(magazine);
        }
        self.full.push(magazine);
        Ok(())
    }

    /// A magazine to give back, if there are more than `keep` and none was given back for
    /// `interval` (rule L10).
    pub(super) fn trim(&mut self, now_ns: u64, keep: usize, interval: u64) -> Option<Magazine> {
        let due = self.trimmed_ns.is_none_or(|then| now_ns.saturating_sub(then) >= interval);
        if !due || self.full.len() <= keep {
            return None;
        }
        self.trimmed_ns = Some(now_ns);
        self.full.pop()
    }
}
