//! How many lines each source of the log may have. A peer decides how much there is to say of it: it must neither
//! fill a disk nor leave no room for what there is to say of others.
//!
//! A source is what the field `source` of an event names: a socket, a device, a tap. Its name comes from the
//! command line, so that a front end that connects anew is the same source, and there are no more of them than the
//! service has sockets and devices. Events without that field are the process's own, and no peer causes them.

use std::collections::BTreeMap;

/// Lines of a source that may come at once, which is more than is said of a machine that starts, is reset and ends;
/// and how often there is one more, in ns: 21,600 lines a day, some 3 MB.
const ONE: (u64, u64) = (32, 4_000_000_000);
/// The same for all sources together, and once more for the process's own lines: 86,400 a day, some 13 MB.
const ALL: (u64, u64) = (512, 1_000_000_000);

/// When there is room for how many lines (the generic cell rate algorithm).
#[derive(Debug, Default)]
struct Rate {
    /// When all that was said would have been said at the steady rate.
    paid_ns: u64,
}

impl Rate {
    fn has_room(&self, (burst, each_ns): (u64, u64), now_ns: u64) -> bool {
        self.paid_ns.saturating_sub(now_ns) <= (burst - 1) * each_ns
    }

    fn take(&mut self, (_, each_ns): (u64, u64), now_ns: u64) {
        self.paid_ns = self.paid_ns.max(now_ns).saturating_add(each_ns);
    }
}

#[derive(Debug, Default)]
struct Source {
    rate: Rate,
    /// Lines that were left out since the last that was not.
    left_out: u64,
}

/// What was said of each source.
#[derive(Debug)]
pub(super) struct Limits {
    sources: BTreeMap<String, Source>,
    all: Rate,
}

impl Limits {
    pub(super) const fn new() -> Limits {
        Limits { sources: BTreeMap::new(), all: Rate { paid_ns: 0 } }
    }

    /// Whether a line of `source` may be said: how many before it may not have been.
    pub(super) fn admit(&mut self, source: &str, now_ns: u64) -> Option<u64> {
        if !self.sources.contains_key(source) {
            self.sources.insert(source.to_owned(), Source::default());
        }
        let own = self.sources.get_mut(source)?;
        // What peers cause leaves room for what the process says of itself.
        let (rate, all) = match source {
            "" => (ALL, None),
            _ => (ONE, Some(&mut self.all)),
        };
        if !own.rate.has_room(rate, now_ns)
            || all.as_ref().is_some_and(|all| !all.has_room(ALL, now_ns))
        {
            own.left_out += 1;
            return None;
        }
        own.rate.take(rate, now_ns);
        if let Some(all) = all {
            all.take(ALL, now_ns);
        }
        Some(std::mem::take(&mut own.left_out))
    }

    /// What nobody has been told of yet, as the process ends.
    pub(super) fn rest(&mut self) -> Vec<(String, u64)> {
        let left_out = |(name, source): (&String, &mut Source)| {
            let count = std::mem::take(&mut source.left_out);
            (count > 0).then(|| (name.clone(), count))
        };
        self.sources.iter_mut().filter_map(left_out).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of `count` lines at that time are said.
    fn said(limits: &mut Limits, source: &str, count: u64, now_ns: u64) -> u64 {
        (0..count).map(|_| u64::from(limits.admit(source, now_ns).is_some())).sum()
    }

    #[test]
    fn a_source_has_a_burst_and_then_a_line_each_so_often() {
        let (burst, each_ns) = ONE;
        let mut limits = Limits::new();
        assert_eq!(said(&mut limits, "a", 1000, 0), burst);
        assert_eq!(said(&mut limits, "a", 1000, each_ns - 1), 0);
        assert_eq!(limits.admit("a", each_ns), Some(1000 - burst + 1000));
        assert_eq!(limits.admit("a", each_ns), None);
        assert_eq!(said(&mut limits, "b", 10, each_ns), 10);
        assert_eq!(limits.rest(), [("a".to_owned(), 1)]);
        assert_eq!(limits.rest(), []);
        // What was not said is not saved up beyond the burst.
        assert_eq!(said(&mut limits, "a", 1000, u64::MAX / 2), burst);
    }

    #[test]
    fn all_sources_together_leave_room_for_the_process_itself() {
        let (burst, each_ns) = ALL;
        let mut limits = Limits::new();
        let sources = (0..100).map(|source| source.to_string());
        let all: u64 = sources.map(|source| said(&mut limits, &source, 100, 0)).sum();
        assert_eq!(all, burst);
        assert_eq!(said(&mut limits, "new", 1, 0), 0);
        assert_eq!(said(&mut limits, "", 1000, 0), burst);
        assert_eq!(said(&mut limits, "new", 2, each_ns), 1);
    }
}
