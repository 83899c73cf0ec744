//! A running guest: its output, its input, and how it ends.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};

use flate2::{Compression, write::GzEncoder};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;

use crate::place::{LIMIT, part, tail};

// The archive with a test's script is appended to the one that xtask makes, in the same format.
#[path = "../../../../xtask/src/guests/cpio.rs"]
#[allow(dead_code)]
mod cpio;

/// The initial root file system of a guest that runs `script`, with `files` beside it.
///
/// The script can send a line to the test (`say WORDS`), receive one (`hear [LINE]`, then `$line`)
/// and pass on a command's output as a result (`COMMAND | give NAME`). Its first failing command
/// ends the script, and the test.
pub(crate) fn initramfs(base: &str, script: &str, files: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut archive = cpio::Cpio::new();
    archive.file("run.sh", script.as_bytes());
    for (name, content) in files {
        archive.file(name, content);
    }
    let mut all = std::fs::read(part(base)).unwrap();
    // Also packed: an unpacked archive that is not word-aligned would be silently skipped.
    let mut packed = GzEncoder::new(&mut all, Compression::fast());
    packed.write_all(&archive.end()).unwrap();
    packed.finish().unwrap();
    all
}

/// A running guest. Dropping this ends it.
pub(crate) struct Guest {
    child: Child,
    talk: Option<ChildStdin>,
    heard: Arc<Heard>,
    /// How many of its lines were looked at.
    seen: usize,
    /// The output of its kernel, where that is separate.
    console: Option<PathBuf>,
}

#[derive(Default)]
struct Heard {
    output: Mutex<Output>,
    more: Condvar,
}

impl Heard {
    /// Works even after a test that waited for it has failed.
    fn output(&self) -> MutexGuard<'_, Output> {
        self.output.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[derive(Default)]
struct Output {
    lines: Vec<String>,
    over: bool,
}

impl Guest {
    /// Starts a machine that uses standard input and output.
    pub(crate) fn start(command: &mut Command, console: Option<PathBuf>) -> Guest {
        // A group of its own: User-Mode Linux is several processes.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a guest");
        let (talk, stdout) = (child.stdin.take(), child.stdout.take().unwrap());
        let heard = Arc::new(Heard::default());
        let into = Arc::clone(&heard);
        thread::spawn(move || {
            let mut lines = BufReader::new(stdout);
            let mut line = Vec::new();
            while lines.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                into.output().lines.push(text);
                into.more.notify_all();
                line.clear();
            }
            into.output().over = true;
            into.more.notify_all();
        });
        Guest { child, talk, heard, seen: 0, console }
    }

    /// Waits until the guest says a line that begins with `words`, after those looked at before;
    /// returns the line.
    pub(crate) fn hear(&mut self, words: &str) -> String {
        let line = self.hear_within(words, LIMIT);
        line.unwrap_or_else(|| panic!("it did not print {words:?} in {LIMIT:?}"))
    }

    /// The same; `None` if it does not say that within `limit`.
    pub(crate) fn hear_within(&mut self, words: &str, limit: Duration) -> Option<String> {
        let begun = Instant::now();
        let mut output = self.heard.output.lock().unwrap();
        loop {
            while let Some(line) = output.lines.get(self.seen) {
                self.seen += 1;
                if line.starts_with(words) {
                    return Some(line.clone());
                }
                assert!(!line.starts_with("done "), "it never printed {words:?}");
            }
            assert!(!output.over, "it ended and never printed {words:?}");
            if begun.elapsed() >= limit {
                return None;
            }
            output = self.heard.more.wait_timeout(output, Duration::from_secs(1)).unwrap().0;
        }
    }

    /// The process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line that the guest waits for.
    pub(crate) fn say(&mut self, line: &str) {
        let talk = self.talk.as_mut().expect("a guest that can be talked to");
        talk.write_all(format!("{line}\n").as_bytes()).unwrap();
        talk.flush().unwrap();
    }

    /// Everything the guest said, once its script has succeeded and the machine is off.
    pub(crate) fn end(mut self) -> Transcript {
        let status = self.hear("done ");
        assert_eq!(status, "done 0", "the guest's script failed");
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            let is_late = begun.elapsed() >= LIMIT;
            assert!(!is_late, "the machine does not go off; its threads:\n{}", self.threads());
            thread::sleep(Duration::from_millis(5));
        };
        assert!(status.success(), "the machine: {status}");
        Transcript { lines: self.lines() }
    }

    /// The exit status of a machine that does not survive its script, and what it said until then.
    pub(crate) fn dies(mut self) -> (ExitStatus, Transcript) {
        let begun = Instant::now();
        let mut output = self.heard.output();
        while !output.over {
            assert!(begun.elapsed() < LIMIT, "the machine lives");
            output = self.heard.more.wait_timeout(output, Duration::from_secs(1)).unwrap().0;
        }
        drop(output);
        (self.child.wait().unwrap(), Transcript { lines: self.lines() })
    }

    /// The state of the process's threads: names, states and times so far, and where in the kernel
    /// they wait.
    pub(crate) fn threads(&self) -> String {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.id()));
        let read = |task: &std::fs::DirEntry, name: &str| {
            std::fs::read_to_string(task.path().join(name)).unwrap_or_default()
        };
        let line = |task| format!("{} {}", read(&task, "stat").trim(), read(&task, "wchan"));
        tasks.into_iter().flatten().flatten().map(line).collect::<Vec<_>>().join("\n")
    }

    fn lines(&self) -> Vec<String> {
        self.heard.output().lines.clone()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let group = self.child.id().try_into().ok().and_then(Pid::from_raw);
        let _ = kill_process_group(group.expect("a process has a number"), Signal::KILL);
        let _ = self.child.wait();
        if thread::panicking() {
            let console = self.console.as_ref().map(|path| std::fs::read(path).unwrap_or_default());
            let console = console.unwrap_or_default();
            let console = String::from_utf8_lossy(&console);
            let crash = ["Oops:", "BUG:", "RIP: ", "Kernel panic"];
            let is_of_a_crash = |line: &&str| crash.iter().any(|words| line.contains(words));
            let crash: Vec<&str> = console.lines().filter(is_of_a_crash).take(6).collect();
            if !crash.is_empty() {
                eprintln!("--- its kernel crashed with\n{}", crash.join("\n"));
            }
            eprintln!("--- console\n{}", tail(&console, 60));
            eprintln!("--- the guest printed\n{}\n---", tail(&self.lines().join("\n"), 60));
        }
    }
}

/// What a guest said until its end.
pub(crate) struct Transcript {
    lines: Vec<String>,
}

impl Transcript {
    /// The rest of the one line that begins with `word`.
    pub(crate) fn word(&self, word: &str) -> &str {
        let mut found = self.lines.iter().filter_map(|l| l.strip_prefix(word)?.strip_prefix(' '));
        let all = || self.lines.join("\n");
        let first = found.next();
        let first = first.unwrap_or_else(|| panic!("the guest did not print {word}:\n{}", all()));
        assert!(found.next().is_none(), "the guest printed {word} more than once:\n{}", all());
        first
    }

    /// The first of the words: in `md5sum`'s output, the sum.
    pub(crate) fn sum(&self, word: &str) -> &str {
        self.word(word).split(' ').next().unwrap()
    }

    /// The result with this name.
    pub(crate) fn given(&self, name: &str) -> String {
        let at = |mark: String| self.lines.iter().position(|line| *line == mark);
        let (Some(begin), Some(end)) = (at(format!("begin {name}")), at(format!("end {name}")))
        else {
            panic!("the guest did not give {name}");
        };
        self.lines[begin + 1..end].join("\n")
    }

    /// The same as JSON.
    pub(crate) fn json(&self, name: &str) -> Value {
        let text = self.given(name);
        // fio may print remarks about a job before its report.
        let report = &text[text.find('{').unwrap_or_default()..];
        serde_json::from_str(report).unwrap_or_else(|error| panic!("{name}: {error}\n{text}"))
    }
}
