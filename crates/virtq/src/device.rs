//! The device's end of a split virtqueue.

use core::sync::atomic::{Ordering, fence};

use ringfence_mem::{Access, Translate};

use crate::{
    Area, Chain, ChainFault, RingError, layout,
    ring::{AvailRing, DescTable, RawDesc, UsedRing},
};

/// Where the areas lie, as the device sees them, and what was negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// How many descriptors: a power of two, at most 32768.
    pub size: u16,
    /// Address of the descriptor table.
    pub desc: u64,
    /// Address of the available ring.
    pub avail: u64,
    /// Address of the used ring.
    pub used: u64,
    /// Whether `EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// Whether `INDIRECT_DESC` was negotiated.
    pub indirect: bool,
    /// The available index to start from: 0, or what [`next_avail`](Queue::next_avail) said when
    /// the queue was stopped.
    pub base: u16,
}

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
        let window = |area, addr, len: usize, access| {
            mem.window(addr, len as u64, access).map_err(|error| RingError::Unreachable {
                area,
                addr,
                error,
            })
        };
        // What each area is for is all that is asked: a used ring need only be writable.
        let desc_window = window(Area::Descriptors, desc, layout::desc_bytes(size), Access::Read)?;
        let avail_window =
            window(Area::Avail, avail, layout::avail_bytes(size) - events, Access::Read)?;
        let used_window =
            window(Area::Used, used, layout::used_bytes(size) - events, Access::Write)?;
        Ok(Areas {
            desc: DescTable::new(desc_window, desc, size)?,
            avail: AvailRing::new(avail_window, avail, size, event_idx)?,
            used: UsedRing::new(used_window, used, size, event_idx)?,
        })
    }
}

/// The device's end: takes chains, gives them back in batches.
#[derive(Debug)]
pub struct Queue {
    areas: Areas,
    config: Config,
    /// Which heads are taken and not given back.
    in_flight: Box<[bool]>,
    /// Where an indirect table is copied to before it is looked at.
    table: Box<[u8]>,
    /// The available index of the next chain to take.
    next_avail: u16,
    /// The available index when it was last read.
    seen: u16,
    /// The used index of the next chain to give back, and up to which the driver was told.
    next_used: u16,
    published: u16,
    /// Whether kicks are asked for.
    kicks: bool,
    broken: Option<RingError>,
}

impl Queue {
    /// A queue over the areas that `config` names. The used index goes on from what the used ring
    /// holds. Kicks are wanted at first (`enable_kicks` need not be called).
    ///
    /// # Errors
    /// [`RingError::Size`], [`RingError::Misaligned`], [`RingError::Unreachable`],
    /// [`RingError::Base`].
    pub fn new(config: Config, mem: &impl Translate) -> Result<Queue, RingError> {
        let Config { size, base, .. } = config;
        if !layout::is_size(size) {
            return Err(RingError::Size { size });
        }
        let areas = Areas::translate(&config, mem)?;
        // Read once, here: from now on only we write it.
        let used = areas.used.idx().load(Ordering::Relaxed);
        if base.wrapping_sub(used) > size {
            return Err(RingError::Base { base, used, size });
        }
        let entries = if config.indirect { usize::from(layout::MAX_INDIRECT) } else { 0 };
        Ok(Queue {
            areas,
            config,
            in_flight: vec![false; size.into()].into_boxed_slice(),
            table: vec![0; entries * layout::DESC_SIZE].into_boxed_slice(),
            next_avail: base,
            seen: base,
            next_used: used,
            published: used,
            kicks: true,
            broken: None,
        })
    }

    /// What the queue was made from.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether the translations of all three areas still stand. To be asked before each round of
    /// work (rules D21, D22). While it is false the areas are to be left alone (they may not be
    /// the driver's any more, though accesses stay sound) until [`revalidate`](Self::revalidate)
    /// has found them again.
    #[inline]
    pub fn is_valid(&self) -> bool {
        let Areas { desc, avail, used } = &self.areas;
        desc.is_valid() && avail.is_valid() && used.is_valid()
    }

    /// Translates the areas' addresses again, after an invalidation. Indices go on.
    ///
    /// # Errors
    /// [`RingError::Unreachable`] or [`RingError::Misaligned`]: this does not break the queue, a
    /// later attempt may succeed. The error that broke the queue, if one did.
    pub fn revalidate(&mut self, mem: &impl Translate) -> Result<(), RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        self.areas = Areas::translate(&self.config, mem)?;
        Ok(())
    }

    /// What broke the queue, if something did.
    pub fn broken(&self) -> Option<RingError> {
        self.broken
    }

    /// Takes the next available chain into `chain`; false if there is none. The head stays this
    /// device's until [`push_used`](Self::push_used), and no other chain with it is taken
    /// meanwhile: a device may keep what belongs to a request under its head.
    ///
    /// # Errors
    /// [`RingError`]: the driver broke the rules; every later call returns the same (but see
    /// [`ChainFault::IndirectUnreachable`]). `chain` is
    /// empty then.
    #[inline]
    pub fn pop(&mut self, mem: &impl Translate, chain: &mut Chain) -> Result<bool, RingError> {
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
        let head = self.areas.avail.head(index).load(Ordering::Relaxed);
        if let Err(fault) = self.take(mem, head, chain) {
            return Err(self.refuse(index, head, fault, chain));
        }
        chain.head = head;
        self.next_avail = index.wrapping_add(1);
        Ok(true)
    }

    /// Reads the available index, once for as many chains as it announces.
    #[inline]
    fn look(&mut self) -> Result<(), RingError> {
        // Acquire pairs with the driver's Release: the entries, descriptors and buffers of every
        // chain before the index are seen by the loads that follow.
        let idx = self.areas.avail.idx().load(Ordering::Acquire);
        let size = self.config.size;
        let next = self.next_avail;
        // At most `size`: so it began (`new`), and never more chains are taken than the check
        // below admits.
        let in_flight = next.wrapping_sub(self.next_used);
        if idx.wrapping_sub(next) > size - in_flight {
            let error = RingError::AvailJump { next, idx, in_flight, size };
            self.broken = Some(error);
            return Err(error);
        }
        self.seen = idx;
        Ok(())
    }

    /// Copies the chain that begins at `head`.
    #[inline]
    fn take(
        &mut self,
        mem: &impl Translate,
        head: u16,
        chain: &mut Chain,
    ) -> Result<(), ChainFault> {
        let size = self.config.size;
        match self.in_flight.get(usize::from(head)) {
            None => return Err(ChainFault::Head { size }),
            Some(true) => return Err(ChainFault::InFlight),
            Some(false) => {}
        }
        let mut at = head;
        // A chain that visits a descriptor twice loops; one that does not has at most `size`.
        for _ in 0..size {
            let raw = self.areas.desc.load(at);
            if raw.has(layout::DESC_F_INDIRECT) {
                self.take_table(mem, at, raw, chain)?;
                self.in_flight[usize::from(head)] = true;
                return Ok(());
            }
            chain.push(at, &raw)?;
            if !raw.has(layout::DESC_F_NEXT) {
                self.in_flight[usize::from(head)] = true;
                return Ok(());
            }
            if raw.next >= size {
                return Err(ChainFault::Next { at, next: raw.next, entries: size });
            }
            at = raw.next;
        }
        Err(ChainFault::Loop { entries: size })
    }

    /// Copies the indirect table that descriptor `at` refers to, and then the chain in it. The
    /// descriptor's own write flag means nothing (virtio 2.7.5.3.2), and buffers may have come
    /// before it.
    fn take_table(
        &mut self,
        mem: &impl Translate,
        at: u16,
        raw: RawDesc,
        chain: &mut Chain,
    ) -> Result<(), ChainFault> {
        let RawDesc { addr, len, .. } = raw;
        if !self.config.indirect {
            return Err(ChainFault::NotNegotiated { at });
        }
        if raw.has(layout::DESC_F_NEXT) {
            return Err(ChainFault::IndirectNext { at });
        }
        let table = match self.table.get_mut(..len as usize) {
            Some(table) if len != 0 && len.is_multiple_of(layout::DESC_SIZE as u32) => table,
            _ => return Err(ChainFault::IndirectLength { at, len }),
        };
        // The whole table in one go: what is checked below is our copy.
        mem.read(addr, table).map_err(|error| ChainFault::IndirectUnreachable { addr, error })?;
        let (table, _) = table.as_chunks::<{ layout::DESC_SIZE }>();
        let entries = table.len() as u16;
        let mut at = 0;
        for _ in 0..entries {
            let raw = RawDesc::from_bytes(&table[usize::from(at)]);
            if raw.has(layout::DESC_F_INDIRECT) {
                return Err(ChainFault::Nested { at });
            }
            chain.push(at, &raw)?;
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

    #[cold]
    fn refuse(&mut self, index: u16, head: u16, fault: ChainFault, chain: &mut Chain) -> RingError {
        chain.clear();
        let error = RingError::Chain { index, head, fault };
        // A translation that is missing now may be there later: the chain stays where it is.
        if !matches!(fault, ChainFault::IndirectUnreachable { .. }) {
            self.broken = Some(error);
        }
        error
    }

    /// Gives the chain `head` back, `len` bytes of it written. The driver sees it after
    /// [`publish_used`](Self::publish_used). Works on a broken queue too, for the chains that were
    /// taken before.
    ///
    /// # Panics
    /// If `head` is not in flight: the device's own mistake.
    #[inline]
    pub fn push_used(&mut self, head: u16, len: u32) {
        let was = core::mem::replace(&mut self.in_flight[usize::from(head)], false);
        assert!(was, "chain {head} is given back but not in flight");
        // The element is free: it was last used `size` chains ago, and the driver has since made
        // available, after it took that one back, the chain that made room for this one.
        self.areas.used.store(self.next_used, head.into(), len);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Makes all chains given back so far visible to the driver. True if it wants an interrupt.
    #[inline]
    #[must_use]
    pub fn publish_used(&mut self) -> bool {
        let (old, new) = (self.published, self.next_used);
        if old == new {
            return false;
        }
        self.published = new;
        // Release: a driver that reads this index (with Acquire) sees the elements before it and
        // what was written to their buffers, and we read none of those buffers later.
        self.areas.used.idx().store(new, Ordering::Release);
        // The store of the index and the load of what the driver asked for must not change places:
        // the mirror image of `driver::Queue::needs_kick`, with the same argument. The driver's
        // part is in `enable_notifications`.
        fence(Ordering::SeqCst);
        match self.areas.avail.used_event() {
            Some(event) => layout::passed_event(event.load(Ordering::Relaxed), new, old),
            None => {
                let flags = self.areas.avail.flags().load(Ordering::Relaxed);
                flags & layout::AVAIL_F_NO_INTERRUPT == 0
            }
        }
    }

    /// Asks the driver for no kicks. A hint: one may still come.
    #[inline]
    pub fn suppress_kicks(&mut self) {
        // The line belongs to what the driver reads: do not touch it without need.
        if core::mem::replace(&mut self.kicks, false) {
            match self.areas.used.avail_event() {
                // There is no event that says never; this one is half a lap of the index away, so
                // that a poller is kicked once in 2^16 chains.
                Some(event) => event.store(self.next_avail ^ 0x8000, Ordering::Relaxed),
                None => self.areas.used.flags().store(layout::USED_F_NO_NOTIFY, Ordering::Relaxed),
            }
        }
    }

    /// Asks the driver for a kick with the next available chain. True if one is there already, for
    /// which none may come: look again before going to sleep. To be called before each sleep, also
    /// when the last call was not followed by [`suppress_kicks`](Self::suppress_kicks).
    #[must_use]
    pub fn enable_kicks(&mut self) -> bool {
        self.kicks = true;
        match self.areas.used.avail_event() {
            Some(event) => event.store(self.next_avail, Ordering::Relaxed),
            None => self.areas.used.flags().store(0, Ordering::Relaxed),
        }
        // Either we see the index that the driver has published, or it sees what we have just
        // asked for: argued in `driver::Queue::needs_kick`.
        fence(Ordering::SeqCst);
        // A broken queue has something to say as well.
        self.broken.is_some() || self.look().is_err() || self.seen != self.next_avail
    }

    /// The next available index: what `GET_VRING_BASE` answers when the queue stops.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// How many chains are taken and not yet given back.
    pub fn in_flight(&self) -> u16 {
        self.next_avail.wrapping_sub(self.next_used)
    }
}
