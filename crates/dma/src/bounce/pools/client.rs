//! A device as the pools know it.

use core::panic::Location;
use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU64, Ordering},
};

use ringfence_iommu::{Address, Prot, Range};
use ringfence_sync::{CachePadded, cpu::CpuId};

use super::{
    BouncePools, Inner,
    mark::{SlotOwner, Stamp},
    shelf::Kind,
    zone::Zone,
};
use crate::{Error, bounce::Slot};

/// What a device is to the pools.
pub(crate) struct ClientParts {
    /// The highest IOVA that it can put on the bus.
    pub(crate) limit: u64,
    /// The most bytes that it may hold.
    pub(crate) quota: u64,
    pub(crate) cpu: Arc<dyn CpuId>,
}

/// A device as the pools know it.
pub(crate) struct Client<T: Address> {
    pools: BouncePools<T>,
    limit: u64,
    cpu: Arc<dyn CpuId>,
    account: Arc<Account>,
    /// Of each class, the zone that the device takes its slots from, once it has one.
    homes: Box<[OnceLock<Arc<Zone<T>>>]>,
}

/// What a device holds, and may.
pub(super) struct Account {
    /// Which device; no two of the pools ever have the same.
    pub(super) number: u32,
    pub(super) quota: u64,
    /// Apart from other devices': each is changed by another thread, as a rule.
    pub(super) held: CachePadded<AtomicU64>,
}

/// Bytes that are charged to a device, for what it is about to get: given back when dropped.
#[must_use]
pub(super) struct Charge<'a> {
    account: &'a Account,
    bytes: u64,
}

impl Account {
    #[inline]
    fn charge(&self, bytes: u64) -> Result<Charge<'_>, Error> {
        let add = |held: u64| held.checked_add(bytes).filter(|&sum| sum <= self.quota);
        let relaxed = Ordering::Relaxed;
        match self.held.fetch_update(relaxed, relaxed, add) {
            Ok(_) => Ok(Charge { account: self, bytes }),
            Err(held) => Err(Error::BounceQuota { asked: bytes, held, quota: self.quota }),
        }
    }
}

impl Charge<'_> {
    /// The device has it.
    #[inline]
    pub(super) fn keep(self) {
        core::mem::forget(self);
    }
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        self.account.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl<T: Address> Client<T> {
    pub(crate) fn new(pools: BouncePools<T>, parts: ClientParts) -> Client<T> {
        let ClientParts { limit, quota, cpu } = parts;
        let inner = &*pools.0;
        let number = inner.numbers.fetch_add(1, Ordering::Relaxed);
        let account = Arc::new(Account { number, quota, held: CachePadded::default() });
        let mut accounts = inner.accounts.lock();
        accounts.retain(|account| account.strong_count() > 0);
        accounts.push(Arc::downgrade(&account));
        drop(accounts);
        let homes = inner.classes.iter().map(|_| OnceLock::new()).collect();
        Client { pools, limit, cpu, account, homes }
    }

    pub(crate) fn pools(&self) -> &BouncePools<T> {
        &self.pools
    }

    /// Which device it is to the pools.
    pub(crate) fn number(&self) -> u32 {
        self.account.number
    }

    /// A slot of at least `len` bytes that allows the device `prot`, for who asks `at` that place.
    ///
    /// # Errors
    /// [`Error::BounceQuota`], [`Error::Bounce`], or as for any mapping. Nothing is left of it, but
    /// for what could not be undone: that stays charged to the device.
    #[inline]
    pub(crate) fn take(
        &self,
        len: u64,
        prot: Prot,
        at: &'static Location<'static>,
    ) -> Result<Slot, Error> {
        let inner = &*self.pools.0;
        let size = inner.size_of(len)?;
        let charge = self.account.charge(size)?;
        let (Some(class), Some(kind)) = (inner.class_of(size), Kind::of(prot)) else {
            return inner.take_single((size, prot, self.limit), self.held_at(at), charge);
        };
        if let Some(home) = self.homes[class].get()
            && let Some(slot) = home.pop(self.cpu.current(), kind)
        {
            charge.keep();
            self.mark(home, slot.range, at);
            return Ok(slot);
        }
        self.take_slowly(class, (size, kind, prot), at, charge)
    }

    /// As [`take`](Self::take), for who shows the slot's bytes to the program: what another device
    /// left in them is zeroed.
    pub(crate) fn take_for_cpu(
        &self,
        len: u64,
        prot: Prot,
        at: &'static Location<'static>,
    ) -> Result<Slot, Error> {
        let mut slot = self.take(len, prot, at)?;
        if slot.key != u64::from(self.number()) {
            slot.zero(0..slot.dirty);
            slot.dirty = 0;
        }
        Ok(slot)
    }

    #[cold]
    fn take_slowly(
        &self,
        class: usize,
        (size, kind, prot): (u64, Kind, Prot),
        at: &'static Location<'static>,
        charge: Charge<'_>,
    ) -> Result<Slot, Error> {
        let inner = &*self.pools.0;
        let zones = inner.zones_for(class, self.limit);
        if let Some(own) = zones.first().filter(|zone| zone.made_for >= self.limit) {
            // Another thread may have been first; it found the same, or one that does as well.
            let _ = self.homes[class].set(Arc::clone(own));
        }
        match inner.find(&zones, (self.cpu.current(), kind, prot))? {
            Some((zone, slot)) => {
                charge.keep();
                self.mark(zone, slot.range, at);
                Ok(slot)
            }
            None => inner.take_single((size, prot, self.limit), self.held_at(at), charge),
        }
    }

    /// Takes a slot back. What it holds up to `dirty` is the next one's to clear.
    #[inline]
    pub(crate) fn give_back(&self, mut slot: Slot) {
        let inner = &*self.pools.0;
        let size = slot.range.extent() + 1;
        if slot.key != u64::from(self.number()) {
            slot.key = self.number().into();
        }
        let class = inner.class_of(size);
        match class.and_then(|class| self.homes[class].get()) {
            Some(home) if home.range.covers(slot.range) => self.push(home, slot),
            _ => match class.and_then(|class| inner.zone_at(class, slot.range)) {
                Some(zone) => self.push(&zone, slot),
                None if inner.give_back_single(&slot) => {}
                None => return,
            },
        }
        // Last, so that who may have its bytes finds them.
        self.account.held.fetch_sub(size, Ordering::Relaxed);
    }

    /// Takes a slot back whose memory the device may reach by other addresses too: it is never used
    /// again. One for a single use stays charged to the device, as any that is in quarantine.
    #[cold]
    pub(crate) fn quarantine(&self, slot: Slot) {
        let inner = &*self.pools.0;
        let size = slot.range.extent() + 1;
        let class = inner.class_of(size);
        match class.and_then(|class| inner.zone_at(class, slot.range)) {
            Some(zone) => {
                zone.marks.clear(zone.number(slot.range.first()));
                inner.quarantine(&zone, 1, 0);
                self.account.held.fetch_sub(size, Ordering::Relaxed);
            }
            None => inner.quarantine_single(&slot),
        }
    }

    #[inline]
    fn push(&self, zone: &Zone<T>, slot: Slot) {
        zone.marks.clear(zone.number(slot.range.first()));
        zone.push(self.cpu.current(), slot);
        self.pools.0.note_use();
    }

    #[inline]
    fn mark(&self, zone: &Zone<T>, range: Range, at: &'static Location<'static>) {
        zone.marks.set(zone.number(range.first()), self.held_at(at));
    }

    #[inline]
    fn held_at(&self, at: &'static Location<'static>) -> SlotOwner {
        let inner = &*self.pools.0;
        inner.note_use();
        SlotOwner { at, stamp: Stamp::new(self.number(), inner.tick.load(Ordering::Relaxed)) }
    }
}

impl<T: Address> Inner<T> {
    /// The zone of a class that holds this range.
    #[cold]
    pub(super) fn zone_at(&self, class: usize, range: Range) -> Option<Arc<Zone<T>>> {
        let zones = self.classes[class].zones.read();
        zones.iter().find(|zone| zone.range.covers(range)).cloned()
    }
}
