//! What a disk holds: blocks of which every byte follows from their number and their last write.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    os::unix::fs::FileExt,
};

/// Bytes of a block, of which a request moves one or several.
pub const BLOCK: usize = 4096;
const WORDS: usize = BLOCK / 8;
/// How many bodies there are: of that many blocks and buffers each has its own.
const BODIES: u64 = 1 << 12;

/// What each block of a disk holds.
///
/// The first word of a block is its number, the second the stamp of its last write, the last one the
/// stamp's complement; what lies between follows from the stamp.
#[derive(Clone, Debug)]
pub struct Content {
    stamps: Box<[u64]>,
    writes: u64,
    next: u64,
}

impl Content {
    /// The content of `blocks` blocks, a power of two, as [`fill`](Self::fill) writes them.
    ///
    /// # Panics
    /// If `blocks` is no power of two.
    pub fn new(blocks: u64) -> Content {
        assert!(blocks.is_power_of_two(), "so that every block has its turn");
        Content { stamps: (0..blocks).map(|block| block % BODIES).collect(), writes: 0, next: 0 }
    }

    /// How many blocks there are.
    pub fn blocks(&self) -> u64 {
        self.stamps.len() as u64
    }

    /// Writes all of it.
    ///
    /// # Errors
    /// As the file's.
    pub fn fill(&self, file: &File) -> io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, file);
        for (block, stamp) in self.stamps.iter().enumerate() {
            out.write_all(&bytes(block as u64, *stamp))?;
        }
        out.flush()
    }

    /// How many of the blocks that a walk of step `step` visits hold something else than they
    /// should.
    ///
    /// # Errors
    /// As the file's.
    pub fn wrong_in(&self, file: &File, step: usize) -> io::Result<u64> {
        let mut wrong = 0;
        for block in (0..self.blocks()).step_by(step.max(1)) {
            let mut found = [0; BLOCK];
            file.read_exact_at(&mut found, block * BLOCK as u64)?;
            wrong += u64::from(found != bytes(block, self.stamps[block as usize]));
        }
        Ok(wrong)
    }

    /// The next `span` blocks at random, a power of two and aligned to it: none come again before all others
    /// came.
    #[inline]
    pub(super) fn pick(&mut self, span: u64) -> u64 {
        // Of full period: the factor is 1 modulo 4, the summand odd.
        self.next =
            self.next.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.next & (self.blocks() / span - 1)) * span
    }

    /// The stamp of a new write of `block` from a buffer with this body.
    #[inline]
    pub(super) fn write(&mut self, block: u64, body: u64) -> u64 {
        self.writes += 1;
        let stamp = self.writes * BODIES + body % BODIES;
        self.stamps[block as usize] = stamp;
        stamp
    }

    #[inline]
    pub(super) fn stamp(&self, block: u64) -> u64 {
        self.stamps[block as usize]
    }
}

/// The first two words of a block, and its last.
#[inline]
pub(super) fn ends(block: u64, stamp: u64) -> ([u8; 16], [u8; 8]) {
    let mut head = [0; 16];
    head[..8].copy_from_slice(&block.to_le_bytes());
    head[8..].copy_from_slice(&stamp.to_le_bytes());
    (head, (!stamp).to_le_bytes())
}

/// A whole block.
pub(super) fn bytes(block: u64, stamp: u64) -> [u8; BLOCK] {
    let mut out = [0; BLOCK];
    let (words, _) = out.as_chunks_mut::<8>();
    let body = stamp % BODIES + 1;
    for (at, word) in words.iter_mut().enumerate().take(WORDS - 1).skip(2) {
        let value = (body * WORDS as u64 + at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        *word = value.to_le_bytes();
    }
    let (head, tail) = ends(block, stamp);
    out[..16].copy_from_slice(&head);
    out[BLOCK - 8..].copy_from_slice(&tail);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_that_is_wrong_is_found_and_so_is_an_older_write() {
        let file = tempfile::tempfile().unwrap();
        let mut content = Content::new(64);
        content.fill(&file).unwrap();
        assert_eq!(content.wrong_in(&file, 1).unwrap(), 0);
        file.write_all_at(&[0], 3 * BLOCK as u64 + 1234).unwrap();
        assert_eq!(content.wrong_in(&file, 1).unwrap(), 1);
        assert_eq!(content.wrong_in(&file, 2).unwrap(), 0, "block 3 is not looked at");
        let stamp = content.write(5, 9);
        assert_eq!(content.wrong_in(&file, 1).unwrap(), 2);
        file.write_all_at(&bytes(5, stamp), 5 * BLOCK as u64).unwrap();
        assert_eq!(content.wrong_in(&file, 1).unwrap(), 1);
    }

    #[test]
    fn no_block_comes_twice_before_all_came() {
        let mut content = Content::new(256);
        for _ in 0..3 {
            let mut picked: Vec<u64> = (0..256).map(|_| content.pick(1)).collect();
            picked.sort_unstable();
            assert!(picked.into_iter().eq(0..256));
        }
    }

    #[test]
    fn every_block_differs_from_every_other_in_every_part() {
        let (a, b) = (bytes(1, 1), bytes(2, 2));
        assert!(a.chunks(8).zip(b.chunks(8)).all(|(a, b)| a != b));
    }
}
