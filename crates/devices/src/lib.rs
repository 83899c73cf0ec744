//! Devices in user space: virtio-blk, virtio-net and virtio-iommu back ends, and disks.
//!
//! | module | feature | what it holds |
//! |---|---|---|
//! | [`iommu`] | always | a virtio-iommu: as a back end, and inside a VMM |
//! | [`blk`], [`disk`] | `blk` | virtio-blk, and the files and memory behind it |
//! | [`net`] | `net` | virtio-net, from port to port |
//! | [`path`], [`peer`] | always | what a service has to know of strangers' paths and processes |
#![deny(unsafe_code)]

#[cfg(feature = "blk")]
pub mod blk;
#[cfg(feature = "blk")]
pub mod disk;
pub mod iommu;
#[cfg(feature = "net")]
pub mod net;
pub mod path;
#[allow(unsafe_code)]
pub mod peer;
