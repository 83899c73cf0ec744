//! A second kernel for guests, one with iommufd and nodes for single devices.
//!
//! Debian builds its kernels without (docs/vfio.md). Ubuntu's have both; the one that 24.04 began
//! with lies in its archive unchanged as long as that lasts. What these two packages are is known by
//! their hashes, so that no key of Ubuntu's is needed.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};

use super::{debian, initramfs};

const ARCHIVE: &str = "http://archive.ubuntu.com/ubuntu/pool/main/l";
const VERSION: &str = "6.8.0-31-generic";
/// Where each package lies in the archive, and its SHA-256.
const PACKAGES: [(&str, &str); 2] = [
    (
        "linux-signed/linux-image-6.8.0-31-generic_6.8.0-31.31_amd64.deb",
        "fd2ed023c84163e62c73d3b7b613a9b004bd31e335641c23d42bd249e489fbe6",
    ),
    (
        "linux/linux-modules-6.8.0-31-generic_6.8.0-31.31_amd64.deb",
        "3f17f2c279257eb50e40da44390bdf8272c440ca078831c348773d1314b5c2fe",
    ),
];
/// Changes whenever what is made changes.
const RECIPE: &str = "1";

/// Makes `vmlinuz-iommufd` and `initramfs-iommufd` in `folder`, if they are not there yet.
///
/// # Errors
/// Ubuntu's archive cannot be reached: the tests that need this kernel will say that it lacks.
pub(super) fn make(folder: &Path) -> Result<()> {
    let stamp = folder.join("made-iommufd");
    if fs::read_to_string(&stamp).is_ok_and(|made| made == RECIPE) {
        return Ok(());
    }
    let _ = fs::remove_file(&stamp);
    println!("guests: a kernel with iommufd");
    let root = folder.join("iommufd");
    fs::create_dir_all(&root)?;
    for (path, hash) in PACKAGES {
        let package = root.join("package.deb");
        // apt's way to fetch a file, with apt's proxy.
        let mut fetch = Command::new("/usr/lib/apt/apt-helper");
        fetch.arg("download-file").arg(format!("{ARCHIVE}/{path}")).arg(&package);
        debian::output(fetch.arg(format!("SHA256:{hash}")))?;
        debian::extract(&package, &root)?;
        fs::remove_file(&package)?;
    }
    let kernel = root.join("boot").join(format!("vmlinuz-{VERSION}"));
    fs::rename(kernel, folder.join("vmlinuz-iommufd")).context("the package has no kernel")?;
    initramfs::make(folder, &root.join("lib/modules").join(VERSION), "initramfs-iommufd")?;
    fs::remove_dir_all(&root)?;
    Ok(fs::write(&stamp, RECIPE)?)
}
