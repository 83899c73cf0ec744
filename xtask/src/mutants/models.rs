//! The models: built once under loom, each run by itself.

use std::{
    collections::BTreeSet,
    fs,
    process::{Command, Output, Stdio},
    sync::Mutex,
};

use anyhow::{Context, Result, ensure};

use crate::{
    suite::{Program, built, side_by_side},
    workspace::{crates, root},
};

/// A model, as it passes.
pub(crate) struct Model {
    /// `iommu shootdown::model::a_lease_holds`.
    pub(crate) name: String,
    program: Program,
    test: String,
    pub(crate) executions: u64,
    pub(crate) preemptions: String,
    /// The accesses that it reaches.
    pub(crate) places: BTreeSet<String>,
}

/// How a model fails.
pub(crate) struct Failure {
    /// The number of the execution; `None`: it took the process with it.
    pub(crate) execution: Option<u64>,
    /// What it panics with.
    pub(crate) why: String,
}

/// How much of a model is explored with a mutant, which may have far more executions: what fails does so
/// early. A number, not a time, so that the same models fail everywhere.
const MOST: [(&str, &str); 2] =
    [("LOOM_MAX_PERMUTATIONS", "40000"), ("LOOM_CHECKPOINT_INTERVAL", "1000")];

/// Builds the models and explores each.
///
/// # Errors
/// One fails, or there is none.
pub(crate) fn explore() -> Result<Vec<Model>> {
    let mut tests = Vec::new();
    for program in build()? {
        let names = program.list()?;
        tests.extend(
            names.into_iter().filter(|test| is_model(test)).map(|test| (program.clone(), test)),
        );
    }
    ensure!(!tests.is_empty(), "there is no model");
    let models = Mutex::new(Vec::new());
    side_by_side(&tests, |(program, test)| {
        let output = run(program, test, &[("RINGFENCE_PLACES", "1")])?;
        let printed = printed(&output);
        let name = format!("{} {test}", program.package.trim_start_matches("ringfence-"));
        ensure!(output.status.success(), "{name} fails:\n{printed}");
        // One that must fail shows that a rule is needed; it is no judge of mutants.
        let says =
            |begin: &'static str| printed.lines().filter_map(move |line| line.strip_prefix(begin));
        let (mut executions, mut preemptions) = (0, BTreeSet::new());
        for line in says("model: executions ") {
            let (count, bound) = line.split_once(", preemptions ").context("a line of a model")?;
            executions += count.parse::<u64>()?;
            preemptions.insert(bound.to_owned());
        }
        if says("model: fails ").next().is_some() {
            return Ok(());
        }
        ensure!(executions > 0, "{name} explores nothing:\n{printed}");
        let places = says("model: at ").map(str::to_owned).collect();
        let preemptions = preemptions.into_iter().collect::<Vec<_>>().join(", ");
        let (program, test) = (program.clone(), test.clone());
        let model = Model { name, program, test, executions, preemptions, places };
        models.lock().expect("no thread panics").push(model);
        Ok(())
    })?;
    let mut models = models.into_inner().expect("no thread panics");
    models.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(models)
}

fn is_model(test: &str) -> bool {
    test.split("::").any(|part| part.starts_with("model"))
}

fn build() -> Result<Vec<Program>> {
    let mut command = Command::new("cargo");
    // One command, so that what they share is built once and the rest side by side.
    command.args(["test", "--release", "--lib", "--no-run"]);
    // Those that need the model checker.
    let mut packages = crates()?;
    packages.retain(|package| {
        let manifest = fs::read_to_string(package.folder().join("Cargo.toml"));
        manifest.is_ok_and(|text| text.contains("[target.'cfg(loom)'"))
    });
    command.args(packages.iter().flat_map(|package| ["--package", &package.name]));
    command.env("RUSTFLAGS", "--cfg loom -Cdebug-assertions");
    command.env("CARGO_TARGET_DIR", root().join("target/loom"));
    // Optimised, but not across crates.
    command.env("CARGO_PROFILE_RELEASE_LTO", "off");
    command.env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
    // Nor are they debugged: this is an eighth of the build.
    command.env("CARGO_PROFILE_RELEASE_DEBUG", "false");
    let programs = built(&mut command)?.tests;
    ensure!(programs.len() == packages.len(), "a package has no models");
    Ok(programs)
}

fn run(program: &Program, test: &str, environment: &[(&str, &str)]) -> Result<Output> {
    let mut command = program.command();
    command.args(["--exact", test, "--nocapture"]).envs(environment.iter().copied());
    command.stdin(Stdio::null()).env("RUST_BACKTRACE", "0");
    command.output().with_context(|| format!("{command:?}"))
}

fn printed(output: &Output) -> String {
    let [one, other] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{one}{other}")
}

impl Model {
    /// How it fails with a mutant; `None`: it passes.
    pub(crate) fn fails(&self, mutant: &str) -> Result<Option<Failure>> {
        let output =
            run(&self.program, &self.test, &[("RINGFENCE_MUTANT", mutant), MOST[0], MOST[1]])?;
        if output.status.success() {
            return Ok(None);
        }
        let printed = printed(&output);
        let mut lines = printed.lines();
        // A model of several parts prints for each; the last is the one that fails.
        let mut before = 0;
        for line in printed.lines() {
            if let Some((count, _)) =
                line.strip_prefix("model: executions ").and_then(|rest| rest.split_once(','))
            {
                before += count.parse::<u64>()?;
            }
        }
        let failed = printed.lines().find_map(|line| {
            line.strip_prefix("model: fails at execution ")?.split(',').next()?.parse::<u64>().ok()
        });
        let execution = failed.map(|execution| before + execution);
        let panic = lines.by_ref().find(|line| line.contains("panicked at ")).unwrap_or_default();
        let why = lines.next().unwrap_or_default().trim().to_owned();
        // What the model checker finds; else it is a fault of its own, which proves nothing.
        let finds = ["Causality violation", "deadlock", "exceeded maximum number of branches"];
        if panic.contains("/loom-") && !finds.iter().any(|begin| why.contains(begin)) {
            return Ok(None);
        }
        ensure!(
            !why.is_empty(),
            "{} with {mutant}: {}, and no model failed:\n{printed}",
            self.name,
            output.status
        );
        Ok(Some(Failure { execution, why }))
    }
}
