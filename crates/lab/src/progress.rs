//! How far it is.
#![allow(missing_docs)]
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A bar on a terminal, plain lines elsewhere (stderr).
    Auto,
    /// Nothing (`--json -`).
    Silent,
}

pub struct Progress {}

impl Progress {
    pub fn new(kind: Kind, total: u64, expected: Duration) -> Progress {
        let _ = (kind, total, expected);
        todo!()
    }
    /// What runs now ("randwrite_multi, lazy-mq, round 2 of 5").
    pub fn begin(&self, what: &str) {
        let _ = what;
        todo!()
    }
    /// One round is done.
    pub fn step(&self) {
        todo!()
    }
    /// A line above the bar (a warning).
    pub fn note(&self, line: &str) {
        let _ = line;
        todo!()
    }
    pub fn finish(&self) {
        todo!()
    }
}
