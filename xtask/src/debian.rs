//! The README's first command on a fresh Debian: in a root of that release, with Debian's compiler.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    packages::is_root,
    steps::NotRun,
    workspace::{cargo, output, root, run},
};

const MIRROR: &str = "http://deb.debian.org/debian";
/// The release's own compiler may be older than ours: then that of its backports is the one that a
/// user installs.
const RELEASE: &str = "trixie";
/// What the README's reader has installed.
const PACKAGES: &str = "gcc,libc6-dev,ca-certificates";
/// A short run of the first command.
const COMMAND: &str = "cargo run --release --quiet -- compare --quiet --repeat 1 --runtime 0.1";

pub(crate) fn check() -> Result<()> {
    if !is_root() {
        return Err(NotRun("a Debian root is made by root".to_owned()).into());
    }
    let debian = root().join("target/debian");
    if !debian.join("usr/bin/cargo").exists() {
        make(&debian).map_err(|error| NotRun(format!("no Debian root: {error:#}")))?;
    }
    cargo(&["fetch", "--locked", "--quiet"], &[])?;
    // What is committed, as a clone has it.
    let source = debian.join("ringfence");
    let _ = fs::remove_dir_all(&source);
    run(Command::new("git").args(["clone", "--quiet", "--no-hardlinks"]).arg(root()).arg(&source))?;
    println!("{}", within(&debian, "rustc --version")?.trim());
    let table = within(&debian, &format!("cd /ringfence && {COMMAND}"))?;
    println!("{table}");
    anyhow::ensure!(table.contains("strict+map"), "`{COMMAND}` printed no table");
    Ok(())
}

/// A root of the release in `debian`, with its compiler.
fn make(debian: &Path) -> Result<()> {
    let _ = fs::remove_dir_all(debian);
    let mut bootstrap = Command::new("debootstrap");
    bootstrap.args(["--variant=minbase", &format!("--include={PACKAGES}"), RELEASE]);
    run(bootstrap.arg(debian).arg(MIRROR))?;
    let backports = format!("deb {MIRROR} {RELEASE}-backports main\n");
    fs::write(debian.join("etc/apt/sources.list.d/backports.list"), backports)?;
    let _ = fs::copy("/etc/resolv.conf", debian.join("etc/resolv.conf"));
    let install = "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install \
                   --yes --no-install-recommends cargo/RELEASE-backports rustc/RELEASE-backports";
    within(debian, &install.replace("RELEASE", RELEASE)).map(|_| ())
}

/// What a command prints within the root; its mounts end with it.
fn within(debian: &Path, command: &str) -> Result<String> {
    // Cargo's registry is this machine's: nothing is fetched twice, and no proxy is in the way.
    let mounts = "mkdir -p \"$0/root/.cargo/registry\" && mount -t proc proc \"$0/proc\" && \
                  mount --rbind /dev \"$0/dev\" && \
                  mount --bind \"$2\" \"$0/root/.cargo/registry\" && \
                  exec chroot \"$0\" sh -c \"$1\"";
    let home = env::var_os("CARGO_HOME").map_or_else(
        || Path::new(&env::var_os("HOME").unwrap_or_default()).join(".cargo"),
        PathBuf::from,
    );
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "sh", "-c", mounts]).arg(debian).arg(command);
    unshare.arg(home.join("registry"));
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    unshare.env_clear().envs([("PATH", path), ("HOME", "/root"), ("LC_ALL", "C.UTF-8")]);
    unshare.env("CARGO_NET_OFFLINE", "true");
    output(&mut unshare).with_context(|| format!("`{command}` in {}", debian.display()))
}
