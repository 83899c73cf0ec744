//! What the device answered and nobody has been told yet.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use ringfence_iommu::{Error, Range};

/// How many failures are told apart before two of them become one.
const KEPT: usize = 64;

/// What a request was for, as far as its reply is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// A MAP of `map_pages`.
    Map,
    /// A MAP that `attach` repeats.
    Replay,
    /// An UNMAP.
    Unmap,
    /// A request that somebody waits for; the reply is kept for them.
    Sync,
}

/// A request that the device did not answer with OK.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    pub(super) sent: Sent,
    /// The number of the request.
    pub(super) seq: u64,
    pub(super) range: Range,
    pub(super) status: u8,
}

/// The failures of a domain on their way from the ring (whoever takes replies out of it) to the
/// domain (whoever uses it next). A leaf among the locks.
#[derive(Debug, Default)]
pub(super) struct Reports {
    any: AtomicBool,
    list: Mutex<Vec<Failure>>,
}

impl Reports {
    pub(super) fn push(&self, failure: Failure) {
        self.list.lock().push(failure);
        self.any.store(true, Ordering::Release);
    }

    /// What was reported since the last call. As good as free if there is nothing.
    pub(super) fn take(&self) -> Vec<Failure> {
        if !self.any.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut list = self.list.lock();
        self.any.store(false, Ordering::Relaxed);
        core::mem::take(&mut *list)
    }
}

/// Failures that a sync point will return. Bounded: when there are too many, two become one that
/// covers both, so that a failure may be reported to too many and never to nobody.
#[derive(Debug, Default)]
pub(super) struct Failures {
    list: Vec<(Range, u8)>,
}

impl Failures {
    pub(super) fn add(&mut self, range: Range, status: u8) {
        if self.list.len() < KEPT {
            self.list.push((range, status));
        } else if let Some((held, _)) = self.list.last_mut() {
            *held = held.hull(range);
        }
    }

    /// The first failure in `range`; those that lie in it are forgotten.
    pub(super) fn take(&mut self, range: Range) -> Result<(), Error> {
        let Some(&(at, status)) = self.list.iter().find(|(at, _)| at.overlaps(range)) else {
            return Ok(());
        };
        self.forget(range);
        Err(Error::Device { range: at, status })
    }

    /// Forgets the failures that lie in `range`.
    pub(super) fn forget(&mut self, range: Range) {
        if !self.list.is_empty() {
            self.list.retain(|(at, _)| !range.covers(*at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_iommu::Iova;

    fn range(n: u64) -> Range {
        Range::from_len(Iova(n << 12), 4096).unwrap()
    }

    #[test]
    fn a_failure_is_told_once_to_the_range_it_lies_in() {
        let mut failures = Failures::default();
        failures.add(range(3), 8);
        assert_eq!(failures.take(range(2)), Ok(()));
        assert_eq!(failures.take(Range::ALL), Err(Error::Device { range: range(3), status: 8 }));
        assert_eq!(failures.take(Range::ALL), Ok(()));
    }

    #[test]
    fn too_many_failures_are_reported_too_often_and_never_lost() {
        let mut failures = Failures::default();
        (0..1000).for_each(|n| failures.add(range(n * 2), 4));
        assert_eq!(failures.list.len(), KEPT);
        assert!((0..1000).all(|n| failures.take(range(n * 2)).is_err()));
    }
}
