//! What was copied instead of mapped, and the memory that it took.

use super::{JobReport, PolicyResult};
use crate::text::{bytes, clauses, percent, plain};

/// The counts of one round for copies, and for the pools they were made in. Jobs that ran at the
/// same time share them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BounceSample {
    /// Mappings of all kinds.
    pub maps: u64,
    /// Those of them that were copies.
    pub bounced: u64,
    /// Bytes that were copied for them, in and out.
    pub copied_bytes: u64,
    /// Mappings that were to be copies, and were mapped since no slot was free.
    pub not_bounced: u64,
    /// The most memory that the pools had at a time, bytes: from the round's beginning to its end.
    pub pool_bytes: u64,
    /// Memory of the pools that was taken to be filled and read in place, bytes at a time.
    pub taken_bytes: u64,
}

/// What the rows of a job copied, a clause a row, as many of them in a line as fit.
pub(super) fn lines(job: &JobReport) -> Vec<String> {
    clauses("bounce", job.results.iter().filter_map(|row| clause(job, row)))
}

/// `None` for a row that has no pools, or never touched them.
fn clause(job: &JobReport, row: &PolicyResult) -> Option<String> {
    let pools = row.pool_bytes.filter(|&bytes| bytes > 0)?;
    let mut words = vec![plain(&job.label(row))];
    match row.taken_bytes {
        Some(taken) if taken > 0 => words.push(format!("in place, {} taken", bytes(taken))),
        _ => words.push(format!(
            "{} copied, {} an I/O, {} without a slot",
            row.bounced_fraction.map_or("-".to_owned(), percent),
            bytes(row.copied_bytes_per_io.unwrap_or(0.0).round() as u64),
            row.not_bounced.unwrap_or(0),
        )),
    }
    words.push(format!("(pools {})", bytes(pools)));
    Some(words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        job::Job,
        report::{PolicyRounds, Sample},
    };

    fn row(policy: &str, rounds: Vec<Option<BounceSample>>) -> PolicyRounds {
        let round = |bounce| Sample { ios: 100, bounce, ..Sample::default() };
        PolicyRounds {
            policy: policy.to_owned(),
            rounds: rounds.into_iter().map(round).collect(),
            ..PolicyRounds::default()
        }
    }

    fn copied(maps: u64, bounced: u64) -> BounceSample {
        let pool_bytes = 1 << (16 + bounced % 4);
        BounceSample {
            maps,
            bounced,
            copied_bytes: bounced * 4096,
            pool_bytes,
            ..Default::default()
        }
    }

    #[test]
    fn copies_are_parts_of_mappings_and_of_ios() {
        let rounds =
            vec![Some(copied(50, 10)), Some(BounceSample { not_bounced: 3, ..copied(50, 27) })];
        let job = JobReport::new(&Job::default(), 1, &[row("auto", rounds)]);
        let auto = &job.results[0];
        assert_eq!(auto.bounced_fraction, Some(0.37));
        assert_eq!(auto.bounced_per_io, Some(0.185));
        assert_eq!(auto.copied_bytes_per_io, Some(0.185 * 4096.0));
        // The most of any round, not a sum.
        assert_eq!((auto.not_bounced, auto.pool_bytes), (Some(3), Some(1 << 19)));
        assert_eq!(
            lines(&job),
            ["bounce: auto 37.0% copied, 758 B an I/O, 3 without a slot (pools 512 KiB)"]
        );
    }

    #[test]
    fn what_has_no_pools_or_leaves_them_alone_is_not_shown() {
        let idle = BounceSample { maps: 10, ..BounceSample::default() };
        let rows = [row("strict", vec![None]), row("strict+map", vec![Some(idle)])];
        let job = JobReport::new(&Job::default(), 1, &rows);
        assert!(lines(&job).is_empty());
        let figures = |row: &PolicyResult| (row.bounced_fraction, row.not_bounced, row.pool_bytes);
        assert_eq!(figures(&job.results[0]), (None, None, None));
        assert_eq!(figures(&job.results[1]), (Some(0.0), Some(0), Some(0)));
    }

    #[test]
    fn what_is_taken_is_shown_and_nothing_mapped_is_no_division_by_zero() {
        let taken =
            BounceSample { pool_bytes: 1 << 20, taken_bytes: 65536, ..BounceSample::default() };
        let job = JobReport::new(&Job::default(), 1, &[row("zero-copy", vec![Some(taken)])]);
        assert_eq!(lines(&job), ["bounce: zero-copy in place, 64 KiB taken (pools 1 MiB)"]);
        let row = &job.results[0];
        assert_eq!((row.bounced_fraction, row.copied_bytes_per_io), (None, Some(0.0)));
        assert_eq!(row.taken_bytes, Some(65536));
    }
}
