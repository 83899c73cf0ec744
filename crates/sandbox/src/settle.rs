//! What libraries do by themselves later: the C library's heap, for one, opens files.

/// Has libraries do now what they would do later, or not at all.
///
/// All threads share one heap. With several heaps glibc opens /sys to count the CPUs when it makes another, and /proc to
/// see how memory is committed when it gives memory of one back. The path of data allocates nothing, and small pieces
/// come from a cache of the thread's own.
///
/// rustix looks once for the clock in what the kernel has passed to the process.
pub(super) fn settle() {
    let _ = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Inherited, it would have all memory that is read be executable.
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
