//! The scheduler's time slice of a thread that others wait for.

/// The slice that a thread asks for which does little at a time: the shortest that Linux grants. Many
/// answers fit it, and a wake-up costs a fiftieth of it.
const SLICE_NS: u64 = 100_000;

/// `struct sched_attr` in its first size (sched_setattr(2)).
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Has this thread, and those that it starts, run in short slices instead of the 3 ms or so that are
/// usual. Its share of a CPU stays the same. What changes is when it gets it: woken, it takes the CPU
/// from one that has a longer slice at once, where it would otherwise wait for the end of that slice.
///
/// That needs no privilege. It is for threads that answer soon and then sleep. One under a real-time
/// policy, and any before Linux 6.12, stays as it is; false then.
pub fn shorten() -> bool {
    set(SLICE_NS)
}

fn set(slice_ns: u64) -> bool {
    let Some(now) = get() else { return false };
    // SCHED_OTHER and SCHED_BATCH; what others mean by a run time is a promise.
    if now.policy != libc::SCHED_OTHER as u32 && now.policy != libc::SCHED_BATCH as u32 {
        return false;
    }
    let wanted = Attributes { runtime: slice_ns, ..now };
    // SAFETY: the kernel reads as many bytes as the structure says that it has.
    let set = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &wanted, 0) };
    set == 0 && get().is_some_and(|now| now.runtime == slice_ns)
}

fn get() -> Option<Attributes> {
    let size = size_of::<Attributes>();
    let mut now = Attributes::default();
    // SAFETY: the kernel writes no more than `size` bytes, which `now` has.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &mut now, size, 0) };
    (got == 0).then_some(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_is_started_has_the_slice_of_its_parent() {
        std::thread::spawn(|| {
            let before = get().unwrap();
            if !shorten() {
                // An older kernel has no slices; nothing has changed.
                let after = get().unwrap();
                assert_eq!((after.nice, after.policy), (before.nice, before.policy));
                return;
            }
            let child = std::thread::spawn(|| get().unwrap()).join().unwrap();
            assert_eq!((child.runtime, child.nice), (SLICE_NS, before.nice));
        })
        .join()
        .unwrap();
    }
}
