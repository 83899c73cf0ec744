#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! * [`GuestRam`], [`ScatteredView`]: memory that this process makes and shares.
//! * [`Region`], [`Memory`]: memory of another process, checked and mapped.
//! * [`Translate`]: the way to reach it; [`Physical`] and [`UserAddresses`] need no IOMMU.
//! * [`Spans`]: where it lies, by address.
//! * [`HostSlice`], [`ReadSlice`], [`Window`]: pieces of it, to copy from and to; [`soon_written`].
//! * [`DirtyLog`], [`SharedFile`]: bookkeeping that two processes share.
//! * [`sigbus`]: survives a truncated file.

mod access;
mod dirty;
mod error;
mod mapping;
mod memory;
mod ram;
mod region;
mod shared;
pub mod sigbus;
mod slice;
mod spans;
mod translate;

pub use access::{Access, AccessError, Translate, Window};
pub use dirty::DirtyLog;
pub use error::MemError;
pub use mapping::{unmap_elsewhere, unmapped_here};
pub use memory::Memory;
pub use ram::{GuestRam, ScatteredView};
pub use region::Region;
pub use shared::SharedFile;
pub use slice::{HostSlice, ReadSlice, soon_written};
pub use spans::{Found, Span, Spans};
pub use translate::{Direct, Physical, UserAddresses};

/// The page size here, in bytes, of which addresses and offsets of memory are multiples: 4096,
/// whatever the size of the machine's own pages.
pub const PAGE_SIZE: usize = 4096;
