//! Wrong usage: reported clearly, found before anything runs, exit code 2.

mod common;

use std::fs;

use common::{POLICIES, Place, bytes_of};

const READS: &str = "[reads]\nrw=randread\nbs=4k\nsize=1m\ntime_based\nruntime=50ms\n";
const WRITES: &str = "[writes]\nrw=randwrite\nbs=4k\nsize=1m\ntime_based\nruntime=50ms\n";
/// The shortest possible run.
const SHORT: [&str; 5] = ["--repeat", "1", "--quiet", "--policy", "off"];

#[test]
fn a_job_file_that_is_not_there_is_named() {
    Place::new().run(&["compare", "nowhere.fio"]).refused(&["nowhere.fio"]);
    Place::new().run(&["compare", "/"]).refused(&["/", "directory"]);
}

#[test]
fn a_wrong_value_is_found_with_its_line() {
    let place = Place::new();
    place.compare("[global]\n\n[a]\nbs=4x\n", &[]).refused(&["job.fio:4:", "bs", "4x"]);
    place.compare("[a]\nrw=sideways\n", &[]).refused(&["job.fio:2:", "sideways", "randread"]);
    place.compare("# nothing\n", &[]).refused(&["job.fio:", "no job"]);
}

#[test]
fn an_unknown_key_is_named_once_and_the_run_goes_on() {
    let place = Place::new();
    let job = format!("{READS}iodepth_batch=3\niodepth_batch=4\n");
    let ended = place.compare(&job, &["--repeat", "1", "--policy", "off"]);
    assert_eq!(ended.code(), 0, "{ended}");
    // Both streams are separate pipes here, so each is read on its own.
    for text in [&ended.out, &ended.err] {
        assert_eq!(text.matches("iodepth_batch").count(), 1, "{ended}");
        assert!(text.contains("job.fio:7:"), "{ended}");
    }
}

#[test]
fn a_job_that_cannot_fit_says_what_to_lower() {
    let job = "[huge]\nrw=randwrite\nbs=16m\niodepth=4096\nnumjobs=64\n";
    Place::new().compare(job, &[]).refused(&["job.fio", "TiB", "lower iodepth"]);
}

#[test]
fn an_unknown_policy_is_refused_with_the_known_names() {
    let place = Place::new();
    let ended = place.run(&["compare", "--policy", "off,strictest"]);
    ended.refused(&["strictest", "host", "io_uring", "persistent", "zero-copy"]);
    ended.refused(&POLICIES);
    place.run(&["compare", "--policy", "off,off"]).refused(&["twice"]);
    place.run(&["compare", "--policy", ","]).refused(&["empty"]);
}

#[test]
fn an_unknown_allocator_or_placement_is_refused_with_the_known_names() {
    let place = Place::new();
    let names = ["rbtree", "bitmap", "magazines", "ringfence"];
    let ended = place.run(&["compare", "--allocator", "ringfence,buddy"]);
    ended.refused(&["--allocator", "buddy"]);
    ended.refused(&names);
    place.run(&["compare", "--allocator", "rbtree,rbtree"]).refused(&["twice"]);
    place.run(&["compare", "--allocator", ","]).refused(&["empty"]);
    let ended = place.run(&["compare", "--placement", "left"]);
    ended.refused(&["--placement", "left", "size", "lowest", "highest", "ring"]);
    // None of these allocators has placements.
    let arguments = ["--allocator", "rbtree,bitmap", "--placement", "lowest"];
    place.compare(READS, &arguments).refused(&["lowest", "ringfence"]);
}

#[test]
fn more_ranges_than_the_aperture_has_room_for_are_refused() {
    let arguments = ["--aperture", "32", "--live", "200000"];
    Place::new().compare(READS, &arguments).refused(&["200000", "32 bits", "room for 104857"]);
}

#[test]
fn a_bound_that_has_no_effect_or_cannot_be_kept_is_refused() {
    let place = Place::new();
    for (option, value) in
        [("--max-exposure-ms", "5"), ("--max-exposure-bytes", "1m"), ("--high-water", "200")]
    {
        let arguments = ["--policy", "off,strict+map", option, value];
        place.compare(READS, &arguments).refused(&[option, "lazy"]);
    }
    let arguments = ["--flush-queue-slots", "256", "--high-water", "256"];
    place.compare(READS, &arguments).refused(&["high-water mark of 256", "from 1 to 255"]);
    place.run(&["compare", "--trust", "no"]).refused(&["--trust", "auto, trusted, untrusted"]);
}

#[test]
fn bounds_of_copies_and_an_explanation_need_a_row_they_are_of() {
    let place = Place::new();
    for rows in ["off,strict+map", "auto", "zero-copy"] {
        let arguments = ["--policy", rows, "--bounce-threshold", "64k"];
        place.compare(READS, &arguments).refused(&["--bounce-threshold", "bounce"]);
    }
    let arguments = ["--policy", "off,lazy-mq,persistent", "--bounce-quota", "1m"];
    place.compare(READS, &arguments).refused(&["--bounce-quota", "zero-copy", "untrusted"]);
    let arguments = ["--policy", "off,bounce", "--explain"];
    place.compare(READS, &arguments).refused(&["--explain", "auto"]);
}

#[test]
fn numbers_out_of_range_are_refused() {
    let place = Place::new();
    for (option, value) in [
        ("--repeat", "0"),
        ("--repeat", "-1"),
        ("--runtime", "0"),
        ("--runtime", "nan"),
        ("--runtime", "soon"),
        ("--queues", "0"),
        ("--queues", "65"),
        ("--page-run", "0"),
        ("--flush-queue-slots", "1"),
        ("--flush-queue-ms", "0"),
        ("--high-water", "0"),
        ("--max-exposure-ms", "0"),
        ("--max-exposure-bytes", "4095"),
        ("--max-exposure-bytes", "64kb"),
        ("--max-exposure-bytes", "-1"),
        ("--bounce-threshold", "511"),
        ("--bounce-threshold", "64kb"),
        ("--bounce-quota", "4095"),
        ("--bounce-quota", "0"),
        ("--bounce-quota", "all"),
        ("--batch", "0"),
        ("--batch", "1025"),
        ("--chunk", "0"),
        ("--trust", "maybe"),
        ("--notify", "loudly"),
        ("--aperture", "31"),
        ("--aperture", "58"),
        ("--aperture", "wide"),
        ("--live", "-1"),
        ("--live", "1000001"),
    ] {
        let value = format!("{option}={value}");
        place.run(&["compare", &value]).refused(&[option]);
    }
    place.run(&["compare", "--no-such-option"]).refused(&["--no-such-option"]);
    place.run(&["compare", "a.fio", "b.fio"]).refused(&["b.fio"]);
    place.run(&["measure"]).refused(&["measure"]);
}

#[test]
fn a_disk_that_exists_is_not_written_without_leave() {
    let place = Place::new();
    let content: Vec<u8> = (0..2 << 20).map(|n: u32| n.wrapping_mul(2_654_435_761) as u8).collect();
    let disk = place.write("disk.img", &content);
    place.compare(WRITES, &["--disk", "disk.img"]).refused(&[
        "disk.img",
        "exists",
        "--destroy-data",
    ]);
    assert!(bytes_of(&disk) == content, "the file was changed");
    // Also if only one of several jobs writes.
    place.compare(&format!("{READS}{WRITES}"), &["--disk", "disk.img"]).refused(&["disk.img"]);
    assert!(bytes_of(&disk) == content, "the file was changed");
}

#[test]
fn a_disk_that_cannot_be_one_is_refused() {
    let place = Place::new();
    fs::create_dir(place.path("folder")).unwrap();
    place.write("small.img", vec![0; 4096]);
    for (disk, words) in [
        ("folder", &["folder", "directory"][..]),
        ("missing/disk.img", &["missing/disk.img", "No such file"]),
        ("/dev/null", &["/dev/null", "neither"]),
        ("", &["--disk"]),
    ] {
        for destroy in [&[][..], &["--destroy-data"]] {
            place.compare(READS, &[&["--disk", disk], destroy].concat()).refused(words);
        }
    }
    place.compare(READS, &["--disk", "small.img"]).refused(&["small.img", "4 KiB", "1 MiB"]);
    assert_eq!(place.names(), ["folder", "job.fio", "small.img"]);
}

#[test]
fn a_place_that_cannot_be_written_is_found_before_anything_runs() {
    let place = Place::new();
    for option in ["--json", "--report"] {
        place.compare(READS, &[option, "missing/out"]).refused(&["missing/out", "No such file"]);
        place.compare(READS, &[option, "."]).refused(&["directory"]);
    }
    assert_eq!(place.names(), ["job.fio"]);
}

#[test]
fn what_an_earlier_run_wrote_stays_until_there_is_something_new() {
    let place = Place::new();
    place.write("old.json", "old figures, rather a lot of them".repeat(1000));
    let disk = ["--disk", "missing/disk.img"];
    place.compare(READS, &[&["--json", "old.json"], &disk[..]].concat()).refused(&["missing"]);
    assert!(place.read("old.json").starts_with("old figures"));
    place.compare(READS, &[&["--json", "new.json"], &disk[..]].concat()).refused(&["missing"]);
    assert_eq!(place.names(), ["job.fio", "old.json"], "nothing came of new.json");
    let ended = place.compare(READS, &[&["--json", "old.json"], &SHORT[..]].concat());
    assert_eq!(ended.code(), 0, "{ended}");
    let text = place.read("old.json");
    assert!(text.starts_with('{') && text.ends_with("}\n"), "{text}");
}

#[test]
fn a_jobs_filename_is_never_opened() {
    let place = Place::new();
    let precious = place.write("precious", "as it was");
    let [precious, new] = [precious, place.path("new")].map(|path| path.display().to_string());
    let job = format!(
        "{WRITES}filename={precious}\n[more]\nstonewall\nrw=write\nsize=1m\nfilename={new}\n"
    );
    let ended = place.compare(&job, &SHORT);
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(ended.out.contains("never opened"), "{ended}");
    assert_eq!(place.read("precious"), "as it was");
    assert_eq!(place.names(), ["job.fio", "precious"]);
}

#[test]
fn help_says_what_there_is() {
    let place = Place::new();
    let ended = place.run(&["--help"]);
    assert_eq!((ended.code(), ended.err.as_str()), (0, ""), "{ended}");
    assert!(ended.out.contains("compare"), "{ended}");
    let mut commands = ended.out.lines().filter_map(|line| line.split_whitespace().next());
    assert!(!commands.any(|word| word == "device"), "an inner command is shown\n{ended}");
    let ended = place.run(&["compare", "--help"]);
    assert_eq!(ended.code(), 0, "{ended}");
    for word in ["--policy", "--disk", "--notify", "--repeat", "--runtime", "--json", "--report"] {
        assert!(ended.out.contains(word), "{word}\n{ended}");
    }
    for word in ["--allocator", "--placement", "--aperture", "--live", "magazines", "highest"] {
        assert!(ended.out.contains(word), "{word}\n{ended}");
    }
    for word in [
        "--max-exposure-ms",
        "--max-exposure-bytes",
        "--high-water",
        "--batch",
        "--chunk",
        "--trust",
        "--bounce-threshold",
        "--bounce-quota",
        "--explain",
        "zero-copy",
    ] {
        assert!(ended.out.contains(word), "{word}\n{ended}");
    }
    for word in ["persistent", "--destroy-data", "EXAMPLES", "lazy-mq+map", "fio", "virtio-iommu"] {
        assert!(ended.out.contains(word), "{word}\n{ended}");
    }
    // No command at all: help, and wrong usage.
    let ended = place.run(&[]);
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.err.contains("compare"), "{ended}");
    // The inner command is not for users, and says so.
    let ended = place.run(&["device"]);
    assert_eq!(ended.code(), 1, "{ended}");
    assert!(ended.err.contains("ringfence compare"), "{ended}");
}

#[test]
fn an_option_that_was_renamed_is_known_by_its_old_name() {
    for service in ["blk", "net"] {
        let ended = Place::new().run(&[service, "--iotlb-patience-ms", "0"]);
        ended.refused(&["invalid value '0' for '--iotlb-timeout-ms <MS>'"]);
    }
}
