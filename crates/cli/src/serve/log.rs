//! The log of a service, on standard error: one line per event. A thread of its own writes the
//! lines: standard error may block, which must hold up nothing else. Lines of each kind are
//! limited; excess lines are left out and counted ([`mod@limit`]), except for `debug` and `trace`:
//! with those levels all of them are wanted.

mod limit;

use std::{
    fmt::{self, Write as _},
    io::Write,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, Receiver, SyncSender},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use parking_lot::Mutex;
use ringfence_sandbox as sandbox;
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    span::{Attributes, Id, Record},
};

use self::limit::{Kind, Limits};

/// How many lines wait to be written: more than a burst has, some 100 KiB. Lines that find no room
/// are dropped, and counted in the next line that is written.
const ROOM: usize = 1024;
/// How long to wait for the waiting lines when the process ends.
const LAST_LINES: Duration = Duration::from_millis(500);

/// The field of an event that names its source, which is printed before the message.
const SOURCE: &str = "source";

/// Dropped lines that the log has not counted yet.
static DROPPED: AtomicU64 = AtomicU64::new(0);
/// Lines that were dropped or left out so far.
static NOT_LOGGED: AtomicU64 = AtomicU64::new(0);
static LIMITS: Mutex<Limits> = Mutex::new(Limits::new());
/// Whether lines are limited: peers can cause them.
static LIMITED: AtomicBool = AtomicBool::new(false);
static WRITER: OnceLock<SyncSender<Entry>> = OnceLock::new();
/// The queue of lines, until a thread writes them.
static UNWRITTEN: Mutex<Option<Receiver<Entry>>> = Mutex::new(None);

enum Entry {
    Line(String),
    /// All lines before it were written.
    Written(SyncSender<()>),
}

/// Logs everything down to `level` from now on; lines are written once there is [a thread](start)
/// for that. Only the first call has an effect.
pub(crate) fn begin(level: LevelFilter) {
    let (sender, entries) = mpsc::sync_channel(ROOM);
    if WRITER.set(sender).is_ok() {
        *UNWRITTEN.lock() = Some(entries);
        let _ = tracing::subscriber::set_global_default(Lines { level, begun: Instant::now() });
    }
}

/// Starts the thread that writes lines.
pub(crate) fn start() {
    let Some(entries) = UNWRITTEN.lock().take() else { return };
    let named = thread::Builder::new().name("log".into());
    // Without a thread nothing is logged: then there is hardly one to serve with either.
    let _ = named.spawn(move || {
        sandbox::confine(sandbox::Role::Log);
        write(&entries, &mut std::io::stderr());
    });
}

/// From now on the lines of each kind are limited: peers can connect.
pub(crate) fn limit() {
    LIMITED.store(true, Ordering::Relaxed);
}

/// How many lines were not logged so far: over their source's limit, or more than standard error
/// accepts.
pub(crate) fn not_logged() -> u64 {
    NOT_LOGGED.load(Ordering::Relaxed)
}

/// Waits for a while until the pending lines are written.
pub(crate) fn end() {
    // A thread that panics may hold the lock.
    if let Some(mut limits) = LIMITS.try_lock() {
        for (source, count) in limits.rest() {
            let text = beginning(Level::WARN, &source);
            queue(format!("{text}{count} lines were left out: there were too many\n"));
        }
    }
    // Before the writer has started, this thread writes the lines.
    if let Some(entries) = UNWRITTEN.try_lock().and_then(|mut unwritten| unwritten.take()) {
        return write(entries.try_iter(), &mut std::io::stderr());
    }
    let (sender, written) = mpsc::sync_channel(1);
    if let Some(writer) = WRITER.get()
        && writer.try_send(Entry::Written(sender)).is_ok()
    {
        let _ = written.recv_timeout(LAST_LINES);
    }
}

/// Writes entries until their channel is closed.
fn write(entries: impl IntoIterator<Item = Entry>, to: &mut impl Write) {
    for entry in entries {
        match entry {
            // In one call, so that lines of several processes stay whole. A failed write cannot be
            // reported anywhere.
            Entry::Line(line) => _ = to.write_all(line.as_bytes()),
            Entry::Written(done) => _ = done.try_send(()),
        }
        let dropped = DROPPED.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            let _ = writeln!(to, "{dropped} lines were dropped: standard error takes no more");
        }
    }
}

/// Queues a line.
fn queue(line: String) {
    let sent = WRITER.get().map(|writer| writer.try_send(Entry::Line(line)));
    if let Some(Err(_)) = sent {
        DROPPED.fetch_add(1, Ordering::Relaxed);
        NOT_LOGGED.fetch_add(1, Ordering::Relaxed);
    }
}

/// The beginning of a line logged now.
fn beginning(level: Level, source: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut text = timestamp(now.as_millis());
    text.push_str(match level {
        Level::ERROR => " error: ",
        Level::WARN => " warning: ",
        Level::INFO => " ",
        Level::DEBUG => " debug: ",
        Level::TRACE => " trace: ",
    });
    if !source.is_empty() {
        text.push_str(source);
        text.push_str(": ");
    }
    text
}

/// Writes each event as one line. Spans are not used here, and ignored.
struct Lines {
    level: LevelFilter,
    begun: Instant,
}

impl Subscriber for Lines {
    fn enabled(&self, about: &Metadata<'_>) -> bool {
        about.is_event() && *about.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let level = *event.metadata().level();
        // Only the source first: most of a flood of lines is not written.
        let mut source = Line { of_source: true, text: String::new() };
        event.record(&mut source);
        let source = source.text;
        let mut left_out = 0;
        if level <= Level::INFO && LIMITED.load(Ordering::Relaxed) {
            let now_ns = u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
            let admitted = LIMITS.lock().admit(Kind::of(&source, event.metadata()), now_ns);
            let Some(count) = admitted else {
                NOT_LOGGED.fetch_add(1, Ordering::Relaxed);
                return;
            };
            left_out = count;
        }
        let mut line = Line { of_source: false, text: beginning(level, &source) };
        event.record(&mut line);
        let mut text = line.text;
        if left_out > 0 {
            let _ = write!(text, " ({left_out} such lines before it were left out)");
        }
        text.push('\n');
        queue(text);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// A part of an event's line: its source, if it has one, or all but that.
struct Line {
    of_source: bool,
    text: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if (field.name() == SOURCE) != self.of_source {
            return;
        }
        match field.name() {
            SOURCE | "message" => push(&mut self.text, &format!("{value:?}")),
            name => push(&mut self.text, &format!(" {name}={value:?}")),
        }
    }
}

/// Adds text, which may be from a peer, and keeps it on its line.
fn push(line: &mut String, text: &str) {
    for letter in text.chars() {
        match letter.is_control() {
            true => line.extend(letter.escape_default()),
            false => line.push(letter),
        }
    }
}

/// `2026-11-21T23:10:26.123Z`, from milliseconds since 1970.
fn timestamp(ms: u128) -> String {
    let seconds = ms / 1000;
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years that begin with March, so that the leap day is the last (Richards' algorithm).
    let from_march = days + 719_468;
    let (era, day_of_era) = (from_march / 146_097, from_march % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u128::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z", ms % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(timestamp(951_782_399_999), "2000-02-28T23:59:59.999Z");
        assert_eq!(timestamp(951_782_400_000), "2000-02-29T00:00:00.000Z");
        assert_eq!(timestamp(951_868_800_000), "2000-03-01T00:00:00.000Z");
        assert_eq!(timestamp(1_735_689_599_000), "2024-12-31T23:59:59.000Z");
        assert_eq!(timestamp(4_107_542_400_000), "2100-03-01T00:00:00.000Z");
    }

    #[test]
    fn what_is_not_taken_is_dropped_and_counted() {
        let (sender, entries) = mpsc::sync_channel(2);
        let line = |text: &str| Entry::Line(text.into());
        for text in ["a\n", "b\n", "c\n", "d\n"] {
            let dropped = u64::from(sender.try_send(line(text)).is_err());
            DROPPED.fetch_add(dropped, Ordering::Relaxed);
        }
        drop(sender);
        let mut written = Vec::new();
        write(&entries, &mut written);
        let written = String::from_utf8(written).unwrap();
        let expected = "a\n2 lines were dropped: standard error takes no more\nb\n";
        assert_eq!(written, expected);
    }

    #[test]
    fn a_value_does_not_leave_its_line() {
        let mut line = String::new();
        push(&mut line, "a\nb\u{1b}[2J");
        assert_eq!(line, "a\\nb\\u{1b}[2J");
    }
}
