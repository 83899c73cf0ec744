//! Locks: for sections of a few instructions, and for those that allocate or search.

/// A lock for sections of any length: a waiting thread sleeps.
#[cfg(loom)]
pub use self::SpinLock as Mutex;
#[cfg(all(feature = "std", not(loom)))]
pub use parking_lot::Mutex;

use crate::{
    Backoff,
    atomic::{AtomicBool, Ordering},
};

/// A lock whose waiters spin first, then yield the CPU ([`Backoff`]).
///
/// For short sections only. It is not fair: on a machine with few CPUs, a queue whose next owner is
/// not running would stall every waiter behind it. Waiters only read until they see the lock free,
/// so as not to take the cache line from the owner.
///
/// A panic inside a section releases the lock and leaves the value as it is.
#[cfg(not(loom))]
pub type SpinLock<T> = lock_api::Mutex<RawSpinLock, T>;

/// Access to the value in a [`SpinLock`]; dropping it releases the lock.
#[cfg(not(loom))]
pub type SpinGuard<'a, T> = lock_api::MutexGuard<'a, RawSpinLock, T>;
#[cfg(loom)]
pub use loom::sync::MutexGuard as SpinGuard;

/// The bare lock of a [`SpinLock`], without a value.
#[derive(Debug)]
#[cfg_attr(loom, allow(dead_code, reason = "models use a lock that loom understands"))]
pub struct RawSpinLock {
    held: AtomicBool,
}

#[cfg_attr(loom, allow(dead_code, reason = "models use a lock that loom understands"))]
impl RawSpinLock {
    #[inline]
    fn take(&self) -> bool {
        // Acquire pairs with the Release of `release`: this owner sees what the last one wrote.
        self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    fn wait(&self) {
        if !self.take() {
            self.wait_slowly();
        }
    }

    #[cold]
    fn wait_slowly(&self) {
        let backoff = Backoff::new();
        loop {
            // Relaxed: this only waits; the exchange that follows orders.
            while self.held.load(Ordering::Relaxed) {
                backoff.snooze();
            }
            if self.take() {
                return;
            }
        }
    }

    /// To be called by the owner only.
    #[inline]
    fn release(&self) {
        // Release: the next owner sees what this one wrote.
        self.held.store(false, Ordering::Release);
    }
}

// SAFETY: of the threads that exchange `held` from false to true only one succeeds, until the owner
// stores false.
#[cfg(not(loom))]
unsafe impl lock_api::RawMutex for RawSpinLock {
    #[allow(clippy::declare_interior_mutable_const, reason = "the trait's way to make a lock")]
    const INIT: RawSpinLock = RawSpinLock { held: AtomicBool::new(false) };

    type GuardMarker = lock_api::GuardSend;

    #[inline]
    fn lock(&self) {
        self.wait();
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.take()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.release();
    }
}

/// In a model the lock is loom's, which parks the waiter instead of exploring every way to spin.
#[cfg(loom)]
#[derive(Debug, Default)]
pub struct SpinLock<T>(loom::sync::Mutex<T>);

#[cfg(loom)]
#[allow(missing_docs, reason = "as those of `lock_api::Mutex`")]
impl<T> SpinLock<T> {
    pub fn new(value: T) -> Self {
        SpinLock(loom::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> SpinGuard<'_, T> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
        self.0.try_lock().ok()
    }

    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::sync::Arc;

    #[test]
    fn one_thread_at_a_time_is_inside() {
        let lock = Arc::new(SpinLock::new(0u64));
        let threads: alloc::vec::Vec<_> = (0..4)
            .map(|_| {
                let lock = Arc::clone(&lock);
                std::thread::spawn(move || {
                    for _ in 0..10_000 {
                        let mut value = lock.lock();
                        // Two steps, so that a lost update would show.
                        let old = *value;
                        *value = old + 1;
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(*lock.lock(), 40_000);
    }

    #[test]
    fn a_held_lock_is_not_taken_twice_and_is_free_after_its_guard() {
        let mut lock = SpinLock::new(1);
        let guard = lock.lock();
        assert!(lock.try_lock().is_none());
        drop(guard);
        *lock.try_lock().unwrap() += 1;
        assert_eq!(*lock.lock(), 2);
        *lock.get_mut() += 1;
        assert_eq!(lock.into_inner(), 3);
    }

    #[test]
    fn a_panic_inside_frees_the_lock() {
        let lock = SpinLock::new(0);
        let result = std::panic::catch_unwind(core::panic::AssertUnwindSafe(|| {
            let _guard = lock.lock();
            panic!("inside");
        }));
        assert!(result.is_err());
        assert!(lock.try_lock().is_some());
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::RawSpinLock;
    use crate::{
        Arc,
        atomic::AtomicBool,
        model::{Memory, check},
    };

    #[test]
    fn sections_exclude_each_other_and_see_what_the_last_one_wrote() {
        check(None, || {
            let raw = RawSpinLock { held: AtomicBool::new(false) };
            let counter = Arc::new((raw, Memory::default()));
            let add = |(raw, memory): &(RawSpinLock, Memory)| {
                raw.wait();
                memory.write();
                raw.release();
            };
            let other = Arc::clone(&counter);
            let thread = loom::thread::spawn(move || add(&other));
            add(&counter);
            thread.join().unwrap();
            assert_eq!(counter.1.read(), 2);
        });
    }
}
