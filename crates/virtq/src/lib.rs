//! Virtqueues: the driver's end and the device's end of split and packed rings.
//!
//! A split virtqueue (virtio 1.3, section 2.7) is three areas of memory that a driver and a device
//! share: a table of descriptors, a ring in which the driver makes chains of them *available*, and
//! a ring in which the device gives them back as *used*.
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
//! A packed one (2.8) is a single ring of descriptors: the driver makes them available in their
//! order, and the device overwrites them with what it gives back; a flag of each, compared with the
//! parity of the lap, shows whose turn it is. Two small structures beside it hold which
//! notifications each end wants. The two ends have the same methods as those of a split ring.
//!
//! - [`driver::Queue`] makes buffers available and takes them back; it trusts nothing that the
//!   device writes.
//! - [`device::Queue`] takes [`Chain`]s and gives them back; it trusts nothing that the driver
//!   writes. It reaches memory through [`ringfence_mem::Translate`] only, so the same code serves
//!   guest-physical addresses and I/O virtual ones.
//! - [`layout`] has the sizes of the areas and the offsets of their parts.
//!
//! What both ends guarantee:
//!
//! - **No field is read twice.** The peer may change any byte at any time: every field is copied
//!   once, and the copy is checked.
//! - **A peer that breaks the rules breaks the queue, not the process**: a [`RingError`] reports
//!   where and what, and every later call returns it again.
//! - **Nothing is allocated per request**, and an index is published once for a batch.
//! - **No wake-up is lost.** An end that goes to sleep first enables notifications (`enable_*`),
//!   and then looks again; the fences that this needs are explained where they are executed.
//!
//! All fields are little-endian, as in virtio 1.x.

mod chain;
mod error;
mod packed;
mod ring;

pub mod blk;
pub mod device;
pub mod driver;
pub mod layout;
#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, loom))]
mod model_packed;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use chain::{Chain, Desc, cut};
pub use error::{AddError, Area, ChainFault, RingError};

/// Feature bit: descriptors may refer to a table of descriptors (`VIRTIO_F_INDIRECT_DESC`).
pub const F_INDIRECT_DESC: u32 = 28;
/// Feature bit: notifications are requested by index (`VIRTIO_F_EVENT_IDX`).
pub const F_EVENT_IDX: u32 = 29;
/// Feature bit: the device follows virtio 1.x (`VIRTIO_F_VERSION_1`).
pub const F_VERSION_1: u32 = 32;
/// Feature bit: the addresses that the device sees are translated (`VIRTIO_F_ACCESS_PLATFORM`).
pub const F_ACCESS_PLATFORM: u32 = 33;
/// Feature bit: the ring is packed (`VIRTIO_F_RING_PACKED`).
pub const F_RING_PACKED: u32 = 34;
