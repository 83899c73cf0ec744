//! A fio that needs no libraries: Debian's brings 64 into a guest.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    thread::available_parallelism,
};

use anyhow::{Context, Result, bail};

use super::debian::{Debian, entries};
use crate::workspace::output;

/// What a guest has no use for, and what differs between build machines.
const WITHOUT: &[&str] = &[
    "--disable-native",
    "--disable-numa",
    "--disable-rdma",
    "--disable-rados",
    "--disable-rbd",
    "--disable-http",
    "--disable-gfapi",
    "--disable-pmem",
    "--disable-tcmalloc",
];

/// Builds `folder/fio` from the source that Debian builds its own from.
pub(crate) fn build(debian: &Debian, folder: &Path) -> Result<()> {
    let place = folder.join("fio-source");
    let _ = fs::remove_dir_all(&place);
    fs::create_dir_all(&place)?;
    let source = debian.fetch_source("fio")?;
    output(Command::new("tar").arg("--extract").arg("--file").arg(source).current_dir(&place))?;
    let tree = entries(&place)?.into_iter().next().context("fio's source is empty")?;
    let (log, jobs) = (place.join("log"), available_parallelism()?.to_string());
    for (program, arguments) in [
        ("./configure", [&["--build-static"], WITHOUT].concat()),
        ("make", vec!["fio", "--jobs", jobs.as_str()]),
        ("strip", vec!["fio"]),
    ] {
        let written = fs::File::options().append(true).create(true).open(&log)?;
        let status = Command::new(program)
            .args(arguments)
            .current_dir(&tree)
            .stdin(Stdio::null())
            .stdout(written.try_clone()?)
            .stderr(written)
            .status()
            .with_context(|| program.to_owned())?;
        if !status.success() {
            bail!("fio: {program}: {status}; see {}", log.display());
        }
    }
    fs::rename(tree.join("fio"), folder.join("fio"))?;
    fs::remove_dir_all(&place)?;
    Ok(())
}
