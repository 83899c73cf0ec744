//! The settings of a device that can change while it is in use.

use crate::{Fallback, FlushTuning, Policy, QueueKind, SetupError, TuningError};

/// The state that changes serialise on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Control {
    /// Why the policy in force is not the requested one.
    pub(crate) fallback: Option<Fallback>,
    /// The kind of queue that is in use, was last in use, or will be.
    pub(crate) kind: QueueKind,
    pub(crate) single: FlushTuning,
    pub(crate) per_cpu: FlushTuning,
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
    ) -> Result<Control, SetupError> {
        let tuning = tuning.unwrap_or(FlushTuning::of(policy));
        tuning.check()?;
        if policy.queue_kind().is_some_and(|kind| kind != tuning.kind) {
            return Err(TuningError::Kind { kind: tuning.kind, policy }.into());
        }
        let mut control = Control {
            fallback,
            kind: tuning.kind,
            single: FlushTuning::linux(QueueKind::Single),
            per_cpu: FlushTuning::linux(QueueKind::PerCpu),
            unflushed: false,
        };
        *control.of_kind(tuning.kind) = tuning;
        Ok(control)
    }

    pub(crate) fn of_kind(&mut self, kind: QueueKind) -> &mut FlushTuning {
        match kind {
            QueueKind::Single => &mut self.single,
            QueueKind::PerCpu => &mut self.per_cpu,
        }
    }
}
