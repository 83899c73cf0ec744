//! `fuzz/hours.toml`: for how long each target has run by hand and in soaks, as evidence.

use std::{collections::BTreeMap, fs, process::Command, sync::Mutex};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::workspace::root;

const HEAD: &str = "\
# How long each fuzz target has run by hand and in soaks: processor hours, runs, and the commit of the last
# time. `cargo xtask fuzz` and `cargo xtask soak` add to it.

";

#[derive(Default, Deserialize)]
struct Target {
    cpu_hours: f64,
    runs: u64,
    commit: String,
}

/// The processor hours of each target.
pub(super) fn all() -> Result<BTreeMap<String, f64>> {
    let text = fs::read_to_string(root().join("fuzz/hours.toml")).unwrap_or_default();
    let targets: BTreeMap<String, Target> = toml::from_str(&text).context("fuzz/hours.toml")?;
    Ok(targets.into_iter().map(|(name, target)| (name, target.cpu_hours)).collect())
}

/// Adds a run of a target.
pub(super) fn add(name: &str, cpu_seconds: f64, runs: u64) -> Result<()> {
    // Targets run side by side.
    static FILE: Mutex<()> = Mutex::new(());
    let _file = FILE.lock().expect("no thread panics");
    let path = root().join("fuzz/hours.toml");
    let text = fs::read_to_string(&path).unwrap_or_default();
    let mut targets: BTreeMap<String, Target> = toml::from_str(&text).context("fuzz/hours.toml")?;
    let target = targets.entry(name.to_owned()).or_default();
    // Four digits are a third of a second.
    target.cpu_hours = ((target.cpu_hours + cpu_seconds / 3600.0) * 1e4).round() / 1e4;
    target.runs += runs;
    target.commit = commit();
    let mut text = HEAD.to_owned();
    for (name, Target { cpu_hours, runs, commit }) in &targets {
        text += &format!(
            "[{name}]\ncpu_hours = {cpu_hours:?}\nruns = {runs}\ncommit = \"{commit}\"\n\n"
        );
    }
    fs::write(path, text.trim_end().to_owned() + "\n")?;
    Ok(())
}

fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).current_dir(root()).output();
        output.ok().filter(|it| it.status.success()).map(|it| it.stdout).unwrap_or_default()
    };
    let head =
        String::from_utf8_lossy(&git(&["rev-parse", "--short=12", "HEAD"])).trim().to_owned();
    // The hours themselves and new seeds are no change.
    let changed = git(&[
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        "crates",
        "fuzz/fuzz_targets",
    ]);
    if changed.is_empty() { head } else { format!("{head}, with changes") }
}
