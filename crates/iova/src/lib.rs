//! Allocators of I/O virtual addresses.
//!
//! A device behind an IOMMU uses I/O virtual addresses (IOVAs). An [`Allocator`] hands out ranges
//! of them and takes them back; it does not track what they map to.
//!
//! | type | what it is | good at | bad at |
//! |---|---|---|---|
//! | [`Slabs`] | **the one to use**: slabs of equal ranges per CPU over a radix tree | everything; each free is checked | |
//! | [`Ring`] | one contiguous chunk for a ring, cut into its buffers | buffers that a device
//! accesses in order lie in order | serves one ring only |
//! | [`Preferred32`] | one device's preference for addresses below 4 GiB in front of any of them |
//! short addresses while there are any | |
//! | [`RbTree`] | red-black tree of the taken ranges, searched from the top down | any aperture,
//! memory per live range only | a dense live set: a search walks it |
//! | [`Bitmap`] | one bit a granule, next fit, over a bounded window | small ranges, constant memory | a full window; large aligned ranges |
//! | [`Magazines`] | a cache of freed ranges per CPU in front of either | alloc and free of up to
//! 32 granules without a search or a shared lock | keeps what it caches; does not check frees |
//!
//! The last three follow the Linux 6.12 DMA path on purpose, with its limits; each type documents
//! its guarantees, by rule number. `ringfence bench iova` measures [`Slabs`] against them. They can
//! be stacked: `Preferred32<Arc<Magazines<RbTree, OsCpu>>>` is what a PCI device has in Linux.
//!
//! ```
//! use ringfence_iova::{Allocator, Aperture, Request, Slabs};
//! use ringfence_sync::cpu::OneCpu;
//!
//! let space = Slabs::new(Aperture::new(0, (1 << 48) - 1, 4096)?, OneCpu);
//! space.reserve(0xfee0_0000, 0xfeef_ffff)?;
//! let iova = space.alloc(&Request::new(3 * 4096).limit(0xffff_ffff))?;
//! assert_eq!(iova % (4 * 4096), 0); // aligned to its size, rounded up
//! space.free(iova, 3 * 4096)?;
//! assert!(space.free(iova, 3 * 4096).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Sizes, addresses, limits and masks are in bytes; ranges are inclusive at both ends, and nothing
//! wraps: 2^64-1 is an address like any other. IOVA 0 is never handed out (rule L2).
//!
//! The crate needs `alloc` and no operating system.
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
