//! What a fake kernel did, in order.

/// A thing that a fake kernel did. Pages are of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Pages were pinned in one call, at most 512 (rule L52).
    Pinned {
        /// The first one's address in the process.
        vaddr: u64,
        /// How many.
        pages: u64,
    },
    /// A run was mapped in an IOMMU.
    Mapped {
        /// Which IOMMU.
        iommu: u32,
        /// The first address.
        iova: u64,
        /// The first frame.
        pfn: u64,
        /// How many.
        pages: u64,
        /// Whether the frames belong to nobody (PFNMAP).
        reserved: bool,
    },
    /// What lay in a range was taken out of an IOMMU's tables; its IOTLB may still know it.
    Unmapped {
        /// Which IOMMU.
        iommu: u32,
        /// The first address.
        iova: u64,
        /// How many pages it was asked to remove.
        asked: u64,
        /// How many it removed.
        removed: u64,
    },
    /// An IOMMU's IOTLB was made to forget all that was unmapped.
    Synced {
        /// Which IOMMU.
        iommu: u32,
        /// How many regions had been gathered.
        regions: u64,
    },
    /// Pages were given back.
    Unpinned {
        /// Where they were mapped.
        iova: u64,
        /// The first frame.
        pfn: u64,
        /// How many.
        pages: u64,
    },
    /// Two pages were mapped and one unmapped, to see whether it comes alone (rule L58).
    Probed {
        /// Which IOMMU.
        iommu: u32,
        /// Whether both went.
        both: bool,
    },
    /// Who holds external pins was told to give them up (rule L62).
    Notified {
        /// The mapping.
        iova: u64,
        /// Its size in bytes.
        size: u64,
    },
    /// A page was pinned externally for the first time.
    PinnedExternally {
        /// Where it is mapped.
        iova: u64,
    },
    /// A page's last external pin went.
    UnpinnedExternally {
        /// Where it is mapped.
        iova: u64,
    },
}

/// The log. What comes after a million events is not kept.
#[derive(Debug, Default)]
pub(super) struct Log(Vec<Event>);

impl Log {
    pub(super) fn push(&mut self, event: Event) {
        if self.0.len() < 1 << 20 {
            self.0.push(event);
        }
    }

    /// What happened since this was asked last.
    pub(super) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.0)
    }
}
