//! How a device is set up.

use core::fmt;
use std::sync::Arc;

use ringfence_iommu::Iova;
use ringfence_sync::{
    clock::{Clock, MonotonicClock},
    cpu::{CpuId, OsCpu},
};

use crate::{BounceConfig, Detector, FlushTuning, OsThreadClock, Policy, ThreadClock, Trust};

/// How a [`Device`](crate::Device) maps.
#[derive(Clone, Debug)]
pub struct DmaConfig {
    /// What mappings cost and promise. Default: [`Policy::StrictMap`].
    pub policy: Policy,
    /// Whether the device is trusted; if not, it is strict whatever `policy` says. Default: it is.
    pub trust: Trust,
    /// Refuse to set the device up under another policy than `policy` (rule L28). Default: no, and
    /// [`Device::fallback`](crate::Device::fallback) tells why.
    pub demand: bool,
    /// For debugging: finds out who uses what was unmapped. Default: no. It makes the device
    /// strict, each map and unmap dearer, and holds back addresses.
    pub detect: Option<Detector>,
    /// The highest address that the device can put on the bus. Default: no limit but the domain's.
    pub limit: Iova,
    /// A mask, 2^n-1: no segment holds addresses that differ above it (rule L44). Default: all
    /// ones, no boundary.
    pub segment_boundary: u64,
    /// The largest segment, in bytes (rule L44). Default: no limit.
    pub max_segment: u64,
    /// How the flush queues of a lazy policy are tuned; for a strict one, how they will be once it
    /// becomes lazy. `None`: as Linux tunes the kind that the policy has.
    pub flush: Option<FlushTuning>,
    /// How the device bounces, if it has pools ([`DeviceBuilder::pools`](crate::DeviceBuilder::pools)).
    pub bounce: BounceConfig,
    /// Who waits for the time to flush.
    pub timer: TimerKind,
    /// On average one map and one unmap call in so many are timed in thread CPU time; a power of
    /// two, 0 for none. Default: 0.
    ///
    /// As many calls of the IOVA allocator are timed, in other maps and unmaps than those (unless
    /// all are). They may take a tenth of what a reading of the thread's clock takes, so they are
    /// timed by [`Environment::clock`], which needs no system call; the time between two readings
    /// with nothing between them is taken beside each of them and subtracted. That is wall time:
    /// a thread that loses its CPU in the middle of a call makes the call look longer, never
    /// shorter.
    pub sample_every: u32,
}

impl Default for DmaConfig {
    fn default() -> DmaConfig {
        DmaConfig {
            policy: Policy::default(),
            trust: Trust::Trusted,
            demand: false,
            detect: None,
            limit: Iova(u64::MAX),
            segment_boundary: u64::MAX,
            max_segment: u64::MAX,
            flush: None,
            bounce: BounceConfig::default(),
            timer: TimerKind::Thread,
            sample_every: 0,
        }
    }
}

impl DmaConfig {
    /// The defaults, under `policy`.
    pub fn new(policy: Policy) -> DmaConfig {
        DmaConfig { policy, ..DmaConfig::default() }
    }
}

/// Who flushes a lazy device's queues when their time has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TimerKind {
    /// A thread of the device's own, asleep while nothing is queued.
    #[default]
    Thread,
    /// The caller: [`Device::timer_due_at_ns`](crate::Device::timer_due_at_ns) tells when,
    /// [`Device::expire`](crate::Device::expire) does it. For tests and for programs with an event
    /// loop.
    Manual,
}

/// What a device asks of the operating system; tests put their own in place.
#[derive(Clone)]
pub struct Environment {
    /// Time, for ages and for the timer.
    pub clock: Arc<dyn Clock>,
    /// Which CPU's flush queue to use.
    pub cpu: Arc<dyn CpuId>,
    /// The CPU time of the calling thread, for sampling.
    pub thread_clock: Arc<dyn ThreadClock>,
}

impl Default for Environment {
    fn default() -> Environment {
        Environment {
            clock: Arc::new(MonotonicClock),
            cpu: Arc::new(OsCpu::new()),
            thread_clock: Arc::new(OsThreadClock),
        }
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Environment").finish_non_exhaustive()
    }
}
