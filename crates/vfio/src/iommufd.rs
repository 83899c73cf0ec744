//! An address space of an iommufd as a domain.

use std::ops::ControlFlow;

use parking_lot::Mutex;
use ringfence_iommu::{
    Error, Geometry, HostAddr, Map, PageSizes, Partial, Range, Result, SyncToken, Work,
};
use rustix::io::Errno;

use crate::{
    DirtyMap,
    kernel::{Answer, Id, IommufdKernel, MapFlags},
    space::{self, Backend, Space, Tuning, Usage, lost, size},
};

/// The smallest page there is: an address space without devices takes any address, and no device keeps
/// less than a page apart.
const PAGE: u64 = 4096;

/// A domain over an address space (IOAS) of an iommufd, real
/// ([`IommuFile`](crate::kernel::IommuFile)) or a fake of it. It maps to addresses of this
/// process, whose pages the kernel pins while a device is attached.
///
/// As with [`Type1`](crate::Type1), everything has happened when a call returns. Mappings may be made
/// before a device is attached; [`refresh`](Self::refresh) tells what can be mapped since.
///
/// Dropping it unmaps everything, and removes the address space once no device is attached to it.
pub struct Iommufd<K: IommufdKernel> {
    space: Space<Ioas<K>>,
    /// The tables that note dirty pages.
    tables: Mutex<Vec<Id>>,
}

/// An address space as a [`Space`] uses it.
#[derive(Debug)]
struct Ioas<K> {
    kernel: K,
    id: Id,
}

impl<K: IommufdKernel> Backend for Ioas<K> {
    unsafe fn map(&self, flags: MapFlags, iova: u64, vaddr: u64, size: u64) -> Answer<()> {
        // SAFETY: the caller's promise.
        unsafe { self.kernel.map(self.id, flags, Some(iova), vaddr, size) }.map(drop)
    }

    fn unmap(&self, iova: u64, size: u64) -> Answer<u64> {
        match self.kernel.unmap(self.id, iova, size) {
            Err(Errno::NOENT) => Ok(0),
            answer => answer,
        }
    }

    fn refusal(&self, errno: Errno, range: Range, entries: u64) -> Error {
        space::refused(errno, range, entries, None, self.kernel.locked())
    }
}

impl<K: IommufdKernel> Iommufd<K> {
    /// A domain over a new address space.
    ///
    /// # Errors
    /// [`Error::Gone`]: the kernel knows no such thing. [`Error::NoMemory`].
    pub fn new(kernel: K, tuning: Tuning) -> Result<Iommufd<K>> {
        let id = kernel.new_ioas().map_err(|errno| lost(errno, Range::ALL))?;
        let geometry = match geometry_of(&kernel, id) {
            Ok(geometry) => geometry,
            Err(error) => {
                let _ = kernel.destroy(id);
                return Err(error);
            }
        };
        let space = Space::new(Ioas { kernel, id }, geometry, tuning);
        Ok(Iommufd { space, tables: Mutex::new(Vec::new()) })
    }

    /// The iommufd.
    pub fn kernel(&self) -> &K {
        &self.space.backend.kernel
    }

    /// The name of the address space, to attach devices to.
    pub fn ioas(&self) -> Id {
        self.space.backend.id
    }

    /// Asks the kernel anew what can be mapped: after a device was attached or detached.
    ///
    /// # Errors
    /// The kernel's; the geometry is what it was.
    pub fn refresh(&self) -> Result<()> {
        self.space.set_geometry(geometry_of(self.kernel(), self.ioas())?);
        Ok(())
    }

    /// How its mappings stand.
    pub fn usage(&self) -> Usage {
        self.space.usage()
    }

    /// Maps many ranges with as few mappings of the kernel's as there can be: as
    /// [`Type1::map_batch`](crate::Type1::map_batch).
    ///
    /// # Errors
    /// As [`map_pages`](ringfence_iommu::Domain::map_pages).
    pub fn map_batch(&self, batch: &[Map<HostAddr>]) -> Result<()> {
        self.space.map_batch(batch)
    }

    /// Maps a large range, step by step: as [`Type1::map_in_steps`](crate::Type1::map_in_steps).
    ///
    /// # Errors
    /// As [`map_pages`](ringfence_iommu::Domain::map_pages).
    pub fn map_in_steps(
        &self,
        map: Map<HostAddr>,
        mut progress: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<bool> {
        self.space.map_in_steps(&map, &mut progress)
    }

    /// Unmaps everything at one go; how many bytes were mapped. Whoever maps or unmaps meanwhile gets
    /// an error.
    ///
    /// # Errors
    /// The kernel's; what is left mapped is still known here.
    pub fn unmap_all(&self) -> Result<u128> {
        self.space.unmap_all(|| self.space.backend.unmap(0, u64::MAX))
    }

    /// A table of this address space for a device that is bound, by its hardware, which notes dirty
    /// pages: to be attached in place of [`ioas`](Self::ioas). The domain removes it.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: the hardware cannot. Otherwise the kernel's.
    pub fn dirty_table(&self, device: Id) -> Result<Id> {
        let table =
            self.kernel().new_hwpt(device, self.ioas(), true).map_err(|errno| match errno {
                Errno::OPNOTSUPP => Error::Unsupported("the hardware notes no dirty pages"),
                errno => lost(errno, Range::ALL),
            })?;
        self.tables.lock().push(table);
        Ok(table)
    }

    /// Starts to note which pages devices with a [`dirty_table`](Self::dirty_table) write to; again is
    /// fine.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: there is no such table. Otherwise the kernel's.
    pub fn start_dirty(&self) -> Result<()> {
        self.track(true)
    }

    /// Stops it.
    ///
    /// # Errors
    /// As [`start_dirty`](Self::start_dirty).
    pub fn stop_dirty(&self) -> Result<()> {
        self.track(false)
    }

    fn track(&self, on: bool) -> Result<()> {
        let track = |table| {
            let answer = self.kernel().track_dirty(table, on);
            answer.map_err(|errno| lost(errno, Range::ALL))
        };
        self.dirty_tables()?.into_iter().try_for_each(track)
    }

    /// Marks in `map` what devices have written to in `range` since they were last asked, while they go
    /// on. Each bit is told once.
    ///
    /// # Errors
    /// [`Error::WouldSplit`]: a mapping lies in `range` in part, and nothing was asked. Otherwise the
    /// kernel's; what it had told before is marked.
    pub fn read_dirty(&self, range: Range, map: &mut DirtyMap) -> Result<()> {
        let tables = self.dirty_tables()?;
        for piece in self.space.made_in(range)? {
            self.collect(&tables, piece, map)?;
        }
        Ok(())
    }

    /// Unmaps `range`, and marks in `map` what devices had written to in it that was not told before;
    /// how many bytes were mapped.
    ///
    /// An iommufd tells and unmaps in two steps: what a device writes in between is not told. It must
    /// have been told before to leave the memory alone.
    ///
    /// # Errors
    /// As [`unmap_pages`](ringfence_iommu::Domain::unmap_pages); what was removed before is marked.
    pub fn unmap_dirty(&self, range: Range, map: &mut DirtyMap) -> Result<u128> {
        let tables = self.dirty_tables()?;
        self.space.unmap_with(range, &mut |piece| {
            self.collect(&tables, piece, map)?;
            self.space.remove(piece)
        })
    }

    fn collect(&self, tables: &[Id], piece: Range, map: &mut DirtyMap) -> Result<()> {
        let page = self.space.geometry().page_sizes.granule();
        tables.iter().try_for_each(|&table| {
            space::collect(piece, page, map, |bitmap| {
                let asked = self.kernel().dirty(table, piece.first().0, size(piece), bitmap);
                asked.map_err(|errno| lost(errno, piece))
            })
        })
    }

    fn dirty_tables(&self) -> Result<Vec<Id>> {
        let tables = self.tables.lock().clone();
        match tables.is_empty() {
            true => Err(Error::Unsupported("no table of the address space notes dirty pages")),
            false => Ok(tables),
        }
    }
}

fn geometry_of<K: IommufdKernel>(kernel: &K, ioas: Id) -> Result<Geometry> {
    let told = kernel.iova_ranges(ioas).map_err(|errno| lost(errno, Range::ALL))?;
    let sizes = PageSizes::from_granule(told.alignment.max(PAGE))
        .ok_or(Error::Unsupported("the kernel names no page size"))?;
    space::geometry(sizes, &told.ranges, &kernel.reserved_regions())
        .ok_or(Error::Unsupported("the kernel lets nothing be mapped"))
}

space::is_a_domain!(Iommufd, IommufdKernel);

impl<K: IommufdKernel> Drop for Iommufd<K> {
    fn drop(&mut self) {
        if self.usage().entries > 0
            && let Err(error) = self.unmap_all()
        {
            tracing::warn!(%error, "a domain goes, and what it mapped stays mapped");
        }
        // Where a device is still attached, the kernel keeps them until the iommufd is closed.
        for table in std::mem::take(self.tables.get_mut()) {
            let _ = self.kernel().destroy(table);
        }
        let _ = self.kernel().destroy(self.ioas());
    }
}
