//! One measurement: a driver, a back end, requests for a while.

use std::{
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use crate::load::blk::{BlkLoad, Content, Tally};
use anyhow::{Result, bail};
use rustix::time::{ClockId, clock_gettime};

use super::case::Case;
use crate::bench::process::Process;

/// How long requests go before they are counted.
const WARM_UP: Duration = Duration::from_millis(8);
/// From one look at the clock to the next, in turns of the driver.
const TURNS: u32 = 16;
/// How often the driver looks for misses while there should be none.
const LOOK: Duration = Duration::from_micros(20);
/// Who does nothing for so long, though there is something to do, does nothing any more.
const STUCK: Duration = Duration::from_secs(30);

/// What one window told.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Window {
    pub(super) seconds: f64,
    /// Requests of the window.
    pub(super) requests: u64,
    /// The part of the window in which each end had a CPU.
    pub(super) driver_share: f64,
    pub(super) backend_share: f64,
    /// In the window.
    pub(super) misses: u64,
    pub(super) updates: u64,
    pub(super) invalidations: u64,
}

impl Window {
    pub(super) fn rate(&self) -> f64 {
        self.requests as f64 / self.seconds
    }

    /// CPU time of the back end for a request, microseconds.
    pub(super) fn backend_us(&self) -> f64 {
        self.backend_share * self.seconds * 1e6 / self.requests.max(1) as f64
    }
}

/// What is read at the ends of a window.
struct Mark {
    at: Instant,
    requests: u64,
    cpu_ns: u64,
    backend_ns: u64,
    misses: u64,
    updates: u64,
    invalidations: u64,
}

/// A device under load.
pub(super) struct Driver {
    load: BlkLoad,
    /// Nothing goes on without messages.
    fresh: bool,
    /// When something was answered last.
    last: Instant,
    looked: Instant,
}

impl Driver {
    /// Brings up the device behind `stream`.
    pub(super) fn open(stream: UnixStream, case: &Case, content: Content) -> Result<Driver> {
        let load = BlkLoad::open(stream, case.load(), content)?;
        let now = Instant::now();
        Ok(Driver { load, fresh: case.addressing.is_fresh(), last: now, looked: now })
    }

    /// Loads it for `length`, and leaves it with nothing to do.
    pub(super) fn measure(&mut self, process: &Process, length: Duration) -> Result<Window> {
        self.run(WARM_UP)?;
        let before = self.mark(process);
        self.run(length)?;
        let after = self.mark(process);
        self.load.drain(STUCK)?;
        let seconds = after.at.duration_since(before.at).as_secs_f64();
        let share = |ns: u64| ns as f64 / 1e9 / seconds;
        Ok(Window {
            seconds,
            requests: after.requests - before.requests,
            driver_share: share(after.cpu_ns - before.cpu_ns),
            backend_share: share(after.backend_ns.saturating_sub(before.backend_ns)),
            misses: after.misses - before.misses,
            updates: after.updates - before.updates,
            invalidations: after.invalidations - before.invalidations,
        })
    }

    /// Stops it; what became of all requests, and what the disk holds.
    pub(super) fn stop(self) -> Result<(Tally, Content)> {
        let tally = self.load.tally();
        Ok((tally, self.load.stop()?))
    }

    fn mark(&self, process: &Process) -> Mark {
        let messages = self.load.messages();
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        Mark {
            requests: self.load.tally().answered(),
            cpu_ns: cpu.tv_sec as u64 * 1_000_000_000 + cpu.tv_nsec as u64,
            backend_ns: process.cpu_ns(),
            misses: messages.misses,
            updates: messages.updates,
            invalidations: messages.invalidations,
            at: Instant::now(),
        }
    }

    fn run(&mut self, length: Duration) -> Result<()> {
        let end = Instant::now() + length;
        self.last = Instant::now();
        loop {
            let mut answered = 0;
            for _ in 0..TURNS {
                answered += self.load.turn(true)?;
                if self.fresh {
                    self.load.answer()?;
                }
            }
            let now = Instant::now();
            if now.duration_since(self.looked) > LOOK {
                self.load.answer()?;
                self.looked = now;
            }
            if answered > 0 {
                self.last = now;
            } else if now.duration_since(self.last) > STUCK {
                bail!("the back end does nothing any more");
            }
            if now >= end {
                return Ok(());
            }
        }
    }
}
