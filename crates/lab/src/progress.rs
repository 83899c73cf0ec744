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

/// The progress of one run of known length.
pub struct Progress {
    face: Face,
    total: u64,
    expected: Duration,
    started: Instant,
    state: Mutex<State>,
}

enum Face {
    Bar(ProgressBar),
    Lines(Mutex<Box<dyn Write + Send>>),
    Silent,
}

#[derive(Default)]
struct State {
    done: u64,
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
        let face = match kind {
            Kind::Silent => Face::Silent,
            Kind::Auto if std::io::stderr().is_terminal() => Face::Bar(bar(total)),
            Kind::Auto => Face::Lines(Mutex::new(Box::new(std::io::stderr()))),
        };
        Progress::with_face(face, total, expected)
    }

    fn with_face(face: Face, total: u64, expected: Duration) -> Progress {
        let progress = Progress {
            face,
            total,
            expected,
            started: Instant::now(),
            state: Mutex::new(State::default()),
        };
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
            state.done = (state.done + 1).min(self.total);
            state.expected = (state.expected + expected).min(self.expected);
        }
        match &self.face {
            Face::Bar(_) => self.show(false),
            Face::Lines(_) | Face::Silent => {}
        }
    }

    /// Prints a line, above the bar, unless progress is silent.
    pub fn note(&self, line: &str) {
        match &self.face {
            Face::Bar(bar) => bar.println(line),
            Face::Lines(out) => print(out, line),
            Face::Silent => {}
        }
    }

    /// Hides the bar while `print` writes to a terminal.
    pub fn hidden(&self, print: impl FnOnce()) {
        match &self.face {
            Face::Bar(bar) => bar.suspend(print),
            Face::Lines(_) | Face::Silent => print(),
        }
    }

    /// The run is over, or was stopped: removes the bar.
    pub fn finish(&self) {
        if let Face::Bar(bar) = &self.face {
            bar.finish_and_clear();
        }
    }

    /// Time left, by what was done so far; by what was expected until something is done.
    #[cfg(test)]
    fn left(&self) -> Duration {
        self.left_after(self.started.elapsed(), self.state.lock().expected)
    }

    fn left_after(&self, elapsed: Duration, done: Duration) -> Duration {
        match done {
            Duration::ZERO => self.expected.saturating_sub(elapsed),
            done => elapsed.mul_f64(self.expected.saturating_sub(done).div_duration_f64(done)),
        }
    }

    fn show(&self, always: bool) {
        let mut state = self.state.lock();
        let left = self.left_after(self.started.elapsed(), state.expected);
        match &self.face {
            Face::Bar(bar) => {
                bar.set_position(state.done);
                bar.set_message(format!("{} left  {}", short(left), state.what));
            }
            Face::Lines(out) => {
                let soon = state.last.is_some_and(|last| last.elapsed() < BETWEEN_LINES);
                if soon && !always {
                    return;
                }
                state.last = (!always).then(Instant::now);
                let line = match state.what.as_str() {
                    "" => format!("{} rounds, about {}", self.total, short(left)),
                    what => {
                        format!("[{}/{}] {what} ({} left)", state.done, self.total, short(left))
                    }
                };
                print(out, &line);
            }
            Face::Silent => {}
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

fn bar(total: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {wide_msg}")
        .expect("the template is well formed");
    bar.set_style(style.progress_chars("=> "));
    bar
}

fn print(out: &Mutex<Box<dyn Write + Send>>, line: &str) {
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
        let face = Face::Lines(Mutex::new(Box::new(shared.clone())));
        let progress = Progress::with_face(face, 4, Duration::from_secs(65));
        progress.begin("a, off, round 1 of 2");
        progress.step(Duration::from_secs(10));
        progress.note("careful");
        progress.finish();
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
