//! `ringfence bench net`, between real processes: its output is a contract.

mod common;

use std::{io::Write as _, path::Path};

use common::{Place, number};
use serde_json::Value;

/// The shortest possible run.
const SHORT: [&str; 7] = ["bench", "net", "--repeat", "2", "--seconds", "0.2", "--quiet"];

fn names(json: &Value) -> Vec<String> {
    let name = |row: &Value| {
        format!("{} {}", row["name"].as_str().unwrap(), row["impl"].as_str().unwrap())
    };
    json["rows"].as_array().unwrap().iter().map(name).collect()
}

#[test]
fn every_row_says_what_was_carried_and_what_the_windows_were_worth() {
    let place = Place::new();
    let json = place.bench(
        &SHORT,
        &[
            "--impl",
            "ringfence",
            "--only",
            "off,static",
            "--entries",
            "4k",
            "--ring",
            "split",
            "--direction",
            "loop,tx,rx",
        ],
    );
    let wanted = ["loop", "tx", "rx"].map(|direction| {
        ["off", "4k/mergeable", "4k/unmergeable"]
            .map(|addresses| format!("{direction}/split/{addresses} ringfence"))
    });
    assert_eq!(names(&json), wanted.concat());
    for row in json["rows"].as_array().unwrap() {
        assert!(number(row, "/ns_per_op/median") > 0.0, "{row}");
        assert_eq!(row["ratio_to_ringfence"], 1.0, "{row}");
        assert!(number(row, "/packets_per_s/median") > 0.0, "{row}");
        assert!(number(row, "/ratio_to_off/median") > 0.0, "{row}");
        assert!(row["ratio_to_dpdk"]["median"].is_null(), "{row}");
        assert_eq!(row["windows"], 2, "{row}");
        assert_eq!(row["windows_failed"], 0, "{row}");
        for key in ["windows_short_of_cpu", "windows_placed_elsewhere", "windows_over_loss"] {
            assert!((0.0..=2.0).contains(&number(row, &format!("/{key}"))), "{row}");
        }
        assert!(number(row, "/carried") > 0.0, "{row}");
        assert_eq!(row["corrupt"], 0, "{row}");
        // Shares of a window, by two clocks that are read one after the other: on a busy machine
        // any time passes in between.
        for key in ["driver_cpu_share", "backend_cpu_share"] {
            assert!(number(row, &format!("/{key}/median")) >= 0.0, "{row}");
        }
        let off = row["name"].as_str().unwrap().ends_with("/off");
        assert_eq!(row["params"]["iommu"], !off, "{row}");
        assert_eq!(row["params"].get("mergeable").is_some(), !off, "{row}");
        assert_eq!(row.get("misses_per_packet").is_some(), !off, "{row}");
    }
}

#[test]
fn fresh_addresses_are_held_to_the_sockets_own_rate() {
    let place = Place::new();
    let json = place.bench(
        &SHORT,
        &["--impl", "ringfence", "--only", "dynamic", "--direction", "loop", "--ring", "split"],
    );
    assert_eq!(
        names(&json),
        ["loop/split/dynamic/asked ringfence", "loop/split/dynamic/pushed ringfence"]
    );
    for row in json["rows"].as_array().unwrap() {
        for key in ["messages_per_s_single", "messages_per_s_many", "ratio_to_messages"] {
            assert!(number(row, &format!("/{key}/median")) > 0.0, "{key}: {row}");
        }
        assert!(number(row, "/invalidations_per_packet") > 0.0, "{row}");
        let of = |what: &str| number(row, &format!("/{what}_per_packet"));
        let messages = of("misses") + 2.0 * (of("updates") + of("invalidations"));
        assert!((of("messages") / messages - 1.0).abs() < 1e-9, "{row}");
        assert!(row["ratio_to_off"]["median"].is_null(), "nothing was off: {row}");
    }
    let misses = |at: usize| number(&json["rows"][at], "/misses_per_packet");
    assert!(misses(0) > 1.0 && misses(1) < 1.0, "{json}");
}

#[test]
fn where_ringfence_is_the_iommu_each_use_of_a_buffer_is_mapped_and_nothing_is_lost() {
    let place = Place::new();
    let json = place.bench(&SHORT, &["--only", "notified", "--direction", "tx,rx,loop"]);
    let rows = json["rows"].as_array().unwrap();
    let wanted = ["tx", "rx", "loop"].map(|direction| {
        [
            "off",
            "strict+map/64",
            "strict+map/64/scattered",
            "strict+map/each",
            "lazy-mq+map/64",
            "bounce",
        ]
        .map(|how| format!("{direction}/split/notified/{how} ringfence"))
    });
    assert_eq!(names(&json), wanted.concat(), "of Ringfence alone");
    for row in rows {
        assert!(number(row, "/packets_per_s/median") > 0.0, "{row}");
        assert!(number(row, "/ratio_to_off/median") > 0.0, "{row}");
        assert_eq!((&row["lost"], &row["corrupt"]), (&0.into(), &0.into()), "{row}");
        assert_eq!(row["params"]["part"], "notified");
        let off = row["params"]["policy"] == "off";
        assert_eq!(row["params"]["iommu"], !off, "{row}");
        assert_eq!(row.get("updates_per_packet").is_some(), !off, "{row}");
        let strict = row["params"]["policy"] == "strict+map";
        if strict {
            // Adjacent buffers take one MAP for all, others one each; a frame in a loop has two.
            let maps = number(row, "/updates_per_packet");
            let one = row["params"]["bundle"] == 1 || row["params"]["page_run"] == 1;
            assert_eq!(maps > 0.5, one, "{row}");
            assert!(number(row, "/invalidations_per_packet") > 0.0, "{row}");
        }
    }
}

#[test]
fn behind_a_proxy_frames_are_carried_and_compared_with_the_same_back_end_without() {
    let place = Place::new();
    let json = place.bench(&SHORT, &["--only", "proxy", "--direction", "loop,tx,rx"]);
    let wanted = ["split", "packed"].map(|ring| {
        let of = |direction: &str| {
            ["direct", "proxy"].map(|how| format!("{direction}/{ring}/{how} ringfence"))
        };
        ["loop", "tx", "rx"].map(of).concat()
    });
    assert_eq!(names(&json), wanted.concat(), "of Ringfence alone");
    for row in json["rows"].as_array().unwrap() {
        assert!(number(row, "/carried") > 0.0, "{row}");
        assert!(number(row, "/ratio_to_off/median") > 0.0, "{row}");
        // What was overdue on a busy machine, and came after all, is not lost.
        assert_eq!((&row["lost"], &row["corrupt"]), (&row["late"], &0.into()), "{row}");
        assert_eq!(row["params"]["part"], "proxy");
        assert_eq!(
            row["params"]["proxy"],
            row["name"].as_str().unwrap().ends_with("proxy"),
            "{row}"
        );
    }
}

#[test]
fn dpdk_is_measured_too_or_its_absence_is_reported() {
    let place = Place::new();
    let json = place
        .bench(&SHORT, &["--only", "off", "--direction", "tx,rx,loop", "--ring", "split,packed"]);
    assert_eq!(json["rows"].as_array().unwrap().len(), 12);
    let there = Path::new("/usr/bin/dpdk-testpmd").exists();
    for row in json["rows"].as_array().unwrap() {
        if row["impl"] == "dpdk" && !there {
            assert!(row["note"].as_str().unwrap().contains("apt-get install dpdk-dev"), "{row}");
            assert!(row["ns_per_op"]["median"].is_null(), "{row}");
        } else {
            assert!(number(row, "/packets_per_s/median") > 0.0, "{row}");
        }
        assert_eq!(row["ratio_to_dpdk"]["median"].is_number(), there, "{row}");
    }
    if !there {
        let text = "NOT TESTED: DPDK's testpmd, which is not installed\n";
        std::io::stderr().write_all(text.as_bytes()).unwrap();
        assert!(json["warnings"][0].as_str().unwrap().contains("dpdk is not measured"), "{json}");
    }
}

#[test]
fn wrong_usage_ends_before_anything_runs() {
    let place = Place::new();
    for wrong in [
        &["--only", "statics"][..],
        &["--direction", "up"],
        &["--entries", "3k"],
        &["--impl", "vpp"],
        &["--seconds", "0"],
        &["--repeat", "0"],
        &["--only", "dynamic", "--ring", "packed"],
    ] {
        let ended = place.run(&[&["bench", "net"], wrong].concat());
        assert_eq!(ended.code(), 2, "{wrong:?}: {ended}");
        assert_eq!(ended.out, "", "{wrong:?}");
    }
}
