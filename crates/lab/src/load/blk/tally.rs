//! What became of requests.

/// What became of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Done, and what was looked at of their data is right.
    pub good: u64,
    /// Done, with other data than was written last.
    pub wrong: u64,
    /// Answered with an error, or with another length than was asked for.
    pub failed: u64,
}

impl Tally {
    /// How many were answered.
    pub fn answered(&self) -> u64 {
        self.good + self.wrong + self.failed
    }

    /// A request was done.
    #[inline]
    pub(super) fn note(&mut self, right: bool) {
        if right {
            self.good += 1;
        } else {
            self.wrong += 1;
        }
    }
}
