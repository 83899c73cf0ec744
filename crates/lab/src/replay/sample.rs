//! A recording for tests.

use super::stream::{Derivation, Stamp, Stream};

/// 40 buffers of 1, 2, 3 and 4 scattered pages in turn, the first 20 of them unmapped again: 20
/// allocations of 50 mappings, and 50 mappings that stay. Two domains, two CPUs, 12 ms.
pub(super) fn stream() -> Stream {
    let mut derivation = Derivation::default();
    let mut time_us = 0;
    let mut stamp = || {
        time_us += 100;
        Stamp { time_ns: Some(1_000_000_000 + time_us * 1000), cpu: (time_us / 100 % 2) as u16 }
    };
    let place = |buffer: u64| ((buffer % 2) as u32, 0x1_0000 + buffer * 0x4000);
    for buffer in 0..40u64 {
        let (domain, first) = place(buffer);
        for page in 0..=buffer % 4 {
            let from = first + page * 0x1000;
            derivation.map(domain, from, from + 0xfff, 0x8000_0000 - from, stamp());
        }
        if buffer >= 20 {
            let (domain, first) = place(buffer - 20);
            derivation.unmap(domain, first, first + 0x3fff, false, stamp());
        }
    }
    derivation.finish()
}
