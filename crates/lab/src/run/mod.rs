//! Running a comparison: the driver process and the device process, policies in interleaved
//! rounds, every figure measured between the two.
//!
//! | module | what it holds |
//! |---|---|
//! | [`mod@compare`] | rounds: every row once, then every row again |
//! | `options` | what to compare, and how |
//! | `row` | the rows, by name |
//! | [`tuning`] | how a policy is carried out, beyond its name |
//! | [`space`] | the I/O virtual addresses of a link: which allocator, how many bits |
//! | `figures` | what a round's figures are made of |
//! | `engine` | one job thread |
//! | `path` | the ways from a job to the disk; those without virtqueues |
//! | `mapped` | the way through the DMA API |
//! | `probe` | whether unmapped memory is still reached |
//! | `standing` | the ways in memory that stays mapped |
//! | `plan` | what a link is for |
//! | `link` | the driver process's side of a disk: its queues, the buffers of jobs |
//! | `viommu` | the same of any device behind a virtio-iommu: memory, front ends, the DMA API |
//! | `process` | the device process, from that side |
//! | `proxied` | a proxy between the two |
//! | `bare` | a link without jobs, for benchmarks |
//! | [`device`] | the device process |
//! | `target` | the disk |
//! | `load` | busy threads beside it |

pub(crate) mod bare;
pub mod compare;
pub mod device;
mod engine;
mod figures;
pub(crate) mod link;
pub(crate) mod load;
mod mapped;
mod options;
mod path;
mod plan;
mod probe;
pub(crate) mod process;
mod proxied;
mod row;
pub mod space;
mod standing;
mod target;
pub mod tuning;
pub(crate) mod viommu;

pub use compare::{Ended, compare};
pub use device::device_main;
pub use options::Options;
pub use ringfence_run::worker::Notify;
pub use row::Row;
pub(crate) use space::Dma;
pub use target::DiskChoice;

/// The options cannot be carried out: wrong usage, found before anything ran.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// Sets `stop` on Ctrl-C, SIGTERM and SIGHUP. A second Ctrl-C ends the program at once.
///
/// # Errors
/// The system refused.
pub fn stop_on_signals(
    stop: &std::sync::Arc<std::sync::atomic::AtomicBool>,
) -> std::io::Result<()> {
    use signal_hook::{consts, flag};
    // Registered first: when the flag is set already, this one acts.
    flag::register_conditional_shutdown(consts::SIGINT, 130, std::sync::Arc::clone(stop))?;
    for signal in [consts::SIGINT, consts::SIGTERM, consts::SIGHUP] {
        flag::register(signal, std::sync::Arc::clone(stop))?;
    }
    Ok(())
}
