//! How much of each parser the inputs of its target reach, by the compiler's own coverage.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use super::{TARGET, names, show};
use crate::{
    suite::side_by_side,
    workspace::{root, run},
};

/// The parsers that each target is for, below `crates`.
fn parsers(target: &str) -> &'static [&'static str] {
    match target {
        "dirty_log" => &["mem/src/dirty.rs", "mem/src/shared.rs"],
        "fio_job" => &["lab/src/job"],
        "inflight" => &["vhost-user/src/inflight"],
        "iotlb" => &[
            "vhost-user/src/iotlb.rs",
            "vhost-user-backend/src/translation.rs",
            "iotlb/src/iotlb.rs",
        ],
        "trace" => &["lab/src/replay"],
        "vfio_replies" => &[
            "vfio/src/kernel/chain.rs",
            "vfio/src/kernel/info.rs",
            "vfio/src/space",
            "vfio/src/type1.rs",
            "vfio/src/iommufd.rs",
        ],
        "vhost_user_channel" => &["vhost-user/src/backend_channel.rs"],
        "vhost_user_front" => &["vhost-user/src/frontend", "vhost-user/src/frontend_channel.rs"],
        "vhost_user_msg" => {
            &["vhost-user/src/msg", "vhost-user/src/server", "vhost-user/src/inbox.rs"]
        }
        "viommu_orders" | "viommu_pieces" => &["virtio-iommu/src/device/requests.rs"],
        "viommu_request" => &["virtio-iommu/src/wire", "virtio-iommu/src/device/requests.rs"],
        "viommu_ring" => &["virtio-iommu/src/device/queue.rs", "virtio-iommu/src/device/events.rs"],
        "viommu_saved" => &[
            "virtio-iommu/src/device/saved.rs",
            "virtio-iommu/src/device/kept.rs",
            "virtio-iommu/src/device/journal",
            "vhost-user/src/keeper.rs",
        ],
        "virtq_chain" => {
            &["virtq/src/device/split.rs", "virtq/src/device/table.rs", "virtq/src/chain.rs"]
        }
        "virtq_driver" => &["virtq/src/driver"],
        "virtq_packed" => {
            &["virtq/src/device/packed.rs", "virtq/src/driver/packed.rs", "virtq/src/packed.rs"]
        }
        _ => &[],
    }
}

#[derive(Deserialize)]
struct Export {
    data: Vec<Data>,
}

#[derive(Deserialize)]
struct Data {
    files: Vec<Covered>,
}

#[derive(Deserialize)]
struct Covered {
    filename: PathBuf,
    summary: BTreeMap<String, Share>,
}

#[derive(Deserialize)]
struct Share {
    count: u64,
    covered: u64,
}

/// Builds the targets with coverage, runs each on its seeds, cases and corpus, and prints a table.
///
/// # Errors
/// There is no tool that reads the coverage, or a target failed.
pub(crate) fn print(only: Option<&str>) -> Result<()> {
    let [profdata, cov] = tools()?;
    let names = names(only)?;
    let build = root().join("fuzz/target/coverage");
    let mut cargo = Command::new("cargo");
    cargo.args(["build", "--release", "--target", TARGET]);
    for name in &names {
        cargo.args(["--bin", name]);
    }
    run(cargo
        .env("RUSTFLAGS", "-Cinstrument-coverage --cfg fuzzing")
        .env("CARGO_TARGET_DIR", &build)
        .current_dir(root().join("fuzz")))?;
    println!("{:<20} {:<44} {:>6} {:>7} {:>7}", "target", "parser", "inputs", "lines", "regions");
    side_by_side(&names, |name| {
        let binary = build.join(TARGET).join("release").join(name);
        let rows = covered(name, &binary, &profdata, &cov).with_context(|| name.to_owned())?;
        print!("{rows}");
        Ok(())
    })
}

/// The inputs of a target: those that are in the tree, and those that were found here.
fn inputs(name: &str) -> Result<Vec<PathBuf>> {
    let mut inputs = Vec::new();
    for kind in ["seeds", "cases", "corpus"] {
        let folder = root().join("fuzz").join(kind).join(name);
        if folder.is_dir() {
            for entry in fs::read_dir(folder)? {
                inputs.push(entry?.path());
            }
        }
    }
    Ok(inputs)
}

fn covered(name: &str, binary: &Path, profdata: &Path, cov: &Path) -> Result<String> {
    let inputs = inputs(name)?;
    ensure!(!inputs.is_empty(), "it has no inputs: run it for a while first");
    let folder = root().join("fuzz/target/coverage/profiles").join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    // A command line holds two megabytes.
    for (n, part) in inputs.chunks(5_000).enumerate() {
        let output = Command::new(binary)
            .args(part)
            .env("LLVM_PROFILE_FILE", folder.join(format!("{n}.profraw")))
            .current_dir(&folder)
            .output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let merged = folder.join("merged.profdata");
    let mut merge = Command::new(profdata);
    merge.args(["merge", "-sparse", "-o"]).arg(&merged);
    for entry in fs::read_dir(&folder)? {
        merge.arg(entry?.path());
    }
    run(&mut merge)?;
    let output = Command::new(cov)
        .args(["export", "-summary-only", "-instr-profile"])
        .args([&merged, binary])
        .output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let export: Export = serde_json::from_slice(&output.stdout)?;
    let mut rows = String::new();
    for parser in parsers(name) {
        let path = root().join("crates").join(parser);
        // A folder is that of a module, whose own file lies beside it.
        let is_of = |file: &&Covered| {
            file.filename.starts_with(&path) || file.filename == path.with_extension("rs")
        };
        let files: Vec<&Covered> =
            export.data.iter().flat_map(|data| &data.files).filter(is_of).collect();
        let percent = |what: &str| {
            let sum = |of: fn(&Share) -> u64| -> u64 {
                files.iter().filter_map(|file| file.summary.get(what)).map(of).sum()
            };
            match sum(|share| share.count) {
                0 => "none".to_owned(),
                all => format!("{} %", 100 * sum(|share| share.covered) / all),
            }
        };
        let (lines, regions) = (percent("lines"), percent("regions"));
        let inputs = inputs.len();
        rows.push_str(&format!("{name:<20} {parser:<44} {inputs:>6} {lines:>7} {regions:>7}\n"));
    }
    if rows.is_empty() {
        bail!("no parser is named for it in {}", show(&root().join("xtask/src/fuzz/coverage.rs")));
    }
    Ok(rows)
}

/// `llvm-profdata` and `llvm-cov`: the toolchain's own, or Debian's newest.
fn tools() -> Result<[PathBuf; 2]> {
    let sysroot = Command::new("rustc").args(["--print", "sysroot"]).output()?.stdout;
    let sysroot = PathBuf::from(String::from_utf8_lossy(&sysroot).trim().to_owned());
    let own = sysroot.join("lib/rustlib").join(TARGET).join("bin");
    let debian = |version: u32| Path::new("/usr/lib").join(format!("llvm-{version}")).join("bin");
    // Earlier ones do not read what this compiler writes.
    let folders = [own].into_iter().chain((19..40).rev().map(debian));
    let both = |folder: PathBuf| ["llvm-profdata", "llvm-cov"].map(|tool| folder.join(tool));
    folders.map(both).find(|tools| tools.iter().all(|tool| tool.exists())).context(
        "NO COVERAGE: there is neither llvm-profdata nor llvm-cov of LLVM 19 or newer. Install them: \
         apt-get install llvm-19, or rustup component add llvm-tools",
    )
}
