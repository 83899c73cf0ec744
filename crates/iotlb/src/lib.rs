//! The IOTLB of a user-space device: how its worker threads reach memory through an IOMMU.
//!
//! An [`Endpoint`] is a device as the IOMMU sees it: it is bound to a domain, bypasses translation,
//! or is blocked. Each worker thread that moves data for it has a [`View`]: a small cache of its
//! own, in which translations are already resolved to pointers of this process, in front of the
//! domain's lock-free table. The view implements [`Translate`](ringfence_mem::Translate), so that
//! rings and devices reach memory through it and in no other way.
//!
//! An [`Iotlb`] is such a table for a device whose translations come from elsewhere: a front end,
//! which gets the misses ([`MissSink`]), or an IOMMU in this process, which maps and unmaps through
//! it. An access whose translation is missing fails at once; the worker goes on with other work and
//! retries when an update has arrived.
//!
//! Readers never wait. The worker calls [`View::quiet`] between bursts of work; that replays the
//! invalidations since the last call into the cache and announces that nothing older is in use. An
//! invalidation is over when every view has done so (rule D15), which the
//! [`Shootdown`](ringfence_iommu::shootdown::Shootdown) that all views of a process share reports.
//! Asynchronous I/O that outlives a burst holds a lease on its range.

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
pub use view::{Counters, View};
