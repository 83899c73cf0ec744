//! Replies of the device that were not reported yet.
//!
//! Ordering: the list has a lock; `any` spares a thread that. It is set after the list has the failure,
//! and cleared under the lock: a thread that comes after the push sees the flag.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use ringfence_iommu::{Error, Range};

/// How many failures are kept separately before two of them become one.
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
    /// A request that a thread waits for; the reply is kept for it.
    Sync,
}

/// A request that the device did not complete with OK.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    pub(super) sent: Sent,
    /// The number of the request.
    pub(super) seq: u64,
    pub(super) range: Range,
    pub(super) status: u8,
}

/// The failures of a domain on their way from the ring (the thread that takes replies out of it) to
/// the domain (the thread that uses it next). A leaf among the locks.
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
/// covers both, so that a failure may be reported too often but is never lost.
///
/// A caller may take a failure for its own only if it synced exactly what it unmapped. A sync of
/// more than that, or of everything, may have met a failure that another thread's sync is about to
/// look for: it reports the failure and keeps it.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// What each is about, and its status.
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

    /// Reports the failures in `ranges`. If these are `exact`, what the caller unmapped or mapped
    /// and nothing else, the failures inside them are removed; in other ranges other callers may
    /// have failures.
    pub(super) fn report(
        &mut self,
        operation: &'static str,
        ranges: &[Range],
        exact: bool,
        failed: &mut dyn FnMut(Range, Error),
    ) {
        if self.list.is_empty() {
            return;
        }
        for &range in ranges {
            for &(held, status) in &self.list {
                if held.overlaps(range) {
                    failed(held, Error::Device { operation, range: held, status });
                }
            }
            if exact {
                self.forget(range);
            }
        }
    }

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The ranges of the failures.
    pub(super) fn ranges(&self) -> Vec<Range> {
        self.list.iter().map(|&(held, _)| held).collect()
    }

    /// Removes the failures that lie in `range`.
    pub(super) fn forget(&mut self, range: Range) {
        if !self.list.is_empty() {
            self.list.retain(|&(held, _)| !range.covers(held));
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

    fn refused(n: u64) -> Error {
        Error::Device { operation: "map", range: range(n), status: 8 }
    }

    impl Failures {
        fn first(&mut self, range: Range, exact: bool) -> Result<(), Error> {
            let mut first = Ok(());
            self.report("map", &[range], exact, &mut |_, error| first = first.and(Err(error)));
            first
        }

        fn take(&mut self, range: Range) -> Result<(), Error> {
            self.first(range, true)
        }

        fn peek(&mut self, range: Range) -> Result<(), Error> {
            self.first(range, false)
        }
    }

    #[test]
    fn a_failure_is_reported_once_to_the_range_it_lies_in() {
        let mut failures = Failures::default();
        failures.add(range(3), 8);
        assert_eq!(failures.take(range(2)), Ok(()));
        assert_eq!(failures.take(Range::ALL), Err(refused(3)));
        assert_eq!(failures.take(Range::ALL), Ok(()));
    }

    #[test]
    fn too_many_failures_are_reported_too_often_and_never_lost() {
        let mut failures = Failures::default();
        (0..1000).for_each(|n| failures.add(range(n * 2), 4));
        assert_eq!(failures.list.len(), KEPT);
        assert!((0..1000).all(|n| failures.take(range(n * 2)).is_err()));
    }

    #[test]
    fn a_wider_sync_keeps_failures_of_other_callers() {
        let mut failures = Failures::default();
        let failed = |n| Err(refused(n));
        failures.add(range(3), 8);
        failures.add(range(5), 8);
        assert_eq!([(); 2].map(|()| failures.peek(Range::ALL)), [failed(3); 2]);
        assert_eq!(failures.ranges(), [range(3), range(5)]);
        assert_eq!(failures.take(range(3)), failed(3));
        assert_eq!(failures.take(range(5)), failed(5));
        assert_eq!(failures.peek(Range::ALL), Ok(()));
    }
}
