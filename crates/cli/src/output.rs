//! Where results go: files that are opened at the beginning, and standard output.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Write},
    path::{Path, PathBuf},
};

use crate::usage::Usage;
use anyhow::{Context, Result};
use ringfence_devices::path::FolderEntry;
use rustix::{
    fs::{AtFlags, Mode, OFlags, openat, renameat, unlinkat},
    io::Errno,
};

/// A file that is written at the end, opened at the beginning. What was in it stays until then, and
/// if it was made and nothing came of it, it goes.
pub(crate) struct Output {
    path: PathBuf,
    /// `None`: standard output.
    file: Option<File>,
    made: bool,
}

impl Output {
    pub(crate) fn open(path: &Path) -> Result<Output> {
        let file = |file, made| Output { path: path.to_owned(), file, made };
        if path.as_os_str() == "-" {
            return Ok(file(None, false));
        }
        let wrong = |error| Usage(format!("cannot write {}: {error}", path.display()));
        match File::create_new(path) {
            Ok(new) => Ok(file(Some(new), true)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let old = OpenOptions::new().write(true).open(path).map_err(wrong)?;
                Ok(file(Some(old), false))
            }
            Err(error) => Err(wrong(error).into()),
        }
    }

    pub(crate) fn is_stdout(&self) -> bool {
        self.file.is_none()
    }

    pub(crate) fn write(mut self, text: &str) -> Result<()> {
        let Some(mut file) = self.file.take() else { return print(text) };
        self.made = false;
        let regular = file.metadata().is_ok_and(|about| about.is_file());
        if regular { file.set_len(0) } else { Ok(()) }
            .and_then(|()| file.write_all(text.as_bytes()))
            .with_context(|| format!("writing {}", self.path.display()))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.made {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Puts a file with these contents at `path`. What was there is replaced, not written to: where it is a
/// link, the file that this names stays as it is; a folder on the way may be one of root's or of this user's.
pub(crate) fn replace(path: &Path, contents: &[u8]) -> io::Result<()> {
    let place = FolderEntry::of(path)?;
    let folder = place.folder();
    let mut new = place.name().to_owned();
    new.push(format!(".{}", std::process::id()));
    let remove = || unlinkat(folder, &new, AtFlags::empty());
    // Of an earlier process with this number, say; a link goes itself.
    match remove() {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    // Made here or not at all: this follows no link.
    let how = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut file = File::from(openat(folder, &new, how, Mode::from_raw_mode(0o666))?);
    let placed =
        file.write_all(contents).and_then(|()| Ok(renameat(folder, &new, folder, place.name())?));
    placed.inspect_err(|_| _ = remove())
}

/// To standard output; a reader that has left (`| head`) is no failure of ours.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.context("writing to standard output"),
    }
}
