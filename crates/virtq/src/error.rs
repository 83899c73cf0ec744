//! The errors of a ring, and of adding a request to one.

use core::fmt;

use ringfence_mem::AccessError;

/// One of the three areas of a virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Area {
    /// The descriptor table; of a packed queue, its one ring.
    Descriptors,
    /// The available ring, written by the driver.
    Avail,
    /// The used ring, written by the device.
    Used,
    /// Of a packed queue: the driver's event structure, which controls interrupts.
    DriverEvent,
    /// Of a packed queue: the device's event structure, which controls kicks.
    DeviceEvent,
}

impl fmt::Display for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Area::Descriptors => "descriptor table",
            Area::Avail => "available ring",
            Area::Used => "used ring",
            Area::DriverEvent => "driver event structure",
            Area::DeviceEvent => "device event structure",
        })
    }
}

/// Why a queue cannot be set up, or how the peer broke it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// A split queue's size must be a power of two from 1 to 32768 (virtio 2.7).
    #[error("queue size {size} is not a power of two from 1 to 32768")]
    Size {
        /// The requested size.
        size: u16,
    },
    /// A packed queue's size must be from 1 to 32768 (virtio 2.8.10.1).
    #[error("packed queue size {size} is not from 1 to 32768")]
    PackedSize {
        /// The requested size.
        size: u16,
    },
    /// The queue has the other format: only a split one has heads, only a packed one ids.
    #[error("the queue has the other format")]
    Format,
    /// An area does not have the alignment of virtio 2.7 or 2.8.10.
    #[error("{area} at {addr:#x} is not aligned to {align} bytes")]
    Misaligned {
        /// Which area.
        area: Area,
        /// Its address, as the device sees it or in this process.
        addr: u64,
        /// The alignment that it needs.
        align: u64,
    },
    /// A window given for an area does not hold it.
    #[error("{area} has {len} bytes and needs {needed}")]
    TooSmall {
        /// Which area.
        area: Area,
        /// How many bytes the window has.
        len: usize,
        /// How many bytes the area takes.
        needed: usize,
    },
    /// An area's address cannot be reached now; a later attempt may succeed.
    #[error("{area} at {addr:#x} cannot be reached: {error}")]
    Unreachable {
        /// Which area.
        area: Area,
        /// Its address.
        addr: u64,
        /// Why not.
        #[source]
        error: AccessError,
    },
    /// The index to start from is further from the used ring's than the queue is long.
    #[error("base {base} is more than {size} past the used index {used}")]
    Base {
        /// The available index to start from.
        base: u32,
        /// The used index found in memory.
        used: u16,
        /// The queue's size.
        size: u16,
    },
    /// The places to start from do not exist in a packed ring of this size, or are further apart
    /// than it is long.
    #[error("base {base:#x} is invalid for a packed queue of {size}")]
    PackedBase {
        /// The base: see [`device::RingConfig::base`](crate::device::RingConfig::base).
        base: u32,
        /// The queue's size.
        size: u16,
    },
    /// The available index announces more chains than the queue can hold besides those in flight.
    #[error("available index {idx} at {next}: {in_flight} in flight, the queue holds {size}")]
    AvailJump {
        /// The next index to be taken.
        next: u16,
        /// The index that was read.
        idx: u16,
        /// How many chains are taken and not given back.
        in_flight: u16,
        /// The queue's size.
        size: u16,
    },
    /// A chain that was made available breaks a rule.
    #[error("chain at available index {index}, head {head}: {fault}")]
    Chain {
        /// The available index of the chain; in a packed ring, where it begins.
        index: u16,
        /// Its head: the first descriptor; in a packed ring, its buffer id, or 0 if that was not
        /// reached.
        head: u16,
        /// What is wrong with it.
        #[source]
        fault: ChainFault,
    },
    /// The used index claims more chains than are in flight.
    #[error("used index {idx} at {next}: only {in_flight} in flight")]
    UsedJump {
        /// The next index to be taken.
        next: u16,
        /// The index that was read.
        idx: u16,
        /// How many chains are published and not taken back.
        in_flight: u16,
    },
    /// A used element names a descriptor outside of the table.
    #[error("used index {index}: id {id} in a queue of {size}")]
    UsedId {
        /// The used index of the element.
        index: u16,
        /// The id that was read.
        id: u32,
        /// The queue's size.
        size: u16,
    },
    /// A used element names a descriptor that heads no published chain.
    #[error("used index {index}: id {id} is not in flight")]
    UsedNotInFlight {
        /// The used index of the element.
        index: u16,
        /// The id that was read.
        id: u16,
    },
    /// A used element claims more bytes than the device could write.
    #[error("used index {index}: {len} bytes written to id {id}, which has room for {room}")]
    UsedLength {
        /// The used index of the element.
        index: u16,
        /// The head of the chain.
        id: u16,
        /// The length that was read.
        len: u32,
        /// How many bytes of the chain are device-writable.
        room: u32,
    },
}

/// What is wrong with one chain of descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChainFault {
    /// The head is not a descriptor of the queue.
    #[error("the queue has {size} descriptors")]
    Head {
        /// The queue's size.
        size: u16,
    },
    /// The head was made available already and has not been given back.
    #[error("it is in flight already")]
    InFlight,
    /// A descriptor's `next` leaves its table.
    #[error("descriptor {at} is followed by {next} in a table of {entries}")]
    Next {
        /// The descriptor.
        at: u16,
        /// Its `next` field.
        next: u16,
        /// How many entries its table has.
        entries: u16,
    },
    /// The chain is longer than its table: it loops.
    #[error("it has more descriptors than its table of {entries}: a loop")]
    Loop {
        /// How many entries the table has.
        entries: u16,
    },
    /// A chain of a packed ring goes on into descriptors that are in flight.
    #[error("it goes on past the {room} descriptors that are not in flight")]
    TooMany {
        /// How many descriptors are not in flight.
        room: u16,
    },
    /// An indirect descriptor, but the feature was not negotiated.
    #[error("descriptor {at} is indirect, which was not negotiated")]
    NotNegotiated {
        /// The descriptor.
        at: u16,
    },
    /// An indirect descriptor inside of an indirect table.
    #[error("descriptor {at} of the indirect table is itself indirect")]
    Nested {
        /// The entry of the table.
        at: u16,
    },
    /// An indirect descriptor that is followed by another, or in a packed ring one that follows
    /// another.
    #[error("descriptor {at} is indirect and not the last, or not alone in a packed ring")]
    IndirectNext {
        /// The descriptor.
        at: u16,
    },
    /// An indirect table with no entries, with a partial one, or with too many.
    #[error("the indirect table of descriptor {at} has {len} bytes")]
    IndirectLength {
        /// The descriptor.
        at: u16,
        /// The length of the table in bytes.
        len: u32,
    },
    /// An indirect table cannot be reached. Alone among chain faults this does not break the
    /// queue: the chain stays available, and a later [`pop`](crate::device::Queue::pop) tries
    /// again.
    #[error("the indirect table at {addr:#x} cannot be reached: {error}")]
    IndirectUnreachable {
        /// The address of the table.
        addr: u64,
        /// Why not.
        #[source]
        error: AccessError,
    },
    /// A descriptor that the device reads follows one that it writes.
    #[error("descriptor {at} is device-readable after a device-writable one")]
    Order {
        /// The descriptor.
        at: u16,
    },
    /// A descriptor's buffer passes the end of the address space.
    #[error("descriptor {at} has {len} bytes at {addr:#x}, past the end of the address space")]
    Wraps {
        /// The descriptor.
        at: u16,
        /// Its address.
        addr: u64,
        /// Its length.
        len: u32,
    },
    /// The chain's bytes do not fit in 32 bits.
    #[error("it has {total} bytes, more than 2^32 - 1")]
    TooLong {
        /// The sum of the lengths up to the descriptor that passed the limit.
        total: u64,
    },
}

/// Why a driver's chain was not added. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddError {
    /// Too few descriptors are free: take used ones back first.
    #[error("{wanted} descriptors wanted, {free} free")]
    Full {
        /// How many the chain takes.
        wanted: usize,
        /// How many are free.
        free: u16,
    },
    /// A chain has at least one descriptor.
    #[error("a chain of no descriptors")]
    Empty,
    /// A chain may not be longer than the queue (virtio 2.7.5.3.1); one in an indirect table may
    /// have [`MAX_INDIRECT`](crate::layout::MAX_INDIRECT) descriptors if that is more.
    #[error("a chain of {wanted} descriptors, of which it may have {size}")]
    TooMany {
        /// How many the chain has.
        wanted: usize,
        /// How many it may have.
        size: u16,
    },
    /// What the device writes comes after all that it reads (virtio 2.7.4.2).
    #[error("descriptor {at} of the chain is device-readable after a device-writable one")]
    Order {
        /// The position in the chain.
        at: usize,
    },
    /// A buffer passes the end of the address space.
    #[error("descriptor {at} of the chain passes the end of the address space")]
    Wraps {
        /// The position in the chain.
        at: usize,
    },
    /// A chain has at most 2^32 - 1 bytes.
    #[error("a chain of {total} bytes, more than 2^32 - 1")]
    TooLong {
        /// The sum of the lengths.
        total: u64,
    },
    /// The window given for an indirect table is too small.
    #[error("an indirect table of {len} bytes cannot hold {wanted} descriptors")]
    Table {
        /// How many descriptors the chain has.
        wanted: usize,
        /// How many bytes the window has.
        len: usize,
    },
    /// The queue is broken.
    #[error("the queue is broken: {0}")]
    Broken(#[source] RingError),
}
