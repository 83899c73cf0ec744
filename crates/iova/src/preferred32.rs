//! One device's preference for addresses below 4 GiB.

use ringfence_sync::atomic::{AtomicBool, Ordering};

use crate::{AllocError, Allocator, FreeError, Request, ReserveError, Stats};

/// The last address that 32 bits can say.
const LAST_32: u64 = 0xffff_ffff;

/// Tries below 4 GiB first, as long as that works (rule L12).
///
/// Some devices and drivers handle addresses above 4 GiB badly, and short addresses cost less on
/// the bus; so requests that could go anywhere are tried below 4 GiB first, without emptying the
/// caches for it. The first time that fails, the preference is dropped for good: from then on every
/// request would pay for a search of a full space.
///
/// This is the state of one device. Devices that share a space each have their own in front of it:
/// `Preferred32<Arc<A>>`.
#[derive(Debug)]
pub struct Preferred32<A> {
    inner: A,
    preferred: AtomicBool,
}

impl<A: Allocator> Preferred32<A> {
    /// A device that prefers addresses below 4 GiB in `inner`.
    pub fn new(inner: A) -> Self {
        Preferred32 { inner, preferred: AtomicBool::new(true) }
    }

    /// A device without the preference: it uses all the addresses it can from the start (Linux's
    /// `forcedac`).
    pub fn without_preference(inner: A) -> Self {
        Preferred32 { inner, preferred: AtomicBool::new(false) }
    }

    /// Whether requests still are tried below 4 GiB first.
    pub fn is_preferred(&self) -> bool {
        self.preferred.load(Ordering::Relaxed)
    }

    /// The allocator below.
    pub fn inner(&self) -> &A {
        &self.inner
    }
}

impl<A: Allocator> Allocator for Preferred32<A> {
    fn alloc(&self, request: &Request) -> Result<u64, AllocError> {
        // Relaxed: this is a hint; a thread that sees it late makes one more attempt.
        if request.limit > LAST_32 && self.preferred.load(Ordering::Relaxed) {
            match self.inner.alloc(&request.limit(LAST_32).flush(false)) {
                Ok(iova) => return Ok(iova),
                // A request that makes no sense says nothing about the space below 4 GiB.
                Err(error) if error.reason.is_invalid() => {
                    return Err(AllocError { request: *request, ..error });
                }
                Err(_) => self.preferred.store(false, Ordering::Relaxed),
            }
        }
        // With draining, if the caller allows it: now it is the last resort.
        self.inner.alloc(request)
    }

    fn free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        self.inner.free(iova, size)
    }

    fn reserve(&self, first: u64, last: u64) -> Result<(), ReserveError> {
        self.inner.reserve(first, last)
    }

    fn check_free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        self.inner.check_free(iova, size)
    }

    fn granule(&self) -> u64 {
        self.inner.granule()
    }

    fn optimal_size(&self) -> u64 {
        self.inner.optimal_size()
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }

    fn drain(&self) {
        self.inner.drain();
    }
}
