//! The steps of `cargo xtask test`.

use std::{
    cell::{OnceCell, RefCell},
    collections::{BTreeMap, BTreeSet},
    env,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    architecture, book, debian, deny, evidence,
    fetch::{self, Fetch},
    floors, front_door,
    fuzz::{self, Length},
    gate, guests, house, interface, links,
    mutants::{self, Table},
    pace::Pace,
    packages, rules, soak,
    suite::{self, Program, Suite},
    tools,
    workspace::{self, cargo, output, root},
};

/// What the steps of a run share.
struct Run {
    /// Debian packages that are neither there nor could be installed.
    missing: Vec<&'static str>,
    suite: OnceCell<Suite>,
    /// What is made ready for later steps beside the first ones.
    fetch: RefCell<Option<Fetch>>,
    /// Tests that no step has run, with the reason.
    idle: RefCell<BTreeSet<String>>,
    /// What tests have left out, and what there is no kernel for; `true`: CI must have it.
    absent: RefCell<BTreeMap<String, bool>>,
    /// How many tests of each program passed, for a result that is kept.
    programs: RefCell<Vec<String>>,
}

impl Run {
    fn suite(&self) -> Result<&Suite> {
        if self.suite.get().is_none() {
            let _ = self.suite.set(suite::build()?);
        }
        self.suite.get().context("the tests are built")
    }

    /// Runs the test programs that `which` selects.
    fn tests(&self, which: impl Fn(&Program) -> bool) -> Result<()> {
        let programs = self.suite()?.tests.iter().filter(|program| which(program));
        self.run(&programs.cloned().collect::<Vec<_>>(), &[])
    }

    /// Runs tests that a program ignores by itself, since they need something.
    fn ignored(&self, package: &str, target: &str, arguments: &[&str]) -> Result<()> {
        self.run(&[self.program(package, target)?.ignored(arguments)], &[])
    }

    fn program(&self, package: &str, target: &str) -> Result<&Program> {
        let mut programs = self.suite()?.tests.iter();
        let program = programs.find(|p| p.package == package && p.target == target);
        program.with_context(|| format!("no test program {package} {target}"))
    }

    /// Runs `programs`, some side by side, with these variables of the environment.
    fn run(&self, programs: &[Program], environment: &[(&str, &str)]) -> Result<()> {
        // What finds none says so.
        let _pages =
            programs.iter().any(|program| program.target == "bench_pin").then(HugePages::set_apart);
        let mut tally = suite::run(programs, &[], environment)?;
        self.absent.borrow_mut().extend(tally.absent.iter().map(|what| (what.clone(), true)));
        let mut idle = self.idle.borrow_mut();
        idle.append(&mut tally.ignored);
        self.programs.borrow_mut().append(&mut tally.programs);
        tally.verdict()?;
        idle.retain(|test| !programs.iter().any(|program| program.chooses(test)));
        Ok(())
    }
}

struct Step {
    name: &'static str,
    /// How long it may take, in seconds on two processors.
    budget: u32,
    /// Whether only `--all` runs it.
    long: bool,
    run: fn(&Run) -> Result<()>,
}

const fn step(name: &'static str, budget: u32, run: fn(&Run) -> Result<()>) -> Step {
    Step { name, budget, long: false, run }
}

/// Removes what a step has built that no later one uses, on machines with little room: a gigabyte
/// in all.
fn tidy(step: &str) {
    let built = match step {
        "model checks" => "target/loom",
        "front door" => "target/front-door",
        "speed gate" => "target/gate",
        _ => return,
    };
    // What cannot be removed stays.
    let _ = std::fs::remove_dir_all(root().join(built));
}

const fn long(name: &'static str, budget: u32, run: fn(&Run) -> Result<()>) -> Step {
    Step { name, budget, long: true, run }
}

/// Each is twice what a run from nothing took on a quiet machine: the same work takes half as long again on another
/// day, where processors are shared, and the verdict must not depend on that.
const STEPS: &[Step] = &[
    step("format", 10, |_| cargo(&["fmt", "--all", "--check"], &[])),
    step("lints", 300, |_| {
        cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"], &[])?;
        // What a host, and each kind of user, builds.
        let mut packages = vec![vec![COMMAND], vec!["ringfence-rust-vmm"]];
        let kinds = [
            ("ringfence-devices", "blk"),
            ("ringfence-devices", "net"),
            ("ringfence-devices", "proxy"),
            ("ringfence", "driver"),
            ("ringfence", "vfio"),
            ("ringfence", "backend"),
            ("ringfence", "vmm"),
            ("ringfence", "rust-vmm"),
        ];
        packages.extend(kinds.map(|(package, kind)| vec![package, "--features", kind]));
        packages.iter().try_for_each(|package| {
            let begin = ["clippy", "--no-default-features", "--package"];
            cargo(&[&begin[..], package, &["--", "-D", "warnings"]].concat(), &[])
        })
    }),
    step("lints of the fuzz targets", 90, fuzz_lints),
    step("floors", 5, |_| floors::check(COMMAND)),
    step("house", 5, |_| house::check(false)),
    step("interfaces", 10, |_| interface::check(false)),
    step("rules", 5, |_| rules::account(false)),
    step("evidence", 5, |_| evidence::check(false)),
    step("licences", 5, |_| deny::check()),
    step("build", 450, |run| run.suite().map(|_| ())),
    step("what comes from elsewhere", 450, |run| {
        // No test runs beside it.
        match run.fetch.take().map_or_else(fetch::everything, Fetch::end) {
            Err(error) => println!("{error:#}; the steps that need it try again"),
            Ok(()) => println!("all there"),
        }
        Ok(())
    }),
    step("unit and property tests", 300, |run| run.tests(|program| program.package != COMMAND)),
    step("cases that failed once", 30, |run| soak::cases(run.suite()?)),
    step("end to end", 500, end_to_end),
    step("model checks", 300, |_| mutants::run(None, Table::Follow)),
    step("documentation", 150, |_| documentation()),
    step("documentation: links and names", 5, |_| {
        links::check()?;
        book::source()?;
        architecture::check()
    }),
    step("examples", 60, examples),
    step("front door", 120, |_| front_door::check()),
    step("speed gate", 320, |_| gate::run(None, false)),
    step("huge pages", 10, huge_pages),
    step("guests", 800, real_guests),
    step("a storage daemon of QEMU's", 60, storage_daemon),
    step("job files under the real fio", 5, real_fio),
    step("fuzz smoke", 300, fuzz_smoke),
    long("property tests with ten more seeds", 2400, |run| {
        // The same ones each time.
        soak::random(run.suite()?, 1..=10)
    }),
    long("every mutant on all models", 1800, |_| mutants::run(None, Table::Compare)),
    long("fuzz for a minute each", 700, |_| {
        fuzz::build(None, true)?.run(Length::Explore { seconds: 60, seed: 1, noted: false })
    }),
    long("a build that invalidates nothing", 150, |run| {
        run.ignored(COMMAND, "mutant", &["invalidat"])
    }),
    long("defects that tests of disks find", 200, defects),
    long("documentation: the book", 130, |_| book::make()),
    long("no memory is overcommitted", 600, not_overcommitted),
    long("packages", 600, |_| published()),
    long("docs.rs", 300, |_| docs_rs()),
    long("a Debian root", 900, |_| debian::check()),
    long("services of systemd", 60, systemd),
    long("ends that are killed", 600, |run| {
        run.ignored(COMMAND, "hostile", &["killed::", "successor::a_pause_with"])
    }),
    long("back ends of rust-vmm's", 120, |run| {
        make_guests(run)?;
        for name in ["vhost-device-rng", "vhost-device-console"] {
            tools::tool(name, "0.1.0", &[])?;
        }
        run.ignored(COMMAND, "guests", &["rust_vmm::"])
    }),
    long("guests: more of them", 900, |run| {
        make_guests(run)?;
        let arguments = [MORE_GUESTS, &["successor::"]].concat();
        let program = run.program(COMMAND, "guests")?.ignored(&arguments);
        run.run(&[program], &[("RINGFENCE_ENDS", "10")])
    }),
    long("guests: tables of speed", 2000, |run| {
        guests::make(&[])?;
        run.ignored(COMMAND, "guests", &["--test-threads=1", "speed::", "--skip", "speed::guard"])
    }),
];

/// Tests with guests that only `--all` runs, where the same code of ours runs as in others: behind
/// another IOMMU of QEMU's, in another QEMU, or to see what QEMU does.
const MORE_GUESTS: &[&str] = &[
    "wire::",
    "conformance::the_virtio_iommu_of_qemu",
    "doctor::what_the_doctor_says_makes_a_guest_ready_behind_intels_iommu",
    "firmware::firmware_reads_and_writes_before_intels_iommu_is_on",
    "migrate::a_disk_moves_behind_intels_iommu_strict",
    "migrate::a_network_moves_without_an_iommu",
    "nvme::a_driver_works_and_is_killed_behind_intels_iommu",
    "vfio::a_driver_and_a_domain_over_a_real_kernel_with_intels_iommu",
];

/// How long a run without long steps may take from nothing, in seconds on two processors.
const IN_ALL: u32 = 1800;

/// The package of the command, whose tests run it from end to end.
const COMMAND: &str = "ringfence-cli";

/// Runs all steps, or those whose name contains `only`, and prints at the end what failed and what
/// did not run. `all`: also those that are long; the result is then written to `docs/all.txt`.
pub(crate) fn test(only: Option<&str>, all: bool, list: bool) -> Result<()> {
    let steps: Vec<&Step> = STEPS
        .iter()
        .filter(|step| all || !step.long)
        .filter(|step| only.is_none_or(|only| step.name.contains(only)))
        .collect();
    if list {
        steps.iter().for_each(|step| println!("{}", step.name));
        return Ok(());
    }
    if steps.is_empty() {
        bail!("no step has {:?} in its name; --list names them", only.unwrap_or_default());
    }
    // Before what takes hours: without a commit there is nothing to keep.
    let kept = (all && only.is_none()).then(|| commit("cargo xtask test --all")).transpose()?;
    let missing = packages::ensure();
    let (idle, absent, programs) = (RefCell::default(), RefCell::default(), RefCell::default());
    let fetch = RefCell::new(only.is_none().then(Fetch::begin).transpose()?);
    let run = Run { missing, suite: OnceCell::new(), fetch, idle, absent, programs };
    let (mut failed, mut not_run, mut lines) = (Vec::new(), Vec::new(), Vec::new());
    let (begun, pace, mut costs) = (Instant::now(), Pace::begin(), Vec::new());
    for step in &steps {
        println!("\n=== {}", step.name);
        let (started, worked) = (Instant::now(), work_of_children());
        let result = (step.run)(&run);
        let seconds = started.elapsed().as_secs_f32();
        // The time that it would take with two processors to itself, at the pace of a quiet
        // machine. The verdict goes by this: it does not depend on what else the machine does, or
        // its host.
        let slowness = pace.slowness();
        let worked = work_of_children().zip(worked).map_or(0.0, |(now, before)| now - before);
        let work = f64::from(worked) / 2.0 / slowness;
        costs.push((work, step.name));
        // A step that runs alone builds what the steps before it would have built.
        let over = only.is_none() && work > f64::from(step.budget);
        let took = format!(
            "{seconds:.0} s, {work:.0} s of work (budget {} s), pace 1/{slowness:.2}",
            step.budget
        );
        let verdict = match result {
            Err(error) if error.is::<NotRun>() => {
                not_run.push(format!("{}: {error}", step.name));
                format!("NOT RUN: {error}")
            }
            Err(error) => {
                failed.push(step.name);
                format!("FAILED: {error:#}")
            }
            Ok(()) if over => {
                failed.push(step.name);
                "FAILED: over its budget: make it cheaper, or justify a larger one".to_owned()
            }
            Ok(()) => "passed".to_owned(),
        };
        println!("=== {}: {verdict}; {took}", step.name);
        if !all && env::var_os("RINGFENCE_TIDY").is_some() {
            tidy(step.name);
        }
        lines.push(format!("{:<36} {verdict}; {took}", step.name));
    }
    println!("\n{}", lines.join("\n"));
    for name in run.idle.borrow().iter() {
        println!("ignored: {name}");
    }
    let absent = run.absent.borrow();
    for name in not_run.iter().chain(absent.keys()) {
        println!("NOT RUN: {name}");
    }
    let passed = steps.len() - failed.len() - not_run.len();
    let sum = format!("{passed} passed, {} failed, {} skipped", failed.len(), not_run.len());
    let work: f64 = costs.iter().map(|cost| cost.0).sum();
    println!(
        "in all {:.0} s, {work:.0} s of work (budget {IN_ALL} s without --all)\nsteps: {sum}",
        begun.elapsed().as_secs_f32()
    );
    if let Some(commit) = kept {
        let (steps, programs) = (lines.join("\n"), run.programs.borrow().join("\n"));
        let text = format!("{commit}\n\n{steps}\n\n{sum}\n\n{programs}\n");
        std::fs::write(root().join("docs/all.txt"), text)?;
    }
    let over = if all || only.is_some() { None } else { over_in_all(&mut costs) };
    if let Some(over) = &over {
        println!("FAILED: {over}");
        failed.push("the budget of a whole run");
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    // In CI everything must be there: what did not run has failed.
    if env::var_os("CI").is_some_and(|ci| ci == "true") {
        let must = absent.iter().filter(|(_, must)| **must).map(|(name, _)| name);
        let absent: Vec<&str> = not_run.iter().chain(must).map(String::as_str).collect();
        ensure!(absent.is_empty(), "not run, and in CI all must be: {}", absent.join("; "));
    }
    Ok(())
}

/// Why a whole run is over its budget, if it is: the steps that have taken most.
fn over_in_all(costs: &mut [(f64, &'static str)]) -> Option<String> {
    if costs.iter().map(|cost| cost.0).sum::<f64>() <= f64::from(IN_ALL) {
        return None;
    }
    costs.sort_by(|one, other| other.0.total_cmp(&one.0));
    let longest = costs.iter().take(5).map(|(work, step)| format!("{step} ({work:.0} s)"));
    let longest: Vec<String> = longest.collect();
    Some(format!("over the budget of a whole run; most went into {}", longest.join(", ")))
}

/// The CPU seconds of ended processes that this one has waited for, directly or not. `None` if the
/// system does not report them.
fn work_of_children() -> Option<f32> {
    // The fields after the name, which may hold blanks: cutime and cstime are the 14th and 15th of these,
    // in hundredths of a second.
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
    let ticks = |n: usize| fields.get(n)?.parse::<f32>().ok();
    Some((ticks(13)? + ticks(14)?) / 100.0)
}

/// The documents whose tables commands make.
pub(crate) const TABLES: [&str; 4] =
    ["README.md", "docs/performance.md", "docs/protocol.md", "docs/vfio.md"];
/// Where other results are kept. None changes another.
const RESULTS: [&str; 5] =
    ["docs/all.txt", "docs/evidence.md", "docs/guests.md", "docs/price.svg", "fuzz/hours.toml"];

/// The command, the commit and the toolchain, for a result that is kept; "changed" if the tree is, but
/// for other results.
pub(crate) fn commit(command: &str) -> Result<String> {
    let printed = |program: &str, arguments: &[&str]| -> Result<String> {
        let printed = output(Command::new(program).args(arguments).current_dir(root()))?;
        Ok(printed.trim().to_owned())
    };
    let others: Vec<_> = TABLES.iter().chain(&RESULTS).map(|file| format!(":!{file}")).collect();
    let mut status = vec!["status", "--porcelain", "--", ":/"];
    status.extend(others.iter().map(String::as_str));
    let changed = if printed("git", &status)?.is_empty() { "" } else { ", changed" };
    let commit = printed("git", &["log", "-1", "--format=%H of %cs"])?;
    Ok(format!("{command}\ncommit {commit}{changed}\n{}", printed("rustc", &["--version"])?))
}

/// Why a step could not run on this machine.
#[derive(Debug)]
pub(crate) struct NotRun(pub(crate) String);

impl std::fmt::Display for NotRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotRun {}

/// The documentation of all crates builds without a warning and links each rule that it names, and
/// its examples compile.
fn documentation() -> Result<()> {
    cargo(&["doc", "--workspace", "--no-deps"], &[("RUSTDOCFLAGS", "-D warnings")])?;
    rules::are_linked()?;
    cargo(&["test", "--workspace", "--doc", "--quiet"], &[])
}

/// Each published crate builds from its own package.
fn published() -> Result<()> {
    let packages = workspace::packages()?;
    let published = packages.iter().filter(|package| package.is_published());
    let names: Vec<&str> = published.flat_map(|package| ["--package", &package.name]).collect();
    // Without a name cargo packages what it likes.
    ensure!(!names.is_empty(), "no package is published");
    let arguments = [&["package", "--offline", "--quiet"], &*names].concat();
    // From nothing: cargo takes a package of a version for the same as one that it has built before.
    let target = target("packages")?;
    if Path::new(&target).exists() {
        std::fs::remove_dir_all(&target)?;
    }
    // So it does with what it has unpacked of them, from its own registry of a workspace's packages.
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(env::home_dir()?.join(".cargo")));
    let registries = home.and_then(|home| std::fs::read_dir(home.join("registry/src")).ok());
    for registry in registries.into_iter().flatten() {
        let registry = registry?;
        if registry.file_name().as_encoded_bytes().starts_with(b"-") {
            for package in std::fs::read_dir(registry.path())? {
                let package = package?;
                if package.file_name().as_encoded_bytes().starts_with(b"ringfence") {
                    std::fs::remove_dir_all(package.path())?;
                }
            }
        }
    }
    cargo(&arguments, &[("CARGO_TARGET_DIR", &target)])
}

/// A directory of a step's own in which cargo builds.
fn target(name: &str) -> Result<String> {
    let path = root().join("target").join(name).into_os_string().into_string();
    path.ok().context("the path of the workspace is not UTF-8")
}

/// The pages of the published crates as docs.rs builds them: by a nightly compiler, with the features
/// of `package.metadata.docs.rs`, which are all.
fn docs_rs() -> Result<()> {
    if !fuzz::has_nightly() {
        bail!(NotRun("there is no nightly toolchain".to_owned()));
    }
    let packages = workspace::packages()?;
    let published = packages.iter().filter(|package| package.is_published());
    let mut arguments = vec!["+nightly", "doc", "--lib", "--no-deps", "--all-features"];
    arguments.extend(published.flat_map(|package| ["--package", &package.name]));
    let (target, flags) = (target("docs.rs")?, "--cfg docsrs -D warnings");
    let environment = [("DOCS_RS", "1"), ("RUSTDOCFLAGS", flags), ("CARGO_TARGET_DIR", &target)];
    cargo(&arguments, &environment)
}

/// Every example must run, not only build.
fn examples(run: &Run) -> Result<()> {
    for example in &run.suite()?.examples {
        println!("--- {}", example.name());
        suite::run_example(example)?;
    }
    Ok(())
}

/// Huge pages for tests that need them, set apart until this is dropped.
struct HugePages {
    /// How many there were before, if there were too few.
    before: Option<u64>,
}

impl HugePages {
    const SETTING: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

    fn set_apart() -> Result<HugePages> {
        const NEEDED: u64 = 4;
        let read = |path: &str| -> Result<u64> {
            let text = std::fs::read_to_string(path);
            let none = |error| NotRun(format!("no huge pages of 2 MiB: {error}"));
            Ok(text.map_err(none)?.trim().parse()?)
        };
        let free = || read(&HugePages::SETTING.replace("nr_", "free_"));
        let (all, lacking) = (read(HugePages::SETTING)?, NEEDED.saturating_sub(free()?));
        if lacking == 0 {
            return Ok(HugePages { before: None });
        }
        let remedy = format!("as root: sysctl vm.nr_hugepages={}", all + lacking);
        std::fs::write(HugePages::SETTING, (all + lacking).to_string())
            .map_err(|error| NotRun(format!("{error}; {remedy}")))?;
        let pages = HugePages { before: Some(all) };
        if free()? < NEEDED {
            return Err(NotRun(format!("memory is in too small pieces; {remedy}")).into());
        }
        Ok(pages)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            let _ = std::fs::write(HugePages::SETTING, before.to_string());
        }
    }
}

fn huge_pages(run: &Run) -> Result<()> {
    let _pages = HugePages::set_apart()?;
    run.ignored("ringfence-vfio", "pin_real", &["huge_pages"])
}

/// The tests of the command, and of what maps memory, where the kernel promises no more than it has.
/// The setting is the machine's: it is put back.
fn not_overcommitted(run: &Run) -> Result<()> {
    const SETTING: &str = "/proc/sys/vm/overcommit_memory";
    let before = std::fs::read_to_string(SETTING).context(SETTING)?;
    let refused = |error| NotRun(format!("{error}; as root: sysctl vm.overcommit_memory=2"));
    std::fs::write(SETTING, "2").map_err(refused)?;
    let packages = [COMMAND, "ringfence-dma", "ringfence-mem", "ringfence-vfio"];
    let result = run.tests(|program| packages.contains(&&*program.package));
    std::fs::write(SETTING, before.trim()).context(SETTING)?;
    result
}

/// Why tests whose disks are files of a file system of their own cannot run.
fn lacks_fuse() -> Option<&'static str> {
    if !packages::is_root() {
        Some("mounting a file system takes root")
    } else if !Path::new("/dev/fuse").exists() {
        Some("there is no /dev/fuse: as root, modprobe fuse")
    } else {
        None
    }
}

/// A command with defects, each of which tests of disks that go wrong find.
fn defects(run: &Run) -> Result<()> {
    match lacks_fuse() {
        Some(why) => Err(NotRun(why.to_owned()).into()),
        None => run.ignored(COMMAND, "mutant", &["defect"]),
    }
}

/// The command's tests, and beside them, as they wait most of their time, those whose disks are files
/// of a file system of the test's own.
fn end_to_end(run: &Run) -> Result<()> {
    let programs = run.suite()?.tests.iter().filter(|program| program.package == COMMAND);
    let mut programs: Vec<Program> = programs.cloned().collect();
    let lacking = lacks_fuse();
    if lacking.is_none() {
        // Figures take a machine to themselves; the others are steps.
        let others = ["figures::", "systemd::", "a_thousand_times", "a_pause_with"];
        let skipped: Vec<&str> = others.iter().flat_map(|name| ["--skip", *name]).collect();
        programs.insert(0, run.program(COMMAND, "hostile")?.ignored(&skipped));
    }
    run.run(&programs, &[])?;
    match lacking {
        Some(why) => Err(NotRun(format!("disks that hang: {why}; all others ran")).into()),
        None => Ok(()),
    }
}

/// A back end that is not ours, behind the proxy: of the QEMU that guests run in.
fn storage_daemon(run: &Run) -> Result<()> {
    make_guests(run)?;
    // Older Debians have it in a package of QEMU's, newer ones in another.
    let program = "usr/bin/qemu-storage-daemon";
    if ![root().join("target/guests/root"), "/".into()].iter().any(|at| at.join(program).exists()) {
        return Err(NotRun("no qemu-storage-daemon: apt-get install qemu-utils".to_owned()).into());
    }
    run.ignored(COMMAND, "proxy", &[])
}

/// What guests need.
fn make_guests(run: &Run) -> Result<()> {
    for package in ["g++", "make", "xz-utils", "zstd"] {
        needs(run, package)?;
    }
    guests::make(&[]).map_err(|error| NotRun(format!("guests cannot be made: {error:#}")).into())
}

/// Services that systemd itself starts anew, in namespaces of its own.
fn systemd(run: &Run) -> Result<()> {
    if !packages::is_root() {
        return Err(NotRun("a systemd of the test's own takes root".to_owned()).into());
    }
    if !Path::new("/lib/systemd/systemd").exists() {
        return Err(NotRun("there is no systemd: apt-get install systemd".to_owned()).into());
    }
    run.ignored(COMMAND, "hostile", &["systemd::"])
}

/// Our back ends with QEMU and User-Mode Linux as front ends.
fn real_guests(run: &Run) -> Result<()> {
    make_guests(run)?;
    // Not the tables of speed: they take minutes, and a machine to themselves.
    let mut arguments = vec!["--skip", "speed::", "--skip", "rust_vmm::"];
    arguments.extend(MORE_GUESTS.iter().flat_map(|test| ["--skip", *test]));
    if !guests::iommufd::is_there() {
        let tests = guests::iommufd::TESTS;
        let text = format!("guests' tests {tests}: Debian has no kernel for them (docs/vfio.md)");
        run.absent.borrow_mut().insert(text, false);
        arguments.extend(["--skip", tests]);
    }
    let mut lacking = Vec::new();
    if let Err(why) = needs(run, "dpdk-dev") {
        lacking.push(("isolated::machines_with_back_ends_of_qemu_and_dpdk", why.to_string()));
    }
    if !packages::is_root() {
        let why = "files of a guest's users take root".to_owned();
        lacking.push(("isolated::a_tree_of_files_is_copied", why));
    }
    arguments.extend(lacking.iter().flat_map(|&(test, _)| ["--skip", test]));
    run.ignored(COMMAND, "guests", &arguments)?;
    if lacking.is_empty() {
        return Ok(());
    }
    let tests: Vec<String> = lacking.iter().map(|(test, why)| format!("{test}: {why}")).collect();
    Err(NotRun(format!("all but {}", tests.join(", "))).into())
}

/// The job files that we ship must be fio's own: fio parses them too.
fn real_fio(run: &Run) -> Result<()> {
    needs(run, "fio")?;
    let mut count = 0;
    for entry in std::fs::read_dir(root().join("examples"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "fio") {
            workspace::run(Command::new("fio").arg("--parse-only").arg(&path))?;
            count += 1;
        }
    }
    if count == 0 {
        bail!("no job file was found in examples/");
    }
    println!("{count} job files");
    Ok(())
}

/// # Errors
/// [`NotRun`]: the package is not there.
fn needs(run: &Run, package: &str) -> Result<()> {
    if run.missing.contains(&package) {
        return Err(NotRun(format!("{package} is not installed")).into());
    }
    Ok(())
}

/// The fuzz targets are a workspace of their own: this checks that they compile before the long
/// builds.
fn fuzz_lints(run: &Run) -> Result<()> {
    needs(run, "g++")?;
    let target = root().join("target").to_string_lossy().into_owned();
    let manifest = ["--manifest-path", "fuzz/Cargo.toml"];
    cargo(&[&["fmt"], &manifest[..], &["--check"]].concat(), &[])?;
    let arguments = [&["clippy", "--bins"], &manifest[..], &["--", "-D", "warnings"]].concat();
    cargo(&arguments, &[("CARGO_TARGET_DIR", &target)])
}

fn fuzz_smoke(run: &Run) -> Result<()> {
    needs(run, "g++")?;
    fuzz::build(None, false)?.run(Length::Repeatable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_over_its_budget_names_the_longest_steps() {
        let half = f64::from(IN_ALL) / 2.0;
        assert_eq!(over_in_all(&mut [(half, "a"), (half, "b")]), None);
        let why = over_in_all(&mut [(1.0, "a"), (half, "b"), (half + 9.0, "c")]).unwrap();
        assert!(why.ends_with("went into c (909 s), b (900 s), a (1 s)"), "{why}");
    }
}
