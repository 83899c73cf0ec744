//! The table, shaped like seed 000's: a row a policy, each figure against `off`, with its
//! confidence beside it. At most `text::WIDTH` columns.

use super::{Comparison, Exposure, JobReport, PolicyResult, Reach, bounce, waits};
use crate::{
    run::tuning::{TrustChoice, Tuning},
    stats::Estimate,
    text::{
        Column, bytes, clauses, count, dash, number, optional, percent, plain, table, us, wrap,
    },
};

/// What precedes the tables: what was run, and where.
pub fn head(comparison: &Comparison) -> String {
    wrap(&headline(comparison))
}

/// A job's table, with every figure, for a terminal.
pub fn job(job: &JobReport) -> String {
    let mut out = format!("\n{}{}", wrap(&title(job)), rows(job));
    let below = fallbacks(job).into_iter().chain(waits::lines(job)).chain(waits::queues(job));
    let below = below.chain(bounce::lines(job)).chain(load(job));
    out.extend(below.map(|text| wrap(&text)));
    out
}

/// What follows the tables.
pub fn end(comparison: &Comparison) -> String {
    let mut out = format!("\n{}", legend(comparison));
    out.extend(warnings(comparison).iter().map(|text| wrap(&format!("warning: {text}"))));
    out
}

/// What the figures mean that the tables have.
pub(super) fn legend(comparison: &Comparison) -> String {
    let any = |of: fn(&JobReport) -> bool| comparison.jobs.iter().any(of);
    let exposed = any(|job| !job.compares_allocators());
    let waited = any(|job| !waits::lines(job).is_empty());
    let bounced = any(|job| !bounce::lines(job).is_empty());
    let loaded = comparison.load_threads > 0;
    let legend = LEGEND.lines().filter(|line| match line.trim_start() {
        line if line.starts_with("lies open") => exposed,
        line if line.starts_with("waits") || line.starts_with("µs") => waited,
        line if line.starts_with("bounce") || line.starts_with("memory") => bounced,
        line if line.starts_with("load") => loaded,
        _ => true,
    });
    legend.flat_map(|line| [line, "\n"]).collect()
}

const LEGEND: &str = "\
Ratios are medians of rounds, each paired with the off of its round (policies take turns); ± is the 95 % confidence.
  off        the same processes and rings, without protection; host: the same job on the disk, without virtqueues
  MiB/s, kIOPS   bandwidth or I/Os a second against off, higher is better
  latency    mean against off, lower is better; p50, p99 in µs
  CPU        part of the job threads' time spent in IOMMU code (sampled), and ns of it an I/O;
  alloc      part of the job threads' time spent in the allocator of I/O virtual addresses: within that of CPU
  ms/GiB     time in map and in unmap, a GiB mapped
  per I/O    virtio-iommu requests; syncs, which wait for the device; kicks, which wake it
  lies open  longest that unmapped memory was reachable, ms; MiB x ms of it a GiB mapped; open: without bound
  stale      longest time an access still succeeded after unmap had returned, ms, as a probe found it (0: none did)
  waits      syncs an I/O (part of the job threads' time); flush: of a full queue or requested; timer: none waits;
             µs that half and 99 of 100 of all its syncs took
  bounce     mappings that were copies, bytes copied an I/O, mappings that found no slot; most memory of the pools;
             memory taken to be filled and read in place: open, as what is persistent
  load       part of their time that the busy threads beside it had a CPU
";

/// What was run, and where: one sentence, the same in every output.
pub(super) fn headline(comparison: &Comparison) -> String {
    format!(
        "disk {}, notify {}; {}{}{}{}{}; {}{}",
        plain(&comparison.disk),
        plain(&comparison.notify),
        addresses(comparison),
        tuned(&comparison.tuning),
        count(comparison.rounds, "round"),
        // Jobs without a runtime end by themselves.
        match comparison.runtime_s {
            0.0 => String::new(),
            seconds => format!(" of {} s", (seconds * 1000.0).round() / 1000.0),
        },
        if comparison.interrupted { ", interrupted" } else { "" },
        match comparison.load_threads {
            0 => String::new(),
            n => format!("beside {}; ", count(n, "busy thread")),
        },
        comparison.host.describe(),
    )
}

/// Where I/O virtual addresses came from, if any were needed.
fn addresses(comparison: &Comparison) -> String {
    if comparison.jobs.iter().flat_map(|job| &job.results).all(|row| row.allocator.is_none()) {
        return String::new();
    }
    let placement = match comparison.placement.as_str() {
        "" | "size" => String::new(),
        other => format!(" (placed {})", plain(other)),
    };
    let live = match comparison.live_ranges {
        0 => String::new(),
        n => format!(", {n} ranges taken"),
    };
    format!(
        "IOVAs of {} bits from {}{placement}{live}; ",
        comparison.aperture_bits,
        plain(&comparison.allocators.join(", ")),
    )
}

/// The part of the tuning that was requested.
fn tuned(tuning: &Tuning) -> String {
    let Tuning {
        flush_queue_slots,
        flush_queue_ms,
        high_water,
        max_exposure_ms,
        max_exposure_bytes,
        batch,
        chunk,
        bounce_threshold,
        bounce_quota,
        trust,
    } = *tuning;
    let parts = [
        flush_queue_slots.map(|n| format!("flush queues of {n} slots")),
        flush_queue_ms.map(|n| format!("flushed after {n} ms")),
        high_water.map(|n| format!("or from {n} entries on")),
        max_exposure_ms.map(|n| format!("exposed {n} ms at most")),
        max_exposure_bytes.map(|n| format!("exposed {} at most", bytes(n))),
        (batch != Tuning::BATCH).then(|| format!("batches of {batch}")),
        (chunk != Tuning::CHUNK).then(|| format!("chunks of {chunk}")),
        bounce_threshold.map(|n| format!("copied up to {}", bytes(n))),
        bounce_quota.map(|n| format!("slots of {} at most", bytes(n))),
        (trust != TrustChoice::Auto).then(|| format!("disk {trust}")),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { String::new() } else { format!("{}; ", parts.join(", ")) }
}

/// How much CPU the busy threads beside each row got.
fn load(job: &JobReport) -> Vec<String> {
    let shown = |row: &PolicyResult| {
        let part = row.load_fraction?;
        Some(format!("{} {}", plain(&job.label(row)), percent(part)))
    };
    clauses("load", job.results.iter().filter_map(shown))
}

/// The rows that ran under another policy than the requested one, and why.
pub(super) fn fallbacks(job: &JobReport) -> Vec<String> {
    let shown = |row: &PolicyResult| {
        let effective = row.replaced_by()?;
        let why = row.fallback.as_deref().map_or(String::new(), |why| format!(": {}", plain(why)));
        Some(format!("{} ran as {}{why}", marked(job, row), plain(effective)))
    };
    job.results.iter().filter_map(shown).collect()
}

/// The explanations of a job's rows that chose, for a terminal.
pub fn explain(job: &JobReport) -> String {
    let mut out = String::new();
    for row in &job.results {
        let Some(explanation) = &row.explain else { continue };
        out.push_str(&format!("\n{}, {}:\n", plain(&job.name), marked(job, row)));
        out.extend(explanation.lines().map(|line| format!("  {}\n", plain(line))));
    }
    out
}

/// What a row is called, with a mark if it ran under another policy.
pub(super) fn marked(job: &JobReport, row: &PolicyResult) -> String {
    let mark = if row.replaced_by().is_some() { "*" } else { "" };
    format!("{}{mark}", plain(&job.label(row)))
}

/// All warnings, each with the job and row it is about.
pub(super) fn warnings(comparison: &Comparison) -> Vec<String> {
    let mut all: Vec<String> = comparison.warnings.iter().map(|text| plain(text)).collect();
    for job in &comparison.jobs {
        for row in &job.results {
            let about = format!("{}, {}", plain(&job.name), plain(&job.label(row)));
            if row.errors > 0 {
                all.push(format!("{about}: {} I/Os failed or returned wrong bytes", row.errors));
            }
            if let Some(late) = row.exposure.map(|found| found.late_releases).filter(|n| *n > 0) {
                all.push(format!("{about}: {late} ranges stayed reachable longer than the bound"));
            }
            all.extend(row.warnings.iter().map(|text| format!("{about}: {}", plain(text))));
        }
    }
    all
}

pub(super) fn title(job: &JobReport) -> String {
    format!("{}: {}; {}", plain(&job.name), job.describe(), count(job.rounds, "round"))
}

/// The columns between policy and the common ones differ: bandwidth for large blocks, IOPS for
/// small ones; the latency stands beside both.
fn rows(job: &JobReport) -> String {
    let ratio = |row: &PolicyResult| row.ratio(job.metric);
    let latency = |row: &PolicyResult| {
        let latency = row.ratio_to_off.map(|ratios| ratios.latency);
        latency.filter(|latency| latency.median.is_finite())
    };
    let half = |of: Option<Estimate>, shown: fn(f64) -> String| {
        of.map_or(String::new(), |of| of.half_width().map_or(dash(), shown))
    };
    let exposed = |row: &PolicyResult, figure: fn(&Exposure) -> Option<f64>| match &row.exposure {
        Some(found) if is_open(found.reach) => "open".to_owned(),
        found => optional(found.as_ref().and_then(figure)),
    };
    let columns: [Column<'_, PolicyResult, 2>; 19] = [
        (["", ""], &|row| marked(job, row)),
        ([job.metric.unit(), ""], &|row| number(row.throughput(job.metric))),
        (["", "vs off"], &|row| ratio(row).map_or(dash(), |e| format!("{:.1}%", e.median * 100.0))),
        (["", "±"], &|row| half(ratio(row), |half| one_digit(half * 100.0))),
        (["latency", "vs off"], &|row| {
            latency(row).map_or(dash(), |e| format!("x{:.2}", e.median))
        }),
        (["", "±"], &|row| half(latency(row), |half| format!("{half:.2}"))),
        (["µs p50", ""], &|row| number(us(row.latency_ns.p50))),
        (["p99", ""], &|row| number(us(row.latency_ns.p99))),
        (["CPU", "%"], &|row| {
            row.iommu_cpu_fraction.map_or(dash(), |part| one_digit(part * 100.0))
        }),
        (["alloc", "%"], &|row| optional(row.allocator_cpu_fraction.map(|part| part * 100.0))),
        (["ns", "/I/O"], &|row| optional(row.iommu_ns_per_io)),
        (["ms/", "map"], &|row| optional(row.map_ns_per_gib.map(|ns| ns / 1e6))),
        (["GiB", "unmap"], &|row| optional(row.unmap_ns_per_gib.map(|ns| ns / 1e6))),
        (["per", "reqs"], &|row| optional(row.requests_per_io)),
        (["I/O", "syncs"], &|row| optional(row.syncs_per_io)),
        (["", "kicks"], &|row| optional(row.kicks_per_io)),
        (["lies", "ms"], &|row| exposed(row, |found| found.max_ms)),
        (["open", "MiBms"], &|row| exposed(row, Exposure::mib_ms_per_gib)),
        (["stale", "ms"], &|row| optional(row.stale_window.map(|window| window.max_ms))),
    ];
    let mut columns = Vec::from(columns);
    if job.compares_allocators() {
        // The names of allocators take the room of the exposure, which hardly depends on them.
        columns.retain(|(head, _)| !matches!(head[0], "lies" | "open"));
    }
    table(1, &columns, &job.results)
}

/// Whether memory is reached without bound, whatever was counted.
fn is_open(reach: Reach) -> bool {
    matches!(reach, Reach::Persistent | Reach::Always | Reach::Leaked)
}

fn one_digit(n: f64) -> String {
    if n < 99.95 { format!("{n:.1}") } else { number(n) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;
    use crate::text::WIDTH;

    /// All that is printed.
    fn render(comparison: &Comparison) -> String {
        let jobs: String = comparison.jobs.iter().map(job).collect();
        format!("{}{jobs}{}", head(comparison), end(comparison))
    }

    #[test]
    fn no_line_is_wider_than_a_terminal() {
        let mut comparison = sample::comparison();
        comparison.warnings.push("x".repeat(500));
        comparison.jobs[0].name = "n ".repeat(100);
        let text = render(&comparison);
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{}: {line}", line.chars().count());
        }
        println!("{text}");
    }

    #[test]
    fn extreme_figures_still_fit() {
        let mut comparison = sample::comparison();
        for row in comparison.jobs.iter_mut().flat_map(|job| &mut job.results) {
            row.policy = "lazy-mq+map".to_owned();
            for figure in [
                &mut row.iommu_ns_per_io,
                &mut row.map_ns_per_gib,
                &mut row.unmap_ns_per_gib,
                &mut row.requests_per_io,
                &mut row.syncs_per_io,
                &mut row.kicks_per_io,
            ] {
                *figure = Some(123_456_789_012.0);
            }
            row.latency_ns.p99 = 900_000_000_000;
            row.iommu_cpu_fraction = Some(0.999);
            row.allocator_cpu_fraction = Some(0.999);
        }
        for line in render(&comparison).lines() {
            assert!(line.chars().count() <= WIDTH, "{}: {line}", line.chars().count());
        }
    }

    #[test]
    fn the_table_names_disk_notify_mode_and_every_policy() {
        let comparison = sample::comparison();
        let text = render(&comparison);
        assert!(text.contains("disk paced") && text.contains("notify adaptive"));
        for row in &comparison.jobs[0].results {
            assert!(text.contains(&row.policy), "{}", row.policy);
        }
        assert!(text.contains("bandwidth") && text.contains("kIOPS"));
        assert!(text.contains("100.0%"), "off against itself");
    }

    #[test]
    fn rows_that_differ_in_their_allocator_are_distinguished() {
        let mut comparison = sample::comparison();
        assert!(!render(&comparison).contains("strict+map/"));
        let rows = &mut comparison.jobs[0].results;
        let mut other = rows[3].clone();
        other.allocator = Some("magazines".to_owned());
        other.errors = 1;
        rows.insert(3, other);
        let text = render(&comparison);
        for label in ["strict+map/magazines", "strict+map/ringfence", "lazy-mq+map/ringfence"] {
            assert!(text.contains(label), "{label}\n{text}");
        }
        assert!(text.contains("strict+map/magazines: 1 I/Os failed"), "{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{}: {line}", line.chars().count());
        }
        // Exposure makes room; the columns are those of the row.
        let (first, second) = text.split_once("randrw_page").unwrap();
        assert!(!first.contains("lies") && second.contains("lies"), "{text}");
        comparison.jobs.truncate(1);
        assert!(!render(&comparison).contains("lies"), "{text}");
    }

    #[test]
    fn where_addresses_come_from_is_shown() {
        let mut comparison = sample::comparison();
        comparison.placement = "lowest".to_owned();
        comparison.live_ranges = 1000;
        let line = headline(&comparison);
        assert!(line.contains("IOVAs of 48 bits from ringfence (placed lowest), 1000 ranges"));
        comparison.jobs.iter_mut().for_each(|job| job.results.truncate(2));
        assert!(!headline(&comparison).contains("IOVAs"));
    }

    #[test]
    fn errors_and_fallbacks_are_said() {
        let mut comparison = sample::comparison();
        comparison.jobs[0].results[2].errors = 3;
        comparison.jobs[0].results[3].effective_policy = "strict".to_owned();
        let text = render(&comparison);
        assert!(text.contains("3 I/Os failed") && text.contains("\nstrict+map* ran as strict\n"));
        comparison.jobs[0].results[3].fallback = Some("it is \u{1b}untrusted".to_owned());
        let text = render(&comparison);
        assert!(text.contains("\nstrict+map* ran as strict: it is ?untrusted\n"), "{text}");
        // In the table, below it, and nowhere else.
        assert_eq!(text.matches("strict+map*").count(), 2, "{text}");
    }

    /// A row's cells.
    fn line<'a>(text: &'a str, policy: &str) -> Vec<&'a str> {
        let words = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        words.into_iter().find(|words| words.first() == Some(&policy)).unwrap()
    }

    #[test]
    fn what_is_open_never_looks_strict() {
        let mut comparison = sample::comparison();
        let mut row = comparison.jobs[0].results[3].clone();
        assert_eq!(line(&render(&comparison), "strict+map")[16..], ["0", "0", "0"]);
        for reach in [Reach::Persistent, Reach::Leaked, Reach::Always] {
            row.policy = "registered".to_owned();
            row.effective_policy.clear();
            row.exposure.as_mut().unwrap().reach = reach;
            comparison.jobs[0].results[3] = row.clone();
            let text = render(&comparison);
            assert_eq!(line(&text, "registered")[16..18], ["open", "open"], "{text}");
        }
        assert_eq!(line(&render(&comparison), "lazy-mq")[16..], ["10.2", "4096", "9.70"]);
    }

    #[test]
    fn who_waited_stands_below_the_table() {
        let mut comparison = sample::comparison();
        let text = render(&comparison);
        let plain = text.replace("\n  ", " ");
        assert!(plain.contains("\nwaits: strict map 16.0 ("), "{text}");
        assert!(plain.contains("\nqueues: lazy-sq and lazy-mq: flushes, which "), "{text}");
        assert!(text.contains("\n  waits      syncs an I/O"), "{text}");
        for row in comparison.jobs.iter_mut().flat_map(|job| &mut job.results) {
            (row.sync_waits, row.sync_wait_ns) = (None, None);
        }
        let text = render(&comparison);
        assert!(!text.contains("waits") && !text.contains("queues:"), "{text}");
    }

    #[test]
    fn what_was_copied_stands_below_the_table_and_why_where_it_is_asked() {
        let mut comparison = sample::comparison();
        let text = render(&comparison);
        assert!(text.contains("\nbounce: bounce 100.0% copied, 64 KiB an I/O, "), "{text}");
        assert!(text.contains("auto 50.0% copied, 32 KiB an I/O, 0 without a slot"), "{text}");
        assert!(text.contains("\n  bounce     mappings that were copies"), "{text}");
        assert_eq!(explain(&comparison.jobs[0]), "");
        let auto = comparison.jobs[0].results.iter_mut().find(|row| row.policy == "auto").unwrap();
        auto.explain = Some("up to 16 KiB copied\nabove \u{1b}mapped\n".to_owned());
        let text = explain(&comparison.jobs[0]);
        assert_eq!(text, "\nrandwrite_multi, auto:\n  up to 16 KiB copied\n  above ?mapped\n");
        for row in comparison.jobs.iter_mut().flat_map(|job| &mut job.results) {
            row.pool_bytes = None;
        }
        let text = render(&comparison);
        assert!(
            !text.contains("bounce: ") && !text.contains("mappings that were copies"),
            "{text}"
        );
    }

    #[test]
    fn a_tuning_that_was_requested_is_shown() {
        let mut comparison = sample::comparison();
        assert!(!headline(&comparison).contains("batches"));
        comparison.tuning = Tuning {
            max_exposure_ms: Some(5),
            max_exposure_bytes: Some(1 << 20),
            bounce_threshold: Some(64 << 10),
            bounce_quota: Some(1 << 20),
            batch: 1,
            chunk: 2,
            trust: TrustChoice::Untrusted,
            ..Tuning::default()
        };
        let line = headline(&comparison);
        let tuned = "exposed 5 ms at most, exposed 1 MiB at most, batches of 1, chunks of 2, copied up to 64 KiB, \
                    slots of 1 MiB at most, disk untrusted; ";
        assert!(line.contains(tuned), "{line}");
    }

    #[test]
    fn a_bound_that_was_not_kept_is_shown() {
        let mut comparison = sample::comparison();
        comparison.jobs[0].results[5].exposure.as_mut().unwrap().late_releases = 7;
        let text = render(&comparison);
        assert!(text.contains("lazy-mq: 7 ranges stayed reachable longer"), "{text}");
    }

    #[test]
    fn a_name_cannot_move_the_cursor() {
        let mut comparison = sample::comparison();
        comparison.jobs[0].name = "a\u{1b}[2Jb".to_owned();
        assert!(!render(&comparison).contains('\u{1b}'));
    }
}
