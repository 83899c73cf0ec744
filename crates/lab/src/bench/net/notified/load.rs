//! One measurement.

use std::{
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use ringfence_run::worker::Notify;

use super::{Mapped, driver::Driver};
use crate::{
    bench::{
        net::case::Direction,
        threads,
        window::{LOOK, Mark, STUCK, TURNS, Window},
    },
    load::net::Messages,
    run::{
        device::{Report, Served},
        process::Process,
    },
};

/// How long frames flow before they are counted.
const WARM_UP: Duration = Duration::from_millis(40);
/// Frames that neither come nor are taken for so long are lost: a host with shared CPUs keeps a
/// process waiting for less. Only a window that loses some takes that long.
const OVERDUE: Duration = Duration::from_secs(60);
/// The least number of frames that a window has a rate of.
const LEAST: u64 = 4096;

/// Starts a device process on `cpu`, and drives it from this thread for `length`.
pub(in crate::bench::net) fn measure(
    mapped: Mapped,
    direction: Direction,
    length: Duration,
    cpu: usize,
) -> Result<Window> {
    // What it is sent comes back, or it drops that and sends one frame again and again.
    let served = Served::Net { loops: direction == Direction::Loop };
    let start = |net: UnixStream, iommu: UnixStream| {
        let start = || Process::start(served, 1, Notify::Poll, net.into(), iommu.into());
        threads::bound_to(cpu, start)
    };
    let mut driver = Driver::open(mapped, direction, start)?;
    run(&mut driver, WARM_UP)?;
    let before = mark(&driver);
    run(&mut driver, length)?;
    // On a busy host a window lasts until it has a rate.
    while driver.frames() < before.done + LEAST {
        ensure!(before.at.elapsed() < length + STUCK, "the device carries next to nothing");
        run(&mut driver, LOOK)?;
    }
    let after = mark(&driver);
    drain(&mut driver)?;
    let (frames, report) = driver.close(Process::finish)?;
    let Report { iommu_refused, faults, .. } = report;
    ensure!(iommu_refused == 0, "the virtio-iommu refused {iommu_refused} requests");
    ensure!(faults == 0, "the device met {faults} faults: {frames:?}, {report:?}");
    Ok(Window { frames, ..before.until(&after) })
}

/// Requests to the virtio-iommu are the messages.
fn mark(driver: &Driver<Process>) -> Mark {
    let iommu = driver.link.iommu.stats();
    let messages = Messages { misses: 0, updates: iommu.maps, invalidations: iommu.unmaps };
    Mark::new(driver.frames(), driver.link.peer.cpu_ns(), messages)
}

fn run<P>(driver: &mut Driver<P>, length: Duration) -> Result<()> {
    let end = Instant::now() + length;
    while Instant::now() < end {
        for _ in 0..TURNS {
            driver.turn(true)?;
        }
    }
    Ok(())
}

/// Waits until what was sent is taken and, in a loop, back, or lost.
pub(super) fn drain<P>(driver: &mut Driver<P>) -> Result<()> {
    let mut since = Instant::now();
    while driver.outstanding() > 0 && since.elapsed() < OVERDUE {
        if driver.turn(false)? > 0 {
            since = Instant::now();
        }
    }
    Ok(())
}
