//! A made-up comparison for the tests of the reports; its figures are those of no machine.

use ringfence_virtio_iommu::driver::{Histogram, HistogramSnapshot};

use super::*;
use crate::job::JobFile;

/// The seed's two jobs under all policies, five rounds.
pub(super) fn comparison() -> Comparison {
    let mut comparison = Comparison {
        disk: "paced (2.5 GiB/s, 600,000 IOPS, 80 µs)".to_owned(),
        notify: "adaptive".to_owned(),
        rounds: 5,
        runtime_s: 1.2,
        ..Comparison::new()
    };
    comparison.host = Machine {
        cpu: "Example CPU @ 2.50GHz".to_owned(),
        cpus: 2,
        memory_bytes: 8 << 30,
        kernel: "6.1.0".to_owned(),
    };
    comparison.allocators = vec!["ringfence".to_owned()];
    comparison.placement = "size".to_owned();
    comparison.aperture_bits = 48;
    comparison.load_threads = 2;
    comparison.warnings =
        vec!["seed-000.fio:5: filename=\"/dev/nvme0n1\" is never opened".to_owned()];
    for (stage, job) in JobFile::seed().jobs.iter().enumerate() {
        let small = stage == 1;
        let rows: Vec<PolicyRounds> = [
            ("host", 1.01, 0.0),
            ("off", 1.0, 0.0),
            ("strict", 0.79, 17.0),
            ("strict+map", 0.93, 2.0),
            ("lazy-sq", 0.91, 16.0),
            ("lazy-mq", 0.9, 16.0),
            ("lazy-sq+map", 0.985, 1.0),
            ("lazy-mq+map", 0.98, 1.0),
            ("bounce", 0.97, 0.0),
            ("auto", 0.975, 0.5),
            ("zero-copy", 0.999, 0.0),
        ]
        .map(|(policy, speed, syncs)| PolicyRounds {
            policy: policy.to_owned(),
            allocator: (speed < 1.0).then(|| "ringfence".to_owned()),
            effective_policy: policy.to_owned(),
            rounds: (0..5).map(|n| sample(policy, speed, syncs, small, n)).collect(),
            ..PolicyRounds::default()
        })
        .into();
        comparison.jobs.push(JobReport::new(job, stage as u32, &rows));
    }
    comparison
}

fn sample(policy: &str, speed: f64, syncs: f64, small: bool, round: u64) -> Sample {
    let speed = speed * (1.0 + ((round * 7 + policy.len() as u64) % 5) as f64 * 0.004);
    let (rate, block) = if small { (90_000.0, 4096) } else { (38_000.0, 65536) };
    let ios = (rate * speed) as u64;
    let per_io = |n: f64| (n * ios as f64) as u64;
    let mut latency = Latencies::default();
    let mut sync_wait = Latencies::default();
    for n in 0..1000u64 {
        latency.record((1e9 / rate * 128.0 / speed) as u64 * (500 + n) / 1000);
        sync_wait.record(2000 + n * n / 20);
    }
    let protected = !matches!(policy, "host" | "off");
    let lazy = policy.starts_with("lazy");
    let waited = |ns: u64, times: u64| -> HistogramSnapshot {
        let histogram = Histogram::default();
        (0..times).for_each(|n| histogram.record(ns + n));
        histogram.snapshot()
    };
    // Of a hundred I/Os.
    let maps = if lazy { syncs } else { (syncs - 1.0).max(0.0) };
    let mut waits = WaitsSample { ios: 100, thread_ns: 10_000_000, ..WaitsSample::default() };
    waits.waits.map = waited(2000, (maps * 100.0) as u64);
    waits.waits.unmap = waited(3000, if lazy { 0 } else { 100 });
    waits.waits.timer = waited(20_000, if lazy { 2 } else { 0 });
    waits.waits.full =
        waited(9000, if lazy { 1 + 2 * u64::from(policy.contains("mq")) } else { 0 });
    let iommu = protected.then(|| IommuSample {
        cpu_ns: per_io(300.0 * syncs),
        map_ns: per_io(190.0 * syncs),
        unmap_ns: per_io(110.0 * syncs),
        map_wall_ns: per_io(200.0 * syncs),
        unmap_wall_ns: per_io(120.0 * syncs),
        allocator_ns: per_io(25.0),
        mapped_bytes: ios * block,
        requests: per_io(if small { 2.0 } else { 17.0 }),
        syncs: per_io(syncs / if small { 8.0 } else { 1.0 }),
        sync_wait,
        waits,
    });
    Sample {
        elapsed_ns: 1_000_000_000,
        ios,
        bytes: ios * block,
        latency,
        cpu_ns: Some(2_000_000_000),
        thread_cpu_ns: Some(1_000_000_000),
        iommu,
        kicks: (policy != "host").then(|| per_io(0.3)),
        bounce: matches!(policy, "bounce" | "auto" | "zero-copy").then(|| {
            let bounced = match policy {
                "bounce" => ios,
                "auto" => ios / 2,
                _ => 0,
            };
            BounceSample {
                maps: if policy == "zero-copy" { 0 } else { ios },
                bounced,
                copied_bytes: bounced * block,
                not_bounced: 0,
                pool_bytes: 256 * block,
                taken_bytes: if policy == "zero-copy" { 256 * block } else { 0 },
            }
        }),
        stale: (protected && policy != "zero-copy").then_some(StaleWindow {
            max_ms: if lazy { 9.7 } else { 0.0 },
            byte_ms: if lazy { 3e9 } else { 0.0 },
            accesses: if lazy { 40 } else { 0 },
            probes: 100,
        }),
        exposure: protected.then(|| {
            // Four ms each with a queue per CPU, half a second with a single one.
            let ns = if policy.contains("mq") { 4_000_000 } else { 500_000_000 };
            let mapped_bytes = ios * block;
            let mut counted = ringfence_dma::Stats::default();
            counted.bytes = mapped_bytes;
            if lazy {
                counted.exposure.max_age_ns = ns * 51 / 20;
                counted.exposure.byte_ns = u128::from(mapped_bytes) * u128::from(ns);
            }
            counted
        }),
        iotlb: protected.then_some(Iotlb { hits: 900_000, misses: 1000, invalidations: 50 }),
        load: Some(0.5),
        errors: 0,
    }
}
