//! The eventfd by which a driver wakes its ring's worker.

use std::{
    cell::Cell,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use crate::PeerFd;

use crate::event;

/// How often a kick may wake the worker with nothing in the ring, beyond what chains make up for
/// ([`MAKES_UP`]). A driver kicks once for a chain that the worker, still awake, has found by
/// itself, and hardly more often.
const IN_VAIN: u32 = 64;
/// How many wake-ups in vain each chain makes up for.
const MAKES_UP: u32 = 2;
/// At each multiple of this, in ns, the worker listens to kicks in vain again, until one of them
/// has woken it.
const REST_NS: u64 = 4_000_000;

/// The eventfd of one ring. A peer can write to it as often as it likes, or have made it such that
/// it stays readable (`EFD_SEMAPHORE`). If a kick wakes the worker again and again with nothing in
/// the ring, the worker listens to it only once in a while until the ring holds something: that is
/// then late by 4 ms at most.
pub struct Kick {
    event: PeerFd,
    in_vain: Cell<u32>,
}

/// A worker's state for all its kicks: when a kick in vain last woke it, in units of [`REST_NS`].
#[derive(Default)]
pub(crate) struct Rest(Option<u64>);

impl Rest {
    /// Until when a worker that goes to sleep now ignores kicks in vain; `None` if it listens to
    /// them.
    pub(crate) fn until(&self, now_ns: u64) -> Option<u64> {
        let rest = now_ns / REST_NS;
        (self.0 == Some(rest)).then(|| (rest + 1).saturating_mul(REST_NS))
    }

    /// `kick` has woken a worker that went to sleep at `slept_ns`.
    pub(crate) fn ends(&mut self, kick: &Kick, slept_ns: u64) {
        event::drain(kick);
        if kick.is_in_vain() {
            self.0 = Some(slept_ns / REST_NS);
        }
        kick.in_vain.set(IN_VAIN.min(kick.in_vain.get() + 1));
    }
}

impl Kick {
    /// The ring held so many chains.
    #[inline]
    pub fn found(&self, chains: usize) {
        if self.in_vain.get() != 0 {
            let made_up = u32::try_from(chains).unwrap_or(u32::MAX).saturating_mul(MAKES_UP);
            self.in_vain.set(self.in_vain.get().saturating_sub(made_up));
        }
    }

    /// Whether it wakes the worker in vain, as a rule.
    pub(crate) fn is_in_vain(&self) -> bool {
        self.in_vain.get() == IN_VAIN
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl From<PeerFd> for Kick {
    fn from(event: PeerFd) -> Kick {
        Kick { event, in_vain: Cell::new(0) }
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
    fn those_in_vain_wake_a_worker_once_in_a_while_together() {
        let [one, other] = [(); 2].map(|()| Kick::from(event::new().unwrap()));
        let mut rest = Rest::default();
        for kick in [&one, &other] {
            for _ in 0..IN_VAIN {
                assert!(!kick.is_in_vain());
                rest.ends(kick, 5);
                assert_eq!(rest.until(5), None);
            }
            assert!(kick.is_in_vain());
        }
        rest.ends(&one, 5);
        assert_eq!(rest.until(5), Some(REST_NS));
        assert_eq!(rest.until(REST_NS - 1), Some(REST_NS));
        assert_eq!(rest.until(REST_NS), None);
        rest.ends(&other, REST_NS);
        assert_eq!(rest.until(REST_NS + 1), Some(2 * REST_NS));
        assert_eq!(rest.until(u64::MAX), None);
        rest.ends(&one, u64::MAX);
        assert_eq!(rest.until(u64::MAX), Some(u64::MAX));
        one.found(1);
        assert!(!one.is_in_vain());
        one.found(usize::MAX);
        rest.ends(&one, 5);
        assert_eq!(
            rest.until(u64::MAX),
            Some(u64::MAX),
            "it is not in vain, so nothing is known of others"
        );
    }

    #[test]
    fn one_that_brings_something_half_of_the_time_is_never_in_vain() {
        let kick = Kick::from(event::new().unwrap());
        for _ in 0..10 * IN_VAIN {
            Rest::default().ends(&kick, 5);
            assert!(!kick.is_in_vain());
            Rest::default().ends(&kick, 5);
            kick.found(1);
            assert!(!kick.is_in_vain());
        }
    }
}
