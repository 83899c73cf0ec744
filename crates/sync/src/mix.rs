//! A hash of numbers such as those of pages, in a few instructions.

use core::hash::{BuildHasher, Hasher};

/// Hashes numbers for a table.
///
/// Who does not know the seed cannot choose numbers that collide. With [`default`](Self::default), which has
/// none, anybody can: for numbers that no peer chooses.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    begin: u64,
    factor: u64,
}

/// 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The first digits of pi after the point: numbers that nobody passes as a seed.
const PI: [u64; 2] = [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344];

impl Mix {
    /// A hash with a secret seed.
    pub fn new(seed: u64) -> Mix {
        Mix { begin: fold(seed ^ PI[0], GOLDEN), factor: fold(seed ^ PI[1], GOLDEN) | 1 }
    }
}

impl Default for Mix {
    fn default() -> Mix {
        Mix { begin: 0, factor: GOLDEN }
    }
}

impl BuildHasher for Mix {
    type Hasher = Mixed;

    #[inline]
    fn build_hasher(&self) -> Mixed {
        Mixed { so_far: self.begin, factor: self.factor }
    }
}

/// The hash of what was written so far.
#[derive(Clone, Copy, Debug)]
pub struct Mixed {
    so_far: u64,
    factor: u64,
}

impl Hasher for Mixed {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    #[inline]
    fn write_u64(&mut self, number: u64) {
        self.so_far = fold(self.so_far ^ number, self.factor);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.so_far
    }
}

/// Both halves of the product: each bit of the result depends on all of the factors', those that a table takes
/// its places from too.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The fullest of 2,048 places that `numbers` take, by the low bits and by the high ones.
    fn fullest(mix: Mix, numbers: impl Iterator<Item = u64>) -> [usize; 2] {
        let mut places = [[0; 2048]; 2];
        for number in numbers {
            let hash = mix.hash_one(number);
            places[0][hash as usize % 2048] += 1;
            places[1][(hash >> 53) as usize] += 1;
        }
        places.map(|places| *places.iter().max().unwrap())
    }

    #[test]
    fn numbers_of_any_stride_are_spread() {
        for mix in [Mix::default(), Mix::new(0), Mix::new(1), Mix::new(u64::MAX)] {
            for shift in 0..54 {
                let fullest = fullest(mix, (0..1024u64).map(|number| number << shift));
                assert!(fullest.iter().all(|&most| most <= 32), "{shift}: {fullest:?}");
            }
        }
    }

    #[test]
    fn what_collides_with_one_seed_is_spread_with_another() {
        let chosen: [Mix; 2] = [Mix::default(), Mix::new(7)];
        for mix in chosen {
            let numbers =
                (0..u64::MAX).filter(|&number| mix.hash_one(number) % 2048 == 0).take(512);
            let fullest = fullest(Mix::new(8), numbers);
            assert!(fullest[0] <= 32, "{fullest:?}");
        }
    }

    #[test]
    fn all_that_is_written_counts() {
        let hash = |numbers: [u64; 2]| Mix::default().hash_one(numbers);
        assert_ne!(hash([1, 2]), hash([3, 2]));
        assert_ne!(hash([1, 2]), hash([1, 3]));
    }
}
