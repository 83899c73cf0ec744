//! How a domain uses a kernel's mappings, and how many it has.

/// How a domain uses the mappings that a kernel gives it.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// Whether mappings that are made known by one
    /// [`iotlb_sync_map`](ringfence_iommu::Domain::iotlb_sync_map) become one mapping of the kernel's
    /// where they follow each other (address, target and permission), so that few are used.
    ///
    /// What has become one is unmapped as one: an unmap of a part of it is
    /// [`WouldSplit`](ringfence_iommu::Error::WouldSplit), and removes nothing. So this is for
    /// an owner that unmaps together what it has synced together, and off by default; the buffers of a
    /// `MapBatch` of `ringfence-dma`, for one, may be unmapped one by one. What follows each other
    /// within one call (a scatter list, `map_batch`) becomes one mapping in any case.
    pub merge: bool,
    /// The most bytes of one mapping of the kernel's, a power of two: what is longer is made, and
    /// removed, in as many steps, between which others have their turn (the kernel keeps everybody
    /// else out of the container while it pins, some 50 to 250 ms a GiB), and costs as many of the
    /// [budget](crate::Type1::available). 1 GiB by default, which is the largest page too.
    pub chunk: u64,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning { merge: false, chunk: 1 << 30 }
    }
}

/// How a domain's mappings stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// What can be unmapped by itself.
    pub mappings: u64,
    /// Mappings of the kernel's: what counts against its budget.
    pub entries: u64,
    /// Unmaps of which the kernel said that they removed less, or more, than was mapped here: someone
    /// else changes the address space too.
    pub mismatches: u64,
}
