//! `cargo xtask bench-guest`: what disks give real guests.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    process::{Command, Stdio},
    thread::available_parallelism,
};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use crate::{
    guests::{self, iomix},
    steps::commit,
    workspace::root,
};

const PAGE: &str = "docs/guests.md";
/// Where the page's own words end.
const MARK: &str = "<!-- cargo xtask bench-guest --update -->\n";

/// How a guest's driver of the IOMMU unmaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    Strict,
    Lazy,
}

/// Prints a table for each mode and number of virtual CPUs, once it is complete.
pub(crate) fn run(cpus: &[u32], only: Option<Mode>, update: bool) -> Result<()> {
    let mut names = Vec::new();
    for mode in Mode::value_variants().iter().filter(|mode| only.is_none_or(|only| only == **mode))
    {
        for cpus in cpus {
            ensure!([1, 2, 4].contains(cpus), "--cpus {cpus}: there are tables for 1, 2 and 4");
            let mode = format!("{mode:?}").to_lowercase();
            names.push(format!("speed::guard::{mode}_{cpus}"));
        }
    }
    guests::make(&[])?;
    iomix::make()?;
    let mut text = String::new();
    for name in &names {
        eprintln!("bench-guest: {name}, about 5 minutes");
        let mut child = Command::new("cargo")
            .args([
                "test",
                "--quiet",
                "--release",
                "--package",
                "ringfence-cli",
                "--test",
                "guests",
                "--",
            ])
            .args(["--ignored", "--nocapture", "--exact", name])
            .current_dir(root())
            .stdout(Stdio::piped())
            .spawn()
            .context("cargo")?;
        // The output has the test program's own lines beside the tables.
        for line in BufReader::new(child.stdout.take().expect("piped")).lines() {
            let line = line?;
            if line.starts_with("### ") || line.starts_with('|') {
                let gap = if line.starts_with("### ") { "\n" } else { "" };
                text.push_str(&format!("{gap}{line}\n{gap}"));
                println!("{gap}{line}{gap}");
                std::io::stdout().flush()?;
            }
        }
        let status = child.wait()?;
        ensure!(status.success(), "{name}: {status}");
    }
    if update {
        let file = root().join(PAGE);
        let page = fs::read_to_string(&file).context(PAGE)?;
        let Some((own, _)) = page.split_once(MARK) else { bail!("{PAGE}: no {MARK}") };
        let cpus = available_parallelism()?;
        let made = format!("cargo xtask bench-guest --update, on {cpus} CPUs, QEMU's TCG");
        fs::write(&file, format!("{own}{MARK}\n```text\n{}\n```\n{text}", commit(&made)?))?;
    }
    Ok(())
}
