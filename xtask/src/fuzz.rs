//! The fuzz targets: a fixed number of runs with a fixed seed in a test run, time and new seeds in a soak.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    suite::side_by_side,
    workspace::{root, run},
};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// How long a target runs.
#[derive(Clone, Copy)]
pub(crate) enum Length {
    /// The same runs each time, on the cases in `fuzz/cases` and on mutations of them.
    Repeatable,
    /// As long as this with this seed; the corpus is kept for the next time.
    Explore { seconds: u64, seed: u64 },
}

/// How many runs of each target a test run makes: as many as five seconds hold on an idle processor.
fn runs(target: &str) -> u32 {
    match target {
        "vhost_user_channel" => 20_000,
        "trace" => 100_000,
        "viommu_pieces" | "viommu_ring" => 100_000,
        "vhost_user_front" | "vhost_user_msg" | "viommu_orders" => 150_000,
        "viommu_request" => 400_000,
        "fio_job" | "virtq_packed" => 600_000,
        "virtq_chain" => 2_500_000,
        // A new target, until it is measured.
        _ => 100_000,
    }
}

/// The fuzz targets, built.
pub(crate) struct Targets {
    binaries: PathBuf,
    pub(crate) names: Vec<String>,
}

/// Builds the targets whose name contains `only`, with the stable compiler's own coverage pass; with an
/// address sanitiser if `sanitise` and a nightly compiler is there.
pub(crate) fn build(only: Option<&str>, sanitise: bool) -> Result<Targets> {
    let folder = root().join("fuzz");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder.join("fuzz_targets"))? {
        let path = entry?.path();
        // Folders hold what targets share.
        if path.is_dir() {
            continue;
        }
        let name = path.file_stem().and_then(|n| n.to_str()).context("a file without a name")?;
        if only.is_none_or(|only| name.contains(only)) {
            names.push(name.to_owned());
        }
    }
    ensure!(!names.is_empty(), "no fuzz target has {:?} in its name", only.unwrap_or_default());
    names.sort();
    let nightly = sanitise && has_nightly();
    if sanitise {
        println!(
            "address sanitiser: {}",
            if nightly { "on" } else { "off: there is no nightly toolchain" }
        );
    }
    // The flags that cargo-fuzz gives a nightly compiler, as the stable one takes them: counters at
    // every edge, and traced comparisons.
    let mut flags = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                     -Cllvm-args=-sanitizer-coverage-pc-table \
                     -Cllvm-args=-sanitizer-coverage-trace-compares \
                     -Cdebug-assertions -Coverflow-checks --cfg fuzzing"
        .to_owned();
    let mut cargo = Command::new("cargo");
    if nightly {
        flags.push_str(" -Zsanitizer=address");
        cargo.arg("+nightly");
    }
    let build = folder.join(if nightly { "target/sanitised" } else { "target" });
    run(cargo
        .args(["build", "--release", "--bins", "--target", TARGET])
        .env("RUSTFLAGS", flags)
        .env("CARGO_TARGET_DIR", &build)
        .current_dir(&folder))?;
    Ok(Targets { binaries: build.join(TARGET).join("release"), names })
}

/// Whether there is a nightly toolchain.
pub(crate) fn has_nightly() -> bool {
    let output = Command::new("rustup").args(["toolchain", "list"]).output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("nightly"))
}

impl Targets {
    /// Runs every target, one for each processor at a time. A target that failed is left out of later
    /// runs, in which its case would be tried first.
    ///
    /// # Errors
    /// What failed; each input that made a target fail is among `fuzz/cases` now.
    pub(crate) fn run(&mut self, length: Length) -> Result<()> {
        let sound = Mutex::new(Vec::new());
        let result = side_by_side(&self.names, |name| {
            self.run_one(name, length).with_context(|| name.to_owned())?;
            sound.lock().expect("no thread panics").push(name.to_owned());
            Ok(())
        });
        self.names = sound.into_inner().expect("no thread panics");
        self.names.sort();
        result
    }

    fn run_one(&self, name: &str, length: Length) -> Result<()> {
        let folder = root().join("fuzz");
        let cases = folder.join("cases").join(name);
        // Empty at first in a test run: what an earlier one has found must not matter.
        let corpus = match length {
            Length::Repeatable => folder.join("target/fresh").join(name),
            Length::Explore { .. } => folder.join("corpus").join(name),
        };
        if matches!(length, Length::Repeatable) && corpus.exists() {
            std::fs::remove_dir_all(&corpus)?;
        }
        std::fs::create_dir_all(&corpus)?;
        std::fs::create_dir_all(&cases)?;
        let mut command = Command::new(self.binaries.join(name));
        match length {
            Length::Repeatable => {
                command.arg("-seed=1").arg(format!("-runs={}", runs(name)));
            }
            Length::Explore { seconds, seed } => {
                // libFuzzer takes 32 bits, and chooses a seed itself for 0.
                let seed = (seed as u32).max(1);
                command.arg(format!("-max_total_time={seconds}")).arg(format!("-seed={seed}"));
            }
        }
        // A run that takes a minute hangs: even on a loaded machine no other takes as long.
        let limits = ["-verbosity=0", "-print_final_stats=1", "-rss_limit_mb=2048", "-timeout=60"];
        command
            .arg(format!("-artifact_prefix={}/", cases.display()))
            .args(limits)
            .args([&corpus, &cases])
            .current_dir(&folder);
        let output = command.output().with_context(|| name.to_owned())?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            let repeat = format!("cargo xtask fuzz --only {name}");
            bail!(
                "{}; commit what is new in {}; to repeat it: {repeat}\n{stderr}",
                output.status,
                show(&cases)
            );
        }
        let executed =
            stderr.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
        println!("{name}: {} runs", executed.unwrap_or("?").trim());
        // Fails unless it is empty.
        let _ = std::fs::remove_dir(&cases);
        Ok(())
    }
}

fn show(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
