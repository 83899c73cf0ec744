//! `ringfence proxy` before real back ends, with our own front end and driver, which know only the
//! protocol.

mod common;
#[path = "common/machine.rs"]
#[allow(dead_code)]
mod machine;
#[path = "common/strangers.rs"]
#[allow(dead_code)]
mod strangers;

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use common::{LIMIT, Place, Running};
use machine::{Kept, LONG, Load, MIB, Machine, PAGE, await_unlocked, content, figure, figures};
use ringfence_virtq::blk::Kind;
use rustix::process::Signal;
use strangers::Stranger;

fn our_back_end(place: &Place) -> Running {
    let fixed = ["blk", "--socket", "back", "--image", "disk.img", "--queues", "2"];
    let more = ["--id", "a disk", "--iotlb-timeout-ms", "600000"];
    let mut running = place.start(&[&fixed[..], &more].concat());
    running.wait_for(|line| line.contains("listening on back"));
    running
}

fn proxy(place: &Place, more: &[&str]) -> Running {
    let fixed = ["proxy", "--socket", "s", "--backend", "back", "--metrics", "unix:m"];
    let patient = ["--iotlb-timeout-ms", "600000"];
    let mut running = place.start(&[&fixed[..], &patient, more].concat());
    running.wait_for(|line| line.contains("listening on s"));
    running
}

fn ends(running: Running) {
    running.signal(Signal::TERM);
    let ended = running.wait();
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(
        !ended.err.contains("panicked") && !ended.err.contains("sandbox has refused"),
        "{ended}"
    );
}

/// Writes, flushes and reads on two queues, for several clients one after the other.
fn serves(place: &Place, translated: bool) {
    for client in 0..3u8 {
        let mut machine = Machine::new(2, translated);
        let connection = machine.connect(&place.path("s"), None);
        machine.writes_and_reads(&connection, 0x40 + client);
        assert!(!machine.request(0, Kind::Out, MIB as u64 / 512, 0, 512), "past the end");
        assert!(machine.request(0, Kind::GetId, 0, 0, 20));
    }
}

#[test]
fn a_back_end_of_ours_serves_through_it() {
    for translated in [false, true] {
        let place = Place::new();
        let image = place.write("disk.img", vec![1; MIB]);
        let (back, front) = (our_back_end(&place), proxy(&place, &[]));
        serves(&place, translated);
        let text = figures(&place);
        assert_eq!(figure(&text, "ringfence_iotlb_misses_total") > 0, translated, "{text}");
        ends(front);
        ends(back);
        assert_eq!(fs::read(image).unwrap()[4096..4 * 4096], vec![0x42; 3 * 4096]);
    }
}

#[test]
fn a_proxy_with_nothing_to_do_wakes_up_twice_a_second_at_most() {
    for translated in [false, true] {
        let place = Place::new();
        place.write("disk.img", vec![1; MIB]);
        let (_back, front) = (our_back_end(&place), proxy(&place, &[]));
        let mut machine = Machine::new(2, translated);
        let connection = machine.connect(&place.path("s"), None);
        machine.writes_and_reads(&connection, 0x40);
        let text = figures(&place);
        let [now, most] = ["", "limit_"]
            .map(|which| figure(&text, &format!("ringfence_proxy_pool_{which}bytes")));
        assert!(0 < now && now <= most, "{text}");
        let (process, begun) = (front.process(), Instant::now());
        assert!(process.waits() > 0, "nothing is counted");
        // What it still has to do after that takes a busy machine some time.
        loop {
            let (since, before) = (Instant::now(), process.waits());
            thread::sleep(Duration::from_secs(3));
            let (waits, seconds) = (process.waits() - before, since.elapsed().as_secs_f32());
            if waits as f32 <= 2.0 * seconds {
                break;
            }
            assert!(begun.elapsed() < LIMIT, "{waits} times in {seconds} s, still");
        }
        machine.writes_and_reads(&connection, 0x41);
        drop(connection);
        ends(front);
    }
}

#[test]
#[ignore = "a QEMU: cargo xtask test --only storage"]
fn qemus_storage_daemon_serves_through_it() {
    for translated in [false, true] {
        let place = Place::new();
        let image = place.write("disk.img", vec![1; MIB]);
        let _back = Stranger::storage_daemon(&image, &place.path("back"));
        let front = proxy(&place, &[]);
        serves(&place, translated);
        ends(front);
        assert_eq!(fs::read(image).unwrap()[4096..4 * 4096], vec![0x42; 3 * 4096]);
    }
}

/// Writes, while the proxy or its back end is killed and started again.
fn is_killed_under_load(translated: bool, front_dies: bool) {
    let place = Place::new();
    let image = place.write("disk.img", vec![0; MIB]);
    let starts =
        |dies: bool| if dies == front_dies { proxy(&place, &[]) } else { our_back_end(&place) };
    let (stays, mut dies) = (starts(false), starts(true));
    let mut machine = Machine::new(2, translated);
    let (mut load, mut kept) = (Load::default(), Kept::default());
    for round in 1..=4 {
        let connection = machine.connect(&place.path("s"), Some(&mut kept));
        let begun = Instant::now();
        while load.acknowledged < round * 150 {
            load.step(&mut machine, true);
            assert!(begun.elapsed() < LONG, "it stands still at {}", load.acknowledged);
        }
        dies.signal(Signal::KILL);
        assert_eq!(dies.wait().code(), -9);
        if !front_dies {
            await_unlocked(&image);
        }
        dies = starts(true);
        drop(connection);
    }
    let _connection = machine.connect(&place.path("s"), Some(&mut kept));
    let begun = Instant::now();
    while !load.under_way.is_empty() {
        load.step(&mut machine, false);
        assert!(begun.elapsed() < LONG, "{} requests are lost", load.under_way.len());
    }
    for running in if front_dies { [dies, stays] } else { [stays, dies] } {
        ends(running);
    }
    let disk = fs::read(image).unwrap();
    for (block, version) in load.versions {
        let at = block as usize * PAGE;
        assert!(disk[at..at + PAGE] == content(block, version)[..], "block {block}");
    }
}

#[test]
fn a_proxy_that_is_killed_under_load_and_started_again_loses_nothing() {
    for translated in [false, true] {
        is_killed_under_load(translated, true);
    }
}

#[test]
fn a_back_end_that_is_killed_under_load_and_started_again_loses_nothing() {
    for translated in [false, true] {
        is_killed_under_load(translated, false);
    }
}
