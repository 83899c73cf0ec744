//! Jobs, measurement, statistics and reports: what a DMA policy costs on this machine.
//!
//! A comparison, from module to module:
//!
//! | module | what it holds |
//! |---|---|
//! | [`job`] | fio job files, checked, and the scale that fits them to a machine |
//! | [`workload`] | which block a job touches next |
//! | [`block`] | blocks that describe themselves, so that every byte read can be checked |
//! | [`run`] | driver and device process, and policies in interleaved rounds |
//! | [`stats`] | medians and intervals over interleaved rounds, ratios to `off`, latency |
//! | [`report`] | the data model (`ringfence.compare/1`): JSON, summary, table, picture, HTML |
//!
//! Other measurements, and what all share:
//!
//! | module | what it holds |
//! |---|---|
//! | [`mod@bench`] | components, beside their peers |
//! | [`load`] | front ends that load back ends over vhost-user |
//! | [`replay`] | recorded streams of maps and unmaps, under other allocators and policies |
//! | [`placement`] | what a placement of I/O virtual addresses costs the hardware, by a model |
//! | [`allocators`] | the allocators, and where they put ranges, by name |
//! | [`list`] | values on the command line: names, numbers with units, lists |
//! | [`progress`] | how far a run is |

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
mod ranges;
pub mod replay;
pub mod report;
pub mod run;
pub mod stats;
mod text;
pub mod workload;
