//! Makes libraries do early what they would do later: the C library's heap, for one, opens files.

/// Makes libraries do now what they would do later, or not at all.
///
/// All threads share one heap. With several heaps glibc opens /sys to count the CPUs when it makes
/// another, and /proc to read the overcommit mode when one returns memory. The data path allocates
/// nothing, and small pieces come from a per-thread cache.
///
/// rustix looks up the clock once, in what the kernel has passed to the process.
pub(super) fn settle() {
    let _ = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // If inherited, this flag would make all readable memory executable.
    // SAFETY: it sets flags of this process, and there is no other thread.
    unsafe {
        let persona = libc::personality(0xffff_ffff);
        if persona >= 0 && persona & libc::READ_IMPLIES_EXEC != 0 {
            libc::personality((persona & !libc::READ_IMPLIES_EXEC) as libc::c_ulong);
        }
    }
    #[cfg(target_env = "gnu")]
    // SAFETY: it sets a number of the allocator's, and there is no other thread.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
