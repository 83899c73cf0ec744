//! Running a comparison: the driver process and the device process, policies in interleaved
//! rounds, every figure measured between the two.
//!
//! | module | what it holds |
//! |---|---|
//! | [`compare`] | rounds, rows, what a round's figures are made of |
//! | `engine` | one job thread |
//! | `path` | the ways from a job to the disk: virtqueues, or none |
//! | `probe` | whether unmapped memory is still reached |
//! | `link` | the driver process's side: memory, front ends, the DMA API |
//! | [`device`] | the device process |
//! | `target` | the disk |

pub mod compare;
pub mod device;
mod engine;
mod link;
mod path;
mod probe;
mod target;

pub use compare::{Ended, Options, Row, compare};
pub use device::device_main;
pub use ringfence_devices::worker::Notify;
pub use target::DiskChoice;
