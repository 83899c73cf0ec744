#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! * [`Endpoint`], [`Binding`]: a device as the IOMMU sees it, and where its accesses go.
//! * [`View`]: how one worker thread reaches memory.
//! * [`Iotlb`], [`MissSink`], [`Miss`]: translations that come from elsewhere, such as a front end.
//! * [`guard`]: accesses that wait, for devices that cannot come again later.
//!
//! Readers never wait. The worker calls [`View::quiet`] between bursts of work; that replays the
//! invalidations since the last call into the cache and announces that nothing older is in use. An
//! invalidation is over when every view has done so (rule [D15]), which the
//! [`Shootdown`](ringfence_iommu::shootdown::Shootdown) that all views of a process share reports.
//! Asynchronous I/O that outlives a burst holds a lease on its range.
//!
//! [D15]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d15

mod cache;
mod endpoint;
pub mod guard;
mod iotlb;
mod misses;
mod victims;
mod view;

pub use endpoint::{Binding, Endpoint};
pub use iotlb::{Iotlb, IotlbConfig, IotlbStats};
pub use misses::{Miss, MissSink};
pub use view::{Counters, View, prot_of};
