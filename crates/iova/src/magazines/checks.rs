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

    /// Whether `iova`, for which `check` succeeds, may be cached: false if it is cached already. If it
    /// may, and `record`, it counts as cached from now on.
    pub(super) fn admits(
        &self,
        iova: u64,
        record: bool,
        check: impl FnOnce() -> Result<(), FreeError>,
    ) -> Result<bool, FreeError> {
        let mut cached = self.cached.lock();
        if cached.contains(&iova) {
            return Ok(false);
        }
        check()?;
        if record {
            cached.insert(iova);
        }
        Ok(true)
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
