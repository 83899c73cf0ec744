//! The default allocator.

use ringfence_sync::cpu::CpuId;

use crate::{
    AllocError, Allocator, Aperture, FreeError, Magazines, RbTree, Request, ReserveError, Stats,
};

/// Where an allocator puts ranges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Ranges of one size class side by side in slabs, from the top of the aperture down: the
    /// fastest.
    #[default]
    SizeAligned,
    /// Always the lowest place that meets the request.
    Lowest,
    /// Always the highest place that meets the request.
    Highest,
}

/// How [`Slabs`] are set up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SlabConfig {
    /// Where ranges go.
    pub placement: Placement,
}

/// The default allocator.
pub struct Slabs<C: CpuId> {
    inner: Magazines<RbTree, C>,
}

impl<C: CpuId> Slabs<C> {
    /// All of `aperture` is free.
    pub fn new(aperture: Aperture, cpu: C) -> Self {
        Self::with_config(aperture, cpu, SlabConfig::default())
    }

    /// As [`new`](Self::new), set up by `config`.
    pub fn with_config(aperture: Aperture, cpu: C, _config: SlabConfig) -> Self {
        Slabs { inner: Magazines::new(RbTree::new(aperture), cpu) }
    }
}

impl<C: CpuId> Allocator for Slabs<C> {
    fn alloc(&self, request: &Request) -> Result<u64, AllocError> {
        self.inner.alloc(request)
    }
    fn free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        self.inner.free(iova, size)
    }
    fn reserve(&self, first: u64, last: u64) -> Result<(), ReserveError> {
        self.inner.reserve(first, last)
    }
    fn check_free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        self.inner.check_free(iova, size)
    }
    fn granule(&self) -> u64 {
        self.inner.granule()
    }
    fn stats(&self) -> Stats {
        self.inner.stats()
    }
    fn drain(&self) {
        self.inner.drain();
    }
}
