//! The pools of a domain.
//!
//! Slots are of power-of-two sizes, the classes. The slots of a class lie in a [`zone`], a range of
//! addresses of its own; in several zones if devices differ in the addresses that they can put on
//! the bus. A slot gets memory when it is first used ([`grow`]), with a mapping of its own, and
//! loses it when it has been idle ([`idle`]). Slots that fit no class, or for which there is no
//! room, are mapped for one use ([`single`]). Between uses slots lie on a [`shelf`], in a CPU's
//! cache or in the depot of their zone, sorted by the permissions of the device.

mod client;
mod grow;
mod idle;
mod limits;
mod mark;
mod shelf;
mod single;
mod zone;

#[cfg(all(test, not(loom)))]
mod tests;

use core::{cmp::Reverse, fmt};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use arrayvec::ArrayVec;
use parking_lot::{Mutex, RwLock};
use ringfence_iommu::{Address, Domain, Geometry};
use ringfence_iova::{Allocator, Request};
use ringfence_sync::clock::Clock;

pub(crate) use self::client::Client;
pub use self::limits::{BounceLimits, BounceStats, ClassStats, Holder};
use self::{single::Singles, zone::Zone};
use super::{BounceMemory, Chunk};
use crate::{Environment, Error, SetupError, TimerKind, flush::Timer};

/// Bytes of the smallest slot, if the granule is not larger.
const SMALLEST: u64 = 4096;

/// The most zones of a class. It needs one for each distinct limit of a device, as a rule one or
/// two. Slots for which there is no zone are mapped for one use.
const ZONES: usize = 8;

/// The most slots of a zone.
const SLOTS: u64 = 1 << 20;

/// A zone takes at most one in this many of the addresses that it could have.
const SHARE: u64 = 64;

/// And it leaves this many times its size to others.
const SPARED: u64 = 8;

/// How many requests go by, after no addresses were found for a zone, before the next attempt.
const RETRY_AFTER: u32 = 64;

/// The bounce pools of a domain, for one device or several. Cheap to clone: all clones refer to the
/// same pools.
///
/// They hold no memory before a device needs some. When the last clone and the last device are
/// dropped, everything is unmapped and given back: by that drop, or by the pools' thread if it is
/// running just then.
pub struct BouncePools<T: Address>(Arc<Inner<T>>);

struct Inner<T: Address> {
    domain: Arc<dyn Domain<Target = T>>,
    allocator: Arc<dyn Allocator>,
    memory: Box<dyn BounceMemory<T>>,
    geometry: Geometry,
    granule: u64,
    limits: BounceLimits,
    /// log2 of the bytes of a slot of the first class; each that follows is twice as large.
    smallest: u32,
    classes: Box<[Class<T>]>,
    /// The number of caches of each zone; a power of two.
    caches: usize,
    singles: Singles<T>,
    usage: Usage,
    /// The number of the next device: each is used once.
    numbers: AtomicU64,
    clock: Arc<dyn Clock>,
    timer: Timer,
    expiring: Mutex<()>,
    /// Whether the timer runs, and so will process slots that are given back.
    ticking: AtomicBool,
    /// The time of the last reading of the clock, in [`idle`]'s ticks.
    tick: AtomicU32,
}

struct Class<T> {
    zones: RwLock<ArrayVec<Arc<Zone<T>>, ZONES>>,
    /// The limit below which there were no addresses for a zone, and how many further requests for
    /// one to refuse at once. Locked while the zones are.
    exhausted: Mutex<(u64, u32)>,
}

/// Counters; `pooled` also enforces the limit.
#[derive(Default)]
struct Usage {
    /// Bytes of slots that are kept, or in use to be kept.
    pooled: AtomicU64,
    /// Bytes of all memory.
    memory: AtomicU64,
    peak: AtomicU64,
    single_use: AtomicU64,
    grown: AtomicU64,
    given_back: AtomicU64,
    remapped: AtomicU64,
    quarantined_bytes: AtomicU64,
}

impl<T: Address> Clone for BouncePools<T> {
    fn clone(&self) -> Self {
        BouncePools(Arc::clone(&self.0))
    }
}

impl<T: Address> fmt::Debug for BouncePools<T> {
    ringfence_sync::shows!(BouncePools as it, stats: it.stats());
}

impl<T: Address> BouncePools<T> {
    /// Empty pools of slots in `domain`, at addresses from `allocator` (that of the domain's
    /// devices, or one whose addresses none of them uses), in memory from `memory`. A thread,
    /// asleep unless slots are taken or idle, gives back idle memory.
    ///
    /// # Errors
    /// The limits are invalid, or that thread cannot be started.
    pub fn new(
        domain: Arc<dyn Domain<Target = T>>,
        allocator: Arc<dyn Allocator>,
        memory: impl BounceMemory<T> + 'static,
        limits: BounceLimits,
    ) -> Result<Self, SetupError> {
        let environment = Environment::default();
        Self::with_environment(domain, allocator, memory, limits, environment, TimerKind::Thread)
    }

    /// As [`new`](Self::new), with the caller's clock and number of CPUs. With
    /// [`TimerKind::Manual`] there is no thread, and the caller calls [`expire`](Self::expire) when
    /// it is due.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_environment(
        domain: Arc<dyn Domain<Target = T>>,
        allocator: Arc<dyn Allocator>,
        memory: impl BounceMemory<T> + 'static,
        limits: BounceLimits,
        environment: Environment,
        timer: TimerKind,
    ) -> Result<Self, SetupError> {
        let geometry = domain.geometry();
        let granule = geometry.page_sizes.granule().max(allocator.granule());
        let (largest, max) = (limits.largest, limits.max_bytes);
        let smallest = granule.max(SMALLEST);
        if !granule.is_power_of_two()
            || !largest.is_power_of_two()
            || !(smallest..=max).contains(&largest)
        {
            return Err(SetupError::Slots { largest, granule: smallest, max });
        }
        let smallest = smallest.trailing_zeros();
        let class = |_| Class { zones: RwLock::default(), exhausted: Mutex::default() };
        let classes = (smallest..=largest.trailing_zeros()).map(class).collect();
        let Environment { clock, cpu, .. } = environment;
        let inner = Arc::new(Inner {
            domain,
            allocator,
            memory: Box::new(memory),
            geometry,
            granule,
            limits,
            smallest,
            classes,
            caches: cpu.count().next_power_of_two().min(MOST_CACHES),
            singles: Singles(Mutex::default()),
            usage: Usage::default(),
            numbers: AtomicU64::new(0),
            clock,
            timer: Timer::named("ringfence-bounce"),
            expiring: Mutex::new(()),
            ticking: AtomicBool::new(false),
            tick: AtomicU32::new(0),
        });
        if timer == TimerKind::Thread {
            inner.timer.start(&inner.clock, &inner, |inner, _| inner.expire())?;
        }
        Ok(BouncePools(inner))
    }

    /// The statistics of the pools.
    pub fn stats(&self) -> BounceStats {
        let inner = &*self.0;
        let (slots, slot_bytes) = inner.singles.total();
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let usage = &inner.usage;
        let mut stats = BounceStats {
            slots,
            slot_bytes,
            kept_bytes: 0,
            peak_bytes: get(&usage.peak),
            single_use: get(&usage.single_use),
            grown: get(&usage.grown),
            given_back: get(&usage.given_back),
            remapped: get(&usage.remapped),
            quarantined_bytes: get(&usage.quarantined_bytes),
        };
        for class in self.classes() {
            stats.slots += class.used;
            stats.slot_bytes += class.used * class.slot_bytes;
            stats.kept_bytes += class.kept * class.slot_bytes;
        }
        stats
    }

    /// The statistics of each range of slots, the smallest slots first. A size that was never
    /// requested has no range; one requested by devices with different limits has several.
    pub fn classes(&self) -> Vec<ClassStats> {
        self.0.zones().iter().map(|zone| zone.stats()).collect()
    }
}

/// The most caches of a zone, however many CPUs there are: several CPUs may share one.
const MOST_CACHES: usize = 64;

impl<T: Address> Inner<T> {
    /// The class of slots of `size` bytes; `None` if there is none.
    #[inline]
    fn class_of(&self, size: u64) -> Option<usize> {
        let class = size.trailing_zeros().checked_sub(self.smallest)? as usize;
        (size.is_power_of_two() && class < self.classes.len()).then_some(class)
    }

    /// Bytes of the slot for `len` bytes.
    #[inline]
    fn size_of(&self, len: u64) -> Result<u64, Error> {
        if len <= self.limits.largest {
            return Ok(len.next_power_of_two().max(1 << self.smallest));
        }
        len.checked_next_multiple_of(self.granule).ok_or(Error::TooLong)
    }

    /// All zones, those of the smallest class first.
    fn zones(&self) -> Vec<Arc<Zone<T>>> {
        let mut zones = Vec::new();
        self.classes.iter().for_each(|class| zones.extend(class.zones.read().iter().cloned()));
        zones
    }

    /// The zones of a class for a device whose highest address is `limit`, those made for the
    /// highest limit first. Makes one if all were made for lower limits.
    fn zones_for(&self, class: usize, limit: u64) -> ArrayVec<Arc<Zone<T>>, ZONES> {
        let usable = |zones: &[Arc<Zone<T>>]| {
            let zones = zones.iter().filter(|zone| zone.range.last().0 <= limit);
            let mut usable: ArrayVec<_, ZONES> = zones.cloned().collect();
            usable.sort_by_key(|zone| Reverse((zone.made_for, zone.range.last())));
            let own = usable.iter().any(|zone| zone.made_for >= limit);
            (usable, own)
        };
        let Class { zones, exhausted } = &self.classes[class];
        if let (found, true) = usable(&zones.read()) {
            return found;
        }
        let mut zones = zones.write();
        let (found, own) = usable(&zones);
        if own || zones.is_full() {
            return found;
        }
        let (below, refused) = &mut *exhausted.lock();
        if limit <= *below && *refused > 0 {
            *refused -= 1;
            return found;
        }
        match self.make_zone(class, limit) {
            Some(zone) => zones.push(Arc::new(zone)),
            None => (*below, *refused) = (limit, RETRY_AFTER),
        }
        usable(&zones).0
    }

    /// A zone of as many slots as the limits allow, or as there are addresses for.
    fn make_zone(&self, class: usize, limit: u64) -> Option<Zone<T>> {
        let shift = self.smallest + class as u32;
        let aperture = self.geometry.aperture;
        let room = limit.min(aperture.last().0).checked_sub(aperture.first().0)? / SHARE + 1;
        let most = (room >> shift).min(SLOTS).checked_ilog2()?;
        let mut slots = self.limits.max_bytes.div_ceil(1 << shift).min(1 << most);
        slots = slots.next_power_of_two();
        while slots > 0 {
            // Does not drain the CPUs' address caches: a zone is not worth that.
            let request = Request::new(slots << shift).limit(limit).flush(false);
            if let Ok(first) = self.allocator.alloc(&request) {
                if !self.spares(slots << shift, limit) {
                    let _ = self.allocator.free(first, slots << shift);
                    slots /= 2;
                    continue;
                }
                let zone = Zone::new(first, shift, slots as u32, limit, self.caches);
                // Do not trust an allocator that violates the request.
                return zone.filter(|zone| {
                    zone.range.last().0 <= limit && first.is_multiple_of(1 << shift)
                });
            }
            slots /= 2;
        }
        None
    }

    /// Whether enough addresses are left for others beside a zone of `bytes`. The domain's aperture
    /// does not show that: the allocator may have only a part of it.
    fn spares(&self, bytes: u64, limit: u64) -> bool {
        let size = bytes.saturating_mul(SPARED);
        let rest = self.allocator.alloc(&Request::new(size).limit(limit).flush(false));
        rest.is_ok_and(|rest| self.allocator.free(rest, size).is_ok())
    }

    /// Memory for a slot or for a calibration, zeroed.
    fn take_memory(&self, len: u64) -> Result<Chunk<T>, Error> {
        // Aligned so that it can be mapped with the largest pages that fit its size.
        let multiple_of = 1 << len.trailing_zeros().min(63);
        let pages = self.geometry.page_sizes.bitmap() & (multiple_of | (multiple_of - 1));
        let align = pages.checked_ilog2().map_or(1, |log| 1 << log);
        let chunk = self.memory.take(len, align.max(self.granule)).ok_or(Error::Bounce(len))?;
        // SAFETY: the chunk is `len` bytes of memory, which nothing else uses.
        unsafe { chunk.ptr.as_ptr().write_bytes(0, len as usize) };
        let usage = &self.usage;
        let memory = usage.memory.fetch_add(len, Ordering::Relaxed) + len;
        usage.peak.fetch_max(memory, Ordering::Relaxed);
        Ok(chunk)
    }

    fn give_back_memory(&self, chunk: Chunk<T>) {
        self.usage.memory.fetch_sub(chunk.len, Ordering::Relaxed);
        // SAFETY: it was taken of this memory for a slot or a calibration, whose unmap is over, and which
        // is no more.
        unsafe { self.memory.give_back(chunk) };
    }
}

impl<T: Address> Drop for Inner<T> {
    /// No slot is held any more: a holder keeps the device alive, which keeps its pools alive.
    fn drop(&mut self) {
        self.trim();
        for zone in self.zones() {
            // The device may still reach slots that remain: their addresses end with the domain.
            if zone.live() == (0, 0) {
                let range = zone.range;
                let _ = self.allocator.free(range.first().0, range.extent() + 1);
            }
        }
    }
}
