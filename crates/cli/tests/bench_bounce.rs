//! `ringfence bench bounce`, between real processes: its output is a contract.

mod common;

use common::{Place, number};
use ringfence_lab::bench::threads::bound_to;
use serde_json::Value;

/// The shortest possible run.
const SHORT: [&str; 9] =
    ["bench", "bounce", "--repeat", "2", "--runtime", "0.1", "--budget", "0.5", "--quiet"];

fn impls(json: &Value) -> Vec<&str> {
    json["rows"].as_array().unwrap().iter().map(|row| row["impl"].as_str().unwrap()).collect()
}

#[test]
fn the_seeds_table_holds_every_row_and_figure() {
    let place = Place::new();
    let json = place.bench(&SHORT, &["--only", "seed", "--sizes", "4k,16k"]);
    let rows =
        ["off", "strict", "strict+map", "lazy-mq+map", "bounce", "auto", "persistent"].repeat(4);
    assert_eq!(impls(&json), rows);
    for row in json["rows"].as_array().unwrap() {
        let params = &row["params"];
        assert!(["read", "write"].contains(&params["op"].as_str().unwrap()), "{row}");
        assert!(params["size"] == 4096 || params["size"] == 16384, "{row}");
        assert_eq!(params["notify"], "sleep");
        let figures = ["ratio_to_strict", "ratio_to_strict_map", "ratio_to_off", "cpu_ns_per_io"];
        for key in figures {
            assert!(number(row, &format!("/{key}/median")) > 0.0, "{key}: {row}");
            // If the machine stood still for a round, one is left: no interval, and a note about
            // it.
            if row["note"].is_null() {
                number(row, &format!("/{key}/lo"));
            }
        }
        assert!(number(row, "/ns_per_op/median") > 0.0, "{row}");
        assert!(number(row, "/ratio_to_ringfence") > 0.0, "{row}");
        let is = |name: &str| row["impl"] == name;
        assert!(!is("auto") || row["ratio_to_ringfence"] == 1.0, "{row}");
        assert!(!is("strict") || number(row, "/ratio_to_strict/median") == 1.0, "{row}");
        // `off` maps nothing, and `persistent` has mapped before.
        let maps = !is("off") && !is("persistent");
        for key in ["map_ns_per_gib", "unmap_ns_per_gib", "map_change_percent"] {
            assert_eq!(row[key]["median"].is_number(), maps, "{key}: {row}");
        }
    }
}

#[test]
fn a_list_bounced_whole_sends_no_request_to_the_device() {
    // One CPU for both processes: the pools keep slots for each CPU, and map some when a thread
    // comes to a CPU without any.
    let place = Place::new();
    let json = bound_to(rustix::thread::sched_getcpu(), || {
        place.bench(&SHORT, &["--only", "list", "--notify", "adaptive"])
    });
    assert_eq!(impls(&json), ["ringfence", "each", "single-use"].repeat(3 * 2));
    for row in json["rows"].as_array().unwrap() {
        assert!(row["name"].as_str().unwrap().starts_with("list/"), "{row}");
        for key in ["thread_cpu_ns", "device_cpu_ns", "cpu_ns", "cpu_ratio"] {
            assert!(number(row, &format!("/{key}/median")) >= 0.0, "{key}: {row}");
        }
        assert!(number(row, "/ns_per_op/median") > 0.0, "{row}");
        let requests = number(row, "/requests_per_list/median");
        match row["impl"].as_str().unwrap() {
            // A map and an unmap of each element.
            "single-use" => assert_eq!(requests, 2.0 * number(row, "/params/elements"), "{row}"),
            _ => assert_eq!(requests, 0.0, "{row}"),
        }
    }
}

#[test]
fn pools_are_compared_where_both_can() {
    let place = Place::new();
    let json = place.bench(&SHORT, &["--only", "pool", "--sizes", "4k,512k"]);
    // 5 ways, 2 sizes, 3 states, 1 and 2 threads, 2 pools.
    assert_eq!(json["rows"].as_array().unwrap().len(), 5 * 2 * 3 * 2 * 2);
    for row in json["rows"].as_array().unwrap() {
        let cannot = row["impl"] == "swiotlb-like" && row["params"]["size"] == 512 << 10;
        assert_eq!(row["ns_per_op"]["median"].is_null(), cannot, "{row}");
        assert_eq!(row["note"].is_string(), cannot, "{row}");
    }
}

#[test]
fn the_table_stands_on_standard_output_and_the_json_in_its_file() {
    let place = Place::new();
    let arguments = ["--sizes", "4k", "--op", "read", "--details", "--json", "out.json"];
    let ended = place.run(&[&SHORT[..], &arguments].concat());
    assert_eq!(ended.code(), 0, "{ended}");
    assert_eq!(ended.err, "", "--quiet");
    for word in
        ["seed/read/4096", "persistent", "lists for an untrusted", "swiotlb-like", "preloaded"]
    {
        assert!(ended.out.contains(word), "{word}\n{ended}");
    }
    assert!(ended.out.lines().all(|line| line.chars().count() <= 120), "{ended}");
    let json: Value = serde_json::from_str(&place.read("out.json")).unwrap();
    assert_eq!(json["settings"]["parts"], serde_json::json!(["seed", "list", "pool"]));
}

#[test]
fn interrupted_it_reports_what_was_complete() {
    let place = Place::new();
    let only = ["bench", "bounce", "--only", "seed", "--sizes", "4k", "--op", "read"];
    let long = ["--repeat", "1000", "--runtime", "0.05", "--json", "out.json"];
    let mut running = place.start(&[&only[..], &long].concat());
    running.wait_for(|line| {
        let round = line.split_once(", round ").and_then(|(_, rest)| rest.split(' ').next());
        round.is_some_and(|number| number.parse::<u32>().unwrap() >= 2)
    });
    running.signal_group(rustix::process::Signal::INT);
    let ended = running.wait();
    assert_eq!(ended.code(), 1, "{ended}");
    assert!(ended.err.contains("interrupted: the figures are of what was complete"), "{ended}");
    assert!(!ended.err.contains("error:"), "{ended}");
    assert!(ended.out.contains("seed/read/4096"), "{ended}");
    let json: Value = serde_json::from_str(&place.read("out.json")).unwrap();
    assert_eq!(json["interrupted"], true);
    assert!(number(&json["rows"][0], "/ns_per_op/median") > 0.0, "{json:#}");
    assert!(place.processes().is_empty(), "no process stays");
}

#[test]
fn wrong_usage_is_refused_before_anything_runs() {
    let place = Place::new();
    for (option, value, words) in [
        ("--only", "pools", &["pools", "seed, list, pool"][..]),
        ("--only", "pool,pool", &["twice"]),
        ("--sizes", "4k,4097", &["4097", "512"]),
        ("--sizes", "2m", &["1m"]),
        ("--op", "trim", &["trim", "read, write"]),
        ("--notify", "never", &["never"]),
        ("--repeat", "0", &["--repeat"]),
        ("--runtime", "0", &["--runtime"]),
        ("--runtime", "nan", &["--runtime"]),
        ("--budget", "0", &["--budget"]),
        ("--json", "missing/out.json", &["missing/out.json"]),
    ] {
        place.run(&["bench", "bounce", option, value]).refused(words);
    }
    assert_eq!(place.names(), Vec::<String>::new(), "nothing was left behind");
}

#[test]
fn help_says_what_there_is() {
    let place = Place::new();
    assert!(place.run(&["bench", "--help"]).out.contains("bounce"));
    let ended = place.run(&["bench", "bounce", "--help"]);
    assert_eq!(ended.code(), 0, "{ended}");
    for word in ["--only", "--repeat", "--runtime", "--sizes", "--op", "--notify", "--json"] {
        assert!(ended.out.contains(word), "{word}\n{ended}");
    }
    for word in ["EXAMPLES", "EXIT STATUS", "seed-004.fio", "swiotlb"] {
        assert!(ended.out.contains(word), "{word}\n{ended}");
    }
}
