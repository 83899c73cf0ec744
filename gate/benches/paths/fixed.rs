//! What differs from run to run or from machine to machine, replaced by what does not.

use std::{ffi::c_void, sync::Arc};

use ringfence_dma::{Environment, ThreadClock};
use ringfence_sync::{
    clock::{Clock, ManualClock},
    cpu::FixedCpu,
};

/// How many CPUs per-CPU structures are made for.
const CPUS: usize = 4;

/// A machine of a fixed number of CPUs, on the first of which everything runs.
pub(crate) fn cpus() -> FixedCpu {
    FixedCpu::new(CPUS)
}

/// Thread time that passes as a clock does.
struct ThreadTime(Arc<ManualClock>);

impl ThreadClock for ThreadTime {
    fn thread_ns(&self) -> u64 {
        self.0.now_ns()
    }
}

/// The CPUs of [`cpus`], and a clock that each reading moves by a microsecond.
pub(crate) fn environment() -> Environment {
    let clock = Arc::new(ManualClock::stepping(1000));
    let thread_clock = Arc::new(ThreadTime(Arc::clone(&clock)));
    Environment { clock, cpu: Arc::new(cpus()), thread_clock }
}

/// Numbers without a visible order, the same in each run.
pub(crate) const fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Replaces the C library's function in this program. The standard library seeds its hash maps from
/// it: with these seeds, entries collide in the same way in every run.
///
/// # Safety
/// `buffer` is valid for writes of `len` bytes.
// SAFETY: the name and the signature are those of the C library's function, and the contract is its
// own: it fills the buffer and returns how many bytes it has written.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut c_void, len: usize, _flags: u32) -> isize {
    // SAFETY: the caller promises that the bytes are valid for writes.
    unsafe { buffer.cast::<u8>().write_bytes(0x5a, len) };
    len.cast_signed()
}
