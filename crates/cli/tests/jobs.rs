//! Typical jobs, under all policies: every byte that is read is right.

mod common;

use std::path::Path;

use common::{POLICIES, Place, number, policies, probes_per_io, row};

/// As short as possible, while something is still measured.
const SHORT: [&str; 4] = ["--repeat", "1", "--runtime", "0.05"];

fn job(lines: &str) -> String {
    let lines = lines.replace(' ', "\n");
    format!("[job]\nrw=randrw\nsize=8m\niodepth=8\ntime_based\nruntime=50ms\n{lines}\n")
}

fn all_rows(lines: &str, arguments: &[&str]) -> serde_json::Value {
    Place::new().measure(&job(lines), &[&SHORT[..], arguments].concat())
}

/// One round of as many I/Os as `ios`, however long they take.
fn one_pass(ios: u32, bs: &str, arguments: &[&str]) -> serde_json::Value {
    let size = ios * bs.trim_matches(|c: char| !c.is_ascii_digit()).parse::<u32>().unwrap();
    let job = format!("[job]\nrw=randrw\n{bs}\nsize={size}k\niodepth=8\n");
    Place::new().measure(&job, &[&["--repeat", "1"], arguments].concat())
}

/// The requests of a strict row's own I/Os to the IOMMU: the probe's page is mapped and unmapped,
/// too.
fn requests_per_io(json: &serde_json::Value, ios: u32, policy: &str) -> f64 {
    let row = row(json, 0, policy);
    number(row, "/requests_per_io") - 2.0 * probes_per_io(row, ios)
}

#[test]
fn the_shipped_examples_run() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let mut count = 0;
    for entry in std::fs::read_dir(examples).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "fio") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let rows = ["--policy", "host,off,strict,lazy-mq+map"];
        Place::new().measure(&text, &[&SHORT[..], &rows].concat());
        count += 1;
    }
    assert!(count >= 5, "{count} examples");
}

#[test]
fn jobs_without_stonewall_run_at_the_same_time_and_are_distinguished() {
    let text = "[log]\nrw=write\nbs=16k\nsize=4m\niodepth=2\n\
                [pages]\nrw=randrw\nbs=8k\noffset=4m\nsize=8m\niodepth=8\nnumjobs=2\n\
                [after]\nstonewall\nrw=randread\nbs=4k\nsize=12m\n";
    let json = Place::new().measure(text, &[&SHORT[..], &["--queues", "2"]].concat());
    let jobs = json["jobs"].as_array().unwrap();
    let stages: Vec<_> = jobs.iter().map(|job| job["stage"].as_u64().unwrap()).collect();
    assert_eq!(stages, [1, 1, 2]);
    for index in 0..3 {
        assert_eq!(policies(&json, index).len(), 1 + POLICIES.len());
    }
}

#[test]
fn every_notify_mode_works_with_several_queues() {
    for notify in ["adaptive", "poll", "sleep"] {
        let json = all_rows("bs=4k numjobs=4", &["--queues", "2", "--notify", notify]);
        assert_eq!(json["notify"], notify);
    }
}

#[test]
fn a_disk_in_memory_adds_the_io_uring_row() {
    let json = all_rows("bs=16k", &["--disk", "ram"]);
    assert_eq!(policies(&json, 0), [&["host", "io_uring"], &POLICIES[..]].concat());
    assert!(json["disk"].as_str().unwrap().contains("RAM"));
}

#[test]
fn clones_that_overlap_never_read_torn_blocks() {
    for disk in ["ram", "paced"] {
        let lines = "bs=4k size=256k numjobs=4 norandommap";
        all_rows(lines, &["--disk", disk, "--queues", "2", "--policy", "off,strict,lazy-sq"]);
    }
}

#[test]
fn blocks_may_be_small_large_or_of_two_sizes() {
    all_rows("bs=512", &[]);
    all_rows("bs=4k,64k", &[]);
    all_rows("bs=8m size=64m iodepth=2 rw=rw", &["--policy", "host,off,strict+map,lazy-mq"]);
    all_rows("bs=16m size=64m iodepth=1 rw=read", &["--policy", "off,strict+map"]);
}

#[test]
fn pages_of_a_buffer_may_lie_side_by_side() {
    let requests = |run: &str| {
        let rows = ["--policy", "off,strict+map,strict", "--page-run", run];
        requests_per_io(&one_pass(256, "bs=64k", &rows), 256, "strict")
    };
    let (alone, together) = (requests("1"), requests("16"));
    assert!(alone > 8.0 && together < 4.0, "{alone} {together}");
}

#[test]
fn busy_threads_beside_it_get_their_part_under_every_row() {
    let json = all_rows("bs=4k", &["--policy", "off,strict+map", "--load", "3"]);
    assert_eq!(json["load_threads"], 3);
    for row in json["jobs"][0]["results"].as_array().unwrap() {
        // By two clocks that are read one after the other: on a busy machine any time passes in
        // between.
        let part = row["load_fraction"].as_f64().unwrap();
        assert!(part >= 0.0, "{part}");
    }
}

#[test]
fn a_buffer_smaller_than_a_page_is_one_map_and_one_unmap() {
    // Each on its own: adjacent addresses would be unmapped as one.
    let rows = ["--policy", "off,strict,strict+map", "--batch", "1"];
    let json = one_pass(1024, "bs=1k", &rows);
    for policy in ["strict", "strict+map"] {
        let requests = requests_per_io(&json, 1024, policy);
        assert!((1.95..2.05).contains(&requests), "{policy}: {requests}");
    }
}

#[test]
fn any_allocator_serves_any_aperture_and_an_aged_space() {
    let all =
        ["--allocator", "rbtree,bitmap,magazines,ringfence", "--policy", "strict+map,lazy-mq"];
    for aperture in ["32", "57"] {
        let arguments = ["--aperture", aperture, "--live", "5000"];
        let json = all_rows("bs=4k,64k", &[&all[..], &arguments].concat());
        assert_eq!(json["aperture_bits"].to_string(), aperture);
        assert_eq!(json["live_ranges"], 5000);
    }
    for placement in ["size", "lowest", "highest", "ring"] {
        let arguments = ["--policy", "strict+map,lazy-mq", "--placement", placement];
        assert_eq!(all_rows("bs=4k,64k", &arguments)["placement"], placement);
    }
}

#[test]
fn queues_may_be_shallow_deep_and_many() {
    all_rows("bs=4k iodepth=1", &[]);
    // Deeper than a virtqueue: what does not fit waits.
    all_rows("bs=4k iodepth=2000", &["--policy", "host,off,strict+map,lazy-mq"]);
    // More queues than clones, and more clones than queues.
    all_rows("bs=4k numjobs=2", &["--queues", "8", "--policy", "off,strict"]);
    all_rows("bs=4k numjobs=9", &["--queues", "2", "--policy", "off,strict"]);
}

#[test]
fn flush_queues_are_as_given() {
    let slots = ["--flush-queue-slots", "4", "--flush-queue-ms", "1"];
    let rows = ["--policy", "lazy-sq,lazy-mq,lazy-sq+map,lazy-mq+map"];
    all_rows("bs=4k", &[&slots[..], &rows].concat());
}

#[test]
fn a_job_that_is_not_time_based_ends_by_itself() {
    let text = "[pass]\nrw=randwrite\nbs=64k\nsize=4m\niodepth=4\n";
    let rows = ["--repeat", "2", "--policy", "host,off,strict,lazy-mq"];
    let json = Place::new().measure(text, &rows);
    assert_eq!(json["jobs"][0]["rounds"], 2);
    // So small that it is over at once.
    let text = "[pass]\nrw=randread\nbs=4k\nsize=16k\n";
    Place::new().measure(text, &rows);
}

#[test]
fn a_job_ends_after_its_own_time_beside_a_longer_one() {
    let text = "[global]\nrw=randwrite\nbs=4k\nsize=4m\niodepth=4\ntime_based\n\
                [short]\nruntime=100ms\n[long]\noffset=4m\nruntime=800ms\n";
    let rows = ["--repeat", "1", "--policy", "host,off,strict+map"];
    let json = Place::new().measure(text, &rows);
    assert_eq!(json["runtime_s"], 0.8);
}
