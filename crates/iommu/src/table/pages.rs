//! Table pages on their way from the tree to the allocator.

/// Table pages that were unlinked and wait for a grace period.
///
/// Dropping a list is safe and frees nothing: its pages go back to their table's *deferred* ones
/// ([`Table::take_deferred`](super::Table::take_deferred)), which are freed with the table at the
/// latest. They count against the limit until they are freed.
#[derive(Debug, Default)]
pub struct PageList {}

impl PageList {
    /// Adds the pages of `other`. If those are of another table than this list's, they are deferred
    /// in their own table instead, as if `other` had been dropped.
    pub fn append(&mut self, other: PageList) {
        let _ = other;
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        true
    }

    /// How many bytes of table memory the pages hold.
    pub fn bytes(&self) -> u64 {
        0
    }

    /// Frees the pages (rules L21, L40).
    ///
    /// # Safety
    /// Every call of [`Table::lookup`](super::Table::lookup) or
    /// [`Table::lookup_run`](super::Table::lookup_run) on the pages' table that began before the
    /// pages were put on the list (when [`Table::unmap`](super::Table::unmap) or
    /// [`Table::take_deferred`](super::Table::take_deferred) returned) has returned, and what those
    /// calls did happens-before this call. That is: a grace period that *started* after the list was
    /// filled is over, and every thread that uses the lock-free lookups takes part in it, making them
    /// only between two of its quiet points. Appending makes the younger of the two lists count.
    ///
    /// No other method of the table matters: they take its lock, under which nothing is reachable
    /// that was unlinked before. Nor does the table's life: its pages may outlive it.
    pub unsafe fn reclaim(self) {}
}
