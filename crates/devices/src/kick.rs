//! What a driver wakes its ring's worker with.

use std::{
    cell::Cell,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use ringfence_vhost_user::PeerFd;

use crate::event;

/// How often in a row a kick may wake the worker without anything in the ring. A driver kicks once for something
/// that the worker, still awake, has found by itself, and hardly more often.
const IN_VAIN: u32 = 64;
/// What something in the ring makes up for: who wants to wake the worker for nothing has to give it work half of
/// the time.
const MAKES_UP: u32 = 2;
/// The worker listens again at each multiple of this, ns: once for all kicks, however many there are.
const REST_NS: u64 = 4_000_000;

/// The eventfd of one ring. Those who have it write to it as often as they like, or have made it such that it
/// stays readable (`EFD_SEMAPHORE`). One that wakes the worker again and again though there is nothing in the
/// ring is listened to a few times in a while, until there is: what comes with it is late by 4 ms at most.
pub struct Kick {
    event: PeerFd,
    in_vain: Cell<u32>,
    /// Since which multiple of [`REST_NS`] nobody has listened.
    heard: Cell<u64>,
}

impl Kick {
    /// There was something in the ring.
    #[inline]
    pub fn found(&self) {
        if self.in_vain.get() != 0 {
            self.in_vain.set(self.in_vain.get().saturating_sub(MAKES_UP));
        }
    }

    /// Until when a worker that begins to sleep now does not listen, if it should not.
    pub(crate) fn rests_until(&self, now_ns: u64) -> Option<u64> {
        let rest = now_ns / REST_NS;
        let rests = self.in_vain.get() == IN_VAIN && self.heard.get() == rest;
        rests.then(|| (rest + 1).saturating_mul(REST_NS))
    }

    /// It has woken a worker that began to sleep at that time.
    pub(crate) fn wakes(&self, slept_ns: u64) {
        event::drain(&self.event);
        self.in_vain.set(IN_VAIN.min(self.in_vain.get() + 1));
        self.heard.set(slept_ns / REST_NS);
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl From<PeerFd> for Kick {
    fn from(event: PeerFd) -> Kick {
        Kick { event, in_vain: Cell::new(0), heard: Cell::new(0) }
    }
}

impl From<OwnedFd> for Kick {
    fn from(event: OwnedFd) -> Kick {
        PeerFd::from(event).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_in_vain_rests_until_something_is_found() {
        let kick = Kick::from(event::new().unwrap());
        for _ in 0..IN_VAIN {
            assert_eq!(kick.rests_until(5), None);
            kick.wakes(5);
        }
        assert_eq!(kick.rests_until(5), Some(REST_NS));
        assert_eq!(kick.rests_until(REST_NS - 1), Some(REST_NS));
        // Once in a while.
        assert_eq!(kick.rests_until(REST_NS), None);
        kick.wakes(REST_NS);
        assert_eq!(kick.rests_until(REST_NS + 1), Some(2 * REST_NS));
        assert_eq!(kick.rests_until(u64::MAX), None);
        kick.wakes(u64::MAX);
        assert_eq!(kick.rests_until(u64::MAX), Some(u64::MAX));
        kick.found();
        assert_eq!(kick.rests_until(u64::MAX), None);
        kick.wakes(u64::MAX);
        kick.wakes(u64::MAX);
        assert_eq!(kick.rests_until(u64::MAX), Some(u64::MAX));
    }

    #[test]
    fn one_that_brings_something_half_of_the_time_never_rests() {
        let kick = Kick::from(event::new().unwrap());
        for _ in 0..10 * IN_VAIN {
            kick.wakes(5);
            assert_eq!(kick.rests_until(5), None);
            kick.wakes(5);
            kick.found();
            assert_eq!(kick.rests_until(5), None);
        }
    }
}
