//! What can go wrong.

use crate::{Align, Request};

/// Why a [`Request`] was not met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no I/O virtual addresses for {:#x} bytes ({}) at or below {:#x}: {reason}",
    request.size,
    Alignment(request.align),
    request.limit
)]
pub struct AllocError {
    /// The request.
    pub request: Request,
    /// Why it failed.
    pub reason: AllocReason,
}

/// The reason in an [`AllocError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum AllocReason {
    /// No suitable range is free now; one may be later.
    #[error("all taken between {first:#x} and {last:#x}")]
    Exhausted {
        /// The lowest address that was considered.
        first: u64,
        /// The highest.
        last: u64,
    },
    /// The aperture (or the bitmap's window), up to the limit, can never hold such a range.
    #[error("the aperture from {first:#x} to {last:#x} is too small for it")]
    ApertureTooSmall {
        /// The lowest address that is ever handed out.
        first: u64,
        /// The highest.
        last: u64,
    },
    /// The size is 0.
    #[error("the size is zero")]
    ZeroSize,
    /// Rounded up, the size or its alignment passes 2^64.
    #[error("the size is too big")]
    TooBig,
    /// The alignment is not a power of two.
    #[error("the alignment is not a power of two")]
    BadAlign,
    /// The mask is not 2^n-1, or a segment is smaller than the range.
    #[error("it fits no segment of boundary mask {boundary:#x}")]
    BadBoundary {
        /// The mask.
        boundary: u64,
    },
    /// The flush that must come before freed addresses are used again failed.
    #[error("the flush before addresses are used again failed")]
    FlushFailed,
}

impl AllocReason {
    /// Whether the request itself is invalid, so that no allocator could ever meet it.
    pub const fn is_invalid(self) -> bool {
        matches!(self, Self::ZeroSize | Self::TooBig | Self::BadAlign | Self::BadBoundary { .. })
    }
}

/// Why a range could not be freed. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{size:#x} bytes at {iova:#x} cannot be freed: {reason}")]
pub struct FreeError {
    /// The address of the free.
    pub iova: u64,
    /// The size of the free.
    pub size: u64,
    /// Why it was refused.
    pub reason: FreeReason,
}

/// The reason in a [`FreeError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum FreeReason {
    /// Nothing is allocated there: it never was, or it was freed before.
    #[error("nothing is allocated there")]
    NotAllocated,
    /// What is allocated there has another start or another size.
    #[error("it is not one allocated range")]
    WrongRange,
    /// The address is reserved.
    #[error("it is reserved")]
    Reserved,
    /// It was freed before and waits in a cache or for a flush.
    #[error("it is already free")]
    AlreadyFree,
}

/// Why a range could not be reserved. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The end lies before the start.
    #[error("the range from {first:#x} to {last:#x} ends before it starts")]
    Inverted {
        /// The start.
        first: u64,
        /// The end.
        last: u64,
    },
    /// Part of it is allocated.
    #[error("the range from {first:#x} to {last:#x} holds the allocated address {taken:#x}")]
    InUse {
        /// The start.
        first: u64,
        /// The end.
        last: u64,
        /// An address in it that is allocated.
        taken: u64,
    },
}

/// Prints an alignment within a sentence.
struct Alignment(Align);

impl core::fmt::Display for Alignment {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.0 {
            Align::Size => f.write_str("aligned to their size"),
            Align::Bytes(bytes) => write!(f, "aligned to {bytes:#x}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn an_error_names_the_request_and_the_reason() {
        let error = AllocError {
            request: Request::new(0x3000).limit(0xffff_ffff),
            reason: AllocReason::Exhausted { first: 0x1000, last: 0xffff_ffff },
        };
        assert_eq!(
            error.to_string(),
            "no I/O virtual addresses for 0x3000 bytes (aligned to their size) at or below \
             0xffffffff: all taken between 0x1000 and 0xffffffff"
        );
        let error = FreeError { iova: 0x1000, size: 0x1000, reason: FreeReason::Reserved };
        assert_eq!(error.to_string(), "0x1000 bytes at 0x1000 cannot be freed: it is reserved");
    }
}
