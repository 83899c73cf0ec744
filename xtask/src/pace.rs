//! How fast the machine is at the moment: what a fixed piece of work takes.
//!
//! A processor runs at half its pace while its other thread, or another guest of its host, runs
//! too, and while caches are shared. A step's seconds then do not measure the step. The piece looks
//! keys up in a tree and allocates, as compilers do, so that the same things slow it down.

use std::{
    collections::BTreeMap,
    hint::black_box,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread,
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};

/// Seconds that the piece takes on the machine on which the steps' budgets were measured, when
/// quiet.
const QUIET: f64 = 0.005;
/// How often it is done.
const EVERY: Duration = Duration::from_millis(500);
const KEYS: u32 = 1 << 12;

/// Measures until it is dropped.
pub(crate) struct Pace {
    /// Seconds of pieces, and how many pieces.
    done: Arc<Mutex<(f64, u32)>>,
    _stop: Sender<()>,
}

impl Pace {
    pub(crate) fn begin() -> Pace {
        let (stop, stopped) = channel();
        let done = Arc::<Mutex<(f64, u32)>>::default();
        let into = Arc::clone(&done);
        thread::spawn(move || {
            loop {
                let took = piece();
                let mut done = into.lock().unwrap_or_else(PoisonError::into_inner);
                *done = (done.0 + took, done.1 + 1);
                drop(done);
                if stopped.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        });
        Pace { done, _stop: stop }
    }

    /// How many times as long as on a quiet machine work has taken since the last call. At least 1: a
    /// processor with larger caches does the piece sooner, but does not build sooner.
    pub(crate) fn slowness(&self) -> f64 {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let (seconds, pieces) = std::mem::take(&mut *done);
        if pieces == 0 { 1.0 } else { (seconds / f64::from(pieces) / QUIET).max(1.0) }
    }
}

/// Does the piece; returns the processor time that it took, in seconds.
fn piece() -> f64 {
    let begun = now();
    let mut tree = BTreeMap::new();
    let mut key = 1_u32;
    for n in 0..KEYS {
        // xorshift32: no key comes twice.
        key ^= key << 13;
        key ^= key >> 17;
        key ^= key << 5;
        tree.insert(key, Box::new(n));
        tree.range(key / 2..).next();
    }
    drop(black_box(tree));
    now() - begun
}

fn now() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_takes_time_and_is_counted_once() {
        let pace = Pace::begin();
        while pace.done.lock().unwrap().1 == 0 {
            thread::yield_now();
        }
        assert!(pace.slowness() >= 1.0);
    }
}
