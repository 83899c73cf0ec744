//! What a comparison found, and how it is shown: as JSON, and by [`summary`], [`table`],
//! [`picture`] and [`html`].
//!
//! [`Comparison`] is the contract `ringfence.compare/1`: fields are added, never renamed or removed.
//! It is made from what the rounds measured ([`Sample`], one a job, policy and round) by
//! [`JobReport::new`], the only place where figures are derived: an engine only counts.

use serde::{Deserialize, Serialize};

use crate::{
    job::Job,
    memory,
    run::tuning::Tuning,
    stats::{Estimate, Latencies, LatencySummary},
    text::{bytes, count, plain},
};

mod bounce;
mod curve;
mod exposure;
pub mod html;
#[cfg(test)]
mod json;
mod markup;
pub mod picture;
mod plot;
pub mod summary;
pub mod table;
mod waits;

#[cfg(test)]
mod sample;

pub use bounce::BounceSample;
pub use exposure::{Exposure, Reach};
pub use waits::{SyncWaits, Waited, WaitsSample};

/// Name and version of the JSON contract.
pub const SCHEMA: &str = "ringfence.compare/1";

/// The policy every ratio refers to.
pub const BASELINE: &str = "off";

/// Block size from which on a job is judged by bandwidth rather than by I/Os a second.
pub const BANDWIDTH_FROM: u32 = 32 << 10;

const GIB: f64 = (1u64 << 30) as f64;

/// One comparison: the whole of `--json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// [`SCHEMA`].
    pub schema: String,
    /// Version of the program.
    pub version: String,
    /// The machine.
    pub host: Machine,
    /// Which disk: `paced`, `ram` or a path, in the words the table shows.
    pub disk: String,
    /// Notify mode: `adaptive`, `poll` or `sleep`.
    pub notify: String,
    /// The allocators of I/O virtual addresses, as requested, in order.
    pub allocators: Vec<String>,
    /// Where the default allocator put ranges.
    pub placement: String,
    /// Bits of an I/O virtual address.
    pub aperture_bits: u32,
    /// Ranges of I/O virtual addresses that were taken before the run, and kept.
    pub live_ranges: u32,
    /// How policies were carried out, as far as it was requested.
    pub tuning: Tuning,
    /// Busy threads that ran beside every row.
    pub load_threads: u32,
    /// Rounds requested (an interrupted run has fewer: see each job's `rounds`).
    pub rounds: u32,
    /// Seconds a job ran in each round.
    pub runtime_s: f64,
    /// Whether the run was stopped before all rounds were done.
    pub interrupted: bool,
    /// What a reader must know: unknown keys, scaled sizes, policies that fell back.
    pub warnings: Vec<String>,
    /// One a job, in the order of the job file.
    pub jobs: Vec<JobReport>,
}

/// The machine a comparison ran on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Processor model, "" if unknown.
    pub cpu: String,
    /// Processors this process may use.
    pub cpus: u32,
    /// Memory, bytes (0 if unknown).
    pub memory_bytes: u64,
    /// Kernel release.
    pub kernel: String,
}

/// What decides a job: bytes or I/Os a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Metric {
    /// Large blocks: bytes a second.
    Bandwidth,
    /// Small blocks: I/Os a second, and latency.
    Iops,
}

impl Metric {
    /// What tables print it in.
    pub(crate) const fn unit(self) -> &'static str {
        match self {
            Metric::Bandwidth => "MiB/s",
            Metric::Iops => "kIOPS",
        }
    }
}

/// One job under every policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobReport {
    /// The job's name.
    pub name: String,
    /// fio's word for the pattern.
    pub rw: String,
    /// Bytes a read.
    pub bs_read: u32,
    /// Bytes a write.
    pub bs_write: u32,
    /// Bytes of the area, after scaling.
    pub size: u64,
    /// I/Os in flight, of each clone.
    pub iodepth: u32,
    /// fio's numjobs: how many clones ran.
    pub numjobs: u32,
    /// Jobs of one stage ran at the same time.
    pub stage: u32,
    /// Rounds measured (the fewest of any policy).
    pub rounds: u32,
    /// What decides this job.
    pub metric: Metric,
    /// One a policy, in the order requested.
    pub results: Vec<PolicyResult>,
}

/// One job under one policy. `null` in JSON: does not apply, or was not measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PolicyResult {
    /// The requested policy; `host` is the job without virtqueues.
    pub policy: String,
    /// The allocator of I/O virtual addresses, if any were needed.
    pub allocator: Option<String>,
    /// The policy that was in force (a domain may refuse lazy flushing).
    pub effective_policy: String,
    /// Why it was not the requested one.
    pub fallback: Option<String>,
    /// I/Os a second.
    pub iops: Estimate,
    /// Bytes a second.
    pub bandwidth_bytes_per_s: Estimate,
    /// Submission to completion, map and unmap included; all rounds together.
    pub latency_ns: LatencySummary,
    /// Against `off`, paired by round.
    pub ratio_to_off: Option<Ratios>,
    /// Part of the job threads' CPU time that was spent in IOMMU code.
    pub iommu_cpu_fraction: Option<f64>,
    /// Time in IOMMU code, ns an I/O.
    pub iommu_ns_per_io: Option<f64>,
    /// Part of the job threads' CPU time that was spent in the allocator of I/O virtual addresses:
    /// a part of `iommu_cpu_fraction`.
    pub allocator_cpu_fraction: Option<f64>,
    /// Time in that allocator, ns an I/O.
    pub allocator_ns_per_io: Option<f64>,
    /// CPU time of all processes of the run, ns an I/O.
    pub cpu_ns_per_io: Option<f64>,
    /// Time in map, ns a GiB mapped.
    pub map_ns_per_gib: Option<f64>,
    /// Time in unmap, ns a GiB mapped.
    pub unmap_ns_per_gib: Option<f64>,
    /// Time in map by the wall's clock, that asleep included, ns a GiB mapped.
    pub map_wall_ns_per_gib: Option<f64>,
    /// Time in unmap by the wall's clock, ns a GiB mapped.
    pub unmap_wall_ns_per_gib: Option<f64>,
    /// virtio-iommu requests an I/O.
    pub requests_per_io: Option<f64>,
    /// Sync points that had to wait for the device, an I/O.
    pub syncs_per_io: Option<f64>,
    /// Notifications sent to the device (both devices' queues), an I/O.
    pub kicks_per_io: Option<f64>,
    /// How long a sync waited.
    pub sync_wait_ns: Option<WaitSummary>,
    /// By cause: how often syncs waited, and how long.
    pub sync_waits: Option<SyncWaits>,
    /// How much unmapped memory stayed reachable, as the DMA API counts it.
    pub exposure: Option<Exposure>,
    /// How long unmapped memory stayed reachable, as the probe found it.
    pub stale_window: Option<StaleWindow>,
    /// Mappings that were copies in bounce slots, an I/O.
    pub bounced_per_io: Option<f64>,
    /// The same as a part of all mappings.
    pub bounced_fraction: Option<f64>,
    /// Bytes that were copied for them, in and out, an I/O.
    pub copied_bytes_per_io: Option<f64>,
    /// Mappings that were to be copies, and were mapped since no slot was free.
    pub not_bounced: Option<u64>,
    /// The most memory that the bounce pools had at a time, bytes.
    pub pool_bytes: Option<u64>,
    /// Memory of the pools that was taken to be filled and read in place, bytes at a time: the device
    /// reaches it.
    pub taken_bytes: Option<u64>,
    /// What `auto` chose, and why, in words.
    pub explain: Option<String>,
    /// Lookups of the device's IOTLB.
    pub iotlb: Option<Iotlb>,
    /// The part of their time for which the busy threads beside it got a CPU.
    pub load_fraction: Option<f64>,
    /// I/Os that failed or returned wrong bytes.
    pub errors: u64,
    /// What a reader must know of this row.
    pub warnings: Vec<String>,
}

/// Ratios to `off`: above 1 is more. More IOPS and bandwidth are better, more latency is worse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ratios {
    /// Of I/Os a second.
    pub iops: Estimate,
    /// Of bytes a second.
    pub bandwidth: Estimate,
    /// Of mean latency.
    pub latency: Estimate,
}

/// How long something waited, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitSummary {
    /// Half waited no longer.
    pub p50: u64,
    /// 99 of 100 waited no longer.
    pub p99: u64,
}

/// How long unmapped memory stayed reachable: the probe's findings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StaleWindow {
    /// Longest time after `unmap` returned at which an access still succeeded, ms (0: none did).
    pub max_ms: f64,
    /// Exposed bytes times ms, the whole run.
    pub byte_ms: f64,
    /// Accesses of the probe that succeeded after `unmap` had returned. A strict policy's must be 0.
    pub accesses: u64,
    /// Accesses the probe tried.
    pub probes: u64,
}

impl StaleWindow {
    /// What two probes found, or one in two rounds.
    pub(crate) fn and(self, other: StaleWindow) -> StaleWindow {
        StaleWindow {
            max_ms: self.max_ms.max(other.max_ms),
            byte_ms: self.byte_ms + other.byte_ms,
            accesses: self.accesses.saturating_add(other.accesses),
            probes: self.probes.saturating_add(other.probes),
        }
    }
}

/// Lookups of the device's IOTLB, and its invalidations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Iotlb {
    /// Lookups served by the cache.
    pub hits: u64,
    /// Lookups served by the table.
    pub misses: u64,
    /// Invalidations that the virtio-iommu waited for, one for requests that came together.
    pub invalidations: u64,
}

/// What one round of one job under one policy counted; an engine fills it in.
///
/// `None`: the thing does not exist in that run (no virtqueues in `host`, no IOMMU in `off`).
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Wall time of the measured part, ns.
    pub elapsed_ns: u64,
    /// I/Os completed in it.
    pub ios: u64,
    /// Bytes moved in it.
    pub bytes: u64,
    /// Latency of each I/O.
    pub latency: Latencies,
    /// CPU time of all processes, ns.
    pub cpu_ns: Option<u64>,
    /// CPU time of the job threads, ns: what `iommu.cpu_ns` is a part of.
    pub thread_cpu_ns: Option<u64>,
    /// The IOMMU code's part.
    pub iommu: Option<IommuSample>,
    /// Notifications sent to the devices.
    pub kicks: Option<u64>,
    /// The probe's findings.
    pub stale: Option<StaleWindow>,
    /// What the DMA API had counted at its very end, of which the report takes what stayed reachable:
    /// after the last flush, when all that was mapped is unmapped and nothing is queued any more.
    pub exposure: Option<ringfence_dma::Stats>,
    /// What was copied in bounce slots.
    pub bounce: Option<BounceSample>,
    /// Lookups of the device's IOTLB.
    pub iotlb: Option<Iotlb>,
    /// The part of their time for which busy threads beside it got a CPU.
    pub load: Option<f64>,
    /// I/Os that failed or returned wrong bytes.
    pub errors: u64,
}

/// What the IOMMU code did in one round.
#[derive(Clone, Debug, Default)]
pub struct IommuSample {
    /// Time of the job threads in IOMMU code, ns (sampled).
    pub cpu_ns: u64,
    /// Time in map, ns.
    pub map_ns: u64,
    /// Time in unmap, ns.
    pub unmap_ns: u64,
    /// Time in map by the wall's clock, that asleep included, ns (sampled).
    pub map_wall_ns: u64,
    /// The same in unmap.
    pub unmap_wall_ns: u64,
    /// Time in the allocator of I/O virtual addresses, a part of both (sampled), ns.
    pub allocator_ns: u64,
    /// Bytes mapped.
    pub mapped_bytes: u64,
    /// virtio-iommu requests.
    pub requests: u64,
    /// Sync points that had to wait.
    pub syncs: u64,
    /// How long they waited.
    pub sync_wait: Latencies,
    /// Both by cause.
    pub waits: WaitsSample,
}

/// All rounds of one job under one policy.
#[derive(Clone, Debug, Default)]
pub struct PolicyRounds {
    /// The requested policy.
    pub policy: String,
    /// The allocator of I/O virtual addresses, if any were needed.
    pub allocator: Option<String>,
    /// The policy in force; "" where it is the requested one.
    pub effective_policy: String,
    /// Why it is not the requested one.
    pub fallback: Option<String>,
    /// What `auto` chose, and why, in words.
    pub explain: Option<String>,
    /// One a round, in order: round `i` of each policy ran next to round `i` of every other.
    pub rounds: Vec<Sample>,
    /// What a reader must know of this row.
    pub warnings: Vec<String>,
}

impl PolicyRounds {
    /// The policy in force.
    fn in_force(&self) -> &str {
        if self.effective_policy.is_empty() { &self.policy } else { &self.effective_policy }
    }
}

impl Machine {
    /// This machine, as far as it is known.
    pub fn detect() -> Machine {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Machine {
            cpu: memory::field("/proc/cpuinfo", "model name").unwrap_or_default(),
            cpus: std::thread::available_parallelism()
                .map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX)),
            memory_bytes: memory::number("/proc/meminfo", "MemTotal")
                .unwrap_or(0)
                .saturating_mul(1024),
            kernel: kernel.trim().to_owned(),
        }
    }

    /// `2 CPUs (AMD EPYC), 23.5 GiB, Linux 6.18`.
    pub(crate) fn describe(&self) -> String {
        let cpu = match self.cpu.as_str() {
            "" => String::new(),
            cpu => format!(" ({cpu})"),
        };
        let memory = bytes(self.memory_bytes);
        plain(&format!("{} CPUs{cpu}, {memory}, Linux {}", self.cpus, self.kernel))
    }
}

impl Comparison {
    /// An empty comparison on this machine.
    pub fn new() -> Comparison {
        Comparison {
            schema: SCHEMA.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: Machine::detect(),
            ..Comparison::default()
        }
    }

    /// Errors of all jobs and policies together.
    pub fn errors(&self) -> u64 {
        let rows = self.jobs.iter().flat_map(|job| &job.results);
        rows.fold(0, |sum, row| sum.saturating_add(row.errors))
    }
}

impl JobReport {
    /// The report of `job` from its `rounds`. Rows without a round are left out.
    pub fn new(job: &Job, stage: u32, rounds: &[PolicyRounds]) -> JobReport {
        let measured = || rounds.iter().filter(|row| !row.rounds.is_empty());
        // An `off` that was replaced is no base for the others.
        let off = measured().find(|row| row.policy == BASELINE && row.in_force() == BASELINE);
        JobReport {
            name: job.name.clone(),
            rw: job.rw.to_string(),
            bs_read: job.bs.read,
            bs_write: job.bs.write,
            size: job.size,
            iodepth: job.iodepth,
            numjobs: job.numjobs,
            stage,
            rounds: measured().map(|row| row.rounds.len()).min().unwrap_or(0) as u32,
            metric: match job.min_block() {
                BANDWIDTH_FROM.. => Metric::Bandwidth,
                _ => Metric::Iops,
            },
            results: measured()
                .map(|row| PolicyResult::new(row, off.map(|off| off.rounds.as_slice())))
                .collect(),
        }
    }

    /// Whether rows of one policy differ in their allocator.
    pub fn compares_allocators(&self) -> bool {
        let mut names = self.results.iter().filter_map(|row| row.allocator.as_deref());
        let first = names.next();
        names.any(|name| Some(name) != first)
    }

    /// What to call a row of this job: its policy and, where rows differ in it, its allocator.
    pub fn label(&self, row: &PolicyResult) -> String {
        match &row.allocator {
            Some(allocator) if self.compares_allocators() => format!("{}/{allocator}", row.policy),
            _ => row.policy.clone(),
        }
    }

    /// `64 KiB randwrite, 16 jobs x 16 deep`: the job in a few words.
    pub fn describe(&self) -> String {
        let bs = match self.rw.as_str() {
            "read" | "randread" => bytes(self.bs_read.into()),
            "write" | "randwrite" => bytes(self.bs_write.into()),
            _ if self.bs_read == self.bs_write => bytes(self.bs_read.into()),
            _ => format!("{}/{}", bytes(self.bs_read.into()), bytes(self.bs_write.into())),
        };
        let jobs = count(self.numjobs, "job");
        format!("{bs} {}, {jobs} x {} deep, on {}", self.rw, self.iodepth, bytes(self.size))
    }
}

impl PolicyResult {
    fn new(row: &PolicyRounds, off: Option<&[Sample]>) -> PolicyResult {
        let rounds = row.rounds.as_slice();
        let iops: fn(&Sample) -> f64 = |s| per_second(s.ios, s.elapsed_ns);
        let bandwidth: fn(&Sample) -> f64 = |s| per_second(s.bytes, s.elapsed_ns);
        let column = |f: fn(&Sample) -> f64| rounds.iter().map(f).collect::<Vec<_>>();
        let estimate = |f| Estimate::of(&column(f)).unwrap_or_default();
        let ratio = |f: fn(&Sample) -> f64, off: &[Sample]| {
            Estimate::ratio(&column(f), &off.iter().map(f).collect::<Vec<_>>())
        };
        let sum = |f: &dyn Fn(&Sample) -> Option<u64>| {
            rounds.iter().filter_map(f).reduce(u64::saturating_add).map(|n| n as f64)
        };
        let per = |n: Option<f64>, of: Option<f64>| Some(n? / of.filter(|of| *of > 0.0)?);
        let iommu = |f: fn(&IommuSample) -> u64| sum(&|s| s.iommu.as_ref().map(f));
        let ios = sum(&|s| Some(s.ios));
        let bounce = |f: fn(&BounceSample) -> u64| sum(&|s| s.bounce.as_ref().map(f));
        let most = |f: fn(&BounceSample) -> u64| {
            rounds.iter().filter_map(|s| s.bounce.as_ref().map(f)).max()
        };
        let mapped_gib = iommu(|i| i.mapped_bytes).map(|n| n / GIB);
        let mut latency = Latencies::default();
        let mut waits = Latencies::default();
        for sample in rounds {
            latency.merge(&sample.latency);
            if let Some(iommu) = &sample.iommu {
                waits.merge(&iommu.sync_wait);
            }
        }
        PolicyResult {
            policy: row.policy.clone(),
            allocator: row.allocator.clone(),
            effective_policy: row.effective_policy.clone(),
            fallback: row.fallback.clone(),
            iops: estimate(iops),
            bandwidth_bytes_per_s: estimate(bandwidth),
            latency_ns: latency.summary(),
            ratio_to_off: off.and_then(|off| {
                Some(Ratios {
                    iops: ratio(iops, off)?,
                    bandwidth: ratio(bandwidth, off)?,
                    latency: ratio(|s| s.latency.mean(), off)?,
                })
            }),
            iommu_cpu_fraction: per(iommu(|i| i.cpu_ns), sum(&|s| s.thread_cpu_ns)),
            iommu_ns_per_io: per(iommu(|i| i.cpu_ns), ios),
            allocator_cpu_fraction: per(iommu(|i| i.allocator_ns), sum(&|s| s.thread_cpu_ns)),
            allocator_ns_per_io: per(iommu(|i| i.allocator_ns), ios),
            cpu_ns_per_io: per(sum(&|s| s.cpu_ns), ios),
            map_ns_per_gib: per(iommu(|i| i.map_ns), mapped_gib),
            unmap_ns_per_gib: per(iommu(|i| i.unmap_ns), mapped_gib),
            map_wall_ns_per_gib: per(iommu(|i| i.map_wall_ns), mapped_gib),
            unmap_wall_ns_per_gib: per(iommu(|i| i.unmap_wall_ns), mapped_gib),
            requests_per_io: per(iommu(|i| i.requests), ios),
            syncs_per_io: per(iommu(|i| i.syncs), ios),
            kicks_per_io: per(sum(&|s| s.kicks), ios),
            sync_wait_ns: (waits.count() > 0)
                .then(|| WaitSummary { p50: waits.quantile(0.5), p99: waits.quantile(0.99) }),
            sync_waits: SyncWaits::new(row),
            exposure: Exposure::new(row),
            stale_window: rounds.iter().filter_map(|s| s.stale).reduce(StaleWindow::and),
            bounced_per_io: per(bounce(|b| b.bounced), ios),
            bounced_fraction: per(bounce(|b| b.bounced), bounce(|b| b.maps)),
            copied_bytes_per_io: per(bounce(|b| b.copied_bytes), ios),
            not_bounced: bounce(|b| b.not_bounced).map(|n| n as u64),
            pool_bytes: most(|b| b.pool_bytes),
            taken_bytes: most(|b| b.taken_bytes),
            explain: row.explain.clone(),
            iotlb: rounds.iter().filter_map(|s| s.iotlb).reduce(|a, b| Iotlb {
                hits: a.hits.saturating_add(b.hits),
                misses: a.misses.saturating_add(b.misses),
                invalidations: a.invalidations.saturating_add(b.invalidations),
            }),
            load_fraction: Estimate::of(&rounds.iter().filter_map(|s| s.load).collect::<Vec<_>>())
                .map(|part| part.median),
            errors: rounds.iter().fold(0, |sum, s| sum.saturating_add(s.errors)),
            warnings: row.warnings.clone(),
        }
    }

    /// The policy that was in force instead of the requested one.
    pub fn replaced_by(&self) -> Option<&str> {
        let other = self.effective_policy != self.policy && !self.effective_policy.is_empty();
        other.then_some(&self.effective_policy)
    }

    /// The ratio to `off` in the job's metric.
    pub fn ratio(&self, metric: Metric) -> Option<Estimate> {
        self.ratio_to_off.map(|ratios| match metric {
            Metric::Bandwidth => ratios.bandwidth,
            Metric::Iops => ratios.iops,
        })
    }

    /// The median of the figure that `metric` names, in [`Metric::unit`].
    pub(crate) fn throughput(&self, metric: Metric) -> f64 {
        match metric {
            Metric::Bandwidth => self.bandwidth_bytes_per_s.median / (1 << 20) as f64,
            Metric::Iops => self.iops.median / 1e3,
        }
    }
}

/// 0 if no time passed.
fn per_second(n: u64, ns: u64) -> f64 {
    if ns == 0 { 0.0 } else { n as f64 * 1e9 / ns as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{BlockSizes, Rw};

    fn round(ios: u64) -> Sample {
        Sample { elapsed_ns: 500_000_000, ios, bytes: ios * 4096, ..Sample::default() }
    }

    fn row(policy: &str, rounds: Vec<Sample>) -> PolicyRounds {
        PolicyRounds { policy: policy.into(), rounds, ..PolicyRounds::default() }
    }

    #[test]
    fn figures_are_rates_and_shares_of_what_was_counted() {
        let mut sample = round(1000);
        sample.latency.record(1000);
        sample.thread_cpu_ns = Some(2_000_000);
        sample.kicks = Some(500);
        sample.iommu = Some(IommuSample {
            cpu_ns: 1_000_000,
            map_ns: 400_000,
            unmap_ns: 600_000,
            allocator_ns: 50_000,
            mapped_bytes: 1 << 29,
            requests: 2000,
            syncs: 100,
            ..IommuSample::default()
        });
        let rows = [row("off", vec![round(2000); 2]), row("strict", vec![sample; 2])];
        let report = JobReport::new(&Job::default(), 0, &rows);
        let strict = &report.results[1];
        assert_eq!((strict.iops.median, strict.bandwidth_bytes_per_s.median), (2e3, 8_192_000.0));
        assert_eq!(strict.iommu_cpu_fraction, Some(0.5));
        assert_eq!(strict.iommu_ns_per_io, Some(1000.0));
        assert_eq!(strict.allocator_cpu_fraction, Some(0.025));
        assert_eq!(strict.allocator_ns_per_io, Some(50.0));
        assert_eq!((strict.map_ns_per_gib, strict.unmap_ns_per_gib), (Some(8e5), Some(1.2e6)));
        assert_eq!((strict.requests_per_io, strict.syncs_per_io), (Some(2.0), Some(0.1)));
        assert_eq!((strict.kicks_per_io, strict.sync_wait_ns), (Some(0.5), None));
        assert_eq!(report.results[0].iommu_ns_per_io, None);
    }

    #[test]
    fn ratios_are_paired_by_round() {
        let with = |ios: &[u64]| {
            let mut rounds: Vec<_> = ios.iter().map(|ios| round(*ios)).collect();
            rounds.iter_mut().for_each(|round| round.latency.record(10));
            rounds
        };
        let rows = [row("off", with(&[1000, 10, 2000])), row("lazy-mq", with(&[900, 9, 1800]))];
        let report = JobReport::new(&Job::default(), 0, &rows);
        let ratio = report.results[1].ratio(report.metric).unwrap();
        assert_eq!((ratio.median, ratio.half_width()), (0.9, Some(0.0)));
    }

    #[test]
    fn without_off_there_are_no_ratios_and_without_rounds_no_row() {
        let rows = [row("strict", vec![round(1)]), row("lazy-sq", Vec::new())];
        let report = JobReport::new(&Job::default(), 0, &rows);
        assert_eq!(report.results.len(), 1);
        assert_eq!(report.results[0].ratio_to_off, None);
        assert_eq!(report.rounds, 1);
    }

    #[test]
    fn an_off_that_was_replaced_is_no_measure() {
        let mut one = round(1);
        one.latency.record(10);
        let mut rows = [row("off", vec![one.clone()]), row("strict", vec![one])];
        let report = JobReport::new(&Job::default(), 0, &rows);
        assert!(report.results[1].ratio_to_off.is_some());
        rows[0].effective_policy = "strict+map".into();
        rows[0].fallback = Some("untrusted".into());
        let report = JobReport::new(&Job::default(), 0, &rows);
        assert_eq!(report.results[1].ratio_to_off, None);
        assert_eq!(report.results[0].replaced_by(), Some("strict+map"));
        assert_eq!(report.results[0].fallback.as_deref(), Some("untrusted"));
        assert_eq!(report.results[1].replaced_by(), None);
    }

    #[test]
    fn large_blocks_are_judged_by_bandwidth_and_small_ones_by_iops() {
        let metric = |bs, rw| {
            let bs = BlockSizes { read: bs, write: 65536 };
            JobReport::new(&Job { bs, rw, ..Job::default() }, 0, &[]).metric
        };
        assert_eq!(metric(4096, Rw::RandRw), Metric::Iops);
        assert_eq!(metric(4096, Rw::Write), Metric::Bandwidth);
        assert_eq!(metric(32768, Rw::Read), Metric::Bandwidth);
    }
}
