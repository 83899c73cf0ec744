//! Runs the command as a user does, within a time limit, and finds what it leaves behind.
// Every test file is a program of its own, and none uses all of this.
#![allow(dead_code)]

use std::{
    fs,
    io::Read,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::{ReentrantMutex, ReentrantMutexGuard};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;
use tempfile::TempDir;

/// All policies, in the order of the table.
pub(crate) const POLICIES: [&str; 9] = [
    "off",
    "strict",
    "strict+map",
    "lazy-sq",
    "lazy-mq",
    "lazy-sq+map",
    "lazy-mq+map",
    "bounce",
    "auto",
];

/// The policies under which every buffer is mapped.
pub(crate) const MAPPING: &[&str] = POLICIES.split_at(7).0.split_at(1).1;

/// A guard against hanging, not a measure: nothing that these tests wait for takes longer, however
/// busy the machine is.
pub(crate) const LIMIT: Duration = Duration::from_secs(300);

/// One test at a time: each run has two processes that spin. No verdict depends on it, since other
/// programs may run beside this one.
static TURN: ReentrantMutex<()> = ReentrantMutex::new(());
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A place to run the command in: a folder that is removed afterwards, and a mark that identifies
/// every process that descends from it.
pub(crate) struct Place {
    folder: TempDir,
    mark: String,
    program: PathBuf,
    _turn: ReentrantMutexGuard<'static, ()>,
}

impl Place {
    pub(crate) fn new() -> Place {
        Place::of(env!("CARGO_BIN_EXE_ringfence"))
    }

    /// A place for another build of the command.
    pub(crate) fn of(program: impl Into<PathBuf>) -> Place {
        // Below the target directory: on a disk, where /tmp may be memory.
        Place::within(env!("CARGO_TARGET_TMPDIR"), program)
    }

    /// A place whose files lie in memory: a busy machine may take seconds for a flush of a real
    /// disk, or for a line of a log, and a service that is to end does not wait for them that long.
    pub(crate) fn in_memory() -> Place {
        Place::within("/dev/shm", env!("CARGO_BIN_EXE_ringfence"))
    }

    fn within(folder: &str, program: impl Into<PathBuf>) -> Place {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Place {
            folder: tempfile::tempdir_in(folder).unwrap(),
            mark: format!("RINGFENCE_TEST_MARK={}.{number}", std::process::id()),
            program: program.into(),
            _turn: TURN.lock(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), content).unwrap();
        self.path(name)
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// The names in the folder, in order.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Waits until no process that descends from this place runs any more. A command that ends in
    /// order has waited for its own processes, so that none may be left then: this is for commands
    /// that were killed.
    pub(crate) fn wait_for_processes(&self) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let found = self.processes();
            if found.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "{found:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The device process, once it exists.
    pub(crate) fn device_process(&self) -> Process {
        let deadline = Instant::now() + LIMIT;
        loop {
            let device = |process: &Process| process.line.ends_with("device ");
            if let Some(found) = self.processes().into_iter().find(device) {
                return found;
            }
            assert!(Instant::now() < deadline, "no device process");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The running processes that descend from this place.
    pub(crate) fn processes(&self) -> Vec<Process> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // A process that has ended meanwhile, or is a zombie, has none.
            let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
            if environment.split(|&byte| byte == 0).any(|var| var == self.mark.as_bytes()) {
                let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
                let line = String::from_utf8_lossy(&line).replace('\0', " ");
                found.push(Process { id, line });
            }
        }
        found
    }

    /// Starts `ringfence` with these arguments, in a process group of its own as a shell does.
    pub(crate) fn start(&self, arguments: &[&str]) -> Running {
        let (name, value) = self.mark.split_once('=').unwrap();
        let mut child = Command::new(&self.program)
            .args(arguments)
            .current_dir(self.folder.path())
            .env(name, value)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let out = collect(child.stdout.take().unwrap());
        let err = collect(child.stderr.take().unwrap());
        Running { child: Leader(child), out, err, what: arguments.join(" "), begun: Instant::now() }
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Ended {
        self.start(arguments).wait()
    }

    /// Runs a benchmark, `["bench", NAME, ...]` and more, which must succeed; returns its JSON.
    /// Standard output may contain nothing else, and no process may be left.
    pub(crate) fn bench(&self, short: &[&str], more: &[&str]) -> Value {
        let ended = self.run(&[short, more, &["--json", "-"]].concat());
        assert_eq!(ended.code(), 0, "{ended}");
        let json: Value = serde_json::from_str(&ended.out)
            .unwrap_or_else(|error| panic!("standard output is not JSON: {error}\n{ended}"));
        assert_eq!(json["schema"], "ringfence.bench/1");
        assert_eq!(json["bench"], short[1]);
        assert_eq!(json["interrupted"], false);
        assert_eq!(json["errors"], Value::Array(Vec::new()));
        assert!(self.processes().is_empty(), "no process stays");
        json
    }

    /// `ringfence compare JOB ...` with a short job file of this text.
    pub(crate) fn compare(&self, job: &str, arguments: &[&str]) -> Ended {
        self.write("job.fio", job);
        self.run(&[&["compare", "job.fio"], arguments].concat())
    }

    /// The same, which must succeed; returns its JSON. Standard output may contain nothing else.
    pub(crate) fn measure(&self, job: &str, arguments: &[&str]) -> Value {
        let ended = self.compare(job, &[arguments, &["--json", "-"]].concat());
        assert_eq!(ended.code(), 0, "{ended}");
        let json: Value = serde_json::from_str(&ended.out)
            .unwrap_or_else(|error| panic!("standard output is not JSON: {error}\n{ended}"));
        assert!(errors_of(&json).is_empty(), "{:?}\n{ended}", errors_of(&json));
        json
    }
}

/// A process that was found.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) id: u32,
    pub(crate) line: String,
}

impl Process {
    pub(crate) fn kill(&self, signal: Signal) {
        // It may be gone: the test will find that out.
        let _ = kill_process(pid(self.id), signal);
    }

    /// The processor time that its threads have used so far; none if it is gone.
    pub(crate) fn cpu_time(&self) -> Duration {
        Duration::from_nanos(self.of_threads("schedstat", "", |text| text.split(' ').next()))
    }

    /// The same of a device process's workers alone.
    pub(crate) fn worked(&self) -> Duration {
        Duration::from_nanos(self.of_threads("schedstat", "worker-", |text| text.split(' ').next()))
    }

    /// The sum over its threads whose names begin so of the number that `find` picks from this
    /// file of theirs.
    fn of_threads(&self, file: &str, name: &str, find: fn(&str) -> Option<&str>) -> u64 {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.id));
        let number = |task: fs::DirEntry| {
            let is = fs::read_to_string(task.path().join("comm")).ok()?;
            if !is.starts_with(name) {
                return None;
            }
            let text = fs::read_to_string(task.path().join(file)).ok()?;
            find(&text)?.trim().parse::<u64>().ok()
        };
        tasks.into_iter().flatten().flatten().filter_map(number).sum()
    }

    /// The state of each of its threads (`R` if it runs, or waits for a CPU).
    pub(crate) fn states(&self) -> Vec<char> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.id)).into_iter().flatten().flatten();
        let texts = tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
        // The state follows the name, which is in parentheses.
        texts.filter_map(|text| text.rsplit_once(") ")?.1.chars().next()).collect()
    }

    /// Checks that it comes to rest, and that it is nearly idle for a second after that, in which
    /// `act` is called again and again. A thread that spins does not rest, however little CPU time
    /// it gets on a busy machine; one that often looks for something takes CPU time.
    pub(crate) fn takes_no_time(&self, name: &str, mut act: impl FnMut()) {
        let (begun, before) = (Instant::now(), self.cpu_time());
        while self.states().contains(&'R') {
            let took = self.cpu_time().saturating_sub(before);
            let rests = begun.elapsed() < LIMIT && took < Duration::from_secs(5);
            assert!(rests, "{name}: it does not come to rest: {took:?} of {:?}", begun.elapsed());
            std::thread::sleep(Duration::from_millis(1));
        }
        let (begun, before) = (Instant::now(), self.cpu_time());
        while begun.elapsed() < Duration::from_secs(1) {
            act();
        }
        let (waited, took) = (begun.elapsed(), self.cpu_time().saturating_sub(before));
        eprintln!("{name}: {took:?} of {waited:?}");
        assert!(took < waited / 10, "{name}: {took:?} of {waited:?}");
    }

    /// How often its threads have waited for something so far.
    pub(crate) fn waits(&self) -> u64 {
        self.of_threads("status", "", |text| {
            text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
        })
    }

    /// Whether it has this file open.
    pub(crate) fn has_open(&self, path: &Path) -> bool {
        let path = fs::canonicalize(path).unwrap();
        let files = fs::read_dir(format!("/proc/{}/fd", self.id));
        let is = |file: fs::DirEntry| fs::read_link(file.path()).is_ok_and(|link| link == path);
        files.into_iter().flatten().flatten().any(is)
    }

    /// The most memory it has held so far, in bytes. `None` if it is gone.
    pub(crate) fn most_memory(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.id)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
    }
}

fn pid(id: u32) -> Pid {
    Pid::from_raw(id.try_into().unwrap()).unwrap()
}

/// The first process of a group; dropping it ends the group.
struct Leader(Child);

impl Drop for Leader {
    fn drop(&mut self) {
        // A process that was waited for has no number any more.
        if let Ok(None) = self.0.try_wait() {
            let _ = kill_process_group(pid(self.0.id()), Signal::KILL);
            let _ = self.0.wait();
        }
    }
}

/// The running command. Dropping this ends it.
pub(crate) struct Running {
    child: Leader,
    out: Collected,
    err: Collected,
    what: String,
    begun: Instant,
}

impl Running {
    pub(crate) fn process(&self) -> Process {
        Process { id: self.child.0.id(), line: self.what.clone() }
    }

    /// Signals only the process.
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(pid(self.child.0.id()), signal).unwrap();
    }

    /// Signals the whole group, as a terminal does for Ctrl-C.
    pub(crate) fn signal_group(&self, signal: Signal) {
        kill_process_group(pid(self.child.0.id()), signal).unwrap();
    }

    /// Waits for a line on standard error (its progress) that `wanted` accepts.
    pub(crate) fn wait_for(&mut self, wanted: impl Fn(&str) -> bool) {
        self.wait_until(|running| running.err.text().lines().any(&wanted));
    }

    /// Waits for a line on standard output that `wanted` accepts.
    pub(crate) fn wait_for_output(&mut self, wanted: impl Fn(&str) -> bool) {
        self.wait_until(|running| running.out.text().lines().any(&wanted));
    }

    fn wait_until(&mut self, is_there: impl Fn(&Running) -> bool) {
        while !is_there(self) {
            assert!(self.is_running(), "{} has ended\n{}", self.what, self.err.text());
            assert!(self.begun.elapsed() < LIMIT, "{}\n{}", self.what, self.err.text());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// What it has written to standard error so far.
    pub(crate) fn stderr(&self) -> String {
        self.err.text()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.0.try_wait().unwrap().is_none()
    }

    pub(crate) fn wait(mut self) -> Ended {
        let waits = Instant::now();
        let status = loop {
            if let Some(status) = self.child.0.try_wait().unwrap() {
                break status;
            }
            if waits.elapsed() > LIMIT {
                let _ = kill_process_group(pid(self.child.0.id()), Signal::KILL);
                let _ = self.child.0.wait();
                panic!("{} did not end within {LIMIT:?}", self.what);
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let (out, err) = (self.out.end(), self.err.end());
        Ended { status, out, err, what: self.what, took: self.begun.elapsed() }
    }
}

/// The output of a stream, read by a thread of its own.
struct Collected {
    bytes: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

fn collect(mut from: impl Read + Send + 'static) -> Collected {
    let bytes = Arc::new(Mutex::new(Vec::new()));
    let into = Arc::clone(&bytes);
    let reader = std::thread::spawn(move || {
        let mut part = [0; 4096];
        loop {
            match from.read(&mut part).unwrap() {
                0 => break,
                n => into.lock().unwrap().extend_from_slice(&part[..n]),
            }
        }
    });
    Collected { bytes, reader }
}

impl Collected {
    /// The output so far.
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock().unwrap()).into_owned()
    }

    /// All of the output.
    fn end(self) -> String {
        self.reader.join().unwrap();
        let bytes = std::mem::take(&mut *self.bytes.lock().unwrap());
        String::from_utf8(bytes).expect("the command prints UTF-8")
    }
}

/// How the command ended.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    pub(crate) err: String,
    pub(crate) what: String,
    pub(crate) took: Duration,
}

impl Ended {
    pub(crate) fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| -self.status.signal().unwrap_or(1000))
    }

    /// Checks that it was refused as wrong usage, with a message that contains all of `words`.
    pub(crate) fn refused(&self, words: &[&str]) {
        assert_eq!(self.code(), 2, "{self}");
        assert_eq!(self.out, "", "{self}");
        for word in words {
            assert!(self.err.contains(word), "{word:?} is missing\n{self}");
        }
        // One error, and no sign that anything ran.
        assert_eq!(self.err.matches("error:").count(), 1, "{self}");
        assert!(!self.err.contains("round"), "{self}");
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Ended { status, out, err, what, took } = self;
        write!(f, "ringfence {what}: {status} in {took:?}\n--- stdout\n{out}--- stderr\n{err}---")
    }
}

/// The result of a policy for the job at `index`.
pub(crate) fn row<'a>(json: &'a Value, index: usize, policy: &str) -> &'a Value {
    let rows = json["jobs"][index]["results"].as_array().unwrap();
    rows.iter().find(|row| row["policy"] == policy).unwrap_or_else(|| panic!("no row {policy}"))
}

pub(crate) fn number(value: &Value, path: &str) -> f64 {
    let found = value.pointer(path).and_then(Value::as_f64);
    found.unwrap_or_else(|| panic!("{path} is not a number in {value:#}"))
}

/// What the probe of a row of `ios` I/Os tried, per I/O. The probe runs by the clock: its requests,
/// copies and bytes per I/O depend on the machine's speed, and have to be subtracted from figures
/// per I/O. The row is strict: such a probe accesses the device once.
pub(crate) fn probes_per_io(row: &Value, ios: u32) -> f64 {
    number(row, "/stale_window/probes") / f64::from(ios)
}

/// Rows with errors, and leaks of rows that promise what strict promises.
pub(crate) fn errors_of(json: &Value) -> Vec<String> {
    let mut found = Vec::new();
    for job in json["jobs"].as_array().unwrap() {
        for row in job["results"].as_array().unwrap() {
            let about = format!("{} {}", job["name"], row["policy"]);
            if row["errors"] != 0 {
                found.push(format!("{about}: {} errors: {}", row["errors"], row["warnings"]));
            }
            let policy = row["policy"].as_str().unwrap();
            let strict = policy.starts_with("strict") || matches!(policy, "bounce" | "auto");
            if strict && row["stale_window"]["accesses"] != 0 {
                found.push(format!("{about}: leaked"));
            }
        }
    }
    found
}

/// The names of the rows of the job at `index`.
pub(crate) fn policies(json: &Value, index: usize) -> Vec<&str> {
    let rows = json["jobs"][index]["results"].as_array().unwrap();
    rows.iter().map(|row| row["policy"].as_str().unwrap()).collect()
}

/// A file's content, to see whether it changed.
pub(crate) fn bytes_of(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap()
}
