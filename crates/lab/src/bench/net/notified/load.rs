//! One measurement.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::time::{ClockId, clock_gettime};

use super::{Mapped, driver::Driver, link::Peer};
use crate::{
    bench::{
        net::{case::Direction, load::Window},
        threads,
    },
    run::device::Report,
};

/// How long frames go before they are counted.
const WARM_UP: Duration = Duration::from_millis(40);
/// From one look at the clock to the next, in turns of the driver.
const TURNS: u32 = 16;
/// Frames that nothing is heard of for so long are lost: more than a host of shared CPUs keeps a process
/// waiting. Only a window that loses some takes that long.
const OVERDUE: Duration = Duration::from_secs(10);

/// Starts a device process on `cpu`, and drives it from this thread for `length`.
pub(in crate::bench::net) fn measure(
    mapped: Mapped,
    direction: Direction,
    length: Duration,
    cpu: usize,
) -> Result<Window> {
    let start =
        |net, iommu, loops| threads::bound_to(cpu, move || Peer::process(net, iommu, loops));
    let mut driver = Driver::open(mapped, direction, start)?;
    run(&mut driver, WARM_UP)?;
    let before = Mark::of(&driver);
    run(&mut driver, length)?;
    let after = Mark::of(&driver);
    drain(&mut driver)?;
    let account = driver.close()?;
    let Report { iommu_refused, faults, .. } = account.report;
    ensure!(iommu_refused == 0, "the virtio-iommu refused {iommu_refused} requests");
    ensure!(faults == 0, "the device met {faults} faults: {:?}", account);

    let seconds = after.at.duration_since(before.at).as_secs_f64();
    let share = |ns: u64| ns as f64 / 1e9 / seconds;
    Ok(Window {
        seconds,
        packets: after.frames - before.frames,
        carried: account.carried,
        lost: account.lost,
        late: account.late,
        corrupt: account.corrupt,
        driver_share: share(after.cpu_ns - before.cpu_ns),
        backend_share: share(after.device_ns.saturating_sub(before.device_ns)),
        updates: after.maps - before.maps,
        invalidations: after.unmaps - before.unmaps,
        ..Window::default()
    })
}

/// What is read at the ends of a window.
struct Mark {
    at: Instant,
    frames: u64,
    cpu_ns: u64,
    device_ns: u64,
    /// Requests to the virtio-iommu.
    maps: u64,
    unmaps: u64,
}

impl Mark {
    fn of(driver: &Driver) -> Mark {
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        let iommu = driver.link.iommu();
        Mark {
            frames: driver.frames(),
            cpu_ns: cpu.tv_sec as u64 * 1_000_000_000 + cpu.tv_nsec as u64,
            device_ns: driver.link.device_cpu_ns(),
            maps: iommu.maps,
            unmaps: iommu.unmaps,
            at: Instant::now(),
        }
    }
}

fn run(driver: &mut Driver, length: Duration) -> Result<()> {
    let end = Instant::now() + length;
    while Instant::now() < end {
        for _ in 0..TURNS {
            driver.turn(true)?;
        }
    }
    Ok(())
}

/// Waits until what was sent is taken and, in a loop, back, or lost.
pub(super) fn drain(driver: &mut Driver) -> Result<()> {
    let mut since = Instant::now();
    while driver.outstanding() > 0 && since.elapsed() < OVERDUE {
        if driver.turn(false)? > 0 {
            since = Instant::now();
        }
    }
    Ok(())
}
