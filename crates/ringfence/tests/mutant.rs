//! A build whose IOTLBs are not told of unmapped ranges must not pass: the probe is what stands
//! between a policy that protects and one that only says so.

mod common;

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use common::Place;
use serde_json::Value;

const JOB: &str = "[pages]\nrw=randrw\nbs=16k\nsize=16m\niodepth=4\n";

/// Our crates that the command is made of: all that the feature has built anew.
const OURS: [&str; 13] = [
    "ringfence",
    "ringfence-devices",
    "ringfence-dma",
    "ringfence-iommu",
    "ringfence-iotlb",
    "ringfence-iova",
    "ringfence-lab",
    "ringfence-mem",
    "ringfence-sync",
    "ringfence-vhost-user",
    "ringfence-vfio",
    "ringfence-virtio-iommu",
    "ringfence-virtq",
];

/// Builds the command with the feature that breaks it, as the example `mutant`: among this build's own
/// files, so that what it takes of others is there, and beside the command, which other tests run.
/// Where it is.
fn build() -> PathBuf {
    // It runs for a fraction of a second: to optimise it would take longer.
    let quickly = OURS.into_iter().flat_map(|name| {
        ["opt-level", "debug"].map(|key| format!("profile.test.package.{name}.{key}=0"))
    });
    // CARGO_TARGET_TMPDIR is `tmp` in the target directory.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a target directory");
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--quiet", "--offline", "--profile", "test", "--package", "ringfence"])
        .args(["--example", "mutant", "--features", "mutant-no-invalidation"])
        .args(["--message-format", "json-render-diagnostics"])
        .args(quickly.flat_map(|setting| ["--config".to_owned(), setting]))
        .arg("--manifest-path")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .arg("--target-dir")
        .arg(target)
        .env_remove("CARGO_BUILD_TARGET")
        .stderr(Stdio::inherit());
    let built = cargo.output().expect("cargo runs");
    assert!(built.status.success(), "the mutant does not build");
    let said = String::from_utf8(built.stdout).expect("JSON");
    let mutant = said.lines().find_map(|line| {
        let message: Value = serde_json::from_str(line).expect("JSON");
        let is = message["target"]["name"] == "mutant";
        message["executable"].as_str().filter(|_| is).map(PathBuf::from)
    });
    mutant.expect("cargo tells where it is")
}

#[test]
fn a_build_that_invalidates_nothing_fails_as_a_leak() {
    let place = Place::of(build());
    let rows = "off,strict,strict+map";
    let ended = place.compare(JOB, &["--repeat", "1", "--policy", rows, "--json", "out.json"]);
    assert_eq!(ended.code(), 1, "{ended}");
    assert!(ended.err.contains("LEAK: pages: strict"), "{ended}");
    assert!(place.read("out.json").contains("LEAK: pages: strict"), "{ended}");
    // A copy has nothing to invalidate: the buffer was never reachable, whatever the device keeps.
    let ended = place.compare(JOB, &["--repeat", "1", "--policy", "bounce"]);
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(!ended.err.contains("LEAK"), "{ended}");
}
