//! The table of seed 004: sequential I/O, 64 deep, by block size, under each policy.

use anyhow::{Context, Result};
use ringfence_dma::Policy;
use ringfence_run::worker::Notify;

use super::{Options, Part};
use crate::{
    bench::{
        Benchmark, Row as BenchRow,
        rounds::{NOTHING, Rounds, Stop, Taken},
        row::{object, value},
    },
    job::{Job, JobFile},
    list::{List, defaults, named, short},
    progress::Kind,
    report::{PolicyRounds, Sample},
    run::{self, DiskChoice, Row, compare},
};

const GIB: f64 = (1u64 << 30) as f64;

/// The rows, in order. `strict` is as in the seed: each map has a sync of its own, and each unmap
/// too; the one with shared syncs is called `strict+map` here.
pub(super) const ROWS: [Row; 7] = [
    Row::Policy(Policy::Off),
    Row::Policy(Policy::Strict),
    Row::Policy(Policy::StrictMap),
    Row::Policy(Policy::LazyMqMap),
    Row::Policy(Policy::Bounce),
    Row::Policy(Policy::Auto),
    Row::Persistent,
];

/// The policy that `ratio_to_ringfence` refers to.
const OURS: Policy = Policy::Auto;

named! {
    /// Which way the data goes, as fio calls it.
    Op, "unknown direction {:?}: there are {}":
    /// Sequential reads.
    Read = "read",
    /// Sequential writes.
    Write = "write",
}

/// The sizes of the default run, bytes.
const SIZES: [u32; 4] = [4 << 10, 16 << 10, 64 << 10, 128 << 10];

/// The job file of the examples, with these sizes.
fn job_file(sizes: &[u32], op: Op) -> String {
    let rw = op.name();
    let mut text = format!(
        "[global]\nioengine=libaio\ndirect=1\ntime_based\nruntime=10\nrw={rw}\niodepth=64\nsize=512m\n"
    );
    for size in sizes {
        let name = short(u64::from(*size), ("k", 1 << 10));
        text.push_str(&format!("[{rw}_{name}]\nstonewall\nbs={size}\n"));
    }
    text
}

/// Runs all of it, in one comparison: rows take turns in each round.
///
/// # Errors
/// The jobs do not fit this machine.
pub(super) fn run(options: &Options, show: Kind, stop: &Stop, into: &mut Benchmark) -> Result<()> {
    let Options { notify, repeat, .. } = *options;
    let sizes = options.sizes.as_ref();
    let sizes = sizes.map_or(SIZES.to_vec(), |sizes| sizes.iter().map(|size| size.0).collect());
    let mut jobs = Vec::new();
    let mut warnings = Vec::new();
    for op in options.ops.iter() {
        let text = job_file(&sizes, *op);
        let file = JobFile::parse(text.as_bytes(), "seed-004.fio").context("the seed's job")?;
        jobs.extend(file.jobs);
        warnings.extend(file.warnings);
    }
    let file = JobFile { jobs, warnings, file: "seed-004.fio".to_owned() };
    let of_run = run::Options {
        rows: Some(List::from(&ROWS[..])),
        disk: DiskChoice::Ram,
        destroy_data: true,
        notify,
        repeat,
        runtime: Some(options.runtime),
        queues: Some(1),
        ..defaults()
    };
    let mut rows = Vec::new();
    let ended = compare(file, &of_run, show, stop, &mut |_, job, rounds| {
        rows.extend(contest(job, rounds, notify));
    })?;
    into.rows.extend(rows);
    into.warnings.extend(ended.comparison.warnings);
    let failure = ended.failure.map(|failure| format!("{failure:#}"));
    let wrong = ended.comparison.jobs.iter().flat_map(|job| {
        let failed = job.results.iter().filter(|row| row.errors > 0);
        failed.map(|row| format!("{}, {}: {} I/Os failed", job.name, row.policy, row.errors))
    });
    let found = ended.leaks.into_iter().chain(failure).chain(wrong);
    into.errors.extend(found.map(|found| format!("seed: {found}")));
    Ok(())
}

/// What a row counted, a round each.
fn counted<'s>(samples: impl Iterator<Item = &'s Sample> + Clone) -> Taken {
    let mut taken = Taken::default();
    for sample in samples.clone() {
        let ios = sample.ios as f64;
        taken.push([
            ("ns", sample.elapsed_ns as f64 / ios),
            ("bandwidth_bytes_per_s", sample.bytes as f64 / (sample.elapsed_ns as f64 / 1e9)),
            ("cpu_ns_per_io", sample.cpu_ns.unwrap_or(0) as f64 / ios),
        ]);
    }
    // A row without an IOMMU has none of these figures.
    let mapped = samples.map(|sample| {
        let iommu = sample.iommu.as_ref().filter(|iommu| iommu.mapped_bytes > 0)?;
        let per_gib = |ns: u64| ns as f64 / (iommu.mapped_bytes as f64 / GIB);
        let (map, unmap) = (per_gib(iommu.map_wall_ns), per_gib(iommu.unmap_wall_ns));
        Some([("map_ns_per_gib", map), ("unmap_ns_per_gib", unmap)])
    });
    let mapped: Option<Vec<_>> = mapped.collect();
    mapped.into_iter().flatten().for_each(|sample| taken.push(sample));
    taken
}

/// By how many percent `own` differs from `base`, round by round.
fn change(own: &Rounds, base: &Rounds) -> Rounds {
    own.with(base, |own, base| (own / base - 1.0) * 100.0)
}

/// The rows of a job.
fn contest(job: &Job, rows: &[PolicyRounds], notify: Notify) -> Vec<BenchRow> {
    let (op, size) = match job.rw.writes() {
        true => (Op::Write, job.bs.write),
        false => (Op::Read, job.bs.read),
    };
    // A round in which a row completed nothing, on a machine with other work, says nothing about
    // the other rows either.
    let idle =
        |round: usize| rows.iter().any(|row| row.rounds.get(round).is_some_and(|of| of.ios == 0));
    let kept = |row: &PolicyRounds| {
        let kept = row.rounds.iter().enumerate().filter(|(round, _)| !idle(*round));
        counted(kept.map(|(_, sample)| sample))
    };
    let left_out =
        rows.first().map_or(0, |row| (0..row.rounds.len()).filter(|at| idle(*at)).count());
    let counted: Vec<Taken> = rows.iter().map(kept).collect();
    let find = |policy: Policy| {
        let index = rows.iter().position(|row| row.policy == policy.name());
        index.map_or(&NOTHING, |index| &counted[index])
    };
    let (strict, ours) = (find(Policy::Strict), find(OURS));
    let row = |(row, own): (&PolicyRounds, &Taken)| {
        let ns = &own["ns"];
        // The ratio of throughputs.
        let faster = |base: Policy| value(find(base)["ns"].ratio_to(ns));
        let change = |figure| value(change(&own[figure], &strict[figure]).interval());
        let note = match (&row.fallback, ns.0.is_empty()) {
            (_, true) => Some("not measured: interrupted, or rows got nothing done".to_owned()),
            (Some(why), _) => Some(format!("in force was {}: {why}", row.effective_policy)),
            (None, _) if left_out > 0 => {
                Some(format!("rounds in which a row got nothing done are left out: {left_out}"))
            }
            (None, _) => None,
        };
        let mut figures = object([
            ("ratio_to_strict", faster(Policy::Strict)),
            ("ratio_to_strict_map", faster(Policy::StrictMap)),
            ("ratio_to_off", faster(Policy::Off)),
            ("map_change_percent", change("map_ns_per_gib")),
            ("unmap_change_percent", change("unmap_ns_per_gib")),
        ]);
        let names =
            ["bandwidth_bytes_per_s", "map_ns_per_gib", "unmap_ns_per_gib", "cpu_ns_per_io"];
        figures.extend(own.intervals(&names));
        BenchRow {
            name: format!("seed/{}/{size}", op.name()),
            implementation: row.policy.clone(),
            params: object([
                ("part", Part::Seed.name().into()),
                ("op", op.name().into()),
                ("size", size.into()),
                ("notify", notify.to_string().into()),
            ]),
            ns_per_op: ns.interval(),
            ratio_to_ringfence: ns.ratio_to(&ours["ns"]).median,
            note,
            figures,
        }
    };
    rows.iter().zip(&counted).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{bench::Interval, report::IommuSample};

    fn sample(ns: u64, map: u64, unmap: u64) -> Sample {
        let iommu = IommuSample {
            map_wall_ns: map,
            unmap_wall_ns: unmap,
            mapped_bytes: 1 << 29,
            ..IommuSample::default()
        };
        Sample {
            elapsed_ns: ns * 1000,
            ios: 1000,
            bytes: 1000 * 4096,
            cpu_ns: Some(7_000_000),
            iommu: (map > 0).then_some(iommu),
            ..Sample::default()
        }
    }

    fn rounds(policy: &str, rounds: [(u64, u64, u64); 3]) -> PolicyRounds {
        PolicyRounds {
            policy: policy.to_owned(),
            rounds: rounds.iter().map(|(ns, map, unmap)| sample(*ns, *map, *unmap)).collect(),
            ..PolicyRounds::default()
        }
    }

    #[test]
    fn ratios_are_of_rounds_and_times_are_of_a_gib() {
        let rows = [
            rounds("off", [(100, 0, 0); 3]),
            // A machine that slows down: every round is twice as long as the one before.
            rounds("strict", [(400, 5000, 1000), (800, 10_000, 2000), (1600, 20_000, 4000)]),
            rounds("bounce", [(100, 50, 100), (200, 100, 200), (400, 200, 400)]),
        ];
        let file = JobFile::parse(job_file(&[4096], Op::Read).as_bytes(), "t").unwrap();
        let found = contest(&file.jobs[0], &rows, Notify::Sleep);
        let bounce = &found[2];
        assert_eq!(
            (bounce.name.as_str(), bounce.params["notify"].as_str()),
            ("seed/read/4096", Some("sleep"))
        );
        assert_eq!(bounce.ns_per_op.median, Some(200.0));
        assert_eq!(bounce.ratio_to_ringfence, None, "there was no auto");
        let exactly = |key: &str, wanted: f64| {
            for part in ["median", "lo", "hi"] {
                let found = bounce.figures[key][part].as_f64().unwrap();
                assert!((found - wanted).abs() < 1e-9, "{key}: {found}");
            }
        };
        assert_eq!(bounce.figures["bandwidth_bytes_per_s"]["median"], 4096.0 / 200e-9);
        exactly("ratio_to_strict", 4.0);
        exactly("map_change_percent", -99.0);
        exactly("unmap_change_percent", -90.0);
        exactly("cpu_ns_per_io", 7000.0);
        assert_eq!(bounce.figures["map_ns_per_gib"]["median"], 200.0);
        assert!(found[0].figures["map_ns_per_gib"]["median"].is_null(), "off maps nothing");
    }

    #[test]
    fn a_round_in_which_a_row_got_nothing_done_is_left_out_for_all() {
        let mut rows = [
            rounds("off", [(100, 0, 0), (900, 0, 0), (100, 0, 0)]),
            rounds("auto", [(200, 5, 5); 3]),
        ];
        rows[1].rounds[1].ios = 0;
        let file = JobFile::parse(job_file(&[4096], Op::Write).as_bytes(), "t").unwrap();
        let found = contest(&file.jobs[0], &rows, Notify::Sleep);
        let exactly =
            |value: f64| Interval { median: Some(value), lo: Some(value), hi: Some(value) };
        assert_eq!(found[0].ns_per_op, exactly(100.0), "without the round of 900");
        assert_eq!(found[1].ns_per_op, exactly(200.0));
        assert_eq!(found[1].figures["ratio_to_off"]["median"], 0.5);
        assert!(found.iter().all(|row| row.note.as_ref().unwrap().ends_with("left out: 1")));
        rows[1].rounds.iter_mut().for_each(|round| round.ios = 0);
        let found = contest(&file.jobs[0], &rows, Notify::Sleep);
        assert!(found[1].note.as_ref().unwrap().contains("not measured"), "{found:?}");
        assert_eq!(found[1].ns_per_op, Interval::default());
    }

    /// The jobs that ship are the jobs that are measured.
    #[test]
    fn the_examples_hold_the_same_jobs() {
        for (op, name) in [(Op::Read, "seed-004.fio"), (Op::Write, "seed-004-writes.fio")] {
            let path = format!("{}/../../examples/{name}", env!("CARGO_MANIFEST_DIR"));
            let example = JobFile::load(path.as_ref()).unwrap();
            let own = JobFile::parse(job_file(&SIZES, op).as_bytes(), name).unwrap();
            assert_eq!(example.jobs.len(), own.jobs.len());
            for (mut example, own) in example.jobs.into_iter().zip(own.jobs) {
                // The first of a file need not wait for one before it.
                example.stonewall |= own.stonewall;
                assert_eq!(example, own);
            }
        }
    }
}
