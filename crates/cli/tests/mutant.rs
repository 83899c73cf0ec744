//! A build whose IOTLBs ignore invalidations must not pass: only the probe distinguishes a policy
//! that protects from one that merely claims to. And no feature can produce such a build.
//!
//! Disks that go wrong, and ends that are killed: with each defect a test of theirs fails.

mod common;

use std::{
    fs,
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

/// A defect a line, between tabs: the file, what is there, what is there instead (where `defect` is whether this one is
/// chosen), the test of `hostile` that must fail, and what it says.
const DEFECTS: &str = include_str!("mutant/defects.tsv");

/// What the copy of the sources has that the defects are put into.
const SOURCES: &str =
    ".cargo Cargo.lock Cargo.toml README.md crates docs examples gate guest xtask";

fn cargo(command: &str, root: &Path) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args([command, "--quiet", "--offline", "--manifest-path"])
        .arg(root.join("crates/cli/Cargo.toml"))
        .env_remove("CARGO_BUILD_TARGET")
        .stderr(Stdio::inherit());
    cargo
}

/// The directory in which this test was built.
fn target() -> &'static Path {
    // CARGO_TARGET_TMPDIR is `tmp` in the target directory.
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a target directory")
}

/// The root of the workspace.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds the command with the `--cfg` that breaks it, and returns where it is.
fn without_invalidation() -> PathBuf {
    let mut cargo = cargo("build", &root());
    // Only our crates get the `--cfg`, under names of their own, so that their dependencies are
    // already built. RUSTFLAGS would rebuild everything.
    cargo.env("RUSTC_WORKSPACE_WRAPPER", root().join("crates/cli/tests/mutant/rustc.sh"));
    build(cargo, "mutant").remove(0)
}

/// Builds the command, and what else `cargo` is to build, in a directory of this name; returns where the programs are.
fn build(mut cargo: Command, name: &str) -> Vec<PathBuf> {
    // It runs for a fraction of a second: optimising would take longer.
    let quickly = OURS.into_iter().flat_map(|name| {
        ["opt-level", "debug"].map(|key| format!("profile.test.package.{name}.{key}=0"))
    });
    cargo
        .args(["--profile", "test", "--package", "ringfence-cli", "--bin", "ringfence"])
        .args(["--message-format", "json-render-diagnostics"])
        .args(quickly.flat_map(|setting| ["--config".to_owned(), setting]))
        .env("CARGO_BUILD_BUILD_DIR", target())
        // Not in the directory of the command, which it would replace.
        .arg("--target-dir")
        .arg(target().join(name));
    let built = cargo.output().expect("cargo runs");
    assert!(built.status.success(), "the mutant does not build");
    let output_text = String::from_utf8(built.stdout).expect("JSON");
    let programs = output_text.lines().filter_map(|line| {
        let message: Value = serde_json::from_str(line).expect("JSON");
        message["executable"].as_str().map(PathBuf::from)
    });
    programs.collect()
}

#[test]
#[ignore = "builds the command once more"]
fn a_build_that_invalidates_nothing_fails_as_a_leak() {
    let place = Place::of(without_invalidation());
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

/// They are put into a copy of the sources, so that the product has no line for them. One build has all.
#[test]
#[ignore = "builds the command once more, and mounts file systems of FUSE, which takes root"]
fn each_defect_of_a_disk_fails_a_test() {
    let copy = target().join("defects");
    let _ = fs::remove_dir_all(&copy);
    fs::create_dir_all(&copy).unwrap();
    let sources = SOURCES.split(' ').map(|name| root().join(name));
    // With their times, so that what has no defect is built once.
    let copied = Command::new("cp").arg("-a").args(sources).arg(&copy).status();
    assert!(copied.expect("cp runs").success());
    let defects = DEFECTS.lines().map(|line| line.split('\t').collect::<Vec<_>>());
    let defects: Vec<[&str; 5]> = defects.map(|fields| fields.try_into().unwrap()).collect();
    for (number, [file, right, wrong, ..]) in defects.iter().enumerate() {
        let path = copy.join("crates").join(file);
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.matches(right).count(), 1, "{file} has another text: {right}");
        let chosen = r#"std::env::var("RINGFENCE_DEFECT").is_ok_and(|chosen| chosen == "NUMBER")"#;
        let chosen = chosen.replace("NUMBER", &number.to_string());
        fs::write(&path, text.replace(right, &wrong.replace("defect", &chosen))).unwrap();
    }
    let mut cargo = cargo("build", &copy);
    cargo.args(["--test", "hostile"]);
    let programs = build(cargo, "defective");
    let is_hostile = |path: &&PathBuf| path.to_string_lossy().contains("/hostile-");
    let hostile = programs.iter().find(is_hostile).expect("the program of tests");
    for (number, [_, _, wrong, test, says]) in defects.iter().enumerate() {
        let mut hostile = Command::new(hostile);
        hostile.args(["--include-ignored", "--exact", test]);
        let output = hostile.env("RINGFENCE_DEFECT", number.to_string()).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success() && printed.contains(says), "{wrong}: {printed}");
    }
}

/// Features of all dependants add up: one that switched something off would do so for all,
/// unnoticed.
#[test]
fn no_feature_is_of_a_mutant() {
    let output = cargo("metadata", &root()).args(["--no-deps", "--format-version", "1"]).output();
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
    let output = cargo("test", &root())
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
