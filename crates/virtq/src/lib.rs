#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! ```text
//!  driver::Queue                  shared memory                    device::Queue
//!  add ───────────────▶ descriptor table
//!  publish ───────────▶ available ring  ───────────────▶ pop
//!  needs_kick ◀──────── (avail event, used flags) ◀───── enable_kicks, suppress_kicks
//!  pop ◀─────────────── used ring       ◀─────────────── push_used
//!  enable_notifications▶ (used event, avail flags) ────▶ publish_used (interrupt wanted?)
//! ```
//!
//! A split virtqueue is three areas of memory that a driver and a device share: a table of
//! descriptors, a ring in which the driver makes chains of them *available*, and a ring in which
//! the device gives them back as *used*. A packed one is a single ring of descriptors: the driver
//! makes them available in their order, and the device overwrites them with what it gives back; two
//! flags of each, compared with the parity of the lap, show whose turn it is. Two small structures
//! beside it hold which notifications each end wants.
//!
//! - [`driver::Queue`] makes buffers available and takes them back.
//! - [`device::Queue`] takes [`Chain`]s, one by one or in a [`device::Burst`], and gives them back.
//! - [`layout`] has the sizes of the areas and the offsets of their parts.
//! - [`blk`] has the format of virtio-blk requests.

mod chain;
mod either;
mod error;
mod packed;
mod ring;

pub mod blk;
pub mod device;
pub mod driver;
pub mod layout;
#[cfg(all(test, loom))]
mod model;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use chain::{Chain, Desc, cut};
pub use error::{AddError, Area, ChainFault, RingError};
pub use packed::RingPos;

/// Feature (bit 28): descriptors may refer to a table of descriptors (`VIRTIO_F_INDIRECT_DESC`).
pub const F_INDIRECT_DESC: u64 = 1 << 28;
/// Feature (bit 29): notifications are requested by index (`VIRTIO_F_EVENT_IDX`).
pub const F_EVENT_IDX: u64 = 1 << 29;
/// Feature (bit 32): the device follows virtio 1.x (`VIRTIO_F_VERSION_1`).
pub const F_VERSION_1: u64 = 1 << 32;
/// Feature (bit 33): an IOMMU translates the device's addresses (`VIRTIO_F_ACCESS_PLATFORM`).
pub const F_ACCESS_PLATFORM: u64 = 1 << 33;
/// Feature (bit 34): the ring is packed (`VIRTIO_F_RING_PACKED`).
pub const F_RING_PACKED: u64 = 1 << 34;
