//! A fixed number of bits.

use alloc::vec::Vec;

/// A fixed number of bits, with searches that examine 64 at once.
pub(super) struct Bits {
    words: Vec<u64>,
}

impl Bits {
    /// `len` bits, all clear.
    pub(super) fn new(len: usize) -> Bits {
        Bits { words: alloc::vec![0; len.div_ceil(64)] }
    }

    pub(super) fn get(&self, bit: usize) -> bool {
        self.words.get(bit / 64).is_some_and(|word| word >> (bit % 64) & 1 != 0)
    }

    pub(super) fn set(&mut self, bit: usize) {
        self.words[bit / 64] |= 1 << (bit % 64);
    }

    /// Sets the bits `first..=last`.
    pub(super) fn set_range(&mut self, first: usize, last: usize) {
        self.each_word(first, last, |word, mask| *word |= mask);
    }

    /// Clears the bits `first..=last`.
    pub(super) fn clear_range(&mut self, first: usize, last: usize) {
        self.each_word(first, last, |word, mask| *word &= !mask);
    }

    /// Clears every bit that is set in `other`.
    pub(super) fn clear_all_of(&mut self, other: &Bits) {
        for (word, other) in self.words.iter_mut().zip(&other.words) {
            *word &= !other;
        }
    }

    /// Sets every bit that is set in `other`.
    pub(super) fn set_all_of(&mut self, other: &Bits) {
        for (word, other) in self.words.iter_mut().zip(&other.words) {
            *word |= other;
        }
    }

    /// Clears every bit.
    pub(super) fn clear(&mut self) {
        self.words.fill(0);
    }

    /// The first set bit in `first..=last`.
    pub(super) fn next_set(&self, first: usize, last: usize) -> Option<usize> {
        self.next(first, last, 0)
    }

    /// The first clear bit in `first..=last`.
    pub(super) fn next_clear(&self, first: usize, last: usize) -> Option<usize> {
        self.next(first, last, u64::MAX)
    }

    /// The first bit in `first..=last` that differs from the bits of `plain`.
    fn next(&self, first: usize, last: usize, plain: u64) -> Option<usize> {
        if first > last {
            return None;
        }
        let mut mask = u64::MAX << (first % 64);
        for index in first / 64..=last / 64 {
            let word = (self.words.get(index)? ^ plain) & mask;
            if word != 0 {
                let bit = index * 64 + word.trailing_zeros() as usize;
                return (bit <= last).then_some(bit);
            }
            mask = u64::MAX;
        }
        None
    }

    fn each_word(&mut self, first: usize, last: usize, f: impl Fn(&mut u64, u64)) {
        for index in first / 64..=last / 64 {
            let low = if index == first / 64 { u64::MAX << (first % 64) } else { u64::MAX };
            let high = if index == last / 64 { u64::MAX >> (63 - last % 64) } else { u64::MAX };
            f(&mut self.words[index], low & high);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_reach_across_words_and_stop_at_their_ends() {
        let mut bits = Bits::new(200);
        bits.set_range(60, 130);
        assert_eq!(bits.next_set(0, 199), Some(60));
        assert_eq!(bits.next_set(0, 59), None);
        assert_eq!(bits.next_clear(60, 199), Some(131));
        assert_eq!(bits.next_clear(60, 130), None);
        bits.clear_range(64, 127);
        assert!(bits.get(63) && !bits.get(64) && !bits.get(127) && bits.get(128));
        assert_eq!(bits.next_set(64, 199), Some(128));
        let mut other = Bits::new(200);
        other.set(63);
        bits.clear_all_of(&other);
        assert!(!bits.get(63) && bits.get(62));
        bits.set_all_of(&other);
        assert!(bits.get(63));
        bits.clear();
        assert_eq!(bits.next_set(0, 199), None);
        assert_eq!(bits.next_set(5, 4), None);
        assert!(!bits.get(100_000));
    }
}
