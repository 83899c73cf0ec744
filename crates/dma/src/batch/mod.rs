//! Many mappings, one sync.
//!
//! A sync asks the device and waits for its answer, which takes longer than all else that a mapping
//! costs. What is submitted together can share one, and so can what completes together: the promise
//! is the same, since no buffer goes back to its owner before the sync that covers it is over.
//!
//! [`MapBatch`] and [`UnmapBatch`] are queues for one thread. What is pushed is gathered;
//! [`begin`](UnmapBatch::begin) starts one sync for all of it, without waiting; `poll` hands out
//! what has been synced, in order. So a driver of a ring never holds back a completion to make a
//! batch larger: it begins one with whatever has completed, does other work, and asks again.
//!
//! Ranges that touch are unmapped as one: allocators that place ranges side by side
//! ([`ringfence_iova::Ring`] always, [`ringfence_iova::Slabs`] mostly) make one request of many
//! unmaps.
//!
//! Which policies share syncs: [`Policy::batches_maps`](crate::Policy::batches_maps) and
//! [`Policy::batches_unmaps`](crate::Policy::batches_unmaps). Under the others the batches do the
//! same one mapping at a time, so that a driver is written once.

mod flights;
mod map;
mod unmap;

pub use map::MapBatch;
pub use unmap::UnmapBatch;
