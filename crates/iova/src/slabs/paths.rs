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

    /// The size class of `size` bytes and by how many granules they are shorter; `None` if there is no such
    /// class.
    #[inline]
    fn class_of(&self, size: u64) -> Option<(u32, u32)> {
        let last = size.checked_sub(1)? >> self.shift;
        let class = u64::BITS - last.leading_zeros();
        let missing = || ((1 << class) - 1 - last) as u32;
        ((class as usize) < self.indexes.len()).then(|| (class, missing()))
    }

    /// Whether a range may be taken that is so much shorter than the class.
    #[inline]
    fn may_be_shorter(&self, class: u32, missing: u32) -> bool {
        missing == 0 || class <= MOST_SHORTER && !self.tight.load(Ordering::Relaxed)
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
        let (class, missing) = self.class_of(request.size)?;
        if !self.is_natural(request, class) {
            return None;
        }
        // Perhaps one granule too high: the range is checked below.
        let zone = self.highest_zone(request.limit >> self.shift)?;
        if !self.may_be_shorter(class, missing) {
            return None;
        }
        let (_, cpu) = self.this_cpu();
        let bin = Bin::new(zone, class);
        let (slab, slot) = match cpu.current(bin).and_then(|slab| Some((slab, slab.take()?))) {
            Some(taken) => taken,
            None => match cpu.take_loose(bin) {
                Some(taken) => taken,
                None => self.take_listed(cpu, bin)?,
            },
        };
        // Only now is the identity of the slab certain.
        let key = slab.key();
        let iova = key.number(slot) << self.shift;
        // Whole granules count, even if the request needs only part of the last one.
        let length = ((1 << class) - u64::from(missing)) << self.shift;
        if key.class() != class || iova + (length - 1) > request.limit {
            self.put_back(slab, slot);
            return None;
        }
        if CHECKED && missing != 0 {
            slab.note_missing(slot, missing);
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
        let mut missing = 0;
        let freed =
            self.free_hot(iova, size, &mut missing) || self.free_cold(iova, size, missing).is_ok();
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
        let slab = self
            .class_of(request.size)
            .filter(|(class, _)| self.is_natural(request, *class))
            .filter(|(class, missing)| self.may_be_shorter(*class, *missing))
            .and_then(|(class, missing)| Some((class, missing, self.highest_zone(wanted.limit)?)));
        let taken = |(slab, slot): (Handle, u32), missing| {
            if CHECKED && missing != 0 {
                slab.note_missing(slot, missing);
            }
            slab.key().number(slot)
        };
        if let Some((class, missing, zone)) = slab {
            for zone in (0..=zone).rev() {
                let (_, cpu) = self.this_cpu();
                let found = self
                    .take_loose(cpu, Bin::new(zone, class))
                    .or_else(|| self.take_listed(cpu, Bin::new(zone, class)))
                    .or_else(|| self.grow(&mut self.core.lock(), zone, class))
                    .or_else(|| self.take_over(&mut self.core.lock(), Bin::new(zone, class)))
                    // Prefers taking back what all CPUs keep over sharing a slab that another CPU
                    // is using.
                    .or_else(
                        || if request.flush { None } else { self.pick(Bin::new(zone, class)) },
                    );
                if let Some(found) = found {
                    return Some(taken(found, missing));
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
            if let Some((class, missing, zone)) = slab
                && let Some(found) = self.grow(&mut core, zone, class)
            {
                return Some(taken(found, missing));
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

    /// Takes a range of a slab of the bin that a free on the CPU has left loose.
    fn take_loose(&self, cpu: &Cpu, bin: Bin) -> Option<(Handle, u32)> {
        let (slab, slot) = cpu.take_loose(bin)?;
        if self.bin_of(slab.key()) == bin {
            return Some((slab, slot));
        }
        self.put_back(slab, slot);
        None
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
        let most = match cpu.is_online() {
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
        let rest = slots & !(1 << slot);
        let attached = rest != 0 && slab.add_free_as_current(rest);
        // Only now: a wrong free would find ranges that are neither free nor anybody's.
        slab.own(slots);
        if attached {
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
            if !cpu.is_online() {
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
            let lists = cpu.lists.lock();
            let taken = cpu.current(bin).and_then(|slab| Some((slab, slab.take()?)));
            drop(lists);
            taken.or_else(|| self.take_loose(cpu, bin))
        })
    }

    /// Frees with one exchange that sets the range's bit in its slab. `unchecked` is what remains to be
    /// checked of the size.
    #[inline(always)]
    pub(super) fn free_hot(&self, iova: u64, size: u64, unchecked: &mut u32) -> bool {
        let Some((class, missing)) = self.class_of(size) else { return false };
        if CHECKED {
            *unchecked = missing;
        }
        // The number of the range among those of its class.
        let range = iova >> (class + self.shift);
        if range << (class + self.shift) != iova {
            return false;
        }
        let (region, slot) = (range >> SLOT_BITS, range as u32 & (SLOTS - 1));
        let Some(slab) = self.indexes[class as usize].get(region) else { return false };
        let key = Key::at(region, class);
        match slab.give::<CHECKED>(key, slot, unchecked) {
            Freed::Done { last } => {
                if last {
                    self.settle(slab, key);
                }
                true
            }
            Freed::Detached => self.give_detached(slab, key, slot),
            Freed::Unclear => false,
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn free_cold(
        &self,
        iova: u64,
        size: u64,
        mut unchecked: u32,
    ) -> Result<(), FreeError> {
        let Some((number, count)) = self.aperture.range_of(iova, size) else {
            return self.reject(&self.core.lock(), iova, size);
        };
        let class = order_of(count);
        let aligned = number.trailing_zeros() >= class;
        let free_exact = |core: &mut Core| {
            let found = core.exact.get(&number) == Some(&(number + (count - 1)));
            if found {
                core.exact.remove(&number);
                core.tree.give(number, count);
            }
            found
        };
        let Some(index) = self.indexes.get(class as usize).filter(|_| aligned) else {
            let mut core = self.core.lock();
            return if free_exact(&mut core) { Ok(()) } else { self.reject(&core, iova, size) };
        };
        let (key, slot) = (Key::of(number, class), slot_of(number, class));
        loop {
            let freed = index
                .get(key.region())
                .map(|slab| (slab, slab.give::<CHECKED>(key, slot, &mut unchecked)));
            match freed {
                Some((slab, Freed::Done { last })) => {
                    if last {
                        self.settle(slab, key);
                    }
                    return Ok(());
                }
                Some((slab, Freed::Detached)) => {
                    if self.give_detached(slab, key, slot) {
                        return Ok(());
                    }
                }
                Some((_, Freed::Unclear)) | None => {
                    let mut core = self.core.lock();
                    // No slab is frozen now.
                    let slab = index.with(key);
                    if free_exact(&mut core) {
                        if let Some(slab) = slab {
                            slab.forget_cut(slot);
                            core.retire_lost(&self.indexes, slab);
                        }
                        return Ok(());
                    }
                    // A size that has been checked is cleared: see `Slab::give`.
                    let left = if unchecked == 0 { 1 << class } else { count };
                    let is_it = slab.is_some_and(|slab| {
                        slab.owned() & !slab.free() & 1 << slot != 0 && slab.size(slot) == left
                    });
                    if !is_it {
                        return self.reject(&core, iova, size);
                    }
                }
            }
        }
    }

    fn reject(&self, core: &Core, iova: u64, size: u64) -> Result<(), FreeError> {
        self.rejected.fetch_add(1, Ordering::Relaxed);
        Err(FreeError { iova, size, reason: self.why_not_free(core, iova, size) })
    }

    /// Frees a range of a detached slab, which is loose or this CPU's then; returns false if it is not that slab
    /// any more.
    #[inline]
    fn give_detached(&self, slab: Handle, key: Key, slot: u32) -> bool {
        let (_, cpu) = self.this_cpu();
        let bin = self.bin_of(key);
        // Where space is short, what is free is to be found without a look at every slab.
        let loose = !self.tight.load(Ordering::Relaxed) && cpu.is_online();
        if !loose || !cpu.give_loose(bin, slab, key, slot) {
            return self.attach(cpu, bin, slab, key, slot);
        }
        if !cpu.is_online() {
            // It has gone offline meanwhile, and keeps nothing.
            self.core.lock().withdraw_if_loose(&self.indexes, slab);
        }
        true
    }

    /// Frees a range of a detached slab and attaches the slab to this CPU; returns false if it is
    /// not that slab any more.
    #[inline(never)]
    fn attach(&self, cpu: &Cpu, bin: Bin, slab: Handle, key: Key, slot: u32) -> bool {
        let mut lists = cpu.lists.lock();
        if cpu.is_online() {
            cpu.forget_loose(bin, slab);
            // As the current slab if that has nothing left, so that the next request is met at
            // once.
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
        if free & bit != 0 {
            // Another thread has freed it meanwhile.
            slab.thaw(free);
            return false;
        }
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
