//! The output of `compare` is a contract: scripts and people read it.

mod common;

use std::time::Instant;

use common::{LIMIT, MAPPING, POLICIES, Place, number, policies, probes_per_io, row};
use serde_json::Value;

/// 64 KiB in 16 pages that are not adjacent, which distinguishes a batched map from single ones.
/// The number of I/Os is fixed, however long they take: figures per I/O are the same on a busy
/// machine.
const JOB: &str = "\
[global]
direct=1
[pages]
rw=randrw
bs=64k
size=32m
iodepth=4
numjobs=2
";

#[test]
fn the_json_holds_every_field_of_the_contract() {
    let json = Place::new().measure(JOB, &["--repeat", "2"]);
    assert_eq!(json["schema"], "ringfence.compare/1");
    assert!(json["host"].is_object());
    assert_eq!(json["notify"], "adaptive");
    assert!(json["disk"].as_str().unwrap().contains("paced"), "{}", json["disk"]);
    assert_eq!(json["interrupted"], false);
    assert_eq!(json["jobs"].as_array().unwrap().len(), 1);
    assert_eq!(json["jobs"][0]["name"], "pages");
    assert_eq!(json["jobs"][0]["rounds"], 2);
    assert_eq!(policies(&json, 0), [&["host"], &POLICIES[..]].concat());

    for policy in policies(&json, 0) {
        let row = row(&json, 0, policy);
        for path in [
            "/iops/median",
            "/bandwidth_bytes_per_s/median",
            "/latency_ns/mean",
            "/latency_ns/p50",
            "/latency_ns/p99",
            "/latency_ns/p999",
            "/ratio_to_off/iops/median",
            "/ratio_to_off/bandwidth/median",
            "/ratio_to_off/latency/median",
        ] {
            assert!(number(row, path) > 0.0, "{policy}: {path}");
        }
        for path in ["/iops/lo", "/iops/hi", "/ratio_to_off/latency/lo"] {
            number(row, path);
        }
        assert_eq!(row["errors"], 0, "{policy}");
        for path in [
            "/allocator",
            "/allocator_cpu_fraction",
            "/allocator_ns_per_io",
            "/iommu_cpu_fraction",
            "/map_ns_per_gib",
            "/unmap_ns_per_gib",
            "/requests_per_io",
            "/syncs_per_io",
            "/stale_window",
            "/iotlb",
            "/exposure/byte_ms_per_gib",
        ] {
            let protected = policy != "off" && policy != "host";
            let found = row.pointer(path).unwrap_or(&Value::Null);
            assert_eq!(!found.is_null(), protected, "{policy}: {path} is {found}");
        }
        number(row, "/kicks_per_io");
    }
    assert_eq!(number(row(&json, 0, "off"), "/ratio_to_off/bandwidth/median"), 1.0);
    assert_eq!(json["allocators"], serde_json::json!(["ringfence"]));
    assert_eq!((&json["placement"], &json["aperture_bits"]), (&"size".into(), &48.into()));
    assert_eq!(json["live_ranges"], 0);
    assert_eq!(json["load_threads"], 0);
    assert_eq!(row(&json, 0, "off")["load_fraction"], Value::Null);
    for policy in MAPPING {
        let row = row(&json, 0, policy);
        assert_eq!(row["allocator"], "ringfence");
        assert!(number(row, "/allocator_ns_per_io") > 0.0, "{policy}");
        let [all, part] = ["/iommu_cpu_fraction", "/allocator_cpu_fraction"];
        assert!(number(row, part) < number(row, all), "{policy}: a part of it");
        number(row, "/stale_window/max_ms");
        number(row, "/stale_window/byte_ms");
        assert!(number(row, "/iotlb/hits") + number(row, "/iotlb/misses") > 0.0);
    }

    // What stays open, and until when: the promise and the figure must agree.
    for policy in policies(&json, 0) {
        let row = row(&json, 0, policy);
        let wanted = match policy {
            "host" => Value::Null,
            "off" => "always".into(),
            policy if policy.starts_with("lazy") => "flush".into(),
            _ => "none".into(),
        };
        let reach = row.pointer("/exposure/reach").unwrap_or(&Value::Null);
        assert_eq!(*reach, wanted, "{policy}");
        assert!(row["fallback"].is_null() && row.get("fallback").is_some(), "{policy}");
        if wanted == "none" {
            assert_eq!(number(row, "/exposure/byte_ms"), 0.0, "{policy}");
        } else if wanted == "flush" {
            let figures = ["/exposure/byte_ms_per_gib", "/exposure/max_ms", "/exposure/byte_ms"];
            assert!(figures.iter().all(|figure| number(row, figure) > 0.0), "{row}");
            // Two sums of the same: they may round differently.
            let [one, other] =
                ["/exposure/byte_ms", "/stale_window/byte_ms"].map(|p| number(row, p));
            assert!((one - other).abs() <= 1e-9 * one, "{policy}: {one} {other}");
        }
    }
    // What was copied: without pools there is no such figure.
    for policy in policies(&json, 0) {
        let row = row(&json, 0, policy);
        let copies = matches!(policy, "bounce" | "auto");
        for path in [
            "/bounced_per_io",
            "/bounced_fraction",
            "/copied_bytes_per_io",
            "/not_bounced",
            "/pool_bytes",
            "/taken_bytes",
        ] {
            let found = row.pointer(path).unwrap_or_else(|| panic!("{policy} has no {path}"));
            assert_eq!(found.is_number(), copies, "{policy}: {path} is {found}");
        }
        assert!(row.get("explain").is_some(), "{policy}");
    }
    let default = &json["tuning"];
    assert!(default["bounce_threshold"].is_null() && default["bounce_quota"].is_null());
    assert_eq!((&default["batch"], &default["trust"]), (&64.into(), &"auto".into()));
    assert!(default["max_exposure_ms"].is_null() && default["flush_queue_slots"].is_null());

    // The waits: each policy has those of the kinds that it can have, and all together as many as
    // the driver counted. Shared syncs are the exception: they are polled, and mostly no thread
    // waits.
    for policy in MAPPING {
        let row = row(&json, 0, policy);
        let of = |kind: &str, figure| number(row, &format!("/sync_waits/{kind}/{figure}"));
        let (strict, shared) = (policy.starts_with("strict"), policy.ends_with("+map"));
        if !shared {
            let waited = of("map", "count") > 0.0 && of("map", "thread_fraction") > 0.0;
            assert!(waited, "{policy}: {row}");
            assert_eq!(of("unmap", "count") > 0.0, strict, "{policy}: {row}");
        }
        if strict {
            let flushes = ["timer", "full"].map(|kind| of(kind, "count"));
            assert_eq!(flushes, [0.0; 2], "{policy}: {row}");
        }
        assert!(of("map", "p50") <= of("map", "p99"), "{policy}: {row}");
        assert!(of("map", "total_ns") >= of("map", "count"), "{policy}: {row}");
        let kinds = ["map", "unmap", "timer", "full", "asked"];
        let waits: f64 = kinds.iter().map(|kind| of(kind, "per_io")).sum();
        let syncs = number(row, "/syncs_per_io");
        assert!(waits < 1.1 * syncs, "{policy}: {waits} of {syncs}");
        assert!(shared || waits > 0.9 * syncs, "{policy}: {waits} of {syncs}");
        // The timer waits in its own time, not in that of the job threads.
        assert!(row["sync_waits"]["timer"]["thread_fraction"].is_null(), "{policy}");
    }
    assert!(row(&json, 0, "off")["sync_waits"].is_null());

    // The probe looked, and found what the policies promise.
    for strict in ["strict", "strict+map", "bounce", "auto"] {
        let row = row(&json, 0, strict);
        assert!(number(row, "/stale_window/probes") > 0.0, "{strict}");
        assert_eq!(number(row, "/stale_window/accesses"), 0.0, "{strict}");
        assert_eq!(number(row, "/stale_window/max_ms"), 0.0, "{strict}");
    }
    // When it looks depends on the machine, but it does not always come too late.
    let lazy: Vec<&str> = POLICIES.into_iter().filter(|row| row.starts_with("lazy")).collect();
    let saw = |json: &Value| {
        let accesses = |policy: &&str| number(row(json, 0, policy), "/stale_window/accesses");
        lazy.iter().map(accesses).any(|accesses| accesses > 0.0)
    };
    let (begun, only) = (Instant::now(), ["--policy", &lazy.join(",")]);
    let mut seen = saw(&json);
    while !seen {
        assert!(begun.elapsed() < LIMIT, "no probe saw a lazy window: does it look at all?");
        seen = saw(&Place::new().measure(JOB, &only));
    }
}

#[test]
fn the_policies_differ_in_what_they_send_to_the_iommu() {
    // Each I/O on its own, and queues that are flushed when they are full: the result depends
    // neither on what happens to be ready at the same time, nor on the I/Os in a timer's interval.
    let rows = "off,strict,strict+map,lazy-sq,lazy-mq,lazy-sq+map,lazy-mq+map";
    let each = ["--repeat", "1", "--policy", rows, "--batch", "1", "--flush-queue-ms", "1000"];
    let json = Place::new().measure(JOB, &each);
    let of = |policy, path| number(row(&json, 0, policy), path);
    for lazy in ["lazy-sq+map", "lazy-mq+map"] {
        let syncs = ["strict", "strict+map", lazy].map(|policy| of(policy, "/syncs_per_io"));
        assert!(syncs[0] > syncs[1] && syncs[1] > syncs[2], "{lazy}: {syncs:?}");
        let requests = ["strict", "strict+map", lazy].map(|policy| of(policy, "/requests_per_io"));
        // A lazy unmap sends a request like a strict one: only the sync is postponed.
        assert!(requests[0] >= 0.99 * requests[2], "{lazy}: {requests:?}");
    }
    for lazy in ["lazy-sq", "lazy-mq"] {
        assert!(of(lazy, "/syncs_per_io") < of("strict", "/syncs_per_io"), "{lazy}");
    }
}

#[test]
fn the_table_has_a_row_for_each_policy_and_names_disk_and_notify_mode() {
    let ended = Place::new().compare(JOB, &["--repeat", "1", "--notify", "sleep", "--details"]);
    assert_eq!(ended.code(), 0, "{ended}");
    for policy in ["host"].iter().chain(&POLICIES) {
        let rows = ended.out.lines().filter(|line| line.split_whitespace().next() == Some(policy));
        let table = rows.filter(|line| line.contains('%')).count();
        assert_eq!(table, 1, "{policy}\n{ended}");
    }
    assert!(ended.out.contains("disk paced"), "{ended}");
    assert!(ended.out.contains("notify sleep"), "{ended}");
    // What `off` leaves open has no number.
    let line = ended.out.lines().find(|line| line.trim_start().starts_with("off ")).unwrap();
    assert!(line.contains(" open ") && ended.out.contains("lies  open"), "{ended}");
    assert!(ended.out.contains("\nwaits: strict map "), "{ended}");
    assert!(ended.out.contains("\nqueues: lazy-sq and lazy-mq: "), "{ended}");
    // Progress went to standard error, as plain lines.
    assert!(ended.err.contains("warm-up") && !ended.err.contains('\u{1b}'), "{ended}");
    assert!(!ended.out.contains("warm-up") && !ended.out.contains('\u{1b}'), "{ended}");
}

#[test]
fn the_first_table_has_eight_columns_and_an_advice() {
    let arguments = ["--repeat", "2", "--policy", "off,strict+map,lazy-mq+map", "--quiet"];
    let ended = Place::new().compare(JOB, &arguments);
    assert_eq!(ended.code(), 0, "{ended}");
    let of = |policy| {
        let first = |line: &&str| line.split_whitespace().next() == Some(policy);
        let line = ended.out.lines().find(first).unwrap_or_else(|| panic!("{policy}\n{ended}"));
        line.split_whitespace().collect::<Vec<_>>()
    };
    assert_eq!((of("off").len(), of("off")[7]), (8, "always"), "{ended}");
    assert_eq!((of("strict+map").len(), of("strict+map")[7]), (8, "never"), "{ended}");
    assert_eq!((of("lazy-mq+map").len(), of("lazy-mq+map")[8]), (9, "ms"), "{ended}");
    assert!(ended.out.contains("\nHere: strict+map. It kept "), "{ended}");
    assert!(ended.out.contains("--details"), "{ended}");
}

#[test]
fn a_bound_of_exposure_is_kept_and_reported() {
    let bounds = ["--max-exposure-bytes", "128k", "--max-exposure-ms", "100"];
    let arguments = ["--repeat", "1", "--policy", "off,lazy-sq+map"];
    let json = Place::new().measure(JOB, &[&arguments[..], &bounds].concat());
    assert_eq!(json["tuning"]["max_exposure_bytes"], 128 << 10);
    assert_eq!(json["tuning"]["max_exposure_ms"], 100);
    let row = row(&json, 0, "lazy-sq+map");
    // The second of two unmaps of 64 KiB cannot wait beside the first for long: there was a flush,
    // and not only after a second, as in a single queue without a bound.
    assert!(number(row, "/sync_waits/full/count") > 0.0, "{row}");
    let late = number(row, "/exposure/late_releases");
    assert!(number(row, "/exposure/max_ms") <= 100.0 || late > 0.0, "{row}");
    assert_eq!(row["exposure"]["reach"], "flush");
}

#[test]
fn only_the_named_rows_are_run_in_their_order() {
    let place = Place::new();
    let json = place.measure(JOB, &["--repeat", "1", "--policy", "lazy-mq,off"]);
    assert_eq!(policies(&json, 0), ["lazy-mq", "off"]);
}

#[test]
fn each_policy_that_maps_is_run_with_each_allocator_in_order() {
    let place = Place::new();
    let arguments = ["--repeat", "1", "--policy", "host,off,strict+map,lazy-mq"];
    let several = ["--allocator", "rbtree,bitmap,magazines,ringfence", "--json", "figures.json"];
    let ended = place.compare(JOB, &[&arguments[..], &several].concat());
    assert_eq!(ended.code(), 0, "{ended}");
    let json: Value = serde_json::from_str(&place.read("figures.json")).unwrap();
    assert!(common::errors_of(&json).is_empty(), "{ended}");
    let rows: Vec<(&str, &Value)> = json["jobs"][0]["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["policy"].as_str().unwrap(), &row["allocator"]))
        .collect();
    let names = ["rbtree", "bitmap", "magazines", "ringfence"].map(Value::from);
    let of = |policy| names.iter().map(move |name| (policy, name));
    let mut wanted = vec![("host", &Value::Null), ("off", &Value::Null)];
    wanted.extend(of("strict+map").chain(of("lazy-mq")));
    assert_eq!(rows, wanted);
    // The table shows both names.
    for name in ["strict+map/rbtree", "strict+map/ringfence", "lazy-mq/bitmap"] {
        let row = |line: &&str| line.split_whitespace().next() == Some(name);
        assert_eq!(ended.out.lines().filter(row).count(), 1, "{name}\n{ended}");
    }
}

#[test]
fn the_report_is_one_file_that_needs_no_other() {
    let place = Place::new();
    let ended = place.compare(
        JOB,
        &["--repeat", "1", "--quiet", "--report", "report.html", "--json", "figures.json"],
    );
    assert_eq!(ended.code(), 0, "{ended}");
    assert_eq!(ended.err, "", "--quiet\n{ended}");
    let page = place.read("report.html");
    for policy in ["host"].iter().chain(&POLICIES) {
        assert!(page.contains(policy), "{policy}");
    }
    for part in ["paced", "adaptive", "<svg", "pages", "The price of safety", "class=\"frontier\""]
    {
        assert!(page.contains(part), "{part}");
    }
    // A name space is an address that nothing is fetched from.
    let page = page.replace("http://www.w3.org/", "");
    for outside in ["http://", "https://", "src=", "<link", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    let json: Value = serde_json::from_str(&place.read("figures.json")).unwrap();
    assert_eq!(json["schema"], "ringfence.compare/1");
    assert!(ended.out.contains("off"), "the table is printed all the same\n{ended}");
}

#[test]
fn a_warning_is_printed_once_where_both_streams_are_one() {
    use std::process::Command;
    let place = Place::new();
    let job = place.write("job.fio", format!("{JOB}iodepth_low=1\n"));
    let log = std::fs::File::create(place.path("log")).unwrap();
    let status = Command::new(env!("CARGO_BIN_EXE_ringfence"))
        .args(["compare", "--repeat", "1", "--policy", "off"])
        .arg(job)
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .status()
        .unwrap();
    let log = place.read("log");
    assert_eq!(status.code(), Some(0), "{log}");
    assert_eq!(log.matches("iodepth_low").count(), 1, "{log}");
    assert!(log.contains("warm-up") && log.contains("notify adaptive"), "{log}");
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    use std::process::{Command, Stdio};
    let place = Place::new();
    let job = place.write("job.fio", JOB);
    let mut child = Command::new(env!("CARGO_BIN_EXE_ringfence"))
        .args(["compare", "--quiet", "--repeat", "1", "--policy", "off", "--json", "-"])
        .arg(job)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_disk_behind_a_proxy_reaches_copies_and_its_row_advises_nothing() {
    let place = Place::new();
    let json = place.measure(JOB, &["--repeat", "1", "--policy", "off,proxy"]);
    assert_eq!(policies(&json, 0), ["off", "proxy"]);
    let row = row(&json, 0, "proxy");
    assert!(number(row, "/ratio_to_off/iops/median") > 0.0);
    assert_eq!(row["errors"], 0);
    assert_eq!(row["exposure"]["reach"], "copies");
    // What no probe has tried is no finding.
    assert_eq!(row["exposure"]["max_ms"], Value::Null);
    assert_eq!(row["stale_window"], Value::Null);
    let ended = place.compare(JOB, &["--repeat", "1", "--policy", "off,proxy"]);
    assert_eq!(ended.code(), 0, "{ended}");
    let line = ended.out.lines().find(|line| line.trim_start().starts_with("proxy ")).unwrap();
    assert!(line.ends_with(" copies"), "{ended}");
    assert!(!ended.out.contains("Here:"), "{ended}");
}

#[test]
fn what_stays_mapped_sends_no_request_and_is_never_called_strict() {
    let json = Place::new().measure(JOB, &["--repeat", "1", "--policy", "off,persistent"]);
    let row = row(&json, 0, "persistent");
    assert_eq!(number(row, "/requests_per_io"), 0.0);
    assert_eq!(number(row, "/syncs_per_io"), 0.0);
    assert_eq!(row["exposure"]["reach"], "persistent");
    assert_eq!(row["exposure"]["byte_ms_per_gib"], Value::Null);
    assert_eq!(row["stale_window"], Value::Null, "nothing is unmapped that could be probed");
    assert_eq!(row["errors"], 0);
}

#[test]
fn an_untrusted_disk_is_strict_whatever_the_policy_and_the_reason_is_reported() {
    // rule L28
    let place = Place::new();
    let rows = ["--repeat", "1", "--policy", "off,lazy-mq+map,strict", "--trust", "untrusted"];
    let json = place.measure(JOB, &rows);
    let lazy = row(&json, 0, "lazy-mq+map");
    assert!(lazy["fallback"].as_str().unwrap().contains("untrusted"), "{}", lazy["fallback"]);
    assert_eq!(lazy["exposure"]["reach"], "none");
    assert_eq!(number(lazy, "/stale_window/max_ms"), 0.0);
    assert_eq!(row(&json, 0, "strict")["fallback"], Value::Null);
    let warnings = json["warnings"].to_string();
    assert!(warnings.contains("off is run all the same"), "{warnings}");
}

#[test]
fn requests_that_are_submitted_together_share_their_syncs_and_neighbours_their_mapping() {
    // All of a round's I/Os are submitted together; they may complete at any time.
    const IOS: u32 = 256;
    let job = "[pages]\nrw=randrw\nbs=64k\nsize=16m\niodepth=256\n";
    let rows = ["--repeat", "1", "--policy", "off,strict+map", "--page-run", "512"];
    let together = Place::new().measure(job, &rows);
    let each = Place::new().measure(job, &[&rows[..], &["--batch", "1"]].concat());
    // A probe, too, is a MAP and an UNMAP with a sync each.
    let of = |json: &Value, path: &str| {
        let row = row(json, 0, "strict+map");
        number(row, path) - 2.0 * probes_per_io(row, IOS)
    };
    // One MAP and one UNMAP an I/O, and a sync each.
    for path in ["/syncs_per_io", "/requests_per_io"] {
        let (each, together) = (of(&each, path), of(&together, path));
        assert!((1.9..2.1).contains(&each) && together < each - 0.5, "{path}: {each} {together}");
    }
}
