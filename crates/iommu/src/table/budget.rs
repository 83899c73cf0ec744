//! What several tables may hold together.

use alloc::{
    sync::{Arc, Weak},
    vec::Vec,
};
use core::fmt;

use ringfence_sync::{
    atomic::{AtomicU64, Ordering},
    lock::SpinLock,
};

use super::Limits;

/// How many mappings a table takes from a budget at a time, so that threads that map in different
/// tables rarely contend for its counter. A table keeps at most twice as many unused.
pub(super) const CHUNK: u64 = 64;

/// [`Limits`] for several tables together: limits for each alone would not bound the total.
///
/// Bytes are counted when memory is allocated and freed, which maps and unmaps in a steady state do
/// not do. Mappings are taken in chunks. So neither limit is ever exceeded. When a
/// [`SoftDomain`](crate::SoftDomain) finds nothing left, all of them give back what they do not
/// need; a [`Table`](super::Table) without a domain keeps up to 128 unused mappings.
pub struct Budget {
    limits: Limits,
    bytes: AtomicU64,
    /// Mappings that tables have taken, used or not.
    mappings: AtomicU64,
    sharers: SpinLock<Vec<Weak<dyn Sharer>>>,
}

/// The owner of a table that shares a budget.
pub(crate) trait Sharer: Send + Sync {
    /// Gives back what its table has taken but does not need.
    fn give_back(&self);
}

impl Budget {
    /// A budget from which nothing has been taken.
    pub fn new(limits: Limits) -> Arc<Budget> {
        Arc::new(Budget {
            limits,
            bytes: AtomicU64::new(0),
            mappings: AtomicU64::new(0),
            sharers: SpinLock::new(Vec::new()),
        })
    }

    /// What all tables together may hold.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Bytes of table memory in all tables, those that wait for their grace period included.
    pub fn table_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Mappings that tables have taken: at least as many as there are.
    pub fn taken_mappings(&self) -> u64 {
        self.mappings.load(Ordering::Relaxed)
    }

    /// Takes `bytes`; false if fewer are left.
    pub(super) fn take_bytes(&self, bytes: u64) -> bool {
        let room =
            |taken: u64| taken.checked_add(bytes).filter(|&sum| sum <= self.limits.table_bytes);
        self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).is_ok()
    }

    pub(super) fn give_bytes(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Takes at most `wanted` mappings; returns how many.
    pub(super) fn take_mappings(&self, wanted: u64) -> u64 {
        let room = |taken: u64| wanted.min(self.limits.mappings.saturating_sub(taken));
        let take = |taken: u64| Some(taken + room(taken)).filter(|&sum| sum != taken);
        let before = self.mappings.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        before.map_or(0, room)
    }

    pub(super) fn give_mappings(&self, mappings: u64) {
        if mappings > 0 {
            self.mappings.fetch_sub(mappings, Ordering::Relaxed);
        }
    }

    /// Registers `sharer`, which gives back what it does not need when others find nothing left.
    pub(crate) fn enter(&self, sharer: Weak<dyn Sharer>) {
        let mut sharers = self.sharers.lock();
        // Not each time, as there may be very many: only when full, and then the capacity doubles.
        if sharers.len() == sharers.capacity() {
            sharers.retain(|held| held.strong_count() > 0);
            let more = sharers.len();
            sharers.reserve(more);
        }
        sharers.push(sharer);
    }

    /// Makes all sharers give back what they do not need.
    pub(crate) fn relieve(&self) {
        // Not under the lock: this may drop the last reference to a sharer.
        let sharers: Vec<_> = self.sharers.lock().iter().filter_map(Weak::upgrade).collect();
        sharers.iter().for_each(|sharer| sharer.give_back());
    }
}

impl fmt::Debug for Budget {
    ringfence_sync::shows!(
        Budget as it, limits: it.limits, table_bytes: it.table_bytes(),
        taken_mappings: it.taken_mappings()
    );
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_taken_than_there_is() {
        let budget = Budget::new(Limits { table_bytes: 100, mappings: 100 });
        assert!(budget.take_bytes(60) && !budget.take_bytes(41) && budget.take_bytes(40));
        assert!(!budget.take_bytes(u64::MAX), "no sum wraps");
        budget.give_bytes(1);
        assert!(budget.take_bytes(1));
        assert_eq!([64, 64, 64].map(|wanted| budget.take_mappings(wanted)), [64, 36, 0]);
        budget.give_mappings(100);
        assert_eq!(budget.take_mappings(u64::MAX), 100);
    }

    #[test]
    fn no_limit_is_one_of_all_numbers() {
        let budget = Budget::new(Limits::NONE);
        assert!(budget.take_bytes(u64::MAX));
        assert_eq!(budget.take_mappings(5), 5);
    }
}
