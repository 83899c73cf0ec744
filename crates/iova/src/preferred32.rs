//! One device's preference for addresses below 4 GiB.

use ringfence_sync::atomic::{AtomicBool, Ordering};

use crate::{AllocError, Allocator, Request, allocator::pass_on};

/// The last 32-bit address.
const LAST_32: u64 = 0xffff_ffff;

/// Tries below 4 GiB first, for as long as that succeeds (rule [L12]).
///
/// Some devices and drivers handle addresses above 4 GiB badly, and short addresses cost less on
/// the bus; so requests without such a limit are first tried below 4 GiB, without draining the
/// caches for it. The first time that fails, the preference is dropped for good: otherwise every
/// later request would pay for a search of a full space.
///
/// This is the state of one device. Each device that shares a space has its own in front of it:
/// `Preferred32<Arc<A>>`.
///
/// [L12]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l12
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
                // An invalid request says nothing about the space below 4 GiB.
                Err(error) if error.reason.is_invalid() => {
                    return Err(AllocError { request: *request, ..error });
                }
                Err(_) => self.preferred.store(false, Ordering::Relaxed),
            }
        }
        // With draining, if the caller allows it: this is the last resort.
        self.inner.alloc(request)
    }

    pass_on!(self => self.inner);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Aperture, MagazineConfig, Magazines, RbTree};
    use ringfence_sync::cpu::OneCpu;
    use std::{sync::Arc, vec::Vec};

    const PAGE: u64 = 4096;

    impl<A> Preferred32<A> {
        fn is_preferred(&self) -> bool {
            self.preferred.load(Ordering::Relaxed)
        }
    }

    /// Sixteen pages below 4 GiB and sixteen above.
    fn tree() -> RbTree {
        let edge = 1u64 << 32;
        RbTree::new(Aperture::new(edge - 16 * PAGE, edge + 16 * PAGE - 1, PAGE).unwrap())
    }

    fn page() -> Request {
        Request::new(PAGE)
    }

    #[test]
    fn the_preference_is_dropped_for_good_at_the_first_failure() {
        // rule L12
        let device = Preferred32::new(tree());
        let low: Vec<u64> = (0..16).map(|_| device.alloc(&page()).unwrap()).collect();
        assert!(low.iter().all(|&iova| iova <= LAST_32));
        assert!(device.is_preferred());
        assert!(device.alloc(&page()).unwrap() > LAST_32);
        assert!(!device.is_preferred());
        for iova in low {
            device.free(iova, PAGE).unwrap();
        }
        // There is room below again, but the full mask is used now.
        assert!(device.alloc(&page()).unwrap() > LAST_32);
    }

    #[test]
    fn caches_are_drained_for_the_full_mask_only() {
        // rule L12
        let config = MagazineConfig { checked: true, ..MagazineConfig::default() };
        let shared = Arc::new(Magazines::with_config(tree(), OneCpu, config));
        let device = Preferred32::new(Arc::clone(&shared));
        let all: Vec<u64> = (0..16).map(|_| device.alloc(&page()).unwrap()).collect();
        for &iova in &all {
            device.free(iova, PAGE).unwrap();
        }
        // All below 4 GiB is cached. Two pages are not available without draining: they come from
        // above.
        assert!(device.alloc(&Request::new(2 * PAGE)).unwrap() > LAST_32);
        assert_eq!((shared.stats().drains, shared.stats().cached_ranges), (0, 16));
        // Eight pages at a time soon exhaust the space above; then it drains and finds those below.
        let large = Request::new(8 * PAGE);
        assert!(device.alloc(&large).unwrap() > LAST_32);
        assert!(device.alloc(&large).unwrap() <= LAST_32);
        assert_eq!(shared.stats().drains, 1);
        // Another device in the same space has a preference of its own.
        let other = Preferred32::new(Arc::clone(&shared));
        assert!(other.alloc(&page()).unwrap() <= LAST_32);
        assert!(other.is_preferred());
    }

    #[test]
    fn with_a_short_mask_nothing_is_tried_twice() {
        // rule L12
        let device = Preferred32::new(tree());
        for _ in 0..16 {
            device.alloc(&page().limit(LAST_32)).unwrap();
        }
        assert!(device.alloc(&page().limit(LAST_32)).is_err());
        // A device limited to 32 bits keeps the preference, and searches once.
        assert!(device.is_preferred());
        assert_eq!(device.stats().failures, 1);
        assert_eq!(device.alloc(&Request::new(0)).unwrap_err().request, Request::new(0));
        assert!(device.is_preferred());
    }
}
