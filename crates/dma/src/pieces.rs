//! The pieces of a buffer, and their total size.

use ringfence_iommu::Address;

use crate::{
    Error,
    layout::{Layout, Limits, Run},
};

/// The pieces of a buffer, or of a list of buffers, one after the other.
pub(crate) type Pieces<'a, T> = &'a dyn Fn(&mut dyn FnMut(T, u64));

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
    pieces: Pieces<'_, T>,
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
    pieces(&mut |target, piece| {
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
