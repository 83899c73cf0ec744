//! The rules L51-L63, of a type1v2 container.

use ringfence_iommu::Range;
use rustix::io::Errno;

use super::{Checked, Outcome, Stop, expect, memory::Memory, not_applicable, outcome};
use ringfence_vfio::kernel::{
    Bitmap, Extension, KernelResult, MapFlags, Type1Info, Type1Kernel, UnmapFlags,
};

const RW: MapFlags = MapFlags::READ.union(MapFlags::WRITE);
/// Pages of memory that the checks map.
const PAGES: u64 = 16;
/// Most mappings made to use up the budget.
const BUDGET: u32 = 1 << 17;

/// What a check works with.
struct Bench<'a, K> {
    kernel: &'a K,
    memory: &'a Memory,
    info: Type1Info,
    page: u64,
    /// Where it maps: the first address of a range that is wide enough.
    base: u64,
}

/// Checks the rules [L51]-[L63] as far as `kernel` shows them, a type1v2 container with a
/// group in it, nothing mapped, and no device that does DMA.
///
/// The checks map memory of their own and unmap everything afterwards.
///
/// # Errors
/// The kernel's, if no check could begin: its info cannot be read, or memory cannot be mapped.
/// EINVAL if it supports no page size, ENOSPC if no range is wide enough.
///
/// [L51]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l51
/// [L63]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l63
pub fn type1<K: Type1Kernel>(kernel: &K) -> KernelResult<Vec<Outcome>> {
    let info = kernel.info()?;
    let page = 1_u64.checked_shl(info.page_sizes.trailing_zeros()).ok_or(Errno::INVAL)?;
    let wide = |range: &&Range| range.extent() / page >= 4 * PAGES;
    let ranges = info.ranges.clone().unwrap_or_else(|| vec![Range::ALL]);
    let first = ranges.iter().find(wide).map(|range| range.first().0).ok_or(Errno::NOSPC)?;
    let base = first.checked_next_multiple_of(page).ok_or(Errno::NOSPC)?;
    let memory = Memory::new(PAGES, page)?;
    let bench = Bench { kernel, memory: &memory, info, page, base };
    let mut outcomes = Vec::new();
    let mut clean = true;
    // All that a check may map: the budget and one more.
    let most = (u64::from(BUDGET) + 1).min((u64::MAX - base) / page) * page;
    for (rule, check, run) in Bench::<K>::CHECKS {
        outcomes.push(outcome(rule, check, run(&bench)));
        // One check must not see what another has left.
        let tracking = kernel.track_dirty(false).is_ok() || bench.info.dirty.is_none();
        let cleared = kernel.unmap(UnmapFlags::ALL, 0, 0, None);
        let cleared = cleared.or_else(|_| kernel.unmap(UnmapFlags::empty(), base, most, None));
        clean &= tracking && cleared.is_ok();
        let available = kernel.info().map(|info| info.available);
        if available != Ok(bench.info.available) {
            let why = format!("the budget is {available:?} after it");
            outcomes.push(outcome("L51", check, Err(Stop::Fail(why))));
        }
    }
    for (rule, check, why) in UNSEEN {
        outcomes.push(outcome(rule, check, not_applicable(why)));
    }
    if !clean {
        memory.leak();
    }
    Ok(outcomes)
}

/// What the interface does not show.
const UNSEEN: [(&str, &str, &str); 6] = [
    ("L51", "the very last page", "Linux before 6.19 loses a mapping that ends at 2^64-1"),
    ("L52", "the longest runs are pinned", "how pages are pinned is not shown"),
    ("L57", "pages go after the invalidation", "when pages are unpinned is not shown"),
    ("L58", "a probe for superpages", "requests to the IOMMU are not shown"),
    ("L61", "a group that does not suit", "groups are attached elsewhere"),
    ("L62", "external pins", "only drivers in the kernel pin externally"),
];

/// A rule, what is checked of it, and how.
type Check<'a, K> = (&'static str, &'static str, fn(&Bench<'a, K>) -> Checked);

impl<'a, K: Type1Kernel> Bench<'a, K> {
    const CHECKS: [Check<'a, K>; 17] = [
        ("L51", "flags, alignment and wrap", Self::map_arguments),
        ("L51", "overlap, then what may be mapped", Self::map_order),
        ("L51", "every range can be mapped, and nothing else", Self::ranges),
        ("L51", "one unit of budget a call, whatever its size", Self::units),
        ("L51", "no budget comes before what may be mapped", Self::budget),
        ("L53", "nothing is left of a map that failed", Self::failed_map),
        ("L54", "a page is mapped at two addresses", Self::twice),
        ("L55", "no mapping is cut", Self::cut),
        ("L55", "nothing there, and several mappings", Self::several),
        ("L56", "everything has no range", Self::everything),
        ("L59", "marks are made for all or none", Self::marks),
        ("L60", "another address for a mapping", Self::another_address),
        ("L63", "start and stop", Self::start_and_stop),
        ("L63", "what is mapped is dirty", Self::dirty),
        ("L63", "an unaligned start", Self::unaligned),
        ("L63", "what is refused", Self::refused),
        ("L63", "an unmap with GET_DIRTY", Self::get_dirty),
    ];

    /// Maps pages: `at` and `from` are numbers of pages, from the base and in the memory.
    fn map(&self, at: u64, from: u64, pages: u64) -> KernelResult<()> {
        let vaddr = self.memory.addr(self.page) + from * self.page;
        self.raw(RW, self.base + at * self.page, vaddr, pages * self.page)
    }

    /// Maps any address, in the memory or not.
    fn raw(&self, flags: MapFlags, iova: u64, vaddr: u64, size: u64) -> KernelResult<()> {
        // SAFETY: the memory is used for nothing else, no device does DMA, and no bytes are read.
        unsafe { self.kernel.map(flags, iova, vaddr, size) }
    }

    /// Unmaps pages; returns how many were mapped.
    fn unmap(&self, at: u64, pages: u64) -> KernelResult<u64> {
        self.unmap_with(UnmapFlags::empty(), at, pages)
    }

    fn unmap_with(&self, flags: UnmapFlags, at: u64, pages: u64) -> KernelResult<u64> {
        let (iova, size) = (self.base + at * self.page, pages * self.page);
        Ok(self.kernel.unmap(flags, iova, size, None)? / self.page)
    }

    fn read(&self, at: u64, pages: u64, page: u64, words: &mut [u64]) -> KernelResult<()> {
        let (iova, size) = (self.base + at * self.page, pages * self.page);
        self.kernel.dirty(iova, size, Bitmap { page, words })
    }

    fn map_arguments(&self) -> Checked {
        let vaddr = self.memory.addr(self.page);
        let unknown = RW | MapFlags::from_bits_retain(1 << 30);
        for flags in [MapFlags::empty(), RW | MapFlags::VADDR, unknown] {
            expect(self.raw(flags, self.base, vaddr, self.page), Err(Errno::INVAL))?;
        }
        let top = u64::MAX - self.page + 1;
        for (iova, vaddr, size) in [
            (self.base, vaddr, 0),
            (self.base + 1, vaddr, self.page),
            (self.base, vaddr + 1, self.page),
            (self.base, vaddr, self.page + 1),
        ] {
            expect(self.raw(RW, iova, vaddr, size), Err(Errno::INVAL))?;
        }
        // Newer kernels return EOVERFLOW for what wraps.
        for (iova, vaddr) in [(top, vaddr), (self.base, top)] {
            let wraps = self.raw(RW, iova, vaddr, 2 * self.page);
            expect(
                wraps.map_err(|errno| errno == Errno::INVAL || errno == Errno::OVERFLOW),
                Err(true),
            )?;
        }
        expect(self.unmap(0, 4), Ok(0))
    }

    fn map_order(&self) -> Checked {
        self.map(4, 0, 4)?;
        for (at, pages) in [(4, 4), (3, 2), (7, 2), (5, 1), (0, 16)] {
            expect(self.map(at, 0, pages), Err(Errno::EXIST))?;
        }
        // An overlap is reported even where the rest may not be mapped.
        if let Some(end) = self.end_of_base() {
            let size = (end - self.base).saturating_add(self.page);
            let vaddr = self.memory.addr(self.page);
            if size < 1 << 46 {
                expect(self.raw(RW, self.base, vaddr, size), Err(Errno::EXIST))?;
            }
        }
        Ok(())
    }

    /// The address after the range in which the base lies, if nothing may be mapped there.
    fn end_of_base(&self) -> Option<u64> {
        let ranges = self.info.ranges.as_ref()?;
        let own = ranges.iter().find(|range| range.contains(ringfence_iommu::Iova(self.base)))?;
        own.last().0.checked_add(1)
    }

    fn ranges(&self) -> Checked {
        let Some(ranges) = &self.info.ranges else {
            return not_applicable("the kernel does not report what may be mapped");
        };
        let vaddr = self.memory.addr(self.page);
        let whole = |at: u64| at & !(self.page - 1);
        for range in ranges {
            let last = whole(range.last().0);
            let first = range.first().0.checked_next_multiple_of(self.page).unwrap_or(last);
            for iova in [first, last] {
                // Linux before 6.19 never finds a mapping that ends at 2^64-1 again, nor its
                // neighbours: the container would be unusable.
                let top = iova.checked_add(self.page).is_none();
                let inside = range.contains(ringfence_iommu::Iova(iova))
                    && range.last().0 - iova >= self.page - 1
                    && !top;
                if inside && iova >= first {
                    self.raw(RW, iova, vaddr, self.page)?;
                    let unmapped = self.kernel.unmap(UnmapFlags::empty(), iova, self.page, None);
                    expect(unmapped, Ok(self.page))?;
                }
            }
            let before = range.first().0.checked_sub(1).map(whole);
            let behind = range.last().0.checked_add(1).map(whole);
            for iova in [before, behind].into_iter().flatten() {
                expect(self.raw(RW, iova, vaddr, self.page), Err(Errno::INVAL))?;
            }
        }
        Ok(())
    }

    fn available(&self) -> Result<u32, Stop> {
        let why = || Stop::NotApplicable("the kernel does not report its budget".to_owned());
        self.kernel.info()?.available.ok_or_else(why)
    }

    fn units(&self) -> Checked {
        let before = self.available()?;
        self.map(0, 0, 1)?;
        self.map(4, 0, 16)?;
        expect(self.available()?, before - 2)?;
        expect(self.map(4, 0, 1), Err(Errno::EXIST))?;
        expect(self.available()?, before - 2)?;
        expect(self.unmap(0, 32), Ok(17))?;
        expect(self.available()?, before)
    }

    fn budget(&self) -> Checked {
        let before = self.available()?;
        let room = self.end_of_base().unwrap_or(u64::MAX) - self.base;
        if before > BUDGET || room / self.page < u64::from(before) + 1 {
            return not_applicable("the budget is too large to be used up");
        }
        for at in 0..u64::from(before) {
            match self.map(at, 0, 1) {
                Err(Errno::NOMEM) => {
                    return not_applicable("the memlock limit comes before the budget");
                }
                result => result?,
            }
        }
        expect(self.available()?, 0)?;
        expect(self.map(u64::from(before), 0, 1), Err(Errno::NOSPC))?;
        expect(self.map(0, 0, 1), Err(Errno::EXIST))?;
        if let Some(end) = self.end_of_base() {
            let vaddr = self.memory.addr(self.page);
            let outside = end.next_multiple_of(self.page);
            expect(self.raw(RW, outside, vaddr, self.page), Err(Errno::NOSPC))?;
        }
        expect(self.unmap(0, u64::from(before)), Ok(u64::from(before)))
    }

    fn failed_map(&self) -> Checked {
        if self.info.ranges.is_none() {
            return not_applicable(
                "no IOMMU reports what may be mapped, so perhaps nothing is pinned",
            );
        }
        let hole = Memory::new(PAGES, self.page)?;
        let vaddr = hole.addr(self.page);
        hole.punch(vaddr + 8 * self.page, self.page)?;
        let before = self.kernel.info()?.available;
        let mapped = self.raw(RW, self.base, vaddr, PAGES * self.page);
        if mapped.is_ok() {
            self.unmap(0, PAGES)?;
        }
        expect(mapped, Err(Errno::FAULT))?;
        expect(self.kernel.info()?.available, before)?;
        expect(self.unmap(0, PAGES), Ok(0))?;
        self.raw(RW, self.base, vaddr, 8 * self.page)?;
        expect(self.unmap(0, PAGES), Ok(8))
    }

    fn twice(&self) -> Checked {
        self.map(0, 0, 4)?;
        self.map(4, 0, 4)?;
        self.map(8, 3, 1)?;
        expect(self.unmap(0, 4), Ok(4))?;
        expect(self.unmap(0, 16), Ok(5))
    }

    fn cut(&self) -> Checked {
        self.map(4, 0, 4)?;
        for (at, pages) in [(4, 3), (5, 3), (5, 2), (3, 2), (7, 2), (0, 6)] {
            expect(self.unmap(at, pages), Err(Errno::INVAL))?;
        }
        expect(self.unmap(4, 4), Ok(4))
    }

    fn several(&self) -> Checked {
        expect(self.unmap(0, 16), Ok(0))?;
        for at in [1, 4, 8] {
            self.map(at, 0, 2)?;
        }
        for (at, size) in [(1, 0), (self.page, 1)] {
            let wrong = self.kernel.unmap(UnmapFlags::empty(), self.base + at, size, None);
            expect(wrong, Err(Errno::INVAL))?;
        }
        expect(self.unmap(0, 7), Ok(4))?;
        expect(self.unmap(0, 16), Ok(2))?;
        expect(self.unmap(0, 16), Ok(0))
    }

    fn everything(&self) -> Checked {
        if !self.kernel.has(Extension::UnmapAll) {
            return not_applicable("this kernel cannot");
        }
        self.map(0, 0, 2)?;
        self.map(8, 2, 4)?;
        let all = |flags, iova, size, bitmap| self.kernel.unmap(flags, iova, size, bitmap);
        expect(all(UnmapFlags::ALL, self.page, 0, None), Err(Errno::INVAL))?;
        expect(all(UnmapFlags::ALL, 0, self.page, None), Err(Errno::INVAL))?;
        let bitmap = Bitmap { page: self.page, words: &mut [0; 8] };
        let both = UnmapFlags::ALL | UnmapFlags::GET_DIRTY;
        expect(all(both, 0, 0, Some(bitmap)), Err(Errno::INVAL))?;
        expect(all(UnmapFlags::ALL, 0, 0, None), Ok(6 * self.page))?;
        expect(all(UnmapFlags::ALL, 0, 0, None), Ok(0))
    }

    fn update(&self, at: u64, from: u64, pages: u64) -> KernelResult<()> {
        let vaddr = self.memory.addr(self.page) + from * self.page;
        self.raw(MapFlags::VADDR, self.base + at * self.page, vaddr, pages * self.page)
    }

    fn needs_update_vaddr(&self) -> Checked {
        if self.kernel.has(Extension::UpdateVaddr) {
            return Ok(());
        }
        not_applicable("this kernel cannot, or has emulated groups")
    }

    fn marks(&self) -> Checked {
        self.needs_update_vaddr()?;
        self.map(0, 0, 2)?;
        self.map(4, 4, 2)?;
        self.map(8, 8, 2)?;
        expect(self.unmap_with(UnmapFlags::VADDR, 4, 1), Err(Errno::INVAL))?;
        expect(self.unmap_with(UnmapFlags::VADDR, 4, 2), Ok(2))?;
        expect(self.unmap_with(UnmapFlags::VADDR, 0, 12), Err(Errno::INVAL))?;
        expect(self.update(0, 0, 2), Err(Errno::INVAL))?;
        expect(self.update(8, 8, 2), Err(Errno::INVAL))?;
        expect(self.update(4, 4, 2), Ok(()))?;
        expect(self.unmap_with(UnmapFlags::VADDR, 0, 12), Ok(6))?;
        expect(self.unmap(0, 12), Ok(6))
    }

    fn another_address(&self) -> Checked {
        self.needs_update_vaddr()?;
        self.map(4, 0, 4)?;
        expect(self.update(0, 0, 4), Err(Errno::NOENT))?;
        expect(self.update(4, 0, 4), Err(Errno::INVAL))?;
        self.unmap_with(UnmapFlags::VADDR, 4, 4)?;
        for (at, pages) in [(4, 3), (5, 3), (3, 5)] {
            expect(self.update(at, 0, pages), Err(Errno::INVAL))?;
        }
        expect(self.update(4, 8, 4), Ok(()))?;
        expect(self.update(4, 8, 4), Err(Errno::INVAL))?;
        expect(self.unmap(4, 4), Ok(4))
    }

    fn tracks(&self) -> Result<u64, Stop> {
        let why = || Stop::NotApplicable("the kernel tracks no dirty pages".to_owned());
        let info = self.info.dirty.ok_or_else(why)?;
        expect(info.page_sizes & self.page, self.page)?;
        Ok(info.max_bytes)
    }

    fn start_and_stop(&self) -> Checked {
        self.tracks()?;
        self.map(0, 0, 4)?;
        expect(self.read(0, 4, self.page, &mut [0]), Err(Errno::INVAL))?;
        for on in [true, true, false, false] {
            expect(self.kernel.track_dirty(on), Ok(()))?;
        }
        expect(self.read(0, 4, self.page, &mut [0]), Err(Errno::INVAL))
    }

    /// Whether all that is mapped is dirty: so it is with a group whose writes are not known, as
    /// with all real groups.
    fn dirty(&self) -> Checked {
        self.tracks()?;
        self.map(0, 0, 8)?;
        self.kernel.track_dirty(true)?;
        self.map(8, 0, 2)?;
        let mut words = [0];
        self.read(0, 10, self.page, &mut words)?;
        if words == [0] {
            return not_applicable("the writes of every group are known");
        }
        expect(words, [0x3ff])?;
        // The next read cannot know what is written either. For bits after the last mapping, Linux
        // (6.12) then returns what it shifted there at the first read: too much, not too little.
        let mut again = [0];
        self.read(0, 10, self.page, &mut again)?;
        expect(again[0] & 0x3ff, 0x3ff)
    }

    fn unaligned(&self) -> Checked {
        self.tracks()?;
        self.map(3, 0, 2)?;
        self.kernel.track_dirty(true)?;
        let mut words = [0b101, 7];
        self.read(0, 128, self.page, &mut words)?;
        if words == [0b101, 7] {
            return not_applicable("the writes of every group are known");
        }
        expect(words, [0b1_1101, 7])
    }

    fn refused(&self) -> Checked {
        self.tracks()?;
        self.map(4, 0, 4)?;
        self.kernel.track_dirty(true)?;
        let page = self.page;
        for (at, pages, granule) in [(5, 3, page), (4, 3, page), (4, 0, page), (4, 4, 2 * page)] {
            expect(self.read(at, pages, granule, &mut [0]), Err(Errno::INVAL))?;
        }
        expect(self.read(0, 65, page, &mut [0]), Err(Errno::INVAL))?;
        expect(self.read(4, 4, page, &mut [0]), Ok(()))
    }

    fn get_dirty(&self) -> Checked {
        self.tracks()?;
        self.map(4, 0, 4)?;
        let unmap = |words: &mut [u64]| {
            let bitmap = Some(Bitmap { page: self.page, words });
            self.kernel.unmap(UnmapFlags::GET_DIRTY, self.base, 16 * self.page, bitmap)
        };
        expect(unmap(&mut [0]), Err(Errno::INVAL))?;
        self.kernel.track_dirty(true)?;
        let mut words = [0];
        expect(unmap(&mut words), Ok(4 * self.page))?;
        expect(self.unmap(0, 16), Ok(0))?;
        if words == [0] {
            return not_applicable("the writes of every group are known");
        }
        expect(words, [0xf0])
    }
}
