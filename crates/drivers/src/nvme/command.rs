//! Commands, their data, and their completions.

use std::{mem::take, ops::Range as Bytes, sync::Arc};

use ringfence_dma::{Direction, DmaBuffer, Persistent, PoolBuffer, Segment};
use ringfence_iommu::HostAddr;

use super::{
    NotSubmitted, Status,
    wire::{Command, io},
};

/// What a command does to a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Op {
    /// Fills the data with blocks from number `lba` on.
    Read {
        /// The first block.
        lba: u64,
    },
    /// Writes the data to blocks from number `lba` on.
    Write {
        /// The first block.
        lba: u64,
    },
    /// Makes everything written before durable. Without data.
    Flush,
    /// Marks these blocks as unused, if [the controller can](crate::nvme::Identity::deallocates).
    /// Without data.
    Deallocate {
        /// The first block.
        lba: u64,
        /// How many.
        blocks: u32,
    },
}

impl Op {
    /// The direction of its data, if it has any.
    pub(super) fn direction(self) -> Option<Direction> {
        match self {
            Op::Read { .. } => Some(Direction::FromDevice),
            Op::Write { .. } => Some(Direction::ToDevice),
            Op::Flush | Op::Deallocate { .. } => None,
        }
    }

    pub(super) fn opcode(self) -> u8 {
        match self {
            Op::Read { .. } => io::READ,
            Op::Write { .. } => io::WRITE,
            Op::Flush => io::FLUSH,
            Op::Deallocate { .. } => io::DATASET,
        }
    }
}

/// The data of a command, which its completion returns.
#[derive(Debug, Default)]
pub enum Data<B> {
    /// Nothing.
    #[default]
    None,
    /// A buffer, mapped for this command under the device's policy. Of several pieces (a `Vec<_>` of
    /// buffers) all but the first begin, and all but the last end, at a multiple of 4 KiB.
    Buffer(B),
    /// Memory of the device's pools, mapped already ([`Device::take_buffer`](ringfence_dma::Device)).
    Pooled(PoolBuffer),
    /// So many bytes, by their offsets, of a buffer that stays mapped.
    ///
    /// The caller must keep others from using those bytes meanwhile.
    Persistent(Arc<Persistent<B>>, Bytes<u64>),
    /// Whatever the controller finds at that address, which belongs to no buffer: for probes of
    /// what it reaches. Refused under policy `off`, where that would be any memory of this process.
    At(Segment),
}

impl<B: DmaBuffer<HostAddr>> Data<B> {
    /// How many bytes.
    pub fn len(&self) -> u64 {
        match self {
            Data::None => 0,
            Data::Buffer(buffer) => buffer.len(),
            Data::Pooled(buffer) => buffer.len(),
            Data::Persistent(_, bytes) => bytes.end.saturating_sub(bytes.start),
            Data::At(segment) => segment.len,
        }
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<B> Data<B> {
    /// The buffer of a [`Data::Buffer`]. `None` for other data, which is dropped.
    pub fn into_buffer(self) -> Option<B> {
        match self {
            Data::Buffer(buffer) => Some(buffer),
            _ => None,
        }
    }
}

/// A command that has ended.
#[derive(Debug)]
pub struct Completion<B> {
    /// The number that it was submitted with.
    pub token: u64,
    /// Its data. The controller no longer reaches it, as far as the device's policy ensures that.
    pub data: Data<B>,
    /// How it ended.
    pub outcome: Result<(), Failure>,
}

/// Why a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The controller reports an error: a status other than success.
    #[error("the controller reports: {0}")]
    Status(Status),
    /// The command was never submitted to the controller.
    #[error(transparent)]
    NotSubmitted(#[from] NotSubmitted),
    /// The controller was stopped while the command was in flight: it may have been carried out, or
    /// in part.
    #[error("the controller was stopped meanwhile")]
    Abandoned,
}

/// A command that was not submitted.
#[derive(Debug)]
pub struct Refused<B> {
    /// Why.
    pub why: NotSubmitted,
    /// Its data. `None`: it could not be unmapped again, and is leaked.
    pub data: Option<Data<B>>,
}

/// A queue's record of a command, whose number is that of its transfer.
pub(super) struct Noted<B> {
    pub(super) token: u64,
    /// Complete except for its data.
    pub(super) command: Command,
    /// Data that need not be mapped.
    pub(super) kept: Data<B>,
    /// How it ended, once it has.
    pub(super) outcome: Result<(), Failure>,
}

impl<B> Default for Noted<B> {
    fn default() -> Noted<B> {
        Noted { token: 0, command: Command::new(0, 0), kept: Data::None, outcome: Ok(()) }
    }
}

impl<B> Noted<B> {
    /// The completion of a command whose data was not mapped.
    pub(super) fn kept(&mut self) -> Completion<B> {
        Completion { token: self.token, data: take(&mut self.kept), outcome: self.outcome }
    }

    /// The completion of a command whose buffer was mapped, and comes back.
    pub(super) fn with(&self, buffer: B) -> Completion<B> {
        Completion { token: self.token, data: Data::Buffer(buffer), outcome: self.outcome }
    }
}
