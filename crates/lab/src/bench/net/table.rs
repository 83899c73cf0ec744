//! The benchmark for a terminal: a block for each way and ring.

use std::fmt::Write;

use serde_json::Value;

use super::case::Implementation;
use crate::{
    bench::{
        Benchmark, Row,
        table::{distinct, half_width, interval, machine, text, times},
    },
    text::{block, number, optional, wrap},
};

const ABOUT: &str = "\
Driver and back end have a CPU each, and poll; back ends take turns. Frames of 64 bytes, every byte of those that
come back checked. Each figure is the median of windows, each ratio that of the rounds' ratios; ± is half of its 95 %
interval.
  Mpps       millions of frames a second: taken from the driver (tx), given to it (rx), both (loop)
  x off      against the same back end without an IOMMU; x dpdk against DPDK's with the same addresses
  lost       frames that were, of all, ppm: 50 is the most that counts as none
  ping       round trip of a cache line between the CPUs, ns; it says where the host has put them
  short, moved, failed
             windows in which an end had its CPU for less than 95 %, in which the CPUs lay elsewhere than in most,
             that came to nothing; all others are in the medians, these two kinds as well
  4k, 2m ... how much an UPDATE covers: of entries that a back end can merge, or cannot
  dynamic    each use of a buffer has a page of its own, invalidated after it: the back end asks, or the driver pushes
  notified   so too, where Ringfence is the IOMMU, in the device's process: 64 neighbouring buffers, or as many that lie
             scattered, or each by itself are a mapping; notified off is the same driver and device without
  msg/s      messages that the socket moves, an UPDATE and its answer being two: with one UPDATE in flight, and 64
  msg        messages a frame: misses, UPDATEs and INVALIDATEs with their answers; x msg: frames a second times that,
             against the messages that the socket moves with 64 in flight
";

/// All of it.
pub fn render(benchmark: &Benchmark) -> String {
    let mut out = wrap(&format!(
        "network back ends; {} rounds of {} s{}; {}",
        benchmark.rounds,
        benchmark.settings.get("window_s").and_then(Value::as_f64).map_or("?".into(), number),
        if benchmark.interrupted { ", interrupted" } else { "" },
        machine(benchmark),
    ));
    let rows = &benchmark.rows;
    for (ring, direction) in distinct(rows, |row| (text(row, "ring"), text(row, "direction"))) {
        let of = |row: &&Row| text(row, "ring") == ring && text(row, "direction") == direction;
        let _ = write!(out, "\n{direction}, {ring} ring\n");
        out.push_str(&contest(&rows.iter().filter(of).collect::<Vec<_>>()));
    }
    let _ = write!(out, "\n{ABOUT}");
    let noted = rows.iter().filter_map(|row| Some((&row.implementation, row.note.as_ref()?)));
    let mut told: Vec<(&String, &String, usize)> = Vec::new();
    for (who, note) in noted {
        match told.iter_mut().find(|(other, same, _)| (*other, *same) == (who, note)) {
            Some((_, _, count)) => *count += 1,
            None => told.push((who, note, 1)),
        }
    }
    for (who, note, count) in told {
        let rows = if count == 1 { "one row".to_owned() } else { format!("{count} rows") };
        out.push_str(&wrap(&format!("{who}, {rows}: {note}")));
    }
    for warning in &benchmark.warnings {
        out.push_str(&wrap(&format!("warning: {warning}")));
    }
    out
}

fn contest(rows: &[&Row]) -> String {
    let dynamic = rows.iter().any(|row| row.figures.contains_key("messages_per_s_many"));
    let mut head = vec!["", "", "Mpps", "±", "x off", "±", "x dpdk", "±", "lost"];
    head.extend(["ping", "±", "short", "moved", "failed"]);
    if dynamic {
        head.extend(["msg/s 1", "64", "msg", "x msg", "±"]);
    }
    let mut lines = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    let mut before = None;
    for row in rows {
        let addresses = row.name.splitn(3, '/').nth(2).unwrap_or_default().replace('/', " ");
        let label =
            if before.as_ref() == Some(&addresses) { String::new() } else { addresses.clone() };
        before = Some(addresses);
        let rate = interval(row, "packets_per_s").scaled(1e-6);
        let mut line = vec![label, row.implementation.clone()];
        line.extend([optional(rate.median), half_width(rate)]);
        for key in ["ratio_to_off", "ratio_to_dpdk"] {
            let ratio = interval(row, key);
            let itself =
                key == "ratio_to_dpdk" && row.implementation == Implementation::Dpdk.name();
            match itself {
                true => line.extend([String::new(), String::new()]),
                false => line.extend([times(ratio.median), half_width(ratio)]),
            }
        }
        let ppm = count(row, "lost") as f64 / count(row, "carried").max(1) as f64 * 1e6;
        line.push(rate.median.map_or("-".to_owned(), |_| number(ppm)));
        let ping = interval(row, "ping_ns");
        line.extend([optional(ping.median), half_width(ping)]);
        for key in ["windows_short_of_cpu", "windows_placed_elsewhere", "windows_failed"] {
            line.push(match count(row, key) {
                0 => String::new(),
                some => format!("{some}/{}", count(row, "windows")),
            });
        }
        if row.figures.contains_key("messages_per_s_many") {
            for key in ["messages_per_s_single", "messages_per_s_many"] {
                line.push(optional(interval(row, key).scaled(2.0).median));
            }
            let messages = row.figures.get("messages_per_packet").and_then(Value::as_f64);
            line.push(optional(messages));
            let ratio = interval(row, "ratio_to_messages");
            line.extend([times(ratio.median), half_width(ratio)]);
        } else if dynamic {
            line.extend(vec![String::new(); 5]);
        }
        lines.push(line);
    }
    block(lines)
}

fn count(row: &Row, key: &str) -> u64 {
    row.figures.get(key).and_then(Value::as_u64).unwrap_or(0)
}
