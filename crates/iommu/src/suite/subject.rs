//! What is checked.

use crate::{Domain, Iova, Map, Prot, Range};

/// So many granules of memory a subject has, one after the other.
pub const MEMORY: u64 = 72;

/// A domain, and a device behind it.
pub trait Subject {
    /// The kind of domain.
    type Domain: Domain;

    /// The domain.
    fn domain(&self) -> &Self::Domain;

    /// A mapping of `range` to the subject's memory from granule `to` on.
    fn map(&self, range: Range, to: u64, prot: Prot) -> Map<<Self::Domain as Domain>::Target>;

    /// Where an access of the device at `iova` leads, as the number of an address; `None` if it is
    /// refused. A device that has a cache keeps what it found until it is invalidated.
    ///
    /// The device runs by itself: a sync that waits for it ends.
    fn access(&mut self, iova: Iova, prot: Prot) -> Option<u64>;

    /// Has the next sync of an unmap fail, if that can be had.
    fn fail_next(&mut self) -> bool {
        false
    }
}
