#![cfg_attr(feature = "blk", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "blk"),
    doc = "Virtio devices in user space. The feature `blk` (default) adds virtio-blk.\n"
)]
//! # What is inside
//!
//! - [`iommu`]: a virtio-iommu: as a back end, and inside a VMM.
#![cfg_attr(
    feature = "blk",
    doc = "- [`blk`], [`disk`]: virtio-blk, and the files and memory behind it."
)]
#![cfg_attr(feature = "net", doc = "- [`net`]: virtio-net, from port to port.")]
#![cfg_attr(
    feature = "proxy",
    doc = "- [`proxy`]: stands before any vhost-user back end, which then reaches nothing of the guest's."
)]
//! - [`path`], [`peer`]: what a service has to know of strangers' paths and processes.
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
#[cfg(feature = "proxy")]
pub mod proxy;
