//! Jobs, measurement, statistics and reports: what a DMA policy costs on this machine.
//!
//! The way of a comparison, module by module:
//!
//! | module | what it holds |
//! |---|---|
//! | [`job`] | fio job files, checked, and the scale that fits them to a machine |
//! | [`workload`] | which block a job touches next |
//! | [`block`] | blocks that describe themselves, so that every byte read can be checked |
//! | [`stats`] | medians and intervals over interleaved rounds, ratios to `off`, latency |
//! | [`report`] | the data model (`ringfence.compare/1`), and its three faces: table, JSON, HTML |
//! | [`progress`] | how far it is |

pub mod allocators;
pub mod bench;
pub mod block;
pub mod job;
pub mod list;
pub mod load;
mod memory;
pub mod placement;
pub mod progress;
mod random;
pub mod replay;
pub mod report;
pub mod run;
pub mod stats;
mod text;
pub mod workload;
