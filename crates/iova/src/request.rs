//! Requests to an allocator.

/// The alignment of a range's first address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Align {
    /// The size, rounded up to a power of two (rule [L4]). The DMA path needs this: the range can
    /// then be mapped with the largest pages that its memory allows, and crosses no segment
    /// boundary with a spacing of at least its size.
    ///
    /// [L4]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l4
    #[default]
    Size,
    /// This many bytes, a power of two; less than the granule counts as the granule.
    Bytes(u64),
}

/// A request to an [`Allocator`](crate::Allocator).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// Bytes; rounded up to whole granules. Not 0.
    pub size: u64,
    /// The alignment of the first address.
    pub align: Align,
    /// The last address the range may contain: the device's mask (rule [L2]).
    ///
    /// [L2]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l2
    pub limit: u64,
    /// A mask 2^n-1: the range holds no two addresses that differ above it. All ones: no boundary.
    pub boundary: u64,
    /// When nothing is free: take back what all CPUs have cached, and try once more (rule [L11]).
    ///
    /// [L11]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l11
    pub flush: bool,
}

impl Request {
    /// A request for `size` bytes, aligned to their size, anywhere; drains the caches before it
    /// fails.
    #[inline]
    pub const fn new(size: u64) -> Request {
        Request { size, align: Align::Size, limit: u64::MAX, boundary: u64::MAX, flush: true }
    }

    /// The same with another alignment.
    #[inline]
    #[must_use]
    pub const fn align(self, align: Align) -> Request {
        Request { align, ..self }
    }

    /// The same, ending at or below `limit`.
    #[inline]
    #[must_use]
    pub const fn limit(self, limit: u64) -> Request {
        Request { limit, ..self }
    }

    /// The same, within one segment of `boundary + 1` bytes.
    #[inline]
    #[must_use]
    pub const fn boundary(self, boundary: u64) -> Request {
        Request { boundary, ..self }
    }

    /// The same, draining caches when nothing else is free, or not.
    #[inline]
    #[must_use]
    pub const fn flush(self, flush: bool) -> Request {
        Request { flush, ..self }
    }
}
