#![doc = include_str!("../README.md")]
//! # What is inside
//!
//! - [`transfers`]: what drivers have in common: buffers that are mapped for the device and
//!   unmapped afterwards, with few syncs.
//! - [`blk`]: a virtio-blk queue, and one that maps the buffers of its requests.
//! - [`nvme`]: an NVMe controller and its queues.
//! - [`ram`]: memory that a driver shares with a device in another process, as buffers and as
//!   bounce slots.
#![deny(unsafe_code)]

pub mod blk;
pub mod nvme;
#[allow(unsafe_code)]
pub mod ram;
pub mod transfers;
