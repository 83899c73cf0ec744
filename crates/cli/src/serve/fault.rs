//! A panic of a thread of this program.

use std::{io::IsTerminal as _, panic};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::low_level;

use super::log;

/// The exit code of a process in which a thread has panicked (`EX_SOFTWARE` of sysexits.h).
pub(crate) const EXIT_CODE: i32 = 70;
/// A writable pipe has room for this many bytes.
const LINE: usize = 512;

/// From now on a thread that panics ends the process, with a line and [`EXIT_CODE`]. Without one of
/// its threads a process no longer serves, and this goes unnoticed; one that ends is restarted, and
/// its guest continues by the record of requests in flight.
pub(crate) fn end_process_on_panic() {
    panic::set_hook(Box::new(|what| {
        log::end();
        let thread = std::thread::current();
        let place = what.location().map_or_else(String::new, ToString::to_string);
        let payload = what.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let why = text.unwrap_or("no reason is given");
        let name = thread.name().unwrap_or("?");
        let mut line = format!("error: a fault of ringfence: thread {name}, {place}: {why}");
        line = line.replace(char::is_control, " ");
        while line.len() >= LINE {
            line.pop();
        }
        line.push('\n');
        let stderr = std::io::stderr();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Waits for nothing, not even for other threads, which may hold any lock.
        if stderr.is_terminal()
            || poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], Some(&now)) == Ok(1)
        {
            let _ = rustix::io::write(&stderr, line.as_bytes());
        }
        low_level::exit(EXIT_CODE);
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_thread_that_panics_ends_the_process() {
        const CHILD: &str = "RINGFENCE_TEST_PANICS";
        if std::env::var_os(CHILD).is_some() {
            end_process_on_panic();
            let worker = std::thread::Builder::new().name("worker-0".into());
            let _ = worker.spawn(|| panic!("a test\nof two lines")).unwrap().join();
            unreachable!("the process has ended");
        }
        let me = std::env::current_exe().unwrap();
        let name = "serve::fault::tests::a_thread_that_panics_ends_the_process";
        let ended =
            Command::new(me).args(["--exact", name, "--nocapture"]).env(CHILD, "1").output();
        let ended = ended.unwrap();
        assert_eq!(ended.status.code(), Some(EXIT_CODE));
        let message = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(message.lines().count(), 1, "{message}");
        let wanted = "error: a fault of ringfence: thread worker-0, ";
        assert!(
            message.starts_with(wanted) && message.ends_with(": a test of two lines\n"),
            "{message}"
        );
    }
}
