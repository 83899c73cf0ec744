//! The gate for speed: what hot paths count in instructions, against the counts in the tree.
//!
//! `gate/` runs each path once under Callgrind. An instruction count does not depend on what else
//! the machine does, so that a change of one percent is the code's. It does depend on the compiler,
//! the C library and Valgrind: `gate/counts.toml` names those that it was made with, and is
//! compared under no others.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::{
    packages,
    steps::NotRun,
    tools::{pristine, tool},
    workspace::{self, output, root},
};

/// A change of more than so many percent fails.
const LIMIT_PERCENT: u64 = 1;
const COUNTS: &str = "gate/counts.toml";
const UPDATE: &str = "cargo xtask gate --update";
/// The program that runs the paths, and the package it comes in.
const RUNNER: &str = "gungraun-runner";
/// Cargo's arguments for the paths.
const PATHS: [&str; 6] = ["--profile", "gate", "--package", "ringfence-gate", "--bench", "paths"];

/// Instructions by path.
type Instructions = BTreeMap<String, u64>;

/// What counts depend on besides the code.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
struct Toolchain {
    host: String,
    rustc: String,
    glibc: String,
    valgrind: String,
}

/// The file of counts.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
struct Counts {
    toolchain: Toolchain,
    instructions: Instructions,
}

/// Counts all paths, or those whose name contains `only`. With `update` the counts become those of
/// the tree, without they are compared with these.
pub(crate) fn run(only: Option<&str>, update: bool) -> Result<()> {
    let toolchain = Toolchain::here()?;
    let file = root().join(COUNTS);
    let before = match fs::read_to_string(&file) {
        Ok(text) => Some(toml::from_str::<Counts>(&text).context(COUNTS)?),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && update => None,
        Err(error) => return Err(error).context(COUNTS),
    };
    if let Some(before) = &before {
        before.is_of(&toolchain, only, update)?;
    }
    let runner = runner()?;
    let now = count(&runner, only)?;
    let before = before.map_or_else(BTreeMap::new, |before| before.instructions);
    let is_chosen = |name: &str| only.is_none_or(|only| name.contains(only));
    let rows = rows(&before, &now, is_chosen);
    if rows.is_empty() {
        bail!("no path has {:?} in its name; {COUNTS} has their names", only.unwrap_or_default());
    }
    print!("{}", table(&rows));
    if update {
        let mut instructions = before;
        instructions.retain(|name, _| !is_chosen(name));
        instructions.extend(now);
        fs::write(&file, Counts { toolchain, instructions }.text()).context(COUNTS)?;
        println!("{COUNTS} has these counts now; the commit's message says why they changed");
        return Ok(());
    }
    verdict(&rows)
}

impl Toolchain {
    /// What this machine has. Installs Valgrind if it is missing and that is possible.
    fn here() -> Result<Toolchain> {
        let version = |program: &str, argument: &str| {
            let printed = output(Command::new(program).arg(argument).current_dir(root()))?;
            anyhow::Ok(printed.trim().to_owned())
        };
        let valgrind = version("valgrind", "--version").or_else(|_| {
            packages::ensure();
            version("valgrind", "--version")
        });
        let missing = || NotRun("valgrind is not installed: apt-get install valgrind".into());
        let valgrind = valgrind.map_err(|_| missing())?;
        let verbose = version("rustc", "-vV")?;
        let host = verbose.lines().find_map(|line| line.strip_prefix("host: "));
        Ok(Toolchain {
            host: host.context("rustc -vV names no host")?.to_owned(),
            rustc: version("rustc", "--version")?,
            glibc: version("getconf", "GNU_LIBC_VERSION")?,
            valgrind,
        })
    }

    fn parts(&self) -> [(&'static str, &str); 4] {
        let Toolchain { host, rustc, glibc, valgrind } = self;
        [("host", host), ("rustc", rustc), ("glibc", glibc), ("valgrind", valgrind)]
    }
}

impl Counts {
    /// Refuses counts that were made with another toolchain than the one here.
    fn is_of(&self, here: &Toolchain, only: Option<&str>, update: bool) -> Result<()> {
        let differs = |((name, there), (_, here)): ((&str, &str), (&str, &str))| {
            (there != here).then(|| format!("{name} {there:?}, not {here:?}"))
        };
        let parts = self.toolchain.parts().into_iter().zip(here.parts());
        let differences: Vec<String> = parts.filter_map(differs).collect();
        if differences.is_empty() || (update && only.is_none()) {
            return Ok(());
        }
        let differences = differences.join(", ");
        if update {
            bail!(
                "{COUNTS} was made with {differences}: all paths must be counted anew ({UPDATE}, \
                 without --only)"
            );
        }
        Err(NotRun(format!(
            "{COUNTS} was made with {differences}: counts cannot be compared. Use that toolchain; \
             or count the commit before the change with this one ({UPDATE}), and compare with that"
        ))
        .into())
    }

    /// The file: sorted, a line for each path.
    fn text(&self) -> String {
        let mut text = format!(
            "# Instructions of hot paths, made by `{UPDATE}` with this toolchain. A change of more\n\
             # than {LIMIT_PERCENT} % fails `cargo xtask gate` until the new counts are committed.\n\n\
             [toolchain]\n"
        );
        for (name, value) in self.toolchain.parts() {
            let _ = writeln!(text, "{name} = {value:?}");
        }
        text.push_str("\n[instructions]\n");
        for (name, count) in &self.instructions {
            let _ = writeln!(text, "{name:?} = {count}");
        }
        text
    }
}

/// The runner, of the version that fits the library in Cargo.lock.
pub(crate) fn runner() -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Lock {
        package: Vec<Package>,
    }
    #[derive(Deserialize)]
    struct Package {
        name: String,
        version: String,
    }
    let text = fs::read_to_string(root().join("Cargo.lock")).context("Cargo.lock")?;
    let lock: Lock = toml::from_str(&text).context("Cargo.lock")?;
    let locked = lock.package.into_iter().find(|package| package.name == RUNNER);
    let locked = locked.with_context(|| format!("{RUNNER} is not in Cargo.lock"))?;
    tool(RUNNER, &locked.version, &[])
}

/// Builds the paths and runs those whose name contains `only`.
fn count(runner: &Path, only: Option<&str>) -> Result<Instructions> {
    let started = Instant::now();
    workspace::run(pristine("cargo").arg("build").args(PATHS))
        .context("the paths cannot be built")?;
    let built = started.elapsed();
    let folder = runner.parent().context("the runner lies in a folder")?;
    let mut folders = vec![folder.to_owned()];
    folders.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    let mut command = pristine("cargo");
    command
        .arg("bench")
        .args(PATHS)
        .args(["--", "--output-format=json", "--parallel=auto"])
        .args(only.map(|only| format!("*{}*", only.replace('/', "::"))))
        .env("PATH", env::join_paths(folders)?)
        .stdout(Stdio::piped());
    let output = command.output().context("cargo bench")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{errors}\na path has failed its check, or could not be run: {}",
        output.status
    );
    let counts = parse(&String::from_utf8(output.stdout)?)?;
    let ran = started.elapsed() - built;
    println!("built in {:.0} s, ran in {:.0} s", built.as_secs_f32(), ran.as_secs_f32());
    Ok(counts)
}

/// What the runner prints: a JSON object in a line for each path.
fn parse(output: &str) -> Result<Instructions> {
    #[derive(Deserialize)]
    struct Summary {
        module_path: String,
        id: Option<String>,
        profiles: Vec<serde_json::Value>,
    }
    let mut counts = BTreeMap::new();
    for line in output.lines().filter(|line| line.starts_with('{')) {
        let summary: Summary = serde_json::from_str(line).context("what the runner prints")?;
        let Summary { module_path, id, profiles } = summary;
        let (_, path) = module_path.split_once("::").context("a path without a group")?;
        let name = [path.replace("::", "/")].into_iter().chain(id).collect::<Vec<_>>().join("/");
        let count = |profile: &serde_json::Value| {
            profile.pointer("/data/total/metrics/Ir/values/new")?.as_u64()
        };
        let count = profiles.first().and_then(count);
        let count = count.with_context(|| format!("the runner has not counted {name}"))?;
        // Less than a call and a return: the compiler has removed what was to be counted.
        ensure!(count > 100, "{name} has only {count} instructions");
        ensure!(counts.insert(name.clone(), count).is_none(), "{name} is there twice");
    }
    Ok(counts)
}

/// A path: its count in the tree, and the one just made.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    name: String,
    before: Option<u64>,
    now: Option<u64>,
}

impl Row {
    /// Why it fails.
    fn fault(&self) -> Option<&'static str> {
        match (self.before, self.now) {
            (Some(before), Some(now)) => {
                let over = u128::from(before.abs_diff(now)) * 100
                    > u128::from(before) * u128::from(LIMIT_PERCENT);
                over.then_some(if now > before { "slower" } else { "faster" })
            }
            (None, _) => Some("new"),
            (_, None) => Some("gone"),
        }
    }

    fn change(&self) -> String {
        match (self.before, self.now) {
            (Some(before), Some(now)) if before == now => "0".to_owned(),
            (Some(before), Some(now)) if before > 0 => {
                format!("{:+.2}", (now as f64 / before as f64 - 1.0) * 100.0)
            }
            _ => "-".to_owned(),
        }
    }
}

fn rows(before: &Instructions, now: &Instructions, is_chosen: impl Fn(&str) -> bool) -> Vec<Row> {
    let names: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    let names = names.into_iter().filter(|name| is_chosen(name));
    let row = |name: &String| {
        let [before, now] = [before, now].map(|counts| counts.get(name).copied());
        Row { name: name.clone(), before, now }
    };
    names.map(row).collect()
}

fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
    let number = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |n| n.to_string());
    let mut text = format!("{:width$} {:>10} {:>10} {:>9}\n", "path", "before", "now", "change %");
    for row in rows {
        let Row { name, before, now } = row;
        let (before, now) = (number(*before), number(*now));
        let line = format!("{name:width$} {before:>10} {now:>10} {:>9}", row.change());
        let _ = writeln!(text, "{}", [&line, row.fault().unwrap_or("")].join("  ").trim_end());
    }
    text
}

/// Fails on paths that have changed, and names them.
fn verdict(rows: &[Row]) -> Result<()> {
    let fault = |row: &Row| match (row.fault()?, &*row.change()) {
        (fault @ ("new" | "gone"), _) => Some(format!("{} ({fault})", row.name)),
        (_, change) => Some(format!("{} ({change} %)", row.name)),
    };
    let faults: Vec<String> = rows.iter().filter_map(fault).collect();
    if faults.is_empty() {
        println!("{} paths, none has changed by more than {LIMIT_PERCENT} %", rows.len());
        return Ok(());
    }
    bail!(
        "instructions have changed by more than {LIMIT_PERCENT} %, or paths have come or gone: {}. \
         If that is meant, `{UPDATE}` puts the new counts into {COUNTS}: commit it, and say why",
        faults.join(", ")
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(list: &[(&str, u64)]) -> Instructions {
        list.iter().map(|&(name, count)| (name.to_owned(), count)).collect()
    }

    fn toolchain() -> Toolchain {
        let [host, rustc, glibc, valgrind] = ["h", "rustc 1", "glibc 2", "valgrind-3"];
        let [host, rustc, glibc, valgrind] = [host, rustc, glibc, valgrind].map(str::to_owned);
        Toolchain { host, rustc, glibc, valgrind }
    }

    fn faults(before: &[(&str, u64)], now: &[(&str, u64)]) -> String {
        match verdict(&rows(&counts(before), &counts(now), |_| true)) {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_change_of_more_than_a_percent_fails_either_way_and_is_named() {
        let before = [("a/b", 1000), ("c", 50)];
        for now in [1000, 1010, 990] {
            assert_eq!(faults(&before, &[("a/b", now), ("c", 50)]), "");
        }
        for (now, change) in [(1011, "+1.10"), (989, "-1.10")] {
            let error = faults(&before, &[("a/b", now), ("c", 50)]);
            assert!(error.contains(&format!("a/b ({change} %)")), "{error}");
            assert!(error.contains(UPDATE) && !error.contains("c ("), "{error}");
        }
    }

    #[test]
    fn a_path_that_only_one_side_has_fails() {
        let error = faults(&[("a", 1), ("old", 5)], &[("a", 1), ("young", 5)]);
        assert!(error.contains("old (gone), young (new)"), "{error}");
    }

    #[test]
    fn paths_that_were_not_chosen_do_not_count() {
        let (before, now) = (counts(&[("a/x", 1), ("b", 2)]), counts(&[("a/x", 1)]));
        let rows = rows(&before, &now, |name| name.contains("a/"));
        assert_eq!(rows, [Row { name: "a/x".to_owned(), before: Some(1), now: Some(1) }]);
    }

    #[test]
    fn the_file_reads_as_it_was_written_and_is_sorted() {
        let instructions = counts(&[("b/two", 2), ("a/one", 1)]);
        let counts = Counts { toolchain: toolchain(), instructions };
        let text = counts.text();
        assert!(text.ends_with("\n[instructions]\n\"a/one\" = 1\n\"b/two\" = 2\n"), "{text}");
        assert_eq!(toml::from_str::<Counts>(&text).unwrap(), counts);
    }

    #[test]
    fn counts_of_another_toolchain_are_not_compared_and_are_replaced_as_a_whole() {
        let counts = Counts { toolchain: toolchain(), instructions: BTreeMap::new() };
        let other = Toolchain { rustc: "rustc 2".to_owned(), ..toolchain() };
        for (only, update) in [(None, false), (Some("a"), false), (None, true), (Some("a"), true)] {
            assert!(counts.is_of(&toolchain(), only, update).is_ok());
        }
        for only in [None, Some("a")] {
            let error = counts.is_of(&other, only, false).unwrap_err();
            assert!(error.is::<NotRun>() && error.to_string().contains("rustc 2"), "{error}");
        }
        assert!(counts.is_of(&other, None, true).is_ok());
        let error = counts.is_of(&other, Some("a"), true).unwrap_err();
        assert!(!error.is::<NotRun>() && error.to_string().contains("without --only"), "{error}");
    }

    #[test]
    fn what_the_runner_prints_is_understood() {
        let line = |path: &str, id: &str, count: u64| {
            format!(
                r#"{{"module_path":"paths::{path}","id":{id},"profiles":[{{"data":{{"parts":[],
                "total":{{"metrics":{{"Ir":{{"values":{{"new":{count},"old":7}}}}}}}}}}}}]}}"#
            )
            .replace('\n', "")
        };
        let output = [line("g::f", r#""id""#, 101), line("g::h", "null", 202)].join("\n");
        assert_eq!(parse(&output).unwrap(), counts(&[("g/f/id", 101), ("g/h", 202)]));
        assert!(parse(&line("g::f", "null", 12)).unwrap_err().to_string().contains("only 12"));
        let twice = [line("g::f", "null", 101), line("g::f", "null", 101)].join("\n");
        assert!(parse(&twice).is_err());
        assert!(parse(r#"{"module_path":"paths::g::f","id":null,"profiles":[]}"#).is_err());
    }
}
