//! fio job files.
#![allow(missing_docs)]

use std::{ops::Range, path::Path, time::Duration};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rw {
    Read,
    Write,
    RandRead,
    RandWrite,
    /// Sequential, mixed.
    Rw,
    RandRw,
}

impl Rw {
    pub fn is_random(self) -> bool {
        todo!()
    }
    pub fn reads(self) -> bool {
        todo!()
    }
    pub fn writes(self) -> bool {
        todo!()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    pub read: u32,
    pub write: u32,
}

/// One job section.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    pub name: String,
    pub rw: Rw,
    pub bs: BlockSizes,
    /// Bytes of the area; also what one pass moves.
    pub size: u64,
    pub offset: u64,
    pub iodepth: u32,
    pub numjobs: u32,
    pub runtime: Option<Duration>,
    pub time_based: bool,
    pub rwmixread: u8,
    pub direct: bool,
    pub group_reporting: bool,
    pub stonewall: bool,
    pub norandommap: bool,
    pub verify: bool,
    pub filename: Option<String>,
    pub ioengine: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    pub file: String,
    pub line: usize,
    pub what: String,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {what}")]
pub struct JobError {
    pub file: String,
    pub line: usize,
    pub what: String,
}

#[derive(Clone, Debug)]
pub struct JobFile {
    pub file: String,
    pub jobs: Vec<Job>,
    pub warnings: Vec<Warning>,
}

impl JobFile {
    pub fn parse(text: &[u8], file: &str) -> Result<JobFile, JobError> {
        let _ = (text, file);
        todo!()
    }
    pub fn load(path: &Path) -> Result<JobFile, JobError> {
        let _ = path;
        todo!()
    }
    /// The job of seed 000 (examples/seed-000.fio).
    pub fn seed() -> JobFile {
        todo!()
    }
    /// Runs of jobs that run at the same time; the runs follow each other.
    pub fn stages(jobs: &[Job]) -> Vec<Range<usize>> {
        let _ = jobs;
        todo!()
    }
}

/// Fits jobs to a machine.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Bytes for the RAM disk and the buffers together.
    pub memory: u64,
    /// Whether the disk lies in memory (`paced`, `ram`).
    pub disk_in_memory: bool,
}

impl Scale {
    /// Changes `jobs` so that they fit; a line for each change. Err: they cannot.
    pub fn apply(&self, jobs: &mut [Job]) -> Result<Vec<String>, String> {
        let _ = jobs;
        todo!()
    }
    /// Bytes a disk must hold for these jobs.
    pub fn disk_bytes(jobs: &[Job]) -> u64 {
        let _ = jobs;
        todo!()
    }
    /// Bytes of buffers that the largest stage has in flight.
    pub fn buffer_bytes(jobs: &[Job]) -> u64 {
        let _ = jobs;
        todo!()
    }
}

impl std::fmt::Display for Rw {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        todo!()
    }
}
