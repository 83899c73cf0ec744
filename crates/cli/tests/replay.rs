//! `replay`, as a user runs it: on the recordings that we ship, and on damaged copies of them.

mod common;

use std::{
    fs,
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use common::{Ended, LIMIT, MAPPING, Place, number};
use rustix::process::Signal;
use serde_json::Value;

/// A recording that we ship, with what `grep -c` counts in it.
struct Shipped {
    name: &'static str,
    format: &'static str,
    lines: u64,
    maps: u64,
    unmaps: u64,
}

const QEMU: Shipped = Shipped {
    name: "qemu7-viommu-nvme-strict-a.log.gz",
    format: "qemu-virtio-iommu",
    lines: 69_597,
    maps: 24_514,
    unmaps: 20_509,
};
const NET: Shipped = Shipped {
    name: "guest-ftrace-net-intel-lazy-n.txt.gz",
    format: "ftrace",
    lines: 47_808,
    maps: 24_015,
    unmaps: 23_778,
};
const NVME: Shipped = Shipped {
    name: "guest-ftrace-nvme-intel-lazy-a.txt.gz",
    format: "ftrace",
    lines: 55_694,
    maps: 28_920,
    unmaps: 26_762,
};

impl Shipped {
    fn path(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/traces").join(self.name)
    }

    fn name(&self) -> String {
        self.path().to_str().unwrap().to_owned()
    }
}

/// A short recording of two domains: seven lines.
const SHORT: &str = "\
7@1.000000:virtio_iommu_attach domain=0 endpoint=16
7@1.000100:virtio_iommu_map domain=0 virt_start=0x1000 virt_end=0x1fff phys_start=0x8000 flags=3
7@1.000200:virtio_iommu_map domain=0 virt_start=0x2000 virt_end=0x2fff phys_start=0x4000 flags=3
7@1.000300:virtio_iommu_map domain=1 virt_start=0x1000 virt_end=0x1fff phys_start=0x9000 flags=3
7@1.000400:virtio_iommu_unmap domain=0 virt_start=0x1000 virt_end=0x2fff
7@1.000500:virtio_iommu_unmap_done domain=0 virt_start=0x1000 virt_end=0x1fff
7@1.000501:virtio_iommu_unmap_done domain=0 virt_start=0x2000 virt_end=0x2fff
";

const QUICK: [&str; 3] = ["--repeat", "1", "--quiet"];

fn json(ended: &Ended) -> Value {
    assert_eq!(ended.code(), 0, "{ended}");
    let json: Value = serde_json::from_str(&ended.out)
        .unwrap_or_else(|error| panic!("standard output is not JSON: {error}\n{ended}"));
    assert_eq!(json["schema"], "ringfence.replay/1");
    json
}

/// A replay that must succeed; returns its JSON, with nothing else on standard output.
fn replay(place: &Place, arguments: &[&str]) -> Value {
    json(&place.run(&[&["replay"], &QUICK[..], &["--json", "-"], arguments].concat()))
}

fn count(value: &Value, path: &str) -> u64 {
    value.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path}: {value:#}"))
}

fn names<'a>(rows: &'a Value, key: &str) -> Vec<&'a str> {
    rows.as_array().unwrap().iter().map(|row| row[key].as_str().unwrap()).collect()
}

#[test]
fn every_recording_that_we_ship_is_replayed_completely() {
    let place = Place::new();
    let files = [QEMU.name(), NET.name(), NVME.name()];
    let json = replay(&place, &files.each_ref().map(String::as_str));
    assert_eq!(json["warnings"].as_array().unwrap().len(), 0, "{}", json["warnings"]);
    for (shipped, trace) in [QEMU, NET, NVME].iter().zip(json["traces"].as_array().unwrap()) {
        assert_eq!(trace["file"], shipped.name());
        assert_eq!(trace["format"], shipped.format);
        assert_eq!(trace["complete"], true);
        assert_eq!(count(trace, "/lines"), shipped.lines);
        assert_eq!(count(trace, "/damaged"), 0);
        assert_eq!(
            (count(trace, "/maps"), count(trace, "/unmaps")),
            (shipped.maps, shipped.unmaps)
        );
        let of = |key: &str| count(trace, key);
        // Each unmap of these guests frees one allocation.
        assert_eq!(of("/frees"), shipped.unmaps);
        assert_eq!(of("/allocations"), of("/frees") + of("/live_at_end"));
        assert_eq!(of("/operations"), of("/allocations") + of("/frees"));
        assert_eq!(trace["domains"], 1);
        assert!((1.0..10.0).contains(&number(trace, "/seconds")));

        let rows = trace["allocators"].as_array().unwrap();
        let expected = ["recorded", "rbtree", "bitmap", "magazines", "ringfence"];
        assert_eq!(names(&trace["allocators"], "impl"), expected);
        for row in rows {
            assert_eq!(count(row, "/failures"), 0, "{row:#}");
            // With every allocator the same ranges are in use.
            assert_eq!(count(row, "/peak_live_ranges"), of("/peak_live_ranges"));
            assert_eq!(count(row, "/peak_live_bytes"), of("/peak_live_bytes"));
            assert!(count(row, "/span_bytes") >= of("/peak_live_bytes"));
            assert!(count(row, "/table_pages") > 0);
            let moments = row["fragmentation_over_time"].as_array().unwrap();
            assert_eq!(moments.len(), 20);
            let last = moments.last().unwrap();
            assert_eq!(number(last, "/seconds"), number(trace, "/seconds"));
        }
        assert!(rows[0]["ns_per_op"].is_null());
        for row in &rows[1..] {
            for key in ["ns_per_op", "alloc_ns", "free_ns", "p99_ns", "worst_ns"] {
                assert!(number(row, &format!("/{key}/median")) >= 0.0, "{key}: {row:#}");
            }
            assert!(number(row, "/worst_steady_ns") >= 0.0, "{row:#}");
            assert!(number(row, "/ratio_to_ringfence/median") > 0.0);
        }

        let rows = trace["policies"].as_array().unwrap();
        assert_eq!(names(&trace["policies"], "policy"), [&["recorded"], MAPPING].concat());
        assert_eq!(count(&rows[0], "/map_requests"), shipped.maps);
        for row in &rows[1..] {
            assert_eq!(row["effective_policy"], row["policy"]);
            assert_eq!(count(row, "/failures"), 0);
            // Physically contiguous pieces are mapped as one; an unmap is as recorded.
            assert!(count(row, "/map_requests") <= shipped.maps);
            assert!(count(row, "/map_requests") >= of("/allocations"));
            assert_eq!(count(row, "/unmap_requests"), shipped.unmaps);
            let lazy = row["policy"].as_str().unwrap().starts_with("lazy");
            let syncs = if lazy { 0 } else { shipped.unmaps };
            assert_eq!(count(row, "/unmap_syncs"), syncs);
            assert_eq!(count(row, "/flushes") > 0, lazy);
            assert_eq!(number(row, "/max_deferred_ms") > 0.0, lazy);
            if row["policy"].as_str().unwrap().ends_with("+map") {
                assert_eq!(count(row, "/map_syncs"), of("/allocations"));
            } else {
                assert_eq!(count(row, "/map_syncs"), count(row, "/map_requests"));
            }
        }
    }
}

#[test]
fn the_table_has_a_row_for_each_and_goes_to_standard_output() {
    let place = Place::new();
    let ended = place.run(&["replay", &NVME.name(), "--repeat", "2", "--json", "out.json"]);
    assert_eq!(ended.code(), 0, "{ended}");
    for row in ["recorded", "rbtree", "bitmap", "magazines", "ringfence", "strict+map", "lazy-mq"] {
        let found = ended.out.lines().any(|line| line.trim_start().starts_with(row));
        assert!(found, "{row}\n{ended}");
    }
    assert!(ended.err.contains("rounds, about"), "{ended}");
    let json: Value = serde_json::from_str(&place.read("out.json")).unwrap();
    assert_eq!((json["rounds"].as_u64(), json["interrupted"].as_bool()), (Some(2), Some(false)));
}

#[test]
fn allocators_policies_and_the_aperture_are_chosen() {
    let place = Place::new();
    place.write("short.log", SHORT);
    let json = replay(
        &place,
        &[
            "short.log",
            "--allocator",
            "bitmap,ringfence",
            "--policy",
            "off,strict",
            "--aperture",
            "39",
            "--placement",
            "lowest",
        ],
    );
    let trace = &json["traces"][0];
    assert_eq!(names(&trace["allocators"], "impl"), ["recorded", "bitmap", "ringfence"]);
    assert_eq!(names(&trace["policies"], "policy"), ["recorded", "off", "strict"]);
    assert_eq!((&trace["aperture_bits"], &trace["placement"]), (&39.into(), &"lowest".into()));
    assert_eq!((count(trace, "/domains"), count(trace, "/attached")), (2, 1));
    assert_eq!((count(trace, "/allocations"), count(trace, "/frees")), (2, 1));
    assert_eq!(count(trace, "/policies/1/map_requests"), 0);
    assert_eq!(count(trace, "/policies/2/map_requests"), 3);
    assert_eq!(count(trace, "/policies/2/unmap_syncs"), 1);
}

#[test]
fn a_damaged_line_is_named_and_skipped() {
    let place = Place::new();
    place.write("short.log", SHORT.replace("virt_end=0x2fff phys", "virt_end=0x2ffg phys"));
    let ended = place.run(&["replay", "short.log", "--repeat", "1"]);
    assert_eq!(ended.code(), 0, "{ended}");
    for text in [&ended.out, &ended.err] {
        assert!(text.contains("short.log:3:") && text.contains("0x2ffg"), "{ended}");
    }
    assert!(ended.out.contains("7 lines, 1 damaged"), "{ended}");
    let json = replay(&place, &["short.log"]);
    assert_eq!(count(&json, "/traces/0/damaged"), 1);
    assert_eq!(count(&json, "/traces/0/maps"), 2);
    // Only the first few are reported.
    place.write("bad.log", SHORT.to_owned() + &"nonsense\n".repeat(1000));
    let json = replay(&place, &["bad.log"]);
    assert_eq!(count(&json, "/traces/0/damaged"), 1000);
    assert_eq!(json["warnings"].as_array().unwrap().len(), 6);
    assert!(json["warnings"][5].as_str().unwrap().contains("995 more"));
}

#[test]
fn what_was_left_out_is_counted() {
    let place = Place::new();
    let odd = SHORT.to_owned()
        + "7@2.0:virtio_iommu_unmap domain=0 virt_start=0x1000 virt_end=0x2fff\n"
        + "7@2.1:virtio_iommu_map domain=1 virt_start=0x0 virt_end=0xffff phys_start=0x0 flags=1\n";
    place.write("odd.log", odd);
    let json = replay(&place, &["odd.log"]);
    assert_eq!(count(&json, "/traces/0/left_out/unmaps_of_nothing"), 1);
    assert_eq!(count(&json, "/traces/0/left_out/maps_of_mapped"), 1);
    assert_eq!(json["warnings"].as_array().unwrap().len(), 2, "{}", json["warnings"]);
}

#[test]
fn of_a_damaged_gzip_what_can_be_read_is_replayed() {
    let place = Place::new();
    let whole = fs::read(QEMU.path()).unwrap();
    let mut broken = whole.clone();
    let middle = whole.len() / 2;
    broken[middle..middle + 64].fill(0);
    for damaged in [&whole[..whole.len() / 2], &broken] {
        place.write("damaged.gz", damaged);
        let json = replay(&place, &["damaged.gz"]);
        let trace = &json["traces"][0];
        assert_eq!(trace["complete"], false);
        assert!((10_000..QEMU.lines).contains(&count(trace, "/lines")));
        assert!(json["warnings"].to_string().contains("damaged.gz: read up to line"));
    }
    // Too little of it.
    place.write("damaged.gz", &whole[..20]);
    place.run(&["replay", "damaged.gz"]).refused(&["damaged.gz", "gzip data end too early"]);
}

#[test]
fn a_file_that_is_not_a_recording_is_refused_before_anything_runs() {
    let place = Place::new();
    place.write("short.log", SHORT);
    place.write("empty", "");
    place.write("text", "Dear reader,\n\nnothing here.\n");
    place.write("binary", [0u8, 159, 146, 150].repeat(1000));
    place.write("iotlb", "0.1 IOTLB type=2 iova=0x0 size=0x1000 uaddr=0x1 perm=3 need_reply=1\n");
    for (name, words) in [
        ("empty", "it is empty"),
        ("text", "none of its 3 lines"),
        ("binary", "none of its"),
        ("iotlb", "vhost-user IOTLB"),
    ] {
        let ended = place.run(&["replay", "short.log", name]);
        ended.refused(&[name, words, "virtio_iommu_map", "iommu:map"]);
    }
    place.run(&["replay", "short.log", "nowhere.gz"]).refused(&["nowhere.gz", "No such file"]);
    place.run(&["replay", "."]).refused(&[".", "directory"]);
}

#[test]
fn a_line_without_end_is_not_read_for_ever() {
    Place::new().run(&["replay", "/dev/zero"]).refused(&["/dev/zero", "not text"]);
}

#[test]
fn wrong_usage_is_refused_with_what_would_be_right() {
    let place = Place::new();
    place.write("short.log", SHORT);
    let refused = |arguments: &[&str], words: &[&str]| {
        place.run(&[&["replay", "short.log"], arguments].concat()).refused(words);
    };
    refused(&["--allocator", "tree"], &["tree", "rbtree", "magazines"]);
    refused(&["--allocator", "rbtree,rbtree"], &["twice"]);
    refused(&["--policy", "lazy"], &["lazy-mq+map"]);
    refused(&["--policy", "strict,strict"], &["twice"]);
    // A recording has no data to copy.
    refused(&["--policy", "strict,bounce"], &["bounce cannot be replayed", "ringfence compare"]);
    refused(&["--policy", "auto"], &["auto cannot be replayed", "no data"]);
    refused(&["--placement", "middle"], &["middle", "size, lowest, highest"]);
    // A recording does not show the buffers that `compare` knows.
    refused(&["--placement", "ring"], &["ring", "size, lowest, highest"]);
    refused(&["--aperture", "65"], &["65"]);
    refused(&["--aperture", "12"], &["12"]);
    refused(&["--repeat", "0"], &["0"]);
    refused(&["--json", "no/such/folder/out.json"], &["no/such/folder"]);
    place.run(&["replay", "-", "-"]).refused(&["twice"]);
    // Nothing on standard input.
    place.run(&["replay", "-"]).refused(&["- is not a recording", "empty"]);
    assert_eq!(place.run(&["replay"]).code(), 2);
}

#[test]
fn standard_input_is_a_recording_too() {
    let run = |input: Stdio| {
        let output = Command::new(env!("CARGO_BIN_EXE_ringfence"))
            .args(["replay", "-", "--repeat", "1", "--quiet", "--json=-"])
            .args(["--allocator=ringfence", "--policy=strict"])
            .stdin(input)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        (count(&json, "/traces/0/maps"), count(&json, "/traces/0/lines"))
    };
    assert_eq!(run(File::open(NVME.path()).unwrap().into()), (NVME.maps, NVME.lines));
    let place = Place::new();
    let path = place.write("short.log", SHORT);
    assert_eq!(run(File::open(path).unwrap().into()), (3, 7));
}

#[test]
fn ctrl_c_ends_it_with_what_is_complete() {
    let place = Place::new();
    let file = NVME.name();
    let mut running = place.start(&["replay", &file, "--repeat", "1000", "--json", "out.json"]);
    running.wait_for(|line| line.contains(", round "));
    running.signal_group(Signal::INT);
    let ended = running.wait();
    assert_eq!(ended.code(), 1, "{ended}");
    assert!(ended.err.contains("interrupted: the figures are of what was complete"), "{ended}");
    assert!(ended.out.contains("ringfence"), "{ended}");
    let json: Value = serde_json::from_str(&place.read("out.json")).unwrap();
    assert_eq!(json["interrupted"], true);
    assert!(count(&json, "/traces/0/rounds") < 1000);
    assert_eq!(count(&json, "/traces/0/allocators/0/failures"), 0);
}

#[test]
fn ctrl_c_ends_waiting_for_a_recording_that_does_not_come() {
    let place = Place::new();
    let fifo = place.path("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let mut running = place.start(&["replay", "fifo"]);
    // It waits: it has opened the FIFO, which has no writer.
    let begun = Instant::now();
    while !running.process().has_open(&fifo) {
        assert!(running.is_running() && begun.elapsed() < LIMIT, "it is not opened");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(running.is_running());
    running.signal_group(Signal::INT);
    let ended = running.wait();
    assert_eq!(ended.code(), 1, "{ended}");
    assert!(ended.err.contains("interrupted"), "{ended}");
    assert_eq!(ended.out, "", "{ended}");
}
