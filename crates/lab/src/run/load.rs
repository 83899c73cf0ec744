//! Busy threads beside a run, as other work on the same host would be.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use ringfence_dma::{OsThreadClock, ThreadClock};

/// Turns between two looks at the clock, which is a system call: some 20 µs.
const TURNS: u32 = 10_000;

/// Threads that never wait. They end when this is dropped.
#[derive(Debug)]
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
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
                    (0..TURNS).for_each(|turn| _ = std::hint::black_box(turn));
                    written.store(OsThreadClock.thread_ns(), Ordering::Relaxed);
                }
            })?;
            load.threads.push((cpu_ns, thread));
        }
        Ok(load)
    }

    /// The part of `elapsed` that the threads ran for, `cpu_ns` altogether: 1 if each had a CPU of its
    /// own all the while. `None` without any.
    pub(crate) fn part(&self, cpu_ns: u64, elapsed: Duration) -> Option<f64> {
        let all = elapsed.as_nanos() as f64 * self.threads.len() as f64;
        (all > 0.0).then(|| cpu_ns as f64 / all)
    }

    /// CPU time of all of them so far, ns.
    pub(crate) fn cpu_ns(&self) -> u64 {
        self.threads.iter().map(|(cpu_ns, _)| cpu_ns.load(Ordering::Relaxed)).sum()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for (_, thread) in self.threads.drain(..) {
            // It cannot panic.
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
        assert_eq!(Load::start(0).unwrap().part(0, Duration::from_secs(1)), None);
        let load = Load::start(2).unwrap();
        assert_eq!(load.part(500, Duration::from_nanos(500)), Some(0.5));
        let begun = load.cpu_ns();
        while load.cpu_ns() < begun + 1_000_000 {
            std::thread::yield_now();
        }
    }
}
