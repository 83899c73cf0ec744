//! `ringfence bench`: its output is a contract, and wrong usage is refused.

mod common;

use common::{Place, number};
use serde_json::Value;

const NAMES: [&str; 8] = [
    "ringfence",
    "unchecked",
    "rbtree",
    "bitmap",
    "magazines",
    "vm-allocator",
    "btreemap",
    "control",
];

/// The shortest possible run.
const SHORT: [&str; 7] = ["bench", "iova", "--repeat", "2", "--budget", "0.5", "--quiet"];

#[test]
fn the_json_holds_every_field_of_the_contract() {
    let place = Place::new();
    let json = place.bench(&SHORT, &["--live", "0,1k", "--sizes", "1,1-32"]);
    let rows = json["rows"].as_array().unwrap();
    // hot and batch at two live sets, random at one, for two sizes; aligned16 for its own size.
    assert_eq!(rows.len(), ((2 + 2 + 1) * 2 + 2) * 2 * NAMES.len());
    for row in rows {
        assert!(NAMES.contains(&row["impl"].as_str().unwrap()), "{row}");
        assert!(row["name"].is_string(), "{row}");
        let params = &row["params"];
        assert!(
            ["hot", "batch", "random", "aligned16"].contains(&params["pattern"].as_str().unwrap())
        );
        assert!(params["live"] == 0 || params["live"] == 1000, "{row}");
        assert!([1.into(), 16.into(), Value::from("1-32")].contains(&params["size"]), "{row}");
        assert!(params["threads"] == 1 || params["threads"] == 2, "{row}");
        assert_eq!(params["aperture_bits"], 48);
        for path in ["/ns_per_op/median", "/ratio_to_ringfence", "/p99_ns", "/worst_ns"] {
            assert!(number(row, path) > 0.0, "{path}: {row}");
        }
        for path in ["/ns_per_op/lo", "/ns_per_op/hi", "/operations", "/timed_failures"] {
            number(row, path);
        }
        assert!(row["note"].is_null() || row["note"].is_string(), "{row}");
        assert_eq!(row["scaling"].is_object(), params["threads"] == 2, "{row}");
        if row["impl"] != "control" {
            assert_eq!(row["failures"], 0, "{row}");
            assert_eq!(row["failures_with_hole"], 0, "{row}");
            assert!(number(row, "/checked_operations") > 0.0, "{row}");
            assert_eq!(row["bytes_per_live"].is_number(), params["live"] == 1000, "{row}");
        }
        if row["impl"] == "ringfence" {
            assert_eq!(row["ratio_to_ringfence"], 1.0, "{row}");
        }
    }
}

#[test]
fn a_full_set_has_a_32_bit_space_whatever_the_aperture() {
    let place = Place::new();
    let arguments = ["--live", "48%,0", "--pattern", "aligned16", "--aperture", "57"];
    let json =
        place.bench(&SHORT, &[&arguments[..], &["--allocator", "ringfence,bitmap"]].concat());
    for row in json["rows"].as_array().unwrap() {
        let full = row["params"]["live"] == "48%";
        assert_eq!(row["params"]["aperture_bits"], if full { 32 } else { 57 }, "{row}");
        assert_eq!(row["failures_with_hole"], 0, "{row}");
    }
}

#[test]
fn what_is_not_measured_has_a_row_with_nulls_and_a_note() {
    let place = Place::new();
    // A window of 2^20 granules does not hold that many.
    let arguments = ["--live", "100k", "--sizes", "16", "--pattern", "hot", "--threads", "1"];
    let json = place.bench(
        &SHORT,
        &[&arguments[..], &["--aperture", "32", "--allocator", "rbtree,control"]].concat(),
    );
    let row = &json["rows"][0];
    assert_eq!(row["impl"], "rbtree");
    assert!(row["ns_per_op"]["median"].is_null(), "{row}");
    assert!(row["ratio_to_ringfence"].is_null(), "{row}");
    assert!(row["note"].as_str().unwrap().starts_with("not measured: 65535 of 100000"), "{row}");
}

#[test]
fn the_table_stands_on_standard_output_and_the_json_in_its_file() {
    let place = Place::new();
    let arguments = ["--live", "0", "--sizes", "1", "--pattern", "hot", "--json", "out.json"];
    let ended = place.run(&[&SHORT[..], &arguments].concat());
    assert_eq!(ended.code(), 0, "{ended}");
    assert_eq!(ended.err, "", "--quiet");
    for name in NAMES {
        assert!(ended.out.contains(name), "{name}\n{ended}");
    }
    for word in ["hot/0/1/1", "scaling", "p99", "aperture_bits 48", "2 rounds"] {
        assert!(ended.out.contains(word), "{word}\n{ended}");
    }
    assert!(ended.out.lines().all(|line| line.chars().count() <= 120), "{ended}");
    let json: Value = serde_json::from_str(&place.read("out.json")).unwrap();
    assert_eq!(json["schema"], "ringfence.bench/1");
}

#[test]
fn progress_goes_to_standard_error() {
    let place = Place::new();
    let ended = place.run(&[
        "bench",
        "iova",
        "--repeat",
        "1",
        "--budget",
        "0.5",
        "--live",
        "0",
        "--pattern",
        "hot",
        "--allocator",
        "bitmap",
        "--json",
        "-",
    ]);
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(ended.err.contains("rounds, about"), "{ended}");
    assert!(serde_json::from_str::<Value>(&ended.out).is_ok(), "{ended}");
}

#[test]
fn wrong_usage_is_refused_before_anything_runs() {
    let place = Place::new();
    for (option, value, words) in [
        ("--allocator", "tree", &["tree", "vm-allocator"][..]),
        ("--allocator", "rbtree,rbtree", &["twice"]),
        ("--live", "many", &["many", "48%"]),
        ("--live", "100%", &["100%"]),
        ("--live", ",", &["empty"]),
        ("--sizes", "0", &["granules"]),
        ("--sizes", "32-1", &["32-1"]),
        ("--pattern", "cold", &["cold", "aligned16"]),
        ("--threads", "0", &["threads"]),
        ("--threads", "65", &["65"]),
        ("--repeat", "0", &["--repeat"]),
        ("--budget", "0", &["--budget"]),
        ("--budget", "nan", &["--budget"]),
        ("--fill-limit", "0", &["--fill-limit"]),
        ("--aperture", "12", &["--aperture"]),
        ("--aperture", "58", &["--aperture"]),
        ("--json", "missing/out.json", &["missing/out.json"]),
        ("--placement=never", "--quiet", &["--placement"]),
        ("--iotlb-sets", "64", &["--placement"]),
    ] {
        place.run(&["bench", "iova", option, value]).refused(words);
    }
    place.run(&["bench", "iova", "--no-such-option"]).refused(&["--no-such-option"]);
    place.run(&["bench", "iova", "--live", "0", "--pattern", "random"]).refused(&["live set"]);
    let sets = ["bench", "iova", "--placement", "--quiet", "--iotlb-sets", "3"];
    place.run(&sets).refused(&["IOTLB sets", "power of two"]);
    place.run(&["bench", "wheels"]).refused(&["wheels"]);
    assert_eq!(place.names(), Vec::<String>::new(), "nothing was left behind");
}

#[test]
fn help_says_what_there_is() {
    let place = Place::new();
    let ended = place.run(&["bench", "--help"]);
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(ended.out.contains("iova"), "{ended}");
    let ended = place.run(&["bench", "iova", "--help"]);
    assert_eq!(ended.code(), 0, "{ended}");
    for word in ["--allocator", "--live", "--sizes", "--pattern", "--threads", "--repeat"] {
        assert!(ended.out.contains(word), "{word}\n{ended}");
    }
    for word in ["--budget", "--aperture", "--json", "--quiet", "EXAMPLES", "EXIT STATUS"] {
        assert!(ended.out.contains(word), "{word}\n{ended}");
    }
}
