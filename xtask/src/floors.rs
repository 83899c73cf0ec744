//! A crate imports only from floors below it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// The house: which crate stands on which floor (ARCHITECTURE.md).
const FLOORS: &[(&str, u32)] = &[
    ("ringfence-sync", 0),
    ("ringfence-iommu", 1),
    ("ringfence-iova", 1),
    ("ringfence-mem", 1),
    ("ringfence-sandbox", 1),
    ("ringfence-run", 2),
    ("ringfence-iotlb", 2),
    ("ringfence-dma", 2),
    ("ringfence-virtq", 2),
    ("ringfence-vfio", 2),
    ("ringfence-virtio-iommu", 3),
    ("ringfence-vhost-user", 3),
    ("ringfence-vhost-user-backend", 4),
    ("ringfence-drivers", 4),
    ("ringfence-devices", 5),
    ("ringfence-rust-vmm", 6),
    ("ringfence-conformance", 6),
    ("ringfence-lab", 7),
    ("ringfence", 7),
    ("ringfence-cli", 8),
];

/// The laboratory, which the command for hosts does without.
const LAB: &str = "ringfence-lab";

#[derive(Deserialize)]
struct Manifest {
    package: Package,
    #[serde(default)]
    dependencies: BTreeMap<String, toml::Value>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
}

/// Fails on a crate without a floor, or one that imports from its own floor or from above, or if
/// the command for hosts links the laboratory. What a crate uses only in its tests may come from
/// anywhere.
pub(crate) fn check(command: &str) -> Result<()> {
    let floors: BTreeMap<&str, u32> = FLOORS.iter().copied().collect();
    let mut wrong = Vec::new();
    let mut count = 0;
    for entry in fs::read_dir(crate::steps::root().join("crates"))? {
        let file = entry?.path().join("Cargo.toml");
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let manifest: Manifest =
            toml::from_str(&text).with_context(|| file.display().to_string())?;
        let name = &manifest.package.name;
        let Some(own) = floors.get(name.as_str()) else {
            wrong.push(format!("{name} has no floor in xtask/src/floors.rs"));
            continue;
        };
        count += 1;
        for dependency in manifest.dependencies.keys() {
            match floors.get(dependency.as_str()) {
                None if dependency.starts_with("ringfence") => {
                    wrong.push(format!("{name} imports {dependency}, which has no floor"));
                }
                Some(floor) if floor >= own => {
                    wrong
                        .push(format!("{name} (floor {own}) imports {dependency} (floor {floor})"));
                }
                _ => {}
            }
        }
    }
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    println!("{count} crates, each imports from floors below it only");
    let all = linked(command, &[])?;
    let hosts = linked(command, &["--no-default-features"])?;
    println!("{command} links {} crates, {} without its laboratory", all.len(), hosts.len());
    if !all.contains(LAB) || hosts.contains(LAB) {
        bail!(
            "{LAB} is what the feature `lab` of {command} has, which is on by default, and nothing else"
        );
    }
    Ok(())
}

/// The crates that a package links.
fn linked(package: &str, features: &[&str]) -> Result<BTreeSet<String>> {
    let tree = Command::new("cargo")
        .args(["tree", "--package", package, "--edges", "normal", "--prefix", "none"])
        .args(["--format", "{p}"])
        .args(features)
        .current_dir(crate::steps::root())
        .output()
        .context("cargo tree")?;
    if !tree.status.success() {
        bail!("cargo tree: {}", String::from_utf8_lossy(&tree.stderr));
    }
    let text = String::from_utf8_lossy(&tree.stdout);
    Ok(text.lines().filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect())
}
