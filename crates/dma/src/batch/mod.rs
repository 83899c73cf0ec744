//! Many mappings, one sync.
//!
//! A sync sends the device a request and waits for its completion, which takes longer than
//! everything else in a mapping. Buffers that are submitted together can share one, and so can
//! those that complete together: the guarantee is the same, since no buffer goes back to its owner
//! before the sync that covers it is over.
//!
//! [`MapBatch`] and [`UnmapBatch`] are queues for one thread. `push` gathers;
//! [`begin`](UnmapBatch::begin) starts one sync for all of it, without waiting; `poll` hands out
//! what has been synced, in order. So a driver of a ring never holds back a completion to make a
//! batch larger: it begins a batch with whatever has completed, does other work, and polls later.
//!
//! Ranges that touch are unmapped as one: allocators that place ranges side by side
//! ([`ringfence_iova::Ring`] always, [`ringfence_iova::Slabs`] mostly) turn many unmaps into one
//! request.
//!
//! Which policies share syncs: [`Policy::batches_maps`](crate::Policy::batches_maps) and
//! [`Policy::batches_unmaps`](crate::Policy::batches_unmaps). Under the others the batches work one
//! mapping at a time, so that a driver needs no second code path.

mod flights;
mod map;
mod unmap;

pub use map::MapBatch;
pub use unmap::UnmapBatch;
