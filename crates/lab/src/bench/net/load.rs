//! One measurement: a driver, a back end, packets for a while.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{
    backend::End,
    case::{Case, Direction},
    testpmd::Counted,
};
use crate::{
    bench::{
        process::Process,
        window::{Frames, LOOK, Mark, STUCK, TURNS, Window},
    },
    load::net::{Arrivals, Expect, NetDriver},
};

/// Packets that are sent at once.
const BURST: usize = 64;
/// How long packets flow before they are counted.
const WARM_UP: Duration = Duration::from_millis(40);
/// Frames that the back end has taken and not given back for so long are lost: a host with shared
/// CPUs keeps its process waiting for less.
const OVERDUE: Duration = Duration::from_secs(2);
/// How long messages are timed.
const MESSAGES: Duration = Duration::from_millis(25);
/// Messages in flight when they are many.
pub(super) const DEPTH: u64 = 64;

/// Drives `backend` for `length`.
pub(super) fn measure(backend: &mut End, case: &Case, length: Duration) -> Result<Window> {
    backend.begin(case.direction).context("beginning")?;
    let expect = match case.direction {
        Direction::Rx => Expect::Foreign,
        Direction::Tx | Direction::Loop => Expect::Own,
    };
    let driver = NetDriver::open(backend.connect()?, case.driver(), expect)?;
    let mut load = Load::new(driver, case);
    load.run(WARM_UP)?;

    let before = load.mark(backend);
    load.run(length)?;
    // A window in which nothing was carried has no rate: on a busy host it lasts until something is
    // carried.
    while load.packets() == before.done {
        ensure!(before.at.elapsed() < length + STUCK, "the back end carries nothing");
        load.run(LOOK)?;
    }
    let after = load.mark(backend);

    load.drain()?;
    let counted = backend.end().context("ending")?;
    // Takes what the back end still gave before it stopped.
    load.drain()?;
    let frames = account(case.direction, &load.driver.arrivals, load.driver.taken, counted);
    let mut window = Window { frames, ..before.until(&after) };
    if case.addressing().is_fresh() {
        window.single_rate = Some(load.message_rate(1)?);
        window.many_rate = Some(load.message_rate(DEPTH)?);
    }
    load.driver.stop().context("stopping the rings")?;
    Ok(window)
}

/// What became of the frames of a driver whose frames were `taken`. What the back end has counted, if it
/// has, against the driver's count: a difference either way is a loss.
pub(super) fn account(
    direction: Direction,
    arrivals: &Arrivals,
    taken: u64,
    counted: Option<Counted>,
) -> Frames {
    let (carried, lost) = match (direction, counted) {
        (Direction::Loop, _) => (arrivals.sent, arrivals.lost),
        (Direction::Tx, Some(counted)) => (taken, taken.abs_diff(counted.taken)),
        (Direction::Tx, None) => (taken, 0),
        (Direction::Rx, Some(counted)) => {
            (counted.given, counted.given.abs_diff(arrivals.good + arrivals.corrupt))
        }
        (Direction::Rx, None) => (arrivals.good, 0),
    };
    Frames { carried, lost, late: arrivals.late, corrupt: arrivals.corrupt }
}

struct Load {
    driver: NetDriver,
    direction: Direction,
    /// Whether each packet needs misses served, since its addresses are new.
    fresh: bool,
    /// When something last came.
    last: Instant,
    looked: Instant,
}

impl Load {
    fn new(driver: NetDriver, case: &Case) -> Load {
        let now = Instant::now();
        let (direction, fresh) = (case.direction, case.addressing().is_fresh());
        Load { driver, direction, fresh, last: now, looked: now }
    }

    /// How many were carried so far.
    fn packets(&self) -> u64 {
        match self.direction {
            Direction::Tx => self.driver.taken,
            Direction::Rx | Direction::Loop => self.driver.arrivals.good,
        }
    }

    fn mark(&self, backend: &End) -> Mark {
        let cpu_ns = backend.processes.iter().map(Process::cpu_ns).sum();
        Mark::new(self.packets(), cpu_ns, self.driver.messages())
    }

    fn run(&mut self, length: Duration) -> Result<()> {
        let end = Instant::now() + length;
        loop {
            let mut came = 0;
            for _ in 0..TURNS {
                came += self.turn(true)?;
            }
            let now = Instant::now();
            self.look(now, came)?;
            if now >= end {
                return Ok(());
            }
        }
    }

    /// One turn of the driver; returns how many packets came.
    #[inline]
    fn turn(&mut self, send: bool) -> Result<usize> {
        let came = match self.direction {
            Direction::Tx => 0,
            Direction::Rx | Direction::Loop => self.driver.receive()?,
        };
        match self.direction {
            Direction::Tx => self.driver.send(if send { BURST } else { 0 })?,
            Direction::Loop => {
                let most = if send { self.driver.window().min(BURST) } else { 0 };
                self.driver.send(most)?
            }
            Direction::Rx => 0,
        };
        if self.fresh {
            self.driver.serve_misses()?;
        }
        Ok(came)
    }

    /// What need not be done in each turn.
    fn look(&mut self, now: Instant, came: usize) -> Result<()> {
        if now.duration_since(self.looked) > LOOK {
            self.driver.serve_misses()?;
            self.looked = now;
        }
        if came > 0 || self.driver.arrivals.outstanding() == 0 {
            self.last = now;
        } else if self.direction == Direction::Loop
            && self.driver.queued() == 0
            && now.duration_since(self.last) > OVERDUE
        {
            self.driver.arrivals.give_up();
            self.last = now;
        }
        Ok(())
    }

    /// Waits until what was sent is taken and, in a loop, back, or lost.
    fn drain(&mut self) -> Result<()> {
        self.last = Instant::now();
        let (mut left, mut since) = (u64::MAX, self.last);
        loop {
            let came = self.turn(false)?;
            let now = Instant::now();
            self.look(now, came)?;
            let queued = self.driver.queued() as u64;
            let now_left = match self.direction {
                Direction::Tx => queued,
                Direction::Rx => came as u64,
                Direction::Loop => queued + self.driver.arrivals.outstanding(),
            };
            if now_left == 0 {
                return Ok(());
            }
            if now_left != left {
                (left, since) = (now_left, now);
            } else if now.duration_since(since) > STUCK {
                anyhow::bail!("the back end does nothing any more");
            }
        }
    }

    /// UPDATEs with their replies a second, at most `depth` in flight.
    fn message_rate(&mut self, depth: u64) -> Result<f64> {
        let begun = Instant::now();
        let mut count = 0;
        while begun.elapsed() < MESSAGES {
            self.driver.round_trips(depth, depth)?;
            count += depth;
        }
        Ok(count as f64 / begun.elapsed().as_secs_f64())
    }
}
