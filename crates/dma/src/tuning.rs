//! The settings of a device that can change while it is in use: the tuning of its flush queues.

use crate::{Fallback, Policy, QueueKind};

/// How large flush queues are, when they are flushed, and how much may stay exposed in them.
///
/// A device keeps one tuning for each kind of queue, initially Linux's. The [`Policy`] decides
/// which kind is in use.
///
/// The two `max_exposure` bounds limit what a lazy policy costs in safety: unmapped memory is
/// *exposed* from the removal of its translation to the end of the flush that covers it. Without
/// them the slots and the interval bound exposure, as in Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlushTuning {
    /// One queue, or one for each CPU.
    pub kind: QueueKind,
    /// Slots of each queue, which holds one entry less (rule [L22]). A thread that finds its queue
    /// full flushes and waits for that.
    ///
    /// [L22]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l22
    pub slots: usize,
    /// When a queue holds this many entries, the timer flushes at once, so that no thread finds it
    /// full. `None`: the timer waits for its interval, whatever the queues hold, as in Linux.
    pub high_water: Option<usize>,
    /// The longest, in milliseconds, that an unmapped range waits for its flush to start.
    pub interval_ms: u64,
    /// The longest, in milliseconds, that unmapped memory may stay exposed.
    ///
    /// The timer is due early enough for the observed time of flushes and wake-ups, and a thread
    /// that unmaps while it is overdue flushes instead. The operating system guarantees no more:
    /// ranges that were exposed for longer anyway are counted in
    /// [`Stats::late_releases`](crate::Stats::late_releases).
    pub max_exposure_ms: Option<u64>,
    /// How many bytes may be exposed at any moment, in all queues of the device together. Never
    /// exceeded: an unmap that would exceed it flushes first, and one that is larger than the bound
    /// is done strictly.
    pub max_exposure_bytes: Option<u64>,
}

impl FlushTuning {
    /// The fewest slots: a queue holds one entry less.
    pub const MIN_SLOTS: usize = 2;
    /// The most slots of a queue.
    pub const MAX_SLOTS: usize = 1 << 20;
    /// The longest allowed interval and bound of time, in milliseconds: a day.
    pub const MAX_MS: u64 = 24 * 3600 * 1000;
    /// The largest bound of exposed bytes.
    pub const MAX_BYTES: u64 = i64::MAX as u64;

    /// As Linux tunes the queues of `policy`: 32,768 slots and a second for a single queue, 256
    /// slots and 10 ms for queues per CPU. As a single queue, if the policy has none.
    pub fn of(policy: Policy) -> FlushTuning {
        FlushTuning::linux(policy.queue_kind().unwrap_or_default())
    }

    pub(crate) const fn linux(kind: QueueKind) -> FlushTuning {
        let (slots, interval_ms) = match kind {
            QueueKind::Single => (32_768, 1000),
            QueueKind::PerCpu => (256, 10),
        };
        FlushTuning {
            kind,
            slots,
            high_water: None,
            interval_ms,
            max_exposure_ms: None,
            max_exposure_bytes: None,
        }
    }

    /// Checks that it is valid.
    ///
    /// # Errors
    /// The first invalid value, and what is allowed.
    pub fn check(&self) -> Result<(), TuningError> {
        let slots = self.slots;
        if !(FlushTuning::MIN_SLOTS..=FlushTuning::MAX_SLOTS).contains(&slots) {
            return Err(TuningError::Slots(slots));
        }
        if let Some(mark) = self.high_water.filter(|mark| !(1..slots).contains(mark)) {
            return Err(TuningError::HighWater { mark, slots });
        }
        let legal = |ms: &u64| (1..=FlushTuning::MAX_MS).contains(ms);
        if !legal(&self.interval_ms) {
            return Err(TuningError::Interval(self.interval_ms));
        }
        if let Some(ms) = self.max_exposure_ms.filter(|ms| !legal(ms)) {
            return Err(TuningError::MaxExposureMs(ms));
        }
        let legal = |bytes: &u64| (1..=FlushTuning::MAX_BYTES).contains(bytes);
        if let Some(bytes) = self.max_exposure_bytes.filter(|bytes| !legal(bytes)) {
            return Err(TuningError::MaxExposureBytes(bytes));
        }
        Ok(())
    }

    /// How many entries a queue holds.
    pub(crate) const fn capacity(&self) -> usize {
        self.slots.saturating_sub(1)
    }
}

impl Default for FlushTuning {
    fn default() -> FlushTuning {
        FlushTuning::linux(QueueKind::Single)
    }
}

/// Why a tuning was refused. Unless stated otherwise, nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TuningError {
    /// Too few slots, or too many.
    #[error(
        "a flush queue cannot have {0} slots: it holds one entry less, and must have {min} to {max}",
        min = FlushTuning::MIN_SLOTS,
        max = FlushTuning::MAX_SLOTS
    )]
    Slots(usize),
    /// A mark that is never reached, or always reached.
    #[error(
        "a high-water mark of {mark} is out of range for a flush queue of {slots} slots: it must \
         be from 1 to {}", .slots - 1
    )]
    HighWater {
        /// The mark.
        mark: usize,
        /// The slots of the tuning.
        slots: usize,
    },
    /// No time at all, or more than a day.
    #[error("a flush queue cannot wait {0} ms: it must be from 1 to {max}", max = FlushTuning::MAX_MS)]
    Interval(u64),
    /// No time at all, or more than a day.
    #[error(
        "exposure cannot be bounded by {0} ms: it must be from 1 to {max} (a strict policy exposes \
         nothing)", max = FlushTuning::MAX_MS
    )]
    MaxExposureMs(u64),
    /// Zero bytes, or more than can be counted.
    #[error(
        "exposure cannot be bounded by {0} bytes: it must be from 1 to {max} (a strict policy \
         exposes nothing)", max = FlushTuning::MAX_BYTES
    )]
    MaxExposureBytes(u64),
    /// The tuning is for one kind of queue, but the policy uses the other.
    #[error("the tuning is for {tuned}, but the policy {policy} has {wanted}", tuned = .kind,
        wanted = .policy.queue_kind().map_or("no flush queue".to_owned(), |kind| kind.to_string()))]
    Kind {
        /// The kind of the tuning.
        kind: QueueKind,
        /// The policy that was to use it.
        policy: Policy,
    },
    /// There is no memory for the slots.
    #[error("there is no memory for flush queues of {0} slots")]
    Memory(usize),
    /// The tuning is in force, but its initial flush failed: what was queued before stays queued,
    /// and the timer tries again.
    #[error("the queues are tuned, but what they held could not be flushed: {0}")]
    Flush(#[source] ringfence_iommu::Error),
}

/// The state that changes serialise on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Control {
    /// Why the policy in force is not the requested one.
    pub(crate) fallback: Option<Fallback>,
    /// The kind of queue that is in use, was last in use, or will be.
    pub(crate) kind: QueueKind,
    /// For each kind of queue.
    pub(crate) tunings: [FlushTuning; 2],
    /// Entries queued under other bounds could not be flushed: the next change flushes them.
    pub(crate) unflushed: bool,
}

impl Control {
    /// The settings of a device that begins under `policy`.
    ///
    /// # Errors
    /// The tuning is invalid, or does not fit this policy.
    pub(crate) fn new(
        policy: Policy,
        fallback: Option<Fallback>,
        tuning: Option<FlushTuning>,
    ) -> Result<Control, TuningError> {
        let tuning = tuning.unwrap_or(FlushTuning::of(policy));
        tuning.check()?;
        if policy.queue_kind().is_some_and(|kind| kind != tuning.kind) {
            return Err(TuningError::Kind { kind: tuning.kind, policy });
        }
        let mut tunings = [QueueKind::Single, QueueKind::PerCpu].map(FlushTuning::linux);
        tunings[tuning.kind as usize] = tuning;
        Ok(Control { fallback, kind: tuning.kind, tunings, unflushed: false })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn linuxs_tunings_are_valid_and_differ() {
        for kind in [QueueKind::Single, QueueKind::PerCpu] {
            assert_eq!(FlushTuning::linux(kind).check(), Ok(()));
            assert_eq!(FlushTuning::linux(kind).kind, kind);
        }
        let single = FlushTuning::default();
        assert_eq!((single.slots, single.interval_ms, single.capacity()), (32_768, 1000, 32_767));
        let per_cpu = FlushTuning::linux(QueueKind::PerCpu);
        assert_eq!((per_cpu.slots, per_cpu.interval_ms, per_cpu.capacity()), (256, 10, 255));
        assert_eq!(FlushTuning::of(Policy::LazyMqMap), per_cpu);
        assert_eq!(FlushTuning::of(Policy::LazySq), single);
        assert_eq!(FlushTuning::of(Policy::StrictMap), single);
    }

    #[test]
    fn invalid_tunings_are_refused_and_the_errors_name_the_bounds() {
        let good = FlushTuning { slots: 8, ..FlushTuning::default() };
        let check = |tuning: FlushTuning, error: TuningError, text: &str| {
            assert_eq!(tuning.check(), Err(error));
            assert!(error.to_string().contains(text), "{error}");
        };
        for slots in [0, 1, FlushTuning::MAX_SLOTS + 1] {
            check(
                FlushTuning { slots, ..good },
                TuningError::Slots(slots),
                "must have 2 to 1048576",
            );
        }
        for mark in [0, 8, usize::MAX] {
            let error = TuningError::HighWater { mark, slots: 8 };
            check(FlushTuning { high_water: Some(mark), ..good }, error, "from 1 to 7");
        }
        for ms in [0, FlushTuning::MAX_MS + 1] {
            let tuning = FlushTuning { interval_ms: ms, ..good };
            check(tuning, TuningError::Interval(ms), "from 1 to 86400000");
            let tuning = FlushTuning { max_exposure_ms: Some(ms), ..good };
            check(tuning, TuningError::MaxExposureMs(ms), "from 1 to 86400000");
        }
        for bytes in [0, u64::MAX] {
            let tuning = FlushTuning { max_exposure_bytes: Some(bytes), ..good };
            check(tuning, TuningError::MaxExposureBytes(bytes), "a strict policy exposes nothing");
        }
        let edge = FlushTuning {
            slots: 2,
            high_water: Some(1),
            interval_ms: 1,
            max_exposure_ms: Some(FlushTuning::MAX_MS),
            max_exposure_bytes: Some(FlushTuning::MAX_BYTES),
            ..good
        };
        assert_eq!(edge.check(), Ok(()));
        let error =
            TuningError::Kind { kind: QueueKind::Single, policy: Policy::LazyMq }.to_string();
        assert!(error.contains("single") && error.contains("lazy-mq has a flush queue per CPU"));
    }
}
