//! When a disk of given bandwidth, rate and latency would be done.

/// What a paced disk can do. The default is the SSD of the measurements that Ringfence is compared
/// with: 2.5 GiB/s, 600,000 I/Os per second, 80 µs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Bytes per second.
    pub bytes_per_s: u64,
    /// I/Os per second.
    pub iops: u64,
    /// Nanoseconds from the moment a request is served to its completion.
    pub latency_ns: u64,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { bytes_per_s: 5 << 29, iops: 600_000, latency_ns: 80_000 }
    }
}

/// The clockwork of a paced disk: requests are served one after the other at the disk's bandwidth
/// and rate, and each completes a fixed latency after its service.
///
/// An idle disk starts at once; it does not save up for a burst. Times are nanoseconds of one
/// clock, and completions are handed out in order, so a queue of them is a FIFO.
#[derive(Clone, Debug)]
pub struct Pacer {
    pace: Pace,
    /// When the disk is free again, in 1/1024 ns so that 600,000 I/Os per second do not round.
    free_at: u128,
}

/// Fractions of a nanosecond kept between requests.
const FRACTION: u128 = 1024;

impl Pacer {
    /// A disk at rest.
    pub fn new(pace: Pace) -> Pacer {
        Pacer { pace, free_at: 0 }
    }

    /// When, in ns, a request of `bytes` that is submitted at `now_ns` completes.
    pub fn schedule(&mut self, now_ns: u64, bytes: u64) -> u64 {
        let second = 1_000_000_000 * FRACTION;
        let transfer = u128::from(bytes) * second / u128::from(self.pace.bytes_per_s.max(1));
        let slot = second / u128::from(self.pace.iops.max(1));
        let start = self.free_at.max(u128::from(now_ns) * FRACTION);
        self.free_at = start.saturating_add(transfer.max(slot));
        let done = u64::try_from(self.free_at / FRACTION).unwrap_or(u64::MAX);
        done.saturating_add(self.pace.latency_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_disk_moves_its_bandwidth() {
        let mut pacer = Pacer::new(Pace::default());
        let mut done = 0;
        let count = 40_960; // of 64 KiB: one second's worth at 2.5 GiB/s
        for _ in 0..count {
            done = pacer.schedule(0, 64 << 10);
        }
        assert_eq!(done, 1_000_000_000 + 80_000);
    }

    #[test]
    fn small_requests_are_bound_by_the_rate() {
        let mut pacer = Pacer::new(Pace::default());
        let mut done = 0;
        for _ in 0..600_000 {
            done = pacer.schedule(0, 512);
        }
        // Rounding may lose less than a millionth.
        assert!(done.abs_diff(1_000_080_000) < 1_000, "{done}");
    }

    #[test]
    fn the_pace_is_kept_however_long_the_clock_has_run() {
        let now_ns = u64::MAX / 2;
        let [first, second] = {
            let mut pacer = Pacer::new(Pace::default());
            [(); 2].map(|()| pacer.schedule(now_ns, 5 << 29))
        };
        assert_eq!([first, second].map(|done| done - now_ns), [1_000_080_000, 2_000_080_000]);
    }

    #[test]
    fn an_idle_disk_completes_after_its_latency_and_saves_nothing_up() {
        let mut pacer = Pacer::new(Pace::default());
        let first = pacer.schedule(1_000_000, 4096);
        let much_later = pacer.schedule(10_000_000_000, 4096);
        assert_eq!(first - 1_000_000, much_later - 10_000_000_000);
        assert!((81_000..82_000).contains(&(first - 1_000_000)));
    }
}
