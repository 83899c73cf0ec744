//! Where the host has put the two CPUs: what a cache line costs between them.
//!
//! A guest's CPUs may share a core, a cluster of cores or a socket, and the host moves them. How
//! fast two processes communicate over shared memory depends on that. So it is measured before and
//! after each window.
//!
//! Ordering: the number itself is all that goes from one to the other.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::bench::threads;

/// Round trips of a block; the median of blocks counts, since some are interrupted.
const BLOCK: u64 = 200;
const BLOCKS: usize = 11;
/// Neither thread waits longer for the other, which may have no CPU for a while.
const TIMEOUT: std::time::Duration = std::time::Duration::from_millis(200);

/// Two round trips differ if one takes so many times the other, or more.
const APART: f64 = 1.5;

#[repr(align(128))]
struct Line(AtomicU64);

/// Nanoseconds of a round trip of a cache line between two CPUs; `None` if there is but one, or the
/// machine is too busy to measure it.
pub(in crate::bench) fn round_trip_ns(cpus: [usize; 2]) -> Option<f64> {
    if cpus[0] == cpus[1] {
        return None;
    }
    let line = &Line(AtomicU64::new(0));
    let times = threads::together(&cpus, vec![0, 1], |_, index: u64| {
        let mut blocks = Vec::new();
        // Odd values are the first thread's to write, even ones the second's.
        for block in 0..BLOCKS as u64 {
            let begun = std::time::Instant::now();
            for turn in block * BLOCK..(block + 1) * BLOCK {
                let (wait, write) = (2 * turn + index, 2 * turn + index + 1);
                let mut spins = 0_u32;
                while line.0.load(Ordering::Acquire) != wait {
                    std::hint::spin_loop();
                    spins += 1;
                    if spins.is_multiple_of(4096) && begun.elapsed() > TIMEOUT {
                        return Vec::new();
                    }
                }
                line.0.store(write, Ordering::Release);
            }
            blocks.push(begun.elapsed().as_nanos() as f64 / BLOCK as f64);
        }
        blocks
    });
    let mut blocks = times.into_iter().next()?;
    blocks.sort_by(f64::total_cmp);
    (blocks.len() == BLOCKS).then(|| blocks[BLOCKS / 2])
}

/// Whether the CPUs were placed differently for round trips of `a` and of `b`.
pub(in crate::bench) fn differ(a: f64, b: f64) -> bool {
    a.max(b) >= APART * a.min(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_goes_to_and_fro() {
        assert_eq!(round_trip_ns([0, 0]), None);
        let cpus = threads::cpus();
        if let [a, b, ..] = cpus[..] {
            // On a busy machine there may be no result.
            assert!(round_trip_ns([a, b]).is_none_or(|ns| ns > 1.0));
        }
    }

    #[test]
    fn states_are_distinguished() {
        assert!(differ(140.0, 390.0) && differ(390.0, 140.0) && differ(78.0, 150.0));
        assert!(!differ(138.0, 160.0) && !differ(380.0, 400.0));
    }
}
