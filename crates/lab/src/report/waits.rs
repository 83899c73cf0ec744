//! The waits for the device, by kind.
//!
//! A sync is one of five kinds. Only the flushes depend on the kind of flush queue: where map syncs
//! take the time, a single queue and one per CPU come out equal.

use ringfence_dma::Waits;
use ringfence_virtio_iommu::driver::HistogramSnapshot;
use serde::{Deserialize, Serialize};

use super::{JobReport, PolicyResult, PolicyRounds};
use crate::text::{clauses, number, percent, plain, us};

/// How long syncs waited in one round, by kind, ns; and what they are parts of. Jobs that ran at the
/// same time share it.
#[derive(Clone, Debug, Default)]
pub struct WaitsSample {
    /// By kind.
    pub waits: Waits,
    /// I/Os of all jobs.
    pub ios: u64,
    /// Time of all job threads together, ns: a thread that sleeps for a sync counts as well.
    pub thread_ns: u64,
}

/// How long syncs waited, by kind; all rounds and all jobs that ran at the same time together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SyncWaits {
    /// For the entries of a mapping to be visible.
    pub map: Waited,
    /// For the invalidation of what one strict unmap removed.
    pub unmap: Waited,
    /// Flushes by a queue's timer: its own thread waits.
    pub timer: Waited,
    /// Flushes that an unmap made because the queue was full or at its bound.
    pub full: Waited,
    /// Flushes that were requested.
    pub asked: Waited,
}

/// How long syncs of one kind waited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Waited {
    /// How many.
    pub count: u64,
    /// Half waited no longer, ns.
    pub p50: u64,
    /// 99 of 100 waited no longer, ns.
    pub p99: u64,
    /// All together, ns.
    pub total_ns: u64,
    /// How many an I/O.
    pub per_io: Option<f64>,
    /// What part all together are of the job threads' time. `null` where no job thread waits.
    pub thread_fraction: Option<f64>,
}

impl SyncWaits {
    /// From the rounds of a row. `None`: nothing waited.
    pub(super) fn new(row: &PolicyRounds) -> Option<SyncWaits> {
        let samples = || row.rounds.iter().filter_map(|round| Some(&round.iommu.as_ref()?.waits));
        let ios: f64 = samples().map(|sample| sample.ios as f64).sum();
        let thread_ns: f64 = samples().map(|sample| sample.thread_ns as f64).sum();
        let waited = |kind: fn(&Waits) -> &HistogramSnapshot| {
            let mut waits = HistogramSnapshot::default();
            samples().for_each(|sample| waits.merge(kind(&sample.waits)));
            let part = |n: u64, of: f64| (of > 0.0).then(|| n as f64 / of);
            Waited {
                count: waits.count(),
                p50: waits.quantile(0.5),
                p99: waits.quantile(0.99),
                total_ns: waits.sum(),
                per_io: part(waits.count(), ios),
                thread_fraction: part(waits.sum(), thread_ns),
            }
        };
        let waits = SyncWaits {
            map: waited(|waits| &waits.map),
            unmap: waited(|waits| &waits.unmap),
            // No job thread waits for them.
            timer: Waited { thread_fraction: None, ..waited(|waits| &waits.timer) },
            full: waited(|waits| &waits.full),
            asked: waited(|waits| &waits.asked),
        };
        let SyncWaits { map, unmap, timer, full, asked } = &waits;
        [map, unmap, timer, full, asked].iter().any(|kind| kind.count > 0).then_some(waits)
    }

    /// What part of the job threads' time went into flushes.
    fn flush_fraction(&self) -> Option<f64> {
        Some(self.full.thread_fraction? + self.asked.thread_fraction?)
    }
}

/// What waited in the rows of a job, a clause a row, as many of them in a line as fit.
pub(super) fn lines(job: &JobReport) -> Vec<String> {
    clauses("waits", job.results.iter().filter_map(|row| clause(job, row)))
}

fn clause(job: &JobReport, row: &PolicyResult) -> Option<String> {
    let mut words = vec![plain(&job.label(row))];
    if let Some(waits) = row.sync_waits {
        let SyncWaits { map, unmap, timer, full, asked } = waits;
        // Callers wait alike for a full queue and for what they requested.
        let flush = Waited {
            count: full.count.saturating_add(asked.count),
            per_io: full.per_io.zip(asked.per_io).map(|(full, asked)| full + asked),
            thread_fraction: waits.flush_fraction(),
            ..Waited::default()
        };
        let kinds = [("map", map), ("unmap", unmap), ("flush", flush), ("timer", timer)];
        for (name, waited) in kinds.into_iter().filter(|(_, waited)| waited.count > 0) {
            let per_io = waited.per_io.map_or_else(|| waited.count.to_string(), number);
            let part = waited.thread_fraction.map(|part| format!(" ({})", percent(part)));
            words.push(format!("{name} {per_io}{}", part.unwrap_or_default()));
        }
    }
    if let Some(wait) = row.sync_wait_ns {
        let [half, most] = [wait.p50, wait.p99].map(|ns| number(us(ns)));
        words.push(format!("{half}/{most}µs"));
    }
    (words.len() > 1).then(|| words.join(" "))
}

/// Why a single queue and one per CPU come out as they do, if the job has both: the part of the
/// threads' time that depends on the kind of queue, beside the part that does not.
pub(super) fn queues(job: &JobReport) -> Option<String> {
    let pair = |single: &str, each: &str| {
        let find = |name: &str| {
            let row = job.results.iter().find(|row| row.effective_policy == name)?;
            let waits = row.sync_waits?;
            Some((job.label(row), waits.map.thread_fraction?, waits.flush_fraction()?))
        };
        Some((find(single)?, find(each)?))
    };
    let ((single, map0, flush0), (each, map1, flush1)) =
        pair("lazy-sq", "lazy-mq").or_else(|| pair("lazy-sq+map", "lazy-mq+map"))?;
    Some(format!(
        "queues: {} and {}: flushes, which differ with the kind of queue, take {} and {} of the \
         threads' time, map syncs, which do not, {} and {}",
        plain(&single),
        plain(&each),
        percent(flush0),
        percent(flush1),
        percent(map0),
        percent(map1),
    ))
}

#[cfg(test)]
mod tests {
    use ringfence_virtio_iommu::driver::Histogram;

    use super::*;
    use crate::{
        job::Job,
        report::{IommuSample, Sample, WaitSummary},
    };

    fn waited(ns: u64, times: u64) -> HistogramSnapshot {
        let histogram = Histogram::default();
        (0..times).for_each(|_| histogram.record(ns));
        histogram.snapshot()
    }

    fn row(policy: &str, waits: WaitsSample) -> PolicyRounds {
        let iommu = IommuSample { waits, ..IommuSample::default() };
        let sample = Sample { ios: 10, iommu: Some(iommu), ..Sample::default() };
        PolicyRounds {
            policy: policy.to_owned(),
            effective_policy: policy.to_owned(),
            rounds: vec![sample; 2],
            ..PolicyRounds::default()
        }
    }

    fn waits(set: impl FnOnce(&mut Waits)) -> Waits {
        let mut waits = Waits::default();
        set(&mut waits);
        waits
    }

    fn lazy(policy: &str) -> PolicyRounds {
        row(
            policy,
            WaitsSample {
                waits: waits(|it| {
                    it.map = waited(1000, 160);
                    it.timer = waited(50_000, 2);
                    it.full = waited(4000, 1);
                    it.asked = waited(6000, 1);
                }),
                ios: 10,
                thread_ns: 1_000_000,
            },
        )
    }

    #[test]
    fn waits_are_counted_by_kind_and_shared_out() {
        let waits = SyncWaits::new(&lazy("lazy-mq")).unwrap();
        assert_eq!((waits.map.count, waits.map.total_ns), (320, 320_000));
        assert_eq!((waits.map.per_io, waits.map.thread_fraction), (Some(16.0), Some(0.16)));
        assert!((1000..=1125).contains(&waits.map.p50) && waits.map.p99 >= waits.map.p50);
        assert_eq!(waits.unmap.count, 0);
        assert_eq!(waits.flush_fraction(), Some(0.01));
        // The timer's thread waits, no job's.
        assert_eq!((waits.timer.count, waits.timer.thread_fraction), (4, None));
        assert_eq!(SyncWaits::new(&row("off", WaitsSample::default())), None);
    }

    #[test]
    fn the_text_says_who_waited_and_what_the_kind_of_queue_changes() {
        let strict = WaitsSample {
            waits: waits(|it| (it.map, it.unmap) = (waited(1000, 10), waited(100, 10))),
            ios: 10,
            thread_ns: 1_000_000,
        };
        let rows = [row("strict+map", strict), lazy("lazy-sq"), lazy("lazy-mq")];
        let job = JobReport::new(&Job::default(), 1, &rows);
        assert_eq!(
            lines(&job),
            [
                "waits: strict+map map 1.00 (1.0%) unmap 1.00 (0.1%); \
                 lazy-sq map 16.0 (16.0%) flush .200 (1.0%) timer .200",
                "waits: lazy-mq map 16.0 (16.0%) flush .200 (1.0%) timer .200"
            ]
        );
        let text = queues(&job).unwrap();
        assert!(text.contains("lazy-sq and lazy-mq: flushes, which"), "{text}");
        assert!(text.contains("1.0% and 1.0% of the threads"), "{text}");
        assert!(text.ends_with("map syncs, which do not, 16.0% and 16.0%"), "{text}");
        // With one of them alone there is nothing to compare.
        let job = JobReport::new(&Job::default(), 1, &rows[..2]);
        assert_eq!(queues(&job), None);
        assert!(lines(&JobReport::new(&Job::default(), 1, &[])).is_empty());
    }

    #[test]
    fn without_time_or_ios_there_is_no_share() {
        let waits =
            WaitsSample { waits: waits(|it| it.map = waited(5, 1)), ..WaitsSample::default() };
        let rows = [row("strict", waits)];
        let waits = SyncWaits::new(&rows[0]).unwrap();
        assert_eq!((waits.map.per_io, waits.map.thread_fraction), (None, None));
        let job = JobReport::new(&Job::default(), 1, &rows);
        assert_eq!(lines(&job), ["waits: strict map 2"]);
        // How long, even where the kind is unknown.
        let mut job = job;
        job.results[0].sync_waits = None;
        job.results[0].sync_wait_ns = Some(WaitSummary { p50: 287, p99: 8190 });
        assert_eq!(lines(&job), ["waits: strict .287/8.19µs"]);
    }
}
