//! The disk of a comparison.

use std::{
    fs::{File, OpenOptions},
    io::ErrorKind,
    os::{
        fd::OwnedFd,
        unix::fs::{FileExt, FileTypeExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context, Result, bail};
use rustix::{fs::ftruncate, io::Errno};

use super::{Usage, device::DiskKind};
use crate::{block::Format, job::Job, memory, text::bytes};

/// Which disk to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskChoice {
    /// A disk in memory, at the pace of a real one.
    Paced,
    /// A disk in memory, as fast as it goes.
    Ram,
    /// A file or a block device.
    Path(PathBuf),
}

impl From<String> for DiskChoice {
    /// `paced`, `ram`, or else a path.
    fn from(text: String) -> DiskChoice {
        match text.as_str() {
            "paced" => DiskChoice::Paced,
            "ram" => DiskChoice::Ram,
            path => DiskChoice::Path(path.into()),
        }
    }
}

impl DiskChoice {
    /// In a few words, for tables.
    pub fn describe(&self) -> String {
        match self {
            DiskChoice::Paced => "paced RAM disk (2.5 GiB/s, 600,000 IOPS, 80 us)".to_owned(),
            DiskChoice::Ram => "RAM disk, unpaced".to_owned(),
            DiskChoice::Path(path) => path.display().to_string(),
        }
    }
}

/// What is on the disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Content {
    /// How our blocks look.
    pub(crate) format: Format,
    /// The disk holds foreign data, and is only read: that cannot be checked byte by byte.
    pub(crate) foreign: bool,
    /// The disk may hand out a block that a write is changing at that moment: a page cache does.
    pub(crate) tears: bool,
}

/// The disk, open.
pub(crate) struct Target {
    pub(crate) kind: DiskKind,
    pub(crate) file: OwnedFd,
    pub(crate) bytes: u64,
    /// Whether it holds foreign data, which is only read.
    pub(crate) foreign: bool,
}

impl Target {
    /// Opens a disk of at least `len` bytes for `jobs`; adds what a reader must know to `warnings`.
    pub(crate) fn open(
        choice: &DiskChoice,
        len: u64,
        jobs: &[Job],
        destroy: bool,
        warnings: &mut Vec<String>,
    ) -> Result<Target> {
        let path = match choice {
            DiskChoice::Path(path) => path,
            memory => {
                let paced = *memory == DiskChoice::Paced;
                let kind = if paced { DiskKind::Paced } else { DiskKind::Ram };
                let file = memory::file("ringfence-disk", len)?;
                return Ok(Target { kind, file, bytes: len, foreign: false });
            }
        };
        let wrong = |why: String| bail!(Usage(format!("--disk {}{why}", path.display())));
        let found = match std::fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return make(path, len, warnings),
            Err(error) => return Err(error).with_context(|| unusable(path)),
            Ok(found) => found,
        };
        if found.is_dir() {
            return wrong(" is a directory; name a file in it, or a block device".to_owned());
        }
        if jobs.iter().any(|job| job.rw.writes()) && !destroy {
            let why =
                " exists and the jobs write: give --destroy-data if what is on it may be lost";
            return wrong(why.to_owned());
        }
        if !found.file_type().is_block_device() && !found.is_file() {
            return wrong(" is neither a file nor a block device".to_owned());
        }
        let file = open(path, destroy, false, warnings)?;
        let size = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))?;
        if size < len {
            let (has, need) = (bytes(size), bytes(len));
            return wrong(format!(" has {has}, the jobs need {need}: lower size or offset"));
        }
        let foreign = !destroy;
        if foreign {
            warnings.push(format!(
                "{} holds data of others: whether reads arrive is checked, their content cannot be",
                path.display()
            ));
        }
        let (kind, file, bytes) = (DiskKind::File, file.into(), size / 512 * 512);
        Ok(Target { kind, file, bytes, foreign })
    }

    /// Fills the first `len` bytes of a file with our blocks, so that every read can be checked. A
    /// disk in memory begins with zeroes, which are checked too. Returns early when `stop` is set.
    pub(crate) fn lay_out(&self, len: u64, content: Content, stop: &AtomicBool) -> Result<()> {
        let file = File::from(self.file.try_clone()?);
        // Aligned for O_DIRECT: an allocation of this size is a mapping of its own.
        let chunk = 4 << 20;
        let mut buffer = vec![0; chunk + 4096];
        let skew = buffer.as_ptr().align_offset(4096);
        let mut at = 0;
        while at < len && !stop.load(Ordering::Relaxed) {
            let part = &mut buffer[skew..][..chunk.min((len - at) as usize)];
            content.format.fill_piece(part.into(), at, 1);
            file.write_all_at(part, at).context("laying out the disk")?;
            at += part.len() as u64;
        }
        Ok(())
    }
}

fn unusable(path: &Path) -> Usage {
    Usage(format!("--disk {}", path.display()))
}

/// Makes a file of `len` bytes without a name: whatever happens to this program, nothing stays.
fn make(path: &Path, len: u64, warnings: &mut Vec<String>) -> Result<Target> {
    warnings.push(format!("{} did not exist: made for this run, and removed", path.display()));
    let file = open(path, true, true, warnings)?;
    std::fs::remove_file(path).with_context(|| format!("removing {}", path.display()))?;
    match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len) {
        // Laying it out then finds out whether there is room.
        Err(Errno::OPNOTSUPP) => ftruncate(&file, len),
        other => other,
    }
    .with_context(|| format!("no room for {} in {}", bytes(len), path.display()))?;
    Ok(Target { kind: DiskKind::File, file: file.into(), bytes: len, foreign: false })
}

/// Opens (or makes) with O_DIRECT where the file system has it.
fn open(path: &Path, write: bool, make: bool, warnings: &mut Vec<String>) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(write).create_new(make).custom_flags(libc::O_DIRECT);
    let opened = match options.open(path) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            warnings.push(format!("{}: no O_DIRECT here; the page cache is used", path.display()));
            // A kernel may have made the file before it refused to open it so.
            options.custom_flags(0).create_new(false).create(make).open(path)
        }
        other => other,
    };
    opened.with_context(|| unusable(path))
}
