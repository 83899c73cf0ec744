//! `cargo xtask timeline THREAD`: how soon a woken thread runs, by the scheduler's trace points.

use std::{collections::BTreeMap, fmt::Write, fs, path::Path, thread, time::Duration};

use anyhow::{Context, Result, bail};

const TRACING: &str = "/sys/kernel/tracing";
/// Bytes of trace that the kernel keeps for each CPU, in KiB.
const BUFFER_KIB: &str = "65536";
/// A wake-up after which the thread ran later than any switch takes.
const LATE_US: f64 = 100.0;

/// A trace of its own, which ends when this is dropped.
struct Trace(String);

impl Trace {
    /// With the system calls of `threads`.
    fn begin(threads: &[String]) -> Result<Trace> {
        let trace = Trace(format!("{TRACING}/instances/ringfence"));
        // Left behind by an interrupted run.
        let _ = fs::remove_dir(&trace.0);
        fs::create_dir(&trace.0).with_context(|| {
            format!("{}: as root, after `mount -t tracefs nodev {TRACING}`", trace.0)
        })?;
        trace.set("buffer_size_kb", BUFFER_KIB)?;
        trace.set("trace_clock", "mono")?;
        let own = threads.iter().map(|thread| format!("common_pid == {thread}"));
        let own = own.collect::<Vec<_>>().join(" || ");
        trace.set("events/syscalls/filter", &own)?;
        // Kicks: writes to eventfds, by any thread.
        let kicks = format!("count == 8 || {own}");
        trace.set("events/syscalls/sys_enter_write/filter", &kicks)?;
        for event in ["sched/sched_switch", "sched/sched_waking", "syscalls"] {
            trace.set(&format!("events/{event}/enable"), "1")?;
        }
        Ok(trace)
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        let path = Path::new(&self.0).join(file);
        fs::write(&path, value).with_context(|| path.display().to_string())
    }

    /// The events of that time.
    fn record(&self, length: Duration) -> Result<Vec<Event>> {
        self.set("tracing_on", "1")?;
        thread::sleep(length);
        self.set("tracing_on", "0")?;
        let text = fs::read_to_string(Path::new(&self.0).join("trace"))?;
        Ok(text.lines().filter_map(Event::parse).collect())
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[derive(Debug, PartialEq)]
struct Event {
    us: f64,
    cpu: u32,
    /// The thread's name and number.
    thread: String,
    what: What,
}

#[derive(Debug, PartialEq)]
enum What {
    Wakes(String),
    /// The thread of the event stops, asleep or not, and this one runs.
    Switch {
        asleep: bool,
        next: String,
    },
    /// It writes to an eventfd.
    Kicks(String),
    /// It makes another system call.
    Calls(String),
}

/// The value of `key=` up to the next key, which may have spaces, as names of threads have.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let value = &text[text.find(key)? + key.len()..];
    let end = value.find('=').map_or(value.len(), |at| value[..at].rfind(' ').unwrap_or(at));
    Some(value[..end].trim_end_matches(" ==>"))
}

fn named(text: &str, comm: &str, pid: &str) -> Option<String> {
    Some(format!("{}-{}", field(text, comm)?, field(text, pid)?))
}

impl Event {
    /// A line as `CPU 0/TCG-17 [001] d..2. 12.345678: sched_switch: prev_comm=...`.
    fn parse(line: &str) -> Option<Event> {
        let (thread, rest) = line.split_once(" [")?;
        let (cpu, rest) = rest.split_once("] ")?;
        let (_flags, rest) = rest.trim_start().split_once(' ')?;
        let (time, rest) = rest.trim_start().split_once(": ")?;
        let seconds: f64 = time.parse().ok()?;
        let (name, text) = rest.trim_start().split_once(['(', ':'])?;
        let what = match name {
            "sched_waking" => What::Wakes(named(text, " comm=", " pid=")?),
            "sched_switch" => What::Switch {
                asleep: !field(text, "prev_state=")?.starts_with('R'),
                next: named(text, "next_comm=", "next_pid=")?,
            },
            // A call's result does not end in a bracket.
            _ if !rest.ends_with(')') => return None,
            "sys_write" if text.ends_with("count: 8)") => {
                What::Kicks(text.split(',').next()?.to_owned())
            }
            _ => What::Calls(name.strip_prefix("sys_")?.to_owned()),
        };
        let thread = thread.trim().to_owned();
        Some(Event { us: seconds * 1e6, cpu: cpu.parse().ok()?, thread, what })
    }

    fn shown(&self) -> String {
        match &self.what {
            What::Wakes(target) => format!("{} wakes {target}", self.thread),
            What::Switch { asleep, next } => {
                let how = if *asleep { "sleeps" } else { "is interrupted" };
                format!("{} {how}, {next} runs", self.thread)
            }
            What::Kicks(descriptor) => {
                format!("{} writes to an eventfd ({descriptor})", self.thread)
            }
            What::Calls(name) => format!("{} calls {name}", self.thread),
        }
    }
}

/// A sleep of a thread, and how soon the thread ran once it was woken.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Turn {
    /// How long it ran before it slept.
    ran: f64,
    slept: f64,
    waited: f64,
    /// Where in the trace it was woken.
    at: usize,
}

/// The turns of a thread.
fn turns(events: &[Event], thread: &str) -> Vec<Turn> {
    let mut turns = Vec::new();
    let (mut runs, mut sleeps, mut woken) = (None, None, None);
    for (at, event) in events.iter().enumerate() {
        match &event.what {
            What::Wakes(target) if target == thread && sleeps.is_some() => {
                woken.get_or_insert((event.us, at));
            }
            What::Switch { next, .. } if next == thread => {
                if let (Some((ran, slept)), Some((us, at))) = (sleeps, woken) {
                    turns.push(Turn { ran, slept: us - slept, waited: event.us - us, at });
                }
                (runs, sleeps, woken) = (Some(event.us), None, None);
            }
            What::Switch { asleep: true, .. } if event.thread == thread => {
                sleeps = runs.map(|us| (event.us - us, event.us));
            }
            _ => {}
        }
    }
    turns
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Wake-ups by how long the thread had slept, in times as long as it had run before.
fn table(turns: &[Turn], seconds: f64) -> String {
    let mut out = String::from(
        "slept / ran   wake-ups  late  ran µs  slept µs  waited µs  waited in all ms\n",
    );
    let rows = [(0.0, 0.5), (0.5, 1.0), (1.0, 2.0), (2.0, f64::INFINITY), (0.0, f64::INFINITY)];
    for (from, to) in rows {
        let of = |turn: &&Turn| (from..to).contains(&(turn.slept / turn.ran));
        let of: Vec<Turn> = turns.iter().filter(of).copied().collect();
        let name = match (from, to) {
            (0.0, f64::INFINITY) => "all".to_owned(),
            (from, f64::INFINITY) => format!("{from} and more"),
            (from, to) => format!("{from} to {to}"),
        };
        let late = of.iter().filter(|turn| turn.waited > LATE_US).count();
        let [ran, slept, waited] = [|t: &Turn| t.ran, |t: &Turn| t.slept, |t: &Turn| t.waited]
            .map(|what| median(of.iter().map(what)));
        let sum: f64 = of.iter().map(|turn| turn.waited).sum::<f64>() / 1000.0;
        let _ = writeln!(
            out,
            "{name:12} {:9} {late:5} {ran:7.0} {slept:9.0} {waited:10.0} {sum:17.1}",
            of.len()
        );
    }
    let _ = writeln!(out, "in {seconds} s; late: ran more than {LATE_US} µs after it was woken");
    out
}

/// How often the thread made each system call.
fn calls(events: &[Event], thread: &str) -> String {
    let mut counts = BTreeMap::new();
    for event in events.iter().filter(|event| event.thread == thread) {
        match &event.what {
            What::Calls(name) => *counts.entry(name.as_str()).or_insert(0u64) += 1,
            What::Kicks(_) => *counts.entry("write to an eventfd").or_insert(0) += 1,
            _ => {}
        }
    }
    let lines = counts.into_iter().map(|(name, count)| format!("{name:20} {count:9}\n"));
    lines.fold(String::from("system calls\n"), |out, line| out + &line)
}

/// The numbers of all threads of a name.
fn numbers(name: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for process in fs::read_dir("/proc")?.flatten() {
        let tasks = fs::read_dir(process.path().join("task")).into_iter().flatten();
        for task in tasks.flatten() {
            let comm = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            if comm.trim_end() == name {
                found.extend(task.file_name().into_string());
            }
        }
    }
    if found.is_empty() {
        bail!("no thread is called {name:?} (names as in `top -H`)");
    }
    Ok(found)
}

/// The events behind a wake-up, by their times since then.
fn excerpt(events: &[Event], at: usize, lines: usize) -> String {
    let mut out = String::from("     µs  CPU\n");
    for event in events[at..].iter().take(lines) {
        let _ =
            writeln!(out, "{:7.0} {:4}  {}", event.us - events[at].us, event.cpu, event.shown());
    }
    out
}

/// Traces for `seconds`. For the thread called `name` with the most wake-ups, prints how late these
/// were, the system calls that it made, and `lines` of trace around a wake-up that was late and
/// around one that was not.
///
/// # Errors
/// No trace can be had; no such thread ran.
pub(crate) fn run(name: &str, seconds: f64, lines: usize) -> Result<()> {
    let events = Trace::begin(&numbers(name)?)?.record(Duration::try_from_secs_f64(seconds)?)?;
    let mut found = BTreeMap::new();
    for event in &events {
        if let What::Switch { next, .. } = &event.what
            && next.rsplit_once('-').is_some_and(|(comm, _)| comm == name)
        {
            *found.entry(next.as_str()).or_insert(0u64) += 1;
        }
    }
    let Some((thread, _)) = found.into_iter().max_by_key(|(_, count)| *count) else {
        bail!("no thread called {name:?} ran in {seconds} s (names as in `top -H`)");
    };
    let turns = turns(&events, thread);
    println!("{thread}\n{}\n{}", table(&turns, seconds), calls(&events, thread));
    let half = &turns[turns.len() / 2..];
    let late = half.iter().find(|turn| turn.waited > LATE_US);
    let soon = half.iter().find(|turn| turn.waited < LATE_US);
    for (turn, what) in [(soon, "soon"), (late, "late")] {
        if let Some(turn) = turn {
            println!("woken, and runs {what}\n{}", excerpt(&events, turn.at, lines));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "\
# a comment
        CPU 0/TCG-17      [001] d..2.   10.000000: sched_waking: comm=guard-0 pid=9 prio=120 target_cpu=001
        CPU 0/TCG-17      [001] d..2.   10.000003: sched_switch: prev_comm=CPU 0/TCG prev_pid=17 prev_prio=120 prev_state=R ==> next_comm=guard-0 next_pid=9 next_prio=120
          guard-0-9       [001] d..2.   10.000010: sched_switch: prev_comm=guard-0 prev_pid=9 prev_prio=120 prev_state=S ==> next_comm=CPU 0/TCG next_pid=17 next_prio=120
        CPU 0/TCG-17      [001] .....   10.000014: sys_write(fd: 0x1a, buf: 0x7f7f, count: 8)
        CPU 0/TCG-17      [001] .....   10.000014: sys_write -> 0x8
          guard-0-9       [001] .....   10.000009: sys_poll(ufds: 0x7f7f, nfds: 0x3, timeout_msecs: 0xffffffff)
        CPU 0/TCG-17      [001] d..2.   10.000015: sched_waking: comm=guard-0 pid=9 prio=120 target_cpu=001
        CPU 0/TCG-17      [001] d..2.   10.002015: sched_switch: prev_comm=CPU 0/TCG prev_pid=17 prev_prio=120 prev_state=R+ ==> next_comm=guard-0 next_pid=9 next_prio=120
";

    #[test]
    fn a_wake_up_is_late_or_soon() {
        let events: Vec<Event> = LINES.lines().filter_map(Event::parse).collect();
        assert_eq!(events.len(), 7);
        assert!(calls(&events, "guard-0-9").ends_with("\npoll                         1\n"));
        assert_eq!(events[3].what, What::Kicks("fd: 0x1a".to_owned()));
        let found = turns(&events, "guard-0-9");
        let rounded = |turn: &Turn| [turn.ran, turn.slept, turn.waited].map(f64::round);
        assert_eq!(found.iter().map(rounded).collect::<Vec<_>>(), [[7.0, 5.0, 2000.0]]);
        assert_eq!(found[0].at, 5);
        assert!(
            table(&found, 1.0)
                .contains("0.5 to 1             1     1       7         5       2000")
        );
        let shown = excerpt(&events, 5, 2);
        assert!(
            shown.ends_with("2000    1  CPU 0/TCG-17 is interrupted, guard-0-9 runs\n"),
            "{shown}"
        );
    }
}
