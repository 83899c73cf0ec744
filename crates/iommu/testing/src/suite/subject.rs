//! What is checked.

use ringfence_iommu::{Domain, Iova, Map, Prot, Range};

/// How many contiguous granules of memory a subject has.
pub const MEMORY: u64 = 72;

/// A domain, and a device behind it.
pub trait Subject {
    /// The kind of domain.
    type Domain: Domain;

    /// The domain.
    fn domain(&self) -> &Self::Domain;

    /// A mapping of `range` to the subject's memory from granule `to` on.
    fn map(&self, range: Range, to: u64, prot: Prot) -> Map<<Self::Domain as Domain>::Target>;

    /// The target of a device access at `iova`, as a raw address; `None` if it is refused. A device
    /// with a cache keeps what it found until it is invalidated.
    ///
    /// The device runs on its own: a sync that waits for it ends.
    fn access(&mut self, iova: Iova, prot: Prot) -> Option<u64>;

    /// Makes the next sync of an unmap fail; false if that is not possible.
    fn fail_next(&mut self) -> bool {
        false
    }
}
