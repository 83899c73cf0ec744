//! Waits for the device, by cause.

use ringfence_sync::{
    clock::Clock,
    histogram::{Histogram, HistogramSnapshot},
};

/// How long calls of the domain that wait for the device took, in nanoseconds by the environment's
/// clock, by cause. All clones of a device together, including failed calls.
///
/// The sync of a batch that was only polled is not included, as no thread waited for it.
///
/// Threads that map wait for `map`, those that unmap for `unmap` and `full` (the former too, if no
/// I/O virtual address is left), and no caller for `timer`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waits {
    /// [`iotlb_sync_map`](ringfence_iommu::Domain::iotlb_sync_map): each for a mapping, a piece of
    /// one, or a [`MapBatch`](crate::MapBatch) that was waited for.
    pub map: HistogramSnapshot,
    /// [`iotlb_sync`](ringfence_iommu::Domain::iotlb_sync): strict unmaps, single or in an
    /// [`UnmapBatch`](crate::UnmapBatch) that was waited for, and the undoing of failed maps.
    pub unmap: HistogramSnapshot,
    /// Whole-domain flushes by the timer.
    pub timer: HistogramSnapshot,
    /// Whole-domain flushes that a caller had to make: its flush queue was full, a bound of
    /// exposure was reached, the policy became strict meanwhile, or no I/O virtual address was
    /// left.
    pub full: HistogramSnapshot,
    /// Whole-domain flushes on request, including changes of policy and of tuning.
    pub asked: HistogramSnapshot,
}

impl Waits {
    /// The waits after `earlier`, a snapshot of the same device.
    pub fn since(&self, earlier: &Waits) -> Waits {
        Waits {
            map: self.map.since(&earlier.map),
            unmap: self.unmap.since(&earlier.unmap),
            timer: self.timer.since(&earlier.timer),
            full: self.full.since(&earlier.full),
            asked: self.asked.since(&earlier.asked),
        }
    }

    /// Adds the waits of `other`.
    pub fn merge(&mut self, other: &Waits) {
        self.map.merge(&other.map);
        self.unmap.merge(&other.unmap);
        self.timer.merge(&other.timer);
        self.full.merge(&other.full);
        self.asked.merge(&other.asked);
    }
}

/// The waits in the calls of one clone.
#[derive(Debug, Default)]
pub(crate) struct CallerWaits {
    pub(crate) map: Histogram,
    pub(crate) unmap: Histogram,
    pub(crate) full: Histogram,
}

impl CallerWaits {
    pub(crate) fn add_to(&self, waits: &mut Waits) {
        waits.map.merge(&self.map.snapshot());
        waits.unmap.merge(&self.unmap.snapshot());
        waits.full.merge(&self.full.snapshot());
    }
}

/// The waits outside the clones' calls.
#[derive(Debug, Default)]
pub(crate) struct OtherWaits {
    pub(crate) timer: Histogram,
    pub(crate) asked: Histogram,
}

impl OtherWaits {
    pub(crate) fn add_to(&self, waits: &mut Waits) {
        waits.timer.merge(&self.timer.snapshot());
        waits.asked.merge(&self.asked.snapshot());
    }
}

/// Makes a call that waits for the device, and records how long it took.
#[inline]
pub(crate) fn timed<R>(clock: &dyn Clock, waits: &Histogram, wait: impl FnOnce() -> R) -> R {
    let begun = clock.now_ns();
    let result = wait();
    waits.record(clock.now_ns().saturating_sub(begun));
    result
}

#[cfg(all(test, not(loom)))]
mod tests {
    use ringfence_sync::clock::ManualClock;

    use super::*;

    #[test]
    fn each_wait_is_noted_where_it_belongs() {
        let clock = ManualClock::new(0);
        let (caller, other) = (CallerWaits::default(), OtherWaits::default());
        let kinds = [&caller.map, &caller.unmap, &other.timer, &caller.full, &other.asked];
        for (times, histogram) in kinds.into_iter().enumerate() {
            for _ in 0..=times {
                assert_eq!(timed(&clock, histogram, || clock.advance(1000)), ());
            }
        }
        let mut waits = Waits::default();
        caller.add_to(&mut waits);
        other.add_to(&mut waits);
        let counts = |waits: &Waits| {
            [&waits.map, &waits.unmap, &waits.timer, &waits.full, &waits.asked]
                .map(|snapshot| (snapshot.count(), snapshot.sum()))
        };
        let expected = [(1, 1000), (2, 2000), (3, 3000), (4, 4000), (5, 5000)];
        assert_eq!(counts(&waits), expected);
        let mut twice = waits.clone();
        twice.merge(&waits);
        assert_eq!(counts(&twice), expected.map(|(count, sum)| (2 * count, 2 * sum)));
        assert_eq!(counts(&twice.since(&waits)), expected);
    }
}
