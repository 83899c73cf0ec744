//! Changing the process addresses of mappings (rules L59, L60).

use std::fmt;

use ringfence_iommu::{Address, Domain, Error, HostAddr, Range, Result};

use crate::{
    Type1,
    kernel::{Extension, MapFlags, Type1Kernel, UnmapFlags},
    space::{Unit, lost, size},
};

/// An update of process addresses that is under way: [`Type1::begin_vaddr_update`].
///
/// Dropping it gives the old addresses back to mappings that have no new one yet.
pub struct VaddrUpdate<'d, K: Type1Kernel> {
    domain: &'d Type1<K>,
    units: Vec<Moved>,
}

/// A unit, and its new target.
struct Moved {
    unit: Unit,
    target: Option<HostAddr>,
    /// How many of its pieces have their new address.
    done: usize,
}

const WHY: &str = "process addresses are being updated";

impl<K: Type1Kernel> Type1<K> {
    /// Begins to change the process addresses of all mappings, as when the memory behind them has
    /// moved (rules [L59], [L60]). DMA continues; until the update is
    /// [finished](VaddrUpdate::finish), nothing can be mapped or unmapped, and no group be
    /// attached.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the kernel cannot, or an update is under way; the kernel's (EBUSY
    /// with groups of emulated devices). Nothing was changed.
    ///
    /// [L59]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l59
    /// [L60]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l60
    pub fn begin_vaddr_update(&self) -> Result<VaddrUpdate<'_, K>> {
        let kernel = self.kernel();
        if !kernel.has(Extension::UpdateVaddr) || !kernel.has(Extension::UnmapAll) {
            return Err(Error::Unsupported("the kernel cannot update process addresses"));
        }
        let units = self.freeze(WHY)?;
        let flags = UnmapFlags::VADDR | UnmapFlags::ALL;
        if let Err(errno) = kernel.unmap(flags, 0, 0, None) {
            self.thaw([]);
            return Err(lost("withdraw the process addresses of", errno, Range::ALL));
        }
        let moved = |unit| Moved { unit, target: None, done: 0 };
        Ok(VaddrUpdate { domain: self, units: units.into_iter().map(moved).collect() })
    }
}

impl<K: Type1Kernel> VaddrUpdate<'_, K> {
    /// Gives each mapping the address that `moved` returns for its range and its old address; it is
    /// called once for each, and again where it returned an impossible address. After an error,
    /// call again to retry those that are left.
    ///
    /// # Safety
    /// At the new address lies the very memory that was mapped, and the promise of
    /// [`Map::of`](ringfence_iommu::Map::of) holds for it there.
    ///
    /// # Errors
    /// The kernel's; [`Error::Unaligned`], [`Error::TargetOverflow`]: `moved` returned an
    /// impossible address.
    pub unsafe fn finish(
        &mut self,
        mut moved: impl FnMut(Range, HostAddr) -> HostAddr,
    ) -> Result<()> {
        let granule = self.domain.geometry().page_sizes.granule();
        for entry in &mut self.units {
            let range = entry.unit.range;
            let target = entry.target.unwrap_or_else(|| moved(range, entry.unit.target));
            if target.0 & (granule - 1) != 0 {
                return Err(Error::Unaligned { range, granule });
            }
            if target.checked_add(range.extent()).is_none() {
                return Err(Error::TargetOverflow(range));
            }
            entry.target = Some(target);
            // SAFETY: the caller's promise.
            unsafe { entry.give(self.domain, target) }?;
        }
        Ok(())
    }
}

impl Moved {
    /// Gives the kernel the address of the pieces that have none.
    ///
    /// # Safety
    /// As [`VaddrUpdate::finish`].
    unsafe fn give<K: Type1Kernel>(&mut self, domain: &Type1<K>, target: HostAddr) -> Result<()> {
        for (piece, offset) in domain.pieces_of(&self.unit).skip(self.done) {
            let vaddr = target.0 + offset;
            // SAFETY: the caller's promise.
            let given = unsafe {
                domain.kernel().map(MapFlags::VADDR, piece.first().0, vaddr, size(piece))
            };
            given.map_err(|errno| lost("set the process addresses of", errno, piece))?;
            self.done += 1;
        }
        Ok(())
    }
}

impl<K: Type1Kernel> Drop for VaddrUpdate<'_, K> {
    fn drop(&mut self) {
        for entry in &mut self.units {
            let target = entry.target.unwrap_or(entry.unit.target);
            // SAFETY: the address that it had before, or one that was promised to lead to the same
            // memory.
            if let Err(error) = unsafe { entry.give(self.domain, target) } {
                tracing::warn!(%error, "a mapping is left without a process address");
            }
        }
        let moved = self.units.iter().filter_map(|it| Some((it.unit.range, it.target?)));
        self.domain.thaw(moved);
    }
}

impl<K: Type1Kernel> fmt::Debug for VaddrUpdate<'_, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VaddrUpdate").field("mappings", &self.units.len()).finish_non_exhaustive()
    }
}
