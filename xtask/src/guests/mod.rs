//! What the tests with real guests need: a QEMU, a stock Linux with an initramfs, User-Mode Linux.
//!
//! All of it lies in `target/guests`, made from Debian's packages by [`make`]: nothing is installed
//! and nothing outside the checkout is changed, so that root is not needed either.
//!
//! ```text
//! qemu-system-x86_64    starts the QEMU in root/, which is this Debian's
//! qemu11/qemu-system-x86_64    a newer one: devices of any kind can be outside of it
//! qemu11/virtiofsd    file systems, for which we have no back end
//! vmlinuz, initramfs    Debian's cloud kernel, unpacked; busybox, fio and the modules for it
//! vmlinuz-iommufd, initramfs-iommufd    Ubuntu's kernel, which has what Debian's lacks
//! vmlinuz-iomix, initramfs-iomix    the first one again, with stress-ng and ext4
//! linux.uml, initramfs.uml    the same for User-Mode Linux
//! vfio-blk, vfio-nvme, channels, viommu-kit    our own programs for use inside a guest: drivers, an
//!     ethtool, and the conformance kit
//! ```

mod cpio;
mod debian;
mod fio;
mod initramfs;
pub(crate) mod iomix;
pub(crate) mod iommufd;
mod kernel;
mod qemu11;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result};
use debian::Debian;

use crate::workspace::{output, root, run};

/// Where it all lies.
pub(crate) fn folder() -> PathBuf {
    root().join("target/guests")
}

/// Changes whenever the output changes, so that what an older checkout made is made again.
const RECIPE: &str = "6";

/// Makes what is not there yet, and our own programs as their sources are now. `iommufd`: the packages
/// of a kernel that has it.
pub(crate) fn make(iommufd: &[PathBuf]) -> Result<()> {
    parts()?;
    if !iommufd.is_empty() {
        iommufd::make(&folder(), iommufd)?;
    }
    programs()
}

fn parts() -> Result<()> {
    let (folder, begun) = (folder(), Instant::now());
    let stamp = folder.join("made");
    if fs::read_to_string(&stamp).is_ok_and(|made| made == RECIPE) {
        println!("guests: all there ({})", folder.display());
        return Ok(());
    }
    fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
    let _ = fs::remove_file(&stamp);
    let root = folder.join("root");
    let _ = fs::remove_dir_all(&root);

    println!("guests: reading the lists of packages");
    let debian = Debian::new(&folder)?;
    let kernel = debian.newest_kernel()?;
    let mut packages = debian.with_what_it_needs("qemu-system-x86")?;
    packages.extend([kernel.clone(), "user-mode-linux".into(), "busybox-static".into()]);
    println!("guests: {} packages, among them {kernel}", packages.len());
    for file in debian.fetch(&packages)? {
        debian::extract(&file, &root)?;
    }
    if !folder.join("fio").exists() {
        println!("guests: building a static fio");
        fio::build(&debian, &folder)?;
    }

    println!("guests: making the initramfs");
    let version = kernel.strip_prefix("linux-image-").context("a kernel without a version")?;
    let packed = root.join("boot").join(format!("vmlinuz-{version}"));
    kernel::unpack(&packed, &folder.join("vmlinuz")).context("the kernel of the package")?;
    initramfs::make(&folder, &root.join("lib/modules").join(version), "initramfs", &[], &[])?;
    fs::rename(root.join("usr/bin/linux.uml"), folder.join("linux.uml"))
        .context("the package user-mode-linux has no linux.uml")?;
    let modules = only_folder(&root.join("usr/lib/uml/modules"))?;
    initramfs::make(&folder, &modules, "initramfs.uml", &[], &[])?;
    qemu(&folder)?;
    println!("guests: a newer QEMU");
    qemu11::make(&debian, &folder)?;
    // What went into the initramfs, and what no test needs.
    for spent in ["lib/modules", "usr/lib/uml", "boot", "usr/share/doc", "usr/share/locale"] {
        let _ = fs::remove_dir_all(root.join(spent));
    }
    fs::write(&stamp, RECIPE)?;
    println!("guests: made in {:.1} s", begun.elapsed().as_secs_f32());
    Ok(())
}

/// Our programs that run in guests: without libraries, as a guest has none.
fn programs() -> Result<()> {
    let build = folder().join("build");
    // With an explicit target, RUSTFLAGS do not apply to build scripts and procedural macros.
    let target = "x86_64-unknown-linux-gnu";
    run(Command::new("cargo")
        .args(["build", "--quiet", "--package", "ringfence-guest", "--target", target])
        .env("RUSTFLAGS", "-Ctarget-feature=+crt-static")
        .env("CARGO_TARGET_DIR", &build)
        .env("CARGO_PROFILE_DEV_STRIP", "symbols")
        // An emulated processor is slow enough.
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "2")
        .current_dir(root()))
    .context("building our programs for guests")?;
    for name in ["vfio-blk", "vfio-nvme", "channels", "viommu-kit"] {
        fs::copy(build.join(target).join("debug").join(name), folder().join(name))?;
    }
    Ok(())
}

/// The program that starts QEMU with its own libraries, modules and firmware.
fn qemu(folder: &Path) -> Result<()> {
    let text = "#!/bin/sh\n\
         root=\"${0%/*}/root\"\n\
         export LD_LIBRARY_PATH=\"$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu\"\n\
         export QEMU_MODULE_DIR=\"$root/usr/lib/x86_64-linux-gnu/qemu\"\n\
         exec \"$root/usr/bin/qemu-system-x86_64\" -L \"$root/usr/share/qemu\" \
         -L \"$root/usr/share/seabios\" \"$@\"\n";
    starter(folder, "qemu-system-x86_64", text).map(|_| ())
}

/// Writes a program that finds its parts beside itself, and tries it; returns the version that it
/// prints.
fn starter(folder: &Path, name: &str, text: &str) -> Result<String> {
    let program = folder.join(name);
    fs::write(&program, text)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let version_line = output(Command::new(&program).arg("--version"))
        .with_context(|| format!("the {name} that was just unpacked does not start"))?;
    let version_line = version_line.lines().next().unwrap_or_default();
    println!("guests: {version_line}");
    Ok(version_line.to_owned())
}

fn only_folder(within: &Path) -> Result<PathBuf> {
    let mut entries = fs::read_dir(within).with_context(|| format!("{}", within.display()))?;
    let first = entries.next().with_context(|| format!("{} is empty", within.display()))??;
    Ok(first.path())
}
