//! Errors, and where the buffer is after them.

use core::{fmt, mem::ManuallyDrop};

use ringfence_iommu::{Error as DomainError, Range};
use ringfence_iova::{AllocError, AllocReason, Allocator, ApertureError, ReserveError};
use rustix::io::Errno;

use crate::{Fallback, Policy, Refused, TuningError};

/// Why a mapping could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The buffer has no bytes.
    #[error("an empty buffer cannot be mapped")]
    Empty,
    /// A piece of the buffer, or their sum, passes 2^64.
    #[error("the buffer passes the end of the address space")]
    TooLong,
    /// The buffer did not list the same segments twice.
    #[error("the buffer's segments changed while it was mapped")]
    Unstable,
    /// All suitable I/O virtual addresses are taken: unmap something and try again.
    #[error(
        "no I/O virtual addresses are free for {size:#x} bytes at or below {limit:#x}: \
         {live_ranges} ranges are live, {live_bytes:#x} bytes are taken; unmap something, or raise \
         DmaConfig::limit"
    )]
    Exhausted {
        /// The requested bytes of address space.
        size: u64,
        /// The highest suitable address.
        limit: u64,
        /// Ranges that the allocator has handed out.
        live_ranges: u64,
        /// Bytes of address space that are taken, by them and by what its caches keep.
        live_bytes: u64,
    },
    /// There can never be an I/O virtual address for it, or the allocator's flush of freed ones
    /// failed (the request and the reason are inside).
    #[error(transparent)]
    NoIova(AllocError),
    /// It would have to be copied into a bounce slot, and the device has reached its quota of slot
    /// memory: unmap something and try again.
    #[error(
        "cannot take a bounce slot of {size:#x} bytes: the device holds {held:#x} bytes of slots, and \
         may hold {quota:#x}; unmap something, or raise BounceConfig::quota"
    )]
    BounceQuota {
        /// Bytes of the requested slot.
        size: u64,
        /// Bytes of slots that the device holds.
        held: u64,
        /// The most that it may hold.
        quota: u64,
    },
    /// It would have to be copied into a bounce slot, and there is no memory for one.
    #[error("there is no memory for a bounce slot of {0:#x} bytes; unmap something, or give more")]
    Bounce(u64),
    /// A buffer in pool memory was requested, and the device has no bounce pools, or is under
    /// policy `off`.
    #[error(
        "the device has no bounce pools in use: give it some (DeviceBuilder::pools), and another \
         policy than off"
    )]
    NoPools,
    /// The buffer does not fill its granules, so that the device would reach what lies beside it;
    /// an untrusted device must not (rules [L48], [L50]), and there are no bounce pools to copy it
    /// to.
    ///
    /// [L48]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l48
    /// [L50]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l50
    #[error(
        "the buffer of an untrusted device does not fill its granules of {granule:#x} bytes, and \
         the device has no bounce pools: give it some (DeviceBuilder::pools)"
    )]
    Neighbours {
        /// Bytes of a granule.
        granule: u64,
    },
    /// As [`Neighbours`](Self::Neighbours), for memory that is mapped for long, or that the CPU
    /// cannot reach: such memory is never copied.
    #[error(
        "the buffer of an untrusted device does not fill its granules of {granule:#x} bytes, and \
         cannot be copied: it is mapped for long, or out of the CPU's reach"
    )]
    Uncopied {
        /// Bytes of a granule.
        granule: u64,
    },
    /// The domain refused, or the device behind it did (its status is inside).
    #[error(transparent)]
    Domain(#[from] ringfence_iommu::Error),
}

/// What an error means for the caller, and what the caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The buffer or the request is invalid, and will not become valid later.
    Invalid,
    /// The address space is exhausted. An unmap will make room, or a flush if one has failed.
    AddressSpace,
    /// The domain is at its limit of mappings or of table memory. An unmap will make room.
    DomainFull,
    /// There is no memory.
    NoMemory,
    /// There is no bounce slot. After an unmap there may be one.
    BounceFull,
    /// The device replied with an error; this is its own status (rule [L34]).
    ///
    /// [L34]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l34
    Device {
        /// For a virtio-iommu, the status of its reply.
        status: u8,
    },
    /// The kernel refused a call of VFIO or iommufd, for a reason that is none of the others.
    Kernel {
        /// Linux' error number.
        errno: i32,
    },
    /// The device no longer replies, or its replies violate the protocol. This is final.
    Gone,
}

impl ErrorKind {
    /// What a domain's error means.
    pub const fn of(error: &DomainError) -> ErrorKind {
        match *error {
            DomainError::Full { .. } => ErrorKind::DomainFull,
            DomainError::NoMemory { .. } => ErrorKind::NoMemory,
            DomainError::Device { status, .. } => ErrorKind::Device { status },
            DomainError::Kernel { errno, .. } => ErrorKind::Kernel { errno },
            DomainError::Gone(_) => ErrorKind::Gone,
            _ => ErrorKind::Invalid,
        }
    }
}

impl Error {
    /// Why `allocator` has no address.
    pub(crate) fn no_iova(error: AllocError, allocator: &(impl Allocator + ?Sized)) -> Error {
        let AllocReason::Exhausted { .. } = error.reason else { return Error::NoIova(error) };
        let (stats, request) = (allocator.stats(), error.request);
        Error::Exhausted {
            size: request.size,
            limit: request.limit,
            live_ranges: stats.live_ranges.saturating_sub(stats.cached_ranges),
            live_bytes: stats.live_bytes,
        }
    }

    /// What it means for the caller.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Error::Exhausted { .. }
            | Error::NoIova(AllocError { reason: AllocReason::FlushFailed, .. }) => {
                ErrorKind::AddressSpace
            }
            Error::Domain(error) => ErrorKind::of(error),
            Error::BounceQuota { .. } | Error::Bounce(_) => ErrorKind::BounceFull,
            Error::Empty
            | Error::TooLong
            | Error::Unstable
            | Error::NoIova(_)
            | Error::NoPools
            | Error::Neighbours { .. }
            | Error::Uncopied { .. } => ErrorKind::Invalid,
        }
    }
}

/// A map that failed. Everything it had done was undone: the IOVA is free again, nothing is mapped,
/// and the buffer is inside.
///
/// Only if undoing failed too (the device did not acknowledge the invalidation) is the buffer
/// withheld, as the device might still reach it; see [`into_buffer`](Self::into_buffer).
#[derive(thiserror::Error)]
#[error("cannot map{}: {error}", if buffer.is_ok() { "" } else {
    ", and cannot undo what was done (the buffer is quarantined)"
})]
pub struct MapError<B> {
    #[source]
    pub(crate) error: Error,
    pub(crate) buffer: Result<B, ManuallyDrop<B>>,
}

impl<B> MapError<B> {
    /// The cause.
    pub fn error(&self) -> Error {
        self.error
    }

    /// What that means for the caller.
    pub fn kind(&self) -> ErrorKind {
        self.error.kind()
    }

    /// The buffer. `None` if the device may still reach it: its memory is then leaked, and its IOVA
    /// quarantined.
    pub fn into_buffer(self) -> Option<B> {
        self.buffer.ok()
    }
}

impl<B> fmt::Debug for MapError<B> {
    ringfence_sync::shows!(MapError as it, error: it.error, undone: it.buffer.is_ok());
}

/// An unmap whose invalidation failed: the device may still reach the buffer.
///
/// The buffer is therefore not given back, and dropping this error leaks it on purpose: memory that
/// a device can write must not be reused. Its IOVA is quarantined.
#[derive(thiserror::Error)]
#[error("the device may still reach {quarantined}, its invalidation failed: {error}")]
pub struct UnmapError<B> {
    #[source]
    pub(crate) error: ringfence_iommu::Error,
    /// The I/O virtual addresses that may still lead to the buffer. They are not reused.
    pub quarantined: Range,
    pub(crate) buffer: ManuallyDrop<B>,
}

impl<B> UnmapError<B> {
    /// The domain's error.
    pub fn error(&self) -> ringfence_iommu::Error {
        self.error
    }

    /// What that means for the caller.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::of(&self.error)
    }

    /// The buffer, although the device may still reach it.
    ///
    /// # Safety
    /// The caller has made sure by other means that the device no longer uses the buffer (it was
    /// reset or is gone), or never again reads, writes or frees the memory as private memory.
    pub unsafe fn into_buffer(self) -> B {
        ManuallyDrop::into_inner(self.buffer)
    }
}

impl<B> fmt::Debug for UnmapError<B> {
    ringfence_sync::shows!(UnmapError as it, error: it.error, quarantined: it.quarantined);
}

/// A range that does not lie in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bytes {start}..{end} do not lie in a mapping of {len} bytes")]
pub struct OutOfBounds {
    /// The first byte of the request.
    pub start: u64,
    /// The byte after the last one of the request.
    pub end: u64,
    /// How many bytes the mapping has.
    pub len: u64,
}

/// Why a device could not be set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// No allocator was given, and none can be made for the domain's aperture.
    #[error("cannot make an allocator for the domain's aperture: {0}")]
    Aperture(#[from] ApertureError),
    /// The allocator's granule is not a multiple of the domain's, so that the domain cannot map all
    /// that it hands out.
    #[error(
        "the allocator's granule {allocator:#x} is not a multiple of the domain's {domain:#x}: \
             make it with that"
    )]
    Granule {
        /// The allocator's granule in bytes.
        allocator: u64,
        /// The domain's granule in bytes.
        domain: u64,
    },
    /// The segment boundary is not a mask of ones, or is finer than the granule.
    #[error(
        "the segment boundary {boundary:#x} must be 2^n-1 and at least {:#x}, as the granule is \
         {granule:#x} bytes", .granule - 1
    )]
    Boundary {
        /// The boundary.
        boundary: u64,
        /// The domain's granule in bytes.
        granule: u64,
    },
    /// The largest segment is smaller than the granule.
    #[error(
        "the largest segment of {max_segment:#x} bytes must be at least the granule of {granule:#x}"
    )]
    MaxSegment {
        /// Bytes of the largest segment.
        max_segment: u64,
        /// The domain's granule in bytes.
        granule: u64,
    },
    /// The tuning of the flush queues is invalid.
    #[error(transparent)]
    Tuning(#[from] TuningError),
    /// The sampling interval is not a power of two.
    #[error("sample_every must be 0 or a power of two, not {0}")]
    SampleEvery(u32),
    /// A reserved region of the domain could not be reserved in the allocator.
    #[error("cannot keep the domain's reserved regions free: {0}")]
    Reserve(#[from] ReserveError),
    /// A policy is demanded that the device cannot have (rule [L28]).
    ///
    /// [L28]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l28
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The timer thread, which flushes or gives back idle bounce slots, could not be started.
    #[error("cannot start the timer thread of the flush queues or of the bounce pools: {0}")]
    Thread(#[from] Errno),
    /// The size of the largest slot is not a power of two of whole granules, or exceeds the limit
    /// for all slots.
    #[error(
        "the largest bounce slot cannot be of {largest:#x} bytes: it must be a power of two from \
         {granule:#x} to {max:#x}"
    )]
    Slots {
        /// Bytes of the largest slot.
        largest: u64,
        /// Bytes of the smallest that can be mapped.
        granule: u64,
        /// Bytes of all slots together.
        max: u64,
    },
}

/// Why a device does not change to another policy. Unless it says otherwise, nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SwitchError {
    /// Under `off` nothing is mapped, and under every other policy everything is: mappings of one
    /// kind cannot continue under the other.
    #[error(
        "a device cannot change from {from} to {to} while it lives: its mappings would not be \
         protected, or not be mapped; make another device"
    )]
    Off {
        /// The policy in force.
        from: Policy,
        /// The requested policy.
        to: Policy,
    },
    /// The policy in force would not be the requested one.
    #[error(transparent)]
    Fallback(Fallback),
    /// The timer thread could not be started.
    #[error("cannot start the flush queue's timer thread: {0}")]
    Thread(#[from] Errno),
    /// The flush queues cannot be made. If their flush failed, the policy is in force.
    #[error(transparent)]
    Queues(#[from] TuningError),
    /// The new policy is strict and in force, for every unmap that begins from now on; but what had
    /// been unmapped lazily could not be flushed, and stays exposed until a flush succeeds: the
    /// timer's, or the next call's.
    #[error("the policy is strict now, but what was unmapped before could not be flushed: {0}")]
    Flush(#[source] ringfence_iommu::Error),
}
