//! What can go wrong with a controller.

use std::time::Duration;

use super::Status;

/// Why a controller, or one of its queues, cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Its registers read as ones: it was taken away, or its memory space is not enabled.
    #[error("the controller does not respond: its registers read as ones")]
    Gone,
    /// This driver cannot use it.
    #[error("the controller cannot be used: {0}")]
    Unsupported(&'static str),
    /// It has fewer registers than the driver needs.
    #[error("the controller has {size:#x} bytes of registers, and {needed:#x} are needed")]
    Registers {
        /// Bytes that are needed.
        needed: u64,
        /// Bytes that there are.
        size: u64,
    },
    /// It reports a fatal error (`CSTS.CFS`). Only a reset helps.
    #[error("the controller reports a fatal error (CSTS.CFS)")]
    Fatal,
    /// It does not become ready.
    #[error("the controller was not ready after {0:?}")]
    NotReady(Duration),
    /// It does not stop: it may still use what it was given.
    #[error("the controller had not stopped after {0:?}")]
    NotStopped(Duration),
    /// No command completed for that long although some were in flight. The controller was not
    /// stopped yet.
    #[error("queue {queue}: no command was completed for {after:?}")]
    Timeout {
        /// Which queue; 0 is the controller's own.
        queue: u16,
        /// How long.
        after: Duration,
    },
    /// A command of the driver's own failed.
    #[error("{what}: {status}")]
    Failed {
        /// Which.
        what: &'static str,
        /// How.
        status: Status,
    },
    /// It completed a command that was not in flight: nothing it reports can be trusted.
    #[error("queue {queue}: command {id} was completed, but was not in flight")]
    Stray {
        /// Which queue.
        queue: u16,
        /// The number that it gave.
        id: u16,
    },
    /// Its identity data is invalid.
    #[error("the controller returned invalid identify data: {0}")]
    Nonsense(&'static str),
    /// All the I/O queues that it has are in use.
    #[error("all of the controller's {0} I/O queues are in use")]
    NoQueue(u16),
    /// A queue cannot have that many commands.
    #[error("a queue of {wanted} commands: it can have 1 to {most}")]
    Depth {
        /// Commands that were requested.
        wanted: u32,
        /// The most that there can be.
        most: u32,
    },
    /// There is no memory for a queue.
    #[error("no memory for a queue of {0} bytes")]
    NoMemory(usize),
    /// A queue's memory could not be mapped, or a buffer was mapped and could not be unmapped again
    /// when that failed: it is leaked.
    #[error("memory for the controller could not be mapped")]
    Map(#[source] ringfence_dma::Error),
    /// A buffer could not be unmapped: the controller may still reach it, and it is leaked.
    #[error("a buffer could not be unmapped, and is leaked")]
    Unmap(#[source] ringfence_iommu::Error),
    /// The controller was stopped.
    #[error("the controller was stopped")]
    Stopped,
}

/// Why a command was never submitted to the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotSubmitted {
    /// The queue has no room for more commands in flight: reap some.
    #[error("the queue is full")]
    Full,
    /// Its blocks lie beyond the namespace.
    #[error("{blocks} blocks at {lba} do not lie in a namespace of {there} blocks")]
    BeyondEnd {
        /// The first block.
        lba: u64,
        /// How many.
        blocks: u64,
        /// How many there are.
        there: u64,
    },
    /// Its data is not a whole number of blocks, or none at all.
    #[error("{bytes} bytes are not a whole number of blocks of {block} bytes")]
    Blocks {
        /// Bytes of data.
        bytes: u64,
        /// Bytes of a block.
        block: u64,
    },
    /// Its data is more than one command moves.
    #[error("{bytes} bytes in one command, which moves {most} at most")]
    TooLong {
        /// Bytes of data.
        bytes: u64,
        /// The most that there may be.
        most: u64,
    },
    /// Data was given to a command that has none, or the part lies outside its buffer.
    #[error("the data does not fit the command")]
    Data,
    /// No PRP list can describe its data: it begins at an address that is not a multiple of 4, or a
    /// piece other than the first begins, or one other than the last ends, within a page of 4 KiB.
    #[error("the data's pieces are not whole pages of 4 KiB")]
    Shape,
    /// Its data, or some that was to be mapped with it, could not be mapped.
    #[error("the data could not be mapped")]
    Map(#[source] ringfence_dma::Error),
    /// The queue cannot go on.
    #[error(transparent)]
    Queue(Error),
}
