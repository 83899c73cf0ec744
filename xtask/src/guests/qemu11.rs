//! A second QEMU, for the guests behind `ringfence guard`: since 11.1 a device of any kind, an IOMMU
//! too, can be one that another process serves. With it `virtiofsd`, a back end that is not ours.
//!
//! It comes from the Debian release after the machine's, with all its libraries, the C library's loader
//! among them: none of them is the machine's.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

use super::{
    debian::{self, Debian, entries},
    starter,
};
use crate::workspace::output;

/// The Debian release whose QEMU is new enough.
const RELEASE: &str = "forky";
/// The first QEMU that has the devices needed here.
const VERSION: (u32, u32) = (11, 1);

const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const PROGRAMS: [&str; 2] = ["usr/bin/qemu-system-x86_64", "usr/libexec/virtiofsd"];
/// What is needed at run time besides programs and libraries. Some firmware is a link to what lies
/// elsewhere.
const KEPT: [&str; 3] = ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe"];

/// Starts a program with the libraries beside it, and with more arguments.
fn start(program: &str, arguments: &str) -> String {
    format!(
        "#!/bin/sh\n\
         root=\"${{0%/*}}\"\n\
         libraries=\"$root/{LIBRARIES}\"\n\
         exec \"$libraries/ld-linux-x86-64.so.2\" --library-path \"$libraries\" \
         \"$root/{program}\" {arguments} \"$@\"\n"
    )
}

/// Makes `folder/qemu11`.
///
/// # Errors
/// The release cannot be had, or its QEMU does not start, or is too old.
pub(super) fn make(debian: &Debian, folder: &Path) -> Result<()> {
    let (place, spare) = (folder.join("qemu11"), folder.join("qemu11.all"));
    for old in [&place, &spare] {
        let _ = fs::remove_dir_all(old);
        fs::create_dir_all(old)?;
    }
    let newer = debian.release(RELEASE, &spare)?;
    let all = spare.join("root");
    let mut packages = newer.with_what_it_needs("qemu-system-x86")?;
    packages.extend(newer.with_what_it_needs("virtiofsd")?);
    packages.sort();
    packages.dedup();
    for package in newer.fetch(&packages)? {
        debian::extract(&package, &all)?;
    }
    for kept in needed(&all)?.iter().map(String::as_str).chain(PROGRAMS).chain(KEPT) {
        let to = place.join(kept);
        fs::create_dir_all(to.parent().context("a path")?)?;
        // Not every release has all of it.
        if all.join(kept).symlink_metadata().is_ok() {
            fs::rename(all.join(kept), &to).with_context(|| kept.to_owned())?;
        }
    }
    let firmware = "-L \"$root/usr/share/qemu\" -L \"$root/usr/share/seabios\"";
    starter(&place, "virtiofsd", &start(PROGRAMS[1], ""))?;
    let version_line = starter(&place, "qemu-system-x86_64", &start(PROGRAMS[0], firmware))?;
    let version =
        version(&version_line).with_context(|| format!("no version in {version_line:?}"))?;
    ensure!(version >= VERSION, "{RELEASE} has {version_line}: {VERSION:?} is what the tests need");
    fs::remove_dir_all(&spare)?;
    Ok(())
}

/// The libraries that the programs load, and what their names are links to, below `all`.
fn needed(all: &Path) -> Result<Vec<String>> {
    let all = all.canonicalize()?;
    let libraries = all.join(LIBRARIES);
    let mut lists = String::new();
    for program in PROGRAMS {
        let mut list = Command::new(libraries.join("ld-linux-x86-64.so.2"));
        list.arg("--list").arg("--library-path").arg(&libraries);
        lists += &output(list.arg(all.join(program)))?;
    }
    let loaded: Vec<&str> = lists
        .lines()
        .filter_map(|line| line.split_whitespace().next()?.rsplit('/').next())
        .collect();
    let mut needed = Vec::new();
    for path in entries(&libraries)? {
        if path.file_name().and_then(|name| name.to_str()).is_some_and(|n| loaded.contains(&n)) {
            for path in [path.canonicalize()?, path] {
                let name = path.strip_prefix(&all)?.to_str().context("a library's name")?;
                needed.push(name.to_owned());
            }
        }
    }
    needed.sort();
    needed.dedup();
    Ok(needed)
}

/// The first two numbers of the version that QEMU prints.
fn version(version_line: &str) -> Option<(u32, u32)> {
    let mut numbers = version_line.split_once("version ")?.1.split('.');
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_says_its_version() {
        let version_line = "QEMU emulator version 11.1.2 (Debian 1:11.1.2+ds-3)";
        assert_eq!(version(version_line), Some((11, 1)));
        assert_eq!(version("QEMU emulator"), None);
        assert!(version("version 10.2.0") < Some(VERSION));
    }
}
