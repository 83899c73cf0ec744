//! The steps of `cargo xtask test`.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use anyhow::{Context, Result, bail};

use crate::{deny, floors, guests, packages, rules};

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_owned()
}

/// What the steps may rely on.
struct Machine {
    /// Debian packages that are neither there nor could be installed.
    missing: Vec<&'static str>,
}

type Step = (&'static str, fn(&Machine) -> Result<()>);

const STEPS: &[Step] = &[
    ("format", |_| cargo(&["fmt", "--all", "--check"], &[])),
    ("lints", |_| cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"], &[])),
    ("floors", |_| floors::check()),
    ("rules", |_| rules::account(false)),
    ("licences", |_| deny::check()),
    // One that fails must not hide what others have to say.
    ("unit and property tests", |_| {
        cargo(&["test", "--workspace", "--exclude", "ringfence", "--no-fail-fast"], &[])
    }),
    ("model checks", |_| models()),
    ("documentation", |_| {
        cargo(&["doc", "--workspace", "--no-deps"], &[("RUSTDOCFLAGS", "-D warnings")])
    }),
    ("examples", |_| examples()),
    ("end to end", |_| {
        cargo(&["test", "--release", "--package", "ringfence", "--no-fail-fast"], QUICKLY_LINKED)
    }),
    ("huge pages", huge_pages),
    ("guests", real_guests),
    ("job files under the real fio", real_fio),
    ("fuzz smoke", fuzz_smoke),
];

/// A release build that is not optimised across crates: there are a dozen test programs, and to link
/// each of them so would take minutes. Benchmarks and users build without this.
const QUICKLY_LINKED: &[(&str, &str)] =
    &[("CARGO_PROFILE_RELEASE_LTO", "off"), ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")];

/// Runs all steps, or those whose name contains `only`, and says at the end what failed and what
/// did not run.
pub(crate) fn test(only: Option<&str>, list: bool) -> Result<()> {
    let steps: Vec<&Step> =
        STEPS.iter().filter(|(name, _)| only.is_none_or(|only| name.contains(only))).collect();
    if list {
        steps.iter().for_each(|(name, _)| println!("{name}"));
        return Ok(());
    }
    if steps.is_empty() {
        bail!("no step has {:?} in its name; --list names them", only.unwrap_or_default());
    }
    let machine = Machine { missing: packages::ensure() };
    let (mut failed, mut not_run) = (Vec::new(), Vec::new());
    let begun = Instant::now();
    for (name, step) in &steps {
        println!("\n=== {name}");
        let started = Instant::now();
        match step(&machine) {
            Ok(()) => println!("=== {name}: passed in {:.1} s", started.elapsed().as_secs_f32()),
            Err(error) if error.is::<NotRun>() => {
                println!("=== {name}: NOT RUN: {error}");
                not_run.push(format!("{name}: {error}"));
            }
            Err(error) => {
                println!("=== {name}: FAILED: {error:#}");
                failed.push(*name);
            }
        }
    }
    println!("\n{:.0} s", begun.elapsed().as_secs_f32());
    for name in &not_run {
        println!("NOT RUN: {name}");
    }
    let passed = steps.len() - failed.len() - not_run.len();
    println!("steps: {passed} passed, {} failed, {} skipped", failed.len(), not_run.len());
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    // In CI everything must be there: a step that did not run has failed.
    if env::var_os("CI").is_some_and(|ci| ci == "true") && !not_run.is_empty() {
        bail!("steps did not run, and in CI all must");
    }
    Ok(())
}

/// Why a step could not run on this machine.
#[derive(Debug)]
struct NotRun(String);

impl std::fmt::Display for NotRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotRun {}

fn cargo(arguments: &[&str], environment: &[(&str, &str)]) -> Result<()> {
    let mut command = Command::new("cargo");
    command.args(arguments).envs(environment.iter().copied()).current_dir(root());
    run(&mut command)
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}

/// The lock-free parts, explored by loom in every interleaving that their bounds allow.
fn models() -> Result<()> {
    const PACKAGES: [&str; 6] = [
        "ringfence-sync",
        "ringfence-iommu",
        "ringfence-iova",
        "ringfence-iotlb",
        "ringfence-dma",
        "ringfence-virtq",
    ];
    let target = root().join("target/loom");
    let target = target.to_str().context("the path of the workspace is not UTF-8")?;
    // One command, so that what they share is built once and the rest side by side.
    let mut arguments = vec!["test", "--release", "--lib", "--no-fail-fast"];
    arguments.extend(PACKAGES.iter().flat_map(|&package| ["--package", package]));
    arguments.push("model");
    let environment =
        [("RUSTFLAGS", "--cfg loom -Cdebug-assertions"), ("CARGO_TARGET_DIR", target)];
    cargo(&arguments, &[&environment[..], QUICKLY_LINKED].concat())
}

/// Every example must run, not only build.
fn examples() -> Result<()> {
    // As the tests have built them already.
    let build = ["build", "--workspace", "--exclude", "ringfence", "--examples"];
    cargo(&[&build[..], &["--profile", "test"]].concat(), &[])?;
    let mut count = 0;
    for krate in std::fs::read_dir(root().join("crates"))? {
        let Ok(entries) = std::fs::read_dir(krate?.path().join("examples")) else { continue };
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_none_or(|e| e != "rs") {
                continue;
            }
            println!("--- {}", path.strip_prefix(root())?.display());
            let name = path.file_stem().context("a file without a name")?;
            run(&mut Command::new(root().join("target/debug/examples").join(name)))?;
            count += 1;
        }
    }
    if count == 0 {
        bail!("no example was found");
    }
    Ok(())
}

/// What needs huge pages. They are set apart for as long as it runs, unless there are some.
fn huge_pages(_: &Machine) -> Result<()> {
    const NEEDED: u64 = 4;
    let folder = Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB");
    let read = |name: &str| -> Result<u64> {
        let text = std::fs::read_to_string(folder.join(name));
        Ok(text
            .map_err(|error| NotRun(format!("no huge pages of 2 MiB: {error}")))?
            .trim()
            .parse()?)
    };
    let (all, lacking) = (read("nr_hugepages")?, NEEDED.saturating_sub(read("free_hugepages")?));
    let set = |pages: u64| std::fs::write(folder.join("nr_hugepages"), pages.to_string());
    if lacking > 0 {
        let remedy = format!("as root: sysctl vm.nr_hugepages={}", all + lacking);
        set(all + lacking).map_err(|error| NotRun(format!("{error}; {remedy}")))?;
        if read("free_hugepages")? < NEEDED {
            set(all)?;
            return Err(NotRun(format!("memory is in too small pieces; {remedy}")).into());
        }
    }
    let test = ["test", "--package", "ringfence-vfio", "--test", "pin_real"];
    let result = cargo(&[&test[..], &["--", "--ignored", "huge_pages"]].concat(), &[]);
    if lacking > 0 {
        set(all)?;
    }
    result
}

/// Strangers in front of our back ends. One guest at a time: each takes a processor.
fn real_guests(machine: &Machine) -> Result<()> {
    for package in ["g++", "make", "xz-utils"] {
        if machine.missing.contains(&package) {
            return Err(NotRun(format!("{package} is not installed")).into());
        }
    }
    guests::make(&[]).map_err(|error| NotRun(format!("guests cannot be made: {error:#}")))?;
    let command = ["test", "--release", "--package", "ringfence", "--test", "guests"];
    // Not the table of speeds: it takes minutes, and a machine to itself.
    let mut which =
        vec!["--no-fail-fast", "--", "--ignored", "--test-threads=1", "--skip", "speed::"];
    if !guests::iommufd::is_there() {
        let tests = guests::iommufd::TESTS;
        println!("NOT RUN: guests' tests {tests}: Debian has no kernel for them (docs/vfio.md)");
        which.extend(["--skip", tests]);
    }
    cargo(&[&command[..], &which].concat(), QUICKLY_LINKED)
}

/// The job files that we ship must be fio's own: fio parses them too.
fn real_fio(machine: &Machine) -> Result<()> {
    if machine.missing.contains(&"fio") {
        return Err(NotRun("fio is not installed".into()).into());
    }
    let mut count = 0;
    for entry in std::fs::read_dir(root().join("examples"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "fio") {
            run(Command::new("fio").arg("--parse-only").arg(&path))?;
            count += 1;
        }
    }
    if count == 0 {
        bail!("no job file was found in examples/");
    }
    println!("{count} job files");
    Ok(())
}

fn fuzz_smoke(machine: &Machine) -> Result<()> {
    if machine.missing.contains(&"g++") {
        return Err(NotRun("g++ is not installed".into()).into());
    }
    fuzz(5, None)
}

/// Runs the fuzz targets, built with the stable compiler's own coverage pass.
pub(crate) fn fuzz(seconds: u32, only: Option<&str>) -> Result<()> {
    let folder = root().join("fuzz");
    // What cargo-fuzz asks of a nightly compiler, in the words of the stable one: counters at
    // every edge, and the comparisons traced. Without an address sanitiser, which stable lacks.
    let flags = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                 -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
                 -Cdebug-assertions -Coverflow-checks -Ccodegen-units=1 --cfg fuzzing";
    let target = "x86_64-unknown-linux-gnu";
    run(Command::new("cargo")
        .args(["build", "--release", "--bins", "--target", target])
        .env("RUSTFLAGS", flags)
        .env("CARGO_TARGET_DIR", folder.join("target"))
        .current_dir(&folder))?;
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder.join("fuzz_targets"))? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|n| n.to_str()).context("a file without a name")?;
        if only.is_none_or(|only| name.contains(only)) {
            names.push(name.to_owned());
        }
    }
    if names.is_empty() {
        bail!("no fuzz target was run");
    }
    names.sort();
    let binaries = folder.join("target").join(target).join("release");
    let alone = names.len() == 1;
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    // One for each processor: a target is a single thread.
    let processors = std::thread::available_parallelism()?.get();
    std::thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(|| {
                while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) =
                        fuzz_one(&folder, &binaries.join(name), name, seconds, alone)
                    {
                        failed.lock().expect("no thread panics").push(format!("{name}: {error:#}"));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no thread panics");
    if !failed.is_empty() {
        bail!("{}", failed.join("; "));
    }
    Ok(())
}

/// Runs one target. What it says is shown as it says it if it runs alone, and when it is over if
/// others run beside it.
fn fuzz_one(folder: &Path, binary: &Path, name: &str, seconds: u32, alone: bool) -> Result<()> {
    let corpus = folder.join("corpus").join(name);
    let artifacts = folder.join("artifacts");
    std::fs::create_dir_all(&corpus)?;
    std::fs::create_dir_all(&artifacts)?;
    let mut command = Command::new(binary);
    command
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/{name}-", artifacts.display()))
        .args(["-verbosity=0", "-print_final_stats=1", "-rss_limit_mb=2048", "-timeout=10"])
        .arg(&corpus)
        .current_dir(folder);
    if alone {
        return run(&mut command);
    }
    let output = command.output().with_context(|| binary.display().to_string())?;
    println!("--- {name}, {seconds} s\n{}", String::from_utf8_lossy(&output.stderr).trim_end());
    if !output.status.success() {
        bail!("{}", output.status);
    }
    Ok(())
}
