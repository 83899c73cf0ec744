//! The benchmark for a terminal: a block for what requests do, and for each format of rings.

use crate::{
    bench::{
        Benchmark, Row,
        table::{
            both, count, distinct, figure, groups, headline, once, ratio, section, setting,
            setting_text, single, text, warnings,
        },
    },
    text::{block, cells, number, wrap},
};

const ABOUT: &str = "\
Driver and back end have a CPU each. Requests of 4 KiB at random places of a disk, a file that the page cache holds;
of each block that is read the first and last words are checked, of some all bytes, and after writes the file
itself. Each figure is the median of windows, each ratio that of the rounds' ratios; ± is half of its 95 % interval.
  2x128      queues, and requests in flight in each
  kIOPS      thousands of requests a second
  x off      against the same requests without an IOMMU, with the guest's buffers, or unconfined
  cpu        CPU time of the back end for a request, µs, the kernel's work for it included; x off as above
  ping       round trip of a cache line between the CPUs, ns; it shows where the host has put them
  short, moved, failed
             windows in which the driver had its CPU for less than 95 %, in which the CPUs lay elsewhere than in
             most, that came to nothing; all others are in the medians, these two kinds as well
  4k, 2m     how much an UPDATE covers: of entries that a back end can merge, or cannot
  dynamic    each request has two pages of its own (data; header, status and table), invalidated when it is done:
             the back end misses, or the driver pushes
  own, guest where data is while the disk has it: in buffers of the service's own, or in the guest's; 4k, 64k are the
             sizes of requests then
  confined, unconfined
             the back end as it is by default, and with --sandbox off
  misses     of the back end's IOTLB, for each request
  data path  a driver and a device in one thread over a disk in memory; what the device takes for a request, and how
             fast that is against the same code compiled without an IOTLB
";

/// All of it.
pub fn render(benchmark: &Benchmark) -> String {
    let about = format!(
        "block back end; disks that are read in {}, that are written in {}",
        setting_text(benchmark, "read_folder"),
        setting_text(benchmark, "written_folder"),
    );
    let each = format!(" of {} s", number(setting(benchmark, "window_s")));
    let mut out = wrap(&headline(benchmark, &about, &each));
    let (paths, others): (Vec<&Row>, Vec<&Row>) =
        benchmark.rows.iter().partition(|row| text(row, "part") == "path");
    for ((ring, kind), rows) in groups(others, |row| (text(row, "ring"), text(row, "kind"))) {
        section(&mut out, &format!("{kind}, {ring} ring"), &contest(&rows));
    }
    if !paths.is_empty() {
        section(&mut out, "data path, one thread", &path(&paths));
    }
    out.extend(["\n", ABOUT]);
    for note in distinct(&benchmark.rows, |row| row.note.clone()).into_iter().flatten() {
        out.push_str(&wrap(&format!("note: {note}")));
    }
    warnings(&mut out, benchmark);
    out
}

fn contest(rows: &[&Row]) -> String {
    let mut lines = vec![cells(&[
        "", "", "kIOPS", "±", "x off", "±", "cpu", "±", "x off", "±", "misses", "ping", "±",
        "short", "moved", "failed",
    ])];
    let mut before = String::new();
    for row in rows {
        let mut parts = row.name.splitn(4, '/').skip(2);
        let mut part = || parts.next().unwrap_or_default();
        let mut line = vec![once(&mut before, part().to_owned()), part().replace('/', " ")];
        line.extend(figure(row, "requests_per_s", 1e-3));
        line.extend(ratio(row, "ratio_to_off"));
        line.extend(figure(row, "backend_cpu_us", 1.0));
        line.extend(ratio(row, "cpu_ratio_to_off"));
        line.push(single(row, "misses_per_request").map_or(String::new(), number));
        line.extend(figure(row, "ping_ns", 1.0));
        let windows = ["windows_short_of_cpu", "windows_placed_elsewhere", "windows_failed"];
        line.extend(windows.map(|key| count(row, key).to_string()));
        lines.push(line);
    }
    block(lines)
}

fn path(rows: &[&Row]) -> String {
    let mut lines = vec![cells(&["", "ns", "±", "x without", "±"])];
    for row in rows {
        let mut line = vec![row.name.replacen("path/", "", 1).replace('/', " ")];
        line.extend(both(row.ns_per_op));
        line.extend(ratio(row, "ratio_to_without"));
        lines.push(line);
    }
    block(lines)
}
