//! What a queue has done.

use std::ops::{AddAssign, SubAssign};

/// What a queue has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct QueueStats {
    /// Requests completed.
    pub requests: u64,
    /// Of these, completed with a status other than OK.
    pub failed: u64,
    /// Bytes of data moved.
    pub bytes: u64,
    /// Interrupts sent.
    pub interrupts: u64,
    /// How often a request had to wait for a translation.
    pub parked: u64,
    /// How often the ring was not mapped.
    pub away: u64,
    /// How often the ring was not read further because requests in progress had as many descriptors
    /// as allowed.
    pub full: u64,
}

impl AddAssign for QueueStats {
    fn add_assign(&mut self, more: QueueStats) {
        self.requests += more.requests;
        self.failed += more.failed;
        self.bytes += more.bytes;
        self.interrupts += more.interrupts;
        self.parked += more.parked;
        self.away += more.away;
        self.full += more.full;
    }
}

impl SubAssign for QueueStats {
    fn sub_assign(&mut self, less: QueueStats) {
        self.requests -= less.requests;
        self.failed -= less.failed;
        self.bytes -= less.bytes;
        self.interrupts -= less.interrupts;
        self.parked -= less.parked;
        self.away -= less.away;
        self.full -= less.full;
    }
}
