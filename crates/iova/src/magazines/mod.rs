//! Caches of freed ranges, per CPU.

mod checks;
mod magazine;

use alloc::{boxed::Box, vec::Vec};
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

/// Ranges of 1, 2, 4, 8, 16 and 32 granules are cached.
pub const SIZE_CLASSES: usize = 6;
/// The largest cached range, in granules (rule L6).
pub const LARGEST_CACHED: u64 = 1 << (SIZE_CLASSES - 1);
/// The depot gives back at most one magazine a class in this time, 100 ms (rule L10).
pub const TRIM_INTERVAL_NS: u64 = 100_000_000;

/// How [`Magazines`] are set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MagazineConfig {
    /// How many magazines may exist (1 KiB each), full or not; at that number a free that needs one
    /// more goes to the allocator below (rule L7). Default: no bound, as in Linux.
    pub max_magazines: usize,
    /// Whether a free is checked before it is cached: a set of what is cached, and a look-up below.
    /// Default: in builds with debug assertions.
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
/// A size of up to [`LARGEST_CACHED`] granules is rounded up to a power of two before it is asked
/// for below (rule L5) and aligned to that, even if less is asked: there are six classes of ranges,
/// and within one all are alike. A request for less alignment so fails when only places without it
/// are left. Each CPU
/// has two magazines a class, *loaded* and *previous*; when a freed range finds both full, one goes
/// to the *depot*, and when a request finds both empty, one comes from there. Two are needed so that
/// a CPU at the edge does not run to the depot for every range. Larger ranges go straight to the
/// allocator below (rule L6).
///
/// A cached range stays allocated below (rule L9), and so nothing else can be given out there. The
/// allocator below sees a free only from what the caches give back: [`tick`](Self::tick) trims the
/// depot, [`offline`](Self::offline) empties a CPU, and a request that finds nothing anywhere
/// drains everything and tries once more (rule L11). Dropping the caches gives back everything.
///
/// A wrong free of a cached size is found out only if [`checked`](MagazineConfig::checked), or, as
/// far as it concerns the alignment, always. Unchecked, freeing a range twice hands it out twice: it
/// is for callers that cannot do that, as the owner of a mapping in `ringfence-dma`.
pub struct Magazines<A: Allocator, C: CpuId> {
    inner: A,
    cpu: C,
    cpus: Box<[CachePadded<SpinLock<Cpu>>]>,
    depots: [CachePadded<SpinLock<Depot>>; SIZE_CLASSES],
    budget: Budget,
    checks: Option<Checks>,
    granule_shift: u32,
    online: AtomicUsize,
    /// Ranges given back below, and what failed: all off the fast path.
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

/// A size that is cached.
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

    /// Trims the depot (rule L10): of each size class, one full magazine goes back to the allocator
    /// below if there are more than CPUs online and none went in the last [`TRIM_INTERVAL_NS`].
    ///
    /// To be called now and then, by whoever has a timer.
    pub fn tick(&self, now_ns: u64) {
        let online = self.online.load(Ordering::Relaxed);
        for (index, depot) in self.depots.iter().enumerate() {
            let trimmed = depot.lock().trim(now_ns, online, TRIM_INTERVAL_NS);
            if let Some(magazine) = trimmed {
                self.give_back(self.class(index), magazine);
            }
        }
    }

    /// Gives back what `cpu` has cached (rule L9). It caches nothing until [`online`](Self::online):
    /// a thread that still runs there uses the allocator below. No effect if there is no such CPU.
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
        // Granules less one: 0 is class 0, 1 class 1, 2 and 3 class 2, and so on.
        let class = self.class((u64::BITS - last.leading_zeros()) as usize);
        // With a granule so large that the size does not fit, nothing of the class exists.
        (class.size != 0).then_some(class)
    }

    #[inline]
    fn class(&self, index: usize) -> Class {
        let bit = self.granule_shift + index as u32;
        Class { index, size: 1u64.checked_shl(bit).unwrap_or(0) }
    }

    #[inline]
    fn this_cpu(&self) -> &SpinLock<Cpu> {
        // The number is a hint and not to be trusted with an index.
        self.cpus.get(self.cpu.current()).unwrap_or(&self.cpus[0])
    }

    /// A cached range of `class` that ends at or below `limit` (rule L8).
    #[inline]
    fn take(&self, class: Class, limit: u64) -> Option<u64> {
        let mut cpu = self.this_cpu().lock();
        let Pair { loaded, previous } = &mut cpu.classes[class.index];
        if loaded.is_empty() {
            if !previous.is_empty() {
                mem::swap(loaded, previous);
            } else {
                let full = self.depots[class.index].lock().pop()?;
                self.budget.retire(mem::replace(loaded, full));
            }
        }
        let iova = loaded.pop(class.size, limit)?;
        cpu.hits += 1;
        Some(iova)
    }

    /// Caches a range (rule L7); `false` if there is no room and none can be made.
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
        for iova in magazine.iovas() {
            let freed = match &self.checks {
                Some(checks) => checks.remove(iova, || self.inner.free(iova, class.size)),
                None => self.inner.free(iova, class.size),
            };
            // Not so only if the caller freed what it did not have, unchecked: count it.
            let counter = if freed.is_ok() { &self.returned } else { &self.rejected };
            counter.fetch_add(1, Ordering::Relaxed);
        }
        self.budget.retire(magazine);
    }

    fn give_back_pairs(&self, classes: [Pair; SIZE_CLASSES]) {
        for (index, Pair { loaded, previous }) in classes.into_iter().enumerate() {
            self.give_back(self.class(index), loaded);
            self.give_back(self.class(index), previous);
        }
    }

    /// Everything that is cached goes back below.
    fn drain_all(&self) {
        for cpu in &self.cpus {
            let classes = mem::take(&mut cpu.lock().classes);
            self.give_back_pairs(classes);
        }
        for (index, depot) in self.depots.iter().enumerate() {
            let magazines: Vec<Magazine> = depot.lock().empty();
            for magazine in magazines {
                self.give_back(self.class(index), magazine);
            }
        }
    }

    fn alloc_below(&self, request: &Request, asked: &Request) -> Result<u64, AllocError> {
        let mut result = self.inner.alloc(asked);
        if request.flush
            && matches!(result, Err(AllocError { reason: AllocReason::Exhausted { .. }, .. }))
        {
            self.drains.fetch_add(1, Ordering::Relaxed);
            self.drain_all();
            result = self.inner.alloc(asked);
        }
        result.map_err(|error| {
            self.failures.fetch_add(1, Ordering::Relaxed);
            // What the caller asked, not what it was rounded up to.
            AllocError { request: *request, ..error }
        })
    }
}

impl<A: Allocator, C: CpuId> Allocator for Magazines<A, C> {
    fn alloc(&self, request: &Request) -> Result<u64, AllocError> {
        let Some(class) = self.class_of(request.size) else {
            return self.alloc_below(request, request);
        };
        // What the range is aligned to whatever is asked, so that all of a class are alike.
        let (align, cached) = match request.align {
            Align::Bytes(bytes) if bytes > class.size => (Align::Bytes(bytes), false),
            Align::Bytes(bytes) if !bytes.is_power_of_two() => (Align::Bytes(bytes), false),
            _ => (Align::Bytes(class.size), true),
        };
        // A range that is aligned to its size crosses no boundary that is as far apart. A mask that
        // is none is for the allocator below to refuse.
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
            let checked = checks.insert(iova, || self.inner.check_free(iova, class.size));
            match checked {
                Ok(true) => {}
                Ok(false) => {
                    return rejected(FreeError { iova, size, reason: FreeReason::AlreadyFree });
                }
                Err(error) => return rejected(error),
            }
        }
        if self.put(class, iova) {
            return Ok(());
        }
        let freed = match &self.checks {
            Some(checks) => checks.remove(iova, || self.inner.free(iova, class.size)),
            None => self.inner.free(iova, class.size),
        };
        freed.or_else(rejected)
    }

    fn reserve(&self, first: u64, last: u64) -> Result<(), ReserveError> {
        match self.inner.reserve(first, last) {
            // Perhaps what is in the way is only cached.
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
            Some(checks) => match checks.look(iova, below) {
                Ok(true) => Ok(()),
                Ok(false) => Err(FreeError { iova, size, reason: FreeReason::AlreadyFree }),
                Err(error) => Err(error),
            },
            None => below(),
        };
        result.map_err(|error| FreeError { iova, size, ..error })
    }

    fn granule(&self) -> u64 {
        self.inner.granule()
    }

    /// Rule L6: 32 granules.
    fn optimal_size(&self) -> u64 {
        self.inner.granule().saturating_mul(LARGEST_CACHED)
    }

    fn stats(&self) -> Stats {
        let mut stats = self.inner.stats();
        let mut cached_frees = 0;
        for cpu in &self.cpus {
            let cpu = cpu.lock();
            stats.cache_hits += cpu.hits;
            cached_frees += cpu.frees;
            for pair in &cpu.classes {
                stats.cached_ranges += (pair.loaded.len() + pair.previous.len()) as u64;
            }
        }
        for depot in &self.depots {
            let full = depot.lock().len() as u64;
            stats.depot_magazines += full;
            stats.cached_ranges += full * MAGAZINE_SLOTS as u64;
        }
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        stats.allocs += stats.cache_hits;
        // What was given back below was counted there, but it was no free of the caller's.
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
        // The allocator below may be shared and live on.
        self.drain_all();
    }
}

impl<A: Allocator + fmt::Debug, C: CpuId> fmt::Debug for Magazines<A, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Magazines")
            .field("inner", &self.inner)
            .field("cpus", &self.cpus.len())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
