//! A build whose IOTLBs are not told of unmapped ranges must not pass: the probe is what stands
//! between a policy that protects and one that only says so.

mod common;

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use common::Place;

const JOB: &str = "[pages]\nrw=randrw\nbs=16k\nsize=16m\niodepth=4\ntime_based\nruntime=100ms\n";

/// Builds the command with the feature that breaks it, beside this build's own files, so that the
/// next run finds it done.
fn build() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutant");
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--offline", "--release", "--bin", "ringfence"])
        .args(["--features", "mutant-no-invalidation"])
        .arg("--manifest-path")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .arg("--target-dir")
        .arg(&target)
        // Built for one run of a fraction of a second.
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
        .env_remove("CARGO_BUILD_TARGET")
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the mutant does not build");
    target.join("release/ringfence")
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
