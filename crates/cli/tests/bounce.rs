//! Rows with I/O through the bounce pools: copied, or filled and read in place.

mod common;

use common::{Place, number, policies, probes_per_io, row};
use serde_json::Value;

/// One round, which ends when each clone has been through its area: a fixed number of I/Os, however
/// long they take.
const ONCE: [&str; 2] = ["--repeat", "1"];
/// Rounds that end with I/O in flight, for checks of what is still taken at the end. More than one,
/// since for a moment everything may have been returned.
const IN_THE_MIDDLE: [&str; 4] = ["--repeat", "3", "--runtime", "0.1"];
const ROWS: [&str; 2] = ["--policy", "off,strict+map,bounce,auto,zero-copy"];

fn measure(lines: &str, arguments: &[&str]) -> Value {
    let lines = lines.replace(' ', "\n");
    let job = format!("[job]\nrw=randrw\niodepth=8\nnumjobs=2\n{lines}\n");
    Place::new().measure(&job, &[&ONCE[..], arguments].concat())
}

/// The number at `path` in the row `policy`.
fn of(json: &Value, policy: &str, path: &str) -> f64 {
    number(row(json, 0, policy), path)
}

/// Checks that a row promised what strict promises, was probed, and kept the promise.
fn is_strict(json: &Value, policy: &str) {
    let row = row(json, 0, policy);
    assert_eq!(row["exposure"]["reach"], "none", "{row}");
    assert_eq!(number(row, "/exposure/max_ms"), 0.0, "{row}");
    assert!(number(row, "/stale_window/probes") > 0.0, "{row}");
    assert_eq!(number(row, "/stale_window/accesses"), 0.0, "{row}");
}

#[test]
fn what_is_copied_sends_no_request_and_is_as_safe_as_strict() {
    const IOS: u32 = 2 * 512;
    let json = measure("bs=64k size=32m", &ROWS);
    assert_eq!(policies(&json, 0), ["off", "strict+map", "bounce", "auto", "zero-copy"]);
    for policy in ["strict+map", "bounce", "auto"] {
        is_strict(&json, policy);
    }
    let bounce = row(&json, 0, "bounce");
    assert_eq!(bounce["effective_policy"], "bounce");
    assert_eq!(number(bounce, "/bounced_fraction"), 1.0);
    // Once an I/O: 64 KiB in one direction. The probe's pages are included.
    let probes = probes_per_io(bounce, IOS);
    let copied = number(bounce, "/copied_bytes_per_io") - 4096.0 * probes;
    assert!((50e3..90e3).contains(&copied), "{copied}");
    let bounced = number(bounce, "/bounced_per_io") - probes;
    assert!((0.95..1.05).contains(&bounced), "{bounced} {bounce}");
    assert_eq!(number(bounce, "/not_bounced"), 0.0);
    assert!(number(bounce, "/pool_bytes") >= 65536.0, "{bounce}");
    assert_eq!(number(bounce, "/taken_bytes"), 0.0);
    // Only the growth of the pools causes requests to the IOMMU.
    let requests = ["strict+map", "bounce"].map(|policy| of(&json, policy, "/requests_per_io"));
    assert!(requests[1] < requests[0] / 10.0, "{requests:?}");
    let auto = row(&json, 0, "auto");
    assert_eq!(auto["effective_policy"], "auto");
    assert!((0.0..=1.0).contains(&number(auto, "/bounced_fraction")), "{auto}");
    // A row that maps has no pools.
    assert_eq!(row(&json, 0, "strict+map")["pool_bytes"], Value::Null);
}

#[test]
fn what_is_filled_in_place_is_neither_copied_nor_called_strict() {
    let job = "[job]\nrw=randrw\nbs=64k\nsize=32m\niodepth=8\nnumjobs=2\n";
    let rows = ["--policy", "off,zero-copy"];
    let json = Place::new().measure(job, &[&IN_THE_MIDDLE[..], &rows].concat());
    let row = row(&json, 0, "zero-copy");
    assert_eq!(row["effective_policy"], "zero-copy");
    assert_eq!(row["exposure"]["reach"], "persistent");
    assert_eq!(row["exposure"]["byte_ms_per_gib"], Value::Null);
    assert_eq!(row["stale_window"], Value::Null, "nothing is unmapped that could be probed");
    assert_eq!(number(row, "/copied_bytes_per_io"), 0.0);
    assert_eq!(row["bounced_fraction"], Value::Null, "nothing is mapped");
    assert!(number(row, "/requests_per_io") < 0.5, "{row}");
    // Taking and giving back is timed; it may take less than the clock can show.
    assert!(number(row, "/iommu_ns_per_io") >= 0.0, "{row}");
    // No more than is in flight.
    let taken = number(row, "/taken_bytes");
    assert!((65536.0..=16.0 * 65536.0).contains(&taken), "{taken}");
    assert!(number(row, "/pool_bytes") >= taken, "{row}");
}

#[test]
fn sizes_from_a_sector_to_a_mebibyte_go_every_way() {
    let rows = ["--policy", "strict+map,bounce,auto,zero-copy"];
    let several = ["--queues", "2", "--notify", "sleep"];
    let together = ["--page-run", "512", "--disk", "ram"];
    for (lines, arguments) in [
        ("bs=512 size=1m", &several[..]),
        ("bs=512 size=1m", &together),
        ("bs=6k size=6m", &together),
        ("bs=4k,64k size=32m", &several),
        ("bs=64k size=32m", &together),
        ("bs=1m size=64m", &several),
        ("bs=1m size=64m", &together),
        // Longer than any slot that is kept, and than what `bounce` copies.
        ("bs=8m size=64m iodepth=1", &["--page-run", "4"]),
    ] {
        let json = measure(lines, &[&rows[..], arguments].concat());
        let copied = of(&json, "bounce", "/bounced_fraction");
        assert!(copied == 1.0 || lines.contains("8m"), "{lines}: {copied}");
        is_strict(&json, "bounce");
    }
}

#[test]
fn slots_serve_direct_io_on_a_file() {
    let place = Place::new();
    let job = "[job]\nrw=randrw\nbs=4k,64k\nsize=8m\niodepth=8\n";
    let json = place.measure(job, &[&ONCE[..], &ROWS, &["--disk", "disk.img"]].concat());
    assert_eq!(of(&json, "bounce", "/bounced_fraction"), 1.0);
    assert_eq!(place.names(), ["job.fio"]);
}

#[test]
fn what_is_longer_than_the_threshold_is_mapped() {
    let rows = ["--policy", "bounce", "--bounce-threshold", "16k"];
    let json = measure("bs=4k,64k size=32m", &rows);
    assert_eq!(json["tuning"]["bounce_threshold"], 16 << 10);
    is_strict(&json, "bounce");
    // The reads are copied, the writes are not. The probe's pages are copied too; their number is
    // that of the mappings beyond one an I/O.
    let copies = of(&json, "bounce", "/bounced_per_io");
    let probes = copies / of(&json, "bounce", "/bounced_fraction") - 1.0;
    let copied = copies - probes;
    assert!((0.3..0.7).contains(&copied), "{copied}");
    assert!(of(&json, "bounce", "/requests_per_io") > 1.0);
    // No mapping is that short, the probe's pages included.
    let rows = ["--policy", "bounce", "--bounce-threshold", "512"];
    assert_eq!(of(&measure("bs=4k,64k size=8m", &rows), "bounce", "/bounced_fraction"), 0.0);
}

#[test]
fn an_untrusted_disk_gets_copies_of_what_shares_a_page_in_every_row() {
    // rule L48, rule L50
    let rows = ["--policy", "off,strict,strict+map,lazy-mq,bounce,auto,zero-copy"];
    let untrusted = [&rows[..], &["--trust", "untrusted"]].concat();
    // Less than a page, and a page and a half.
    for (lines, ios) in
        [("bs=512 size=1m", 2 * 2048), ("bs=1k size=2m", 2 * 2048), ("bs=6k size=12m", 2 * 2048)]
    {
        let json = measure(lines, &untrusted);
        // rule L28
        let lazy = row(&json, 0, "lazy-mq");
        assert_eq!(lazy["effective_policy"], "strict");
        assert!(lazy["fallback"].as_str().unwrap().contains("untrusted"), "{lazy}");
        for policy in ["bounce", "auto", "zero-copy"] {
            assert_eq!(row(&json, 0, policy)["fallback"], Value::Null, "{policy}");
            assert_eq!(row(&json, 0, policy)["effective_policy"], policy);
        }
        for policy in ["strict", "strict+map", "lazy-mq", "bounce", "auto"] {
            is_strict(&json, policy);
            // A MAP and an UNMAP each only for the probe's pages, which are whole.
            let row = row(&json, 0, policy);
            assert!(number(row, "/bounced_per_io") > 0.9, "{lines}: {row}");
            let requests = number(row, "/requests_per_io") - 2.0 * probes_per_io(row, ios);
            assert!(requests < 0.5, "{lines}: {requests} {row}");
        }
        assert_eq!(row(&json, 0, "off")["pool_bytes"], Value::Null);
    }
    // Whole pages contain nothing else: they are mapped.
    let json = measure("bs=4k size=4m", &untrusted);
    for policy in ["strict", "strict+map", "lazy-mq"] {
        assert_eq!(of(&json, policy, "/bounced_fraction"), 0.0, "{policy}");
    }
    // So is a part of a page, for a trusted disk.
    let json = measure("bs=512 size=1m", &["--policy", "strict"]);
    assert_eq!(row(&json, 0, "strict")["pool_bytes"], Value::Null);
    assert!(of(&json, "strict", "/requests_per_io") > 1.0);
}

#[test]
fn the_table_shows_what_was_copied() {
    let place = Place::new();
    let job = "[job]\nrw=randrw\nbs=16k\nsize=8m\niodepth=8\n";
    let arguments = ["--details", "--explain", "--bounce-quota", "64m", "--report", "report.html"];
    let ended = place.compare(job, &[&IN_THE_MIDDLE[..], &ROWS, &arguments].concat());
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(ended.out.contains("\nbounce: bounce 100.0% copied, "), "{ended}");
    assert!(ended.out.contains("zero-copy in place, "), "{ended}");
    assert!(ended.out.contains("mappings that were copies"), "{ended}");
    assert!(ended.out.replace("\n  ", " ").contains("slots of 64 MiB at most"), "{ended}");
    // Memory that is filled in place stays open.
    let mut lines = ended.out.lines();
    let line = lines.find(|line| line.trim_start().starts_with("zero-copy ")).unwrap();
    assert!(line.contains(" open "), "{ended}");
    assert!(place.read("report.html").contains("bounce: bounce 100.0% copied"));
}

#[test]
fn what_finds_no_slot_is_mapped_and_what_must_have_one_fails() {
    let rows = ["--policy", "bounce", "--bounce-quota", "128k"];
    let json = measure("bs=64k size=32m", &rows);
    assert!(of(&json, "bounce", "/not_bounced") > 0.0);
    is_strict(&json, "bounce");
    let job = "[job]\nrw=randrw\nbs=64k\nsize=8m\niodepth=8\n";
    let rows = ["--policy", "zero-copy", "--bounce-quota", "128k"];
    let ended = Place::new().compare(job, &[&ONCE[..], &rows].concat());
    assert_eq!(ended.code(), 1, "{ended}");
    assert!(ended.err.contains("a buffer of the pools"), "{ended}");
}
