//! Frames in fresh addresses where Ringfence is the IOMMU too: the network device and its
//! virtio-iommu in one process, and a driver that maps each frame's buffer by the DMA API.
//!
//! | file | what it holds |
//! |---|---|
//! | `mapped.rs` | how buffers are mapped: what a row is |
//! | `link.rs` | the device process, memory, front ends, the DMA API |
//! | `ring.rs` | one ring whose buffers are mapped for each use |
//! | `driver.rs` | a pair of them |
//! | `load.rs` | one measurement |
//!
//! The IOMMU's table is the one that the device translates in: a completed MAP is in it, and
//! nothing misses. Each use of a buffer has a page of addresses of its own, which is unmapped,
//! under a strict policy, before the driver has the buffer again.

mod driver;
mod link;
mod load;
mod mapped;
mod ring;
#[cfg(test)]
mod tests;

pub(super) use load::measure;
pub(super) use mapped::Mapped;
