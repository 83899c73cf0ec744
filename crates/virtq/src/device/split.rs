//! The device's end of a split virtqueue (virtio 1.3, 2.7).

use ringfence_mem::Translate;
use ringfence_sync::atomic::{Ordering, fence};

use super::{
    Glimpse, PEEK_DESCS, RingConfig, Written,
    end::{End, Format},
    flight::Flight,
    table::Table,
    window,
    written::{USED, entries},
};
use crate::{
    Area, Chain, ChainFault, Desc, RingError, layout,
    ring::{AvailRing, DescTable, RawDesc, UsedRing},
};

/// The three areas, at their current addresses.
#[derive(Debug)]
pub(super) struct Areas {
    desc: DescTable,
    avail: AvailRing,
    used: UsedRing,
}

/// The device's position in a split ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Indices {
    /// The available index of the next chain to take.
    next_avail: u16,
    /// The available index when it was last read.
    seen: u16,
    /// The used index of the next chain to give back, and the index that was last published.
    next_used: u16,
    published: u16,
    /// The used index at the last [`written`](Format::written).
    logged: u16,
}

/// The device's end of a split queue.
pub(super) type Split = End<Indices>;

impl Split {
    /// As [`Queue::take_head`](super::Queue::take_head).
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub(super) fn take_head(
        &mut self,
        mem: &impl Translate,
        head: u16,
        chain: &mut Chain,
    ) -> Result<(), RingError> {
        self.resume(head, chain, |areas, table, _, chain| {
            let areas = areas.expect("a ring that was found");
            walk(areas, table, mem, head, areas.desc.load(head), chain)
        })
    }
}

impl Format for Indices {
    type Areas = Areas;
    /// The head, and its descriptor.
    type First = (u16, RawDesc);

    fn new(config: &RingConfig) -> Result<Indices, RingError> {
        let RingConfig { size, base, .. } = *config;
        if !layout::is_size(size) {
            return Err(RingError::Size { size });
        }
        let Ok(next) = u16::try_from(base) else {
            return Err(RingError::Base { base, used: 0, size });
        };
        Ok(Indices { next_avail: next, seen: next, next_used: next, published: next, logged: next })
    }

    fn translate(config: &RingConfig, mem: &impl Translate) -> Result<Areas, RingError> {
        let RingConfig { size, event_idx, .. } = *config;
        let [desc, avail, used] = config.areas();
        let descs = window(mem, Area::Descriptors, desc)?;
        let avails = window(mem, Area::Avail, avail)?;
        let useds = window(mem, Area::Used, used)?;
        Ok(Areas {
            desc: DescTable::new(descs, desc.0, size)?,
            avail: AvailRing::new(avails, avail.0, size, event_idx)?,
            used: UsedRing::new(useds, used.0, size, event_idx)?,
        })
    }

    #[inline]
    fn is_valid(areas: &Areas) -> bool {
        areas.desc.is_valid() && areas.avail.is_valid() && areas.used.is_valid()
    }

    #[inline]
    fn begin(
        &mut self,
        areas: &Areas,
        config: &RingConfig,
        at_used: bool,
    ) -> Result<(), RingError> {
        // Read once, now: from here on only we write it.
        let used = areas.used.idx().load(Ordering::Relaxed);
        let RingConfig { size, base, .. } = *config;
        if at_used {
            (self.next_avail, self.seen) = (used, used);
        }
        if self.next_avail.wrapping_sub(used) > size {
            return Err(RingError::Base { base, used, size });
        }
        (self.next_used, self.published, self.logged) = (used, used, used);
        Ok(())
    }

    /// Reads the available index, once for as many chains as it announces.
    #[inline]
    fn look(&mut self, areas: &Areas, size: u16, most: usize) -> Result<(), RingError> {
        let next = self.next_avail;
        if usize::from(self.seen.wrapping_sub(next)) >= most.min(size.into()) {
            return Ok(());
        }
        // Acquire pairs with the driver's Release: the loads that follow see the entries,
        // descriptors and buffers of every chain before the index.
        let idx = areas.avail.idx().load(Ordering::Acquire);
        // At most `size`: initially so, and never more chains are taken than the check below
        // admits.
        let in_flight = self.held();
        if idx.wrapping_sub(next) > size - in_flight {
            return Err(RingError::AvailJump { next, idx, in_flight, size });
        }
        self.seen = idx;
        Ok(())
    }

    #[inline]
    fn next(&self, areas: &Areas, _: u16) -> Option<(u16, RawDesc)> {
        (self.seen != self.next_avail).then(|| {
            let head = areas.avail.head(self.next_avail).load(Ordering::Relaxed);
            // For an invalid head, the load stays in the table, and its result is not used.
            (head, areas.desc.load(head))
        })
    }

    #[inline]
    fn single(&self, (head, first): (u16, RawDesc)) -> Option<(u16, u16, Desc)> {
        let single = !first.has(layout::DESC_F_NEXT | layout::DESC_F_INDIRECT);
        single.then(|| (head, head, first.desc()))
    }

    #[inline]
    fn walk(
        &self,
        areas: &Areas,
        (head, first): (u16, RawDesc),
        _: u16,
        (flight, table, mem): (&Flight, &mut Table, &impl Translate),
        chain: &mut Chain,
    ) -> Result<(), ChainFault> {
        chain.head = head;
        flight.check(head)?;
        walk(areas, table, mem, head, first, chain)
    }

    #[inline]
    fn places(_: u16) -> u16 {
        1
    }

    #[inline]
    fn forward(&mut self, places: u16, _: u16) {
        self.next_avail = self.next_avail.wrapping_add(places);
    }

    fn skip(&mut self, places: u16, size: u16) {
        self.forward(places, size);
        self.seen = self.next_avail;
    }

    fn back(&mut self, places: u16, _: u16) {
        self.next_avail = self.next_avail.wrapping_sub(places);
    }

    #[inline]
    fn held(&self) -> u16 {
        self.next_avail.wrapping_sub(self.next_used)
    }

    fn in_flight(&self, _: &Flight) -> u16 {
        self.held()
    }

    #[inline]
    fn put(&mut self, areas: &Areas, (head, len): (u16, u32), _: u16, _: u16) {
        // The element is free: it was last used `size` chains ago, and the driver has since taken
        // that one back and made available the chain that made room for this one.
        areas.used.store(self.next_used, head.into(), len);
        self.next_used = self.next_used.wrapping_add(1);
    }

    #[inline]
    fn soon(&self, areas: &Areas, count: usize) {
        areas.used.soon(self.next_used, count);
    }

    #[inline]
    fn soon_next(&self, areas: &Areas) {
        areas.used.soon_next(self.next_used);
    }

    #[inline]
    fn publish(&mut self, areas: &Areas, _: &RingConfig) -> bool {
        let (old, new) = (self.published, self.next_used);
        if old == new {
            return false;
        }
        self.published = new;
        // Release: a driver that reads this index (with Acquire) sees the elements before it and
        // what was written to their buffers, and we read none of those buffers later.
        areas.used.idx().store(new, Ordering::Release);
        // The store of the index and the load of the driver's event or flags must not be reordered:
        // the mirror image of the driver's `needs_kick`, with the same argument. The driver's part
        // is in its `enable_notifications`.
        fence(Ordering::SeqCst);
        match areas.avail.event() {
            Some(event) => layout::passed_event(event.load(Ordering::Relaxed), new, old),
            None => {
                let flags = areas.avail.flags().load(Ordering::Relaxed);
                flags & layout::AVAIL_F_NO_INTERRUPT == 0
            }
        }
    }

    #[inline]
    fn suppress(&self, areas: &Areas) {
        match areas.used.event() {
            // No event value means never; this one is half a lap of the index away, so that a
            // poller is kicked once in 2^16 chains.
            Some(event) => event.store(self.next_avail ^ 0x8000, Ordering::Relaxed),
            None => areas.used.flags().store(layout::USED_F_NO_NOTIFY, Ordering::Relaxed),
        }
    }

    fn enable(&self, areas: &Areas, _: &RingConfig) {
        match areas.used.event() {
            Some(event) => event.store(self.next_avail, Ordering::Relaxed),
            None => areas.used.flags().store(0, Ordering::Relaxed),
        }
    }

    #[inline]
    fn ready(&self, areas: &Areas, most: u16, _: u16) -> u16 {
        // No chain is read on its word.
        let idx = areas.avail.idx().load(Ordering::Relaxed);
        idx.wrapping_sub(self.next_avail).min(most)
    }

    fn peek(
        &self,
        areas: &Areas,
        (skip, ahead): (u16, u16),
        (config, table, mem): (&RingConfig, &mut Table, &impl Translate),
        mut each: impl FnMut(Glimpse),
    ) -> u16 {
        let size = config.size;
        let idx = areas.avail.idx().load(Ordering::Acquire);
        let ready = idx.wrapping_sub(self.next_avail).min(size).min(ahead);
        let mut left = PEEK_DESCS;
        for step in skip..ready {
            let mut at =
                areas.avail.head(self.next_avail.wrapping_add(step)).load(Ordering::Relaxed);
            // Whatever the numbers are: `load` stays in the table, and `left` ends a loop.
            loop {
                if left == 0 {
                    // The rest of an endless chain would never be seen.
                    return step + 1;
                }
                left -= 1;
                let raw = areas.desc.load(at);
                if raw.has(layout::DESC_F_INDIRECT) {
                    each(Glimpse::Table { addr: raw.addr, len: raw.len });
                    for entry in table.glimpse(mem, (raw.addr, raw.len), &mut left) {
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

    fn written<'w>(
        &mut self,
        areas: &'w Areas,
        config: &RingConfig,
        mut each: impl FnMut(Written<'w>),
    ) {
        let (used, size) = (areas.used.window(), config.size);
        let count = self.published.wrapping_sub(self.logged).min(size);
        self.logged = self.published;
        if count > 0 {
            let first = self.published.wrapping_sub(count) & (size - 1);
            for (offset, len) in entries(USED, first, count, size) {
                each(Written::new(Area::Used, used, offset, len));
            }
            each(Written::new(Area::Used, used, layout::IDX, 2));
        }
    }

    #[inline]
    fn wanted<'w>(areas: &'w Areas, config: &RingConfig) -> Written<'w> {
        let event = match config.event_idx {
            true => layout::avail_event(config.size),
            false => layout::FLAGS,
        };
        Written::new(Area::Used, areas.used.window(), event, 2)
    }

    fn index(&self) -> u16 {
        self.next_avail
    }

    fn next_avail(&self) -> u32 {
        self.next_avail.into()
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
    (chain.head, chain.count) = (head, 0);
    let next = first.next;
    if first.flags != layout::DESC_F_NEXT || next >= areas.desc.size() || areas.desc.size() < 2 {
        return walk_on(areas, table, mem, (head, first), chain);
    }
    // A request and its response: the most common chain.
    let second = areas.desc.load(next);
    if second.flags == layout::DESC_F_WRITE {
        chain.count = 2;
        return chain.push_pair((head, first.desc()), (next, second.desc()));
    }
    chain.count = 1;
    chain.push(head, first.desc())?;
    walk_on(areas, table, mem, (next, second), chain)
}

/// Copies the rest of a chain, from descriptor `at` on.
fn walk_on(
    areas: &Areas,
    table: &mut Table,
    mem: &impl Translate,
    (mut at, mut raw): (u16, RawDesc),
    chain: &mut Chain,
) -> Result<(), ChainFault> {
    let size = areas.desc.size();
    // A chain that visits a descriptor twice loops; any other has at most `size`.
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
