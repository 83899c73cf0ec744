//! The set of cached ranges, to detect wrong frees.

use alloc::collections::BTreeSet;

use ringfence_sync::lock::SpinLock;

use crate::{FreeError, FreeReason};

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

    /// Whether the `size` bytes at `iova`, for which `check` succeeds, may be cached: they are not
    /// if they are cached already. If they may, and `record`, they count as cached from now on.
    pub(super) fn admits(
        &self,
        (iova, size): (u64, u64),
        record: bool,
        check: impl FnOnce() -> Result<(), FreeError>,
    ) -> Result<(), FreeError> {
        let mut cached = self.cached.lock();
        if cached.contains(&iova) {
            return Err(FreeError { iova, size, reason: FreeReason::AlreadyFree });
        }
        check()?;
        if record {
            cached.insert(iova);
        }
        Ok(())
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
