//! However it ends: what was measured is printed, and nothing is left behind.

mod common;

use std::time::{Duration, Instant};

use common::{Ended, LIMIT, Place, Running};
use rustix::process::Signal;

/// Short rounds, and many of them.
const JOB: &str = "[pages]\nrw=randrw\nbs=16k\nsize=16m\niodepth=8\ntime_based\nruntime=200ms\n";
const LONG: [&str; 7] =
    ["compare", "job.fio", "--repeat", "1000", "--policy", "off,strict", "--json=out.json"];

/// The files that may be in the folder after a run.
const FILES: [&str; 2] = ["job.fio", "out.json"];

fn start(place: &Place) -> Running {
    place.write("job.fio", JOB);
    place.start(&LONG)
}

/// Waits until each row has run a round.
fn let_it_run(running: &mut Running) {
    running.wait_for(|line| {
        let round = line.split_once(", round ").and_then(|(_, rest)| rest.split(' ').next());
        round.is_some_and(|number| number.parse::<u32>().unwrap() >= 2)
    });
}

/// It stopped as it should, with complete rounds.
fn stopped_in_order(place: &Place, ended: &Ended) {
    assert_eq!(ended.code(), 1, "{ended}");
    assert!(ended.err.contains("interrupted: the figures are of the rounds"), "{ended}");
    assert!(!ended.err.contains("error:"), "{ended}");
    for row in ["off", "strict"] {
        let found = ended.out.lines().any(|line| line.trim_start().starts_with(row));
        assert!(found, "{row}\n{ended}");
    }
    assert!(ended.out.contains("interrupted"), "{ended}");
    let json: serde_json::Value = serde_json::from_str(&place.read("out.json")).unwrap();
    assert_eq!(json["interrupted"], true);
    assert_eq!(json["rounds"], 1000);
    let rounds = json["jobs"][0]["rounds"].as_u64().unwrap();
    assert!((1..1000).contains(&rounds), "{rounds}");
    assert!(common::errors_of(&json).is_empty(), "{json:#}");
    nothing_is_left(place);
}

/// After an orderly end: the command has waited for its device process.
fn nothing_is_left(place: &Place) {
    let left = place.processes();
    assert!(left.is_empty(), "{left:?}");
    no_file_is_left(place);
}

fn no_file_is_left(place: &Place) {
    for name in place.names() {
        assert!(FILES.contains(&name.as_str()), "{name} was left behind");
    }
}

#[test]
fn ctrl_c_prints_the_complete_rounds_and_leaves_nothing() {
    let place = Place::new();
    let mut running = start(&place);
    let_it_run(&mut running);
    // As a terminal does it: to every process of the group.
    running.signal_group(Signal::INT);
    stopped_in_order(&place, &running.wait());
}

#[test]
fn a_jobs_table_is_printed_when_it_has_been_measured() {
    let place = Place::new();
    let second = JOB.replace("[pages]", "[forever]\nstonewall").replace("200ms", "3600");
    place.write("job.fio", JOB.to_owned() + &second);
    let jobs = ["compare", "job.fio", "--repeat", "1", "--policy", "off,strict"];
    let mut running = place.start(&jobs);
    running.wait_for_output(|line| line.trim_start().starts_with("strict"));
    running.signal(Signal::INT);
    let ended = running.wait();
    assert_eq!(ended.code(), 1, "{ended}");
    assert_eq!(ended.out.matches("\npages: ").count(), 1, "{ended}");
    assert!(!ended.out.contains("\nforever: "), "{ended}");
    assert!(ended.out.contains("--details: all figures"), "{ended}");
    nothing_is_left(&place);
}

#[test]
fn a_signal_to_the_command_alone_does_the_same() {
    for signal in [Signal::INT, Signal::TERM] {
        let place = Place::new();
        let mut running = start(&place);
        let_it_run(&mut running);
        running.signal(signal);
        stopped_in_order(&place, &running.wait());
    }
}

#[test]
fn a_terminal_that_goes_away_ends_it_in_order() {
    for signal in [Signal::HUP, Signal::TERM] {
        let place = Place::new();
        let mut running = start(&place);
        let_it_run(&mut running);
        running.signal_group(signal);
        stopped_in_order(&place, &running.wait());
    }
}

#[test]
fn before_the_first_round_is_complete_there_is_nothing_to_print() {
    let place = Place::new();
    place.write("job.fio", JOB);
    let running = place.start(&["compare", "job.fio", "--runtime", "3600", "--disk", "disk.img"]);
    place.device_process();
    running.signal_group(Signal::INT);
    let ended = running.wait();
    assert_eq!(ended.code(), 1, "{ended}");
    assert_eq!(ended.out, "", "{ended}");
    assert!(ended.err.contains("interrupted before"), "{ended}");
    nothing_is_left(&place);
}

#[test]
fn a_second_ctrl_c_ends_it_at_once() {
    let place = Place::new();
    place.write("job.fio", JOB);
    let running = place.start(&["compare", "job.fio", "--runtime", "3600", "--disk", "disk.img"]);
    place.device_process();
    for _ in 0..20 {
        running.signal_group(Signal::INT);
    }
    let ended = running.wait();
    // Either in order, or at once: never with success, never with anything left.
    assert!(ended.code() == 1 || ended.code() == 130, "{ended}");
    place.wait_for_processes();
    no_file_is_left(&place);
}

#[test]
fn a_killed_command_takes_its_device_process_with_it() {
    let place = Place::new();
    place.write("job.fio", JOB);
    let running = place.start(&["compare", "job.fio", "--runtime", "3600", "--disk", "disk.img"]);
    place.device_process();
    running.signal(Signal::KILL);
    let ended = running.wait();
    assert_eq!(ended.code(), -9, "{ended}");
    place.wait_for_processes();
    no_file_is_left(&place);
}

#[test]
fn a_process_that_is_killed_is_an_error_that_says_so() {
    let device = ["off", "strict", "lazy-mq+map", "proxy"].map(|row| (row, "device process"));
    for (row, victim) in device.into_iter().chain([("proxy", "proxy")]) {
        let place = Place::new();
        place.write("job.fio", JOB);
        // The warm-up is over soon; the following round takes an hour, and is interrupted.
        let running = place.start(&["compare", "job.fio", "--runtime", "3600", "--policy", row]);
        let warm_up = place.device_process().id;
        let begun = Instant::now();
        let device = loop {
            let device = place.device_process();
            // In the middle of the round: its workers serve requests, and do nothing before.
            if device.id != warm_up && device.worked() > Duration::from_millis(100) {
                break device;
            }
            assert!(begun.elapsed() < LIMIT, "no round begins");
            std::thread::sleep(Duration::from_millis(5));
        };
        match victim {
            "proxy" => {
                let mut processes = place.processes().into_iter();
                processes
                    .find(|process| process.line.contains(" proxy --backend "))
                    .unwrap()
                    .kill(Signal::KILL);
            }
            _ => device.kill(Signal::KILL),
        }
        // It ends because of that.
        let ended = running.wait();
        assert_eq!(ended.code(), 1, "{ended}");
        let said = format!("the {victim} ended in the middle");
        assert!(ended.err.contains(&said), "{ended}");
        assert!(ended.err.contains("SIGKILL"), "{ended}");
        assert_eq!(ended.err.matches("error:").count(), 1, "{ended}");
        assert!(!ended.err.contains("panicked"), "{ended}");
        nothing_is_left(&place);
    }
}
