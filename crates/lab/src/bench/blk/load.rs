//! One measurement: a driver, a back end, requests for a while.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::{
    bench::{
        process::Process,
        window::{LOOK, Mark, STUCK, TURNS, Window},
    },
    load::blk::BlkLoad,
};

/// How long requests run before they are counted.
const WARM_UP: Duration = Duration::from_millis(8);

/// Loads a device for `length`, and leaves it idle.
pub(super) fn measure(load: &mut BlkLoad, back: &[Process], length: Duration) -> Result<Window> {
    run(load, WARM_UP)?;
    let before = mark(load, back);
    run(load, length)?;
    let after = mark(load, back);
    load.drain(STUCK)?;
    Ok(before.until(&after))
}

fn mark(load: &BlkLoad, back: &[Process]) -> Mark {
    let cpu_ns = back.iter().map(Process::cpu_ns).sum();
    Mark::new(load.tally.completed(), cpu_ns, load.messages())
}

fn run(load: &mut BlkLoad, length: Duration) -> Result<()> {
    let begun = Instant::now();
    let (mut last, mut looked) = (begun, begun);
    loop {
        let mut completed = 0;
        for _ in 0..TURNS {
            completed += load.turn(true)?;
        }
        let now = Instant::now();
        if now.duration_since(looked) > LOOK {
            load.serve_misses()?;
            looked = now;
        }
        if completed > 0 {
            last = now;
        } else if now.duration_since(last) > STUCK {
            bail!("the back end does nothing any more");
        }
        if now.duration_since(begun) >= length {
            return Ok(());
        }
    }
}
