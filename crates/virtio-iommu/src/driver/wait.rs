//! Waiting for replies: many threads, one ring, none of them holding its lock meanwhile.
//!
//! A thread that waits also works: it takes *all* replies out of the ring and publishes how far
//! they go in `retired`, so that the others see it without the lock. Threads that have spun long
//! enough sleep. One of them, the leader, waits for the device's notification; the others wait
//! until a thread takes replies out of the ring, or the leader's place becomes free.
//!
//! No wake-up is lost: [`Retired`] argues that of a thread that is about to follow and one that takes
//! replies out at least one sees the other; the first holds the mutex of the condition until it
//! sleeps, and the second notifies under that mutex.

use std::{
    hint,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use parking_lot::MutexGuard;
use ringfence_iommu::{Error, Result};
use ringfence_sync::{
    clock::MonotonicClock,
    wait::{Next, Wait},
};

use super::{Driver, Notify, ring::Ring};
use crate::wire::REQUEST_QUEUE;

/// Looks at the ring before the first at the clock, and between two for signs of life.
const LOOKS: u32 = 32;
/// How often a spinning thread looks whether the device still lives.
const LIFE_LOOK: Duration = Duration::from_millis(1);
/// How often a sleeping thread looks whether the device still lives.
const LIFE_SIGN: Duration = Duration::from_millis(100);

/// Distinguishes a hung device from a slow one by the time since `retired` moved. Only time in
/// which this thread looked counts: while the whole machine was stopped, or this thread was not
/// scheduled, the device may not have run either.
struct Watchdog {
    seen: u64,
    waited: Duration,
    looked: Instant,
    /// When to check that the transport is alive again, in terms of `waited`.
    life_at: Duration,
}

impl Watchdog {
    fn new(seen: u64) -> Watchdog {
        Watchdog { seen, waited: Duration::ZERO, looked: Instant::now(), life_at: LIFE_LOOK }
    }

    /// How long nothing has moved, given the current `retired`.
    fn look(&mut self, retired: u64) -> Duration {
        if retired != self.seen {
            *self = Watchdog::new(retired);
        } else {
            let now = Instant::now();
            self.waited += now.duration_since(self.looked).min(2 * LIFE_SIGN);
            self.looked = now;
        }
        self.waited
    }
}

impl Driver {
    /// The ring, locked.
    ///
    /// # Errors
    /// [`Error::Gone`], from the first failure on.
    #[inline]
    pub(super) fn ring(&self) -> Result<MutexGuard<'_, Ring>> {
        self.alive()?;
        Ok(self.ring.lock())
    }

    fn alive(&self) -> Result<()> {
        self.failed().map_or(Ok(()), Err)
    }

    fn fail(&self, why: &'static str) -> Error {
        let why = self.failed.get_or_init(|| why);
        let _led = self.led.lock();
        self.changed.notify_all();
        Error::Gone(why)
    }

    /// Takes the replies out of the ring and publishes how far they go.
    #[inline]
    pub(super) fn reap(&self, ring: &mut Ring) -> Result<()> {
        match ring.reap() {
            Ok(false) => Ok(()),
            Ok(true) => {
                if self.retired.advance(ring.retired) {
                    let _led = self.led.lock();
                    self.changed.notify_all();
                }
                Ok(())
            }
            Err(_) => Err(self.fail("the device broke the request queue")),
        }
    }

    /// The number of the last request up to which all are completed; 0 if none is.
    pub(super) fn retired(&self) -> u64 {
        self.retired.get()
    }

    fn is_retired(&self, seq: u64) -> bool {
        self.retired.get() >= seq
    }

    /// Kicks the device if it wants that and waits for everything that is in the ring now.
    ///
    /// # Errors
    /// [`Error::Gone`].
    pub(super) fn drain(&self) -> Result<()> {
        let target = self.begin()?;
        self.wait_until(target)
    }

    /// Kicks the device if it wants that and has something to do. The number of the last request in
    /// the ring, completed or not; 0 if there never was one.
    ///
    /// # Errors
    /// [`Error::Gone`].
    pub(super) fn begin(&self) -> Result<u64> {
        let mut ring = self.ring()?;
        self.reap(&mut ring)?;
        let target = ring.issued;
        if ring.retired >= target {
            return Ok(target);
        }
        let kick = ring.queue().needs_kick();
        drop(ring);
        if kick {
            self.kicks.fetch_add(1, Ordering::Relaxed);
            self.transport.kick(REQUEST_QUEUE);
        }
        Ok(target)
    }

    /// Whether all requests up to `target` are completed, without waiting.
    ///
    /// # Errors
    /// [`Error::Gone`].
    #[inline]
    pub(super) fn poll(&self, target: u64) -> Result<bool> {
        if self.is_retired(target) {
            return Ok(true);
        }
        self.alive()?;
        // If another thread holds the lock, it takes the replies out, or the caller polls again.
        if let Some(mut ring) = self.ring.try_lock() {
            self.reap(&mut ring)?;
        }
        Ok(self.is_retired(target))
    }

    /// Waits until all requests up to `target` are completed.
    ///
    /// # Errors
    /// [`Error::Gone`].
    pub(super) fn wait_until(&self, target: u64) -> Result<()> {
        let mut watchdog = Watchdog::new(self.retired.get());
        let mut wait = Wait::new(self.options.notify);
        let mut looks = 0u32;
        loop {
            if self.is_retired(target) {
                return Ok(());
            }
            self.alive()?;
            if let Some(mut ring) = self.ring.try_lock() {
                self.reap(&mut ring)?;
                if ring.retired >= target {
                    return Ok(());
                }
            }
            if looks.is_multiple_of(LOOKS) {
                self.check_timeout(&mut watchdog)?;
            }
            looks = looks.wrapping_add(1);
            if looks < LOOKS && self.options.notify != Notify::Sleep {
                hint::spin_loop();
            } else if wait.step(&MonotonicClock, || None) == Next::Sleep {
                return self.sleep_for(target, watchdog);
            }
        }
    }

    /// # Errors
    /// [`Error::Gone`] if no request was completed for too long, or the transport is gone.
    fn check_timeout(&self, watchdog: &mut Watchdog) -> Result<()> {
        let waited = watchdog.look(self.retired.get());
        if self.options.timeout.is_some_and(|limit| waited >= limit) {
            return Err(
                self.fail("the device does not respond: no request completed within the time-out")
            );
        }
        if waited < watchdog.life_at {
            return Ok(());
        }
        // This may cost a system call: not at every look.
        watchdog.life_at = waited + LIFE_LOOK;
        if !self.transport.is_alive() {
            return Err(self.fail("its end of the transport has gone"));
        }
        Ok(())
    }

    fn sleep_for(&self, target: u64, mut watchdog: Watchdog) -> Result<()> {
        let mut led = self.led.lock();
        while *led {
            self.retired.follow(target, || {
                if self.failed.get().is_none() {
                    self.changed.wait_for(&mut led, LIFE_SIGN);
                }
            });
            if self.is_retired(target) {
                return Ok(());
            }
            self.alive()?;
        }
        *led = true;
        drop(led);
        let result = self.lead(target, &mut watchdog);
        *self.led.lock() = false;
        self.changed.notify_all();
        result
    }

    /// Waits for notifications of the device, as the only thread that does.
    fn lead(&self, target: u64, watchdog: &mut Watchdog) -> Result<()> {
        loop {
            {
                let mut ring = self.ring()?;
                self.reap(&mut ring)?;
                if ring.retired >= target {
                    ring.queue().suppress_notifications();
                    return Ok(());
                }
                // A reply that came meanwhile may come without a notification: look again.
                if ring.queue().enable_notifications() {
                    continue;
                }
            }
            self.check_timeout(watchdog)?;
            let limit = self.options.timeout;
            let left = limit.map_or(LIFE_SIGN, |limit| limit.saturating_sub(watchdog.waited));
            self.transport.wait(REQUEST_QUEUE, left.min(LIFE_SIGN));
        }
    }
}
