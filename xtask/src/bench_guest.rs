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
/// Numbers of virtual CPUs.
pub(crate) const CPUS: [u32; 3] = [1, 2, 4];
/// How the title of a table begins.
const TITLE: &str = "### ";

/// How a guest's driver of the IOMMU unmaps; or that there is no IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    Strict,
    Lazy,
    NoIommu,
}

/// Prints a table for each mode and number of virtual CPUs, once it is complete.
pub(crate) fn run(cpus: &[u32], only: Option<Mode>, update: bool) -> Result<()> {
    let mut wanted = Vec::new();
    for mode in Mode::value_variants().iter().filter(|mode| only.is_none_or(|only| only == **mode))
    {
        for cpus in cpus {
            ensure!(CPUS.contains(cpus), "--cpus {cpus}: there are tables for {CPUS:?}");
            let mode = mode.to_possible_value().expect("none is hidden").get_name().to_owned();
            wanted.push((mode, cpus));
        }
    }
    guests::make(&[])?;
    iomix::make()?;
    if update && only.is_none() && cpus == CPUS {
        // All are made: none stays that there is no more.
        rewrite(|_| String::new())?;
    }
    for (mode, cpus) in wanted {
        let here = available_parallelism()?;
        let command = format!("cargo xtask bench-guest --only {mode} --cpus {cpus} --update");
        let made = commit(&format!("{command}, on {here} CPUs, QEMU's TCG"))?;
        let table = table(&format!("speed::guard::{}_{cpus}", mode.replace('-', "_")))?;
        if update {
            rewrite(|there| merged(there, table.replacen("\n\n", &stamp(&made), 1)))?;
        }
    }
    Ok(())
}

/// Runs a test that prints a table, and returns the table.
fn table(name: &str) -> Result<String> {
    eprintln!("bench-guest: {name}, about 5 minutes");
    let mut child = Command::new("cargo")
        .args(["test", "--quiet", "--release", "--package", "ringfence-cli", "--test", "guests"])
        .args(["--", "--ignored", "--nocapture", "--exact", name])
        .current_dir(root())
        .stdout(Stdio::piped())
        .spawn()
        .context("cargo")?;
    // The output has the test program's own lines beside the table.
    let mut table = String::new();
    for line in BufReader::new(child.stdout.take().expect("piped")).lines() {
        let line = line?;
        if line.starts_with(TITLE) || line.starts_with('|') {
            let gap = if line.starts_with(TITLE) { "\n" } else { "" };
            table.push_str(&format!("{line}\n{gap}"));
            println!("{gap}{line}{gap}");
            std::io::stdout().flush()?;
        }
    }
    let status = child.wait()?;
    ensure!(status.success(), "{name}: {status}");
    Ok(table)
}

/// Gives the page other tables.
fn rewrite(tables: impl FnOnce(&str) -> String) -> Result<()> {
    let file = root().join(PAGE);
    let page = fs::read_to_string(&file).context(PAGE)?;
    let Some((own, there)) = page.split_once(MARK) else { bail!("{PAGE}: no {MARK}") };
    Ok(fs::write(&file, format!("{own}{MARK}{}", tables(there)))?)
}

/// Between the title of a table and the table: where it comes from.
fn stamp(made: &str) -> String {
    format!("\n\n```text\n{made}\n```\n\n")
}

/// The tables that are there, and one in the place of that with its title, or at the end.
fn merged(there: &str, made: String) -> String {
    let mut tables: Vec<String> = Vec::new();
    for line in there.lines() {
        match tables.last_mut().filter(|_| !line.starts_with(TITLE)) {
            Some(table) => table.push_str(&format!("{line}\n")),
            None if line.starts_with(TITLE) => tables.push(format!("{line}\n")),
            None => {}
        }
    }
    match tables.iter_mut().find(|old| old.lines().next() == made.lines().next()) {
        Some(old) => *old = made,
        None => tables.push(made),
    }
    tables.iter().map(|table| format!("\n{}\n", table.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_is_made_again_takes_its_place_and_the_others_stay() {
        let there = "\n### a\n\n|1|\n\n### b\n\n|2|\n";
        let again = merged(there, "### a\n\n|4|\n|5|\n".to_owned());
        assert_eq!(again, "\n### a\n\n|4|\n|5|\n\n### b\n\n|2|\n");
        let more = merged(&again, "### c\n\n|3|\n".to_owned());
        assert_eq!(more, format!("{again}\n### c\n\n|3|\n"));
        assert_eq!(merged("", "### a\n\n|1|\n".to_owned()), "\n### a\n\n|1|\n");
    }
}
