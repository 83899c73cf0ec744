//! A build whose IOTLBs ignore invalidations must not pass: only the probe distinguishes a policy
//! that protects from one that merely claims to. And no feature can produce such a build.

mod common;

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use common::Place;
use serde_json::Value;

const JOB: &str = "[pages]\nrw=randrw\nbs=16k\nsize=16m\niodepth=4\n";

/// Our crates in the command: all that is rebuilt for the mutant.
const OURS: [&str; 13] = [
    "ringfence-cli",
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

/// Tests of ringfence-iommu that fail where invalidations do not reach readers.
const INVALIDATION: [&str; 3] = [
    "shootdown::tests::every_reader_gets_every_range_once_and_in_order",
    "shootdown::tests::all_is_all",
    "shootdown::tests::a_reader_that_was_offline_gets_the_ranges_on_coming_back",
];

fn cargo(command: &str) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args([command, "--quiet", "--offline", "--manifest-path"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .env_remove("CARGO_BUILD_TARGET")
        .stderr(Stdio::inherit());
    cargo
}

/// The directory in which this test was built.
fn target() -> &'static Path {
    // CARGO_TARGET_TMPDIR is `tmp` in the target directory.
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a target directory")
}

/// Builds the command with the `--cfg` that breaks it, and returns where it is.
fn build() -> PathBuf {
    // It runs for a fraction of a second: optimising would take longer.
    let quickly = OURS.into_iter().flat_map(|name| {
        ["opt-level", "debug"].map(|key| format!("profile.test.package.{name}.{key}=0"))
    });
    let mut cargo = cargo("build");
    cargo
        .args(["--profile", "test", "--package", "ringfence-cli", "--bin", "ringfence"])
        .args(["--message-format", "json-render-diagnostics"])
        .args(quickly.flat_map(|setting| ["--config".to_owned(), setting]))
        // Only our crates get the `--cfg`, under names of their own, so that their dependencies are
        // already built. RUSTFLAGS would rebuild everything.
        .env(
            "RUSTC_WORKSPACE_WRAPPER",
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mutant/rustc.sh"),
        )
        .env("CARGO_BUILD_BUILD_DIR", target())
        // Not in the directory of the command, which it would replace.
        .arg("--target-dir")
        .arg(target().join("mutant"));
    let built = cargo.output().expect("cargo runs");
    assert!(built.status.success(), "the mutant does not build");
    let output_text = String::from_utf8(built.stdout).expect("JSON");
    let mutant = output_text.lines().find_map(|line| {
        let message: Value = serde_json::from_str(line).expect("JSON");
        message["executable"].as_str().map(PathBuf::from)
    });
    mutant.expect("cargo names what it has built")
}

#[test]
#[ignore = "builds the command once more"]
fn a_build_that_invalidates_nothing_fails_as_a_leak() {
    let place = Place::of(build());
    let rows = "off,strict,strict+map";
    let ended = place.compare(JOB, &["--repeat", "1", "--policy", rows, "--json", "out.json"]);
    assert_eq!(ended.code(), 1, "{ended}");
    assert!(ended.err.contains("LEAK: pages: strict"), "{ended}");
    assert!(place.read("out.json").contains("LEAK: pages: strict"), "{ended}");
    // A copy has nothing to invalidate: the buffer was never reachable, whatever the IOTLB keeps.
    let ended = place.compare(JOB, &["--repeat", "1", "--policy", "bounce"]);
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(!ended.err.contains("LEAK"), "{ended}");
}

/// Features of all dependants add up: one that switched something off would do so for all,
/// unnoticed.
#[test]
fn no_feature_is_of_a_mutant() {
    let output = cargo("metadata").args(["--no-deps", "--format-version", "1"]).output();
    let metadata: Value =
        serde_json::from_slice(&output.expect("cargo runs").stdout).expect("JSON");
    for package in metadata["packages"].as_array().expect("packages") {
        let features = package["features"].as_object().expect("features");
        let mutant = features.keys().find(|feature| feature.contains("mutant"));
        assert_eq!(mutant, None, "a feature of {}", package["name"]);
    }
}

/// The tests of invalidation themselves, with every feature on.
#[test]
#[ignore = "builds a crate once more"]
fn no_feature_takes_invalidation_away() {
    let output = cargo("test")
        .args(["--package", "ringfence-iommu", "--all-features", "--lib"])
        .arg("--target-dir")
        .arg(target())
        .args(["--", "--exact"])
        .args(INVALIDATION)
        .output()
        .expect("cargo runs");
    let output_text = String::from_utf8_lossy(&output.stdout);
    let passed = format!("{} passed; 0 failed", INVALIDATION.len());
    assert!(output.status.success() && output_text.contains(&passed), "{output_text}");
}
