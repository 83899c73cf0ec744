//! Threads that an input starts and does not join.

use std::{fs, sync::OnceLock, thread};

/// Waits until there are no more threads than before the first input: what a starting or ending
/// thread holds is unreachable for a moment, and would be reported as a leak.
pub(crate) fn await_end<R>(input: impl FnOnce() -> R) -> R {
    static BEFORE: OnceLock<usize> = OnceLock::new();
    let count = || fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    let before = *BEFORE.get_or_init(count);
    let done = input();
    while count() > before {
        thread::yield_now();
    }
    done
}
