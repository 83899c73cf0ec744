//! The benchmark for a terminal: a block for what requests do, and for each format of rings.

use std::fmt::Write;

use serde_json::Value;

use crate::{
    bench::{
        Benchmark, Row,
        table::{distinct, half_width, interval, machine, text, times},
    },
    text::{block, number, optional, wrap},
};

const ABOUT: &str = "\
Driver and back end have a CPU each. Requests of 4 KiB at random places of a disk, a file that the page cache holds;
of each block that is read the first and last words are checked, of some all bytes, and after writes the file
itself. Each figure is the median of windows, each ratio that of the rounds' ratios; ± is half of its 95 % interval.
  2x128      queues, and requests in flight in each
  kIOPS      thousands of requests a second
  x off      against the same requests without an IOMMU, with the guest's buffers, or unconfined
  cpu        CPU time of the back end for a request, µs, the kernel's work for it included; x off as above
  ping       round trip of a cache line between the CPUs, ns; it says where the host has put them
  short, moved, failed
             windows in which the driver had its CPU for less than 95 %, in which the CPUs lay elsewhere than in
             most, that came to nothing; all others are in the medians, these two kinds as well
  4k, 2m     how much an UPDATE covers: of entries that a back end can merge, or cannot
  dynamic    each request has two pages of its own (data; header, status and table), invalidated when it is done:
             the back end asks, or the driver pushes
  own, guest where data is while the disk has it: in buffers of the service's own, or in the guest's; 4k, 64k are the
             sizes of requests then
  confined, unconfined
             the back end as it is by default, and with --sandbox off
  misses     that the back end asked for, for each request
  data path  a driver and a device in one thread over a disk in memory; what the device takes for a request, and how
             fast that is against the same code compiled without an IOTLB
";

/// All of it.
pub fn render(benchmark: &Benchmark) -> String {
    let setting = |key: &str| benchmark.settings.get(key);
    let mut out = wrap(&format!(
        "block back end; disks that are read in {}, that are written in {}; {} rounds of {} s{}; {}",
        setting("read_folder").and_then(Value::as_str).unwrap_or("?"),
        setting("written_folder").and_then(Value::as_str).unwrap_or("?"),
        benchmark.rounds,
        setting("window_s").and_then(Value::as_f64).map_or("?".into(), number),
        if benchmark.interrupted { ", interrupted" } else { "" },
        machine(benchmark),
    ));
    let rows = &benchmark.rows;
    let paths: Vec<&Row> = rows.iter().filter(|row| text(row, "part") == "path").collect();
    let others = || rows.iter().filter(|row| text(row, "part") != "path");
    for (ring, kind) in distinct(others(), |row| (text(row, "ring"), text(row, "kind"))) {
        let of = |row: &Row| text(row, "ring") == ring && text(row, "kind") == kind;
        let _ = write!(out, "\n{kind}, {ring} ring\n");
        out.push_str(&contest(&others().filter(|row| of(row)).collect::<Vec<_>>()));
    }
    if !paths.is_empty() {
        out.push_str("\ndata path, one thread\n");
        out.push_str(&path(&paths));
    }
    let _ = write!(out, "\n{ABOUT}");
    for note in distinct(rows, |row| row.note.clone()).into_iter().flatten() {
        out.push_str(&wrap(&format!("note: {note}")));
    }
    for warning in &benchmark.warnings {
        out.push_str(&wrap(&format!("warning: {warning}")));
    }
    out
}

fn contest(rows: &[&Row]) -> String {
    let head = ["", "", "kIOPS", "±", "x off", "±", "cpu", "±", "x off", "±", "misses"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    lines[0].extend(["ping", "±", "short", "moved", "failed"].map(str::to_owned));
    let mut before = None;
    for row in rows {
        let mut parts = row.name.splitn(4, '/').skip(2);
        let load = parts.next().unwrap_or_default().to_owned();
        let addresses = parts.next().unwrap_or_default().replace('/', " ");
        let label = if before.as_ref() == Some(&load) { String::new() } else { load.clone() };
        before = Some(load);
        let mut line = vec![label, addresses];
        let rate = interval(row, "requests_per_s").scaled(1e-3);
        let ratio = interval(row, "ratio_to_off");
        let cpu = interval(row, "backend_cpu_us");
        let cpu_ratio = interval(row, "cpu_ratio_to_off");
        for (figure, median) in [
            (rate, optional(rate.median)),
            (ratio, times(ratio.median)),
            (cpu, optional(cpu.median)),
            (cpu_ratio, times(cpu_ratio.median)),
        ] {
            line.extend([median, half_width(figure)]);
        }
        let misses = row.figures.get("misses_per_request").and_then(Value::as_f64);
        line.push(misses.map_or(String::new(), number));
        let ping = interval(row, "ping_ns");
        line.extend([optional(ping.median), half_width(ping)]);
        for key in ["windows_short_of_cpu", "windows_placed_elsewhere", "windows_failed"] {
            line.push(row.figures.get(key).and_then(Value::as_u64).unwrap_or(0).to_string());
        }
        lines.push(line);
    }
    block(lines)
}

fn path(rows: &[&Row]) -> String {
    let mut lines = vec![["", "ns", "±", "x without", "±"].map(str::to_owned).to_vec()];
    for row in rows {
        let mut line = vec![row.name.replacen("path/", "", 1).replace('/', " ")];
        let ratio = interval(row, "ratio_to_without");
        line.extend([optional(row.ns_per_op.median), half_width(row.ns_per_op)]);
        line.extend([times(ratio.median), half_width(ratio)]);
        lines.push(line);
    }
    block(lines)
}
