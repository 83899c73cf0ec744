//! Threads that start together, each on a CPU of its own.
//!
//! Ordering: threads wait for a number.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The CPUs that this process may use, in order.
pub fn cpus() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return vec![0] };
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect();
    if cpus.is_empty() { vec![0] } else { cpus }
}

/// Runs `work` on each of `parts` in a thread of its own, each bound to the next of `cpus`. No
/// thread begins its work before all have started. The results are in the order of the parts.
///
/// # Panics
/// If a thread panics.
pub fn together<T: Send, R: Send>(
    cpus: &[usize],
    parts: Vec<T>,
    work: impl Fn(usize, T) -> R + Sync,
) -> Vec<R> {
    let (missing, work) = (&AtomicUsize::new(parts.len()), &work);
    thread::scope(|scope| {
        let threads: Vec<_> = parts
            .into_iter()
            .enumerate()
            .map(|(index, part)| {
                scope.spawn(move || {
                    if let Some(cpu) = cpus.get(index % cpus.len().max(1)) {
                        pin(*cpu);
                    }
                    missing.fetch_sub(1, Ordering::AcqRel);
                    let mut spins = 0u32;
                    while missing.load(Ordering::Acquire) > 0 {
                        spins = spins.wrapping_add(1);
                        // More threads than CPUs: the missing one may need this one's.
                        if spins.is_multiple_of(1024) {
                            thread::yield_now()
                        } else {
                            std::hint::spin_loop()
                        }
                    }
                    work(index, part)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Binds this thread to `cpu`; where that is not allowed, the scheduler places it.
fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    let _ = sched_setaffinity(None, &set);
}

/// Runs `work` with this thread bound to `cpu`, and restores the thread's CPUs afterwards. Threads
/// and processes that `work` starts inherit the binding.
pub fn bound_to<R>(cpu: usize, work: impl FnOnce() -> R) -> R {
    let before = sched_getaffinity(None);
    pin(cpu);
    let result = work();
    if let Ok(before) = before {
        let _ = sched_setaffinity(None, &before);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_runs_on_its_cpu_and_results_are_in_order() {
        let cpus = cpus();
        let results = together(&cpus, vec![10, 20, 30], |index, part| {
            (index, part, rustix::thread::sched_getcpu())
        });
        for (index, result) in results.into_iter().enumerate() {
            assert_eq!(result, (index, (index + 1) * 10, cpus[index % cpus.len()]));
        }
    }

    #[test]
    fn a_thread_is_bound_for_a_while() {
        let before = cpus();
        let last = *before.last().unwrap();
        assert_eq!(bound_to(last, cpus), [last]);
        assert_eq!(cpus(), before);
    }
}
