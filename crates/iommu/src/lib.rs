#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! * [`Domain`]: the trait of everything that translates; [`pass_on!`] forwards it to another domain.
//! * [`SoftDomain`]: a domain in this process, a [`table`] with the [`shootdown`] of its readers.
//! * [`Gather`], [`Pending`], [`Work`], [`Synced`]: what an unmap leaves, and the sync that ends it.
//! * [`Geometry`], [`Map`], [`Prot`], [`Range`] and the addresses: what can be mapped, and how.
//! * [`Fault`], [`FaultSink`]: accesses that were refused.
#![no_std]

extern crate alloc;
#[cfg(any(test, loom))]
extern crate std;

mod addr;
mod domain;
mod error;
mod fault;
mod gather;
mod geometry;
mod map;
mod pass_on;
mod pending;
mod prot;
pub mod shootdown;
mod soft;
pub mod table;
mod work;

/// For [`pass_on`].
#[doc(hidden)]
pub use alloc::vec::Vec as __Vec;

pub use addr::{Address, GuestPhys, HostAddr, Iova, Range};
pub use domain::Domain;
pub use error::{Error, Result};
pub use fault::{Fault, FaultReason, FaultSink};
pub use gather::Gather;
pub use geometry::{Capabilities, Geometry, PageSizes, ReservedKind, ReservedRegion};
pub use map::{Map, Partial};
pub use pending::Pending;
pub use prot::Prot;
pub use soft::SoftDomain;
pub use work::{SyncToken, Synced, Work};
