//! Where a test runs: a folder that is removed afterwards, and our back ends, which end with it.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::manager::Manager;
use serde_json::Value;
use tempfile::TempDir;

/// A guard against hanging, not a measure. The longest single wait is for a boot and what comes
/// before a script's first word, or for all that follows its last: half a minute with an emulated
/// processor and a real one for it. Ten times as long where other programs want that processor too;
/// and twice that, since a longer limit only costs time.
pub(crate) const LIMIT: Duration = Duration::from_secs(600);

/// A folder of a test's own.
pub(crate) struct Place {
    folder: TempDir,
    /// Starts back ends, and keeps for the next one what one leaves.
    manager: Option<Manager>,
}

impl Place {
    pub(crate) fn new() -> Place {
        // A socket's path may have 107 bytes: not below a target folder that lies anywhere.
        Place { folder: tempfile::tempdir().unwrap(), manager: None }
    }

    /// Back ends resume where the one before them has ended.
    pub(crate) fn managed(mut self) -> Place {
        self.manager = Some(Manager::new(self.folder.path()));
        self
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// An image of that many MiB, all of it holes.
    pub(crate) fn image(&self, name: &str, mib: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(mib << 20).unwrap();
        path
    }

    /// `ringfence ARGUMENTS --socket SOCKET`, once it listens.
    pub(crate) fn service(&self, socket: &str, arguments: &[&str]) -> Service {
        self.start(socket, "--socket", arguments, None)
    }

    /// `ringfence guard` with an IOMMU at `iommu.sock` and more ARGUMENTS, once it listens and has
    /// printed QEMU's arguments.
    pub(crate) fn guard(&self, arguments: &[&str]) -> Guard {
        let printed = self.path("guard.json");
        let arguments = [&["guard", "--json", "--log", "debug"], arguments].concat();
        // A later process prints the same, elsewhere.
        let out = File::options().create(true).append(true).open(&printed).unwrap();
        let service = self.start("iommu.sock", "--iommu", &arguments, Some(out));
        let begun = Instant::now();
        let printed: Value = loop {
            let text = std::fs::read_to_string(&printed).unwrap();
            if let Ok(value) = serde_json::from_str(&text) {
                break value;
            }
            assert!(begun.elapsed() < LIMIT, "not JSON: {text}\n{}", service.log());
            thread::sleep(Duration::from_millis(5));
        };
        let words = printed["qemu"].as_array().expect("QEMU's arguments");
        let word = |word: &Value| word.as_str().expect("a word").to_owned();
        Guard { service, arguments: words.iter().map(word).collect() }
    }

    fn start(&self, socket: &str, option: &str, arguments: &[&str], out: Option<File>) -> Service {
        let path = self.path(socket);
        let log = self.path(&format!("{socket}.log"));
        let figures = self.path(&format!("{socket}.figures"));
        let program = env!("CARGO_BIN_EXE_ringfence");
        let mut command = match &self.manager {
            None => {
                // A killed one has left its sockets behind: the new ones must be waited for.
                for old in [&path, &figures] {
                    let _ = std::fs::remove_file(old);
                }
                Command::new(program)
            }
            Some(manager) => manager.command(program),
        };
        let written = File::options().create(true).append(true).open(&log).unwrap();
        command.args(arguments).arg(option).arg(&path);
        command.arg("--metrics").arg(format!("unix:{}", figures.display())).stderr(written);
        // Descriptors that are passed on take the places of these.
        if !command.get_envs().any(|(name, _)| name == "LISTEN_FDS") {
            command.stdin(Stdio::null());
            command.stdout(out.map_or_else(Stdio::null, Stdio::from));
        }
        let child = command.spawn().unwrap();
        let mut service = Service { child, socket: path, log, figures };
        let begun = Instant::now();
        while !(service.socket.exists() && service.figures.exists()) {
            assert!(service.child.try_wait().unwrap().is_none(), "{}", service.log());
            assert!(begun.elapsed() < LIMIT, "{}", service.log());
            thread::sleep(Duration::from_millis(5));
        }
        service
    }
}

/// A part of the guests, by name.
pub(crate) fn part(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests");
    assert!(
        folder.join("made").exists(),
        "{} is not there: `cargo xtask guests` makes it",
        folder.display()
    );
    folder.canonicalize().unwrap().join(name)
}

/// A running `ringfence guard`.
pub(crate) struct Guard {
    pub(crate) service: Service,
    /// The arguments that it has printed for QEMU.
    pub(crate) arguments: Vec<String>,
}

/// A running back end of ours.
pub(crate) struct Service {
    child: Child,
    pub(crate) socket: PathBuf,
    log: PathBuf,
    figures: PathBuf,
}

impl Service {
    /// Its log so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Its metrics as served.
    pub(crate) fn figures(&self) -> String {
        let fetch = || -> std::io::Result<String> {
            let mut socket = UnixStream::connect(&self.figures)?;
            socket.set_read_timeout(Some(LIMIT))?;
            socket.write_all(b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")?;
            let mut page = String::new();
            socket.read_to_string(&mut page)?;
            Ok(page)
        };
        fetch().unwrap_or_else(|error| format!("no figures: {error}"))
    }

    /// The sum of a metric over its labels.
    pub(crate) fn figure(&self, name: &str) -> f64 {
        let page = self.figures();
        sum(&page, name).unwrap_or_else(|| panic!("no figure {name} in\n{page}"))
    }

    /// Waits until a metric reaches a value.
    pub(crate) fn reaches(&self, name: &str, wanted: f64) {
        let begun = Instant::now();
        loop {
            let page = self.figures();
            if sum(&page, name).is_some_and(|sum| sum >= wanted) {
                return;
            }
            assert!(begun.elapsed() < LIMIT, "{name} does not reach {wanted}:\n{page}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Kills it, as a crash does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Ends it as an operator does: it must end by itself, without an error.
    pub(crate) fn terminate(mut self) {
        self.ends();
    }

    /// The same, for one that another process resumes.
    pub(crate) fn ends(&mut self) {
        assert!(self.is_running(), "it has ended already:\n{}", self.log());
        let id = Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
        kill_process(id, Signal::TERM).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}\n{}", self.log());
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let figures = if thread::panicking() { self.figures() } else { String::new() };
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!(
                "--- back end at {}\n{}\n{figures}",
                self.socket.display(),
                tail(&self.log(), 60)
            );
        }
    }
}

/// The sum of a metric over its labels, if it is there.
fn sum(page: &str, name: &str) -> Option<f64> {
    let values = page.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let value = rest.strip_prefix(' ').or_else(|| {
            rest.starts_with('{').then(|| rest.rsplit_once(' ').map(|(_, value)| value))?
        })?;
        value.parse::<f64>().ok()
    });
    values.reduce(|sum, value| sum + value)
}

/// The last lines of a text.
pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// The MD5 of a part of a file, by the program, to compare with a guest's own result.
pub(crate) fn md5(path: &Path, first: u64, length: u64) -> String {
    let mut file = File::open(path).unwrap();
    file.seek(SeekFrom::Start(first)).unwrap();
    let mut content = Vec::new();
    file.take(length).read_to_end(&mut content).unwrap();
    let mut child = Command::new("md5sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("md5sum");
    child.stdin.take().unwrap().write_all(&content).unwrap();
    let output = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    output.split(' ').next().unwrap().to_owned()
}
