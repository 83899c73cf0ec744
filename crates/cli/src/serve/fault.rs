//! A panic of a thread ends the process.

use std::panic;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::low_level;

use super::log;

/// The exit code of a process in which a thread has panicked (`EX_SOFTWARE` of sysexits.h).
pub(crate) const EXIT_CODE: i32 = 70;
/// The longest line, in bytes: what fits a pipe that is writable (POSIX's minimum of PIPE_BUF).
const MAX_LINE: usize = 512;

/// From now on a panic of any thread ends the process, with a line on standard error and
/// [`EXIT_CODE`]. A process that has lost a thread would hang without notice; one that has ended is
/// restarted by its service manager, and the guest continues by the record of requests in flight.
pub(crate) fn end_process_on_panic() {
    panic::set_hook(Box::new(|info| {
        log::end();
        let thread = std::thread::current();
        let place = info.location().map_or_else(String::new, ToString::to_string);
        let payload = info.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let why = text.unwrap_or("no message");
        let name = thread.name().unwrap_or("?");
        let mut line = format!("error: thread {name} of ringfence panicked at {place}: {why}");
        line = line.replace(char::is_control, " ");
        while line.len() >= MAX_LINE {
            line.pop();
        }
        line.push('\n');
        let stderr = std::io::stderr();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // This thread must not block, nor take a lock, which another thread may hold: a line that
        // would block is left out.
        if poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], Some(&now)) == Ok(1) {
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
        let wanted = "error: thread worker-0 of ringfence panicked at ";
        assert!(
            message.starts_with(wanted) && message.ends_with(": a test of two lines\n"),
            "{message}"
        );
    }
}
