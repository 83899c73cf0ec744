//! What `cargo xtask bench-guest` needs besides: an initramfs with stress-ng and ext4.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{
    debian::{self, Debian},
    initramfs, only_folder,
};
use crate::workspace::output;

const MODULES: &[&str] = &["ext4", "crc32c_generic"];

/// Makes `vmlinuz-iomix` and `initramfs-iomix`, if they are not there; after all the others.
pub(crate) fn make() -> Result<()> {
    let folder = super::folder();
    if folder.join("vmlinuz-iomix").exists() {
        return Ok(());
    }
    println!("guests: stress-ng and ext4");
    let root = folder.join("iomix");
    let _ = fs::remove_dir_all(&root);
    let debian = Debian::new(&folder)?;
    let mut packages = debian.with_what_it_needs("stress-ng")?;
    packages.push(debian.newest_kernel()?);
    for package in debian.fetch(&packages)? {
        debian::extract(&package, &root)?;
    }
    let program = root.join("usr/bin/stress-ng");
    let mut files = libraries(&program, &root)?;
    files.push(("bin/stress-ng".to_owned(), program));
    let modules = only_folder(&root.join("lib/modules"))?;
    initramfs::make(&folder, &modules, "initramfs-iomix", MODULES, &files)?;
    symlink("vmlinuz", folder.join("vmlinuz-iomix"))?;
    fs::remove_dir_all(&root)?;
    Ok(())
}

/// The libraries of a program, and where a guest has them: this machine's are of the same release as those
/// that were fetched.
fn libraries(program: &Path, root: &Path) -> Result<Vec<(String, PathBuf)>> {
    let own = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|part| root.join(part));
    let paths = std::env::join_paths(own)?;
    let found = output(Command::new("ldd").arg(program).env("LD_LIBRARY_PATH", paths))?;
    let paths =
        found.lines().filter_map(|line| line.split_whitespace().find(|w| w.starts_with('/')));
    paths
        .map(|path| {
            let path = PathBuf::from(path);
            let name = path.file_name().and_then(|name| name.to_str()).context("a library")?;
            let place = if name.starts_with("ld-linux") { "lib64" } else { "lib" };
            Ok((format!("{place}/{name}"), path.clone()))
        })
        .collect()
}
