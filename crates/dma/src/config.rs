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
    /// What mappings cost and guarantee. Default: [`Policy::StrictMap`].
    pub policy: Policy,
    /// Whether the device is trusted; if not, it is strict whatever `policy` says. Default:
    /// trusted.
    pub trust: Trust,
    /// Refuse to set the device up under another policy than `policy` (rule [L28]). Default: no,
    /// and [`Device::fallback`](crate::Device::fallback) returns the reason.
    ///
    /// [L28]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l28
    pub demand: bool,
    /// For debugging: identifies accesses to unmapped buffers. Default: off. It makes the device
    /// strict, makes each map and unmap more expensive, and holds back addresses.
    pub detect: Option<Detector>,
    /// The highest address that the device can put on the bus. Default: no limit but the domain's.
    pub limit: Iova,
    /// A mask, 2^n-1, at least the domain's granule less one: no segment contains addresses that
    /// differ above it (rule [L44]). Default: all ones, no boundary.
    ///
    /// [L44]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l44
    pub segment_boundary: u64,
    /// The largest segment, in bytes, at least the domain's granule (rule [L44]). Default: no
    /// limit.
    ///
    /// [L44]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l44
    pub max_segment: u64,
    /// The tuning of the flush queues of a lazy policy; for a strict one, the tuning for when it
    /// becomes lazy. `None`: as Linux tunes the policy's kind.
    pub flush: Option<FlushTuning>,
    /// How the device bounces, if it has pools ([`DeviceBuilder::pools`](crate::DeviceBuilder::pools)).
    pub bounce: BounceConfig,
    /// What runs the flush timer. Default: a thread.
    pub timer: TimerKind,
    /// On average one map and one unmap call in this many is timed in thread CPU time; a power of
    /// two, 0 for none. Default: 0.
    ///
    /// As many calls of the IOVA allocator are timed, in other maps and unmaps than those (unless
    /// all are). They may take a tenth of the time of reading the thread's clock, so they are timed
    /// by [`Environment::clock`], which needs no system call; beside each, the time between two
    /// readings with nothing in between is measured and subtracted. That is wall time: a thread
    /// that loses its CPU during a call makes the call look longer, never shorter.
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
    /// The defaults, with `policy`.
    pub fn new(policy: Policy) -> DmaConfig {
        DmaConfig { policy, ..DmaConfig::default() }
    }
}

/// What flushes a lazy device's queues, or gives back the idle slots of bounce pools, when that is
/// due.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TimerKind {
    /// A thread of the device's or the pools' own, asleep while there is nothing to do.
    #[default]
    Thread,
    /// The caller: [`Device::timer_due_at_ns`](crate::Device::timer_due_at_ns) returns when,
    /// [`Device::expire`](crate::Device::expire) does it; for pools
    /// [`due_at_ns`](crate::BouncePools::due_at_ns) and [`expire`](crate::BouncePools::expire). For
    /// tests and for programs with an event loop.
    Manual,
}

/// What a device needs from the operating system; tests supply their own.
#[derive(Clone)]
pub struct Environment {
    /// Time, for ages and for the timer.
    pub clock: Arc<dyn Clock>,
    /// Which CPU's flush queue and cache of bounce slots to use.
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
    ringfence_sync::shows!(Environment);
}
