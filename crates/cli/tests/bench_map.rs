//! `ringfence bench map`: its output is a contract, and wrong usage is refused.

mod common;

use common::{Place, number};

/// The shortest possible run.
const SHORT: [&str; 7] = ["bench", "map", "--repeat", "2", "--budget", "0.1", "--quiet"];

#[test]
fn the_json_holds_every_row_and_figure() {
    let place = Place::new();
    let json = place.bench(&SHORT, &["--batch", "1,64", "--live", "10,1k"]);
    let rows = json["rows"].as_array().unwrap();
    let names = ["ringfence", "btreemap", "btreemap-range"];
    // Rows with a device for each of two threads ("apart"), and with a mirrored table for attach.
    let forms = |form: &str| rows.iter().filter(|row| row["params"]["form"] == form).count();
    assert_eq!([forms("apart"), forms("mirror")], [2, 2]);
    assert_eq!(rows.len(), (2 * 4 + 2 * 2 + 2) * names.len() + 2 + 2 + 2 + 4);
    for row in rows {
        assert!(names.contains(&row["impl"].as_str().unwrap()), "{row}");
        assert!(row["note"].is_null(), "{row}");
        let op = row["params"]["op"].as_str().unwrap();
        let figures: &[&str] = match op {
            "one-core" | "two-cores" => &["/pairs_per_s/median", "/operations", "/params/batch"],
            "two-domains" if row["params"]["threads"] == 2 => &["/scaling/median"],
            "two-domains" => &["/pairs_per_s/median"],
            "one-of" => &["/map_ns/median", "/unmap_ns/median", "/unmap_ratio_to_fewest/median"],
            "attach" => &["/attach_ns/median", "/params/live"],
            "memory" => &["/bytes_per_mapping", "/table_bytes"],
            _ => panic!("{row}"),
        };
        for path in ["/ns_per_op/median", "/ratio_to_ringfence"].iter().chain(figures) {
            assert!(number(row, path) > 0.0, "{path}: {row}");
        }
    }
}

#[test]
fn only_the_named_cells_are_measured() {
    let place = Place::new();
    let some = ["--impl", "ringfence,btreemap", "--op", "one-core", "--order", "scattered"];
    let json = place.bench(&SHORT, &[&some[..], &["--batch", "8"]].concat());
    let names: Vec<_> = json["rows"].as_array().unwrap().iter().map(|row| &row["name"]).collect();
    assert_eq!(names, ["one-core/8/scattered"; 2]);
    let ended = place.run(&[&SHORT[..], &some].concat());
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(ended.out.contains("one-core/8/scattered"), "{ended}");
    assert!(!ended.out.contains("table memory") && !ended.out.contains("contiguous"), "{ended}");
}

#[test]
fn wrong_usage_is_refused_before_anything_runs() {
    let place = Place::new();
    for wrong in [
        &["--impl", "qemu"][..],
        &["--op", "unmap"],
        &["--batch", "0"],
        &["--batch", "2048"],
        &["--batch", "8,8"],
        &["--live", "1"],
        &["--order", ""],
        &["--repeat", "0"],
        &["--budget", "0"],
        &["--json", "/nowhere/at/all.json"],
    ] {
        let ended = place.run(&[&SHORT[..2], wrong].concat());
        assert_eq!(ended.code(), 2, "{wrong:?}: {ended}");
        assert!(ended.out.is_empty(), "{ended}");
    }
}
