//! The Debian packages that the tests use.

use std::{path::Path, process::Command};

/// A package, and a file that exists if it is installed.
const NEEDED: &[(&str, &str)] = &[
    // The real fio reads the job files that we ship, so that "as people have them" is checked.
    ("fio", "/usr/bin/fio"),
    // The C and C++ compiler for libFuzzer, which the fuzz targets link.
    ("g++", "/usr/bin/g++"),
    // A static fio for guests, and the modules of their kernel.
    ("make", "/usr/bin/make"),
    ("xz-utils", "/usr/bin/xz"),
    ("zstd", "/usr/bin/zstd"),
    // A root of Debian, in which the README's first command is built.
    ("debootstrap", "/usr/sbin/debootstrap"),
    // Counts the instructions of hot paths.
    ("valgrind", "/usr/bin/valgrind"),
    // The tools that an image of ours is locked against.
    ("qemu-utils", "/usr/bin/qemu-img"),
    // The address of the tap device in a test of `ringfence net`.
    ("iproute2", "/bin/ip"),
    // DPDK's testpmd: the network back end that `bench net` measures ours beside.
    ("dpdk-dev", "/usr/bin/dpdk-testpmd"),
];

/// Installs what is missing if this is root; otherwise prints the line that would. Returns what is
/// still missing.
pub(crate) fn ensure() -> Vec<&'static str> {
    let missing = missing();
    if missing.is_empty() {
        return missing;
    }
    let line = format!("apt-get install -y --no-install-recommends {}", missing.join(" "));
    if !is_root() {
        println!("missing Debian packages; this would install them:\n    sudo {line}");
        return missing;
    }
    println!("installing: {}", missing.join(" "));
    let installed = apt(&line) || (apt("apt-get update") && apt(&line));
    if !installed {
        println!("could not install them; by hand:\n    {line}");
    }
    self::missing()
}

fn missing() -> Vec<&'static str> {
    NEEDED.iter().filter(|(_, file)| !Path::new(file).exists()).map(|&(name, _)| name).collect()
}

pub(crate) fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|out| out.stdout.trim_ascii() == b"0")
}

fn apt(line: &str) -> bool {
    let mut words = line.split(' ');
    let program = words.next().expect("a command line has a first word");
    Command::new(program)
        .args(words)
        .args(["-o", "DPkg::Lock::Timeout=120", "-qq"])
        .env("DEBIAN_FRONTEND", "noninteractive")
        .status()
        .is_ok_and(|status| status.success())
}
