//! The bottom of the tree: words, and what fits into them.

use core::ops::ControlFlow;

use super::{FAN, Natural, Sum, WORD_BITS, runs, sum};

/// 16 words; a set bit is a free granule.
#[derive(Clone)]
pub(super) struct Leaf {
    words: [u64; FAN],
    fits: [u8; FAN],
    prefixes: [u8; FAN],
}

impl Leaf {
    /// A leaf that is wholly free or wholly taken.
    pub(super) fn new(free: bool) -> Leaf {
        let (word, fit) = if free { (u64::MAX, 64) } else { (0, 0) };
        Leaf { words: [word; FAN], fits: [fit; FAN], prefixes: [fit; FAN] }
    }

    pub(super) fn set(&mut self, low: usize, high: usize, free: bool) -> Sum {
        for index in low >> WORD_BITS..=high >> WORD_BITS {
            let start = if index == low >> WORD_BITS { low & 63 } else { 0 };
            let end = if index == high >> WORD_BITS { high & 63 } else { 63 };
            let mask = (u64::MAX >> (63 - end)) & (u64::MAX << start);
            let word = if free { self.words[index] | mask } else { self.words[index] & !mask };
            self.words[index] = word;
            (self.fits[index], self.prefixes[index]) = (word_fit(word), word_prefix(word));
        }
        sum(&self.fits, &self.prefixes, WORD_BITS)
    }

    pub(super) fn highest(&self, wanted: &Natural, limit: u64) -> Option<u64> {
        if wanted.order > WORD_BITS {
            return runs(&self.prefixes, WORD_BITS, wanted)
                .find(|place| place + (wanted.count - 1) <= limit);
        }
        let top = (limit >> WORD_BITS) as usize;
        (0..=top.min(FAN - 1)).rev().find_map(|index| {
            if u64::from(self.fits[index]) < wanted.count {
                return None;
            }
            let mut places = places(self.words[index], wanted);
            if index == top {
                // Those that end at or below the limit.
                let last = (limit & 63).checked_sub(wanted.count - 1)?;
                places &= u64::MAX >> (63 - last);
            }
            let place = places.checked_ilog2()?;
            Some(((index as u64) << WORD_BITS) + u64::from(place))
        })
    }

    pub(super) fn lowest(&self, wanted: &Natural) -> Option<u64> {
        if wanted.order > WORD_BITS {
            return runs(&self.prefixes, WORD_BITS, wanted).last();
        }
        let index = self.fits.iter().position(|fit| u64::from(*fit) >= wanted.count)?;
        let place = places(self.words[index], wanted).trailing_zeros();
        Some(((index as u64) << WORD_BITS) + u64::from(place))
    }

    pub(super) fn visit<B>(
        &self,
        base: u64,
        first: u64,
        last: u64,
        run: &mut dyn FnMut(u64, u64) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        let (low, high) = ((first - base) as usize, (last - base) as usize);
        for index in low >> WORD_BITS..=high >> WORD_BITS {
            let start = if index == low >> WORD_BITS { low & 63 } else { 0 };
            let end = if index == high >> WORD_BITS { high & 63 } else { 63 };
            let mut rest = self.words[index] & (u64::MAX >> (63 - end)) & (u64::MAX << start);
            while rest != 0 {
                let from = rest.trailing_zeros();
                let length = (!(rest >> from)).trailing_zeros();
                let at = base + ((index as u64) << WORD_BITS) + u64::from(from);
                run(at, at + u64::from(length - 1))?;
                rest &= u64::MAX.checked_shl(from + length).unwrap_or(0);
            }
        }
        ControlFlow::Continue(())
    }
}

/// Every bit that is a multiple of 2^order.
const fn every(order: u32) -> u64 {
    const EVERY: [u64; 7] = [
        u64::MAX,
        0x5555_5555_5555_5555,
        0x1111_1111_1111_1111,
        0x0101_0101_0101_0101,
        0x0001_0001_0001_0001,
        0x0000_0001_0000_0001,
        1,
    ];
    EVERY[order as usize]
}

/// The places in a word where a request fits, aligned, as a bit each.
pub(super) fn places(word: u64, wanted: &Natural) -> u64 {
    // The starts of runs of `done` free granules, until there are enough.
    let (mut starts, mut done) = (word, 1);
    while done < wanted.count {
        let step = done.min(wanted.count - done);
        starts &= starts >> step;
        done += step;
    }
    starts & every(wanted.order)
}

/// The fit of a word.
pub(super) fn word_fit(word: u64) -> u8 {
    if word == u64::MAX {
        return 64;
    }
    // The largest order with a free aligned block.
    let (mut blocks, mut order) = (word, 0);
    while order < WORD_BITS {
        let larger = blocks & (blocks >> (1 << order)) & every(order + 1);
        if larger == 0 {
            break;
        }
        (blocks, order) = (larger, order + 1);
    }
    if word == 0 {
        return 0;
    }
    // The blocks that could start a request of the next order: how far they extend.
    let mut starts = blocks & every((order + 1).min(WORD_BITS));
    let mut fit = 1 << order;
    while starts != 0 {
        let start = starts.trailing_zeros();
        fit = fit.max((!(word >> start)).trailing_zeros());
        starts &= starts - 1;
    }
    fit as u8
}

pub(super) fn word_prefix(word: u64) -> u8 {
    (!word).trailing_zeros() as u8
}
