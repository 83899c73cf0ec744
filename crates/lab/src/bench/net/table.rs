//! The benchmark for a terminal: a block for each way and ring.

use super::case::Implementation;
use crate::{
    bench::{
        Benchmark, Row,
        table::{
            count, figure, groups, headline, interval, once, ratio, section, setting, single, text,
            warnings,
        },
    },
    text::{block, cells, dash, number, optional, wrap},
};

const ABOUT: &str = "\
Driver and back end have a CPU each, and poll; back ends take turns. Frames of 64 bytes, every byte of those that
come back checked. Each figure is the median of windows, each ratio that of the rounds' ratios; ± is half of its 95 %
interval.
  Mpps       millions of frames a second: taken from the driver (tx), given to it (rx), both (loop)
  x off      against the same back end without an IOMMU; x dpdk against DPDK's with the same addresses
  lost       frames that were, of all, ppm: 50 is the most that counts as none
  ping       round trip of a cache line between the CPUs, ns; it shows where the host has put them
  short, moved, failed
             windows in which an end had its CPU for less than 95 %, in which the CPUs lay elsewhere than in most,
             that came to nothing; all others are in the medians, these two kinds as well
  4k, 2m ... how much an UPDATE covers: of entries that a back end can merge, or cannot
  dynamic    each use of a buffer has a page of its own, invalidated after it: the back end misses, or the driver pushes
  notified   so too, where Ringfence is the IOMMU, in the device's process: 64 neighbouring buffers, or as many that lie
             scattered, or each by itself are a mapping; notified off is the same driver and device without
  msg/s      messages that the socket moves, an UPDATE and its reply being two: with one UPDATE in flight, and 64
  msg        messages a frame: misses, UPDATEs and INVALIDATEs with their replies; x msg: frames a second times that,
             against the messages that the socket moves with 64 in flight
";

/// All of it.
pub fn render(benchmark: &Benchmark) -> String {
    let each = format!(" of {} s", number(setting(benchmark, "window_s")));
    let mut out = wrap(&headline(benchmark, "network back ends", &each));
    let rows = &benchmark.rows;
    for ((ring, direction), rows) in groups(rows, |row| (text(row, "ring"), text(row, "direction")))
    {
        section(&mut out, &format!("{direction}, {ring} ring"), &contest(&rows));
    }
    out.extend(["\n", ABOUT]);
    for ((implementation, note), rows) in
        groups(rows, |row| (row.implementation.clone(), row.note.clone()))
    {
        if let Some(note) = note {
            let rows = match rows.len() {
                1 => "one row".to_owned(),
                count => format!("{count} rows"),
            };
            out.push_str(&wrap(&format!("{implementation}, {rows}: {note}")));
        }
    }
    warnings(&mut out, benchmark);
    out
}

fn contest(rows: &[&Row]) -> String {
    let dynamic = rows.iter().any(|row| row.figures.contains_key("messages_per_s_many"));
    let mut head = cells(&[
        "", "", "Mpps", "±", "x off", "±", "x dpdk", "±", "lost", "ping", "±", "short", "moved",
        "failed",
    ]);
    if dynamic {
        head.extend(cells(&["msg/s 1", "64", "msg", "x msg", "±"]));
    }
    let mut lines = vec![head];
    let mut before = String::new();
    for row in rows {
        let addresses = row.name.splitn(3, '/').nth(2).unwrap_or_default().replace('/', " ");
        let mut line = vec![once(&mut before, addresses), row.implementation.clone()];
        line.extend(figure(row, "packets_per_s", 1e-6));
        line.extend(ratio(row, "ratio_to_off"));
        line.extend(match row.implementation == Implementation::Dpdk.name() {
            true => [String::new(), String::new()],
            false => ratio(row, "ratio_to_dpdk"),
        });
        let ppm = count(row, "lost") as f64 / count(row, "carried").max(1) as f64 * 1e6;
        line.push(interval(row, "packets_per_s").median.map_or(dash(), |_| number(ppm)));
        line.extend(figure(row, "ping_ns", 1.0));
        let windows = ["windows_short_of_cpu", "windows_placed_elsewhere", "windows_failed"];
        line.extend(windows.map(|key| match count(row, key) {
            0 => String::new(),
            some => format!("{some}/{}", count(row, "windows")),
        }));
        if row.figures.contains_key("messages_per_s_many") {
            let rates = ["messages_per_s_single", "messages_per_s_many"];
            line.extend(rates.map(|key| optional(interval(row, key).scaled(2.0).median)));
            line.push(optional(single(row, "messages_per_packet")));
            line.extend(ratio(row, "ratio_to_messages"));
        } else if dynamic {
            line.extend(vec![String::new(); 5]);
        }
        lines.push(line);
    }
    block(lines)
}
