//! Where results go: files, opened at the beginning, and standard output.

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
use serde::Serialize;

/// A file that is opened at the beginning and written at the end. It keeps its content until then;
/// if it was created here and nothing was written, it is removed.
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
        let wrong = || Usage(format!("cannot write {}", path.display()));
        match File::create_new(path) {
            Ok(new) => Ok(file(Some(new), true)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let old = OpenOptions::new().write(true).open(path).with_context(wrong)?;
                Ok(file(Some(old), false))
            }
            Err(error) => Err(error).with_context(wrong),
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

/// Puts a file with these contents at `path`. An existing file is replaced, not written to: if it
/// is a link, its target stays unchanged; folders on the way must belong to root or to this user.
pub(crate) fn replace(path: &Path, contents: &[u8]) -> io::Result<()> {
    let place = FolderEntry::of(path)?;
    let folder = place.folder();
    let mut new = place.name().to_owned();
    new.push(format!(".{}", std::process::id()));
    let remove = || unlinkat(folder, &new, AtFlags::empty());
    // A leftover of an earlier process with the same number, say; of a link, only the link is
    // removed.
    match remove() {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    // Must be created here: this follows no link.
    let how = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut file = File::from(openat(folder, &new, how, Mode::from_raw_mode(0o666))?);
    let placed =
        file.write_all(contents).and_then(|()| Ok(renameat(folder, &new, folder, place.name())?));
    placed.inspect_err(|_| _ = remove())
}

/// Writes plain data to where `--json` leads: one object, pretty-printed, with a newline at the end.
pub(crate) fn write_json(to: Option<Output>, data: &impl Serialize) -> Result<()> {
    // Only maps with keys that are not text can fail, and there is none.
    let text = || serde_json::to_string_pretty(data).expect("plain data") + "\n";
    to.map_or(Ok(()), |output| output.write(&text()))
}

/// Writes the JSON to where `--json` leads, and prints the text unless that is standard output.
pub(crate) fn report(
    json: Option<Output>,
    data: &impl Serialize,
    to_text: impl FnOnce() -> String,
) -> Result<()> {
    let shows = !json.as_ref().is_some_and(Output::is_stdout);
    write_json(json, data)?;
    if shows { print(&to_text()) } else { Ok(()) }
}

/// Prints to standard output; a reader that has left (`| head`) is not an error.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.context("writing to standard output"),
    }
}
