//! What a fake kernel did, in order.

/// An action of a fake kernel. Pages are of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Pages were pinned in one call, at most 512 (rule [L52]).
    ///
    /// [L52]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l52
    Pinned {
        /// The address of the first page in the process.
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
        /// Whether the frames are not ordinary memory (PFNMAP).
        reserved: bool,
    },
    /// A range was removed from an IOMMU's tables; its IOTLB may still have translations for it.
    Unmapped {
        /// Which IOMMU.
        iommu: u32,
        /// The first address.
        iova: u64,
        /// How many pages were to be removed.
        asked: u64,
        /// How many it removed.
        removed: u64,
    },
    /// An IOMMU's IOTLB was invalidated for everything that was unmapped.
    Synced {
        /// Which IOMMU.
        iommu: u32,
        /// How many regions had been gathered.
        regions: u64,
    },
    /// Pages were unpinned.
    Unpinned {
        /// Where they were mapped.
        iova: u64,
        /// The first frame.
        pfn: u64,
        /// How many.
        pages: u64,
    },
    /// Two pages were mapped and one unmapped, to see whether only that one goes (rule [L58]).
    ///
    /// [L58]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l58
    Probed {
        /// Which IOMMU.
        iommu: u32,
        /// Whether both went.
        both: bool,
    },
    /// Holders of external pins were notified that they must release them (rule [L62]).
    ///
    /// [L62]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l62
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
    /// The last external pin of a page was released.
    UnpinnedExternally {
        /// Where it is mapped.
        iova: u64,
    },
}

/// The log. Events after the first million are dropped.
#[derive(Debug, Default)]
pub(super) struct Log(Vec<Event>);

impl Log {
    pub(super) fn push(&mut self, event: Event) {
        if self.0.len() < 1 << 20 {
            self.0.push(event);
        }
    }

    /// Takes the events since the last call.
    pub(super) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.0)
    }
}
