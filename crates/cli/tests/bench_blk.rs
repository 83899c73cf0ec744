//! `ringfence bench blk`, between real processes: its output is a contract.

mod common;

use common::{Place, number};
use serde_json::Value;

/// The shortest possible run.
const SHORT: [&str; 7] = ["bench", "blk", "--repeat", "2", "--seconds", "0.2", "--quiet"];

fn names(json: &Value) -> Vec<&str> {
    json["rows"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect()
}

#[test]
fn every_row_says_what_was_done_and_what_the_windows_were_worth() {
    let place = Place::new();
    let json = place.bench(
        &SHORT,
        &["--only", "off,static", "--entries", "4k", "--depth", "32", "--queues", "2"],
    );
    let wanted = ["read", "write"].map(|kind| {
        ["off", "4k/mergeable", "4k/unmergeable"]
            .map(|addresses| format!("{kind}/split/2x32/{addresses}"))
    });
    assert_eq!(names(&json), wanted.concat());
    for row in json["rows"].as_array().unwrap() {
        assert!(number(row, "/ns_per_op/median") > 0.0, "{row}");
        assert!(number(row, "/requests_per_s/median") > 0.0, "{row}");
        assert!(number(row, "/ratio_to_off/median") > 0.0, "{row}");
        assert!(number(row, "/backend_cpu_us/median") > 0.0, "{row}");
        assert!(number(row, "/answered") > 0.0, "{row}");
        assert_eq!((&row["wrong"], &row["failed"]), (&0.into(), &0.into()), "{row}");
        assert_eq!((&row["windows"], &row["windows_failed"]), (&2.into(), &0.into()), "{row}");
        let off = row["name"].as_str().unwrap().ends_with("/off");
        assert_eq!(row["params"]["iommu"], !off, "{row}");
        if !off {
            assert_eq!(row["misses_per_request"], 0.0, "all was updated at the beginning: {row}");
        }
    }
}

#[test]
fn with_fresh_addresses_two_pages_a_request_are_missed_or_pushed() {
    let place = Place::new();
    let json = place.bench(
        &SHORT,
        &["--only", "dynamic", "--kind", "read", "--depth", "16", "--ring", "packed"],
    );
    assert_eq!(names(&json).len(), 4);
    for row in json["rows"].as_array().unwrap() {
        let pushed = row["params"]["pushed"] == true;
        let misses = number(row, "/misses_per_request");
        assert!(if pushed { misses < 0.5 } else { misses > 1.0 }, "{row}");
        assert!(number(row, "/invalidations_per_request") > 0.5, "{row}");
        assert!(row["ratio_to_off"]["median"].is_null(), "nothing was off: {row}");
    }
}

#[test]
fn buffers_of_the_service_s_own_are_compared_with_the_guest_s() {
    let place = Place::new();
    let json = place.bench(&SHORT, &["--only", "buffers", "--depth", "8", "--queues", "1"]);
    let wanted = ["read", "write"].map(|kind| {
        ["4k/guest", "4k/own", "64k/guest", "64k/own"]
            .map(|case| format!("{kind}/split/1x8/{case}"))
    });
    assert_eq!(names(&json), wanted.concat());
    for row in json["rows"].as_array().unwrap() {
        assert!(number(row, "/ratio_to_off/median") > 0.0, "{row}");
        assert!(number(row, "/answered") > 0.0, "{row}");
        assert_eq!((&row["wrong"], &row["failed"]), (&0.into(), &0.into()), "{row}");
    }
}

#[test]
fn a_confined_service_is_compared_with_one_that_is_not() {
    let place = Place::new();
    let only = ["--only", "sandbox", "--depth", "8", "--queues", "1", "--kind", "read"];
    let json = place.bench(&SHORT, &only);
    assert_eq!(
        names(&json),
        ["unconfined", "confined"].map(|case| format!("read/split/1x8/{case}"))
    );
    for row in json["rows"].as_array().unwrap() {
        assert!(number(row, "/ratio_to_off/median") > 0.0, "{row}");
        assert_eq!((&row["wrong"], &row["failed"]), (&0.into(), &0.into()), "{row}");
    }
}

#[test]
fn behind_a_proxy_requests_are_compared_with_the_same_back_end_without_asleep_too() {
    let place = Place::new();
    let only = ["--only", "proxy", "--depth", "1,8", "--queues", "1", "--kind", "read"];
    let json = place.bench(&SHORT, &only);
    let looking = ["4k/direct", "4k/proxy", "64k/direct", "64k/proxy"];
    let of = |depth: u32, ways: &[&str]| -> Vec<String> {
        ways.iter().map(|way| format!("read/split/1x{depth}/{way}")).collect()
    };
    let asleep = ["4k/direct/asleep", "4k/proxy/asleep"];
    let wanted = [of(1, &[&looking[..], &asleep].concat()), of(8, &looking)];
    assert_eq!(names(&json), wanted.concat());
    for row in json["rows"].as_array().unwrap() {
        let name = row["name"].as_str().unwrap();
        assert!(number(row, "/ratio_to_off/median") > 0.0, "{row}");
        assert!(number(row, "/answered") > 0.0, "{row}");
        assert_eq!((&row["wrong"], &row["failed"]), (&0.into(), &0.into()), "{row}");
        assert_eq!(row["params"]["proxy"], name.contains("/proxy"), "{row}");
        assert_eq!(row["params"]["sleeps"], name.ends_with("/asleep"), "{row}");
    }
}

#[test]
fn the_data_path_by_itself_is_measured_with_and_without_an_iotlb() {
    let place = Place::new();
    let json = place.bench(&SHORT, &["--only", "path", "--kind", "write"]);
    assert_eq!(names(&json), ["path/write/without", "path/write/off", "path/write/4k/unmergeable"]);
    for row in json["rows"].as_array().unwrap() {
        assert!(number(row, "/ns_per_op/median") > 0.0, "{row}");
        assert!(number(row, "/ratio_to_without/median") > 0.0, "{row}");
    }
}

#[test]
fn wrong_usage_ends_before_anything_runs() {
    let place = Place::new();
    for wrong in [
        &["--only", "statics"][..],
        &["--kind", "flush"],
        &["--depth", "257"],
        &["--queues", "3"],
        &["--entries", "3k"],
        &["--seconds", "0"],
        &["--repeat", "0"],
    ] {
        let ended = place.run(&[&["bench", "blk"], wrong].concat());
        assert_eq!(ended.code(), 2, "{wrong:?}: {ended}");
        assert_eq!(ended.out, "", "{wrong:?}");
    }
}
