//! Changes to a device in use: its policy, and the tuning of its flush queues.
//!
//! Changes are serialised. Threads that map and unmap never wait for one: they read the mode once,
//! and a queue accepts or refuses their entries under its own lock. So the order of a change is:
//! make what the new mode needs, set the mode, and flush what the old one left behind.

use std::sync::Arc;

use ringfence_iommu::Domain;
use ringfence_iova::Allocator;
use ringfence_sync::mutant;
use rustix::io::Errno;

use crate::{
    Device, FlushTuning, Policy, QueueKind, SetupError, SwitchError, TimerKind, TuningError,
    flush::{Shape, bound_ns},
    mode::Mode,
    shared::Shared,
    trust::against,
};

impl<D: Domain + 'static, A: Allocator + 'static> Device<D, A> {
    /// Changes the policy of the device and all its clones, in use or not (rule [L27]).
    ///
    /// Unmaps that begin after this has returned follow the new policy, and if queues were replaced
    /// or removed, everything that was unmapped lazily before has been flushed and released. A
    /// concurrent unmap follows either policy.
    ///
    /// A change to a strict policy succeeds only when nothing that was unmapped before is
    /// reachable; an unmap that failed has said so, and its IOVA is quarantined. If its flush fails,
    /// every later call with a strict policy, even the one in force, flushes again, and fails until
    /// that holds.
    ///
    /// Each kind of flush queue keeps the tuning that was last set for it.
    ///
    /// # Errors
    /// A change from or to `off`; a policy that the device cannot have
    /// ([`refuses`](Self::refuses)); no memory or no thread for flush queues; a flush that failed.
    /// See [`SwitchError`] for the policy in force then.
    ///
    /// [L27]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l27
    pub fn set_policy(&self, policy: Policy) -> Result<(), SwitchError> {
        let shared = self.shared();
        // Skips the calibration for a change without effect, or one that is refused.
        let now = shared.mode.get().policy;
        if now != policy && now != Policy::Off && against(policy, shared.means).is_none() {
            shared.prepare(policy);
        }
        let mut control = shared.control.lock();
        let before = shared.mode.get().policy;
        if policy != before {
            if policy == Policy::Off || before == Policy::Off {
                return Err(SwitchError::Off { from: before, to: policy });
            }
            if let Some(because) = against(policy, shared.means) {
                return Err(SwitchError::Fallback(because));
            }
        }
        match policy.queue_kind() {
            Some(kind) if before.queue_kind() == Some(kind) && !control.unflushed => {
                let bounds_bytes = shared.mode.get().bounds_bytes;
                shared.mode.set(Mode { policy, bounds_bytes });
                control.fallback = None;
            }
            Some(kind) => {
                shared.start_timer()?;
                let tuning = control.tunings[kind as usize];
                let result = shared.queue_as(policy, &tuning, &mut control.unflushed);
                if shared.mode.get().policy == policy {
                    control.kind = kind;
                    control.fallback = None;
                }
                result?;
            }
            // Entries that an earlier change could not flush are still reachable, whatever is in
            // force now.
            None => {
                let stopped = shared.stop_queueing(policy);
                // It is in force in any case.
                control.fallback = None;
                stopped.map_err(SwitchError::Flush)?;
                control.unflushed = false;
            }
        }
        Ok(())
    }

    /// The tuning of the flush queues in use; under a policy that is not lazy, the tuning that was
    /// last in use or last set.
    pub fn flush_tuning(&self) -> FlushTuning {
        let control = self.shared().control.lock();
        control.tunings[control.kind as usize]
    }

    /// Tunes the flush queues of one kind, for the device and all its clones.
    ///
    /// If the policy is lazy, this becomes the kind in use (`lazy-sq` becomes `lazy-mq`, or the
    /// reverse), and what was queued is flushed, so that the new bounds hold for every unmap that
    /// begins after this has returned. (Where the new tuning bounds exposed bytes, a concurrent
    /// unmap that has reserved none flushes before it returns instead of being queued.) If the
    /// policy is not lazy, the tuning is kept until it is.
    ///
    /// # Errors
    /// The tuning is invalid, there is no memory for it, or that flush failed; see [`TuningError`]
    /// for whether it is in force then.
    pub fn set_flush_tuning(&self, tuning: FlushTuning) -> Result<(), TuningError> {
        tuning.check()?;
        let shared = self.shared();
        let mut control = shared.control.lock();
        let policy = shared.mode.get().policy;
        let result = if policy.is_lazy() {
            let policy = policy.with_queue_kind(tuning.kind);
            shared.queue_as(policy, &tuning, &mut control.unflushed)
        } else {
            Ok(())
        };
        if !matches!(result, Err(TuningError::Memory(_))) {
            control.kind = tuning.kind;
            control.tunings[tuning.kind as usize] = tuning;
        }
        result
    }
}

impl<D: Domain + 'static, A: Allocator + 'static> Shared<D, A> {
    /// Puts a device that was made strict, or `off`, under its first policy.
    pub(crate) fn begin(self: &Arc<Self>, policy: Policy) -> Result<(), SetupError> {
        self.prepare(policy);
        if let Some(kind) = policy.queue_kind() {
            let tuning = self.control.lock().tunings[kind as usize];
            self.start_timer()?;
            self.queue_as(policy, &tuning, &mut false)?;
        }
        Ok(())
    }

    /// Sets a lazy policy with `tuning`, whatever was in force before.
    ///
    /// # Errors
    /// Either there is no memory for it, and nothing has changed; or the flush of what was queued
    /// before failed, with everything else done: then `unflushed` is set.
    fn queue_as(
        &self,
        policy: Policy,
        tuning: &FlushTuning,
        unflushed: &mut bool,
    ) -> Result<(), TuningError> {
        let lazy = &self.lazy;
        let bound = tuning.max_exposure_bytes;
        let shape = Shape {
            capacity: tuning.capacity(),
            high_water: tuning.high_water.unwrap_or(usize::MAX),
            late_after_ns: bound_ns(tuning),
            reserved_only: bound.is_some() && !mutant!("a bounded queue takes everything"),
        };
        let per_cpu = policy.queue_kind() == Some(QueueKind::PerCpu);
        let in_use = if per_cpu { lazy.queues.rings() } else { 1 };
        let was_lazy = self.wants_flush();
        lazy.queues.open(in_use, shape).map_err(|_| TuningError::Memory(tuning.slots))?;
        if let Some(bytes) = bound {
            lazy.queues.budget.set(bytes);
        }
        lazy.pace.tune(tuning);
        // Rule L27: from here on other threads see it.
        self.mode.set(Mode { policy, bounds_bytes: bound.is_some() });
        if was_lazy {
            // Only now: a thread that still sees the old mode would flush again and again until it
            // sees the new one.
            lazy.queues.close(in_use);
            // Flushes entries that were queued under other bounds.
            let flushed = self.expire_in(&self.waits.asked, &self.frees);
            *unflushed = flushed.is_err();
            flushed.map_err(TuningError::Flush)?;
            lazy.queues.trim();
        }
        Ok(())
    }

    /// Closes the queues, and flushes what is queued. A concurrent unmap either enters a queue
    /// before that is closed, and is flushed here, or finds it closed, and flushes itself.
    ///
    /// # Errors
    /// The flush failed: the timer tries again, and so does the next change. The policy is in force
    /// anyway.
    fn stop_queueing(&self, policy: Policy) -> ringfence_iommu::Result<()> {
        self.mode.set(Mode { policy, bounds_bytes: false });
        let late = mutant!("queues are closed after their last flush");
        if !late {
            self.lazy.queues.close(0);
        }
        self.expire_in(&self.waits.asked, &self.frees)?;
        if late {
            self.lazy.queues.close(0);
        }
        self.lazy.queues.trim();
        Ok(())
    }

    /// Starts the timer's thread, if there should be one but is not.
    fn start_timer(self: &Arc<Self>) -> Result<(), Errno> {
        if self.timer_kind == TimerKind::Manual {
            return Ok(());
        }
        // A flush that fails is counted, and tried again: the timer is armed.
        self.lazy.timer.start(&self.clock, self, |shared, late_ns| _ = shared.expire_late(late_ns))
    }
}
