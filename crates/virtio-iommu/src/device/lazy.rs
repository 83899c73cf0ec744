//! Lazy domains (proposal oasis-tcs/virtio-spec#204): an UNMAP is completed at once, and an
//! IOTLB_FLUSH invalidates what may still be cached of it.

use std::sync::Arc;

use parking_lot::Mutex;
use ringfence_iommu::{Domain, Gather, Range, Result};

/// What a lazy domain has unmapped and not invalidated yet. It belongs to the domain and not to a
/// request queue, so that any queue may flush.
///
/// A flush that finds another one under way also waits for what that one invalidates, because its
/// reply covers everything that was unmapped before. So ranges are kept until no flush is under way
/// any more, and each flush invalidates all that are kept. They are few: more than a [`Gather`] has
/// room for become all addresses.
#[derive(Default)]
pub(super) struct Lazy {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Unmapped since the last flush began.
    fresh: Gather,
    /// What flushes under way invalidate; empty if there are none.
    leaving: Gather,
    flights: usize,
    /// Whether one of them failed.
    failed: bool,
}

impl Lazy {
    /// Removes the translations of `range`, which readers may have cached until the next flush.
    ///
    /// # Errors
    /// The domain's; nothing was removed.
    pub(super) fn unmap<D: Domain>(&self, domain: &D, range: Range) -> Result<()> {
        let mut state = self.state.lock();
        domain.unmap(range, &mut state.fresh)?;
        // Not kept for a flush that may never come: the domain frees them after their grace period,
        // at the latest when it has no room for others.
        drop(state.fresh.take_pages());
        // More ranges than a gather holds: widening one for each UNMAP would cost more than the
        // caches save by keeping what lies between them.
        if !state.fresh.is_exact() {
            state.fresh.add(Range::ALL);
        }
        Ok(())
    }

    /// Adds all that was unmapped so far to `gather`, which is synced next; `None`: there was
    /// nothing.
    pub(super) fn flush<'g>(
        self: &Arc<Self>,
        gather: impl FnOnce() -> &'g mut Gather,
    ) -> Option<Flight> {
        let mut state = self.state.lock();
        let State { fresh, leaving, flights, .. } = &mut *state;
        fresh.ranges().iter().for_each(|&range| leaving.add(range));
        fresh.clear_ranges();
        if leaving.is_empty() {
            return None;
        }
        *flights += 1;
        let gather = gather();
        leaving.ranges().iter().for_each(|&range| gather.add(range));
        Some(Flight { lazy: Arc::clone(self), landed: false })
    }
}

/// A flush under way. If it is dropped without landing it has failed: the next one invalidates the
/// same again.
pub(super) struct Flight {
    lazy: Arc<Lazy>,
    landed: bool,
}

impl Flight {
    /// Everything that it was to invalidate is invalidated.
    pub(super) fn land(mut self) {
        self.landed = true;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let mut state = self.lazy.state.lock();
        let State { fresh, leaving, flights, failed } = &mut *state;
        *flights -= 1;
        *failed |= !self.landed;
        if *flights > 0 {
            return;
        }
        if core::mem::take(failed) {
            leaving.ranges().iter().for_each(|&range| fresh.add(range));
        }
        leaving.clear_ranges();
    }
}
