//! `ringfence bench pin`: its output is a contract, the kernel's count checks each implementation,
//! and wrong usage is refused.

mod common;

use std::{io::Write as _, path::Path};

use common::{Place, number};
use serde_json::Value;

const NAMES: [&str; 4] = ["ringfence", "page-by-page", "ringfence-each", "runs-by-hand"];

/// The shortest possible run.
const SHORT: [&str; 7] = ["bench", "pin", "--repeat", "2", "--budget", "0.1", "--quiet"];

#[test]
fn the_json_holds_every_row_and_figure() {
    let place = Place::new();
    let json = place.bench(&SHORT, &["--pages", "1,64"]);
    let rows = json["rows"].as_array().unwrap();
    // A single page has only one order.
    assert_eq!(rows.len(), 3 * (1 + 4) * NAMES.len());
    let missing = json["settings"]["did_not_run"].as_array().unwrap();
    for why in missing {
        let text = format!("NOT TESTED: bench pin: {}\n", why.as_str().unwrap());
        std::io::stderr().write_all(text.as_bytes()).unwrap();
    }
    for row in rows {
        let params = &row["params"];
        assert!(NAMES.contains(&row["impl"].as_str().unwrap()), "{row}");
        assert!(
            ["contiguous", "random", "mixed", "pinned"].contains(&params["list"].as_str().unwrap())
        );
        assert!([1, 64].contains(&params["pages"].as_u64().unwrap()), "{row}");
        let backing = params["backing"].as_str().unwrap();
        let absent = missing.iter().any(|why| why.as_str().unwrap().starts_with(backing));
        assert!(!(absent && backing == "4k"), "{json}");
        if absent {
            assert!(row["note"].as_str().unwrap().contains("did not run"), "{row}");
            assert!(row["ns_per_op"]["median"].is_null(), "{row}");
            continue;
        }
        assert!(row["note"].is_null(), "{row}");
        for path in [
            "/ns_per_op/median",
            "/ratio_to_ringfence",
            "/pin_ns_per_page/median",
            "/unpin_ns_per_page/median",
            "/pin_ns_per_list/median",
            "/unpin_ns_per_list/median",
            "/pin_ratio_to_page_by_page/median",
            "/unpin_ratio_to_page_by_page/median",
            "/pin_speedup/median",
            "/unpin_speedup/median",
            "/lists",
            "/runs",
        ] {
            assert!(number(row, path) > 0.0, "{path}: {row}");
        }
        for path in ["/pin_ratio_to_page_by_page/lo", "/pin_ratio_to_page_by_page/hi"] {
            number(row, path);
        }
        let held = if params["list"] == "pinned" && params["pages"] == 64 { 32 } else { 0 };
        assert_eq!(row["held_pages"], held, "{row}");
    }
    let calls = json["settings"]["one_page_calls"].as_array().unwrap();
    assert_eq!(calls.iter().filter(|call| call["page_by_page"] == true).count(), 1, "{json}");
}

#[test]
fn only_the_named_cells_are_measured() {
    let place = Place::new();
    let some = ["--impl", "ringfence,page-by-page", "--pages", "8", "--memory", "4k"];
    let json = place.bench(&SHORT, &[&some[..], &["--list", "half"]].concat());
    let names: Vec<_> = json["rows"].as_array().unwrap().iter().map(|row| &row["name"]).collect();
    assert_eq!(names, [&Value::from("8/4k/mixed"); 2]);
    let ended = place.run(&[&SHORT[..], &some, &["--list", "random"]].concat());
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(ended.out.contains("8/4k/random"), "{ended}");
    assert!(!ended.out.contains("4k/contiguous") && !ended.out.contains("DID NOT RUN"), "{ended}");
}

#[test]
fn missing_huge_pages_are_reported_loudly_and_fail_the_run_if_named() {
    let place = Place::new();
    // 16,384 pages take 64 huge pages: few machines have reserved that many.
    let list = ["--pages", "16384", "--list", "contiguous"];
    let ended = place.run(&[&SHORT[..], &list].concat());
    assert_eq!(ended.code(), 0, "{ended}");
    let missing = ended.out.contains("DID NOT RUN: hugetlb did not run");
    assert_eq!(missing, !ended.out.contains("/hugetlb/"), "{ended}");
    assert_eq!(missing, ended.out.contains("vm.nr_hugepages="), "{ended}");
    // Other processes may have taken or returned some meanwhile: each run is judged by what it
    // found itself.
    let ended = place.run(&[&SHORT[..], &list, &["--memory", "hugetlb"]].concat());
    let missing = ended.err.contains("hugetlb did not run");
    assert_eq!(ended.code(), i32::from(missing), "{ended}");
    assert_eq!(missing, !ended.out.contains("/hugetlb/"), "{ended}");
}

fn shipped(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/traces").join(name);
    path.to_str().unwrap().to_owned()
}

#[test]
fn run_lengths_of_recordings_are_reported() {
    let place = Place::new();
    let nvme = shipped("guest-ftrace-nvme-intel-lazy-a.txt.gz");
    let qemu = shipped("qemu7-viommu-nvme-strict-a.log.gz");
    let arguments = ["bench", "pin", "--quiet", "--runs", &nvme, &qemu];
    let json = place.bench(&arguments, &[]);
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * 5);
    let row = |trace: &str, measure: &str| {
        let found = rows.iter().find(|row| {
            row["params"]["recording"] == *trace && row["params"]["measure"] == *measure
        });
        found.unwrap_or_else(|| panic!("no {measure} of {trace}"))
    };
    for trace in [&nvme, &qemu] {
        // The number of pages is the same however they are merged; a page may be mapped twice in a
        // burst.
        let pages = number(row(trace, "map"), "/pages");
        assert_eq!(number(row(trace, "buffer"), "/pages"), pages);
        assert_eq!(number(row(trace, "burst"), "/pages"), pages);
        assert!(number(row(trace, "burst memory"), "/pages") <= pages);
        let runs = |measure| number(row(trace, measure), "/runs");
        assert!(runs("buffer") <= runs("map") && runs("burst") <= runs("buffer"));
        // The job writes 64 KiB at a time.
        assert_eq!(number(row(trace, "buffer"), "/p50"), 16.0);
        for row in rows {
            assert!(number(row, "/longest") >= number(row, "/p99"), "{row}");
            assert_eq!(row["from"].as_array().unwrap().len(), 5, "{row}");
        }
        let part = number(row(trace, "in flight"), "/with_neighbour");
        assert!((0.0..=1.0).contains(&part));
    }
    let ended = place.run(&["bench", "pin", "--quiet", "--runs", &nvme]);
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(ended.out.contains("burst memory") && ended.out.contains("in flight"), "{ended}");
}

#[test]
fn wrong_usage_is_refused_before_anything_runs() {
    let place = Place::new();
    let no_trace = place.write("none.txt", "nothing\n");
    let no_trace = no_trace.to_str().unwrap();
    for wrong in [
        &["--impl", "vfio"][..],
        &["--pages", "0"],
        &["--pages", "8,8"],
        &["--memory", "2m"],
        &["--list", ""],
        &["--list", "mixed,half"],
        &["--repeat", "0"],
        &["--budget", "0"],
        &["--json", "/nowhere/at/all.json"],
        &["--runs", no_trace],
        &["--runs", "/nowhere/at/all.gz"],
        &["--pages", "1", "--runs", no_trace],
    ] {
        let ended = place.run(&[&SHORT[..2], wrong].concat());
        assert_eq!(ended.code(), 2, "{wrong:?}: {ended}");
        assert!(ended.out.is_empty(), "{ended}");
    }
}
