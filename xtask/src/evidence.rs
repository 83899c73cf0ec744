//! `docs/evidence.md`: what stands behind each promise of the README, counted where it lies.

use std::{collections::BTreeMap, fmt::Write, fs, path::Path};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::{fuzz, rules, workspace::root};

const PAGE: &str = "docs/evidence.md";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Evidence {
    promise: Vec<Promise>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Promise {
    says: String,
    means: String,
    rules: Vec<String>,
    tests: Vec<String>,
    orderings: Vec<String>,
    fuzz: Vec<String>,
    models: Vec<String>,
    argued: Vec<String>,
}

/// Makes the page, or fails if it is not up to date.
pub(crate) fn check(update: bool) -> Result<()> {
    let text = page(&root())?;
    let path = root().join(PAGE);
    if update {
        fs::write(path, text)?;
        return Ok(());
    }
    ensure!(
        fs::read_to_string(path).unwrap_or_default() == text,
        "{PAGE} is not what the tree has: `cargo xtask evidence --update` makes it anew; commit it"
    );
    println!("{PAGE} says what the tree has");
    Ok(())
}

fn page(root: &Path) -> Result<String> {
    let read = |name: &str| fs::read_to_string(root.join(name)).with_context(|| name.to_owned());
    let evidence: Evidence = toml::from_str(&read("xtask/evidence.toml")?)?;
    let (readme, mutants) = (read("README.md")?, read("docs/mutants.txt")?);
    let (tested, hours) = (rules::tested()?, fuzz::hours()?);
    let mut text = String::from(
        "# What stands behind the promises\n\n\
         `cargo xtask evidence --update` makes this page from `xtask/evidence.toml`. It fails where a promise is not\n\
         in the README, or what is named here is not in the tree. An ordering is *needed* if a model fails without\n\
         it, and *argued* if a comment says why none does ([orderings](ordering.md)). Hours are those of fuzz targets\n\
         that ran by hand and in soaks, beside each test run. Behind a rule or a test program: how many tests.\n",
    );
    for promise in &evidence.promise {
        let Promise { says, means, .. } = promise;
        let is_there = readme.contains(says);
        ensure!(is_there, "README.md no longer says {says:?}: xtask/evidence.toml has to follow");
        write!(text, "\n## “{says}”\n\n{means}.\n\n| | |\n|---|---|\n")?;
        let mut row = |what: &str, cell: String| {
            if !cell.is_empty() {
                writeln!(text, "| {what} | {cell} |").expect("a String takes all");
            }
        };
        row("rules", rules_of(promise, &tested)?);
        row("tests", tests_of(promise, root)?);
        row("models", models_of(promise, root)?);
        row("orderings", orderings_of(promise, &mutants)?);
        row("fuzz targets", fuzz_of(promise, root, &hours)?);
        row("only argued", promise.argued.join("; "));
    }
    Ok(text)
}

fn rules_of(promise: &Promise, tested: &BTreeMap<String, usize>) -> Result<String> {
    let cells = promise.rules.iter().map(|rule| {
        let tests = tested.get(rule).with_context(|| format!("rule {rule} has no test"))?;
        Ok(format!("{rule} ({tests})"))
    });
    Ok(cells.collect::<Result<Vec<_>>>()?.join(", "))
}

fn tests_of(promise: &Promise, root: &Path) -> Result<String> {
    let cells = promise.tests.iter().map(|test| {
        let (package, program) = test.split_once(' ').context("a package and a program")?;
        let tests = root.join("crates").join(package).join("tests");
        let places = [tests.join(format!("{program}.rs")), tests.join(program)];
        let found = places.iter().find(|place| place.exists());
        let found = found.with_context(|| format!("{package} has no test program {program}"))?;
        Ok(format!("`{package}` {program} ({})", count(found)?))
    });
    Ok(cells.collect::<Result<Vec<_>>>()?.join(", "))
}

/// How many tests a file has, or all files of a folder.
fn count(place: &Path) -> Result<usize> {
    if place.is_file() {
        let text = fs::read_to_string(place)?;
        return Ok(text.lines().filter(|line| line.trim() == "#[test]").count());
    }
    let files = fs::read_dir(place)?.map(|entry| Ok(entry?.path()));
    files.map(|file: Result<_>| count(&file?)).sum()
}

fn models_of(promise: &Promise, root: &Path) -> Result<String> {
    for page in &promise.models {
        ensure!(root.join(page).exists(), "there is no {page}");
    }
    let links = promise.models.iter().filter_map(|page| page.strip_prefix("docs/"));
    Ok(links.map(|page| format!("[{page}]({page})")).collect::<Vec<_>>().join(", "))
}

fn orderings_of(promise: &Promise, mutants: &str) -> Result<String> {
    let cells = promise.orderings.iter().map(|place| {
        let of = mutants.lines().filter(|line| line.starts_with(place));
        let (argued, needed): (Vec<_>, Vec<_>) = of.partition(|line| line.contains("| argued:"));
        ensure!(argued.len() + needed.len() > 0, "docs/mutants.txt has nothing of {place}");
        Ok(format!("`{place}` {} needed, {} argued", needed.len(), argued.len()))
    });
    Ok(cells.collect::<Result<Vec<_>>>()?.join("; "))
}

fn fuzz_of(promise: &Promise, root: &Path, hours: &BTreeMap<String, f64>) -> Result<String> {
    let cells = promise.fuzz.iter().map(|target| {
        let file = root.join("fuzz/fuzz_targets").join(format!("{target}.rs"));
        ensure!(file.exists(), "there is no fuzz target {target}");
        let hours = hours.get(target).copied().unwrap_or(0.0);
        Ok(match hours {
            0.1.. => format!("{target} ({hours:.1} h)"),
            0.01.. => format!("{target} ({:.0} min)", hours * 60.0),
            _ => format!("{target} (in tests and soaks)"),
        })
    });
    Ok(cells.collect::<Result<Vec<_>>>()?.join(", "))
}
