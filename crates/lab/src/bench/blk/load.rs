//! One measurement: a driver, a back end, requests for a while.

use std::{
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

use super::case::Case;
use crate::{
    bench::{
        process::Process,
        window::{LOOK, Mark, STUCK, TURNS, Window},
    },
    load::blk::{BlkLoad, Content, Tally},
};

/// How long requests run before they are counted.
const WARM_UP: Duration = Duration::from_millis(8);

/// A device under load.
pub(super) struct Driver {
    load: BlkLoad,
    /// Whether each request needs misses served, since its addresses are new.
    fresh: bool,
    /// When a request last completed.
    last: Instant,
    looked: Instant,
}

impl Driver {
    /// Brings up the device behind `stream`.
    pub(super) fn open(stream: UnixStream, case: &Case, content: Content) -> Result<Driver> {
        let load = BlkLoad::open(stream, case.load(), content)?;
        let now = Instant::now();
        Ok(Driver { load, fresh: case.addressing().is_fresh(), last: now, looked: now })
    }

    /// Loads it for `length`, and leaves it idle.
    pub(super) fn measure(&mut self, back: &[Process], length: Duration) -> Result<Window> {
        self.run(WARM_UP)?;
        let before = self.mark(back);
        self.run(length)?;
        let after = self.mark(back);
        self.load.drain(STUCK)?;
        Ok(before.until(&after))
    }

    /// Stops it; returns what became of all requests, and what the disk holds.
    pub(super) fn stop(&mut self) -> Result<(Tally, &Content)> {
        let tally = self.load.tally();
        Ok((tally, self.load.stop()?))
    }

    fn mark(&self, back: &[Process]) -> Mark {
        let cpu_ns = back.iter().map(Process::cpu_ns).sum();
        Mark::new(self.load.tally().completed(), cpu_ns, self.load.messages())
    }

    fn run(&mut self, length: Duration) -> Result<()> {
        let end = Instant::now() + length;
        self.last = Instant::now();
        loop {
            let mut completed = 0;
            for _ in 0..TURNS {
                completed += self.load.turn(true)?;
                if self.fresh {
                    self.load.serve_misses()?;
                }
            }
            let now = Instant::now();
            if now.duration_since(self.looked) > LOOK {
                self.load.serve_misses()?;
                self.looked = now;
            }
            if completed > 0 {
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
