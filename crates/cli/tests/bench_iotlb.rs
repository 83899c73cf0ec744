//! `ringfence bench iotlb`: its output is a contract, and wrong usage is refused.

mod common;

use common::{Place, number};
use serde_json::Value;

const NAMES: [&str; 5] = ["ringfence", "vm-memory", "btreemap", "sorted-list", "single-lock"];

/// The shortest possible run.
const SHORT: [&str; 7] = ["bench", "iotlb", "--repeat", "2", "--budget", "0.1", "--quiet"];

#[test]
fn the_json_holds_every_row_and_figure() {
    let place = Place::new();
    let json = place.bench(&SHORT, &["--entries", "1,64,4k"]);
    let rows = json["rows"].as_array().unwrap();
    // Mergeable and not: five orders of 4k, and random of the two other sizes; and threads and
    // steady, unmergeable only, at two numbers of entries.
    assert_eq!(rows.len(), (2 * 7 + 2 * 2) * 3 * NAMES.len());
    for row in rows {
        let name = row["impl"].as_str().unwrap();
        let params = &row["params"];
        assert!(NAMES.contains(&name), "{row}");
        assert!(["4k", "2m", "1g"].contains(&params["page"].as_str().unwrap()), "{row}");
        assert!(["mergeable", "unmergeable"].contains(&params["merge"].as_str().unwrap()));
        let entries = params["entries"].as_u64().unwrap();
        assert!([1, 64, 4096].contains(&entries), "{row}");
        assert_eq!(row["scaling"].is_object(), params["threads"] == 2, "{row}");
        if row["note"].is_string() {
            assert!(row["ns_per_op"]["median"].is_null(), "{row}");
            assert_eq!(entries, 4096, "{row}");
            assert!(name == "sorted-list" || params["page"] == "1g", "{row}");
            continue;
        }
        for path in ["/ns_per_op/median", "/ratio_to_ringfence", "/wall_ns_per_op/median"] {
            assert!(number(row, path) > 0.0, "{path}: {row}");
        }
        for path in ["/ns_per_op/lo", "/cpu_ns_per_op/median", "/operations"] {
            number(row, path);
        }
        assert!(number(row, "/ratio_to_64_entries/median") > 0.0, "{row}");
        if name == "ringfence" {
            assert_eq!(row["ratio_to_ringfence"], 1.0, "{row}");
        }
    }
}

#[test]
fn only_the_named_cells_are_measured() {
    let place = Place::new();
    let some = ["--impl", "ringfence,vm-memory", "--entries", "2k", "--merge", "unmergeable"];
    let json =
        place.bench(&SHORT, &[&some[..], &["--order", "churn,chain", "--page", "2m"]].concat());
    let names: Vec<_> = json["rows"].as_array().unwrap().iter().map(|row| &row["name"]).collect();
    let expected = ["churn/unmergeable/2m/2k", "churn/unmergeable/2m/2k"];
    assert_eq!(names[..2], expected);
    assert_eq!((names.len(), names[3]), (4, &Value::from("chain/unmergeable/2m/2k")));
    let ended = place.run(&[&SHORT[..], &some, &["--order", "random"]].concat());
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(ended.out.contains("vm-memory") && ended.out.contains("random"), "{ended}");
    assert!(!ended.out.contains("btreemap"), "{ended}");
}

#[test]
fn a_run_that_measures_nothing_says_why() {
    let place = Place::new();
    let ended = place.run(&[&SHORT[..], &["--impl", "sorted-list", "--entries", "64k"]].concat());
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(ended.out.contains("note: sorted-list: not measured"), "{ended}");
}

#[test]
fn wrong_usage_is_refused_before_anything_runs() {
    let place = Place::new();
    for wrong in [
        ["--impl", "dpdk"],
        ["--entries", "0"],
        ["--entries", "4,4"],
        ["--page", "4m"],
        ["--order", ""],
        ["--merge", "perhaps"],
        ["--repeat", "0"],
        ["--budget", "0"],
        ["--json", "/nowhere/at/all.json"],
    ] {
        let ended = place.run(&[&SHORT[..2], &wrong].concat());
        assert_eq!(ended.code(), 2, "{wrong:?}: {ended}");
        assert!(ended.out.is_empty(), "{ended}");
    }
}
