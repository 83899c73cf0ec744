//! Requests that wait for translations, and when to check them again.

use std::collections::VecDeque;

/// How often all waiting requests are checked without an update. The IOTLB sends misses again by
/// itself; the check notes those again that could not be sent.
const PAUSE_NS: u64 = 5_000_000;
/// After an update, checks stop once this many requests still wait: updates come more or less in
/// the order of the misses, and there may be hundreds.
const STILL: usize = 8;

/// Which requests to check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// None: nothing has changed.
    None,
    /// An update or a refusal came: those that wait longest, unless they are late.
    Some,
    /// The interval is over: all of them.
    All,
}

/// Requests that wait for translations.
#[derive(Default)]
pub(super) struct Parked {
    waiting: VecDeque<u16>,
    /// Those that were still waiting at two checks of all: updates for others do not concern them.
    late: VecDeque<u16>,
    /// The count of updates and refusals at the last check.
    updates: u64,
    /// When to check all.
    pub(super) at_ns: u64,
}

impl Parked {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.late.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.late.len()
    }

    /// Adds a request that has to wait.
    pub(super) fn add(&mut self, at: u16) {
        self.waiting.push_back(at);
    }

    /// Starts the interval, with the count of updates so far.
    pub(super) fn begin(&mut self, updates: u64, now_ns: u64) {
        self.updates = updates;
        self.at_ns = now_ns.saturating_add(PAUSE_NS);
    }

    /// Which requests to check now; not again before something changes.
    #[inline]
    pub(super) fn look(&mut self, updates: u64, now_ns: u64) -> Look {
        if now_ns >= self.at_ns {
            self.begin(updates, now_ns);
            return Look::All;
        }
        if updates != self.updates {
            self.updates = updates;
            return Look::Some;
        }
        Look::None
    }

    /// Whether an update or a refusal came since the last check.
    pub(super) fn has_updates(&self, updates: u64) -> bool {
        self.updates != updates
    }

    /// Moves those that need not wait any longer, by what `ready` returns for each, into `into`.
    pub(super) fn sort(
        &mut self,
        look: Look,
        into: &mut Vec<u16>,
        mut ready: impl FnMut(u16) -> Ready,
    ) {
        let limit = match look {
            Look::None => return,
            Look::Some => STILL,
            Look::All => usize::MAX,
        };
        let mut still = 0;
        for _ in 0..self.waiting.len() {
            let Some(at) = self.waiting.pop_front() else { break };
            match ready(at) {
                Ready::Yes => into.push(at),
                Ready::No => {
                    self.waiting.push_back(at);
                    still += 1;
                }
                Ready::Late => self.late.push_back(at),
            }
            if still == limit {
                // Restore their order.
                self.waiting.rotate_right(still);
                break;
            }
        }
        if look == Look::All {
            for _ in 0..self.late.len() {
                let Some(at) = self.late.pop_front() else { break };
                match ready(at) {
                    Ready::Yes => into.push(at),
                    Ready::No | Ready::Late => self.late.push_back(at),
                }
            }
        }
    }

    /// Removes and returns all of them.
    pub(super) fn take(&mut self) -> Vec<u16> {
        self.waiting.drain(..).chain(self.late.drain(..)).collect()
    }
}

/// Whether a request can go on.
pub(super) enum Ready {
    Yes,
    No,
    /// No, and it has been waiting for long.
    Late,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sorts with these ready; returns which came out and how many were checked.
    fn sorted(parked: &mut Parked, look: Look, ready: &[u16]) -> (Vec<u16>, usize) {
        let (mut out, mut looks) = (Vec::new(), 0);
        parked.sort(look, &mut out, |at| {
            looks += 1;
            if ready.contains(&at) { Ready::Yes } else { Ready::No }
        });
        (out, looks)
    }

    #[test]
    fn an_update_costs_a_few_looks_however_many_wait() {
        let mut parked = Parked::default();
        (0..500).for_each(|at| parked.add(at));
        for first in 0..400 {
            assert_eq!(sorted(&mut parked, Look::Some, &[first]), (vec![first], 1 + STILL));
        }
        // A request far back is found only by the next check of all.
        assert_eq!(sorted(&mut parked, Look::Some, &[499]).0, [0u16; 0]);
        assert_eq!(sorted(&mut parked, Look::All, &[499, 420]).0, [420, 499]);
        assert_eq!(sorted(&mut parked, Look::None, &[401]), (vec![], 0));
    }

    #[test]
    fn requests_that_get_no_update_do_not_delay_others() {
        let mut parked = Parked::default();
        (0..20).for_each(|at| parked.add(at));
        parked.sort(Look::All, &mut Vec::new(), |at| if at < 10 { Ready::Late } else { Ready::No });
        assert_eq!(sorted(&mut parked, Look::Some, &[10]).0, [10]);
        assert_eq!(sorted(&mut parked, Look::Some, &[3]).0, [0u16; 0]);
        assert_eq!(sorted(&mut parked, Look::All, &[3]).0, [3]);
        assert_eq!(parked.take().len(), 18);
        assert!(parked.is_empty());
    }

    #[test]
    fn there_is_something_to_look_at_after_an_update_or_a_while() {
        let mut parked = Parked::default();
        parked.begin(7, 1000);
        assert_eq!(parked.look(7, 1000 + PAUSE_NS - 1), Look::None);
        assert_eq!(parked.look(8, 1001), Look::Some);
        assert_eq!(parked.look(8, 1002), Look::None);
        assert_eq!(parked.look(9, 1000 + PAUSE_NS), Look::All);
        assert_eq!(parked.look(9, 1000 + PAUSE_NS), Look::None);
    }
}
