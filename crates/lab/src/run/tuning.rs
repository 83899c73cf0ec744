//! How a policy is carried out, beyond its name.

use std::{
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
};

use clap::Args;
use ringfence_dma::{FlushTuning, Policy, Trust};
use serde::{Deserialize, Serialize};

use super::{DiskChoice, Row, Usage};
use crate::list::{defaults, named, number};

/// The largest size that an option takes: more than any machine has.
const MOST_BYTES: u64 = 1 << 50;

// How a policy is carried out, beyond its name. `None`: as Linux tunes it, or without a bound.
#[allow(missing_docs, reason = "clap would take it for that of the command")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
pub struct Tuning {
    /// The most requests that share one map sync, under a policy with `+map`, and the most that
    /// share one unmap sync under `strict+map`: as many as are there, never waiting for more. 1
    /// maps and unmaps each on its own, as on the mailing list.
    #[arg(long, value_name = "N", default_value_t = Tuning::BATCH,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1024))]
    pub batch: usize,

    /// The most buffers that become one mapping, where they are adjacent in guest memory (see
    /// --page-run) and have the same direction; it is unmapped whole, after its last I/O. Never more
    /// than a quarter of a thread's requests in flight, or 4 if that is more.
    #[arg(long, value_name = "N", default_value_t = Tuning::CHUNK,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1024))]
    pub chunk: usize,

    /// Slots of each flush queue [default: 32768 for lazy-sq, 256 for lazy-mq].
    #[arg(long, value_name = "N",
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(2..=1 << 20))]
    pub flush_queue_slots: Option<usize>,

    /// How long an unmapped range waits for its flush at most [default: 1000 for lazy-sq, 10 for
    /// lazy-mq].
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=600_000))]
    pub flush_queue_ms: Option<u64>,

    /// Entries of a flush queue at which its flush starts, before the queue is full and an unmap
    /// must wait for one.
    #[arg(long, value_name = "N",
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..1 << 20))]
    pub high_water: Option<usize>,

    /// The longest that memory may stay reachable after it was unmapped, whatever the flush queue's
    /// slots and time.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=600_000))]
    pub max_exposure_ms: Option<u64>,

    /// The most bytes that may be unmapped and still reachable, all queues together: a number, or
    /// one with k, m or g (powers of 1024), at least a page.
    #[arg(long, value_name = "BYTES", value_parser = bound)]
    pub max_exposure_bytes: Option<u64>,

    /// The longest mapping that `bounce` copies; longer ones are mapped, strictly. A number of
    /// bytes, or one with k, m or g (powers of 1024) [default: 1m].
    #[arg(long, value_name = "BYTES", value_parser = threshold)]
    pub bounce_threshold: Option<u64>,

    /// The most bytes of bounce slots that the disk may hold at a time, as a size like the above,
    /// at least a page. A buffer without a slot is mapped; an I/O that must not be mapped fails
    /// [default: 256m, for `zero-copy` at least what the jobs need].
    #[arg(long, value_name = "BYTES", value_parser = bound)]
    pub bounce_quota: Option<u64>,

    /// Whether the disk is trusted: `auto`, as the machine says; `trusted`; `untrusted`, which is
    /// lazy in no row, whatever its name (the table says so), and gets a copy of any buffer that
    /// shares a page.
    #[arg(long, value_name = "auto|trusted|untrusted", default_value_t = TrustChoice::Auto)]
    pub trust: TrustChoice,
}

impl Tuning {
    /// The default of [`batch`](Self::batch).
    pub const BATCH: usize = 64;
    /// The default of [`chunk`](Self::chunk).
    pub const CHUNK: usize = 16;

    /// Whether `rows` can be run like this.
    ///
    /// # Errors
    /// Wrong usage: values that exclude each other, or that have no effect on any of the rows.
    pub fn check(&self, rows: &[Row]) -> Result<(), Usage> {
        let lazy = rows.iter().map(|row| row.policy()).filter(|policy| policy.is_lazy());
        for policy in lazy.clone() {
            let checked = self.flush(policy).check();
            checked.map_err(|error| Usage(format!("{policy}: {error}")))?;
        }
        let takes = |row: &Row| row.policy().bounces() || *row == Row::ZeroCopy;
        let pools = rows.iter().any(takes) || self.trust == TrustChoice::Untrusted;
        let bounce = rows.contains(&Row::Policy(Policy::Bounce));
        let lazy = lazy.count() > 0;
        let exposed = "only lazy policies leave unmapped memory exposed, and no row has one";
        let copies = "only bounce copies by length, and it is not among the rows";
        let slots = "no row uses bounce slots: bounce, auto and zero-copy do, and every row of an \
                     untrusted disk";
        // Whether each is given, and whether a row uses it.
        let options = [
            ("--max-exposure-ms", self.max_exposure_ms.is_some(), lazy, exposed),
            ("--max-exposure-bytes", self.max_exposure_bytes.is_some(), lazy, exposed),
            ("--high-water", self.high_water.is_some(), lazy, exposed),
            ("--bounce-threshold", self.bounce_threshold.is_some(), bounce, copies),
            ("--bounce-quota", self.bounce_quota.is_some(), pools, slots),
        ];
        match options.into_iter().find(|&(_, given, used, _)| given && !used) {
            Some((option, .., why)) => Err(Usage(format!("{option}: {why}"))),
            None => Ok(()),
        }
    }

    /// How the flush queues of `policy` are tuned: as Linux does it, except where something else is
    /// requested.
    pub(crate) fn flush(&self, policy: Policy) -> FlushTuning {
        let linux = FlushTuning::of(policy);
        FlushTuning {
            slots: self.flush_queue_slots.unwrap_or(linux.slots),
            interval_ms: self.flush_queue_ms.unwrap_or(linux.interval_ms),
            high_water: self.high_water,
            max_exposure_ms: self.max_exposure_ms,
            max_exposure_bytes: self.max_exposure_bytes,
            ..linux
        }
    }
}

impl Default for Tuning {
    fn default() -> Tuning {
        defaults()
    }
}

/// A size in bytes, at least a page: with a smaller bound no range could wait, or be copied.
fn bound(text: &str) -> Result<u64, String> {
    number(text, "size", ("kmg", 1024), 4096..=MOST_BYTES)
}

/// A size in bytes, at least that of the shortest I/O.
fn threshold(text: &str) -> Result<u64, String> {
    number(text, "size", ("kmg", 1024), 512..=MOST_BYTES)
}

named! {
    /// Whether the disk is trusted.
    #[derive(Default, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    TrustChoice, "{:?} is no trust setting: there are {}":
    /// As the machine reports it.
    #[default]
    Auto = "auto",
    /// It may have any policy.
    Trusted = "trusted",
    /// It gets a strict policy, whatever was requested.
    Untrusted = "untrusted",
}

impl TrustChoice {
    /// Whether `disk` is trusted. If sysfs does not show that for a block device, it is an error:
    /// the user can then say it.
    ///
    /// # Errors
    /// sysfs makes no sense, or cannot be read.
    pub(crate) fn trust(self, disk: &DiskChoice) -> Result<Trust, Usage> {
        if self == TrustChoice::Untrusted {
            return Ok(Trust::described(false));
        }
        // Memory is of our own process; a file is as far away as the file system puts it.
        if self == TrustChoice::Auto
            && let DiskChoice::Path(path) = disk
            && let Ok(found) = std::fs::metadata(path)
            && found.file_type().is_block_device()
        {
            let number = found.rdev();
            let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
            let finding = Trust::from_sysfs(Path::new(&format!("/sys/dev/block/{major}:{minor}")));
            return finding.map(|finding| finding.trust).map_err(|error| {
                Usage(format!("{error}; use --trust trusted or --trust untrusted"))
            });
        }
        Ok(Trust::Trusted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::list::List;

    fn rows(list: &str) -> Vec<Row> {
        list.parse::<List<Row>>().unwrap().0
    }

    #[test]
    fn a_bound_without_effect_on_any_row_is_wrong_usage() {
        let bounds = [
            Tuning { max_exposure_ms: Some(5), ..Tuning::default() },
            Tuning { max_exposure_bytes: Some(1 << 20), ..Tuning::default() },
            Tuning { high_water: Some(100), ..Tuning::default() },
        ];
        let options = ["--max-exposure-ms", "--max-exposure-bytes", "--high-water"];
        for (tuning, option) in bounds.into_iter().zip(options) {
            for list in ["host", "off,strict+map", "persistent"] {
                let error = tuning.check(&rows(list)).unwrap_err();
                assert!(error.0.contains(option), "{error}");
            }
            tuning.check(&rows("off,lazy-mq")).unwrap();
        }
        Tuning::default().check(&rows("off")).unwrap();
    }

    #[test]
    fn what_bounds_copies_needs_a_row_that_copies() {
        let threshold = Tuning { bounce_threshold: Some(4096), ..Tuning::default() };
        let quota = Tuning { bounce_quota: Some(1 << 20), ..Tuning::default() };
        threshold.check(&rows("off,bounce")).unwrap();
        for list in ["off,auto", "zero-copy", "strict+map"] {
            let error = threshold.check(&rows(list)).unwrap_err().0;
            assert!(error.contains("--bounce-threshold"), "{list}: {error}");
        }
        for list in ["bounce", "off,auto", "zero-copy"] {
            quota.check(&rows(list)).unwrap();
        }
        let error = quota.check(&rows("off,persistent,lazy-mq")).unwrap_err().0;
        assert!(error.contains("--bounce-quota"), "{error}");
        let untrusted = Tuning { trust: TrustChoice::Untrusted, ..quota };
        untrusted.check(&rows("strict")).unwrap();
    }

    #[test]
    fn a_mark_lies_within_its_queue() {
        let at = |mark| Tuning {
            flush_queue_slots: Some(256),
            high_water: Some(mark),
            ..Tuning::default()
        };
        at(255).check(&rows("lazy-sq")).unwrap();
        let error = at(256).check(&rows("off,lazy-sq")).unwrap_err().0;
        assert!(error.contains("lazy-sq") && error.contains("from 1 to 255"), "{error}");
        // Linux's queues by default: 32,768 slots, or 256 a CPU.
        let mark = Tuning { high_water: Some(300), ..Tuning::default() };
        mark.check(&rows("lazy-sq+map")).unwrap();
        assert!(mark.check(&rows("lazy-sq,lazy-mq")).unwrap_err().0.contains("lazy-mq"));
    }

    #[test]
    fn queues_are_linuxs_but_for_what_was_given() {
        let tuning = Tuning { max_exposure_ms: Some(5), ..Tuning::default() };
        let linux = FlushTuning::of(Policy::LazyMq);
        let wanted = FlushTuning { max_exposure_ms: Some(5), ..linux };
        assert_eq!(tuning.flush(Policy::LazyMq), wanted);
        let tuning = Tuning {
            flush_queue_slots: Some(64),
            flush_queue_ms: Some(3),
            high_water: Some(32),
            max_exposure_bytes: Some(1 << 20),
            ..tuning
        };
        let wanted = FlushTuning {
            slots: 64,
            interval_ms: 3,
            high_water: Some(32),
            max_exposure_bytes: Some(1 << 20),
            ..wanted
        };
        assert_eq!(tuning.flush(Policy::LazyMq), wanted);
    }

    #[test]
    fn trust_has_names() {
        for trust in TrustChoice::ALL {
            assert_eq!(trust.to_string().parse(), Ok(trust));
        }
        assert!("maybe".parse::<TrustChoice>().unwrap_err().contains("auto, trusted, untrusted"));
    }
}
