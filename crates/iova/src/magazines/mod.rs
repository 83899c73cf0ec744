//! Caches of freed ranges, per CPU.

mod checks;
mod magazine;

use alloc::boxed::Box;
use core::{fmt, mem};

use ringfence_sync::{
    CachePadded,
    atomic::{AtomicU64, AtomicUsize, Ordering},
    cpu::CpuId,
    lock::SpinLock,
};

use crate::{
    Align, AllocError, AllocReason, Allocator, FreeError, FreeReason, Request, ReserveError, Stats,
};
use checks::Checks;
pub use magazine::MAGAZINE_SLOTS;
use magazine::{Budget, Depot, Magazine};

/// How many sizes are cached: ranges of 1, 2, 4, 8, 16 and 32 granules.
pub const SIZE_CLASSES: usize = 6;
/// The largest cached range, in granules (rule [L6]).
///
/// [L6]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l6
pub const LARGEST_CACHED: u64 = 1 << (SIZE_CLASSES - 1);
/// The depot gives back at most one magazine per class in this time, 100 ms (rule [L10]).
///
/// [L10]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l10
pub const TRIM_INTERVAL_NS: u64 = 100_000_000;

/// How [`Magazines`] are set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MagazineConfig {
    /// How many magazines may exist (1 KiB each), full or not; beyond that, a free that needs
    /// another one goes to the allocator below (rule [L7]). Default: no bound, as in Linux.
    ///
    /// [L7]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l7
    pub max_magazines: usize,
    /// Whether a free is checked before it is cached, by a set of the cached ranges and a look-up
    /// below. Default: only in builds with debug assertions.
    pub checked: bool,
}

impl Default for MagazineConfig {
    fn default() -> Self {
        MagazineConfig { max_magazines: usize::MAX, checked: cfg!(debug_assertions) }
    }
}

/// Per-CPU caches of freed ranges in front of another allocator: Bonwick's magazines as in Linux's
/// `iova.c`.
///
/// A size of up to [`LARGEST_CACHED`] granules is rounded up to a power of two before it is
/// requested below (rule [L5]) and aligned to that, even if the request needs less: there are six
/// classes of ranges, and within a class all are alike. Hence a request with a smaller alignment
/// fails when only less aligned places are left. Each CPU has two magazines per class, *loaded* and
/// *previous*; when a freed range finds both full, one goes to the *depot*, and when a request
/// finds both empty, one comes from there. Two are needed so that a CPU on the boundary does not go
/// to the depot for every range. Larger ranges go straight to the allocator below (rule [L6]).
///
/// A cached range stays allocated below (rule [L9]), so nothing else can be allocated there. The
/// allocator below sees a free only when the caches give ranges back: [`tick`](Self::tick) trims
/// the depot, [`offline`](Self::offline) empties a CPU, and a request that finds nothing anywhere
/// drains everything and tries once more (rule [L11]). Dropping the caches gives back everything.
///
/// A wrong free of a cached size is detected only if [`checked`](MagazineConfig::checked), except
/// that a wrong alignment always is. Unchecked, a range that is freed twice is handed out twice:
/// this is for callers that cannot do that, such as the owner of a mapping in `ringfence-dma`.
///
/// [L5]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l5
/// [L6]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l6
/// [L9]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l9
/// [L11]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l11
pub struct Magazines<A: Allocator, C: CpuId> {
    inner: A,
    cpu: C,
    cpus: Box<[CachePadded<SpinLock<Cpu>>]>,
    depots: [CachePadded<SpinLock<Depot>>; SIZE_CLASSES],
    budget: Budget,
    checks: Option<Checks>,
    granule_shift: u32,
    online: AtomicUsize,
    /// Ranges given back below, and failures: all off the fast path.
    returned: AtomicU64,
    failures: AtomicU64,
    rejected: AtomicU64,
    drains: AtomicU64,
}

struct Cpu {
    online: bool,
    classes: [Pair; SIZE_CLASSES],
    hits: u64,
    frees: u64,
}

#[derive(Default)]
struct Pair {
    loaded: Magazine,
    previous: Magazine,
}

/// A cached size class.
#[derive(Clone, Copy)]
struct Class {
    index: usize,
    /// In bytes, rounded up.
    size: u64,
}

impl<A: Allocator, C: CpuId> Magazines<A, C> {
    /// Empty caches in front of `inner`, for the CPUs of `cpu`, all online.
    pub fn new(inner: A, cpu: C) -> Self {
        Self::with_config(inner, cpu, MagazineConfig::default())
    }

    /// As [`new`](Self::new), set up by `config`.
    pub fn with_config(inner: A, cpu: C, config: MagazineConfig) -> Self {
        let count = cpu.count().max(1);
        let empty = || Cpu { online: true, classes: Default::default(), hits: 0, frees: 0 };
        Magazines {
            cpus: (0..count).map(|_| CachePadded::new(SpinLock::new(empty()))).collect(),
            depots: Default::default(),
            budget: Budget::new(config.max_magazines),
            checks: config.checked.then(Checks::new),
            granule_shift: inner.granule().trailing_zeros(),
            online: AtomicUsize::new(count),
            returned: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            drains: AtomicU64::new(0),
            inner,
            cpu,
        }
    }

    /// The allocator below.
    pub fn inner(&self) -> &A {
        &self.inner
    }

    /// Trims the depot (rule [L10]): of each size class, one full magazine goes back to the
    /// allocator below if there are more than CPUs online and none went back in the last
    /// [`TRIM_INTERVAL_NS`].
    ///
    /// To be called now and then, for example by a timer, always with the time of the same clock.
    ///
    /// [L10]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l10
    pub fn tick(&self, now_ns: u64) {
        let online = self.online.load(Ordering::Relaxed);
        for (index, depot) in self.depots.iter().enumerate() {
            let trimmed = depot.lock().trim(now_ns, online, TRIM_INTERVAL_NS);
            if let Some(magazine) = trimmed {
                self.give_back(self.class(index), magazine);
            }
        }
    }

    /// Gives back what `cpu` has cached (rule [L9]). It caches nothing until
    /// [`online`](Self::online): a thread that still runs there uses the allocator below. No effect
    /// if there is no such CPU.
    ///
    /// [L9]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l9
    pub fn offline(&self, cpu: usize) {
        let Some(cpu) = self.cpus.get(cpu) else { return };
        let mut cpu = cpu.lock();
        if mem::replace(&mut cpu.online, false) {
            self.online.fetch_sub(1, Ordering::Relaxed);
        }
        let classes = mem::take(&mut cpu.classes);
        drop(cpu);
        self.give_back_pairs(classes);
    }

    /// Lets `cpu` cache again.
    pub fn online(&self, cpu: usize) {
        let Some(cpu) = self.cpus.get(cpu) else { return };
        if !mem::replace(&mut cpu.lock().online, true) {
            self.online.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The class that caches `size` bytes.
    #[inline]
    fn class_of(&self, size: u64) -> Option<Class> {
        let last = size.checked_sub(1)? >> self.granule_shift;
        if last >= LARGEST_CACHED {
            return None;
        }
        // By granules less one: 0 is class 0, 1 is class 1, 2 and 3 are class 2, and so on.
        let class = self.class((u64::BITS - last.leading_zeros()) as usize);
        // If the granule is so large that the size does not fit 64 bits, the class does not exist.
        (class.size != 0).then_some(class)
    }

    #[inline]
    fn class(&self, index: usize) -> Class {
        let bit = self.granule_shift + index as u32;
        Class { index, size: 1u64.checked_shl(bit).unwrap_or(0) }
    }

    #[inline]
    fn this_cpu(&self) -> &SpinLock<Cpu> {
        // The number is only a hint, so the index is checked.
        self.cpus.get(self.cpu.current()).unwrap_or(&self.cpus[0])
    }

    /// A cached range of `class` that ends at or below `limit` (rule L8).
    #[inline]
    fn take(&self, class: Class, limit: u64) -> Option<u64> {
        let mut cpu = self.this_cpu().lock();
        if !cpu.online {
            return None;
        }
        let Pair { loaded, previous } = &mut cpu.classes[class.index];
        if loaded.slots.is_empty() {
            if !previous.slots.is_empty() {
                mem::swap(loaded, previous);
            } else {
                let full = self.depots[class.index].lock().full.pop()?;
                self.budget.retire(mem::replace(loaded, full));
            }
        }
        let iova = loaded.pop(class.size, limit)?;
        cpu.hits += 1;
        Some(iova)
    }

    /// Caches a range (rule L7); returns `false` if there is no room and none can be made.
    #[inline]
    fn put(&self, class: Class, iova: u64) -> bool {
        let mut cpu = self.this_cpu().lock();
        if !cpu.online {
            return false;
        }
        let Pair { loaded, previous } = &mut cpu.classes[class.index];
        if !self.budget.has_room(loaded) {
            if self.budget.has_room(previous) {
                mem::swap(loaded, previous);
            } else if !self.load_empty(class, loaded) {
                return false;
            }
        }
        loaded.push(iova);
        cpu.frees += 1;
        true
    }

    /// Sends the full magazine to the depot and puts an empty one in its place.
    fn load_empty(&self, class: Class, loaded: &mut Magazine) -> bool {
        let Some(empty) = self.budget.make() else { return false };
        let full = mem::replace(loaded, empty);
        match self.depots[class.index].lock().push(full) {
            Ok(()) => true,
            Err(full) => {
                self.budget.retire(mem::replace(loaded, full));
                false
            }
        }
    }

    /// Gives all ranges of a magazine back to the allocator below.
    fn give_back(&self, class: Class, magazine: Magazine) {
        for &iova in &magazine.slots {
            // Fails only if the caller, unchecked, freed what it did not own: counted.
            let counter =
                if self.free_below(class, iova).is_ok() { &self.returned } else { &self.rejected };
            counter.fetch_add(1, Ordering::Relaxed);
        }
        self.budget.retire(magazine);
    }

    /// Frees a range that is leaving the caches, or never entered them.
    fn free_below(&self, class: Class, iova: u64) -> Result<(), FreeError> {
        let free = || self.inner.free(iova, class.size);
        self.checks.as_ref().map_or_else(free, |checks| checks.remove(iova, free))
    }

    fn give_back_pairs(&self, classes: [Pair; SIZE_CLASSES]) {
        for (index, Pair { loaded, previous }) in classes.into_iter().enumerate() {
            self.give_back(self.class(index), loaded);
            self.give_back(self.class(index), previous);
        }
    }

    /// Gives all cached ranges back below.
    fn drain_all(&self) {
        for cpu in &self.cpus {
            let classes = mem::take(&mut cpu.lock().classes);
            self.give_back_pairs(classes);
        }
        for (index, depot) in self.depots.iter().enumerate() {
            let magazines = mem::take(&mut depot.lock().full);
            for magazine in magazines {
                self.give_back(self.class(index), magazine);
            }
        }
    }

    fn alloc_below(&self, request: &Request, rounded: &Request) -> Result<u64, AllocError> {
        let mut result = self.inner.alloc(rounded);
        if request.flush
            && matches!(result, Err(AllocError { reason: AllocReason::Exhausted { .. }, .. }))
        {
            self.drains.fetch_add(1, Ordering::Relaxed);
            self.drain_all();
            result = self.inner.alloc(rounded);
        }
        result.map_err(|error| {
            self.failures.fetch_add(1, Ordering::Relaxed);
            // The caller's request, not the rounded one.
            AllocError { request: *request, ..error }
        })
    }
}

impl<A: Allocator, C: CpuId> Allocator for Magazines<A, C> {
    fn alloc(&self, request: &Request) -> Result<u64, AllocError> {
        let Some(class) = self.class_of(request.size) else {
            return self.alloc_below(request, request);
        };
        // The alignment of the range regardless of the request, so that all of a class are alike.
        let (align, cached) = match request.align {
            Align::Bytes(bytes) if bytes > class.size => (Align::Bytes(bytes), false),
            Align::Bytes(bytes) if !bytes.is_power_of_two() => (Align::Bytes(bytes), false),
            _ => (Align::Bytes(class.size), true),
        };
        // A range aligned to its size crosses no boundary of at least that spacing. The allocator
        // below refuses an invalid mask.
        let boundary = request.boundary;
        let whole = boundary >= class.size - 1 && boundary & boundary.wrapping_add(1) == 0;
        if cached
            && whole
            && let Some(iova) = self.take(class, request.limit)
        {
            if let Some(checks) = &self.checks {
                checks.taken(iova);
            }
            return Ok(iova);
        }
        self.alloc_below(request, &Request { size: class.size, align, ..*request })
    }

    fn free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        let rejected = |error: FreeError| {
            self.rejected.fetch_add(1, Ordering::Relaxed);
            Err(FreeError { iova, size, ..error })
        };
        let Some(class) = self.class_of(size) else {
            return self.inner.free(iova, size).or_else(rejected);
        };
        if iova == 0 || iova & (class.size - 1) != 0 {
            return rejected(FreeError { iova, size, reason: FreeReason::NotAllocated });
        }
        if let Some(checks) = &self.checks {
            let below = || self.inner.check_free(iova, class.size);
            checks.admits((iova, size), true, below).or_else(rejected)?;
        }
        if self.put(class, iova) {
            return Ok(());
        }
        self.free_below(class, iova).or_else(rejected)
    }

    fn reserve(&self, first: u64, last: u64) -> Result<(), ReserveError> {
        match self.inner.reserve(first, last) {
            // The range in the way may only be cached.
            Err(ReserveError::InUse { .. }) => {
                self.drain_all();
                self.inner.reserve(first, last)
            }
            result => result,
        }
    }

    fn check_free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        let Some(class) = self.class_of(size) else { return self.inner.check_free(iova, size) };
        let below = || self.inner.check_free(iova, class.size);
        let result = match &self.checks {
            Some(checks) => checks.admits((iova, size), false, below),
            None => below(),
        };
        result.map_err(|error| FreeError { iova, size, ..error })
    }

    fn granule(&self) -> u64 {
        self.inner.granule()
    }

    fn stats(&self) -> Stats {
        let mut stats = self.inner.stats();
        let mut cached_frees = 0;
        for cpu in &self.cpus {
            let cpu = cpu.lock();
            stats.cache_hits += cpu.hits;
            cached_frees += cpu.frees;
            for pair in &cpu.classes {
                stats.cached_ranges += (pair.loaded.slots.len() + pair.previous.slots.len()) as u64;
            }
        }
        for depot in &self.depots {
            let full = depot.lock().full.len() as u64;
            stats.depot_magazines += full;
            stats.cached_ranges += full * MAGAZINE_SLOTS as u64;
        }
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        stats.allocs += stats.cache_hits;
        // Ranges given back below were counted as frees there, but the caller did not free them.
        stats.frees = (stats.frees + cached_frees).saturating_sub(load(&self.returned));
        stats.failures = load(&self.failures);
        stats.rejected_frees = load(&self.rejected);
        stats.drains += load(&self.drains);
        stats
    }

    fn drain(&self) {
        self.drain_all();
        self.inner.drain();
    }
}

impl<A: Allocator, C: CpuId> Drop for Magazines<A, C> {
    fn drop(&mut self) {
        // The allocator below may be shared and outlive this.
        self.drain_all();
    }
}

impl<A: Allocator + fmt::Debug, C: CpuId> fmt::Debug for Magazines<A, C> {
    ringfence_sync::shows!(Magazines as it, inner: it.inner, cpus: it.cpus.len());
}

#[cfg(all(test, not(loom)))]
mod tests;
