//! Blocks that describe themselves, so that every byte read can be checked.
//!
//! In a comparison many jobs write to the same area of a disk at once: no reader can know which
//! write it will see. So each *unit* of a block (512 to 4096 bytes, the same in a whole run, and a
//! divisor of all its block sizes) has a header that describes it:
//!
//! ```text
//!  0   8 magic       "RFblock2"
//!  8   4 generation  of the run, which distinguishes blocks that an earlier run has left
//! 12   4 length      of the unit
//! 16   8 offset      on the disk, which distinguishes blocks from elsewhere
//! 24   8 sequence    of the write: 1 and up
//! 32     payload     differs with generation, offset and sequence, in every word
//! ```
//!
//! all little-endian. All of the payload follows from the header, so a reader checks each of its
//! bytes. A unit that was never written is all zero, which is checked in full as well.
//! Before a read the buffer is [poisoned](Format::poison), at both ends of each unit: a read that
//! moved nothing, or too little, leaves poison instead of valid data from an earlier read.
//!
//! Filling and checking cost the same under every policy, but must take little of the time that is
//! measured: `cargo test --release -p ringfence-lab -- --nocapture speed` prints what they take.

use ringfence_mem::HostSlice;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout,
    little_endian::{U32, U64},
};

/// Smallest unit, bytes: a sector.
pub const MIN_UNIT: u32 = 512;
/// Largest unit, bytes.
pub const MAX_UNIT: u32 = 4096;

const MAGIC: u64 = u64::from_le_bytes(*b"RFblock2");
/// No unit starts or ends with it: it is neither the magic nor zero, and it is even, while all
/// words of a payload are odd.
const POISON: u64 = u64::from_le_bytes(*b"~unread~");
const HEADER: usize = size_of::<Header>();

/// What a written unit begins with.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
struct Header {
    magic: U64,
    generation: U32,
    length: U32,
    offset: U64,
    sequence: U64,
}

impl Header {
    /// What tells this unit's payload from others. Patterns are even and this is odd, so all words
    /// of a payload are odd: see [`POISON`].
    fn key(&self) -> u64 {
        let generation = u64::from(self.generation.get());
        mix(self.offset.get() ^ mix(self.sequence.get() ^ (generation << 32))) | 1
    }
}

/// The format of a run's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    unit: u32,
    generation: u32,
}

/// What is wrong with a unit that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// The buffer is not a whole number of units.
    #[error("{len} bytes are not a whole number of {unit}-byte units")]
    Length {
        /// Length of the buffer, bytes.
        len: usize,
        /// The unit, bytes.
        unit: u32,
    },
    /// The poison is still there.
    #[error(
        "the read at {offset:#x} reported success but transferred nothing, or not the whole unit"
    )]
    NotTransferred {
        /// Where on the disk.
        offset: u64,
    },
    /// Neither a unit nor zero.
    #[error(
        "the data at {offset:#x} is neither a block of a run nor zeros (first word {first:#018x})"
    )]
    Foreign {
        /// Where on the disk.
        offset: u64,
        /// Its first eight bytes.
        first: u64,
    },
    /// A unit of an earlier run.
    #[error("the block at {offset:#x} was written in run {found}, but this is run {expected}")]
    Generation {
        /// Where on the disk.
        offset: u64,
        /// The generation found.
        found: u32,
        /// This run's.
        expected: u32,
    },
    /// A unit that belongs elsewhere.
    #[error("the block at {offset:#x} belongs at {found:#x}")]
    Misplaced {
        /// Where on the disk.
        offset: u64,
        /// Where it belongs.
        found: u64,
    },
    /// A unit whose payload does not follow from its header: torn, or corrupted.
    #[error("the block at {offset:#x} (write {sequence}) is damaged")]
    Damaged {
        /// Where on the disk.
        offset: u64,
        /// The sequence number in its header.
        sequence: u64,
    },
}

impl Format {
    /// The format for a run whose blocks have these `sizes` and offsets, all multiples of
    /// [`MIN_UNIT`]: the unit is the largest that divides them all.
    pub fn for_sizes(sizes: impl IntoIterator<Item = u64>, generation: u32) -> Format {
        let bits = sizes.into_iter().fold(u64::from(MAX_UNIT), |bits, size| bits | size);
        let unit = 1u64 << bits.trailing_zeros();
        Format { unit: (unit as u32).clamp(MIN_UNIT, MAX_UNIT), generation }
    }

    /// Fills `to`, which may be shared memory, with the block for `offset` of the disk and write
    /// number `sequence`: each unit is made in a buffer and copied.
    ///
    /// # Panics
    /// If `to` is not a whole number of units.
    pub fn fill_piece(&self, to: HostSlice<'_>, offset: u64, sequence: u64) {
        let size = self.unit as usize;
        assert!(to.len().is_multiple_of(size), "{} bytes in units of {size}", to.len());
        let mut unit = [0; MAX_UNIT as usize];
        for (at, offset) in (0..to.len()).step_by(size).zip(self.offsets(offset)) {
            self.fill_unit(&mut unit[..size], offset, sequence);
            to.part(at, size).copy_from(&unit[..size]);
        }
    }

    /// Checks every byte of `from`, which was read from `offset` of the disk and may be shared
    /// memory: each unit is copied to a buffer and checked there.
    pub fn check_piece(&self, from: HostSlice<'_>, offset: u64) -> Result<(), BlockError> {
        let size = self.unit as usize;
        if !from.len().is_multiple_of(size) {
            return Err(BlockError::Length { len: from.len(), unit: self.unit });
        }
        let mut unit = [0; MAX_UNIT as usize];
        for (at, offset) in (0..from.len()).step_by(size).zip(self.offsets(offset)) {
            from.part(at, size).copy_to(&mut unit[..size]);
            self.check_unit(&unit[..size], offset)?;
        }
        Ok(())
    }

    /// Marks memory as not read yet: writes the first and the last word of each unit.
    pub fn poison(&self, to: HostSlice<'_>) {
        let size = self.unit as usize;
        for at in (0..to.len()).step_by(size) {
            let unit = to.part(at, size);
            unit.copy_from(&POISON.to_le_bytes());
            unit.part(unit.len().saturating_sub(8), 8).copy_from(&POISON.to_le_bytes());
        }
    }

    fn offsets(&self, first: u64) -> impl Iterator<Item = u64> + use<> {
        // This ends at 2^64. The callers' zip with the units of a buffer ends first.
        let unit = u64::from(self.unit);
        std::iter::successors(Some(first), move |offset| offset.checked_add(unit))
    }

    fn fill_unit(&self, unit: &mut [u8], offset: u64, sequence: u64) {
        let header = Header {
            magic: MAGIC.into(),
            generation: self.generation.into(),
            length: self.unit.into(),
            offset: offset.into(),
            sequence: sequence.into(),
        };
        let (head, payload) = unit.split_at_mut(HEADER);
        head.copy_from_slice(header.as_bytes());
        let (key, (words, _)) = (header.key(), payload.as_chunks_mut::<8>());
        for (word, pattern) in words.iter_mut().zip(&PATTERN) {
            *word = (pattern ^ key).to_le_bytes();
        }
    }

    /// Accepts what was written here in this run, and what was never written.
    fn check_unit(&self, unit: &[u8], offset: u64) -> Result<(), BlockError> {
        let (header, payload) = Header::ref_from_prefix(unit).expect("no unit is that short");
        let first = header.magic.get();
        if first == POISON || unit.last_chunk() == Some(&POISON.to_le_bytes()) {
            return Err(BlockError::NotTransferred { offset });
        }
        if first != MAGIC {
            let empty = *unit == ZEROS[..unit.len()];
            return if empty { Ok(()) } else { Err(BlockError::Foreign { offset, first }) };
        }
        let (key, (words, _)) = (header.key(), payload.as_chunks::<8>());
        let differs = |(word, pattern): (&[u8; 8], &u64)| u64::from_le_bytes(*word) ^ pattern ^ key;
        // All of them, without a branch for each: that is faster than to stop at the first.
        let different = words.iter().zip(&PATTERN).fold(0, |any, pair| any | differs(pair));
        let sequence = header.sequence.get();
        if different != 0 || sequence == 0 {
            return Err(BlockError::Damaged { offset, sequence });
        }
        let (found, expected) = (header.generation.get(), self.generation);
        if found != expected {
            return Err(BlockError::Generation { offset, found, expected });
        }
        let found = header.offset.get();
        if found != offset || header.length.get() != self.unit {
            return Err(BlockError::Misplaced { offset, found });
        }
        Ok(())
    }
}

/// The pattern of all payloads: word `i` of a payload is `PATTERN[i] ^ key`, with a key of the
/// unit's own.
static PATTERN: [u64; WORDS] = {
    let mut pattern = [0; WORDS];
    let mut index = 0;
    while index < WORDS {
        pattern[index] = mix(index as u64 + 1) & !1;
        index += 1;
    }
    pattern
};

/// What was never written.
static ZEROS: [u8; MAX_UNIT as usize] = [0; MAX_UNIT as usize];

const WORDS: usize = (MAX_UNIT as usize - HEADER) / 8;

/// A bijection that spreads every bit over all (the finaliser of splitmix64).
pub(crate) const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl Format {
        fn fill(&self, buf: &mut [u8], offset: u64, sequence: u64) {
            self.fill_piece(buf.into(), offset, sequence);
        }

        fn check(&self, buf: &[u8], offset: u64) -> Result<BlockInfo, BlockError> {
            self.check_piece((&mut buf.to_vec()[..]).into(), offset)?;
            let mut info = BlockInfo::default();
            for unit in buf.chunks(self.unit as usize) {
                let (header, _) = Header::read_from_prefix(unit).unwrap();
                match header.magic.get() {
                    MAGIC => {
                        info.written += 1;
                        info.sequence = info.sequence.max(header.sequence.get());
                    }
                    _ => info.empty += 1,
                }
            }
            Ok(info)
        }
    }

    /// The contents of a checked buffer.
    #[derive(Debug, Default, PartialEq)]
    struct BlockInfo {
        /// Units that were written in this run.
        written: u32,
        /// Units never written: all zero.
        empty: u32,
        /// Highest sequence number among the written ones (0 if there is none).
        sequence: u64,
    }

    const FORMAT: Format = Format { unit: 4096, generation: 7 };

    fn filled(offset: u64, sequence: u64) -> Vec<u8> {
        let mut buf = vec![0; 16384];
        FORMAT.fill(&mut buf, offset, sequence);
        buf
    }

    #[test]
    fn the_unit_is_the_largest_that_divides_all_sizes() {
        let unit = |sizes: &[u64]| Format::for_sizes(sizes.iter().copied(), 0).unit;
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
    fn a_block_from_elsewhere_or_from_another_run_is_recognised() {
        let buf = filled(65536, 9);
        assert_eq!(FORMAT.check(&buf, 0), Err(BlockError::Misplaced { offset: 0, found: 65536 }));
        let next = Format { generation: 8, ..FORMAT };
        assert!(matches!(next.check(&buf, 65536), Err(BlockError::Generation { found: 7, .. })));
    }

    #[test]
    fn a_read_that_moved_nothing_or_too_little_is_found_out() {
        let mut buf = filled(0, 1);
        FORMAT.poison((&mut buf[..]).into());
        assert_eq!(FORMAT.check(&buf, 0), Err(BlockError::NotTransferred { offset: 0 }));
        buf[..8192 - 512].copy_from_slice(&filled(0, 1)[..8192 - 512]);
        assert_eq!(FORMAT.check(&buf, 0), Err(BlockError::NotTransferred { offset: 4096 }));
        buf.fill(0);
        FORMAT.poison((&mut buf[..]).into());
        buf[..512].fill(0);
        assert_eq!(FORMAT.check(&buf, 0), Err(BlockError::NotTransferred { offset: 0 }));
    }

    #[test]
    fn no_legal_unit_looks_as_if_it_were_never_read() {
        const { assert!(POISON & 1 == 0 && POISON != MAGIC && POISON != 0) };
        assert!(PATTERN.iter().all(|word| word & 1 == 0));
        for word in filled(0, 3)[..4096].as_chunks::<8>().0.iter().skip(HEADER / 8) {
            assert!(word[0] & 1 == 1);
        }
    }

    #[test]
    fn units_of_every_size_are_found_again() {
        for unit in [512, 1024, 2048, 4096] {
            let format = Format { unit, generation: u32::MAX };
            let mut buf = vec![0; 8192];
            format.fill(&mut buf, 1 << 40, u64::MAX);
            assert_eq!(format.check(&buf, 1 << 40).unwrap().written, 8192 / unit);
        }
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
        FORMAT.poison((&mut [0; 5][..]).into());
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

    /// Prints the speed without checking it: machines differ. `--release -- --nocapture speed`.
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
