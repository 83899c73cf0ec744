//! Which block a job touches next.
#![allow(missing_docs)]

use crate::job::Job;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Read,
    Write,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Io {
    pub op: Op,
    /// Offset on the disk, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u32,
}

/// The I/O of one virtual job (one of `numjobs`). Endless iterator if the job is `time_based`, else it ends after `size` bytes.
#[derive(Clone, Debug)]
pub struct Workload {}

impl Workload {
    /// `clone`: which of `numjobs`; `seed`: the same for all policies of a round.
    pub fn new(job: &Job, clone: u32, seed: u64) -> Workload {
        let _ = (job, clone, seed);
        todo!()
    }
}

impl Iterator for Workload {
    type Item = Io;
    fn next(&mut self) -> Option<Io> {
        todo!()
    }
}
