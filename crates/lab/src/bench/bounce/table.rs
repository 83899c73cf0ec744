//! The benchmark for a terminal: a block for each part, size and direction.

use std::fmt::Write;

use serde_json::Value;

use super::{OURS, PEER, Part, subject::Op};
use crate::{
    bench::{
        Benchmark, Interval, Row,
        table::{distinct, half_width, interval, machine, text, times},
    },
    text::{block, bytes, number, optional, wrap},
};

/// All of it.
pub fn render(benchmark: &Benchmark) -> String {
    let mut out = wrap(&headline(benchmark));
    for part in Part::ALL {
        let name = part.name();
        let rows: Vec<&Row> =
            benchmark.rows.iter().filter(|row| text(row, "part") == name).collect();
        if !rows.is_empty() {
            out.push_str(&match part {
                Part::Seed => seed(&rows),
                Part::List => list(&rows),
                Part::Pool => pool(&rows),
            });
        }
    }
    for line in notes(&benchmark.rows) {
        out.push_str(&wrap(&line));
    }
    for warning in &benchmark.warnings {
        out.push_str(&wrap(&format!("warning: {warning}")));
    }
    out
}

fn headline(benchmark: &Benchmark) -> String {
    format!(
        "bounce pools; --notify {}; {} rounds{}; {}",
        benchmark.settings.get("notify").and_then(Value::as_str).unwrap_or("?"),
        benchmark.rounds,
        if benchmark.interrupted { ", interrupted" } else { "" },
        machine(benchmark),
    )
}

const SEED: &str = "\
Rows take turns; each figure is the median of rounds, each ratio that of the rounds' ratios; ± is half of its 95 %
interval. Processes and rings are real, the disk is memory, unpaced.
  x strict   throughput against strict: a sync for each map call and each unmap; x strict+map, x off: likewise
  map, unmap ms a GiB mapped, by the wall's clock: copies included, and sleep; by how much it differs from strict's
  CPU        of both processes, µs an I/O
Seed 004 measured its bounce pools, on its own machine, at 2.8, 4.7, 3.6 and 3.6 times strict for reads of 4, 16, 64
and 128 KiB; a GiB's unmap time at -97, -94, -90 and -87 %, its map time beyond -99 %.
";

fn seed(rows: &[&Row]) -> String {
    let mut out = String::new();
    for (op, size) in distinct(rows.iter().copied(), |row| (text(row, "op"), count(row, "size"))) {
        let _ = write!(out, "\nsequential {op}s of {}, 64 deep, one job\n", bytes(size));
        let mut head = vec!["", "MiB/s", "±", "x strict", "±", "x strict+map", "±", "x off", "±"];
        head.extend(["map ms/GiB", "%", "unmap ms/GiB", "%", "CPU"]);
        let mut lines = vec![head.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>()];
        for row in
            rows.iter().filter(|row| (text(row, "op"), count(row, "size")) == (op.clone(), size))
        {
            let mut line = vec![row.implementation.clone()];
            let rate = interval(row, "bandwidth_bytes_per_s").scaled(1.0 / f64::from(1 << 20));
            line.extend([optional(rate.median), half_width(rate)]);
            for key in ["ratio_to_strict", "ratio_to_strict_map", "ratio_to_off"] {
                let ratio = interval(row, key);
                line.extend([times(ratio.median), half_width(ratio)]);
            }
            for (time, change) in [
                ("map_ns_per_gib", "map_change_percent"),
                ("unmap_ns_per_gib", "unmap_change_percent"),
            ] {
                line.push(optional(interval(row, time).scaled(1e-6).median));
                line.push(percent(interval(row, change).median));
            }
            line.push(optional(interval(row, "cpu_ns_per_io").scaled(1e-3).median));
            lines.push(line);
        }
        out.push_str(&block(lines));
    }
    out + "\n" + SEED
}

/// `-97.1`, `+3.0`, or `-`.
fn percent(change: Option<f64>) -> String {
    match change {
        Some(change) if change.abs() >= 999.5 => format!("+{}", number(change)),
        Some(change) if change.abs() >= 99.95 => format!("{change:+.0}"),
        Some(change) => format!("{change:+.1}"),
        None => "-".to_owned(),
    }
}

const LIST: &str = "\
Elements of 1, 2, 3 and 3.5 KiB, each in a page of its own, for an untrusted disk of another process; a list is mapped
and unmapped, nothing is transferred. µs a list: of the wall, of the thread's CPU, of the device process's, of both.
  ringfence   the whole list in one slot of a pool: one segment, no request to the IOMMU
  each        each element in a slot of our pools
  single-use  each element as Linux bounces it: a slot of a linear pool, mapped and synced, unmapped and synced
  x           against ringfence; ± is half of a 95 % interval    requests  to the virtio-iommu, a list
";

fn list(rows: &[&Row]) -> String {
    let mut out = String::from("\nlists for an untrusted device, by elements\n");
    let mut head = vec!["", "elements", "", "wall µs", "±", "x", "±", "thread µs", "device µs"];
    head.extend(["both µs", "±", "x", "±", "requests"]);
    let mut lines = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    let mut before = None;
    for row in rows {
        let direction = text(row, "direction");
        let elements = count(row, "elements");
        let key = Some((direction.clone(), elements));
        let (direction, elements) = match before == key {
            true => (String::new(), String::new()),
            false => (format!("{direction} the device"), elements.to_string()),
        };
        before = key;
        let us = |interval: Interval| interval.scaled(1e-3);
        let wall = us(row.ns_per_op);
        let (cpu, ratio) = (us(interval(row, "cpu_ns")), interval(row, "ratio_interval"));
        let cpu_ratio = interval(row, "cpu_ratio");
        lines.push(vec![
            direction,
            elements,
            row.implementation.clone(),
            optional(wall.median),
            half_width(wall),
            times(ratio.median),
            half_width(ratio),
            optional(us(interval(row, "thread_cpu_ns")).median),
            optional(us(interval(row, "device_cpu_ns")).median),
            optional(cpu.median),
            half_width(cpu),
            times(cpu_ratio.median),
            half_width(cpu_ratio),
            optional(interval(row, "requests_per_list").median),
        ]);
    }
    out.push_str(&block(lines));
    out + "\n" + LIST
}

const POOL: &str = "\
In one process, over memory that is mapped already: ringfence by the DMA API (map and unmap of a bounced buffer), the
peer by itself. ns an operation takes a thread (of its CPU time; of the wall's if there are several), rounds in turns.
  swiotlb-like  one block of 64 MiB in slots of 2 KiB, searched in line, at most 256 KiB at once, an area and its lock
                for each CPU; it copies in whatever the direction
  held          so much of that block is taken meanwhile, in buffers of the same length at random places; of our
                pools as many buffers
  x             against ringfence in the same round; ± is half of a 95 % interval
";

fn pool(rows: &[&Row]) -> String {
    let mut out = String::new();
    let threads = distinct(rows.iter().copied(), |row| count(row, "threads"));
    for name in distinct(rows.iter().copied(), |row| text(row, "op")) {
        let about = Op::ALL.into_iter().find(|op| op.name() == name).map_or("", Op::about);
        let _ = write!(out, "\npools, {name}: {about}\n");
        let mut numbers = vec![String::new(); 2];
        let mut names = numbers.clone();
        let mut units = vec!["size".to_owned(), "held".to_owned()];
        for threads in &threads {
            let who = format!("{threads} thread{}", if *threads == 1 { "" } else { "s" });
            numbers.extend([&who, "", "", "", "", ""].map(str::to_owned));
            names.extend([OURS, "", PEER, "", "", ""].map(str::to_owned));
            units.extend(["ns", "±", "ns", "±", "x", "±"].map(str::to_owned));
        }
        let mut lines = vec![numbers, names, units];
        let of_op = || rows.iter().copied().filter(|row| text(row, "op") == name);
        let mut before = None;
        for (size, held) in
            distinct(of_op(), |row| (count(row, "size"), count(row, "held_percent")))
        {
            let label = if before == Some(size) { String::new() } else { bytes(size) };
            before = Some(size);
            let mut line = vec![label, format!("{held} %")];
            for threads in &threads {
                let find = |peer: bool| {
                    of_op().find(|row| {
                        (count(row, "size"), count(row, "held_percent")) == (size, held)
                            && count(row, "threads") == *threads
                            && (row.implementation == PEER) == peer
                    })
                };
                for peer in [false, true] {
                    let ns = find(peer).map(|row| row.ns_per_op).unwrap_or_default();
                    line.extend([optional(ns.median), half_width(ns)]);
                }
                let ratio =
                    find(true).map(|row| interval(row, "ratio_interval")).unwrap_or_default();
                line.extend([times(ratio.median), half_width(ratio)]);
            }
            lines.push(line);
        }
        out.push_str(&block(lines));
    }
    out + "\n" + POOL
}

/// Every note once, and how many rows it is about.
fn notes(rows: &[Row]) -> Vec<String> {
    let noted: Vec<&Row> = rows.iter().filter(|row| row.note.is_some()).collect();
    let key = |row: &Row| (row.implementation.clone(), text(row, "part"), row.note.clone());
    let told =
        distinct(noted.iter().copied(), key).into_iter().map(|(implementation, part, note)| {
            let same =
                |row: &&&Row| key(row) == (implementation.clone(), part.clone(), note.clone());
            let rows = noted.iter().filter(same).count();
            let rows = if rows == 1 { "one row".to_owned() } else { format!("{rows} rows") };
            format!("note: {part}, {implementation}: {} ({rows})", note.unwrap_or_default())
        });
    told.collect()
}

fn count(row: &Row, key: &str) -> u64 {
    row.params.get(key).and_then(Value::as_u64).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{object, value},
        *,
    };
    use crate::text::WIDTH;

    /// A row of each kind, with figures of any size.
    fn rows(figure: f64) -> Vec<Row> {
        let of = |median: f64| Interval {
            median: Some(median),
            lo: Some(median / 2.0),
            hi: Some(median * 2.0),
        };
        let row = |implementation: &str, params| Row {
            implementation: implementation.to_owned(),
            params,
            ns_per_op: of(figure),
            figures: object(
                [
                    "bandwidth_bytes_per_s",
                    "ratio_to_strict",
                    "ratio_to_strict_map",
                    "ratio_to_off",
                    "map_ns_per_gib",
                    "unmap_ns_per_gib",
                    "map_change_percent",
                    "unmap_change_percent",
                    "cpu_ns_per_io",
                    "ratio_interval",
                    "thread_cpu_ns",
                    "device_cpu_ns",
                    "cpu_ns",
                    "cpu_ratio",
                    "requests_per_list",
                ]
                .map(|key| (key, value(of(figure)))),
            ),
            note: Some("not measured: ".to_owned() + &"x".repeat(200)),
            ..Row::default()
        };
        let mut rows = Vec::new();
        for name in ["off", "lazy-mq+map", "persistent"] {
            let seed =
                [("part", "seed".into()), ("op", "read".into()), ("size", (128 << 10).into())];
            rows.push(row(name, object(seed)));
        }
        for name in ["ringfence", "single-use"] {
            let list =
                [("part", "list".into()), ("direction", "from".into()), ("elements", 64.into())];
            rows.push(row(name, object(list)));
        }
        for (name, threads) in [("ringfence", 1), (PEER, 1), ("ringfence", 2), (PEER, 2)] {
            let pool = [
                ("part", "pool".into()),
                ("op", "preloaded".into()),
                ("size", (256 << 10).into()),
                ("held_percent", 90.into()),
                ("threads", threads.into()),
            ];
            rows.push(row(name, object(pool)));
        }
        rows
    }

    fn rendered(rows: Vec<Row>) -> String {
        let mut benchmark = Benchmark::new("bounce", 5);
        benchmark.warnings.push("it rains ".repeat(40));
        benchmark.rows = rows;
        render(&benchmark)
    }

    #[test]
    fn no_line_is_wider_than_a_terminal_however_large_the_figures() {
        for figure in [0.0, 0.123, 98_765.4, 1.234e14] {
            for line in rendered(rows(figure)).lines() {
                assert!(line.chars().count() <= WIDTH, "{}: {line}", line.chars().count());
            }
        }
    }

    #[test]
    fn each_part_that_was_measured_is_told_and_no_other() {
        let text = rendered(rows(2e6));
        for word in [
            "sequential reads of 128 KiB",
            "lazy-mq+map",
            "from the device",
            "single-use",
            "256 KiB",
            "90 %",
        ] {
            assert!(text.contains(word), "{word}\n{text}");
        }
        assert!(
            text.contains("note: seed, off: not measured") && text.contains("it rains"),
            "{text}"
        );
        let pools = rendered(rows(1.0).split_off(5));
        assert!(!pools.contains("sequential") && !pools.contains("single-use"), "{pools}");
    }

    #[test]
    fn figures_stand_in_their_units() {
        let text = rendered(rows(2e6));
        let line = text.lines().find(|line| line.contains("persistent")).unwrap();
        let cells: Vec<&str> = line.split_whitespace().collect();
        // 2e6 bytes a second; 2e6 ns a GiB; 2e6 ns an I/O.
        assert_eq!(
            (cells[1], cells[9], cells[cells.len() - 1]),
            ("1.91", "2.00", "2000"),
            "{line}"
        );
    }

    #[test]
    fn the_legend_tells_the_peer_as_it_is() {
        use super::super::{linear, pool};
        let found = [pool::BLOCK, linear::SLOT, linear::LONGEST].map(bytes);
        assert!(POOL.contains(&format!("block of {} in slots of {}", found[0], found[1])));
        assert!(POOL.contains(&format!("at most {} at once", found[2])));
    }

    #[test]
    fn changes_have_signs() {
        let texts = [-97.06, 3.04, 250.0, 12_345.0].map(|change| percent(Some(change)));
        assert_eq!(texts, ["-97.1", "+3.0", "+250", "+12.3k"]);
        assert_eq!(percent(None), "-");
    }
}
