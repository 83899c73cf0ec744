//! Limits how many lines a service may write of each kind. Peers decide how often most lines occur:
//! these must neither fill a disk nor displace other lines.
//!
//! A kind of line is a place in the code and a source: the value of the event's field `source`,
//! which names a socket, a device or a tap. Sources have their names from the command line, so that
//! a front end that connects again is the same source, and the number of kinds is bounded.

use std::collections::BTreeMap;

use tracing::Metadata;

/// How many lines of a kind may come at once, and how often there is one more, in ns: 8,640 a day,
/// some 1.3 MB.
const ONE: Rate = Rate { burst: 16, each_ns: 10_000_000_000 };
/// The same for all kinds together: 86,400 a day, some 13 MB. It does not hold back a line of a
/// kind that was silent for long.
const ALL: Rate = Rate { burst: 512, each_ns: 1_000_000_000 };

#[derive(Clone, Copy, Debug)]
struct Rate {
    burst: u64,
    each_ns: u64,
}

/// The state of the generic cell rate algorithm: the time at which everything written so far would
/// have been written at the steady rate.
#[derive(Clone, Copy, Debug, Default)]
struct Paid {
    until_ns: u64,
}

impl Paid {
    fn has_room(self, rate: Rate, now_ns: u64) -> bool {
        self.until_ns.saturating_sub(now_ns) <= (rate.burst - 1) * rate.each_ns
    }

    fn is_rested(self, now_ns: u64) -> bool {
        self.until_ns <= now_ns
    }

    fn take(&mut self, rate: Rate, now_ns: u64) {
        self.until_ns = self.until_ns.max(now_ns).saturating_add(rate.each_ns);
    }
}

/// A source, and the line's place in the code.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind(String, &'static str, u32);

impl Kind {
    pub(super) fn of(source: &str, about: &Metadata<'static>) -> Kind {
        Kind(source.to_owned(), about.file().unwrap_or_default(), about.line().unwrap_or_default())
    }
}

#[derive(Debug, Default)]
struct Written {
    paid: Paid,
    /// Lines left out since the last one that was written.
    left_out: u64,
}

/// What was written of each kind.
#[derive(Debug)]
pub(super) struct Limits {
    kinds: BTreeMap<Kind, Written>,
    all: Paid,
}

impl Limits {
    pub(super) const fn new() -> Limits {
        Limits { kinds: BTreeMap::new(), all: Paid { until_ns: 0 } }
    }

    /// Whether a line may be written; if so, how many of its kind were left out before it.
    pub(super) fn admit(&mut self, kind: Kind, now_ns: u64) -> Option<u64> {
        let own = self.kinds.entry(kind).or_default();
        let room = own.paid.is_rested(now_ns) || self.all.has_room(ALL, now_ns);
        if !room || !own.paid.has_room(ONE, now_ns) {
            own.left_out += 1;
            return None;
        }
        own.paid.take(ONE, now_ns);
        self.all.take(ALL, now_ns);
        Some(std::mem::take(&mut own.left_out))
    }

    /// As the process ends: the lines left out of each source that no later line has counted.
    pub(super) fn rest(&mut self) -> BTreeMap<String, u64> {
        let mut rest = BTreeMap::new();
        for (Kind(source, ..), written) in &mut self.kinds {
            match std::mem::take(&mut written.left_out) {
                0 => {}
                count => *rest.entry(source.clone()).or_default() += count,
            }
        }
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(source: &str, line: u32) -> Kind {
        Kind(source.to_owned(), "file", line)
    }

    /// How many of `count` lines at that time are written.
    fn written(limits: &mut Limits, kind: &Kind, count: u64, now_ns: u64) -> u64 {
        (0..count).map(|_| u64::from(limits.admit(kind.clone(), now_ns).is_some())).sum()
    }

    #[test]
    fn a_kind_has_a_burst_and_then_a_line_each_so_often() {
        let Rate { burst, each_ns } = ONE;
        let (mut limits, flood) = (Limits::new(), kind("a", 1));
        assert_eq!(written(&mut limits, &flood, 1000, 0), burst);
        assert_eq!(written(&mut limits, &flood, 1000, each_ns - 1), 0);
        assert_eq!(limits.admit(flood.clone(), each_ns), Some(1000 - burst + 1000));
        assert_eq!(limits.admit(flood.clone(), each_ns), None);
        for other in [kind("a", 2), kind("b", 1)] {
            assert_eq!(written(&mut limits, &other, 10, each_ns), 10);
        }
        assert_eq!(limits.rest(), BTreeMap::from([("a".to_owned(), 1)]));
        assert_eq!(limits.rest(), BTreeMap::new());
        // Unused allowance accumulates only up to the burst.
        assert_eq!(written(&mut limits, &flood, 1000, u64::MAX / 2), burst);
    }

    #[test]
    fn all_kinds_together_hold_back_no_line_of_a_kind_that_was_silent() {
        let mut limits = Limits::new();
        let all: u64 = (0..1000).map(|line| written(&mut limits, &kind("a", line), 100, 0)).sum();
        // The first line of each kind is always written.
        assert_eq!(all, ALL.burst + 1000 - ALL.burst / ONE.burst);
        assert_eq!(written(&mut limits, &kind("b", 0), 10, 0), 1);
    }
}
