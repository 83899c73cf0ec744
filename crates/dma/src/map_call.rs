//! The parameters of a map call, and its failure.

use core::panic::Location;

use ringfence_iommu::Address;

use crate::{
    Direction, DmaBuffer, Error,
    bounce::Bytes,
    layout::{Layout, Limits, Run},
};

/// When the mappings of a map call are synced, if the policy leaves that open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sync {
    /// At the end of the call.
    Now,
    /// By the caller, together with others.
    Later,
}

/// The pieces of a buffer, taken together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    /// The bytes of address space that they need.
    pub(crate) size: u64,
    /// Their length in bytes.
    pub(crate) len: u64,
    /// How many there are, counting pieces that are adjacent in memory as one.
    pub(crate) runs: u64,
    /// Whether they fill their granules, so that there is nothing else in these.
    pub(crate) fills: bool,
}

/// Measures the pieces.
pub(crate) fn measure<T: Address>(
    limits: Limits,
    buffer: &dyn DmaBuffer<T>,
) -> Result<Measured, Error> {
    let mut layout = Layout::new(limits);
    let mut len = 0u64;
    let (mut runs, mut fills) = (0, true);
    let mut count = |run: Run| {
        runs += 1;
        fills &= limits.fills_granules(run.target, run.len);
        Ok(())
    };
    let mut result = Ok(());
    buffer.for_each_segment(&mut |target, piece| {
        if result.is_ok() {
            len = len.saturating_add(piece);
            result = layout.piece(target.as_u64(), piece, &mut count);
        }
    });
    result?;
    let size = layout.finish(&mut count)?;
    // Address space is needed for every byte, so the sum of the bytes cannot pass 2^64 here.
    if size == 0 { Err(Error::Empty) } else { Ok(Measured { size, len, runs, fills }) }
}

/// The lifetime of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lasting {
    /// For one I/O.
    Streaming,
    /// For many I/Os: never a copy, since device and CPU use it without calls in between.
    Long,
}

/// What a map call maps, and the place of the call in the program.
pub(crate) struct Made<B> {
    pub(crate) direction: Direction,
    pub(crate) at: &'static Location<'static>,
    /// How the CPU reaches the bytes of the buffer.
    pub(crate) bytes: Bytes<B>,
}

/// What a map call is to map.
pub(crate) struct MapCall<'a, T: Address> {
    pub(crate) buffer: &'a dyn DmaBuffer<T>,
    pub(crate) direction: Direction,
    pub(crate) at: &'static Location<'static>,
    pub(crate) lasting: Lasting,
    pub(crate) sync: Sync,
}

/// A map call that failed.
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// Whether it was undone completely.
    pub(crate) undone: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed { error, undone: true }
    }
}
