//! `ringfence blk`, with our own front end and driver, which know only the protocol.

mod common;
#[path = "common/machine.rs"]
#[allow(dead_code)]
mod machine;

use std::{
    fs,
    io::{Read, Write},
    os::{
        fd::OwnedFd,
        unix::net::{UnixDatagram, UnixListener},
    },
    time::{Duration, Instant},
};

use common::{Place, Running};
use machine::{
    Kept, LONG, Load, MIB, Machine, PAGE, await_unlocked, connected, content, figure, figures,
};
use ringfence_virtq::blk::{self, Kind};
use rustix::process::Signal;
use zerocopy::IntoBytes;

fn started(place: &Place, more: &[&str]) -> Running {
    let fixed = ["blk", "--socket", "s", "--image", "disk.img", "--iotlb-timeout-ms", "600000"];
    let mut running = place.start(&[&fixed[..], more].concat());
    running.wait_for(|line| line.contains("listening on s"));
    running
}

fn ends(running: Running, place: &Place) {
    running.signal(Signal::TERM);
    let ended = running.wait();
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(!ended.err.contains("panicked"), "{ended}");
    assert!(!place.path("s").exists() && !place.path("m").exists());
}

#[test]
fn requests_of_all_kinds_reach_the_image_for_one_client_after_the_other() {
    for translated in [false, true] {
        let place = Place::new();
        let image = place.write("disk.img", vec![1; MIB + 100]);
        let running = started(&place, &["--queues", "2", "--metrics", "unix:m", "--id", "a disk"]);
        for client in 0..3u8 {
            let mut machine = Machine::new(2, translated);
            let connection = machine.connect(&place.path("s"), None);
            machine.writes_and_reads(&connection, 0x40 + client);
            assert!(machine.request(0, Kind::GetId, 0, 0, 20));
            assert_eq!(machine.bytes(0, 20), b"a disk\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
            for (kind, sector) in [(Kind::Discard, 100), (Kind::WriteZeroes, 200)] {
                let extent =
                    blk::Extent { sector: sector.into(), sectors: 10.into(), flags: 0.into() };
                machine.data.write(0, extent.as_bytes());
                assert!(machine.request(0, kind, 0, 0, 16), "{kind:?}");
                assert!(machine.request(0, Kind::In, sector - 1, PAGE, 12 * 512));
                let back = machine.bytes(PAGE, 12 * 512);
                assert_eq!(back[..512], [1; 512]);
                assert_eq!(back[512..11 * 512], [0; 10 * 512]);
                assert_eq!(back[11 * 512..], [1; 512]);
            }
            assert!(!machine.request(0, Kind::Out, MIB as u64 / 512, 0, 512), "past the end");
        }
        // A worker counts a completion after the driver has got it.
        let begun = Instant::now();
        let text = loop {
            let text = figures(&place);
            if figure(&text, "ringfence_requests_total") == 3 * 9 {
                break text;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{text}");
        };
        assert_eq!(figure(&text, "ringfence_connections_total"), 3, "{text}");
        assert_eq!(figure(&text, "ringfence_failed_requests_total"), 3, "{text}");
        assert_eq!(figure(&text, "ringfence_iotlb_misses_total") > 0, translated, "{text}");
        ends(running, &place);
        let content = fs::read(image).unwrap();
        assert_eq!(content.len(), MIB + 100);
        assert_eq!(content[4096..4 * 4096], vec![0x42; 3 * 4096]);
        assert_eq!(content[MIB..], [1; 100]);
    }
}

#[test]
fn a_disk_that_is_only_read_is_not_written() {
    let place = Place::new();
    let image = place.write("disk.img", vec![7; MIB]);
    let running = started(&place, &["--read-only"]);
    // Other processes may read it, too.
    let other = place.start(&["blk", "--socket", "t", "--image", "disk.img", "--read-only"]);
    let mut machine = Machine::new(1, true);
    for socket in ["s", "t"] {
        let mut machine = Machine::new(1, false);
        let _connection = machine.connect(&place.path(socket), None);
        assert!(!machine.request(0, Kind::Out, 0, 0, PAGE));
        assert!(machine.request(0, Kind::In, 0, PAGE, PAGE));
        assert_eq!(machine.bytes(PAGE, PAGE), [7; PAGE]);
    }
    let connection = machine.connect(&place.path("s"), None);
    assert!(machine.request(0, Kind::In, 0, PAGE, PAGE));
    drop(connection);
    other.signal(Signal::INT);
    assert_eq!(other.wait().code(), 0);
    ends(running, &place);
    assert_eq!(fs::read(image).unwrap(), vec![7; MIB]);
}

/// Reads into a guest's memory by a killed process of a socket cannot be distinguished from those
/// of its running process.
#[test]
fn a_reader_shares_its_image_but_not_with_another_of_its_socket() {
    let place = Place::new();
    place.write("disk.img", vec![7; MIB]);
    let direct = ["--read-only", "--direct", "--disk-buffers", "guest"];
    let running = started(&place, &direct);
    let blk = |socket| [&["blk", "--socket", socket, "--image", "disk.img"], &direct[..]].concat();
    let other = place.start(&blk("t"));
    let _connection = Machine::new(1, false).connect(&place.path("t"), None);
    for same in ["s", "./s"] {
        let ended = place.run(&blk(same));
        assert_eq!(ended.code(), 1, "{ended}");
        assert!(ended.err.contains("it is locked"), "{ended}");
    }
    let ended = place.run(&["blk", "--socket", "s", "--image", "disk.img", "--read-only"]);
    assert!(ended.err.contains("serves this socket"), "{ended}");
    other.signal(Signal::INT);
    assert_eq!(other.wait().code(), 0);
    ends(running, &place);
}

/// Writes and reads bypass the page cache where possible, and go through it otherwise.
#[test]
fn direct_requests_need_not_be_aligned() {
    let place = Place::new();
    place.write("disk.img", vec![7; MIB]);
    let running = started(&place, &["--direct"]);
    let mut machine = Machine::new(1, false);
    let _connection = machine.connect(&place.path("s"), None);
    for (at, sector, len) in [(0, 0, PAGE), (PAGE + 24, 8, PAGE), (4 * PAGE + 1, 1, 512)] {
        machine.data.write(at, &vec![sector as u8 + 100; len]);
        assert!(machine.request(0, Kind::Out, sector, at, len));
        assert!(machine.request(0, Kind::In, sector, 10 * PAGE + at, len));
        assert_eq!(machine.bytes(10 * PAGE + at, len), vec![sector as u8 + 100; len]);
    }
    ends(running, &place);
}

#[test]
fn a_back_end_that_is_killed_under_load_and_started_again_loses_nothing() {
    for translated in [false, true] {
        let place = Place::new();
        let image = place.write("disk.img", vec![0; MIB]);
        let mut machine = Machine::new(2, translated);
        let mut kept = Kept::default();
        let mut load = Load::default();
        for life in 0..6 {
            let running = started(&place, &["--queues", "2"]);
            let connection = machine.connect(&place.path("s"), Some(&mut kept));
            let goal = load.acknowledged + 300 + life * 37;
            let begun = Instant::now();
            while load.acknowledged < goal {
                load.step(&mut machine, true);
                assert!(begun.elapsed() < LONG, "it stands still at {}", load.acknowledged);
            }
            running.signal(Signal::KILL);
            assert_eq!(running.wait().code(), -9);
            await_unlocked(&image);
            drop(connection);
        }
        let left = load.under_way.len();
        let running = started(&place, &["--queues", "2"]);
        let connection = machine.connect(&place.path("s"), Some(&mut kept));
        let begun = Instant::now();
        while !load.under_way.is_empty() {
            load.step(&mut machine, false);
            assert!(begun.elapsed() < LONG, "{} of {left} lost", load.under_way.len());
        }
        drop(connection);
        running.signal(Signal::TERM);
        assert_eq!(running.wait().code(), 0);
        let bytes = fs::read(image).unwrap();
        for (&block, &version) in &load.versions {
            let at = block as usize * PAGE;
            assert!(bytes[at..at + PAGE] == content(block, version), "block {block} {version}");
        }
    }
}

#[test]
fn wrong_usage_is_reported() {
    let place = Place::new();
    place.write("disk.img", vec![0; MIB]);
    place.write("tiny", "x");
    place.run(&["blk", "--socket", "s"]).refused(&["--image"]);
    place.run(&["blk", "--image", "disk.img"]).refused(&["--socket", "LISTEN_FDS"]);
    place.run(&["blk", "--socket", "s", "--image", "."]).refused(&["neither a file"]);
    place.run(&["blk", "--socket", "s", "--image", "tiny"]).refused(&["1 bytes"]);
    let with = |more: &[&str]| {
        place.run(&[&["blk", "--socket", "s", "--image", "disk.img"], more].concat())
    };
    with(&["--queues", "0"]).refused(&["--queues"]);
    with(&["--iotlb-misses", "16385"]).refused(&["--iotlb-misses", "1..=16384"]);
    with(&["--iotlb-misses", "0"]).refused(&["--iotlb-misses"]);
    with(&["--id", "a name of more than twenty"]).refused(&["--id", "26 bytes"]);
    with(&["--metrics", "here"]).refused(&["--metrics", "HOST:PORT"]);
    with(&["--notify", "loudly"]).refused(&["--notify"]);
    with(&["--socket-mode", "9"]).refused(&["octal"]);
    with(&["--log", "loud"]).refused(&["--log"]);
    let missing = place.run(&["blk", "--socket", "s", "--image", "not there"]);
    assert_eq!(missing.code(), 1, "{missing}");
    assert!(missing.err.contains("not there"), "{missing}");
}

#[test]
fn an_image_has_one_writer_and_a_socket_one_server() {
    let place = Place::new();
    place.write("disk.img", vec![0; MIB]);
    place.write("other.img", vec![0; MIB]);
    // Left behind by a killed process.
    let killed = started(&place, &[]);
    killed.signal(Signal::KILL);
    killed.wait();
    assert!(place.path("s").exists());
    let running = started(&place, &["--socket-mode", "660"]);
    let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(place.path("s")).unwrap());
    assert_eq!(mode & 0o777, 0o660);
    let second = place.run(&["blk", "--socket", "t", "--image", "disk.img"]);
    assert_eq!(second.code(), 1, "{second}");
    assert!(second.err.contains("another process uses it"), "{second}");
    let second = place.run(&["blk", "--socket", "s", "--image", "other.img"]);
    assert_eq!(second.code(), 1, "{second}");
    assert!(second.err.contains("another process serves"), "{second}");
    ends(running, &place);
}

#[test]
fn a_service_manager_hands_over_the_socket_and_is_notified() {
    let place = Place::new();
    place.write("disk.img", vec![9; MIB]);
    let listener = UnixListener::bind(place.path("s")).unwrap();
    let manager = UnixDatagram::bind(place.path("n")).unwrap();
    manager.set_read_timeout(Some(LONG)).unwrap();
    // Passed as descriptor 3, with the process's own number, as by the service manager.
    let mut child = std::process::Command::new("sh")
        .args(["-c", "LISTEN_FDS=1 LISTEN_PID=$$ NOTIFY_SOCKET=$PWD/n exec \"$0\" blk --image disk.img 3<&0 </dev/null"])
        .arg(env!("CARGO_BIN_EXE_ringfence"))
        .current_dir(place.path(""))
        .stdin(OwnedFd::from(listener))
        .spawn()
        .unwrap();
    let next = || {
        let mut bytes = [0; 4096];
        let len = manager.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..len].to_vec()).unwrap()
    };
    assert!(next().contains("READY=1"));
    let mut machine = Machine::new(1, false);
    let connection = machine.connect(&place.path("s"), None);
    assert!(machine.request(0, Kind::In, 0, 0, PAGE));
    assert_eq!(machine.bytes(0, PAGE), [9; PAGE]);
    assert!(next().contains("STATUS="));
    let id = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(id, Signal::TERM).unwrap();
    while !next().contains("STOPPING=1") {}
    assert!(child.wait().unwrap().success());
    // The service must not remove it.
    assert!(place.path("s").exists());
    drop(connection);
}

#[test]
fn a_truncated_image_fails_requests_and_truncated_memory_a_ring() {
    let place = Place::new();
    let image = place.write("disk.img", vec![3; MIB]);
    let running = started(&place, &[]);
    let mut machine = Machine::new(1, false);
    let connection = machine.connect(&place.path("s"), None);
    assert!(machine.request(0, Kind::In, 1024, 0, PAGE));
    fs::File::options().write(true).open(&image).unwrap().set_len(64 * 1024).unwrap();
    assert!(!machine.request(0, Kind::In, 1024, 0, PAGE));
    assert!(machine.request(0, Kind::In, 0, 0, PAGE));
    drop(connection);
    // The service continues.
    let mut machine = Machine::new(1, true);
    let _connection = machine.connect(&place.path("s"), None);
    assert!(machine.request(0, Kind::In, 0, 0, PAGE));
    ends(running, &place);
}

#[test]
fn bytes_that_are_no_protocol_end_their_connection_alone() {
    let place = Place::new();
    place.write("disk.img", vec![3; MIB]);
    let running = started(&place, &["--metrics", "unix:m"]);
    for bytes in [&[0xff; 64][..], b"GET / HTTP/1.1\r\n\r\n", &[0; 12]] {
        let mut stream = connected(&place.path("s"));
        stream.write_all(bytes).unwrap();
        let mut rest = Vec::new();
        // Hung up, by end of file or by an error.
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty());
    }
    let mut machine = Machine::new(1, false);
    let connection = machine.connect(&place.path("s"), None);
    assert!(machine.request(0, Kind::In, 0, 0, PAGE));
    let text = figures(&place);
    assert_eq!(figure(&text, "ringfence_broken_connections_total"), 3, "{text}");
    assert_eq!(figure(&text, "ringfence_connected"), 1, "{text}");
    drop(connection);
    ends(running, &place);
}
