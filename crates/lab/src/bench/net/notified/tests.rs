//! The whole of it in one process: the device is a thread.

use std::{
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::Result;
use ringfence_dma::Policy;
use ringfence_run::worker::Notify;

use super::{Mapped, driver, load::drain, ring::Ring};
use crate::{
    bench::{net::case::Direction, window::Frames},
    run::device::{Report, serve_net},
};

/// Longer than anything takes on a busy machine; a test that waits so long has failed.
const LONG: Duration = Duration::from_secs(120);

/// A driver of a device that is a thread, until that has ended.
type Driver = driver::Driver<Option<JoinHandle<Result<Report>>>>;

fn open(mapped: Mapped, direction: Direction) -> Driver {
    let loops = direction == Direction::Loop;
    let start =
        |net, iommu| Ok(Some(thread::spawn(move || serve_net([net, iommu], loops, Notify::Poll))));
    Driver::open(mapped, direction, start).unwrap()
}

fn close(driver: Driver) -> (Frames, Report) {
    let end =
        driver.close(|thread| thread.take().expect("finished once").join().expect("no panic"));
    end.unwrap()
}

fn turns(driver: &mut Driver, mut done: impl FnMut(&Driver) -> bool) {
    let begun = Instant::now();
    while begun.elapsed() < LONG {
        driver.turn(true).unwrap();
        if done(driver) {
            return;
        }
        thread::yield_now();
    }
    panic!("nothing goes on: {} frames", driver.frames());
}

/// Waits until all frames are back, however long a busy machine takes.
fn drain_all(driver: &mut Driver) {
    let begun = Instant::now();
    while driver.outstanding() > 0 {
        assert!(begun.elapsed() < LONG, "{} frames are missing", driver.outstanding());
        drain(driver).unwrap();
    }
}

fn end(mut driver: Driver) -> (Frames, Report) {
    drain_all(&mut driver);
    close(driver)
}

#[test]
fn every_row_carries_frames_and_maps_as_it_says() {
    const FRAMES: u64 = 3000;
    for mapped in Mapped::ALL {
        for direction in Direction::ALL {
            let mut driver = open(mapped, direction);
            turns(&mut driver, |driver| driver.frames() >= FRAMES);
            let iommu = driver.link.iommu.stats();
            let [maps, unmaps] = [iommu.maps, iommu.unmaps];
            let (frames, report) = end(driver);
            let Frames { carried, lost, late, corrupt } = frames;
            let what = format!("{mapped:?} {direction}: {frames:?}, {report:?}");
            assert!(carried >= FRAMES, "{what}");
            assert_eq!((lost, late, corrupt), (0, 0, 0), "{what}");
            assert_eq!((report.faults, report.iommu_refused), (0, 0), "{what}");
            let looked = report.iotlb_hits + report.iotlb_misses;
            // Not for each frame: neighbours are found by one lookup.
            assert_eq!(looked > 0, mapped.translated(), "{what}");
            let bundles = FRAMES / mapped.bundle as u64;
            match mapped.policy {
                Policy::Off => assert_eq!((maps, unmaps), (0, 0), "{what}"),
                Policy::StrictMap if mapped.run == 1 => assert!(maps >= FRAMES, "{what}"),
                Policy::StrictMap => {
                    assert!(maps >= bundles && unmaps > 0, "{what}");
                    // Neighbours that were mapped together are found by one walk.
                    let walks = carried * 2 / mapped.bundle as u64 + 100;
                    assert!(mapped.bundle == 1 || report.iotlb_misses <= 2 * walks, "{what}");
                }
                _ => {}
            }
        }
    }
}

const STRICT: Mapped = Mapped { policy: Policy::StrictMap, ..Mapped::OFF };

/// Frames were carried, and all of them are back: what was mapped for them is unmapped.
fn used(mapped: Mapped, direction: Direction) -> Driver {
    let mut driver = open(mapped, direction);
    turns(&mut driver, |driver| driver.frames() >= 2000);
    drain_all(&mut driver);
    driver
}

/// What comes back next on a ring, without a turn of the driver: the length that was written.
fn wait(ring: &mut Ring) -> Option<u32> {
    let begun = Instant::now();
    while begun.elapsed() < LONG {
        if let Some(len) = ring.pop_stray().unwrap() {
            return Some(len);
        }
        thread::yield_now();
    }
    None
}

#[test]
fn a_frame_that_was_unmapped_cannot_be_read() {
    for (mapped, reached) in [(STRICT, false), (Mapped::OFF, true)] {
        let mut driver = used(mapped, Direction::Loop);
        let [rx, tx] = driver.rings();
        let (stale, _) = tx.stale();
        tx.add_stray(stale).unwrap();
        assert_eq!(wait(tx), Some(0), "it comes back in any case");
        // Nothing else was sent: what is received is what the stale address led to.
        // That is shown before the frame is given back.
        let came = rx.pop_stray().unwrap();
        assert_eq!(came.is_some(), reached, "{mapped:?}");
        let (_, report) = close(driver);
        assert_eq!((report.faults > 0, report.lost > 0), (!reached, !reached), "{report:?}");
    }
}

#[test]
fn a_buffer_that_was_unmapped_cannot_be_written() {
    for (mapped, reached) in [(STRICT, false), (Mapped::OFF, true)] {
        // Nothing is received, unless there is a buffer: the device has a frame for each.
        let mut driver = used(mapped, Direction::Tx);
        let [rx, tx] = driver.rings();
        let (stale, frame) = tx.stale();
        frame.fill(0xa5);
        rx.add_stray(stale).unwrap();
        assert_eq!(wait(rx).map(|len| len > 0), Some(reached), "{mapped:?}");
        let (_, frame) = tx.stale();
        assert_eq!(frame.to_vec().iter().all(|&byte| byte == 0xa5), !reached, "{mapped:?}");
        let (_, report) = close(driver);
        assert_eq!(report.faults > 0, !reached, "{mapped:?}: {report:?}");
    }
}
