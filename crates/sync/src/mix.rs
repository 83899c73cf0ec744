//! A hash of numbers such as those of pages.

use core::hash::Hasher;

/// Spreads a number for a hash table, in a few instructions; always the same way.
///
/// Whoever chooses the numbers can make them collide. A table that a peer fills is therefore bounded, and
/// only that peer's own requests look in it.
#[derive(Default)]
pub struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(self.0 ^ u64::from(byte)));
    }

    #[inline]
    fn write_u64(&mut self, number: u64) {
        // The golden ratio: the high bits of the product depend on all of the number's.
        let product = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}
