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
/// How the title of a table begins.
const TITLE: &str = "### ";

/// How a guest's driver of the IOMMU unmaps; without an IOMMU a disk can be behind the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    Strict,
    Lazy,
    None,
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
    let mut tables: Vec<String> = Vec::new();
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
            let title = line.starts_with(TITLE);
            if title || line.starts_with('|') {
                let gap = if title { "\n" } else { "" };
                println!("{gap}{line}{gap}");
                std::io::stdout().flush()?;
                match tables.last_mut().filter(|_| !title) {
                    Some(table) => table.push_str(&format!("{line}\n")),
                    None => tables.push(format!("{line}\n\n")),
                }
            }
        }
        let status = child.wait()?;
        ensure!(status.success(), "{name}: {status}");
    }
    if update {
        let cpus = available_parallelism()?;
        let made =
            commit(&format!("cargo xtask bench-guest --update, on {cpus} CPUs, QEMU's TCG"))?;
        let stamped = tables.iter().map(|table| table.replacen("\n\n", &stamp(&made), 1));
        let file = root().join(PAGE);
        let page = fs::read_to_string(&file).context(PAGE)?;
        let Some((own, there)) = page.split_once(MARK) else { bail!("{PAGE}: no {MARK}") };
        fs::write(&file, format!("{own}{MARK}{}", merged(there, stamped)))?;
    }
    Ok(())
}

/// Between the title of a table and the table: where it comes from.
fn stamp(made: &str) -> String {
    format!("\n\n```text\n{made}\n```\n\n")
}

/// The tables that are there, those of a title that was made again in their new form, then those that are new.
fn merged(there: &str, made: impl Iterator<Item = String>) -> String {
    let mut tables: Vec<String> = Vec::new();
    for line in there.lines() {
        match tables.last_mut().filter(|_| !line.starts_with(TITLE)) {
            Some(table) => table.push_str(&format!("{line}\n")),
            None if line.starts_with(TITLE) => tables.push(format!("{line}\n")),
            None => {}
        }
    }
    for table in made {
        let same = |old: &&mut String| old.lines().next() == table.lines().next();
        match tables.iter_mut().find(same) {
            Some(old) => *old = table,
            None => tables.push(table),
        }
    }
    tables.iter().map(|table| format!("\n{}\n", table.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_is_made_again_takes_its_place_and_the_others_stay() {
        let there = "\n### a\n\n|1|\n\n### b\n\n|2|\n";
        let made = ["### c\n\n|3|\n", "### a\n\n|4|\n|5|\n"].map(str::to_owned);
        let wanted = "\n### a\n\n|4|\n|5|\n\n### b\n\n|2|\n\n### c\n\n|3|\n";
        assert_eq!(merged(there, made.into_iter()), wanted);
        assert_eq!(merged(wanted, std::iter::empty()), wanted);
    }
}
