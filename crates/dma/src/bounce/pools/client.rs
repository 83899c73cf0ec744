//! A device as a client of the pools.

use core::panic::Location;
use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU64, Ordering},
};

use ringfence_iommu::{Address, Range};
use ringfence_sync::{CachePadded, cpu::CpuId};

use super::{BouncePools, Inner, mark::SlotOwner, zone::Zone};
use crate::{Direction, Error, bounce::Slot};

/// A device as a client of the pools.
pub(crate) struct Client<T: Address> {
    pub(crate) pools: BouncePools<T>,
    /// The highest IOVA that it can put on the bus.
    limit: u64,
    cpu: Arc<dyn CpuId>,
    pub(super) account: Account,
    /// For each class, the zone from which the device takes its slots, once it has one.
    homes: Box<[OnceLock<Arc<Zone<T>>>]>,
}

/// How much a device holds, and its quota.
pub(super) struct Account {
    /// The device's number, unique in the pools for all time.
    number: u64,
    quota: u64,
    /// On its own cache line: as a rule other threads change other devices' counts.
    pub(super) held: CachePadded<AtomicU64>,
}

/// Bytes charged to a device for a slot that it is about to get; dropping it takes the charge back.
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
            Err(held) => Err(Error::BounceQuota { size: bytes, held, quota: self.quota }),
        }
    }
}

impl Charge<'_> {
    /// The device has the slot: the charge stays.
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
    pub(crate) fn new(
        pools: BouncePools<T>,
        (limit, quota): (u64, u64),
        cpu: Arc<dyn CpuId>,
    ) -> Client<T> {
        let inner = &*pools.0;
        let number = inner.numbers.fetch_add(1, Ordering::Relaxed);
        let account = Account { number, quota, held: CachePadded::default() };
        let homes = inner.classes.iter().map(|_| OnceLock::new()).collect();
        Client { pools, limit, cpu, account, homes }
    }

    /// A slot of at least `len` bytes that allows the device `prot`; `at` is the place of the
    /// request in the program.
    ///
    /// # Errors
    /// [`Error::BounceQuota`], [`Error::Bounce`], or as for any mapping. Everything is undone; what
    /// could not be stays charged to the device.
    #[inline]
    pub(crate) fn take(
        &self,
        len: u64,
        direction: Direction,
        at: &'static Location<'static>,
    ) -> Result<Slot, Error> {
        let inner = &*self.pools.0;
        let size = inner.size_of(len)?;
        let charge = self.account.charge(size)?;
        let Some(class) = inner.class_of(size) else {
            return inner.take_single((size, direction, self.limit), self.held_at(at), charge);
        };
        if let Some(home) = self.homes[class].get()
            && let Some(slot) = home.pop(self.cpu.current(), direction)
        {
            charge.keep();
            self.mark(home, slot.range, at);
            return Ok(slot);
        }
        self.take_slowly(class, (size, direction), at, charge)
    }

    /// As [`take`](Self::take), for a slot whose bytes the program will see: zeroes what another
    /// device left in them, and what lies beyond `len`.
    pub(crate) fn take_for_cpu(
        &self,
        len: u64,
        direction: Direction,
        at: &'static Location<'static>,
    ) -> Result<Slot, Error> {
        let mut slot = self.take(len, direction, at)?;
        // This use would not overwrite what a longer one left beyond its end.
        let own = if slot.key == self.account.number { len.min(slot.dirty) } else { 0 };
        slot.zero(own..slot.dirty);
        slot.dirty = own;
        Ok(slot)
    }

    #[cold]
    fn take_slowly(
        &self,
        class: usize,
        (size, direction): (u64, Direction),
        at: &'static Location<'static>,
        charge: Charge<'_>,
    ) -> Result<Slot, Error> {
        let inner = &*self.pools.0;
        let zones = inner.zones_for(class, self.limit);
        if let Some(own) = zones.first().filter(|zone| zone.made_for >= self.limit) {
            // Another thread may have set it first, to the same zone or one that serves as well.
            let _ = self.homes[class].set(Arc::clone(own));
        }
        match inner.find(&zones, self.cpu.current(), direction)? {
            Some((zone, slot)) => {
                charge.keep();
                self.mark(zone, slot.range, at);
                Ok(slot)
            }
            None => inner.take_single((size, direction, self.limit), self.held_at(at), charge),
        }
    }

    /// Takes a slot back. Its next user clears the bytes up to `dirty`.
    #[inline]
    pub(crate) fn give_back(&self, mut slot: Slot) {
        let inner = &*self.pools.0;
        let size = slot.range.extent() + 1;
        slot.key = self.account.number;
        let class = inner.class_of(size);
        match class.and_then(|class| self.homes[class].get()) {
            Some(home) if home.range.covers(slot.range) => self.push(home, slot),
            _ => match class.and_then(|class| inner.zone_at(class, slot.range)) {
                Some(zone) => self.push(&zone, slot),
                None if inner.give_back_single(&slot) => {}
                None => return,
            },
        }
        // Last, so that a thread that is granted these bytes finds the slot free.
        self.account.held.fetch_sub(size, Ordering::Relaxed);
    }

    /// Gives `job` zeroed memory of `len` bytes, which is in no slot and which no device reaches yet.
    /// `job` also returns whether none reaches it afterwards; else it is never used again, and stays
    /// charged to the device.
    ///
    /// # Errors
    /// [`Error::BounceQuota`], [`Error::Bounce`].
    pub(crate) fn with_memory<R>(
        &self,
        len: u64,
        job: impl FnOnce(T) -> (R, bool),
    ) -> Result<R, Error> {
        let inner = &*self.pools.0;
        let charge = self.account.charge(len)?;
        let chunk = inner.take_memory(len)?;
        let (result, safe) = job(chunk.target);
        if safe {
            inner.give_back_memory(chunk);
        } else {
            charge.keep();
            inner.note_quarantine(len);
        }
        Ok(result)
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
        SlotOwner { at, tick: inner.tick.load(Ordering::Relaxed) }
    }
}

impl<T: Address> Inner<T> {
    /// The zone of a class that contains this range.
    #[cold]
    pub(super) fn zone_at(&self, class: usize, range: Range) -> Option<Arc<Zone<T>>> {
        let zones = self.classes[class].zones.read();
        zones.iter().find(|zone| zone.range.covers(range)).cloned()
    }
}
