//! Recorded streams of maps and unmaps, and what they cost under other allocators and policies.
//!
//! | module | what it holds |
//! |---|---|
//! | [`lines`] | a recording's bytes as lines: gzip or not, no line and no file too long |
//! | `event` | what a line can hold |
//! | `qemu`, `ftrace` | the formats, a file each |
//! | `open` | files, pipes, standard input |
//! | [`recording`] | reading a recording, whatever its format; what in it is damaged |
//! | [`stream`] | from maps and unmaps to allocations and frees |
//! | [`space`] | how ranges lie: span, table pages, fragmentation |
//! | `timing` | what an allocator takes for it |
//! | `requests` | what a policy sends for it |
//! | [`options`] | the command line |
//! | [`run`] | all of it, in rounds |
//! | [`report`] | the data model (`ringfence.replay/1`) and its JSON; [`table`], for people |
//!
//! # From maps and unmaps to allocations and frees
//!
//! A recording shows what reached the IOMMU, not the guest's calls to its allocator. That is
//! derived: **the mappings that one unmap removes, as far as they lie side by side, were one
//! allocation**. It was made when the first of them was mapped and freed when they were unmapped (a
//! buffer of scattered memory is allocated once, mapped page by page and unmapped at once). What is
//! never unmapped is live to the end, each mapping an allocation of its own.
//!
//! What cannot be known from a recording:
//!
//! * a guest with lazy invalidation frees a range some time after its unmap. The replay frees it at
//!   once, so each allocator works with what is mapped; only the row `recorded` shows where the
//!   guest put things while it also held what waited for its flush;
//! * an allocation larger than what was mapped of it (the pads between the pieces of a scatter list)
//!   counts with what was mapped;
//! * allocations that lie side by side and go with one unmap count as one.
//!
//! What is left out is counted: maps of what is mapped already, unmaps of nothing, and (by QEMU's
//! virtio-iommu, which refuses them) unmaps that would cut a mapping. In ftrace text an unmap may
//! cut a mapping: each part is then an allocation of its own.

mod event;
mod ftrace;
pub mod lines;
mod open;
pub mod options;
mod qemu;
pub mod recording;
pub mod report;
mod requests;
pub mod run;
pub mod space;
pub mod stream;
pub mod table;
mod timing;

#[cfg(test)]
mod sample;

pub(crate) use open::read_all as read;
pub use options::Options;
pub use recording::{Format, Recording};
pub use report::Report;
pub use ringfence_dma::Policy;
pub use run::{Ended, replay};
pub use stream::Stream;
