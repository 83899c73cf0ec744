//! The cache of a view, in front of the table.
//!
//! Three parts, searched in this order, for three kinds of mappings:
//!
//! | part | what it holds | for |
//! |---|---|---|
//! | `whole` | one run of any size, the largest that is known | memory that is mapped in one piece, be it by a million entries |
//! | `blocks` | a run in each aligned 2 MiB, direct-mapped | large pages, memory in several pieces |
//! | `pages` | a page, direct-mapped, 16 bytes each | pages that lead all over the memory |
//!
//! A run is addresses that lead to one piece of this process's memory with one permission: entries
//! side by side that lead on from each other cost as one. No run of `blocks` leaves its block, and
//! no page its page, so that what an invalidation may have to drop is found from its addresses.
//!
//! The direct-mapped parts are small at first, to leave the processor's caches to the data, and
//! grow when what is looked up again and again does not fit.

use std::{cell::Cell, ptr::NonNull};

use ringfence_iommu::{Iova, Prot, Range};
use ringfence_mem::HostSlice;

const PAGE_SHIFT: u32 = 12;
const PAGE: u64 = 1 << PAGE_SHIFT;
const BLOCK_SHIFT: u32 = 21;

/// How many slots there are at first and at most: 4 KiB to 1 MiB of pages, 2 KiB to 128 KiB of
/// blocks.
const PAGES: [usize; 2] = [1 << 8, 1 << 16];
const BLOCKS: [usize; 2] = [1 << 6, 1 << 12];

/// After its run was invalidated, how many table lookups a block waits for before all of it is
/// searched for a run again: searching must not cost more than it may save.
const HOLD: u32 = 16;
/// Meanwhile the 128 KiB around an address are searched, which are four cache lines of the table: a
/// driver that maps and unmaps all the time maps neighbours together, and uses one after the other.
const NEAR_SHIFT: u32 = 17;

/// Addresses that translate to one piece of this process's memory.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    /// The first address.
    pub(crate) first: u64,
    /// The number of bytes less one.
    pub(crate) extent: u64,
    /// Where the first address leads.
    pub(crate) host: NonNull<u8>,
    /// What is allowed. Nothing, for an entry that is not in use.
    pub(crate) prot: Prot,
    /// Of a block: how many lookups in the table it still waits for.
    hold: u32,
}

impl Entry {
    const EMPTY: Entry =
        Entry { first: 0, extent: 0, host: NonNull::dangling(), prot: Prot::empty(), hold: 0 };

    /// One that leads from `first` on to `host`.
    pub(crate) fn new(first: u64, extent: u64, host: NonNull<u8>, prot: Prot) -> Entry {
        Entry { first, extent, host, prot, hold: 0 }
    }

    fn last(&self) -> u64 {
        self.first + self.extent
    }

    /// Where `addr`, which it covers, leads.
    #[inline]
    pub(crate) fn here(&self, addr: u64) -> Here {
        let into = addr - self.first;
        Here { base: offset(self.host, into), more: self.extent - into }
    }

    #[inline]
    pub(crate) fn covers(&self, addr: u64, wanted: Prot) -> bool {
        addr.wrapping_sub(self.first) <= self.extent && self.prot.contains(wanted)
    }

    fn holds(&self, range: Range) -> bool {
        self.first <= range.first().0 && range.last().0 <= self.last()
    }

    fn overlaps(&self, range: Range) -> bool {
        !self.prot.is_empty() && self.first <= range.last().0 && range.first().0 <= self.last()
    }

    /// The part in `range`, which it overlaps.
    fn clip(&self, range: Range) -> Entry {
        let first = self.first.max(range.first().0);
        let last = self.last().min(range.last().0);
        let host = offset(self.host, first - self.first);
        Entry { first, extent: last - first, host, ..*self }
    }

    /// Whether both lead to the same piece of memory, and touch or overlap.
    fn joins(&self, other: &Entry) -> bool {
        let address = |entry: &Entry| (entry.host.as_ptr() as u64).wrapping_sub(entry.first);
        address(self) == address(other)
            && self.prot == other.prot
            && self.first <= other.last().saturating_add(1)
            && other.first <= self.last().saturating_add(1)
    }

    /// Both, which [join](Self::joins).
    fn hull(self, other: Entry) -> Entry {
        let lower = if self.first <= other.first { self } else { other };
        Entry { extent: self.last().max(other.last()) - lower.first, ..lower }
    }

    /// What remains without `range`, which it overlaps: the larger of two parts.
    fn without(&self, range: Range) -> Entry {
        let below = range.first().0.saturating_sub(self.first);
        let above = self.last().saturating_sub(range.last().0);
        if below == 0 && above == 0 {
            Entry { hold: HOLD, ..Entry::EMPTY }
        } else if below >= above {
            Entry { extent: below - 1, hold: HOLD, ..*self }
        } else {
            let moved = self.extent - (above - 1);
            let (first, host) = (self.first + moved, offset(self.host, moved));
            Entry { first, extent: above - 1, host, hold: HOLD, ..*self }
        }
    }
}

/// Where an address leads. Two words, which stay in registers: an entry goes through memory, stored in words and
/// loaded in larger parts, which a processor cannot forward from its stores.
#[derive(Clone, Copy)]
pub(crate) struct Here {
    pub(crate) base: NonNull<u8>,
    /// How many bytes follow the one at `base` in the same piece of memory.
    pub(crate) more: u64,
}

impl Here {
    /// The byte and `more` that follow it.
    ///
    /// # Safety
    /// `more` is at most `self.more`, and the memory stays mapped as long as `'m`.
    #[inline]
    pub(crate) unsafe fn piece<'m>(self, more: u64) -> HostSlice<'m> {
        // SAFETY: the caller's promise.
        unsafe { HostSlice::new(self.base, (more as usize).saturating_add(1)) }
    }
}

/// The address `by` bytes further on, in the same piece of memory.
#[inline]
pub(crate) fn offset(host: NonNull<u8>, by: u64) -> NonNull<u8> {
    NonNull::new(host.as_ptr().wrapping_add(by as usize)).expect("mapped memory is not at 0")
}

/// A page that leads to a piece of memory as a whole.
#[derive(Clone, Copy)]
struct Page {
    /// `page's first address | generation (bits 3..12) | permission (bits 0..3)`.
    tag: u64,
    host: NonNull<u8>,
}

impl Page {
    const EMPTY: Page = Page { tag: 0, host: NonNull::dangling() };
    const PROT: u64 = 7;
    const GENERATION: u64 = 1 << 3;
}

/// See the [module](self).
pub(crate) struct Cache {
    whole: Cell<Entry>,
    blocks: Box<[Cell<Entry>]>,
    pages: Box<[Cell<Page>]>,
    /// The generation of valid pages, in its place in the tag; never 0, which empty slots have.
    generation: Cell<u64>,
    /// How many conflicts for a slot there were, in pages and in blocks.
    conflicts: [Cell<usize>; 2],
}

fn slots<T: Copy>(empty: T, count: usize) -> Box<[Cell<T>]> {
    vec![Cell::new(empty); count].into()
}

/// Makes four times as many slots. `number` is that of the page or block of what is still true.
#[cold]
fn grow<T: Copy>(
    all: &mut Box<[Cell<T>]>,
    conflicts: &Cell<usize>,
    empty: T,
    number: impl Fn(T) -> Option<u64>,
) {
    let count = all.len() * 4;
    for slot in std::mem::replace(all, slots(empty, count)) {
        if let Some(number) = number(slot.get()) {
            all[place(number, count)].set(slot.into_inner());
        }
    }
    conflicts.set(0);
}

impl Cache {
    pub(crate) fn new() -> Cache {
        Cache {
            whole: Cell::new(Entry::EMPTY),
            blocks: slots(Entry::EMPTY, BLOCKS[0]),
            pages: slots(Page::EMPTY, PAGES[0]),
            generation: Cell::new(Page::GENERATION),
            conflicts: Default::default(),
        }
    }

    /// An empty cache, which replaces another while nothing may be looked up.
    pub(crate) fn none() -> Cache {
        let (blocks, pages) = (slots(Entry::EMPTY, 1), slots(Page::EMPTY, 1));
        Cache { blocks, pages, ..Cache::new() }
    }

    /// The aligned 2 MiB that `addr` lies in.
    fn block(addr: u64) -> Range {
        around(addr, BLOCK_SHIFT)
    }

    #[inline]
    fn block_slot(&self, addr: u64) -> &Cell<Entry> {
        &self.blocks[place(addr >> BLOCK_SHIFT, self.blocks.len())]
    }

    #[inline]
    fn page_slot(&self, addr: u64) -> &Cell<Page> {
        &self.pages[place(addr >> PAGE_SHIFT, self.pages.len())]
    }

    /// The entry that covers `addr` and allows `wanted`.
    #[inline]
    pub(crate) fn get(&self, addr: u64, wanted: Prot) -> Option<Entry> {
        self.find(addr, wanted, |entry| entry)
    }

    /// Where `addr` leads, with `wanted` allowed: what an access needs of the entry.
    #[inline]
    pub(crate) fn here(&self, addr: u64, wanted: Prot) -> Option<Here> {
        self.find(addr, wanted, |entry| entry.here(addr))
    }

    /// Inlined, so that no more of an entry is loaded than `what` needs, and none of it is moved.
    #[inline(always)]
    fn find<R>(&self, addr: u64, wanted: Prot, what: impl Fn(Entry) -> R) -> Option<R> {
        let whole = self.whole.get();
        if whole.covers(addr, wanted) {
            return Some(what(whole));
        }
        let block = self.block_slot(addr).get();
        if block.covers(addr, wanted) {
            return Some(what(block));
        }
        let Page { tag, host } = self.page_slot(addr).get();
        let (first, wanted) = (addr & !(PAGE - 1), u64::from(wanted.bits()));
        let differs = (tag ^ (first | self.generation.get() | wanted)) & (!Page::PROT | wanted);
        let prot = Prot::from_bits_truncate(tag as u32 & Page::PROT as u32);
        let entry = Entry { first, extent: PAGE - 1, host, prot, hold: 0 };
        (differs == 0).then(|| what(entry))
    }

    /// How far around `addr`, which is not in the cache, to look for a run in the table.
    #[inline]
    pub(crate) fn search(&self, addr: u64) -> Range {
        let slot = self.block_slot(addr);
        let entry = slot.get();
        if entry.hold == 0 {
            return Self::block(addr);
        }
        slot.set(Entry { hold: entry.hold - 1, ..entry });
        around(addr, NEAR_SHIFT)
    }

    /// Keeps `entry`, which covers `addr`.
    pub(crate) fn put(&self, addr: u64, entry: Entry) {
        if self.put_whole(entry) {
            return;
        }
        let page = around(addr, PAGE_SHIFT);
        let run = entry.clip(Self::block(addr));
        // What is not a page as a whole can lie nowhere else than in a block.
        if (run.extent >= PAGE || !run.holds(page)) && self.put_block(addr, run) {
            return;
        }
        if !run.holds(page) {
            return;
        }
        self.put_page(page.first().0, entry);
        if run.extent >= PAGE {
            // A run that its block has no place for, beside others: what is looked up next is
            // mostly its next page.
            let near = around(addr, NEAR_SHIFT).last().0.min(run.last());
            let mut next = page.last().0;
            while near - next >= PAGE {
                self.put_page(next + 1, entry);
                next += PAGE;
            }
        }
    }

    /// Keeps the page at `first`, as a whole in `entry`.
    #[inline]
    fn put_page(&self, first: u64, entry: Entry) {
        let slot = self.page_slot(first);
        let generation = self.generation.get();
        let prot = u64::from((entry.prot & Prot::all()).bits());
        let new =
            Page { tag: first | generation | prot, host: offset(entry.host, first - entry.first) };
        let old = slot.replace(new).tag;
        let (live, same) =
            (old & (PAGE - 1) & !Page::PROT == generation, old & !(PAGE - 1) == first);
        if live && !same {
            bump(&self.conflicts[0]);
        }
    }

    /// Keeps a run that is the largest, or leads on from that.
    fn put_whole(&self, entry: Entry) -> bool {
        let mut whole = self.whole.get();
        if !whole.prot.is_empty() && whole.joins(&entry) {
            whole = whole.hull(entry);
            // What lies in blocks on either side belongs to it too. Some at a time: the rest is
            // found when it is looked up.
            for _ in 0..64 {
                let next = [whole.last().checked_add(1), whole.first.checked_sub(1)]
                    .into_iter()
                    .flatten()
                    .map(|addr| (addr, self.block_slot(addr).get()))
                    .find(|(addr, near)| near.covers(*addr, whole.prot) && near.joins(&whole));
                let Some((_, near)) = next else { break };
                whole = whole.hull(near);
            }
        } else if entry.extent >= PAGE && entry.extent > whole.extent {
            whole = entry;
        } else {
            return false;
        }
        self.whole.set(whole);
        true
    }

    /// Keeps a run in its block, unless that has a better one.
    fn put_block(&self, addr: u64, run: Entry) -> bool {
        let slot = self.block_slot(addr);
        let old = slot.get();
        let block = Self::block(addr);
        if old.overlaps(block) {
            if old.extent >= run.extent {
                return false;
            }
        } else if !old.prot.is_empty() {
            // It is another block's. Parts of blocks replace it only now and then, so that two of
            // them do not displace each other all the time; whole blocks always, as they hold too
            // many pages.
            bump(&self.conflicts[1]);
            let often = !self.conflicts[1].get().is_multiple_of(8);
            if often && !run.holds(block) && run.holds(around(addr, PAGE_SHIFT)) {
                return false;
            }
        }
        slot.set(Entry { hold: 0, ..run });
        true
    }

    /// Makes room if there is too little. To be called now and then.
    #[inline]
    pub(crate) fn grow(&mut self) {
        let full = |conflicts: &Cell<usize>, slots: usize, most: usize| {
            conflicts.get() > slots / 2 && slots < most
        };
        if full(&self.conflicts[0], self.pages.len(), PAGES[1]) {
            let generation = self.generation.get();
            grow(&mut self.pages, &self.conflicts[0], Page::EMPTY, |page| {
                let live = page.tag & (PAGE - 1) & !Page::PROT == generation;
                live.then_some(page.tag >> PAGE_SHIFT)
            });
        }
        if full(&self.conflicts[1], self.blocks.len(), BLOCKS[1]) {
            grow(&mut self.blocks, &self.conflicts[1], Entry::EMPTY, |entry| {
                (!entry.prot.is_empty()).then_some(entry.first >> BLOCK_SHIFT)
            });
        }
    }

    /// Drops every translation of `range`.
    pub(crate) fn invalidate(&self, range: Range) {
        let whole = self.whole.get();
        let hit = whole.overlaps(range);
        if hit {
            self.whole.set(whole.without(range));
        }
        let cut = |slot: &Cell<Entry>| {
            let entry = slot.get();
            if entry.overlaps(range) {
                slot.set(entry.without(range));
            } else if hit {
                // Its run lay in `whole`.
                slot.set(Entry { hold: HOLD, ..entry });
            }
        };
        let (first, last) = (range.first().0 >> BLOCK_SHIFT, range.last().0 >> BLOCK_SHIFT);
        if last - first >= self.blocks.len() as u64 {
            self.blocks.iter().for_each(cut);
        } else {
            (first..=last).for_each(|block| cut(self.block_slot(block << BLOCK_SHIFT)));
        }
        let (first, last) = (range.first().0 >> PAGE_SHIFT, range.last().0 >> PAGE_SHIFT);
        if last - first >= PAGES[0] as u64 {
            self.forget_pages();
            return;
        }
        for page in first..=last {
            let page = page << PAGE_SHIFT;
            let slot = self.page_slot(page);
            if slot.get().tag & !(PAGE - 1) == page {
                slot.set(Page::EMPTY);
            }
        }
    }

    /// Drops all pages. Those that are still true are in the table.
    fn forget_pages(&self) {
        let next = self.generation.get() + Page::GENERATION;
        if next < PAGE {
            self.generation.set(next);
        } else {
            self.pages.iter().for_each(|slot| slot.set(Page::EMPTY));
            self.generation.set(Page::GENERATION);
        }
    }

    /// Drops everything.
    pub(crate) fn clear(&self) {
        self.whole.set(Entry::EMPTY);
        self.blocks.iter().for_each(|slot| slot.set(Entry::EMPTY));
        self.forget_pages();
    }
}

/// The 2^`bits` addresses, so aligned, around `addr`.
fn around(addr: u64, bits: u32) -> Range {
    let low = (1 << bits) - 1;
    Range::new(Iova(addr & !low), Iova(addr | low)).expect("ordered")
}

/// The slot, of `count`, a power of two, of a page or block of that number. Neighbours lie side by
/// side; those that lie apart by a power of two do not share few slots.
#[inline]
fn place(number: u64, count: usize) -> usize {
    (number ^ number >> 10) as usize & (count - 1)
}

fn bump(counter: &Cell<usize>) {
    counter.set(counter.get().wrapping_add(1));
}

#[cfg(all(test, not(loom)))]
mod tests;
