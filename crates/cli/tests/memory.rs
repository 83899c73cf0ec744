//! `compare` promises to stay below 2 GiB with its own jobs.

mod common;

use std::time::Duration;

use common::Place;

const PROMISE: u64 = 2 << 30;

#[test]
fn the_default_jobs_take_less_than_two_gib() {
    let place = Place::new();
    // Rows that make both processes touch all of the disk, and that map most.
    let rows = "host,off,strict,lazy-sq";
    let mut running =
        place.start(&["compare", "--repeat", "1", "--runtime", "0.4", "--policy", rows]);
    let driver = running.process();
    let (mut most_driver, mut most_device) = (0, 0);
    while running.is_running() {
        most_driver = most_driver.max(driver.most_memory().unwrap_or(0));
        for process in place.processes() {
            if process.id != driver.id {
                most_device = most_device.max(process.most_memory().unwrap_or(0));
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let ended = running.wait();
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(most_driver > 0 && most_device > 0, "nothing was seen");
    // Memory that both have mapped counts twice here: the promise holds all the more.
    let most = most_driver + most_device;
    assert!(most < PROMISE, "{} and {} MiB", most_driver >> 20, most_device >> 20);
}
