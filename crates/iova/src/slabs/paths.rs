//! The paths of a request and of a free, from the hot path to the last resort.

use super::*;

impl<C: CpuId, const CHECKED: bool> Slabs<C, CHECKED> {
    #[inline]
    fn this_cpu(&self) -> (usize, &Cpu) {
        // The number is only a hint, so the index is checked.
        let number = self.cpu.current();
        match self.cpus.get(number) {
            Some(cpu) => (number, cpu),
            None => (0, &self.cpus[0]),
        }
    }

    /// The size class of `size` bytes and the granules they take; `None` if there is no such class.
    #[inline]
    fn class_of(&self, size: u64) -> Option<(u32, u64)> {
        let last = size.checked_sub(1)? >> self.shift;
        let class = u64::BITS - last.leading_zeros();
        ((class as usize) < self.indexes.len()).then_some((class, last + 1))
    }

    /// Whether any range that is aligned to its class meets the request.
    #[inline]
    fn is_natural(&self, request: &Request, class: u32) -> bool {
        if request.align == Align::Size && request.boundary == u64::MAX {
            return true;
        }
        let size = 1u64 << (class + self.shift);
        let aligned = match request.align {
            Align::Size => true,
            Align::Bytes(bytes) => bytes.is_power_of_two() && bytes <= size,
        };
        // Aligned to its size, it crosses no boundary of at least that spacing.
        let boundary = request.boundary;
        let whole = boundary == u64::MAX
            || (boundary >= size - 1 && boundary & boundary.wrapping_add(1) == 0);
        aligned && whole
    }

    /// The highest zone that ends at or below a limit.
    #[inline]
    fn highest_zone(&self, limit: u64) -> Option<usize> {
        if limit >= self.top {
            return Some(self.last_zone);
        }
        self.zones[..self.last_zone].iter().rposition(|last| *last <= limit)
    }

    /// Allocates from the CPU's current slab, with one exchange.
    #[inline(always)]
    pub(super) fn alloc_hot(&self, request: &Request) -> Option<u64> {
        let (class, count) = self.class_of(request.size)?;
        if !self.is_natural(request, class) {
            return None;
        }
        // Perhaps one granule too high: the range is checked below.
        let zone = self.highest_zone(request.limit >> self.shift)?;
        let odd = count != 1 << class;
        if odd && self.tight.load(Ordering::Relaxed) {
            return None;
        }
        let (_, cpu) = self.this_cpu();
        let bin = Bin::new(zone, class);
        let (slab, slot) = match cpu.current(bin).and_then(|slab| Some((slab, slab.take()?))) {
            Some(taken) => taken,
            None => self.take_listed(cpu, bin)?,
        };
        // Only now is the identity of the slab certain.
        let key = slab.key();
        let iova = key.number(slot) << self.shift;
        // Whole granules count, even if the request needs only part of the last one.
        if key.class() != class || iova + ((count << self.shift) - 1) > request.limit {
            self.put_back(slab, slot);
            return None;
        }
        if CHECKED && odd {
            slab.note_odd(slot, count as u32);
        }
        cpu.count_alloc();
        Some(iova)
    }

    /// Puts back a range that does not fit the request.
    #[cold]
    fn put_back(&self, slab: Handle, slot: u32) {
        // Holding the range keeps the slab's identity fixed.
        let key = slab.key();
        let iova = key.number(slot) << self.shift;
        let size = 1 << (key.class() + self.shift);
        let mut odd = 0;
        let freed = self.free_hot(iova, size, &mut odd) || self.free_cold(iova, size, odd).is_ok();
        debug_assert!(freed);
    }

    #[cold]
    #[inline(never)]
    pub(super) fn alloc_cold(&self, request: &Request) -> Result<u64, AllocError> {
        let result = self.aperture.wanted(request).and_then(|wanted| {
            self.alloc_wanted(request, &wanted)
                .ok_or_else(|| self.aperture.exhausted(request, wanted.limit))
        });
        match result {
            Ok(number) => {
                self.this_cpu().1.count_alloc();
                Ok(self.aperture.start_of(number))
            }
            Err(error) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                Err(error)
            }
        }
    }

    fn alloc_wanted(&self, request: &Request, wanted: &GranuleRequest) -> Option<u64> {
        let odd = !wanted.count.is_power_of_two();
        let slab = self
            .class_of(request.size)
            .filter(|(class, _)| self.is_natural(request, *class))
            .filter(|_| !(odd && self.tight.load(Ordering::Relaxed)))
            .and_then(|(class, _)| Some((class, self.highest_zone(wanted.limit)?)));
        let taken = |(slab, slot): (Handle, u32)| {
            if CHECKED && odd {
                slab.note_odd(slot, wanted.count as u32);
            }
            slab.key().number(slot)
        };
        if let Some((class, zone)) = slab {
            for zone in (0..=zone).rev() {
                let found = self
                    .take_listed(self.this_cpu().1, Bin::new(zone, class))
                    .or_else(|| self.grow(&mut self.core.lock(), zone, class))
                    .or_else(|| self.take_over(&mut self.core.lock(), Bin::new(zone, class)))
                    // Prefers taking back what all CPUs keep over sharing a slab that another CPU
                    // is using.
                    .or_else(
                        || if request.flush { None } else { self.pick(Bin::new(zone, class)) },
                    );
                if let Some(found) = found {
                    return Some(taken(found));
                }
            }
        }
        let mut core = self.core.lock();
        if let Some(fit) = core.tree.fit().checked_ilog2() {
            self.relax(fit);
        }
        let mut place = core.place(wanted, self.placement);
        if place.is_none() && request.flush {
            // Rule L11, and more: tails are cut off if that is not enough.
            self.drains.fetch_add(1, Ordering::Relaxed);
            self.withdraw_all(&mut core);
            if let Some((class, zone)) = slab
                && let Some(found) = self.grow(&mut core, zone, class)
            {
                return Some(taken(found));
            }
            place = core.place(wanted, self.placement);
            if place.is_none() && !self.tight.load(Ordering::Relaxed) {
                self.trim(&mut core);
                place = core.place(wanted, self.placement);
            }
        }
        let place = place?;
        core.found += 1;
        core.enter(&self.indexes, place, wanted.count);
        Some(place)
    }

    /// Cuts tails off, and allows no new ones until there is room again.
    pub(super) fn trim(&self, core: &mut Core) {
        // Without the sizes no tail is known.
        if CHECKED {
            self.tight.store(true, Ordering::Relaxed);
            core.trim();
        }
    }

    /// Takes a range from a slab that the CPU has.
    #[inline(never)]
    fn take_listed(&self, cpu: &Cpu, bin: Bin) -> Option<(Handle, u32)> {
        let mut lost = Vec::new();
        let mut lists = cpu.lists.lock();
        let taken = cpu.take(&mut lists, bin, &mut |slab| lost.push(slab));
        drop(lists);
        self.retire_lost(lost);
        taken
    }

    #[inline]
    fn retire_lost(&self, lost: impl IntoIterator<Item = Handle>) {
        for slab in lost {
            self.core.lock().retire_lost(&self.indexes, slab);
        }
    }

    /// Takes a range from a new slab.
    fn grow(&self, core: &mut Core, zone: usize, class: u32) -> Option<(Handle, u32)> {
        let (_, cpu) = self.this_cpu();
        let mut lists = cpu.lists.lock();
        core.searches += 1;
        let fit = core.tree.fit().checked_ilog2()?;
        self.relax(fit);
        // An offline CPU keeps nothing, so it gets only what it needs.
        let most = match lists.online {
            true => (class + SLOT_BITS)
                .min(self.largest_slab)
                .min(fit.saturating_sub(HOLE_SHARE_BITS))
                .max(class),
            false => class,
        };
        let limit = self.zones[zone];
        let above = zone.checked_sub(1).map(|below| self.zones[below]);
        let (order, first) = (class..=most).rev().find_map(|order| {
            let first = core.tree.highest(1 << order, limit)?;
            above.is_none_or(|above| first > above).then_some((order, first))
        })?;
        core.found += 1;
        core.tree.take(first, 1 << order);
        let slot = slot_of(first, class);
        let index = &self.indexes[class as usize];
        let slab = core.slab_at(index, Key::of(first, class));
        let slots = (((1u64 << (1 << (order - class))) - 1) << slot) as u32;
        slab.own(slots);
        let rest = slots & !(1 << slot);
        if rest != 0 && slab.add_free_as_current(rest) {
            let mut lost = None;
            cpu.install(&mut lists, self.bin_of(slab.key()), slab, &mut |old| lost = Some(old));
            if let Some(lost) = lost {
                core.retire_lost(&self.indexes, lost);
            }
        }
        Some((slab, slot))
    }

    /// Allows tails again once a hole as large as 64 of the largest slabs is free, or a quarter of
    /// everything.
    fn relax(&self, fit: u32) {
        if fit >= self.roomy && self.tight.load(Ordering::Relaxed) {
            self.tight.store(false, Ordering::Relaxed);
        }
    }

    /// Takes over a slab from another CPU's list, and a range from it. Under the core's lock, so that
    /// a thread that takes back what all CPUs keep misses none.
    fn take_over(&self, core: &mut Core, bin: Bin) -> Option<(Handle, u32)> {
        let (mine, cpu) = self.this_cpu();
        (0..self.cpus.len()).filter(|other| *other != mine).find_map(|other| {
            let mut first = self.cpus[mine.min(other)].lists.lock();
            let mut second = self.cpus[mine.max(other)].lists.lock();
            let (my_lists, others) =
                if mine < other { (&mut first, &mut second) } else { (&mut second, &mut first) };
            if !my_lists.online {
                return None;
            }
            my_lists.push(bin, others.pop(bin)?);
            let mut lost = Vec::new();
            let taken = cpu.take(my_lists, bin, &mut |slab| lost.push(slab));
            drop((first, second));
            lost.into_iter().for_each(|slab| core.retire_lost(&self.indexes, slab));
            taken
        })
    }

    /// Takes a range of a slab that another CPU is using.
    fn pick(&self, bin: Bin) -> Option<(Handle, u32)> {
        let (mine, _) = self.this_cpu();
        self.cpus.iter().enumerate().filter(|(other, _)| *other != mine).find_map(|(_, cpu)| {
            // Under the lock the slab keeps its identity.
            let _lists = cpu.lists.lock();
            let slab = cpu.current(bin)?;
            Some((slab, slab.take()?))
        })
    }

    /// Frees with one exchange that sets the range's bit in its slab. `odd` is what remains to be
    /// checked of the size.
    #[inline(always)]
    pub(super) fn free_hot(&self, iova: u64, size: u64, odd: &mut u32) -> bool {
        let Some((class, count)) = self.class_of(size) else { return false };
        if CHECKED && count != 1 << class {
            *odd = count as u32;
        }
        // The number of the range among those of its class.
        let range = iova >> (class + self.shift);
        if range << (class + self.shift) != iova {
            return false;
        }
        let (region, slot) = (range >> SLOT_BITS, range as u32 & (SLOTS - 1));
        let Some(slab) = self.indexes[class as usize].get(region) else { return false };
        let key = Key::at(region, class);
        match slab.give::<CHECKED>(key, slot, odd) {
            Freed::Done { last } => {
                if last {
                    self.settle(slab, key);
                }
                true
            }
            Freed::Detached => self.attach(slab, key, slot),
            Freed::Unclear => false,
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn free_cold(&self, iova: u64, size: u64, mut odd: u32) -> Result<(), FreeError> {
        let Some((number, count)) = self.aperture.range_of(iova, size) else {
            return self.reject(&self.core.lock(), iova, size);
        };
        let class = order_of(count);
        let aligned = number.trailing_zeros() >= class;
        let Some(index) = self.indexes.get(class as usize).filter(|_| aligned) else {
            return self.free_exact(iova, size, number, count);
        };
        let (key, slot) = (Key::of(number, class), slot_of(number, class));
        loop {
            let freed = match index.get(key.region()) {
                Some(slab) => (slab, slab.give::<CHECKED>(key, slot, &mut odd)),
                None => return self.free_exact(iova, size, number, count),
            };
            match freed {
                (slab, Freed::Done { last }) => {
                    if last {
                        self.settle(slab, key);
                    }
                    return Ok(());
                }
                (slab, Freed::Detached) => {
                    if self.attach(slab, key, slot) {
                        return Ok(());
                    }
                }
                (_, Freed::Unclear) => {
                    let mut core = self.core.lock();
                    // No slab is frozen now.
                    let Some(slab) = index.with(key) else {
                        return self.reject(&core, iova, size);
                    };
                    if slab.owned() & !slab.free() & 1 << slot == 0 {
                        return self.reject(&core, iova, size);
                    }
                    match slab.size(slot) {
                        (length, true) if length == count => {
                            core.tree.give(number, count);
                            slab.disown_trimmed(slot);
                            core.retire_lost(&self.indexes, slab);
                            return Ok(());
                        }
                        // A size of its own that has been checked is cleared: see `Slab::give`.
                        (length, false) if length == if odd == 0 { 1 << class } else { count } => {}
                        _ => return self.reject(&core, iova, size),
                    }
                }
            }
        }
    }

    fn free_exact(&self, iova: u64, size: u64, number: u64, count: u64) -> Result<(), FreeError> {
        let mut core = self.core.lock();
        if core.exact.get(&number) != Some(&(number + (count - 1))) {
            return self.reject(&core, iova, size);
        }
        core.exact.remove(&number);
        core.tree.give(number, count);
        Ok(())
    }

    fn reject(&self, core: &Core, iova: u64, size: u64) -> Result<(), FreeError> {
        self.rejected.fetch_add(1, Ordering::Relaxed);
        Err(FreeError { iova, size, reason: self.why_not_free(core, iova, size) })
    }

    /// Frees a range of a detached slab and attaches the slab to this CPU; returns false if it is
    /// not that slab any more.
    #[inline(never)]
    fn attach(&self, slab: Handle, key: Key, slot: u32) -> bool {
        let (_, cpu) = self.this_cpu();
        let mut lists = cpu.lists.lock();
        if lists.online {
            // As the current slab if that has nothing left, so that the next request is met at
            // once.
            let bin = self.bin_of(key);
            let current = cpu.is_exhausted(bin);
            match slab.give_and_attach(key, slot, current) {
                Freed::Detached if current => {
                    let mut lost = None;
                    cpu.install(&mut lists, bin, slab, &mut |old| lost = Some(old));
                    drop(lists);
                    self.retire_lost(lost);
                }
                Freed::Detached => {
                    lists.push(bin, slab);
                    let single = slab.is_all_free();
                    drop(lists);
                    if single {
                        self.settle(slab, key);
                    }
                }
                Freed::Done { .. } => {}
                Freed::Unclear => return false,
            }
            return true;
        }
        drop(lists);
        // This CPU keeps nothing: straight back to the tree.
        let mut core = self.core.lock();
        let bit = 1 << slot;
        if slab.is_frozen() || slab.key() != key || slab.owned() & !slab.free() & bit == 0 {
            return false;
        }
        let free = slab.freeze();
        if slab.is_attached() {
            slab.thaw(free | bit);
        } else {
            core.take_back(&self.indexes, slab, free | bit);
        }
        true
    }

    /// How many ranges of a class a CPU may keep in all-free slabs.
    fn most_idle(&self, class: u32) -> u32 {
        let share = u32::try_from(self.idle_share >> class).unwrap_or(u32::MAX);
        share.min(self.idle_slabs.saturating_mul(SLOTS))
    }

    /// Keeps or gives back an all-free slab.
    #[cold]
    fn settle(&self, slab: Handle, key: Key) {
        // Another thread may have it by now: everything is checked again under its lock.
        let Some(home) = slab.place().cpu() else { return };
        let here = |slab: Handle| {
            slab.place().cpu() == Some(home) && slab.key() == key && slab.is_all_free()
        };
        {
            let mut lists = self.cpus[home].lists.lock();
            let most = self.most_idle(key.class());
            if !here(slab) || lists.keep_idle(self.bin_of(key), slab, most) {
                return;
            }
        }
        let mut core = self.core.lock();
        let mut lists = self.cpus[home].lists.lock();
        if here(slab) && !slab.is_frozen() {
            lists.unlink(self.bin_of(key), slab);
            core.withdraw(&self.indexes, slab);
        }
    }
}
