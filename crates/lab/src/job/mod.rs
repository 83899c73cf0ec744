//! fio job files: what to measure, as people have it.
//!
//! The dialect is fio's: `[global]` sections set defaults for what follows, every other section is
//! a job, `key=value` or a bare key, `#` and `;` start comments. The keys that `options.rs` knows are
//! obeyed (or, for `filename` and `ioengine`, noted); any other key is named in one warning and has
//! no effect. A wrong value is an error with its line.
//!
//! Jobs run at the same time, as in fio, unless a job says `stonewall`: see [`JobFile::stages`].

use std::{ops::Range, path::Path, time::Duration};

use crate::list::named;

mod ini;
mod options;
mod scale;
mod value;

pub use ini::{MAX_FILE, MAX_LINE};
pub use options::{DEFAULT_SIZE, MAX_BS, MAX_IODEPTH, MAX_NUMJOBS, MAX_SECTIONS, MAX_UNKNOWN};
pub use scale::Scale;

named! {
    /// The pattern of a job (`rw=`), by fio's words.
    Rw, "{:?} is not allowed; allowed: {}":
    /// Sequential reads.
    Read = "read",
    /// Sequential writes.
    Write = "write",
    /// Random reads.
    RandRead = "randread",
    /// Random writes.
    RandWrite = "randwrite",
    /// Sequential, reads and writes mixed.
    Rw = "rw" | "readwrite",
    /// Random, reads and writes mixed.
    RandRw = "randrw",
}

impl Rw {
    /// Whether offsets are random.
    pub const fn is_random(self) -> bool {
        matches!(self, Rw::RandRead | Rw::RandWrite | Rw::RandRw)
    }

    /// Whether any I/O reads.
    pub const fn reads(self) -> bool {
        !matches!(self, Rw::Write | Rw::RandWrite)
    }

    /// Whether any I/O writes.
    pub const fn writes(self) -> bool {
        !matches!(self, Rw::Read | Rw::RandRead)
    }
}

/// Bytes an I/O moves. fio lets reads and writes differ (`bs=4k,64k`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Bytes a read; a multiple of 512.
    pub read: u32,
    /// Bytes a write; a multiple of 512.
    pub write: u32,
}

/// One job section, with the defaults of fio and of `[global]` filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The section's name, or `name=`. Not unique.
    pub name: String,
    /// The pattern.
    pub rw: Rw,
    /// Bytes an I/O.
    pub bs: BlockSizes,
    /// Bytes of the area the job works on, which is also what one pass moves. What is left behind
    /// the last whole block is not used, as in fio.
    pub size: u64,
    /// Where the area begins on the disk; a multiple of 512.
    pub offset: u64,
    /// I/Os in flight, of each clone.
    pub iodepth: u32,
    /// Clones that run this job at the same time, on the same area.
    pub numjobs: u32,
    /// When to stop.
    pub runtime: Option<Duration>,
    /// Whether to go on until `runtime` is over when one pass is done.
    pub time_based: bool,
    /// Reads in a mixed pattern, percent.
    pub rwmixread: u8,
    /// Whether it waits for all jobs before it.
    pub stonewall: bool,
    /// Whether random offsets may repeat within a pass.
    pub norandommap: bool,
    /// Noted.
    pub ioengine: Option<String>,
}

impl Default for Job {
    /// fio's defaults.
    fn default() -> Job {
        Job {
            name: "job".to_owned(),
            rw: Rw::Read,
            bs: BlockSizes { read: 4096, write: 4096 },
            size: DEFAULT_SIZE,
            offset: 0,
            iodepth: 1,
            numjobs: 1,
            runtime: None,
            time_based: false,
            rwmixread: 50,
            stonewall: false,
            norandommap: false,
            ioengine: None,
        }
    }
}

impl Job {
    /// The block sizes this pattern uses.
    pub fn block_sizes(&self) -> impl Iterator<Item = u32> + use<> {
        let read = self.rw.reads().then_some(self.bs.read);
        let write = self.rw.writes().then_some(self.bs.write);
        read.into_iter().chain(write)
    }

    /// The largest of [`Job::block_sizes`].
    pub fn max_block(&self) -> u32 {
        self.block_sizes().max().unwrap_or(self.bs.read)
    }

    /// The smallest of [`Job::block_sizes`].
    pub fn min_block(&self) -> u32 {
        self.block_sizes().min().unwrap_or(self.bs.read)
    }
}

/// Why a job file cannot be used; or what in it has no effect, or not the one fio would give it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}{}: {what}", if *.line == 0 { String::new() } else { format!(":{}", .line) })]
pub struct JobError {
    /// The file as it was named.
    pub file: String,
    /// The line, from 1; 0 if it is about the file itself.
    pub line: usize,
    /// What is wrong, and what is allowed.
    pub what: String,
}

impl JobError {
    fn new(file: &str, line: usize, what: impl Into<String>) -> JobError {
        JobError { file: file.to_owned(), line, what: what.into() }
    }
}

/// A job file that was read: its jobs, at least one, and warnings for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobFile {
    /// The file as it was named.
    pub file: String,
    /// In the order of the file.
    pub jobs: Vec<Job>,
    /// One for each thing that has no effect, in the order of the file.
    pub warnings: Vec<JobError>,
}

impl JobFile {
    /// Reads the text of a job file; `file` is its name in messages.
    pub fn parse(text: &[u8], file: &str) -> Result<JobFile, JobError> {
        options::parse(text, file)
    }

    /// Reads a job file.
    pub fn load(path: &Path) -> Result<JobFile, JobError> {
        use std::io::Read;

        let file = path.display().to_string();
        let failed = |error: std::io::Error| JobError::new(&file, 0, error.to_string());
        let mut text = Vec::new();
        // One byte more than allowed distinguishes a file that is too large from one that just
        // fits; /dev/zero is not read to its end.
        std::fs::File::open(path)
            .map_err(failed)?
            .take(MAX_FILE as u64 + 1)
            .read_to_end(&mut text)
            .map_err(failed)?;
        JobFile::parse(&text, &file)
    }

    /// The jobs of seed 000, as `examples/seed-000.fio` has them: what `compare` runs by default.
    pub fn seed() -> JobFile {
        const TEXT: &[u8] = include_bytes!("seed-000.fio");
        JobFile::parse(TEXT, "seed-000.fio").expect("the seed's job file is well formed (tested)")
    }

    /// The runs of jobs that run at the same time; each run waits for the one before it.
    ///
    /// As in fio: a job with `stonewall` waits for all jobs before it, any other starts together
    /// with its predecessor.
    pub fn stages(jobs: &[Job]) -> Vec<Range<usize>> {
        let mut stages: Vec<Range<usize>> = Vec::new();
        for (index, job) in jobs.iter().enumerate() {
            match stages.last_mut() {
                Some(stage) if !job.stonewall => stage.end = index + 1,
                _ => stages.push(index..index + 1),
            }
        }
        stages
    }
}

#[cfg(test)]
mod tests;
