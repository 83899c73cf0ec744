//! The workspace: where it is, its packages, and commands that run in it.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_owned()
}

/// A package, as cargo describes it.
#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) license: Option<String>,
    /// `None`: it is in the workspace.
    pub(crate) source: Option<String>,
    pub(crate) repository: Option<String>,
    /// The registries that it may go to; `None`: any.
    publish: Option<Vec<String>>,
    dependencies: Vec<Dependency>,
    manifest_path: PathBuf,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `None`: the product needs it, not only its tests or its build.
    kind: Option<String>,
}

impl Package {
    /// Where it lies.
    pub(crate) fn folder(&self) -> &Path {
        self.manifest_path.parent().expect("a manifest lies in a folder")
    }

    /// Whether other projects may depend on it.
    pub(crate) fn is_published(&self) -> bool {
        self.publish.as_ref().is_none_or(|registries| !registries.is_empty())
    }

    /// What its product imports, features that are off included.
    pub(crate) fn imports(&self) -> impl Iterator<Item = &str> {
        let imported = self.dependencies.iter().filter(|one| one.kind.is_none());
        imported.map(|one| one.name.as_str())
    }
}

/// The workspace's own packages, by name.
pub(crate) fn packages() -> Result<Vec<Package>> {
    metadata(&["--no-deps", "--offline"])
}

/// Those below `crates/`, by name.
pub(crate) fn crates() -> Result<Vec<Package>> {
    let (mut packages, folder) = (packages()?, root().join("crates"));
    packages.retain(|package| package.folder().starts_with(&folder));
    Ok(packages)
}

/// The workspace's packages and all that they depend on, on the platform that they are for.
pub(crate) fn packages_and_dependencies() -> Result<Vec<Package>> {
    metadata(&["--locked", "--filter-platform", "x86_64-unknown-linux-gnu"])
}

fn metadata(arguments: &[&str]) -> Result<Vec<Package>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    let mut command = Command::new("cargo");
    command.args(["metadata", "--format-version=1"]).args(arguments).current_dir(root());
    let listed: Metadata =
        serde_json::from_str(&output(&mut command)?).context("cargo metadata")?;
    let mut packages = listed.packages;
    packages.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(packages)
}

/// Runs cargo at the root of the workspace.
pub(crate) fn cargo(arguments: &[&str], environment: &[(&str, &str)]) -> Result<()> {
    let mut command = Command::new("cargo");
    command.args(arguments).envs(environment.iter().copied()).current_dir(root());
    run(&mut command)
}

/// Runs a command, whose output is shown.
///
/// # Errors
/// It failed.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}

/// What a command prints; the error has what it printed to stderr.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let ended = command.output().with_context(|| format!("{command:?}"))?;
    if !ended.status.success() {
        bail!("{command:?}: {}\n{}", ended.status, String::from_utf8_lossy(&ended.stderr));
    }
    String::from_utf8(ended.stdout).with_context(|| format!("{command:?} printed no UTF-8"))
}
