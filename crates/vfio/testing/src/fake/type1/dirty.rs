//! Dirty tracking (rule L63).

use std::collections::BTreeMap;

use ringfence_iommu::Range;
use rustix::io::Errno;

use super::{
    super::{
        PAGE, SHIFT,
        faults::{Faults, Step},
    },
    BITMAP_BYTES, BITMAP_PAGES, State,
    mapping::Mapping,
    whole,
};
use ringfence_vfio::kernel::{Bitmap, KernelResult};

/// Which pages of a mapping were written to, in pages of 4 KiB from its first address on.
#[derive(Debug, Default)]
pub(super) struct Dirty {
    /// All of them.
    all: bool,
    /// Words of 64 pages; a missing one is 0.
    words: BTreeMap<u64, u64>,
}

impl Dirty {
    /// A clean bitmap of `range`: EINVAL if it would have too many pages of `granule` bytes.
    pub(super) fn new(faults: &mut Faults, range: Range, granule: u64) -> KernelResult<Dirty> {
        if range.extent() / granule >= BITMAP_PAGES {
            return Err(Errno::INVAL);
        }
        if faults.hits(Step::Bitmap) {
            return Err(Errno::NOMEM);
        }
        Ok(Dirty::default())
    }

    /// Marks the page `offset` bytes behind the mapping's first.
    pub(super) fn mark(&mut self, offset: u64) {
        let page = offset >> SHIFT;
        *self.words.entry(page / 64).or_insert(0) |= 1 << (page % 64);
    }

    /// Marks all pages.
    pub(super) fn mark_all(&mut self) {
        self.all = true;
    }

    /// The offsets of the marked pages in bytes.
    fn marked(&self) -> impl Iterator<Item = u64> + '_ {
        self.words.iter().flat_map(|(&at, &word)| {
            let set = (0..64).filter(move |bit| word >> bit & 1 != 0);
            set.map(move |bit| (at * 64 + bit) * PAGE)
        })
    }
}

impl Mapping {
    /// Starts to track writes: pages that are pinned externally are dirty from the start.
    fn start(&mut self, faults: &mut Faults, granule: u64) -> KernelResult<()> {
        self.dirty = Some(Dirty::new(faults, self.range, granule)?);
        self.mark_external();
        Ok(())
    }

    /// Marks what is pinned externally: the holder of the pin may write at any time.
    fn mark_external(&mut self) {
        if let Some(dirty) = &mut self.dirty {
            self.external.keys().for_each(|iova| dirty.mark(iova - self.range.first().0));
        }
    }
}

impl State {
    /// `VFIO_IOMMU_DIRTY_PAGES` with START or STOP.
    pub(super) fn track(&mut self, on: bool) -> KernelResult<()> {
        if on == self.tracking {
            return Ok(());
        }
        let granule = self.granule();
        let mut failure = None;
        for mapping in self.mappings.values_mut() {
            if !on {
                mapping.dirty = None;
            } else if failure.is_none() {
                failure = mapping.start(&mut self.machine.faults, granule).err();
            }
        }
        if let Some(failure) = failure {
            self.mappings.values_mut().for_each(|mapping| mapping.dirty = None);
            return Err(failure);
        }
        self.tracking = on;
        Ok(())
    }

    /// `VFIO_IOMMU_DIRTY_PAGES` with GET_BITMAP.
    pub(super) fn read_dirty(
        &mut self,
        iova: u64,
        size: u64,
        mut bitmap: Bitmap<'_>,
    ) -> KernelResult<()> {
        if iova.checked_add(size).is_none() {
            return Err(Errno::INVAL);
        }
        let page = check(size, &bitmap)?;
        if page != self.granule() {
            return Err(Errno::INVAL);
        }
        let range = whole(iova, size, page)?;
        if !self.tracking || self.bisects(range) {
            return Err(Errno::INVAL);
        }
        let all = self.dirties_all();
        for (_, mapping) in self.mappings.range_mut(range.first().0..=range.last().0) {
            write_bits(mapping, all, iova, &mut bitmap);
            // Externally pinned pages stay dirty; the rest is clean again.
            mapping.dirty = Some(Dirty::default());
            mapping.mark_external();
        }
        Ok(())
    }

    /// Whether all that is mapped counts as dirty, since the writes of some group are not known.
    pub(super) fn dirties_all(&self) -> bool {
        self.members.iter().any(|member| !member.writes_are_known)
    }
}

/// Checks the size of a bitmap for `size` bytes of address space; returns its page size.
pub(super) fn check(size: u64, bitmap: &Bitmap<'_>) -> KernelResult<u64> {
    if !bitmap.page.is_power_of_two() {
        return Err(Errno::INVAL);
    }
    let pages = size / bitmap.page;
    let bytes = bitmap.words.len() as u64 * 8;
    let needed = pages.div_ceil(64).saturating_mul(8);
    if pages == 0 || bytes == 0 || bytes > BITMAP_BYTES || bytes < needed {
        return Err(Errno::INVAL);
    }
    Ok(bitmap.page)
}

/// Writes the bits of a mapping into a bitmap that begins at `base`. As in the kernel, the words
/// that contain the mapping's bits are overwritten, except for bits before the mapping's first.
pub(super) fn write_bits(mapping: &Mapping, all: bool, base: u64, bitmap: &mut Bitmap<'_>) {
    let shift = bitmap.page.trailing_zeros();
    let (Some(dirty), Some(offset)) =
        (&mapping.dirty, mapping.range.first().0.checked_sub(base).map(|bytes| bytes >> shift))
    else {
        return;
    };
    let bits = (mapping.range.extent() >> shift) + 1;
    let (first, last) = (offset, offset + bits - 1);
    let (from, to) = ((first / 64) as usize, (last / 64) as usize);
    let Some(words) = bitmap.words.get_mut(from..=to) else { return };
    let before = words[0] & !(u64::MAX << (first % 64));
    words.fill(if dirty.all || all && mapping.mapped { u64::MAX } else { 0 });
    if let [.., end] = words {
        *end &= u64::MAX >> (63 - last % 64);
    }
    for bit in dirty.marked().map(|bytes| offset + (bytes >> shift)).filter(|&bit| bit <= last) {
        words[(bit / 64) as usize - from] |= 1 << (bit % 64);
    }
    words[0] = words[0] & u64::MAX << (first % 64) | before;
}
