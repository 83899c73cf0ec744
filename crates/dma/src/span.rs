//! The IOVA range of a mapping, mapped or unmapped.

use std::sync::Arc;

use ringfence_iommu::Range;

use crate::flush::Watch;

/// The IOVA range of a mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    /// All of it, in whole granules, pads included.
    pub(crate) range: Range,
    /// How many bytes of it are mapped.
    pub(crate) mapped: u64,
}

/// An IOVA after its unmap, for a watcher.
pub(crate) struct Unmapped {
    pub(crate) since_ns: u64,
    pub(crate) watch: Arc<Watch>,
}
