//! How a domain uses kernel mappings, and how many it has.

/// How a domain uses kernel mappings.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// Whether mappings that one [`iotlb_sync_map`](ringfence_iommu::Domain::iotlb_sync_map) syncs
    /// become one kernel mapping where they follow each other (address, target and permission), so
    /// that few are used.
    ///
    /// Merged mappings are unmapped as one: an unmap of a part of them is
    /// [`WouldSplit`](ringfence_iommu::Error::WouldSplit), and removes nothing. So this is for an
    /// owner that unmaps together what it has synced together, and off by default; the buffers of a
    /// `MapBatch` of `ringfence-dma`, for one, may be unmapped one by one. Ranges that follow each
    /// other within one call (a scatter list, `map_batch`) become one mapping in any case.
    pub merge: bool,
    /// The most bytes of one kernel mapping: rounded down to a power of two, a granule at least,
    /// and less where a bitmap of dirty pages covers less. A longer range is made, and removed, in
    /// several steps, between which other threads have their turn (the kernel locks the container
    /// while it pins, some 50 to 250 ms per GiB), and takes as many entries of the
    /// [budget](crate::Type1::available). 1 GiB by default, which is the largest page too.
    pub chunk: u64,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning { merge: false, chunk: 1 << 30 }
    }
}

/// The counts of a domain's mappings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Mappings that can be unmapped on their own.
    pub mappings: u64,
    /// Kernel mappings, which count against the kernel's budget.
    pub entries: u64,
    /// Unmaps for which the kernel reported fewer, or more, bytes than were mapped here: something
    /// else changes the address space too.
    pub mismatches: u64,
}
