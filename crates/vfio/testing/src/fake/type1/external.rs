//! Pages that emulated devices pin (rule L62).

use std::sync::Arc;

use ringfence_iommu::Range;
use rustix::io::Errno;

use super::{
    super::{
        PAGE,
        events::Event,
        faults::Step,
        pins::{Batch, Wanted},
    },
    State, Type1,
    mapping::External,
    whole,
};
use ringfence_vfio::kernel::{KernelResult, MapFlags};

/// Most pages of one call.
const MOST: u64 = 512;

/// Called before a mapping with external pins is removed, with its first IOVA and its size in
/// bytes; must [release the pins](Type1::unpin_pages).
pub type Notify = Arc<dyn Fn(&Type1, u64, u64) + Send + Sync>;

impl Type1 {
    /// Pins pages for a device of `group`; returns the numbers of their frames. Pages that are
    /// pinned already are counted. The pages are dirty until they are unpinned, and the writes of
    /// the group count as known from then on.
    ///
    /// # Errors
    /// EACCES in a v1 container; E2BIG for more than 512 pages; EBUSY while an address is marked
    /// invalid; EINVAL for an unknown group, without an emulated group, for no pages, for an
    /// address that is not a page's, and where nothing is mapped; EPERM for more than the mapping
    /// allows; ENOMEM and EFAULT as MAP. Nothing is pinned then.
    pub fn pin_pages(
        &self,
        group: u32,
        iova: u64,
        pages: u64,
        prot: MapFlags,
    ) -> KernelResult<Vec<u64>> {
        let range = match pages {
            0 => return Err(Errno::INVAL),
            1..=MOST => whole(iova, pages * PAGE, PAGE)?,
            _ => return Err(Errno::TOOBIG),
        };
        if self.v1 {
            return Err(Errno::ACCESS);
        }
        let mut state = self.state.lock();
        if state.invalid > 0 {
            return Err(Errno::BUSY);
        }
        let member = state.members.iter().position(|member| member.id == group);
        let Some(member) = member.filter(|_| state.has_emulated()) else {
            return Err(Errno::INVAL);
        };
        let mut frames = Vec::new();
        for page in (0..pages).map(|n| iova + n * PAGE) {
            match state.pin_external(page, prot) {
                Ok(pfn) => frames.push(pfn),
                Err(failure) => {
                    (iova..page).step_by(PAGE as usize).for_each(|at| state.unpin_external(at));
                    return Err(failure);
                }
            }
        }
        for page in (range.first().0..=range.last().0).step_by(PAGE as usize) {
            state.mark_page(page);
        }
        state.members[member].writes_are_known = true;
        Ok(frames)
    }

    /// Releases one pin of each page; pages without a pin are skipped.
    pub fn unpin_pages(&self, iova: u64, pages: u64) {
        let Some(range) = pages.checked_mul(PAGE).and_then(|size| whole(iova, size, PAGE).ok())
        else {
            return;
        };
        let mut state = self.state.lock();
        for page in state.external_in(range) {
            state.unpin_external(page);
        }
    }

    /// How many external pins there are, of all pages together.
    pub fn external_pins(&self) -> u64 {
        let state = self.state.lock();
        state.mappings.values().flat_map(|at| at.external.values()).map(|page| page.pins).sum()
    }
}

impl State {
    fn pin_external(&mut self, iova: u64, prot: MapFlags) -> KernelResult<u64> {
        let charges = self.domains.is_empty();
        let first = self.at(iova).map(|mapping| mapping.range.first().0).ok_or(Errno::INVAL)?;
        let mapping = self.mappings.get_mut(&first).ok_or(Errno::INVAL)?;
        if !mapping.prot.contains(prot) {
            return Err(Errno::PERM);
        }
        if let Some(page) = mapping.external.get_mut(&iova) {
            page.pins = page.pins.saturating_add(1);
            return Ok(page.frame.pfn);
        }
        let wanted = Wanted {
            vaddr: mapping.vaddr(iova),
            pages: 1,
            write: mapping.prot.contains(MapFlags::WRITE),
        };
        let mut batch = Batch::default();
        let frame = self.machine.pin_run(wanted, &mut batch, |_, _| Ok(()))?;
        let charged = if charges && !frame.reserved { mapping.charge(1) } else { Ok(()) };
        let recorded = charged.and_then(|()| {
            if !self.machine.faults.hits(Step::ExternalPin) {
                return Ok(());
            }
            mapping.release(u64::from(charges && !frame.reserved));
            Err(Errno::NOMEM)
        });
        if let Err(failure) = recorded {
            self.machine.pinned -= u64::from(!frame.reserved);
            return Err(failure);
        }
        mapping.external.insert(iova, External { frame, pins: 1 });
        self.machine.log.push(Event::PinnedExternally { iova });
        Ok(frame.pfn)
    }

    fn unpin_external(&mut self, iova: u64) {
        let charged = self.domains.is_empty();
        let Some(first) = self.at(iova).map(|mapping| mapping.range.first().0) else { return };
        let Some(mapping) = self.mappings.get_mut(&first) else { return };
        let Some(page) = mapping.external.get_mut(&iova) else { return };
        page.pins -= 1;
        if page.pins > 0 {
            return;
        }
        let frame = page.frame;
        mapping.external.remove(&iova);
        self.machine.log.push(Event::UnpinnedExternally { iova });
        if !frame.reserved {
            self.machine.pinned -= 1;
            mapping.release(u64::from(charged));
        }
    }

    /// Releases every external pin: there is no group left to do it.
    pub(super) fn drop_external(&mut self) {
        for iova in self.external_in(Range::ALL) {
            while self.at(iova).is_some_and(|mapping| mapping.external.contains_key(&iova)) {
                self.unpin_external(iova);
            }
        }
    }

    /// The pages in `range` that are pinned externally.
    fn external_in(&self, range: Range) -> Vec<u64> {
        let pages = self.mappings.values().flat_map(|mapping| {
            mapping.external.range(range.first().0..=range.last().0).map(|(&iova, _)| iova)
        });
        pages.collect()
    }

    fn mark_page(&mut self, iova: u64) {
        let Some(first) = self.at(iova).map(|mapping| mapping.range.first().0) else { return };
        let dirty = self.mappings.get_mut(&first).and_then(|mapping| mapping.dirty.as_mut());
        if let Some(dirty) = dirty {
            dirty.mark(iova - first);
        }
    }
}
