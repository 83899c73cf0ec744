//! What a first program takes: the examples of the facade, built as a user builds them, outside of
//! the workspace and with one dependency.

use std::{fs, process::Command};

use anyhow::{Context, Result, ensure};

use crate::workspace::{root, run};

/// The examples, and how many lines of width 100 each may have, imports included.
const EXAMPLES: &[(&str, usize)] = &[("map", 15), ("rng", 45), ("rust_vmm", 45), ("vmm", 60)];

pub(crate) fn check() -> Result<()> {
    let (root, outside) = (root(), root().join("target/front-door"));
    let examples = outside.join("examples");
    // Of an earlier run: an example that is gone is not built.
    let _ = fs::remove_dir_all(&examples);
    fs::create_dir_all(&examples)?;
    fs::create_dir_all(outside.join("src"))?;
    fs::write(outside.join("src/lib.rs"), "")?;
    fs::copy(root.join("Cargo.lock"), outside.join("Cargo.lock"))?;
    let manifest = format!(
        "[package]\nname = \"front-door\"\nedition = \"2024\"\n[workspace]\n[dependencies]\n\
         ringfence = {{ path = {:?}, features = [\"backend\", \"rust-vmm\"] }}\n\
         [profile.dev]\ndebug = 0\n",
        root.join("crates/ringfence")
    );
    fs::write(outside.join("Cargo.toml"), manifest)?;
    let there = fs::read_dir(root.join("crates/ringfence/examples"))?.count();
    ensure!(there == EXAMPLES.len(), "{there} examples are there, {} are listed", EXAMPLES.len());
    for &(name, most) in EXAMPLES {
        let from = root.join(format!("crates/ringfence/examples/{name}.rs"));
        let text = fs::read_to_string(&from).with_context(|| format!("reading {from:?}"))?;
        let lines = text.lines().count();
        println!("{name:<9} {lines} lines of at most {most}");
        ensure!(lines <= most, "the example {name} has {lines} lines, and may have {most}");
        let wide = text.lines().find(|line| line.chars().count() > 100);
        ensure!(wide.is_none(), "the example {name} is wider than 100: {}", wide.unwrap_or(""));
        fs::write(examples.join(format!("{name}.rs")), text)?;
    }
    let cargo = |arguments: &[&str]| {
        run(Command::new("cargo").args(arguments).arg("--offline").current_dir(&outside))
    };
    cargo(&["build", "--quiet", "--examples"])?;
    // Without a socket `rng` says what it takes.
    EXAMPLES.iter().try_for_each(|(name, _)| cargo(&["run", "--quiet", "--example", name]))
}
