//! A second kernel for guests, one with iommufd and nodes for single devices, from packages that
//! the caller gives: Debian builds its kernels without (docs/vfio.md).

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

use super::{debian, initramfs, only_folder};

/// The names of tests of this kernel contain this.
pub(crate) const TESTS: &str = "with_iommufd";

/// Whether there is one.
pub(crate) fn is_there() -> bool {
    let folder = super::folder();
    ["vmlinuz-iommufd", "initramfs-iommufd"].iter().all(|name| folder.join(name).exists())
}

/// Makes `vmlinuz-iommufd` and `initramfs-iommufd` in `folder` from the packages that a kernel and its
/// modules come in.
///
/// # Errors
/// A package cannot be unpacked, or they hold no kernel or no modules.
pub(super) fn make(folder: &Path, packages: &[PathBuf]) -> Result<()> {
    let root = folder.join("iommufd");
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root)?;
    for package in packages {
        debian::extract(package, &root)?;
    }
    let modules = only_folder(&root.join("lib/modules")).context("no package has modules")?;
    let version = modules.file_name().and_then(|name| name.to_str()).context("no version")?;
    let kernel = root.join("boot").join(format!("vmlinuz-{version}"));
    ensure!(kernel.exists(), "no package has boot/vmlinuz-{version}");
    initramfs::make(folder, &modules, "initramfs-iommufd", &[], &[])?;
    fs::rename(kernel, folder.join("vmlinuz-iommufd"))?;
    fs::remove_dir_all(&root)?;
    Ok(())
}
