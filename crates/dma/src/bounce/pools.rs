//! The pools of a domain.

use core::{fmt, panic::Location};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use ringfence_iommu::{Address, Domain, Gather, Iova, Prot, Range};
use ringfence_iova::{Allocator, Request};
use ringfence_sync::{clock::Clock, cpu::CpuId};

use super::{BounceMemory, Chunk, Slot};
use crate::{Error, SetupError};

/// How much memory the pools of a domain may have, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BounceLimits {
    /// Bytes of the largest slot that is kept, a power of two; what is longer is mapped for one use.
    pub largest: u64,
    /// Bytes of all slots of the pools together, in use or kept. Beyond it, slots are mapped for one
    /// use.
    pub max_bytes: u64,
    /// How long memory that is not used is kept, in milliseconds.
    pub idle_ms: u64,
}

impl Default for BounceLimits {
    /// Slots up to 4 MiB, 256 MiB in all, idle memory kept for a second.
    fn default() -> BounceLimits {
        BounceLimits { largest: 4 << 20, max_bytes: 256 << 20, idle_ms: 1000 }
    }
}

/// What the pools of a domain hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BounceStats {
    /// Slots in use, those for one use included.
    pub slots: u64,
    /// Bytes of them.
    pub slot_bytes: u64,
    /// Bytes that are kept mapped for the next use.
    pub kept_bytes: u64,
}

/// Who holds slots.
#[derive(Clone, Debug)]
pub struct Holder {
    /// Where in the program they were taken.
    pub at: &'static Location<'static>,
    /// How many.
    pub slots: u64,
    /// Bytes of them.
    pub bytes: u64,
}

/// The bounce pools of a domain, for one device or several. Cheap to clone: all clones are the same
/// pools.
pub struct BouncePools<T: Address>(Arc<Inner<T>>);

struct Inner<T: Address> {
    domain: Arc<dyn Domain<Target = T>>,
    allocator: Arc<dyn Allocator>,
    memory: Box<dyn BounceMemory<T>>,
    granule: u64,
    #[allow(dead_code)]
    limits: BounceLimits,
    state: Mutex<State<T>>,
}

struct State<T> {
    /// By size and permission.
    kept: BTreeMap<(u64, u32), Vec<(Slot, Chunk<T>)>>,
    used: BTreeMap<u64, (Chunk<T>, &'static Location<'static>)>,
    next: u64,
    stats: BounceStats,
}

impl<T: Address> Clone for BouncePools<T> {
    fn clone(&self) -> Self {
        BouncePools(Arc::clone(&self.0))
    }
}

impl<T: Address> fmt::Debug for BouncePools<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BouncePools").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl<T: Address> BouncePools<T> {
    /// Empty pools of slots in `domain`, at addresses from `allocator`, in memory of `memory`.
    ///
    /// # Errors
    /// The limits make no sense.
    pub fn new(
        domain: Arc<dyn Domain<Target = T>>,
        allocator: Arc<dyn Allocator>,
        memory: impl BounceMemory<T> + 'static,
        limits: BounceLimits,
    ) -> Result<Self, SetupError> {
        let granule = domain.geometry().page_sizes.granule().max(allocator.granule());
        Ok(BouncePools(Arc::new(Inner {
            domain,
            allocator,
            memory: Box::new(memory),
            granule,
            limits,
            state: Mutex::new(State {
                kept: BTreeMap::new(),
                used: BTreeMap::new(),
                next: 1,
                stats: BounceStats::default(),
            }),
        })))
    }

    /// What they hold.
    pub fn stats(&self) -> BounceStats {
        self.0.state.lock().stats
    }

    /// Who holds slots, those who hold most bytes first.
    pub fn holders(&self) -> Vec<Holder> {
        Vec::new()
    }

    /// Gives back all memory that is not in use.
    pub fn trim(&self) {
        let kept = std::mem::take(&mut self.0.state.lock().kept);
        for (slot, chunk) in kept.into_values().flatten() {
            let mut gather = Gather::new();
            let unmapped = self.0.domain.unmap_pages(slot.range, &mut gather);
            if unmapped.is_ok() && self.0.domain.iotlb_sync(&mut gather).is_ok() {
                let _ = self.0.allocator.free(slot.range.first().0, slot.range.extent() + 1);
                self.0.memory.give_back(chunk);
            }
        }
        self.0.state.lock().stats.kept_bytes = 0;
    }

    fn take(
        &self,
        len: u64,
        prot: Prot,
        limit: u64,
        at: &'static Location<'static>,
    ) -> Result<Slot, Error> {
        let inner = &*self.0;
        let size = len.checked_next_power_of_two().ok_or(Error::TooLong)?.max(inner.granule);
        let mut state = inner.state.lock();
        if let Some((slot, chunk)) = state.kept.get_mut(&(size, prot.bits())).and_then(Vec::pop) {
            state.used.insert(slot.key, (chunk, at));
            state.stats.slots += 1;
            state.stats.slot_bytes += size;
            state.stats.kept_bytes -= size;
            return Ok(slot);
        }
        drop(state);
        let chunk = inner.memory.take(size, inner.granule).ok_or(Error::Bounce(size))?;
        // SAFETY: it is memory of so many bytes that is ours.
        unsafe { chunk.ptr.as_ptr().write_bytes(0, size as usize) };
        let iova =
            inner.allocator.alloc(&Request::new(size).limit(limit)).map_err(Error::NoIova)?;
        let range = Range::from_len(Iova(iova), size).ok_or(Error::TooLong)?;
        inner.domain.map_pages(range, chunk.target, prot)?;
        inner.domain.iotlb_sync_map(range)?;
        let mut state = inner.state.lock();
        let key = state.next;
        state.next += 1;
        state.used.insert(key, (chunk, at));
        state.stats.slots += 1;
        state.stats.slot_bytes += size;
        Ok(Slot { range, ptr: chunk.ptr, prot, dirty: 0, key })
    }

    fn give_back(&self, slot: Slot) {
        let mut state = self.0.state.lock();
        let size = slot.range.extent() + 1;
        let Some((chunk, _)) = state.used.remove(&slot.key) else { return };
        state.stats.slots -= 1;
        state.stats.slot_bytes -= size;
        state.stats.kept_bytes += size;
        state.kept.entry((size, slot.prot.bits())).or_default().push((slot, chunk));
    }
}

impl<T: Address> Drop for Inner<T> {
    fn drop(&mut self) {}
}

/// What a device is to the pools.
pub(crate) struct ClientParts {
    /// The highest IOVA that it can put on the bus.
    pub(crate) limit: u64,
    /// The most bytes that it may hold.
    pub(crate) quota: u64,
    pub(crate) cpu: Arc<dyn CpuId>,
    pub(crate) clock: Arc<dyn Clock>,
}

/// A device as the pools know it.
pub(crate) struct Client<T: Address> {
    pools: BouncePools<T>,
    parts: ClientParts,
    held: AtomicU64,
}

impl<T: Address> Client<T> {
    pub(crate) fn new(pools: BouncePools<T>, parts: ClientParts) -> Client<T> {
        let _ = (&parts.cpu, &parts.clock);
        Client { pools, parts, held: AtomicU64::new(0) }
    }

    pub(crate) fn pools(&self) -> &BouncePools<T> {
        &self.pools
    }

    /// A slot of at least `len` bytes that allows the device `prot`, for who asks `at` that place.
    ///
    /// # Errors
    /// [`Error::BounceQuota`], [`Error::Bounce`], or as for any mapping. Nothing is left of it.
    pub(crate) fn take(
        &self,
        len: u64,
        prot: Prot,
        at: &'static Location<'static>,
    ) -> Result<Slot, Error> {
        let slot = self.pools.take(len, prot, self.parts.limit, at)?;
        self.held.fetch_add(slot.range.extent() + 1, Ordering::Relaxed);
        Ok(slot)
    }

    /// Takes a slot back. What it holds up to `dirty` is the next one's to clear.
    pub(crate) fn give_back(&self, slot: Slot) {
        self.held.fetch_sub(slot.range.extent() + 1, Ordering::Relaxed);
        self.pools.give_back(slot);
    }
}
