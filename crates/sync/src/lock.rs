//! Locks: for sections of a few instructions, and for those that allocate or search.

use core::{
    fmt,
    ops::{Deref, DerefMut},
};

use imp::Imp;

/// A lock for sections of any length: a waiting thread sleeps.
#[cfg(loom)]
pub use self::SpinLock as Mutex;
#[cfg(all(feature = "std", not(loom)))]
pub use parking_lot::Mutex;

/// A lock whose waiters spin first, then yield the CPU ([`Backoff`](crate::Backoff)).
///
/// For short sections only. It is not fair: on a machine with few CPUs, a queue whose next owner is
/// not running would stall every waiter behind it. Waiters only read until they see the lock free,
/// so as not to take the cache line from the owner.
///
/// A panic inside a section releases the lock and leaves the value as it is.
pub struct SpinLock<T> {
    imp: Imp<T>,
}

/// Access to the value in a [`SpinLock`]; dropping it releases the lock.
#[must_use = "the lock is released when the guard is dropped"]
pub struct SpinGuard<'a, T> {
    guard: imp::Guard<'a, T>,
}

impl<T> SpinLock<T> {
    /// A free lock over `value`.
    #[cfg(not(loom))]
    pub const fn new(value: T) -> SpinLock<T> {
        SpinLock { imp: Imp::new(value) }
    }

    /// A free lock over `value`.
    #[cfg(loom)]
    pub fn new(value: T) -> SpinLock<T> {
        SpinLock { imp: Imp::new(value) }
    }

    /// Waits for the lock and takes it.
    #[inline]
    pub fn lock(&self) -> SpinGuard<'_, T> {
        SpinGuard { guard: self.imp.lock() }
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
        self.imp.try_lock().map(|guard| SpinGuard { guard })
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.imp.into_inner()
    }

    /// The value, without locking: `&mut self` excludes other users.
    pub fn get_mut(&mut self) -> &mut T {
        self.imp.get_mut()
    }
}

impl<T: Default> Default for SpinLock<T> {
    fn default() -> Self {
        SpinLock::new(T::default())
    }
}

impl<T: fmt::Debug> fmt::Debug for SpinLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.try_lock() {
            Some(value) => f.debug_tuple("SpinLock").field(&*value).finish(),
            None => f.write_str("SpinLock(<locked>)"),
        }
    }
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T: fmt::Debug> fmt::Debug for SpinGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

/// The bare lock, separate so that the model can check exactly this.
#[cfg_attr(loom, allow(dead_code, reason = "models use a lock that loom understands"))]
mod raw {
    use crate::{
        Backoff,
        atomic::{AtomicBool, Ordering},
    };

    pub(super) struct Raw {
        held: AtomicBool,
    }

    impl Raw {
        #[cfg(not(loom))]
        pub(super) const fn new() -> Raw {
            Raw { held: AtomicBool::new(false) }
        }

        #[cfg(loom)]
        pub(super) fn new() -> Raw {
            Raw { held: AtomicBool::new(false) }
        }

        #[inline]
        pub(super) fn try_lock(&self) -> bool {
            // Acquire pairs with the Release of `unlock`: this owner sees what the last one wrote.
            self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
        }

        #[inline]
        pub(super) fn lock(&self) {
            if !self.try_lock() {
                self.lock_slow();
            }
        }

        #[cold]
        fn lock_slow(&self) {
            let backoff = Backoff::new();
            loop {
                // Relaxed: this only waits; the exchange that follows orders.
                while self.held.load(Ordering::Relaxed) {
                    backoff.snooze();
                }
                if self.try_lock() {
                    return;
                }
            }
        }

        /// To be called by the owner only.
        #[inline]
        pub(super) fn unlock(&self) {
            // Release: the next owner sees what this one wrote.
            self.held.store(false, Ordering::Release);
        }
    }
}

#[cfg(not(loom))]
mod imp {
    use core::{
        cell::UnsafeCell,
        marker::PhantomData,
        ops::{Deref, DerefMut},
    };

    use super::raw::Raw;

    pub(super) struct Imp<T> {
        raw: Raw,
        value: UnsafeCell<T>,
    }

    // SAFETY: only the owner of the lock reaches the value, one thread at a time; the value thereby
    // moves from thread to thread, hence `T: Send`.
    unsafe impl<T: Send> Sync for Imp<T> {}

    pub(super) struct Guard<'a, T> {
        lock: &'a Imp<T>,
        /// A shared guard shares `&T`, so it may be `Sync` only if `T` is. The reference to the
        /// lock alone would require only `T: Send`.
        _value: PhantomData<&'a mut T>,
    }

    impl<T> Imp<T> {
        pub(super) const fn new(value: T) -> Self {
            Imp { raw: Raw::new(), value: UnsafeCell::new(value) }
        }

        #[inline]
        pub(super) fn lock(&self) -> Guard<'_, T> {
            self.raw.lock();
            Guard { lock: self, _value: PhantomData }
        }

        #[inline]
        pub(super) fn try_lock(&self) -> Option<Guard<'_, T>> {
            self.raw.try_lock().then(|| Guard { lock: self, _value: PhantomData })
        }

        pub(super) fn into_inner(self) -> T {
            self.value.into_inner()
        }

        pub(super) fn get_mut(&mut self) -> &mut T {
            self.value.get_mut()
        }
    }

    impl<T> Deref for Guard<'_, T> {
        type Target = T;
        #[inline]
        fn deref(&self) -> &T {
            // SAFETY: a guard exists only while its thread owns the lock.
            unsafe { &*self.lock.value.get() }
        }
    }

    impl<T> DerefMut for Guard<'_, T> {
        #[inline]
        fn deref_mut(&mut self) -> &mut T {
            // SAFETY: as above, and the guard is borrowed exclusively.
            unsafe { &mut *self.lock.value.get() }
        }
    }

    impl<T> Drop for Guard<'_, T> {
        #[inline]
        fn drop(&mut self) {
            self.lock.raw.unlock();
        }
    }
}

/// In a model the lock is loom's, which parks the waiter instead of exploring every way to spin.
#[cfg(loom)]
mod imp {
    pub(super) use loom::sync::MutexGuard as Guard;

    pub(super) struct Imp<T>(loom::sync::Mutex<T>);

    impl<T> Imp<T> {
        pub(super) fn new(value: T) -> Self {
            Imp(loom::sync::Mutex::new(value))
        }

        pub(super) fn lock(&self) -> Guard<'_, T> {
            self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
        }

        pub(super) fn try_lock(&self) -> Option<Guard<'_, T>> {
            self.0.try_lock().ok()
        }

        pub(super) fn into_inner(self) -> T {
            self.0.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())
        }

        pub(super) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner())
        }
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
        assert_eq!(alloc::format!("{lock:?}"), "SpinLock(<locked>)");
        drop(guard);
        *lock.try_lock().unwrap() += 1;
        assert_eq!(alloc::format!("{lock:?}"), "SpinLock(2)");
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
    use super::raw::Raw;
    use crate::{Arc, cell::UnsafeCell};

    struct Counter {
        raw: Raw,
        value: UnsafeCell<u32>,
    }

    // SAFETY: the value is touched only while the lock is held, which is what the model checks.
    unsafe impl Sync for Counter {}
    // SAFETY: as above.
    unsafe impl Send for Counter {}

    fn add(counter: &Counter) {
        counter.raw.lock();
        // SAFETY: the lock is held; loom fails the model if an access overlaps or is unordered.
        counter.value.with_mut(|value| unsafe { *value += 1 });
        counter.raw.unlock();
    }

    #[test]
    fn sections_exclude_each_other_and_see_what_the_last_one_wrote() {
        loom::model(|| {
            let counter = Arc::new(Counter { raw: Raw::new(), value: UnsafeCell::new(0) });
            let other = Arc::clone(&counter);
            let thread = loom::thread::spawn(move || add(&other));
            add(&counter);
            thread.join().unwrap();
            // SAFETY: the other thread has ended.
            assert_eq!(counter.value.with(|value| unsafe { *value }), 2);
        });
    }
}
