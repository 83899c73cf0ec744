//! Threads that an input begins and that nobody joins.

use std::{fs, sync::OnceLock, thread};

/// Waits until there are no more threads than before the first input: what one that begins or ends holds is nowhere to
/// be found for a moment, and is taken for a leak.
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
