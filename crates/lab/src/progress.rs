//! How far a run is: a bar with the time left on a terminal, plain lines elsewhere.
//!
//! All of it goes to stderr: stdout belongs to the report.

use std::{
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;

/// How progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A bar if stderr is a terminal, else a line each time something begins, at most one a second,
    /// for logs.
    Auto,
    /// Not at all (`--json -`).
    Silent,
}

/// The progress of one run of known length. It removes its bar when it is dropped: the run is over, or
/// was stopped.
pub struct Progress {
    /// Counts in any case, and draws nothing unless stderr is a terminal.
    bar: ProgressBar,
    /// Where lines go instead.
    lines: Option<Mutex<Lines>>,
    total: u64,
    expected: Duration,
    state: Mutex<State>,
}

type Lines = Box<dyn Write + Send>;

#[derive(Default)]
struct State {
    /// What the steps that are done should have taken together.
    expected: Duration,
    what: String,
    /// When the last line was printed.
    last: Option<Instant>,
}

/// Lines come no closer than this: a log of a run of many short rounds stays readable.
const BETWEEN_LINES: Duration = Duration::from_secs(1);

impl Progress {
    /// Progress over `total` steps that together should take `expected`.
    pub fn new(kind: Kind, total: u64, expected: Duration) -> Progress {
        let (target, lines): (_, Option<Lines>) = match kind {
            Kind::Silent => (ProgressDrawTarget::hidden(), None),
            Kind::Auto if std::io::stderr().is_terminal() => (ProgressDrawTarget::stderr(), None),
            Kind::Auto => (ProgressDrawTarget::hidden(), Some(Box::new(std::io::stderr()))),
        };
        Progress::shown(target, lines, total, expected)
    }

    fn shown(
        target: ProgressDrawTarget,
        lines: Option<Lines>,
        total: u64,
        expected: Duration,
    ) -> Progress {
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {wide_msg}")
            .expect("the template is well formed");
        let bar = ProgressBar::with_draw_target(Some(total), target)
            .with_style(style.progress_chars("=> "));
        let (lines, state) = (lines.map(Mutex::new), Mutex::default());
        let progress = Progress { bar, lines, total, expected, state };
        progress.show(true);
        progress
    }

    /// What runs now: `randwrite_multi, lazy-mq, round 2 of 5`.
    pub fn begin(&self, what: &str) {
        self.state.lock().what = what.to_owned();
        self.show(false);
    }

    /// One step is done, which should have taken `expected`.
    pub fn step(&self, expected: Duration) {
        {
            let mut state = self.state.lock();
            self.bar.set_position((self.bar.position() + 1).min(self.total));
            state.expected = (state.expected + expected).min(self.expected);
        }
        if self.lines.is_none() {
            self.show(false);
        }
    }

    /// Prints a line, above the bar, unless progress is silent.
    pub fn note(&self, line: &str) {
        match &self.lines {
            Some(out) => print(out, line),
            None => self.bar.println(line),
        }
    }

    /// Hides the bar while `print` writes to a terminal.
    pub fn hidden(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }

    /// Time left, by what was done so far; by what was expected until something is done.
    #[cfg(test)]
    fn left(&self) -> Duration {
        self.left_after(self.bar.elapsed(), self.state.lock().expected)
    }

    fn left_after(&self, elapsed: Duration, done: Duration) -> Duration {
        match done {
            Duration::ZERO => self.expected.saturating_sub(elapsed),
            done => elapsed.mul_f64(self.expected.saturating_sub(done).div_duration_f64(done)),
        }
    }

    fn show(&self, always: bool) {
        let mut state = self.state.lock();
        let left = short(self.left_after(self.bar.elapsed(), state.expected));
        let Some(out) = &self.lines else {
            self.bar.set_message(format!("{left} left  {}", state.what));
            return;
        };
        let soon = state.last.is_some_and(|last| last.elapsed() < BETWEEN_LINES);
        if soon && !always {
            return;
        }
        state.last = (!always).then(Instant::now);
        let (done, total) = (self.bar.position(), self.total);
        match state.what.as_str() {
            "" => print(out, &format!("{total} rounds, about {left}")),
            what => print(out, &format!("[{done}/{total}] {what} ({left} left)")),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn print(out: &Mutex<Lines>, line: &str) {
    // Without a reader: no reason to stop a measurement.
    let _ = writeln!(out.lock(), "{line}");
}

/// `1:05`, `12 s`.
fn short(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    match seconds {
        0..60 => format!("{seconds} s"),
        _ => format!("{}:{:02} min", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn without_a_terminal_there_are_plain_lines() {
        let shared = Shared::default();
        let lines: Lines = Box::new(shared.clone());
        let (target, expected) = (ProgressDrawTarget::hidden(), Duration::from_secs(65));
        let progress = Progress::shown(target, Some(lines), 4, expected);
        progress.begin("a, off, round 1 of 2");
        progress.step(Duration::from_secs(10));
        progress.note("careful");
        drop(progress);
        let text = String::from_utf8(shared.0.lock().clone()).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "4 rounds, about 1:05 min");
        assert!(lines[1].starts_with("[0/4] a, off, round 1 of 2 (1:0"), "{}", lines[1]);
        assert_eq!(lines[2], "careful");
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn the_time_left_follows_what_was_done() {
        let progress = Progress::new(Kind::Silent, 10, Duration::from_secs(100));
        let left = |elapsed, done| {
            progress.left_after(Duration::from_secs(elapsed), Duration::from_secs(done)).as_secs()
        };
        assert_eq!((left(0, 0), left(30, 0), left(200, 0)), (100, 70, 0));
        assert_eq!((left(40, 20), left(100, 100)), (160, 0));
    }

    #[test]
    fn more_steps_than_announced_do_no_harm() {
        let progress = Progress::new(Kind::Silent, 1, Duration::ZERO);
        (0..3).for_each(|_| progress.step(Duration::from_secs(1)));
        assert_eq!(progress.left(), Duration::ZERO);
        let none = Progress::new(Kind::Silent, 0, Duration::ZERO);
        none.step(Duration::ZERO);
        assert_eq!(none.left(), Duration::ZERO);
    }
}
