//! The device's end of a split virtqueue (virtio 1.3, 2.7).

use core::sync::atomic::{Ordering, fence};

use ringfence_mem::{Access, Translate};

use super::{Burst, Config, Glimpse, PEEK_DESCS, Ring, flight::Flight, table::Table, window};
use crate::{
    Area, Chain, ChainFault, RingError, layout,
    ring::{AvailRing, DescTable, RawDesc, UsedRing},
};

/// The three areas, where they lie now.
#[derive(Debug)]
struct Areas {
    desc: DescTable,
    avail: AvailRing,
    used: UsedRing,
}

impl Areas {
    fn translate(config: &Config, mem: &impl Translate) -> Result<Areas, RingError> {
        let Config { size, desc, avail, used, event_idx, .. } = *config;
        // Without EVENT_IDX the events need not exist.
        let events = if event_idx { 0 } else { 2 };
        // What each area is for is all that is asked: a used ring need only be writable.
        let desc_window =
            window(mem, Area::Descriptors, desc, layout::desc_bytes(size), Access::Read)?;
        let avail_window =
            window(mem, Area::Avail, avail, layout::avail_bytes(size) - events, Access::Read)?;
        let used_window =
            window(mem, Area::Used, used, layout::used_bytes(size) - events, Access::Write)?;
        Ok(Areas {
            desc: DescTable::new(desc_window, desc, size)?,
            avail: AvailRing::new(avail_window, avail, size, event_idx)?,
            used: UsedRing::new(used_window, used, size, event_idx)?,
        })
    }
}

/// The device's end of a split queue.
#[derive(Debug)]
pub struct Split {
    /// None until they are found for the first time.
    areas: Option<Areas>,
    /// The addresses have changed since `areas` were found.
    moved: bool,
    config: Config,
    flight: Flight,
    table: Table,
    /// The available index of the next chain to take.
    next_avail: u16,
    /// The available index when it was last read.
    seen: u16,
    /// The used index of the next chain to give back, and up to which the driver was told.
    next_used: u16,
    published: u16,
    /// Chains that were taken before the queue was made and whose heads were not named since.
    nameless: u16,
    /// Whether kicks are asked for.
    kicks: bool,
    broken: Option<RingError>,
}

impl Split {
    /// As [`Queue::postponed`](super::Queue::postponed), for a split ring.
    ///
    /// # Errors
    /// [`RingError::Size`], [`RingError::Base`].
    pub fn postponed(config: Config) -> Result<Split, RingError> {
        let Config { size, base, .. } = config;
        if !layout::is_size(size) {
            return Err(RingError::Size { size });
        }
        let Ok(next_avail) = u16::try_from(base) else {
            return Err(RingError::Base { base, used: 0, size });
        };
        Ok(Split {
            areas: None,
            moved: false,
            config,
            flight: Flight::new(size),
            table: Table::new(config.indirect),
            next_avail,
            seen: next_avail,
            next_used: next_avail,
            published: next_avail,
            nameless: 0,
            kicks: true,
            broken: None,
        })
    }

    /// As [`Queue::new`](super::Queue::new), for a split ring.
    ///
    /// # Errors
    /// As there.
    pub fn new(config: Config, mem: &impl Translate) -> Result<Split, RingError> {
        let mut queue = Split::postponed(config)?;
        queue.revalidate(mem)?;
        Ok(queue)
    }

    /// Reads the available index, once for as many chains as it announces.
    #[inline]
    fn look(&mut self) -> Result<(), RingError> {
        let Some(areas) = &self.areas else { return Ok(()) };
        // Acquire pairs with the driver's Release: the entries, descriptors and buffers of every
        // chain before the index are seen by the loads that follow.
        let idx = areas.avail.idx().load(Ordering::Acquire);
        let size = self.config.size;
        let next = self.next_avail;
        // At most `size`: so it began (`revalidate`), and never more chains are taken than the
        // check below admits.
        let in_flight = next.wrapping_sub(self.next_used);
        if idx.wrapping_sub(next) > size - in_flight {
            let error = RingError::AvailJump { next, idx, in_flight, size };
            self.broken = Some(error);
            return Err(error);
        }
        self.seen = idx;
        Ok(())
    }

    #[cold]
    fn refuse(&mut self, head: u16, fault: ChainFault) -> RingError {
        let error = RingError::Chain { index: self.next_avail, head, fault };
        // A translation that is missing now may be there later: the chain stays where it is.
        if !matches!(fault, ChainFault::IndirectUnreachable { .. }) {
            self.broken = Some(error);
        }
        error
    }

    /// As [`Queue::take_head`](super::Queue::take_head).
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub fn take_head(
        &mut self,
        mem: &impl Translate,
        head: u16,
        chain: &mut Chain,
    ) -> Result<(), RingError> {
        chain.clear();
        if let Some(error) = self.broken {
            return Err(error);
        }
        assert!(!self.flight.began(), "chains in flight are named before others are taken");
        let areas = self.areas.as_ref().expect("a ring that was found");
        let taken = self.flight.check(head).and_then(|()| {
            let first = areas.desc.load(head);
            walk(areas, &mut self.table, mem, head, first, chain)
        });
        if let Err(fault) = taken {
            chain.clear();
            return Err(self.refuse(head, fault));
        }
        self.flight.resume(head, 1);
        match self.nameless.checked_sub(1) {
            Some(left) => self.nameless = left,
            None => {
                self.next_avail = self.next_avail.wrapping_add(1);
                self.seen = self.next_avail;
            }
        }
        Ok(())
    }
}

/// Copies the chain that begins at `head` with `first`.
#[inline]
fn walk(
    areas: &Areas,
    table: &mut Table,
    mem: &impl Translate,
    head: u16,
    first: RawDesc,
    chain: &mut Chain,
) -> Result<(), ChainFault> {
    let size = areas.desc.size();
    let (mut at, mut raw) = (head, first);
    (chain.head, chain.count) = (head, 0);
    // A chain that visits a descriptor twice loops; one that does not has at most `size`.
    loop {
        chain.count += 1;
        if raw.has(layout::DESC_F_INDIRECT) {
            return walk_table(table, mem, at, raw, chain);
        }
        chain.push(at, raw.desc())?;
        if !raw.has(layout::DESC_F_NEXT) {
            return Ok(());
        }
        if raw.next >= size {
            return Err(ChainFault::Next { at, next: raw.next, entries: size });
        }
        if chain.count == size {
            return Err(ChainFault::Loop { entries: size });
        }
        at = raw.next;
        raw = areas.desc.load(at);
    }
}

/// Copies the indirect table that descriptor `at` refers to, and then the chain in it. The
/// descriptor's own write flag means nothing (virtio 2.7.5.3.2), and buffers may have come before
/// it.
fn walk_table(
    table: &mut Table,
    mem: &impl Translate,
    at: u16,
    raw: RawDesc,
    chain: &mut Chain,
) -> Result<(), ChainFault> {
    if table.is_absent() {
        return Err(ChainFault::NotNegotiated { at });
    }
    if raw.has(layout::DESC_F_NEXT) {
        return Err(ChainFault::IndirectNext { at });
    }
    chain.table = Some((raw.addr, raw.len));
    let table = table.load(mem, at, (raw.addr, raw.len))?;
    let entries = table.len() as u16;
    let mut at = 0;
    for _ in 0..entries {
        let raw = RawDesc::from_bytes(&table[usize::from(at)]);
        if raw.has(layout::DESC_F_INDIRECT) {
            return Err(ChainFault::Nested { at });
        }
        chain.push(at, raw.desc())?;
        if !raw.has(layout::DESC_F_NEXT) {
            return Ok(());
        }
        if raw.next >= entries {
            return Err(ChainFault::Next { at, next: raw.next, entries });
        }
        at = raw.next;
    }
    Err(ChainFault::Loop { entries })
}

impl Ring for Split {
    fn config(&self) -> &Config {
        &self.config
    }

    #[inline]
    fn is_valid(&self) -> bool {
        let Some(Areas { desc, avail, used }) = &self.areas else { return false };
        !self.moved && desc.is_valid() && avail.is_valid() && used.is_valid()
    }

    fn revalidate(&mut self, mem: &impl Translate) -> Result<(), RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        let areas = Areas::translate(&self.config, mem)?;
        if self.areas.is_none() {
            // Read once, now: from here on only we write it.
            let used = areas.used.idx().load(Ordering::Relaxed);
            let (next, Config { size, base, .. }) = (self.next_avail, self.config);
            self.nameless = next.wrapping_sub(used);
            if self.nameless > size {
                let error = RingError::Base { base, used, size };
                self.broken = Some(error);
                return Err(error);
            }
            (self.next_used, self.published) = (used, used);
        }
        self.areas = Some(areas);
        self.moved = false;
        Ok(())
    }

    fn relocate(&mut self, desc: u64, avail: u64, used: u64) {
        self.config = Config { desc, avail, used, ..self.config };
        self.moved = true;
        // What the new area says of kicks is not known.
        self.kicks = true;
    }

    fn broken(&self) -> Option<RingError> {
        self.broken
    }

    #[inline]
    fn pop(&mut self, mem: &impl Translate, chain: &mut Chain) -> Result<bool, RingError> {
        chain.clear();
        if let Some(error) = self.broken {
            return Err(error);
        }
        let index = self.next_avail;
        if self.seen == index {
            self.look()?;
            if self.seen == index {
                return Ok(false);
            }
        }
        let Some(areas) = &self.areas else { return Ok(false) };
        let head = areas.avail.head(index).load(Ordering::Relaxed);
        let taken = self.flight.check(head).and_then(|()| {
            let first = areas.desc.load(head);
            walk(areas, &mut self.table, mem, head, first, chain)
        });
        if let Err(fault) = taken {
            chain.clear();
            return Err(self.refuse(head, fault));
        }
        self.flight.take(head, chain.count);
        self.next_avail = index.wrapping_add(1);
        Ok(true)
    }

    #[inline]
    fn pop_burst(
        &mut self,
        mem: &impl Translate,
        most: usize,
        burst: &mut Burst,
    ) -> Result<usize, RingError> {
        burst.clear();
        if let Some(error) = self.broken {
            return Err(error);
        }
        let most = most.min(self.config.size.into()) as u16;
        if self.seen.wrapping_sub(self.next_avail) < most {
            self.look()?;
        }
        let Some(areas) = &self.areas else { return Ok(0) };
        let ready = self.seen.wrapping_sub(self.next_avail).min(most);
        for _ in 0..ready {
            let head = areas.avail.head(self.next_avail).load(Ordering::Relaxed);
            let taken = self.flight.check(head).and_then(|()| {
                let first = areas.desc.load(head);
                if !first.has(layout::DESC_F_NEXT | layout::DESC_F_INDIRECT) {
                    return burst.push(head, head, first.desc()).map(|()| 1);
                }
                burst.chain.clear();
                walk(areas, &mut self.table, mem, head, first, &mut burst.chain)?;
                burst.push_chain();
                Ok(burst.chain.count)
            });
            match taken {
                Ok(count) => self.flight.take(head, count),
                Err(fault) => {
                    // Those before it are given first: the next call meets it again.
                    let error = self.refuse(head, fault);
                    return if burst.is_empty() { Err(error) } else { Ok(burst.len()) };
                }
            }
            self.next_avail = self.next_avail.wrapping_add(1);
        }
        Ok(burst.len())
    }

    fn peek_from(
        &mut self,
        mem: &impl Translate,
        skip: u16,
        ahead: u16,
        mut each: impl FnMut(Glimpse),
    ) -> u16 {
        let Some(areas) = &self.areas else { return 0 };
        let size = self.config.size;
        let idx = areas.avail.idx().load(Ordering::Acquire);
        let ready = idx.wrapping_sub(self.next_avail).min(size).min(ahead);
        let mut left = PEEK_DESCS;
        for step in skip..ready {
            let mut at =
                areas.avail.head(self.next_avail.wrapping_add(step)).load(Ordering::Relaxed);
            // Whatever the numbers are: `load` stays in the table, and `left` ends a loop.
            loop {
                if left == 0 {
                    // The rest of a chain that has no end would never be seen.
                    return step + 1;
                }
                left -= 1;
                let raw = areas.desc.load(at);
                if raw.has(layout::DESC_F_INDIRECT) {
                    each(Glimpse::Table { addr: raw.addr, len: raw.len });
                    for entry in self.table.glimpse(mem, (raw.addr, raw.len), &mut left) {
                        each(Glimpse::Buffer(RawDesc::from_bytes(entry).desc()));
                    }
                    break;
                }
                each(Glimpse::Buffer(raw.desc()));
                if !raw.has(layout::DESC_F_NEXT) {
                    break;
                }
                at = raw.next;
            }
        }
        ready.max(skip)
    }

    fn untake(&mut self, head: u16) -> bool {
        let undone = self.flight.untake(head).is_some();
        if undone {
            // The driver may not touch its entry or its descriptors before it is given back, so
            // that it is found there again; if it did, that is checked again.
            self.next_avail = self.next_avail.wrapping_sub(1);
        }
        undone
    }

    #[inline]
    fn push_used(&mut self, head: u16, len: u32) {
        self.flight.give_back(head);
        let areas = self.areas.as_ref().expect("a chain was taken from it");
        // The element is free: it was last used `size` chains ago, and the driver has since made
        // available, after it took that one back, the chain that made room for this one.
        areas.used.store(self.next_used, head.into(), len);
        self.next_used = self.next_used.wrapping_add(1);
    }

    #[inline]
    fn publish_used(&mut self) -> bool {
        let (old, new) = (self.published, self.next_used);
        if old == new {
            return false;
        }
        let Some(areas) = &self.areas else { return false };
        self.published = new;
        // Release: a driver that reads this index (with Acquire) sees the elements before it and
        // what was written to their buffers, and we read none of those buffers later.
        areas.used.idx().store(new, Ordering::Release);
        // The store of the index and the load of what the driver asked for must not change places:
        // the mirror image of the driver's `needs_kick`, with the same argument. The driver's part
        // is in its `enable_notifications`.
        fence(Ordering::SeqCst);
        match areas.avail.used_event() {
            Some(event) => layout::passed_event(event.load(Ordering::Relaxed), new, old),
            None => {
                let flags = areas.avail.flags().load(Ordering::Relaxed);
                flags & layout::AVAIL_F_NO_INTERRUPT == 0
            }
        }
    }

    #[inline]
    fn suppress_kicks(&mut self) {
        let Some(areas) = &self.areas else { return };
        // The line belongs to what the driver reads: do not touch it without need.
        if core::mem::replace(&mut self.kicks, false) {
            match areas.used.avail_event() {
                // There is no event that says never; this one is half a lap of the index away, so
                // that a poller is kicked once in 2^16 chains.
                Some(event) => event.store(self.next_avail ^ 0x8000, Ordering::Relaxed),
                None => areas.used.flags().store(layout::USED_F_NO_NOTIFY, Ordering::Relaxed),
            }
        }
    }

    fn enable_kicks(&mut self) -> bool {
        let Some(areas) = &self.areas else { return false };
        self.kicks = true;
        match areas.used.avail_event() {
            Some(event) => event.store(self.next_avail, Ordering::Relaxed),
            None => areas.used.flags().store(0, Ordering::Relaxed),
        }
        // Either we see the index that the driver has published, or it sees what we have just
        // asked for: argued in the driver's `needs_kick`.
        fence(Ordering::SeqCst);
        // A broken queue has something to say as well.
        self.broken.is_some() || self.look().is_err() || self.seen != self.next_avail
    }

    fn next_avail(&self) -> u32 {
        self.next_avail.into()
    }

    fn in_flight(&self) -> u16 {
        self.next_avail.wrapping_sub(self.next_used)
    }
}
