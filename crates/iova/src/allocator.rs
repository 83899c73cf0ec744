//! The trait of all allocators.

use core::ops::Deref;

use crate::{AllocError, FreeError, Request, ReserveError, Stats};

/// Hands out ranges of I/O virtual addresses, from many threads at once.
///
/// Every implementation guarantees: ranges that are allocated at the same time overlap neither each
/// other nor any reserved granule (rule [L15]); they start at a multiple of the granule (rule [L1])
/// and of the alignment, end at or below the limit and the aperture's end, cross no segment
/// boundary, and never contain IOVA 0 (rule [L2]).
///
/// [L15]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l15
/// [L1]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l1
/// [L2]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l2
pub trait Allocator: Send + Sync {
    /// Allocates a range of at least `request.size` bytes and returns its first address.
    ///
    /// # Errors
    /// The request is invalid, or nothing is free for it: [`AllocError`] says which.
    fn alloc(&self, request: &Request) -> Result<u64, AllocError>;

    /// Gives back the range of `size` bytes at `iova`: the requested size, or that size rounded up
    /// to the granule.
    ///
    /// # Errors
    /// That range is not allocated (never was, was freed before, has another size, is reserved).
    /// Nothing has changed. [`Magazines`](crate::Magazines) detect this for sizes that they cache
    /// only if [`checked`](crate::MagazineConfig::checked), as it costs a search.
    fn free(&self, iova: u64, size: u64) -> Result<(), FreeError>;

    /// Reserves the addresses from `first` to `last` (both included, rounded outwards to granules):
    /// they are never handed out. Reservations may overlap: they merge (rule [L15]). Addresses
    /// outside the aperture are never handed out anyway.
    ///
    /// # Errors
    /// The range is inverted, or part of it is allocated; or, in a lazy [`Bitmap`](crate::Bitmap),
    /// freed and not flushed.
    ///
    /// [L15]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l15
    fn reserve(&self, first: u64, last: u64) -> Result<(), ReserveError>;

    /// Returns what [`free`](Self::free) would return, without freeing; of
    /// [`Magazines`](crate::Magazines) that are not checked, what the allocator below would return.
    ///
    /// # Errors
    /// As [`free`](Self::free).
    fn check_free(&self, iova: u64, size: u64) -> Result<(), FreeError>;

    /// The granule, in bytes: every range starts and ends at a multiple of it (rule [L1]).
    ///
    /// [L1]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l1
    fn granule(&self) -> u64;

    /// Statistics so far. Counters of several threads are read one after the other.
    fn stats(&self) -> Stats;

    /// Gives cached ranges back to the tree, or to the allocator below. The default does nothing,
    /// for an allocator without a cache.
    fn drain(&self) {}
}

/// The methods besides `alloc`, of an allocator that passes them on.
macro_rules! pass_on {
    ($this:ident => $inner:expr) => {
        #[inline]
        fn free(&$this, iova: u64, size: u64) -> Result<(), $crate::FreeError> {
            $inner.free(iova, size)
        }
        fn reserve(&$this, first: u64, last: u64) -> Result<(), $crate::ReserveError> {
            $inner.reserve(first, last)
        }
        fn check_free(&$this, iova: u64, size: u64) -> Result<(), $crate::FreeError> {
            $inner.check_free(iova, size)
        }
        fn granule(&$this) -> u64 {
            $inner.granule()
        }
        fn stats(&$this) -> $crate::Stats {
            $inner.stats()
        }
        fn drain(&$this) {
            $inner.drain();
        }
    };
}

pub(crate) use pass_on;

impl<P: Deref<Target: Allocator> + Send + Sync> Allocator for P {
    #[inline]
    fn alloc(&self, request: &Request) -> Result<u64, AllocError> {
        (**self).alloc(request)
    }
    pass_on!(self => (**self));
}
