//! Blocks that describe themselves.
#![allow(missing_docs)]

/// Smallest unit, bytes: a sector.
pub const MIN_UNIT: u32 = 512;
/// Largest unit, bytes.
pub const MAX_UNIT: u32 = 4096;

/// How the blocks of a run look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    unit: u32,
    generation: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// Units that were written in this run.
    pub written: u32,
    /// Units never written (all zero).
    pub empty: u32,
    /// Highest sequence number among the written ones (0 if none).
    pub sequence: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    #[error("the unit at {offset:#x} was never transferred")]
    NotTransferred { offset: u64 },
}

impl Format {
    pub fn for_sizes(sizes: impl IntoIterator<Item = u64>, generation: u32) -> Format {
        let _ = (sizes, generation);
        todo!()
    }
    pub fn unit(&self) -> u32 {
        self.unit
    }
    pub fn generation(&self) -> u32 {
        self.generation
    }
    /// Fills `buf` (whole units) as the block at `offset` of the disk.
    pub fn fill(&self, buf: &mut [u8], offset: u64, sequence: u64) {
        let _ = (buf, offset, sequence);
        todo!()
    }
    pub fn check(&self, buf: &[u8], offset: u64) -> Result<BlockInfo, BlockError> {
        let _ = (buf, offset);
        todo!()
    }
    pub fn poison(&self, buf: &mut [u8]) {
        let _ = buf;
        todo!()
    }
}
