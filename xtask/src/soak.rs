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
    packages::ensure();
    let suite = suite::build()?;
    let mut tests = random_programs(&suite, only)?;
    let mut targets = match fuzz::names(only) {
        // A part of a test's name need not be that of a target.
        Err(error) if only.is_some() => {
            println!("{error:#}");
            None
        }
        named => Some(named.and_then(|_| fuzz::build(only, true))?),
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
                found.push(keep(failure, names, seed)?);
                // It has its case; later rounds are for the others.
                names.retain(|name| failure.test.as_ref().is_some_and(|test| test != name));
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
        for (program, names) in &programs {
            let repeat = |failure: &Failure| failure.program.repeat(&tests(failure, names), seed);
            failed.extend(try_seed(program, names, seed)?.failed.iter().map(repeat));
        }
    }
    ensure!(failed.is_empty(), "{} failures; to repeat them:\n{}", failed.len(), failed.join("\n"));
    Ok(())
}

/// Runs tests with a seed. A program that ends by itself names none: then each runs alone, and unless
/// one fails, it takes them together.
fn try_seed(program: &Program, names: &[String], seed: u64) -> Result<Tally> {
    let arguments: Vec<&str> =
        ["--exact"].into_iter().chain(names.iter().map(String::as_str)).collect();
    let environment = [(SEED, &*seed.to_string()), ("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1")];
    let mut tally = suite::run(std::slice::from_ref(program), &arguments, &environment)?;
    if tally.failed.iter().any(|failure| failure.test.is_none()) {
        let mut failed = Vec::new();
        match names {
            [name] => failed.push(Failure { program: program.clone(), test: Some(name.clone()) }),
            names => {
                for name in names {
                    failed.append(&mut try_seed(program, std::slice::from_ref(name), seed)?.failed);
                }
            }
        }
        if !failed.is_empty() {
            tally.failed = failed;
        }
    }
    Ok(tally)
}

/// The tests that repeat a failure: the one that failed, or all that ran.
fn tests(failure: &Failure, names: &[String]) -> String {
    failure.test.clone().unwrap_or_else(|| names.join(" "))
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

/// Seeds that have failed once, a line each: package, target, test, seed; several tests where it
/// takes them together.
fn file() -> PathBuf {
    root().join("xtask/cases.txt")
}

/// Adds a failure to the cases that every test run tries; the line that repeats it.
fn keep(failure: &Failure, names: &[String], seed: u64) -> Result<String> {
    let (program, tests) = (&failure.program, tests(failure, names));
    let line = format!("{} {} {tests} {seed}\n", program.package, program.target);
    let mut text = fs::read_to_string(file())?;
    if !text.contains(&line) {
        text.push_str(&line);
        fs::write(file(), text)?;
    }
    let repeat = program.repeat(&tests, seed);
    let file = file().display().to_string();
    println!("{failure}: a case to commit was added to {file}; to repeat it:\n    {repeat}");
    Ok(repeat)
}

/// Runs every case that has failed once.
pub(crate) fn cases(suite: &Suite) -> Result<()> {
    let text = fs::read_to_string(file()).context("xtask/cases.txt")?;
    let (mut count, mut failed) = (0, Vec::new());
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        let [package, target, _, .., seed] = words[..] else {
            bail!("xtask/cases.txt: {line:?} must be PACKAGE TARGET TEST... SEED");
        };
        let tests = &words[2..words.len() - 1];
        let program = suite.tests.iter().find(|p| p.package == package && p.target == target);
        let program = program.with_context(|| format!("xtask/cases.txt: no {package} {target}"))?;
        let program = std::slice::from_ref(program);
        let tally = suite::run(program, &[&["--exact"], tests].concat(), &[(SEED, seed)])?;
        ensure!(
            tally.passed + tally.failed.len() > 0,
            "xtask/cases.txt: {package} {target} has no test {}: remove the line",
            tests.join(" ")
        );
        count += 1;
        failed.extend(tally.failed.iter().map(|failure| format!("{failure}, seed {seed}")));
    }
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    println!("{count} cases");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_test_of_a_program_that_ends_by_itself_has_its_case() {
        let program = suite::tests::failing();
        let names = ["a::b", "c"].map(str::to_owned);
        let failed = try_seed(&program, &names, 7).unwrap().failed;
        let found: Vec<_> = failed.iter().map(|failure| tests(failure, &names)).collect();
        assert_eq!(found, names);
        let together = Failure { program, test: None };
        assert_eq!(tests(&together, &names), "a::b c");
    }
}
