//! Blocks that describe themselves, so that every byte read can be checked.
//!
//! A disk of a comparison is written by many jobs at once, on one area: no reader can know which
//! write it will see. So each *unit* of a block (512 to 4096 bytes, the same in a whole run, and a
//! divisor of all its block sizes) says what it is:
//!
//! ```text
//!  0   8 magic       "RFblock1"
//!  8   4 generation  of the run: what an earlier run left behind is told apart
//! 12   4 length      of the unit
//! 16   8 offset      on the disk: a block from elsewhere is told apart
//! 24   8 sequence    of the write: 1 and up
//! 32   4 crc         CRC-32C of the whole unit, taken with this field zero
//! 36   4 zero
//! 40     payload     differs with generation, offset and sequence, in every word
//! ```
//!
//! all little-endian. A unit never written is all zero, which is checked in full as well. Before a
//! read the buffer is [poisoned](Format::poison), at both ends of each unit, so that a read that
//! moved nothing, or too little, is found out rather than passing for what lay there before.
//!
//! Filling and checking cost the same under every policy. Together they must not be what is
//! measured: `cargo test --release -p ringfence-lab -- --nocapture speed` prints what they take.

/// Smallest unit, bytes: a sector.
pub const MIN_UNIT: u32 = 512;
/// Largest unit, bytes.
pub const MAX_UNIT: u32 = 4096;

const MAGIC: u64 = u64::from_le_bytes(*b"RFblock1");
/// No unit starts or ends with it: not the magic, not zero, and a payload's last word is odd.
const POISON: u64 = u64::from_le_bytes(*b"~unread~") & !1;
const HEADER: usize = 40;
const CRC_AT: usize = 32;

/// How the blocks of a run look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    unit: u32,
    generation: u32,
}

/// What a checked buffer held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockInfo {
    /// Units that were written in this run.
    pub written: u32,
    /// Units never written: all zero.
    pub empty: u32,
    /// Highest sequence number among the written ones (0 if there is none).
    pub sequence: u64,
}

/// What is wrong with a unit that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// The buffer is no whole number of units.
    #[error("{len} bytes are no whole number of {unit}-byte units")]
    Length {
        /// Length of the buffer, bytes.
        len: usize,
        /// The unit, bytes.
        unit: u32,
    },
    /// The poison is still there.
    #[error("the read of {offset:#x} reported success but moved nothing, or not all, of it")]
    NotTransferred {
        /// Where on the disk.
        offset: u64,
    },
    /// Neither a unit nor zero.
    #[error("at {offset:#x} lies neither a block of ours nor zeros (first word {first:#018x})")]
    Foreign {
        /// Where on the disk.
        offset: u64,
        /// Its first eight bytes.
        first: u64,
    },
    /// A unit of an earlier run.
    #[error("at {offset:#x} lies a block of run {found}, in run {expected}")]
    Generation {
        /// Where on the disk.
        offset: u64,
        /// The generation found.
        found: u32,
        /// This run's.
        expected: u32,
    },
    /// A unit that belongs elsewhere.
    #[error("at {offset:#x} lies the block of {found:#x}")]
    Misplaced {
        /// Where on the disk.
        offset: u64,
        /// Where it belongs.
        found: u64,
    },
    /// A unit whose bytes changed after it was made: torn, or corrupted.
    #[error(
        "the block at {offset:#x} (write {sequence}) is damaged: CRC {found:#010x}, expected {expected:#010x}"
    )]
    Damaged {
        /// Where on the disk.
        offset: u64,
        /// The sequence number it claims.
        sequence: u64,
        /// The CRC its bytes have.
        found: u32,
        /// The CRC it claims.
        expected: u32,
    },
}

impl Format {
    /// The format for a run of blocks of `sizes` (and at offsets) that are multiples of
    /// [`MIN_UNIT`]: the largest unit that divides them all.
    pub fn for_sizes(sizes: impl IntoIterator<Item = u64>, generation: u32) -> Format {
        let bits = sizes.into_iter().fold(u64::from(MAX_UNIT), |bits, size| bits | size);
        let unit = 1u64 << bits.trailing_zeros();
        Format { unit: (unit as u32).clamp(MIN_UNIT, MAX_UNIT), generation }
    }

    /// Bytes of a unit; a power of two.
    pub fn unit(&self) -> u32 {
        self.unit
    }

    /// The run's number.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Makes `buf` the block at `offset` of the disk, by write number `sequence`.
    ///
    /// # Panics
    /// If `buf` is no whole number of units.
    pub fn fill(&self, buf: &mut [u8], offset: u64, sequence: u64) {
        let unit = self.unit as usize;
        assert!(buf.len().is_multiple_of(unit), "{} bytes in units of {unit}", buf.len());
        for (unit, offset) in buf.chunks_exact_mut(unit).zip(self.offsets(offset)) {
            self.fill_unit(unit, offset, sequence);
        }
    }

    /// Checks every byte of `buf`, read from `offset` of the disk.
    pub fn check(&self, buf: &[u8], offset: u64) -> Result<BlockInfo, BlockError> {
        if !buf.len().is_multiple_of(self.unit as usize) {
            return Err(BlockError::Length { len: buf.len(), unit: self.unit });
        }
        let mut info = BlockInfo::default();
        for (unit, offset) in buf.chunks_exact(self.unit as usize).zip(self.offsets(offset)) {
            match self.check_unit(unit, offset)? {
                0 => info.empty += 1,
                sequence => {
                    info.written += 1;
                    info.sequence = info.sequence.max(sequence);
                }
            }
        }
        Ok(info)
    }

    /// Marks `buf` as not read yet. Touches two words of a unit.
    pub fn poison(&self, buf: &mut [u8]) {
        for unit in buf.chunks_mut(self.unit as usize) {
            if let Some(first) = unit.first_chunk_mut() {
                *first = POISON.to_le_bytes();
            }
            if let Some(last) = unit.last_chunk_mut() {
                *last = POISON.to_le_bytes();
            }
        }
    }

    fn offsets(&self, first: u64) -> impl Iterator<Item = u64> + use<> {
        // Offsets on a disk end at 2^64: the zip with the units stops first.
        let unit = u64::from(self.unit);
        std::iter::successors(Some(first), move |offset| offset.checked_add(unit))
    }

    fn fill_unit(&self, unit: &mut [u8], offset: u64, sequence: u64) {
        let length = self.unit;
        let (header, payload) = unit.split_at_mut(HEADER);
        put(header, 0, &MAGIC.to_le_bytes());
        put(header, 8, &self.generation.to_le_bytes());
        put(header, 12, &length.to_le_bytes());
        put(header, 16, &offset.to_le_bytes());
        put(header, 24, &sequence.to_le_bytes());
        put(header, CRC_AT, &[0; 8]);
        // A counter with a step that changes all bytes of a word, from a start of the block's own:
        // no word repeats within a block, and additions are done eight at a time by any compiler.
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let start = mix(offset ^ mix(sequence ^ u64::from(self.generation) << 32));
        let (words, _) = payload.as_chunks_mut::<8>();
        for (index, word) in words.iter_mut().enumerate() {
            *word = start.wrapping_add(STEP.wrapping_mul(index as u64)).to_le_bytes();
        }
        if let Some(last) = words.last_mut() {
            last[0] |= 1;
        }
        let crc = crc32c::crc32c(unit);
        put(unit, CRC_AT, &crc.to_le_bytes());
    }

    /// The sequence number; 0 for a unit never written.
    fn check_unit(&self, unit: &[u8], offset: u64) -> Result<u64, BlockError> {
        let first = u64::from_le_bytes(get(unit, 0));
        if first == POISON || unit.last_chunk() == Some(&POISON.to_le_bytes()) {
            return Err(BlockError::NotTransferred { offset });
        }
        if first != MAGIC {
            return if is_zero(unit) { Ok(0) } else { Err(BlockError::Foreign { offset, first }) };
        }
        let sequence = u64::from_le_bytes(get(unit, 24));
        let expected = u32::from_le_bytes(get(unit, CRC_AT));
        let crc = crc32c::crc32c(&unit[..CRC_AT]);
        let crc = crc32c::crc32c_append(crc, &[0; 4]);
        let found = crc32c::crc32c_append(crc, &unit[CRC_AT + 4..]);
        if found != expected || sequence == 0 {
            return Err(BlockError::Damaged { offset, sequence, found, expected });
        }
        let generation = u32::from_le_bytes(get(unit, 8));
        if generation != self.generation {
            let expected = self.generation;
            return Err(BlockError::Generation { offset, found: generation, expected });
        }
        let place = u64::from_le_bytes(get(unit, 16));
        let length = u32::from_le_bytes(get(unit, 12));
        if place != offset || length != self.unit {
            return Err(BlockError::Misplaced { offset, found: place });
        }
        Ok(sequence)
    }
}

fn put(unit: &mut [u8], at: usize, value: &[u8]) {
    unit[at..at + value.len()].copy_from_slice(value);
}

fn get<const N: usize>(unit: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&unit[at..at + N]);
    value
}

fn is_zero(unit: &[u8]) -> bool {
    let (words, rest) = unit.as_chunks::<8>();
    words.iter().fold(0, |any, word| any | u64::from_ne_bytes(*word)) == 0
        && rest.iter().all(|byte| *byte == 0)
}

/// A bijection that spreads every bit over all (the finaliser of splitmix64).
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FORMAT: Format = Format { unit: 4096, generation: 7 };

    fn filled(offset: u64, sequence: u64) -> Vec<u8> {
        let mut buf = vec![0; 16384];
        FORMAT.fill(&mut buf, offset, sequence);
        buf
    }

    #[test]
    fn the_unit_is_the_largest_that_divides_all_sizes() {
        let unit = |sizes: &[u64]| Format::for_sizes(sizes.iter().copied(), 0).unit();
        assert_eq!(unit(&[65536, 4096, 0]), 4096);
        assert_eq!(unit(&[65536, 3072]), 1024);
        assert_eq!(unit(&[512, 4096]), 512);
        assert_eq!(unit(&[1]), 512);
        assert_eq!(unit(&[]), 4096);
    }

    #[test]
    fn what_was_filled_is_found_again() {
        let info = FORMAT.check(&filled(65536, 9), 65536).unwrap();
        assert_eq!(info, BlockInfo { written: 4, empty: 0, sequence: 9 });
    }

    #[test]
    fn overlapping_writers_leave_legal_blocks() {
        let mut buf = filled(0, 5);
        buf[4096..8192].copy_from_slice(&filled(4096, 8)[..4096]);
        buf[8192..12288].fill(0);
        let info = FORMAT.check(&buf, 0).unwrap();
        assert_eq!(info, BlockInfo { written: 3, empty: 1, sequence: 8 });
    }

    #[test]
    fn a_block_from_elsewhere_or_from_another_run_is_told_apart() {
        let buf = filled(65536, 9);
        assert_eq!(FORMAT.check(&buf, 0), Err(BlockError::Misplaced { offset: 0, found: 65536 }));
        let next = Format { generation: 8, ..FORMAT };
        assert!(matches!(next.check(&buf, 65536), Err(BlockError::Generation { found: 7, .. })));
    }

    #[test]
    fn a_read_that_moved_nothing_or_too_little_is_found_out() {
        let mut buf = filled(0, 1);
        FORMAT.poison(&mut buf);
        assert_eq!(FORMAT.check(&buf, 0), Err(BlockError::NotTransferred { offset: 0 }));
        buf[..8192 - 512].copy_from_slice(&filled(0, 1)[..8192 - 512]);
        assert_eq!(FORMAT.check(&buf, 0), Err(BlockError::NotTransferred { offset: 4096 }));
        buf.fill(0);
        FORMAT.poison(&mut buf);
        buf[..512].fill(0);
        assert_eq!(FORMAT.check(&buf, 0), Err(BlockError::NotTransferred { offset: 0 }));
    }

    #[test]
    fn zeros_are_checked_to_the_last_byte() {
        let mut buf = vec![0; 4096];
        assert_eq!(FORMAT.check(&buf, 0), Ok(BlockInfo { written: 0, empty: 1, sequence: 0 }));
        buf[4095] = 1;
        assert!(matches!(FORMAT.check(&buf, 0), Err(BlockError::Foreign { .. })));
    }

    #[test]
    fn payloads_differ_in_every_word() {
        let words = |buf: Vec<u8>| {
            let (words, _) = buf[HEADER..4096].as_chunks::<8>();
            words[..words.len() - 1].to_vec()
        };
        let (a, b, c) = (words(filled(0, 1)), words(filled(0, 2)), words(filled(4096, 1)));
        for ((a, b), c) in a.iter().zip(&b).zip(&c) {
            assert!(a != b && b != c && a != c);
        }
    }

    #[test]
    fn a_buffer_that_is_no_whole_number_of_units_is_refused() {
        assert!(matches!(FORMAT.check(&[0; 100], 0), Err(BlockError::Length { .. })));
        FORMAT.poison(&mut [0; 5]);
        assert_eq!(FORMAT.check(&[], u64::MAX), Ok(BlockInfo::default()));
    }

    proptest! {
        #[test]
        fn any_changed_bit_is_found(bit in 0usize..16384 * 8, offset in 0u64..1000, seq in 1u64..) {
            let offset = offset * 4096;
            let mut buf = filled(offset, seq);
            buf[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(FORMAT.check(&buf, offset).is_err());
        }

        #[test]
        fn no_bytes_panic(buf in prop::collection::vec(any::<u8>(), 0..2048), offset: u64) {
            let format = Format::for_sizes([512], 0);
            let _ = format.check(&buf, offset);
        }
    }

    /// Prints, judges nothing: machines differ. `--release -- --nocapture speed`.
    #[test]
    fn speed_of_fill_and_check_is_printed() {
        for unit in [512, 4096] {
            let format = Format { unit, generation: 1 };
            let mut buf = vec![0u8; 64 << 10];
            let rounds = if cfg!(debug_assertions) { 16 } else { 20_000 };
            let gb = (rounds * buf.len()) as f64 / 1e9;
            let start = std::time::Instant::now();
            for n in 0..rounds as u64 {
                format.fill(std::hint::black_box(&mut buf), n << 16, n + 1);
            }
            let fill = start.elapsed().as_secs_f64();
            let last = (rounds as u64 - 1) << 16;
            let start = std::time::Instant::now();
            for _ in 0..rounds {
                let info = format.check(std::hint::black_box(&buf), last).expect("as filled");
                assert_eq!(info.sequence, rounds as u64);
            }
            let check = start.elapsed().as_secs_f64();
            println!("unit {unit}: fill {:.1} GB/s, check {:.1} GB/s", gb / fill, gb / check);
        }
    }
}
