//! What unmapped memory a device reached, and for how long: the safety that a row bought.
//!
//! A row is placed by what its policy promises *and* by what was found: a row that promises
//! nothing, or that broke its promise, never looks like a strict one.

use serde::{Deserialize, Serialize};

use super::{PolicyRounds, Sample};

/// How long a device reaches memory after it was unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reach {
    /// Not once unmap has returned.
    None,
    /// Never: it reaches copies of the requests in flight, in memory of a proxy. No probe tries it.
    Copies,
    /// Until a flush that comes later.
    Flush,
    /// It is unmapped after the last I/O only: as long as the job runs, by choice. Memory of the
    /// bounce pools that is filled and read in place is as open.
    Persistent,
    /// Always: there is no protection.
    Always,
    /// The policy promised `none`, and unmapped memory was reached.
    Leaked,
}

/// How much memory stayed reachable after it was unmapped, and for how long, as the DMA API counts
/// it: all of a round, its run-in and its last flush included. Jobs that ran at the same time share
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Exposure {
    /// Until when.
    pub reach: Reach,
    /// The longest time, ms. `null`: it cannot be counted.
    pub max_ms: Option<f64>,
    /// Bytes times ms, all rounds together. `null`: it cannot be counted.
    pub byte_ms: Option<f64>,
    /// The same for each GiB mapped: what compares rows of different speed.
    pub byte_ms_per_gib: Option<f64>,
    /// Ranges that stayed reachable longer than the requested bound.
    pub late_releases: u64,
}

impl Exposure {
    /// From the rounds of a row. `None`: none of its I/O goes through the DMA API.
    pub(super) fn new(row: &PolicyRounds) -> Option<Exposure> {
        let samples = || row.rounds.iter().filter_map(|round| round.exposure);
        let reached = row.rounds.iter().any(reached);
        let reach = match (row.policy.as_str(), row.in_force()) {
            ("host" | "io_uring", _) => return None,
            // Whatever maps and unmaps the buffers, the device reaches them in between.
            ("persistent" | "zero-copy", _) => Reach::Persistent,
            ("proxy", _) => Reach::Copies,
            (_, "off") => Reach::Always,
            (_, policy) if promises_none(policy) => match reached {
                true => Reach::Leaked,
                false => Reach::None,
            },
            _ => Reach::Flush,
        };
        let late_releases =
            samples().fold(0, |sum: u64, sample| sum.saturating_add(sample.late_releases));
        let counted = matches!(reach, Reach::None | Reach::Flush) && samples().next().is_some();
        let max_ns = samples().map(|sample| sample.exposure.max_age_ns).max().unwrap_or(0);
        let byte_ns = samples().map(|sample| sample.exposure.byte_ns).fold(0, u128::saturating_add);
        let mapped: f64 = samples().map(|sample| sample.bytes as f64).sum();
        let byte_ms = byte_ns as f64 / 1e6;
        Some(Exposure {
            reach,
            max_ms: counted.then(|| max_ns as f64 / 1e6),
            byte_ms: counted.then_some(byte_ms),
            byte_ms_per_gib: (counted && mapped > 0.0).then(|| byte_ms / mapped * super::GIB),
            late_releases,
        })
    }

    /// [`byte_ms_per_gib`](Self::byte_ms_per_gib) in MiB times ms. 1024 is one millisecond for each
    /// byte, on average.
    pub fn mib_ms_per_gib(&self) -> Option<f64> {
        self.byte_ms_per_gib.map(|byte_ms| byte_ms / (1 << 20) as f64)
    }
}

/// Whether a policy of this name promises that nothing is reachable once unmap has returned.
fn promises_none(policy: &str) -> bool {
    policy.starts_with("strict") || matches!(policy, "bounce" | "auto")
}

/// Whether memory was reached, or was reachable, after it was unmapped.
fn reached(round: &Sample) -> bool {
    round.stale.is_some_and(|stale| stale.accesses > 0)
        || round.exposure.is_some_and(|dma| dma.exposure.byte_ns > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::StaleWindow;
    use ringfence_dma::Stats;

    const MIB: u64 = 1 << 20;

    fn round(byte_ns: u128, max_ns: u64) -> Sample {
        let mut counted = Stats::default();
        (counted.exposure.max_age_ns, counted.exposure.byte_ns) = (max_ns, byte_ns);
        (counted.bytes, counted.late_releases) = (512 * MIB, 1);
        Sample { exposure: Some(counted), ..Sample::default() }
    }

    fn row(policy: &str, effective: &str, rounds: Vec<Sample>) -> PolicyRounds {
        PolicyRounds {
            policy: policy.to_owned(),
            effective_policy: effective.to_owned(),
            rounds,
            ..PolicyRounds::default()
        }
    }

    fn reach(row: &PolicyRounds) -> Reach {
        Exposure::new(row).unwrap().reach
    }

    #[test]
    fn exposure_is_summed_over_rounds_and_taken_per_gib() {
        // Each byte of 512 MiB was exposed for 2 ms, then each for 4 ms.
        let each = |ms: u128| round(u128::from(512 * MIB) * ms * 1_000_000, 5_000_000);
        let found = Exposure::new(&row("lazy-mq", "lazy-mq", vec![each(2), each(4)])).unwrap();
        assert_eq!((found.reach, found.max_ms), (Reach::Flush, Some(5.0)));
        assert_eq!(found.byte_ms, Some((512 * MIB * 6) as f64));
        assert_eq!((found.mib_ms_per_gib(), found.late_releases), (Some(3.0 * 1024.0), 2));
    }

    #[test]
    fn what_never_unmaps_or_maps_nothing_is_unbounded_whatever_was_counted() {
        for (policy, effective, wanted) in [
            ("persistent", "strict+map", Reach::Persistent),
            ("persistent", "", Reach::Persistent),
            ("zero-copy", "zero-copy", Reach::Persistent),
            ("zero-copy", "strict+map", Reach::Persistent),
            ("proxy", "proxy", Reach::Copies),
            ("off", "", Reach::Always),
            ("off", "off", Reach::Always),
            ("lazy-mq", "off", Reach::Always),
        ] {
            let found = Exposure::new(&row(policy, effective, vec![round(0, 0)])).unwrap();
            assert_eq!(found.reach, wanted, "{policy} as {effective}");
            assert_eq!((found.max_ms, found.byte_ms), (None, None));
        }
        assert_eq!(Exposure::new(&row("host", "", vec![Sample::default()])), None);
        assert_eq!(Exposure::new(&row("io_uring", "", vec![Sample::default()])), None);
    }

    #[test]
    fn strict_is_what_promised_it_and_kept_it() {
        let strict = |rounds| reach(&row("strict+map", "strict+map", rounds));
        assert_eq!(strict(vec![round(0, 0); 3]), Reach::None);
        assert_eq!(strict(vec![round(0, 0), round(1, 1)]), Reach::Leaked);
        let stale = StaleWindow { accesses: 1, probes: 9, ..StaleWindow::default() };
        let probed = Sample { stale: Some(stale), ..round(0, 0) };
        assert_eq!(strict(vec![probed]), Reach::Leaked);
        // A copy promises the same for the buffer, and so does a policy that chooses between the
        // two.
        for policy in ["bounce", "auto"] {
            assert_eq!(reach(&row(policy, policy, vec![round(0, 0)])), Reach::None, "{policy}");
            assert_eq!(reach(&row(policy, policy, vec![round(1, 1)])), Reach::Leaked, "{policy}");
        }
        // By the policy in force, not by its name.
        assert_eq!(reach(&row("lazy-mq", "strict", vec![round(0, 0)])), Reach::None);
        // An unknown policy, and a lazy one that had nothing to expose, promised nothing.
        assert_eq!(reach(&row("brisk", "brisk", vec![round(0, 0)])), Reach::Flush);
        assert_eq!(reach(&row("lazy-sq", "lazy-sq", vec![round(0, 0)])), Reach::Flush);
    }

    #[test]
    fn nothing_mapped_is_no_division_by_zero() {
        let nothing = Sample { exposure: Some(Stats::default()), ..Sample::default() };
        let found = Exposure::new(&row("lazy-sq", "", vec![nothing])).unwrap();
        assert_eq!((found.byte_ms, found.byte_ms_per_gib), (Some(0.0), None));
        let none = Exposure::new(&row("lazy-sq", "", vec![Sample::default()])).unwrap();
        assert_eq!(none.byte_ms, None);
    }
}
