//! Random numbers that are the same in every run of the program.

use crate::block::mix;

/// splitmix64.
#[derive(Clone, Debug)]
pub(crate) struct SplitMix(pub(crate) u64);

/// xorshift64, which never leaves 0: cheap enough to be drawn between two operations that are timed.
#[derive(Clone, Debug)]
pub(crate) struct XorShift(pub(crate) u64);

impl SplitMix {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Below `n`, which is not 0.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        scaled(self.next(), n)
    }

    /// A place among `n`.
    pub(crate) fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }
}

impl XorShift {
    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Below `n`, all but equally likely.
    #[inline]
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        scaled(self.next(), n)
    }

    /// Fisher and Yates.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at as u64 + 1) as usize);
        }
    }
}

/// The upper half of a product: no remainder, whose lowest values would be favoured. The bias of at most `n`
/// in 2^64 is not seen in any run.
#[inline]
fn scaled(random: u64, n: u64) -> u64 {
    ((u128::from(random) * u128::from(n)) >> 64) as u64
}
