//! A mapping: a range of IOVAs, an address of the process, and the owner that is charged.

use std::collections::BTreeMap;

use ringfence_iommu::{Iova, Range};
use rustix::io::Errno;

use super::{
    super::{memory::Frames, owner::Owner},
    dirty::Dirty,
};
use ringfence_vfio::kernel::{KernelResult, MapFlags};

/// A mapping made by `VFIO_IOMMU_MAP_DMA`.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) range: Range,
    pub(super) vaddr: u64,
    /// What a device may do: READ, WRITE.
    pub(super) prot: MapFlags,
    /// The owner that is charged, and whether it held the capability when the mapping was made.
    pub(super) owner: Owner,
    pub(super) capable: bool,
    /// How many pages are charged.
    pub(super) charged: u64,
    /// Whether the address is marked invalid (rule [L59]).
    ///
    /// [L59]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l59
    pub(super) invalid: bool,
    /// Whether it is in the IOMMUs' tables.
    pub(super) mapped: bool,
    /// Pages that are pinned externally, by their IOVA (rule L62).
    pub(super) external: BTreeMap<u64, External>,
    /// Which pages were written to, while that is tracked.
    pub(super) dirty: Option<Dirty>,
}

/// A page that is pinned externally.
#[derive(Clone, Copy, Debug)]
pub(super) struct External {
    pub(super) frame: Frames,
    pub(super) pins: u64,
}

impl Mapping {
    /// The process's address for `iova`, which lies in the mapping.
    pub(super) fn vaddr(&self, iova: u64) -> u64 {
        self.vaddr + (iova - self.range.first().0)
    }

    /// How many ordinary pages of `range` are pinned externally.
    pub(super) fn external_in(&self, range: Range) -> u64 {
        let found = self.external.range(range.first().0..=range.last().0);
        found.filter(|(_, page)| !page.frame.reserved).count() as u64
    }

    /// Whether `pages` more might be charged: checked for each page before it is charged.
    pub(super) fn may_charge(&self, pages: u64) -> KernelResult<()> {
        if self.capable || self.owner.has_room(pages) { Ok(()) } else { Err(Errno::NOMEM) }
    }

    /// Charges the owner for `pages` more.
    pub(super) fn charge(&mut self, pages: u64) -> KernelResult<()> {
        self.owner.charge(pages, self.capable)?;
        self.charged += pages;
        Ok(())
    }

    /// Uncharges `pages`.
    pub(super) fn release(&mut self, pages: u64) {
        debug_assert!(self.charged >= pages, "more is released than was charged");
        self.owner.release(pages);
        self.charged = self.charged.saturating_sub(pages);
    }

    /// Charges another process instead: the new one is charged before the old one is released (rule
    /// L60).
    pub(super) fn change_owner(&mut self, owner: &Owner) -> KernelResult<()> {
        if self.owner.is(owner) {
            return Ok(());
        }
        let capable = owner.is_capable();
        owner.charge(self.charged, capable)?;
        self.owner.release(self.charged);
        (self.owner, self.capable) = (owner.clone(), capable);
        Ok(())
    }

    /// The range from `iova`, which lies in the mapping, to its end.
    pub(super) fn rest(&self, iova: u64) -> Option<Range> {
        Range::new(Iova(iova), self.range.last())
    }
}
