//! All test programs of the workspace: built once, run several at a time.
//!
//! `cargo test` runs one test program after the other, and most wait for something now and then. So
//! one `cargo test --no-run` builds them, with the command and the examples, and they run from
//! here.

use std::{
    collections::{BTreeSet, HashMap},
    fs::{self, File},
    mem,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::workspace::root;

/// The variable that seeds every random test; `.cargo/config.toml` sets it for a test run.
pub(crate) const SEED: &str = "PROPTEST_RNG_SEED";

/// How long a test program may run before it is killed: what takes as long hangs. On two idle
/// processors none takes a sixth of that.
const LIMIT: Duration = Duration::from_secs(3600);

/// What one build made.
pub(crate) struct Suite {
    /// Test programs, those that take longest first.
    pub(crate) tests: Vec<Program>,
    pub(crate) examples: Vec<Program>,
}

#[derive(Clone)]
pub(crate) struct Program {
    pub(crate) package: String,
    /// As cargo names the target.
    pub(crate) target: String,
    /// As cargo selects it: `--lib`, `--bin NAME`, `--test NAME`.
    selector: String,
    path: PathBuf,
    /// Where cargo would run it.
    folder: PathBuf,
    /// What it is run with, to run other tests than it does by itself.
    arguments: Vec<String>,
}

impl Program {
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.package, self.selector)
    }

    /// Of its tests those that it ignores by itself, as `arguments` choose among them.
    pub(crate) fn ignored(&self, arguments: &[&str]) -> Program {
        let arguments = ["--ignored"].iter().chain(arguments).map(|text| (*text).to_owned());
        Program { arguments: arguments.collect(), ..self.clone() }
    }

    /// Whether it is run with arguments that choose this test, as `PACKAGE TARGET: TEST`, which it
    /// ignores by itself.
    pub(crate) fn chooses(&self, test: &str) -> bool {
        let mut chosen = Vec::new();
        let mut arguments = self.arguments.iter();
        let Some("--ignored") = arguments.next().map(String::as_str) else { return false };
        while let Some(argument) = arguments.next() {
            match &**argument {
                "--skip" if arguments.next().is_some_and(|name| test.contains(&**name)) => {
                    return false;
                }
                name if !name.starts_with("--") => chosen.push(name),
                _ => {}
            }
        }
        test.starts_with(&self.name())
            && (chosen.is_empty() || chosen.iter().any(|name| test.contains(name)))
    }

    /// The command that runs one of its tests with a seed.
    pub(crate) fn repeat(&self, test: &str, seed: u64) -> String {
        let (package, selector) = (&self.package, &self.selector);
        format!("{SEED}={seed} cargo test --package {package} {selector} -- --exact {test}")
    }

    /// The names of all its tests.
    pub(crate) fn list(&self) -> Result<Vec<String>> {
        let output = self.command().args(["--list", "--format=terse"]).output()?;
        ensure!(output.status.success(), "{} --list: {}", self.path.display(), output.status);
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }
}

/// What test programs reported.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    /// `PACKAGE TARGET: TEST`.
    pub(crate) failed: Vec<Failure>,
    /// Tests that did not run, with the reason that they give.
    pub(crate) ignored: BTreeSet<String>,
    /// What tests that passed have left out, as this machine lacks something.
    pub(crate) absent: BTreeSet<String>,
    /// What became of each program's tests, a line each.
    pub(crate) programs: Vec<String>,
}

/// A test that failed, or a program that ended without naming one.
pub(crate) struct Failure {
    pub(crate) program: Program,
    pub(crate) test: Option<String>,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let test = self.test.as_deref().unwrap_or("ended by itself");
        write!(f, "{}: {test}", self.program.name())
    }
}

impl Tally {
    /// # Errors
    /// A test has failed, or there was none.
    pub(crate) fn verdict(&self) -> Result<()> {
        if !self.failed.is_empty() {
            let names: Vec<String> = self.failed.iter().map(Failure::to_string).collect();
            bail!("{} failed: {}", names.len(), names.join("; "));
        }
        ensure!(self.passed > 0, "no test was run");
        println!("{} tests passed", self.passed);
        Ok(())
    }
}

/// Builds all test programs and examples of the workspace, and the command that end-to-end tests run.
pub(crate) fn build() -> Result<Suite> {
    let mut command = Command::new("cargo");
    command.args(["test", "--workspace", "--no-run"]);
    let suite = built(&mut command)?;
    ensure!(!suite.examples.is_empty(), "cargo has built no example");
    one_file_each(&suite.examples)?;
    Ok(suite)
}

/// Two examples of one name lie in one file: the first would never run.
fn one_file_each(examples: &[Program]) -> Result<()> {
    let mut at = HashMap::new();
    for example in examples {
        if let Some(other) = at.insert(&example.path, example) {
            bail!("{} and {} are one file: rename an example", other.name(), example.name());
        }
    }
    Ok(())
}

/// Runs a `cargo test --no-run`; returns the test programs and examples that it built.
pub(crate) fn built(command: &mut Command) -> Result<Suite> {
    command.arg("--message-format=json-render-diagnostics");
    command.current_dir(root()).stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", output.status);
    let mut suite = Suite { tests: Vec::new(), examples: Vec::new() };
    for line in output.stdout.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let message: Value = serde_json::from_slice(line).context("a message of cargo's")?;
        let Some(path) = message["executable"].as_str() else { continue };
        let text = |value: &Value| value.as_str().map(str::to_owned).context("a text of cargo's");
        let target = text(&message["target"]["name"])?;
        let manifest = PathBuf::from(text(&message["manifest_path"])?);
        let folder = manifest.parent().context("a manifest lies in a folder")?.to_owned();
        let package = package(&text(&message["package_id"])?);
        let kind = text(&message["target"]["kind"][0])?;
        let selector = match &*kind {
            "lib" => "--lib".to_owned(),
            kind => format!("--{kind} {target}"),
        };
        let program =
            Program { package, target, selector, path: path.into(), folder, arguments: Vec::new() };
        if message["profile"]["test"] == true {
            suite.tests.push(program);
        } else if kind == "example" {
            suite.examples.push(program);
        }
    }
    // Cargo's messages come in the order in which programs were finished.
    suite.tests.sort_by_cached_key(|program| (rank(program), program.name()));
    suite.examples.sort_by_cached_key(Program::name);
    ensure!(!suite.tests.is_empty(), "cargo has built no test");
    Ok(suite)
}

/// The package in `path+file:///folder/name#0.1.0` or `path+file:///folder#name@0.1.0`.
fn package(id: &str) -> String {
    let (path, version) = id.split_once('#').unwrap_or((id, ""));
    let name =
        version.split_once('@').map_or_else(|| path.rsplit('/').next(), |(name, _)| Some(name));
    name.unwrap_or_default().to_owned()
}

/// Programs that take long come first, so that none runs alone at the end.
fn rank(program: &Program) -> usize {
    const LONG: &[&str] = &[
        "ringfence-lab --lib",
        "ringfence-cli --test hostile",
        "ringfence-devices --test oracle",
        "ringfence-cli --test bench_bounce",
        "ringfence-cli --test jobs",
        "ringfence-cli --test bench_net",
    ];
    LONG.iter().position(|name| *name == program.name()).unwrap_or(LONG.len())
}

/// Runs `programs` with `arguments`, some side by side. What a program printed is shown if it failed.
pub(crate) fn run(
    programs: &[Program],
    arguments: &[&str],
    environment: &[(&str, &str)],
) -> Result<Tally> {
    let logs = root().join("target/tests");
    fs::create_dir_all(&logs)?;
    let tally = Mutex::new(Tally::default());
    let one = |program: &Program| -> Result<()> {
        let begun = Instant::now();
        // A file, not a pipe: a process that a test leaves behind would hold a pipe open.
        let kind = if program.arguments.is_empty() { "" } else { "-ignored" };
        let log = logs.join(format!("{}-{}{kind}.log", program.package, program.target));
        let to = File::create(&log).with_context(|| log.display().to_string())?;
        let mut command = program.command();
        command.args(&program.arguments).args(arguments).envs(environment.iter().copied());
        command.stdin(Stdio::null()).stdout(to.try_clone()?).stderr(to);
        let mut child = command.spawn().with_context(|| program.path.display().to_string())?;
        let (status, killed) = wait(&mut child, LIMIT)?;
        let printed = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        let seconds = begun.elapsed().as_secs_f32();
        let mut tally = tally.lock().expect("no thread panics");
        let (before, failures) = (tally.passed, tally.failed.len());
        note(program, &printed, &mut tally);
        for name in hung(&printed).filter(|_| killed) {
            let (program, test) = (program.clone(), Some(name.to_owned()));
            tally.failed.push(Failure { program, test });
        }
        if !status.success() && tally.failed.len() == failures {
            tally.failed.push(Failure { program: program.clone(), test: None });
        }
        let (passed, failed) = (tally.passed - before, tally.failed.len() - failures);
        if failed > 0 {
            let why = if killed { format!(": killed after {LIMIT:?}") } else { String::new() };
            println!("{printed}\n{status}{why}");
        }
        if passed + failed > 0 {
            let line = format!("{}: {passed} passed, {failed} failed", program.name());
            println!("{line} in {seconds:.1} s");
            tally.programs.push(line);
        }
        Ok(())
    };
    side_by_side(programs, one)?;
    Ok(tally.into_inner().expect("no thread panics"))
}

/// Waits until a process ends, and kills it after `limit`. Also returns whether it did.
fn wait(child: &mut Child, limit: Duration) -> Result<(ExitStatus, bool)> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok((status, false));
        }
        if begun.elapsed() > limit {
            child.kill()?;
            return Ok((child.wait()?, true));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// The tests that have run for a minute without a result, as their program printed.
fn hung(printed: &str) -> impl Iterator<Item = &str> {
    let lines = printed.lines().filter_map(|line| line.strip_prefix("test "));
    let late = lines.filter_map(|line| line.strip_suffix(" has been running for over 60 seconds"));
    late.filter(|name| !printed.contains(&format!("\ntest {name} ... ")))
}

/// Does something with each of `items`, with one more at a time than there are processors: tests wait for
/// each other's processes for a good part of their time.
///
/// # Errors
/// All that went wrong; each item has had its turn.
pub(crate) fn side_by_side<T: Sync>(
    items: &[T],
    one: impl Fn(&T) -> Result<()> + Sync,
) -> Result<()> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let worker = || {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = one(item) {
                failed.lock().expect("no thread panics").push(format!("{error:#}"));
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) + 1 {
            scope.spawn(worker);
        }
    });
    let failed = failed.into_inner().expect("no thread panics");
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

/// Reads what a test program printed: `test NAME ... ok`, `... FAILED`, `... ignored, REASON`. What a test
/// prints itself may stand between its name and its result. A test that passes although it has left
/// something out writes `NOT TESTED: ` and what, and why, past the capture of a test's output.
fn note(program: &Program, printed: &str, tally: &mut Tally) {
    for line in printed.lines() {
        if let Some((_, what)) = line.split_once("NOT TESTED: ") {
            tally.absent.insert(format!("{}: {what}", program.name()));
            continue;
        }
        let Some(rest) = line.strip_prefix("test ") else { continue };
        if let Some(result) = rest.strip_prefix("result: ") {
            let passed = result.split(' ').nth(1).and_then(|n| n.parse::<usize>().ok());
            tally.passed += passed.unwrap_or_default();
        } else if let Some((name, reason)) = rest.split_once(" ... ignored") {
            let reason = reason.trim_start_matches(", ");
            tally.ignored.insert(format!("{}: {name}: {reason}", program.name()));
        }
    }
    // The list of names at the end is whole, whatever tests have printed.
    let list = printed.rsplit_once("\nfailures:\n").map_or("", |(_, list)| list);
    for name in list.lines().take_while(|line| !line.starts_with("test result")) {
        if let Some(name) = name.strip_prefix("    ") {
            let test = Some(name.to_owned());
            tally.failed.push(Failure { program: program.clone(), test });
        }
    }
}

/// Runs an example, which must succeed. What it prints is shown.
pub(crate) fn run_example(example: &Program) -> Result<()> {
    let status = example.command().status().with_context(|| example.path.display().to_string())?;
    ensure!(status.success(), "{}: {status}", example.name());
    Ok(())
}

/// The names of all random tests below a folder: functions with `#[test]` within a `proptest!`, and
/// those that take numbers from proptest's `TestRunner`, by themselves or by a function of their file.
pub(crate) fn random_tests(folder: &Path) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            names.append(&mut random_tests(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            random_in(&fs::read_to_string(&path)?, &mut names);
        }
    }
    Ok(names)
}

/// A function in a text: its name, its lines, and whether it is a test.
struct Function<'a> {
    name: &'a str,
    lines: Vec<&'a str>,
    is_test: bool,
    random: bool,
}

fn random_in(text: &str, names: &mut BTreeSet<String>) {
    let mut functions = functions(text);
    // Until nothing is added: a function that calls a random one is random.
    loop {
        let calls: Vec<String> =
            functions.iter().filter(|f| f.random).map(|f| format!("{}(", f.name)).collect();
        let mut added = false;
        for function in functions.iter_mut().filter(|function| !function.random) {
            let calls = |line: &&str| calls.iter().any(|call| line.contains(&**call));
            function.random = function.lines.iter().any(calls);
            added |= function.random;
        }
        if !added {
            break;
        }
    }
    let tests = functions.iter().filter(|function| function.is_test && function.random);
    names.extend(tests.map(|test| test.name.to_owned()));
}

/// The functions of a text as rustfmt lays it out.
fn functions(text: &str) -> Vec<Function<'_>> {
    let indent = |line: &str| line.len() - line.trim_start().len();
    // The indentation of a `proptest!` that the line lies in.
    let (mut within, mut is_test) = (None, false);
    // Functions that have begun, with their indentation.
    let (mut open, mut functions): (Vec<(usize, Function<'_>)>, Vec<_>) = Default::default();
    for line in text.lines() {
        let code = line.trim_start();
        for (_, function) in &mut open {
            function.lines.push(code);
            function.random |= code.contains("TestRunner::");
        }
        if code.starts_with('}') {
            if open.last().is_some_and(|&(begun, _)| begun == indent(line)) {
                functions.extend(open.pop().map(|(_, function)| function));
            } else if within == Some(indent(line)) {
                within = None;
            }
        } else if code.starts_with("proptest! {") || code == "proptest::proptest! {" {
            within = Some(indent(line));
        } else if code == "#[test]" {
            is_test = true;
        } else if let Some((before, rest)) = code.split_once("fn ")
            && before.split_whitespace().all(|word| word.starts_with("pub") || word == "unsafe")
            && let Some((name, _)) = rest.split_once(['(', '<'])
        {
            let is_test = mem::take(&mut is_test);
            if !code.ends_with(['}', ';']) {
                let (lines, random) = (Vec::new(), within.is_some());
                open.push((indent(line), Function { name, lines, is_test, random }));
            }
        }
    }
    functions
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A program that fails without naming a test.
    pub(crate) fn failing() -> Program {
        Program { path: "/bin/false".into(), ..program() }
    }

    fn program() -> Program {
        Program {
            package: "ringfence-x".into(),
            target: "oracle".into(),
            selector: "--test oracle".into(),
            path: "/".into(),
            folder: "/".into(),
            arguments: Vec::new(),
        }
    }

    #[test]
    fn arguments_choose_among_ignored_tests() {
        let test = |name: &str| format!("ringfence-x --test oracle: {name}: takes root");
        assert!(!program().chooses(&test("a::one")));
        assert!(program().ignored(&["--test-threads=1"]).chooses(&test("a::one")));
        let some = program().ignored(&["a::", "--skip", "a::two"]);
        assert!(some.chooses(&test("a::one")));
        assert!(!some.chooses(&test("a::two")));
        assert!(!some.chooses(&test("b::one")));
        assert!(!some.chooses("ringfence-y --test oracle: a::one: takes root"));
    }

    #[test]
    fn two_examples_of_one_name_are_refused() {
        let other = Program { path: "/else".into(), ..program() };
        assert!(one_file_each(&[program(), other]).is_ok());
        assert!(one_file_each(&[program(), program()]).is_err());
    }

    #[test]
    fn what_a_test_program_prints_is_counted() {
        let printed = "\nrunning 4 tests\ntest a::one ... ok\ntest two ... noise\nFAILED\ntest four ... NOT TESTED: more, for want of it\n\
                    test three ... ignored, needs a thing\n\nfailures:\n\n---- two stdout ----\n    x\n\n\
                    \nfailures:\n    two\n\ntest result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured\n";
        let mut tally = Tally::default();
        note(&program(), printed, &mut tally);
        assert_eq!(tally.passed, 1);
        assert_eq!(tally.failed.len(), 1);
        assert_eq!(tally.failed[0].to_string(), "ringfence-x --test oracle: two");
        let ignored: Vec<_> = tally.ignored.iter().collect();
        assert_eq!(ignored, ["ringfence-x --test oracle: three: needs a thing"]);
        let absent: Vec<_> = tally.absent.iter().collect();
        assert_eq!(absent, ["ringfence-x --test oracle: more, for want of it"]);
        assert!(tally.verdict().is_err());
        assert!(Tally::default().verdict().is_err(), "nothing was run");
    }

    #[test]
    fn a_program_that_hangs_is_killed_and_names_the_test() {
        let mut endless = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let (status, killed) = wait(&mut endless, Duration::ZERO).unwrap();
        assert!(!status.success() && killed);
        let (status, killed) = wait(&mut Command::new("true").spawn().unwrap(), LIMIT).unwrap();
        assert!(status.success() && !killed);
        let printed = "\nrunning 3 tests\ntest one ... ok\n\
                    test two has been running for over 60 seconds\n\
                    test a::three has been running for over 60 seconds\ntest two ... ok\n";
        assert_eq!(hung(printed).collect::<Vec<_>>(), ["a::three"]);
    }

    #[test]
    fn a_package_is_found_in_either_form_of_its_id() {
        assert_eq!(package("path+file:///a/crates/dma#ringfence-dma@0.1.0"), "ringfence-dma");
        assert_eq!(package("path+file:///a/xtask#0.1.0"), "xtask");
    }

    #[test]
    fn random_tests_are_those_within_the_macro_and_those_that_take_numbers_of_its_runner() {
        let text = "#[test]\nfn plain() {}\nproptest! {\n    #![proptest_config(X)]\n    #[test]\n    \
                    /// Words.\n    fn random(\n        a in b,\n    ) {\n    }\n}\n#[test]\nfn other() {\n}\n\
                    fn helper() -> u64 {\n    TestRunner::default()\n}\nimpl X {\n    fn next(&self) {\n        \
                    helper();\n    }\n}\n#[test]\nfn of_a_helper() {\n    x.next();\n}\n";
        let mut names = BTreeSet::new();
        random_in(text, &mut names);
        assert_eq!(names.into_iter().collect::<Vec<_>>(), ["of_a_helper", "random"]);
    }

    #[test]
    fn the_command_that_repeats_a_failure_names_its_seed() {
        let line = program().repeat("a::b", 7);
        let expected =
            "PROPTEST_RNG_SEED=7 cargo test --package ringfence-x --test oracle -- --exact a::b";
        assert_eq!(line, expected);
    }
}
