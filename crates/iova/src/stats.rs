//! Statistics of an allocator.

/// What an allocator has done since it was made, and what it holds now.
///
/// A stack of allocators adds up: each wrapper reports what its own callers see and adds the
/// figures of the allocator below. Figures that an allocator does not have stay 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Requests that were met.
    pub allocs: u64,
    /// Ranges taken back.
    pub frees: u64,
    /// Requests that failed.
    pub failures: u64,
    /// Frees that were refused: double, unknown, or of the wrong size.
    pub rejected_frees: u64,
    /// Ranges that are taken in the tree or bitmap, including those that are
    /// [cached](Self::cached_ranges) and the bitmap's freed ranges that wait for a flush.
    pub live_ranges: u64,
    /// The bytes of these ranges.
    pub live_bytes: u64,
    /// Searches of the tree or bitmap.
    pub searches: u64,
    /// Holes (tree) or candidate places (bitmap) that they examined.
    pub search_steps: u64,
    /// Requests refused without a search, because a weaker one had just failed (rule [L13]).
    ///
    /// [L13]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l13
    pub skipped_searches: u64,
    /// Laps of the bitmap: each made exactly one flush in lazy mode (rule [L16]).
    ///
    /// [L16]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l16
    pub laps: u64,
    /// Requests met from magazines, or from a CPU's slabs.
    pub cache_hits: u64,
    /// Ranges in magazines, or free in slabs, now.
    pub cached_ranges: u64,
    /// Full magazines in the depot, or slabs that are all free, now.
    pub depot_magazines: u64,
    /// Times that every cache was drained because a request found nothing (rule [L11]).
    ///
    /// [L11]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l11
    pub drains: u64,
}
