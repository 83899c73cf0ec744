//! The set of cached ranges, to detect wrong frees.

use alloc::collections::BTreeSet;

use ringfence_sync::lock::SpinLock;

use crate::FreeError;

/// The addresses that are cached.
///
/// The allocator below cannot detect them: for it a cached range is allocated. Every step that
/// changes whether a range is cached *and* allocated below happens under this lock, so that a
/// second free never finds a range between the two.
pub(super) struct Checks {
    cached: SpinLock<BTreeSet<u64>>,
}

impl Checks {
    pub(super) fn new() -> Checks {
        Checks { cached: SpinLock::new(BTreeSet::new()) }
    }

    /// Records that `iova` is about to be cached, if `check` succeeds; returns `false` if it is
    /// cached already.
    pub(super) fn insert(
        &self,
        iova: u64,
        check: impl FnOnce() -> Result<(), FreeError>,
    ) -> Result<bool, FreeError> {
        let mut cached = self.cached.lock();
        if cached.contains(&iova) {
            return Ok(false);
        }
        check()?;
        Ok(cached.insert(iova))
    }

    /// As [`insert`](Self::insert), without recording anything.
    pub(super) fn look(
        &self,
        iova: u64,
        check: impl FnOnce() -> Result<(), FreeError>,
    ) -> Result<bool, FreeError> {
        let cached = self.cached.lock();
        if cached.contains(&iova) {
            return Ok(false);
        }
        check().map(|()| true)
    }

    /// Records that `iova` has left the caches for a caller.
    pub(super) fn taken(&self, iova: u64) {
        self.cached.lock().remove(&iova);
    }

    /// Records that `iova` has left the caches for the allocator below, to which `free` returns it.
    pub(super) fn remove(
        &self,
        iova: u64,
        free: impl FnOnce() -> Result<(), FreeError>,
    ) -> Result<(), FreeError> {
        let mut cached = self.cached.lock();
        let freed = free();
        cached.remove(&iova);
        freed
    }
}
