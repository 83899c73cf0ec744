#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! The trait is [`Allocator`], a request is a [`Request`], the addresses that there are an [`Aperture`].
//! Each type documents its guarantees, by rule number: [`Slabs`], [`Ring`], [`Preferred32`],
//! [`RbTree`], [`Bitmap`], [`Magazines`]. Sizes, addresses, limits and masks are in bytes; ranges are
//! inclusive at both ends.
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;
#[cfg(any(test, loom))]
extern crate std;

mod allocator;
mod aperture;
mod bitmap;
mod error;
mod magazines;
mod preferred32;
mod rbtree;
mod request;
mod ring;
mod slabs;
mod stats;

pub use allocator::Allocator;
pub use aperture::{Aperture, ApertureError};
pub use bitmap::{Bitmap, DEFAULT_WINDOW, Flush, FlushFailed};
pub use error::{AllocError, AllocReason, FreeError, FreeReason, ReserveError};
pub use magazines::{
    LARGEST_CACHED, MAGAZINE_SLOTS, MagazineConfig, Magazines, SIZE_CLASSES, TRIM_INTERVAL_NS,
};
pub use preferred32::Preferred32;
pub use rbtree::RbTree;
pub use request::{Align, Request};
pub use ring::Ring;
pub use slabs::{Placement, SlabConfig, Slabs};
pub use stats::Stats;
