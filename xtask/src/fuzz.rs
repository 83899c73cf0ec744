//! The fuzz targets: a fixed number of runs with a fixed seed in a test run, time and new seeds in a soak.
//! All begin with the inputs in `fuzz/seeds`.

pub(crate) mod coverage;
mod hours;
pub(crate) mod seeds;

use std::{
    collections::BTreeMap,
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Mutex,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    suite::side_by_side,
    workspace::{root, run},
};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// How long a target runs.
#[derive(Clone, Copy)]
pub(crate) enum Length {
    /// The same runs each time, on the seeds, on the cases in `fuzz/cases` and on mutations of them.
    Repeatable,
    /// As long as this with this seed; the corpus is kept for the next time. `noted`: in
    /// `fuzz/hours.toml`.
    Explore { seconds: u64, seed: u64, noted: bool },
}

/// How many runs of each target a test run makes: as many as five seconds hold on an idle processor.
fn runs(target: &str) -> u32 {
    match target {
        "iotlb" => 2_500,
        "vhost_user_channel" => 4_000,
        "viommu_saved" => 5_000,
        "inflight" | "trace" => 10_000,
        "dirty_log" | "vhost_user_front" | "vhost_user_msg" => 15_000,
        "viommu_pieces" => 25_000,
        "viommu_ring" => 30_000,
        "viommu_orders" => 50_000,
        "vfio_replies" => 60_000,
        "fio_job" => 80_000,
        "viommu_request" => 120_000,
        "virtq_packed" => 250_000,
        "virtq_driver" => 300_000,
        "virtq_chain" => 1_000_000,
        // A new target, until it is measured.
        _ => 10_000,
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
    let names = names(only)?;
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

/// The names of the targets that contain `only`.
pub(crate) fn names(only: Option<&str>) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(root().join("fuzz/fuzz_targets"))? {
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
    Ok(names)
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
            fs::remove_dir_all(&corpus)?;
        }
        fs::create_dir_all(&corpus)?;
        fs::create_dir_all(&cases)?;
        let mut command = Command::new(self.binaries.join(name));
        match length {
            Length::Repeatable => {
                command.arg("-seed=1").arg(format!("-runs={}", runs(name)));
            }
            Length::Explore { seconds, seed, .. } => {
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
            .args(Some(folder.join("seeds").join(name)).filter(|seeds| seeds.exists()))
            // Descriptors are closed by threads that end by themselves: what such a thread still has is no
            // leak, and what leaks in earnest meets the limit above.
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .current_dir(&folder);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let (stderr, cpu_seconds) = attend(&mut child)?;
        let status = child.wait()?;
        if !status.success() {
            let repeat = format!("cargo xtask fuzz --only {name}");
            bail!(
                "{status}; commit what is new in {}; to repeat it: {repeat}\n{stderr}",
                show(&cases)
            );
        }
        let executed =
            stderr.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
        let executed = executed.unwrap_or("?").trim();
        println!("{name}: {executed} runs, {cpu_seconds:.1} s of a processor");
        if let Length::Explore { noted: true, .. } = length {
            hours::add(name, cpu_seconds, executed.parse().unwrap_or(0))?;
        }
        // Fails unless it is empty.
        let _ = fs::remove_dir(&cases);
        Ok(())
    }
}

/// Reads what a target prints until it ends; also returns the processor time that it has taken.
fn attend(child: &mut Child) -> Result<(String, f64)> {
    let mut printed = Vec::new();
    child.stderr.take().context("it was given one")?.read_to_end(&mut printed)?;
    let pid = Pid::from_child(child);
    // Its times are there until it is waited for.
    waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id()))?;
    // Behind the name: state, and from the twelfth word on the times of the process, in hundredths.
    let behind = stat.rsplit_once(')').map_or("", |(_, behind)| behind);
    let ticks: u64 =
        behind.split_whitespace().skip(11).take(2).filter_map(|it| it.parse::<u64>().ok()).sum();
    Ok((String::from_utf8_lossy(&printed).into_owned(), ticks as f64 / 100.0))
}

fn show(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// For how many processor hours each target has run by hand and in soaks.
pub(crate) fn hours() -> Result<BTreeMap<String, f64>> {
    hours::all()
}
