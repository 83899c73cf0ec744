//! Busy threads beside a run, which compete for the CPUs as other work on the host would.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use ringfence_dma::{OsThreadClock, ThreadClock};

/// Iterations between two reads of the thread's clock, which is a system call: some 20 µs.
const SPINS: u32 = 10_000;

/// Threads that never wait. They end when this is dropped.
#[derive(Debug)]
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    /// Each with its CPU time so far.
    threads: Vec<(Arc<AtomicU64>, JoinHandle<()>)>,
}

impl Load {
    /// Starts `count` threads with the default scheduling policy and slice.
    ///
    /// # Errors
    /// No thread is left.
    pub(crate) fn start(count: u32) -> std::io::Result<Load> {
        let mut load = Load { stop: Arc::default(), threads: Vec::new() };
        for number in 0..count {
            let (stop, cpu_ns) = (Arc::clone(&load.stop), Arc::<AtomicU64>::default());
            let written = Arc::clone(&cpu_ns);
            let thread = std::thread::Builder::new().name(format!("load-{number}"));
            let thread = thread.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    (0..SPINS).for_each(|spin| _ = std::hint::black_box(spin));
                    written.store(OsThreadClock.thread_ns(), Ordering::Relaxed);
                }
            })?;
            load.threads.push((cpu_ns, thread));
        }
        Ok(load)
    }

    /// The share of `elapsed` in which the threads ran, given their CPU time in it: 1 if each had a
    /// CPU of its own throughout. `None` without threads.
    pub(crate) fn cpu_share(&self, cpu_ns: u64, elapsed: Duration) -> Option<f64> {
        let most_ns = elapsed.as_nanos() as f64 * self.threads.len() as f64;
        (most_ns > 0.0).then(|| cpu_ns as f64 / most_ns)
    }

    /// The CPU time of all threads so far, in ns.
    pub(crate) fn cpu_ns(&self) -> u64 {
        self.threads.iter().map(|(cpu_ns, _)| cpu_ns.load(Ordering::Relaxed)).sum()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for (_, thread) in self.threads.drain(..) {
            // The thread cannot panic.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_takes_cpu_time_and_ends() {
        assert_eq!(Load::start(0).unwrap().cpu_ns(), 0);
        assert_eq!(Load::start(0).unwrap().cpu_share(0, Duration::from_secs(1)), None);
        let load = Load::start(2).unwrap();
        assert_eq!(load.cpu_share(500, Duration::from_nanos(500)), Some(0.5));
        let begun = load.cpu_ns();
        while load.cpu_ns() < begun + 1_000_000 {
            std::thread::yield_now();
        }
    }
}
