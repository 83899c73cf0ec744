//! Thread CPU time.

/// A clock that runs only while the calling thread does.
pub trait ThreadClock: Send + Sync {
    /// The CPU time of the calling thread, in nanoseconds.
    fn thread_ns(&self) -> u64;
}

/// `CLOCK_THREAD_CPUTIME_ID`. A read is a system call of some 100 ns to 200 ns: hence sampling.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsThreadClock;

impl ThreadClock for OsThreadClock {
    fn thread_ns(&self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
    }
}
