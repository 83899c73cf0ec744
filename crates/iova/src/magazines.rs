//! stub
use ringfence_sync::cpu::CpuId;

use crate::{AllocError, Allocator, FreeError, Request, ReserveError, Stats};

/// How many ranges a magazine holds.
pub const MAGAZINE_SLOTS: usize = 127;
/// Ranges of 1, 2, 4, 8, 16 and 32 granules are cached.
pub const SIZE_CLASSES: usize = 6;
/// The largest cached range, in granules (rule L6).
pub const LARGEST_CACHED: u64 = 1 << (SIZE_CLASSES - 1);
/// The depot gives back at most one magazine a class in this time (rule L10).
pub const TRIM_INTERVAL_NS: u64 = 100_000_000;

/// How [`Magazines`] are set up.
#[derive(Clone, Copy, Debug)]
pub struct MagazineConfig {
    /// How many magazines may exist (1 KiB each). Default: no bound.
    pub max_magazines: usize,
    /// Whether a free is checked before it is cached. Default: with debug assertions.
    pub checked: bool,
}

impl Default for MagazineConfig {
    fn default() -> Self {
        MagazineConfig { max_magazines: usize::MAX, checked: cfg!(debug_assertions) }
    }
}

/// Per-CPU caches of freed ranges in front of another allocator.
pub struct Magazines<A: Allocator, C: CpuId> {
    _todo: core::marker::PhantomData<(A, C)>,
}

impl<A: Allocator, C: CpuId> Magazines<A, C> {
    /// Empty caches in front of `inner`.
    pub fn new(inner: A, cpu: C) -> Self {
        Self::with_config(inner, cpu, MagazineConfig::default())
    }
    /// Empty caches in front of `inner`, set up by `config`.
    pub fn with_config(inner: A, cpu: C, config: MagazineConfig) -> Self {
        let _ = (inner, cpu, config);
        todo!()
    }
    /// The allocator below.
    pub fn inner(&self) -> &A {
        todo!()
    }
    /// Trims the depot (rule L10). To be called now and then, by whoever has a timer.
    pub fn tick(&self, now_ns: u64) {
        let _ = now_ns;
        todo!()
    }
    /// Gives back what `cpu` has cached; it caches nothing until [`online`](Self::online).
    pub fn offline(&self, cpu: usize) {
        let _ = cpu;
        todo!()
    }
    /// Lets `cpu` cache again.
    pub fn online(&self, cpu: usize) {
        let _ = cpu;
        todo!()
    }
}

impl<A: Allocator, C: CpuId> Allocator for Magazines<A, C> {
    fn alloc(&self, _: &Request) -> Result<u64, AllocError> {
        todo!()
    }
    fn free(&self, _: u64, _: u64) -> Result<(), FreeError> {
        todo!()
    }
    fn reserve(&self, _: u64, _: u64) -> Result<(), ReserveError> {
        todo!()
    }
    fn is_allocated(&self, _: u64, _: u64) -> bool {
        todo!()
    }
    fn granule(&self) -> u64 {
        todo!()
    }
    fn stats(&self) -> Stats {
        todo!()
    }
}
