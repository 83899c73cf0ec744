//! Real files as the disk: files made by the command are removed, existing ones are respected,
//! reads are checked.

mod common;

use std::{
    fs::File,
    io::Write as _,
    os::unix::fs::FileExt,
    time::{Duration, Instant},
};

use common::{LIMIT, Place, bytes_of, policies};

const MIB: usize = 1 << 20;
const MIXED: &str = "[mixed]\nrw=randrw\nbs=4k\nsize=4m\niodepth=8\ntime_based\nruntime=100ms\n";
const READS: &str = "[reads]\nrw=randread\nbs=4k\nsize=4m\niodepth=8\ntime_based\nruntime=100ms\n";
const FEW: [&str; 4] =
    ["--repeat", "1", "--policy", "host,off,strict+map,lazy-mq,bounce,zero-copy"];

#[test]
fn a_file_that_is_not_there_is_made_and_goes() {
    let place = Place::new();
    let json = place.measure(MIXED, &[&["--disk", "disk.img"], &FEW[..]].concat());
    assert!(json["disk"].as_str().unwrap().contains("disk.img"));
    assert_eq!(policies(&json, 0).join(","), FEW[3]);
    assert_eq!(place.names(), ["job.fio"]);
}

#[test]
fn a_file_that_is_there_is_used_with_leave_and_stays() {
    let place = Place::new();
    let disk = place.write("disk.img", vec![7; 5 * MIB]);
    place.measure(MIXED, &[&["--disk", "disk.img", "--destroy-data"], &FEW[..]].concat());
    let content = bytes_of(&disk);
    assert_eq!(content.len(), 5 * MIB);
    assert!(content[..4 * MIB].chunks(512).all(|sector| sector != [7; 512]), "not laid out");
    assert!(content[4 * MIB..].iter().all(|&byte| byte == 7), "written beyond the job's area");
}

#[test]
fn a_job_that_only_reads_may_read_what_others_wrote() {
    let place = Place::new();
    let content: Vec<u8> = (0..4 * MIB as u32).map(|n| (n >> 9) as u8 ^ n as u8).collect();
    let disk = place.write("disk.img", &content);
    let json = place.measure(READS, &[&["--disk", "disk.img"], &FEW[..]].concat());
    let warnings = json["warnings"].to_string();
    assert!(warnings.contains("disk.img") && warnings.contains("content cannot be"), "{warnings}");
    assert!(bytes_of(&disk) == content, "the file was changed");
}

#[test]
fn a_file_system_without_direct_io_is_used_through_the_page_cache() {
    // Whether it supports direct I/O depends on the kernel: the job must run either way.
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        let text = "NOT TESTED: a disk without direct I/O, as there is no /dev/shm\n";
        return std::io::stderr().write_all(text.as_bytes()).unwrap();
    };
    let disk = folder.path().join("disk.img");
    let place = Place::new();
    place.measure(MIXED, &[&["--disk", disk.to_str().unwrap()], &FEW[..]].concat());
    assert!(!disk.exists());
}

#[test]
fn reads_that_meet_writes_half_way_are_no_errors() {
    // Eight clones on two blocks. A page cache returns blocks that are being written.
    let job = "[clash]\nrw=randrw\nbs=64k\nsize=128k\niodepth=4\nnumjobs=4\nnorandommap\n\
               time_based\nruntime=300ms\n";
    let place = Place::new();
    let shared = tempfile::tempdir_in("/dev/shm");
    let folder = shared.as_ref().map_or(place.path(""), |folder| folder.path().to_owned());
    for disk in [folder.join("disk.img"), place.path("disk.img")] {
        let disk = disk.to_str().unwrap();
        place.measure(job, &[&["--queues", "3", "--disk", disk], &FEW[..]].concat());
    }
}

#[test]
fn sectors_of_512_bytes_work_on_a_file() {
    let job = "[small]\nrw=randrw\nbs=512\nsize=1m\niodepth=4\ntime_based\nruntime=50ms\n";
    let place = Place::new();
    // In memory: a disk with 4096-byte sectors refuses them with direct I/O.
    let shared = tempfile::tempdir_in("/dev/shm");
    let folder = shared.as_ref().map_or(place.path(""), |folder| folder.path().to_owned());
    let disk = folder.join("small.img");
    place.measure(job, &[&["--disk", disk.to_str().unwrap()], &FEW[..]].concat());
}

#[test]
fn bytes_that_are_wrong_are_found() {
    for row in ["host", "strict", "bounce", "zero-copy"] {
        let place = Place::new();
        let disk = place.write("disk.img", vec![0; MIB]);
        place.write("job.fio", READS.replace("size=4m", "size=1m"));
        let mut running = place.start(&[
            "compare",
            "job.fio",
            "--disk=disk.img",
            "--destroy-data",
            // Long enough for the sector below to go bad: it ends at the first error of the warm-up
            // round.
            "--runtime=60",
            "--repeat=2",
            "--policy",
            row,
            "--json=out.json",
        ]);
        // The disk is laid out once all of it is allocated; then a sector goes bad.
        let file = File::options().read(true).write(true).open(&disk).unwrap();
        let deadline = Instant::now() + LIMIT;
        let mut last = [0; 512];
        while last == [0; 512] {
            assert!(Instant::now() < deadline && running.is_running(), "it was not laid out");
            file.read_exact_at(&mut last, (MIB - 512) as u64).unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
        while running.is_running() && Instant::now() < deadline {
            file.write_all_at(&[0xee; 4096], 123 * 4096).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
        let ended = running.wait();
        assert_eq!(ended.code(), 1, "{ended}");
        assert!(ended.err.contains("I/Os failed"), "{ended}");
        // The message also says where it is wrong.
        let all = format!("{}{}{}", ended.err, ended.out, place.read("out.json"));
        assert!(all.contains("0x7b000"), "{row}\n{ended}");
    }
}
