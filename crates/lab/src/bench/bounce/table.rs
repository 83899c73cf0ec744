//! The benchmark for a terminal: a block for each part, size and direction.

use super::{OURS, PEER, Part, subject::Op};
use crate::{
    bench::{
        Benchmark, Row,
        table::{
            both, count, distinct, figure, groups, headline, interval, once, ratio, section,
            setting_text, text, warnings,
        },
    },
    text::{block, bytes, cells, dash, number, optional, wrap},
};

/// All of it.
pub fn render(benchmark: &Benchmark) -> String {
    let about = format!("bounce pools; --notify {}", setting_text(benchmark, "notify"));
    let mut out = wrap(&headline(benchmark, &about, ""));
    for part in Part::ALL {
        let name = part.name();
        let rows: Vec<&Row> =
            benchmark.rows.iter().filter(|row| text(row, "part") == name).collect();
        if !rows.is_empty() {
            let (show, legend): (fn(&mut String, &[&Row]), _) = match part {
                Part::Seed => (seed, SEED),
                Part::List => (list, LIST),
                Part::Pool => (pool, POOL),
            };
            show(&mut out, &rows);
            out.extend(["\n", legend]);
        }
    }
    // Every note once, and how many rows it is about.
    let key = |row: &Row| (row.implementation.clone(), text(row, "part"), row.note.clone());
    for ((implementation, part, note), rows) in groups(&benchmark.rows, key) {
        let rows =
            if rows.len() == 1 { "one row".to_owned() } else { format!("{} rows", rows.len()) };
        if let Some(note) = note {
            out.push_str(&wrap(&format!("note: {part}, {implementation}: {note} ({rows})")));
        }
    }
    warnings(&mut out, benchmark);
    out
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

fn seed(out: &mut String, rows: &[&Row]) {
    let key = |row: &Row| (text(row, "op"), count(row, "size"));
    for ((op, size), rows) in groups(rows.iter().copied(), key) {
        let mut lines = vec![cells(&[
            "",
            "MiB/s",
            "±",
            "x strict",
            "±",
            "x strict+map",
            "±",
            "x off",
            "±",
            "map ms/GiB",
            "%",
            "unmap ms/GiB",
            "%",
            "CPU",
        ])];
        for row in rows {
            let mut line = vec![row.implementation.clone()];
            line.extend(figure(row, "bandwidth_bytes_per_s", 1.0 / f64::from(1 << 20)));
            for key in ["ratio_to_strict", "ratio_to_strict_map", "ratio_to_off"] {
                line.extend(ratio(row, key));
            }
            for what in ["map", "unmap"] {
                let time = interval(row, &format!("{what}_ns_per_gib")).scaled(1e-6);
                let change = interval(row, &format!("{what}_change_percent"));
                line.extend([optional(time.median), percent(change.median)]);
            }
            line.push(optional(interval(row, "cpu_ns_per_io").scaled(1e-3).median));
            lines.push(line);
        }
        let title = format!("sequential {op}s of {}, 64 deep, one job", bytes(size));
        section(out, &title, &block(lines));
    }
}

/// `-97.1`, `+3.0`, or `-`.
fn percent(change: Option<f64>) -> String {
    match change {
        Some(change) if change.abs() >= 999.5 => format!("+{}", number(change)),
        Some(change) if change.abs() >= 99.95 => format!("{change:+.0}"),
        Some(change) => format!("{change:+.1}"),
        None => dash(),
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

fn list(out: &mut String, rows: &[&Row]) {
    let mut lines = vec![cells(&[
        "",
        "elements",
        "",
        "wall µs",
        "±",
        "x",
        "±",
        "thread µs",
        "device µs",
        "both µs",
        "±",
        "x",
        "±",
        "requests",
    ])];
    let key = |row: &Row| (text(row, "direction"), count(row, "elements"));
    for ((direction, elements), rows) in groups(rows.iter().copied(), key) {
        let mut labels = [format!("{direction} the device"), elements.to_string()];
        for row in rows {
            let mut line = std::mem::take(&mut labels).to_vec();
            let us = |key| optional(interval(row, key).scaled(1e-3).median);
            line.push(row.implementation.clone());
            line.extend(both(row.ns_per_op.scaled(1e-3)));
            line.extend(ratio(row, "ratio_interval"));
            line.extend([us("thread_cpu_ns"), us("device_cpu_ns")]);
            line.extend(figure(row, "cpu_ns", 1e-3));
            line.extend(ratio(row, "cpu_ratio"));
            line.push(optional(interval(row, "requests_per_list").median));
            lines.push(line);
        }
    }
    section(out, "lists for an untrusted device, by elements", &block(lines));
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

fn pool(out: &mut String, rows: &[&Row]) {
    let threads = distinct(rows.iter().copied(), |row| count(row, "threads"));
    for (name, rows) in groups(rows.iter().copied(), |row| text(row, "op")) {
        let about = name.parse().map_or("", Op::about);
        let mut numbers = vec![String::new(); 2];
        let mut names = numbers.clone();
        let mut units = cells(&["size", "held"]);
        for threads in &threads {
            let label = crate::text::count(*threads, "thread");
            numbers.extend(cells(&[&label, "", "", "", "", ""]));
            names.extend(cells(&[OURS, "", PEER, "", "", ""]));
            units.extend(cells(&["ns", "±", "ns", "±", "x", "±"]));
        }
        let mut lines = vec![numbers, names, units];
        let mut before = String::new();
        let nothing = Row::default();
        for ((size, held), rows) in
            groups(rows, |row| (count(row, "size"), count(row, "held_percent")))
        {
            let mut line = vec![once(&mut before, bytes(size)), format!("{held} %")];
            for threads in &threads {
                let find = |peer: bool| {
                    let mut rows = rows.iter().filter(|row| count(row, "threads") == *threads);
                    let found = rows.find(|row| (row.implementation == PEER) == peer);
                    found.copied().unwrap_or(&nothing)
                };
                line.extend(both(find(false).ns_per_op));
                line.extend(both(find(true).ns_per_op));
                line.extend(ratio(find(true), "ratio_interval"));
            }
            lines.push(line);
        }
        section(out, &format!("pools, {name}: {about}"), &block(lines));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        bench::{
            Interval,
            row::{object, value},
        },
        text::WIDTH,
    };

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
    fn each_part_that_was_measured_is_printed_and_no_other() {
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
    fn the_legend_describes_the_peer() {
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
