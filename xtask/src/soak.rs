//! `cargo xtask soak`: random tests with new seeds, until the time is over.

use std::{
    collections::BTreeSet,
    fs,
    path::PathBuf,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    fuzz::{self, Length},
    packages,
    suite::{self, Failure, Program, SEED, Suite, Tally},
    workspace::root,
};

/// How long a fuzz target runs in a round.
const FUZZ_SECONDS: u64 = 20;

/// Runs property tests and fuzz targets in turns; what fails is kept as a case.
pub(crate) fn soak(minutes: u64, only: Option<&str>) -> Result<()> {
    let missing = packages::ensure();
    let suite = suite::build()?;
    let mut tests = random_programs(&suite, only)?;
    let mut targets = match fuzz::build(only, true) {
        Ok(targets) => Some(targets),
        // A part of a test's name need not be that of a target.
        Err(error) if only.is_some() && !tests.is_empty() && !missing.contains(&"g++") => {
            println!("no fuzz target: {error:#}");
            None
        }
        Err(error) => return Err(error),
    };
    ensure!(
        !tests.is_empty() || targets.is_some(),
        "nothing has {:?} in its name",
        only.unwrap_or_default()
    );

    let begun = Instant::now();
    let end = begun + Duration::from_secs(minutes.saturating_mul(60));
    let first = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let (mut found, mut passed, mut rounds) = (Vec::new(), 0, 0);
    while Instant::now() < end {
        let seed = first.wrapping_add(rounds).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        rounds += 1;
        println!("--- round {rounds}, seed {seed}, {} min", begun.elapsed().as_secs() / 60);
        for (program, names) in &mut tests {
            if Instant::now() >= end {
                break;
            }
            let tally = try_seed(program, names, seed)?;
            passed += tally.passed;
            for failure in &tally.failed {
                found.push(keep(failure, seed)?);
                // It has its case; later rounds are for the others.
                names.retain(|name| failure.test.as_ref() != Some(name));
            }
        }
        tests.retain(|(_, names)| !names.is_empty());
        if let Some(targets) = &mut targets
            && Instant::now() < end
            && let Err(error) =
                targets.run(Length::Explore { seconds: FUZZ_SECONDS, seed, noted: true })
        {
            println!("{error:#}");
            found.push(format!("{error:#}").lines().next().unwrap_or_default().to_owned());
        }
    }
    println!(
        "\nsoak: {rounds} rounds in {} min, {passed} property tests passed",
        begun.elapsed().as_secs() / 60
    );
    if !found.is_empty() {
        bail!("{} failures:\n{}", found.len(), found.join("\n"));
    }
    Ok(())
}

/// Runs every property test once with each of `seeds`.
pub(crate) fn random(suite: &Suite, seeds: impl Iterator<Item = u64>) -> Result<()> {
    let programs = random_programs(suite, None)?;
    let mut failed = Vec::new();
    for seed in seeds {
        println!("seed {seed}");
        let repeat = |failure: &Failure| match &failure.test {
            Some(test) => failure.program.repeat(test, seed),
            None => failure.to_string(),
        };
        for (program, names) in &programs {
            failed.extend(try_seed(program, names, seed)?.failed.iter().map(repeat));
        }
    }
    ensure!(failed.is_empty(), "{} failures; to repeat them:\n{}", failed.len(), failed.join("\n"));
    Ok(())
}

fn try_seed(program: &Program, names: &[String], seed: u64) -> Result<Tally> {
    let arguments: Vec<&str> =
        ["--exact"].into_iter().chain(names.iter().map(String::as_str)).collect();
    let environment = [(SEED, &*seed.to_string()), ("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1")];
    suite::run(std::slice::from_ref(program), &arguments, &environment)
}

/// The programs that hold random tests, with the names of these.
fn random_programs(suite: &Suite, only: Option<&str>) -> Result<Vec<(Program, Vec<String>)>> {
    let names = suite::random_tests(&root().join("crates"))?;
    let mut programs = Vec::new();
    for program in &suite.tests {
        let mut mine = BTreeSet::new();
        for test in program.list()? {
            let name = test.rsplit("::").next().unwrap_or(&test);
            let chosen =
                only.is_none_or(|only| format!("{} {test}", program.name()).contains(only));
            if names.contains(name) && chosen {
                mine.insert(test);
            }
        }
        if !mine.is_empty() {
            programs.push((program.clone(), mine.into_iter().collect()));
        }
    }
    Ok(programs)
}

/// Seeds that have failed once, a line each: package, target, test, seed.
fn file() -> PathBuf {
    root().join("xtask/cases.txt")
}

/// Adds a failure to the cases that every test run tries; the line that repeats it.
fn keep(failure: &Failure, seed: u64) -> Result<String> {
    let Some(test) = &failure.test else {
        return Ok(format!("{failure}, with {SEED}={seed}"));
    };
    let Failure { program, .. } = failure;
    let line = format!("{} {} {test} {seed}\n", program.package, program.target);
    let mut text = fs::read_to_string(file())?;
    if !text.contains(&line) {
        text.push_str(&line);
        fs::write(file(), text)?;
    }
    let repeat = program.repeat(test, seed);
    println!("a case to commit was added to {}; to repeat it:\n    {repeat}", file().display());
    Ok(repeat)
}

/// Runs every case that has failed once.
pub(crate) fn cases(suite: &Suite) -> Result<()> {
    let text = fs::read_to_string(file()).context("xtask/cases.txt")?;
    let (mut count, mut failed) = (0, Vec::new());
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        let [package, target, test, seed] = words[..] else {
            bail!("xtask/cases.txt: {line:?} must be PACKAGE TARGET TEST SEED");
        };
        let program = suite.tests.iter().find(|p| p.package == package && p.target == target);
        let program = program.with_context(|| format!("xtask/cases.txt: no {package} {target}"))?;
        let program = std::slice::from_ref(program);
        let tally = suite::run(program, &["--exact", test], &[(SEED, seed)])?;
        ensure!(
            tally.passed + tally.failed.len() > 0,
            "xtask/cases.txt: {package} {target} has no test {test}: remove the line"
        );
        count += 1;
        failed.extend(tally.failed.iter().map(|failure| format!("{failure}, seed {seed}")));
    }
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    println!("{count} cases");
    Ok(())
}
