//! The benchmark for a terminal: a block for each order, size and way of merging.

use super::params::{Entries, Order};
use crate::{
    bench::{
        Benchmark, Row,
        table::{
            both, distinct, groups, headline, interval, notes, section, setting, text, times,
            warnings,
        },
    },
    text::{block, optional, wrap},
};

/// All of it as text.
pub fn render(benchmark: &Benchmark) -> String {
    let each = format!(" of {} ms", setting(benchmark, "budget_ms"));
    let mut out = wrap(&headline(benchmark, "lookups in a device's IOTLB", &each));
    let names = distinct(&benchmark.rows, |row| row.implementation.clone());
    let kind = |row: &Row| (text(row, "merge"), text(row, "page"), text(row, "order"));
    for ((merge, page, order), rows) in groups(&benchmark.rows, kind) {
        let about = order.parse().map_or("", about);
        let title = format!("{order}, {merge} entries of {page}: {about}");
        section(&mut out, &title, &side_by_side(&names, &rows));
    }
    if !benchmark.rows.is_empty() {
        out.extend(["\n", LEGEND]);
    }
    notes(&mut out, benchmark, |_| false);
    warnings(&mut out, benchmark);
    out
}

const LEGEND: &str = "\
ns: what an operation takes a thread (of its CPU time; of the wall's in `threads`), the median of rounds in
which all take turns.
  ±         half of its 95 % interval     x   ns against those of ringfence, the median of the rounds' ratios
  x64       ringfence's ns against its own with 64 entries
  xlist     a sorted list of 2,048 entries against ringfence with this many
  scaling   what two threads get done against what one does, by the wall's time and by their CPU time: on a
            machine that does other work, the first hides what the second shows
";

fn about(order: Order) -> &'static str {
    match order {
        Order::Seq => "64 bytes of one entry after the other",
        Order::Random => "64 bytes of a random entry",
        Order::Dependent => "the same, each after the one before",
        Order::Chain => "16 bytes, 4 KiB and 1 byte of random entries",
        Order::Churn => "an entry invalidated, put in again and looked up",
        Order::Threads => "random lookups, an entry invalidated every 8,192",
        Order::Steady => "random lookups, another thread invalidates 10,000 entries a second",
    }
}

/// A column pair for each implementation, a line for each number of entries and of threads.
fn side_by_side(names: &[String], rows: &[&Row]) -> String {
    let threads = rows.iter().any(|row| text(row, "threads") == "2");
    let mut head = vec!["entries".to_owned()];
    let mut units = vec![if threads { "x threads".to_owned() } else { String::new() }];
    for (index, name) in names.iter().enumerate() {
        head.extend([name.clone(), String::new()]);
        units.extend(["ns", if index == 0 { "±" } else { "x" }].map(str::to_owned));
    }
    let extra: &[&str] = if threads { &[] } else { &["x64", "xlist"] };
    head.extend(extra.iter().map(|_| String::new()));
    units.extend(extra.iter().map(|name| (*name).to_owned()));
    let mut lines = vec![head, units];
    let key = |row: &Row| (text(row, "entries"), text(row, "threads"));
    for ((entries, count), rows) in groups(rows.iter().copied(), key) {
        let of = |name: &str| rows.iter().find(|row| row.implementation == name);
        let label = entries.parse().map_or(entries, |n| Entries(n).to_string());
        let mut line = vec![if threads { format!("{label} x {count}") } else { label }];
        for (index, name) in names.iter().enumerate() {
            line.extend(match of(name) {
                Some(row) if index == 0 => both(row.ns_per_op),
                Some(row) => [optional(row.ns_per_op.median), times(row.ratio_to_ringfence)],
                None => [String::new(), String::new()],
            });
        }
        let ratio = |name: &str, key| times(of(name).and_then(|row| interval(row, key).median));
        if !threads {
            let keys = ["ratio_to_64_entries", "sorted_list_of_2048_to_this"];
            line.extend(keys.map(|key| ratio("ringfence", key)));
        }
        lines.push(line);
        if count == "2" {
            let mut line = vec!["scaling".to_owned()];
            for name in names {
                line.extend(["scaling", "cpu_scaling"].map(|key| ratio(name, key)));
            }
            lines.push(line);
        }
    }
    block(lines)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::text::WIDTH;

    #[test]
    fn no_line_is_wider_than_a_terminal_and_no_row_is_left_out() {
        let options = super::super::tests::tiny();
        let mut benchmark = super::super::run(&options, &AtomicBool::new(false)).unwrap();
        benchmark.warnings.push("it rains".to_owned());
        let plain = render(&benchmark);
        for word in [
            "ringfence",
            "vm-memory",
            "single-lock",
            "unmergeable",
            "scaling",
            "it rains",
            "4k x 2",
        ] {
            assert!(plain.contains(word), "{word}\n{plain}");
        }
        for row in &mut benchmark.rows {
            row.ns_per_op = row.ns_per_op.scaled(123_456.0);
            row.ratio_to_ringfence = Some(987_654.0);
        }
        for line in render(&benchmark).lines() {
            assert!(line.chars().count() <= WIDTH, "{}: {line}", line.chars().count());
        }
    }
}
