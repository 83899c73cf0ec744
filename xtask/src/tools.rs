//! Programs of other projects that cargo can build: below `target/tools`, once.

use std::{env, fs, path::PathBuf, process::Command, time::Instant};

use anyhow::Result;

use crate::{
    steps::NotRun,
    workspace::{output, root, run},
};

/// The program `name`, of exactly this version; builds it if it is not there.
///
/// # Errors
/// [`NotRun`]: it is not there, and cannot be built.
pub(crate) fn tool(name: &str, version: &str, features: &[&str]) -> Result<PathBuf> {
    let tools = root().join("target/tools");
    let program = tools.join("bin").join(name);
    let is_there = || {
        // `NAME VERSION`, with or without a `v`.
        let printed = output(Command::new(&program).arg("--version"));
        printed.is_ok_and(|printed| {
            let is_name = |words: &str| words.trim_start_matches('v') == version;
            printed.trim().strip_prefix(name).is_some_and(|rest| is_name(rest.trim()))
        })
    };
    if is_there() {
        return Ok(program);
    }
    println!("building {name} {version} into target/tools: once, a minute or two");
    let (started, build) = (Instant::now(), tools.join("build"));
    let version = format!("={version}");
    // Such programs do little by themselves: optimised, they take twice as long to build.
    let mut arguments = vec!["install", "--debug", "--locked", "--force", name];
    arguments.extend(features);
    arguments.extend(["--version", &version, "--root"]);
    let mut command = pristine("cargo");
    command.args(&arguments).arg(&tools).arg("--target-dir").arg(&build);
    // Nor are they to be debugged.
    let built = run(command.env("CARGO_PROFILE_DEV_DEBUG", "0"));
    if built.is_err() || !is_there() {
        let remedy = format!("cargo {} target/tools", arguments.join(" "));
        return Err(NotRun(format!("{name} cannot be installed; {remedy}")).into());
    }
    // What is left of the build is ten times the size of the program.
    let _ = fs::remove_dir_all(build);
    println!("built in {:.0} s", started.elapsed().as_secs_f32());
    Ok(program)
}

/// A command that does not inherit what changes how code is compiled or counted.
pub(crate) fn pristine(program: &str) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        let changes = name.starts_with("CARGO_PROFILE_")
            || name.starts_with("GUNGRAUN_")
            || name.starts_with("VALGRIND_")
            || matches!(&*name, "RUSTFLAGS" | "RUSTC_WRAPPER");
        if changes {
            command.env_remove(&*name);
        }
    }
    // Empty, it takes precedence over flags in configuration files too.
    command.env("CARGO_ENCODED_RUSTFLAGS", "");
    command
}
