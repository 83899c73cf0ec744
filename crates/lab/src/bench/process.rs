//! A back end's process: bound to a CPU, and stopped while another is measured.

use std::{
    ffi::OsStr,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use ringfence_run::worker::Notify;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::bench::threads;

/// How long a process may take to be there.
const START: Duration = Duration::from_secs(60);
/// How long one that was stopped may take to stand still.
const STANDS_STILL: Duration = Duration::from_secs(60);

/// A folder for sockets, removed when this is dropped.
pub(crate) fn folder() -> Result<TempDir> {
    tempfile::Builder::new().prefix("ringfence-bench-").tempdir().context("a folder for sockets")
}

/// What processes have printed, for an error.
pub(super) fn last_words(processes: &[Process]) -> String {
    let words = processes.iter().map(|process| format!(" (it printed: {})", process.last_words()));
    words.collect()
}

/// Whether a process listens at a socket, found without connecting to it. The socket's file is
/// there a moment earlier.
fn is_listened_at(socket: &Path) -> Result<bool> {
    const LISTENS: u32 = 1 << 16;
    let sockets = fs::read("/proc/net/unix").context("/proc/net/unix")?;
    let listens = |flags| u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & LISTENS != 0);
    Ok(String::from_utf8_lossy(&sockets).lines().any(|line| {
        let before = line.strip_suffix(&*socket.to_string_lossy());
        let before = before.filter(|before| before.ends_with(' '));
        before.and_then(|before| before.split(' ').nth(3)).is_some_and(listens)
    }))
}

/// A process that is killed when this is dropped.
pub(crate) struct Process {
    name: &'static str,
    pub(in crate::bench) child: Child,
    /// Its standard error.
    log: PathBuf,
}

impl Process {
    /// Starts a program on `cpu` (`None`: it binds itself) and waits until it listens at `socket`.
    /// `talks`: its standard input and output are pipes.
    pub(crate) fn start(
        name: &'static str,
        program: &Path,
        arguments: &[String],
        cpu: Option<usize>,
        socket: &Path,
        talks: bool,
    ) -> Result<Process> {
        // It must not outlive this process, however that ends; and its output must not stay in a
        // buffer of its own while we wait for it.
        let mut words = Vec::new();
        if Path::new("/usr/bin/setpriv").exists() {
            words.extend(["/usr/bin/setpriv", "--pdeathsig", "KILL", "--"].map(OsStr::new));
        }
        if talks {
            words.extend(["/usr/bin/stdbuf", "-oL"].map(OsStr::new));
        }
        words.push(program.as_os_str());
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args(arguments);
        // A file takes all of its output; a full pipe would stop it.
        let log = PathBuf::from([socket.as_os_str(), OsStr::new(".log")].join(OsStr::new("")));
        command.stderr(File::create(&log).context("a file for its messages")?);
        // Where DPDK keeps what it needs while it runs.
        command.env("RUNTIME_DIRECTORY", socket.parent().unwrap_or(Path::new("/tmp")));
        let talk = || if talks { Stdio::piped() } else { Stdio::null() };
        command.stdin(talk()).stdout(talk());
        let child = match cpu {
            Some(cpu) => threads::bound_to(cpu, || command.spawn()),
            None => command.spawn(),
        };
        let child = child.with_context(|| format!("starting {}", program.display()))?;
        let mut process = Process { name, child, log };
        let begun = Instant::now();
        while !is_listened_at(socket)? {
            if let Some(status) = process.child.try_wait()? {
                bail!("{name} ended at once, with {status}: {}", process.last_words());
            }
            if begun.elapsed() > START {
                bail!("{name} does not listen at {} within {START:?}", socket.display());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(process)
    }

    /// Starts a `ringfence proxy` before the back end that listens at `backend`, and waits until it
    /// listens at `socket`.
    pub(crate) fn proxy(
        backend: &Path,
        socket: &Path,
        notify: Notify,
        cpu: Option<usize>,
    ) -> Result<Process> {
        let program = std::env::current_exe().context("where this program is")?;
        let [backend, front] = [backend, socket].map(|path| path.display().to_string());
        let notify = notify.to_string();
        let arguments = ["proxy", "--backend", &backend, "--socket", &front, "--notify", &notify];
        let arguments = arguments.map(str::to_owned);
        Process::start("ringfence proxy", &program, &arguments, cpu, socket, false)
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// The end of its standard error.
    pub(crate) fn last_words(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().rev().take(3).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("; ")
    }

    /// Stops it, so that it takes no CPU. When this returns it takes none: a thread for which the
    /// kernel is busy, unmapping memory for example, stops only after that, and would slow what is
    /// measured next.
    pub(in crate::bench) fn pause(&self) -> Result<()> {
        self.signal(Signal::STOP)?;
        let begun = Instant::now();
        while !self.stands_still() {
            if begun.elapsed() > STANDS_STILL {
                bail!("{} did not stop within {STANDS_STILL:?}", self.name);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// What a file of `/proc` says of each of its threads.
    fn threads(&self, file: &'static str) -> impl Iterator<Item = String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let tasks = tasks.into_iter().flatten().flatten();
        tasks.filter_map(move |task| fs::read_to_string(task.path().join(file)).ok())
    }

    /// Whether none of its threads runs: they are stopped, or it has ended.
    fn stands_still(&self) -> bool {
        self.threads("stat").all(|text| {
            // The name before it may hold anything, brackets too.
            let state = text.rsplit(") ").next().and_then(|rest| rest.chars().next());
            state.is_none_or(|state| matches!(state, 'T' | 't' | 'Z' | 'X'))
        })
    }

    /// Lets it go on.
    pub(in crate::bench) fn resume(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("{} has ended, with {status}: {}", self.name, self.last_words());
        }
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).with_context(|| format!("a signal for {}", self.name))
    }

    /// How much CPU time all its threads have had, nanoseconds.
    pub(crate) fn cpu_ns(&self) -> u64 {
        let spent = |text: String| text.split(' ').next()?.parse::<u64>().ok();
        self.threads("schedstat").filter_map(spent).sum()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A stopped process can be killed, too. If it has ended already, there is nothing to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};

    use super::*;

    #[test]
    fn a_socket_counts_as_listening_only_once_a_process_listens() {
        let folder = tempfile::tempdir().unwrap();
        let [path, other] = ["socket", "other socket"].map(|name| folder.path().join(name));
        assert!(!is_listened_at(&path).unwrap());
        for at in [&other, &path] {
            let bound = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
            bind(&bound, &SocketAddrUnix::new(at).unwrap()).unwrap();
            assert!(at.exists() && !is_listened_at(at).unwrap());
            listen(&bound, 1).unwrap();
            assert!(is_listened_at(at).unwrap());
            assert!(at == &path || !is_listened_at(&path).unwrap());
        }
    }
}
