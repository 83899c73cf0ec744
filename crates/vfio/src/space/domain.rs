//! A kernel address space as a [`Domain`].

use std::{fmt, sync::atomic::Ordering};

use ringfence_iommu::{
    Capabilities, Domain, Error, Gather, Geometry, HostAddr, Iova, Map, Partial, Range, Result,
    SyncToken, Work,
};

use super::{
    Backend, Space, Unit, Usage,
    shadow::{Shadow, Stage},
};
use crate::DirtyMap;

// SAFETY: when the kernel's unmap returns, the translations and their cached copies are gone.
unsafe impl<B: Backend> Domain for Space<B> {
    type Target = HostAddr;

    fn geometry(&self) -> Geometry {
        self.state.lock().geometry.clone()
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::FULL;
        // An unmap is a system call that is complete when it returns.
        capabilities.deferred_flush = false;
        capabilities
    }

    fn map_pages(&self, maps: &[Map<HostAddr>]) -> Result<(), Partial> {
        Partial::each(maps, |map| self.map_one(map))
    }

    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        let mut bytes = 0;
        Partial::each(ranges, |&range| {
            bytes += self.unmap_one(range)?;
            gather.add(range);
            Ok(())
        })?;
        Ok(bytes)
    }

    /// Unmaps are complete already; maps may only have been noted.
    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        if let Work::Map(ranges) = work {
            ranges.iter().try_for_each(|&range| self.sync_map(range))?;
        }
        Ok(SyncToken::DONE)
    }

    fn sync_poll(&self, _: SyncToken, _: Work<'_>, _: &mut dyn FnMut(Range, Error)) -> bool {
        true
    }

    fn sync_wait(&self, _: SyncToken) {}

    fn iova_to_phys(&self, iova: Iova) -> Option<HostAddr> {
        self.state.lock().shadow.find(iova)
    }
}

impl<B: Backend> Space<B> {
    /// How many mappings there are, and how many of the kernel's they take.
    pub fn usage(&self) -> Usage {
        let state = self.state.lock();
        Usage {
            mappings: state.shadow.len() as u64,
            entries: state.entries,
            mismatches: self.mismatches.load(Ordering::Relaxed),
        }
    }

    /// Reads anew from the kernel what can be mapped: call it after a group or a device was added or
    /// removed.
    ///
    /// # Errors
    /// As of the constructor; the geometry is unchanged then.
    pub fn refresh(&self) -> Result<()> {
        let geometry = self.backend.geometry()?;
        self.state.lock().geometry = geometry;
        Ok(())
    }

    /// Maps many ranges with as few kernel mappings as possible: those that follow each other
    /// (address, target, permission) become one, which is unmapped as one. All or nothing; what the
    /// kernel fails to remove after an error can still be unmapped.
    ///
    /// # Errors
    /// As [`map_pages`](Domain::map_pages).
    pub fn map_batch(&self, batch: &[Map<HostAddr>]) -> Result<()> {
        let units: Vec<Unit> = batch.iter().map(|map| Unit::new(map, Stage::Busy)).collect();
        let runs: Vec<Map<HostAddr>> = units.chunk_by(Unit::leads_to).map(Unit::joined).collect();
        for (done, run) in runs.iter().enumerate() {
            if let Err(failed) = self.map_now(run) {
                // What stays mapped is in the shadow: it can still be unmapped.
                for run in &runs[..done] {
                    let _ = self.unmap_one(run.range());
                }
                return Err(failed.error);
            }
        }
        Ok(())
    }

    /// Unmaps everything, at one go if the kernel can (rule [L56]): then concurrent calls to map or
    /// unmap fail. Returns how many bytes were mapped.
    ///
    /// # Errors
    /// [`Error::Unsupported`] during a [`VaddrUpdate`](crate::VaddrUpdate). Otherwise the kernel's;
    /// mappings that remain are still known here.
    ///
    /// [L56]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l56
    pub fn unmap_all(&self) -> Result<u128> {
        if !self.backend.has_unmap_all() {
            return self.unmap_one(Range::ALL);
        }
        let units = self.freeze("everything is being unmapped")?;
        let made = units.iter().filter(|it| it.stage == Stage::Made).map(|it| it.range.len()).sum();
        let removed = self.remove_by(Range::ALL, made, &mut || self.backend.unmap_all());
        let mut state = self.state.lock();
        state.frozen = None;
        removed?;
        state.shadow = Shadow::default();
        state.entries = 0;
        state.left.clear();
        Ok(units.iter().map(|unit| unit.range.len()).sum())
    }

    /// Starts to track which pages devices write to (rule [L63]), over an iommufd those devices with a
    /// [`dirty_table`](crate::Iommufd::dirty_table); calling it twice is fine.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: the kernel cannot, or there is no such table. Otherwise the kernel's.
    ///
    /// [L63]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l63
    pub fn start_dirty(&self) -> Result<()> {
        self.backend.track(true)
    }

    /// Stops tracking dirty pages.
    ///
    /// # Errors
    /// As [`start_dirty`](Self::start_dirty).
    pub fn stop_dirty(&self) -> Result<()> {
        self.backend.track(false)
    }

    /// Marks in `map` the pages in `range` that devices have written since the last call; they may
    /// keep writing. Each bit is reported once: one that lies outside of `map` is lost.
    ///
    /// # Errors
    /// [`Error::WouldSplit`]: a mapping lies only partly in `range`, and nothing was read.
    /// Otherwise the kernel's; bits that were read before the error are marked.
    pub fn read_dirty(&self, range: Range, map: &mut DirtyMap) -> Result<()> {
        let page = self.dirty_page()?;
        let mut pieces = self.made_in(range)?.into_iter();
        pieces.try_for_each(|piece| self.backend.collect(piece, page, map))
    }

    /// The page size of dirty bits.
    pub(crate) fn dirty_page(&self) -> Result<u64> {
        self.backend.dirty_page(self.geometry().page_sizes.granule())
    }
}

impl<B: Backend> Drop for Space<B> {
    fn drop(&mut self) {
        if self.usage().entries > 0
            && let Err(error) = self.unmap_all()
        {
            tracing::warn!(
                %error,
                "dropping the domain: unmapping failed, its mappings stay until the kernel's file is \
                 closed"
            );
        }
    }
}

impl<B: Backend> fmt::Debug for Space<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(B::NAME).field("usage", &self.usage()).finish_non_exhaustive()
    }
}
