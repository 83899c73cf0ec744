//! An address space of an iommufd as a domain.

use parking_lot::Mutex;
use ringfence_iommu::{
    Error, Geometry, HostAddr, Map, PageSizes, Partial, Range, Result, SyncToken, Work,
};
use rustix::io::Errno;

use crate::{
    DirtyMap,
    kernel::{Id, IommufdKernel, KernelResult, MapFlags},
    space::{self, Backend, Space, Tuning, Usage, lost, size},
};

/// Used where the kernel reports a smaller alignment: without devices an address space takes any
/// address.
const PAGE: u64 = 4096;

/// A domain over an address space (IOAS) of an iommufd, real
/// ([`IommuFile`](crate::kernel::IommuFile)) or a fake of it. It maps to addresses of this process,
/// whose pages the kernel pins while a device is attached.
///
/// As with [`Type1`](crate::Type1), the work is done when a call returns. Mappings may be made
/// before a device is attached; [`refresh`](Self::refresh) reads the geometry anew after that.
///
/// Dropping it unmaps everything, and removes the address space; if a device is still attached, the
/// kernel keeps that, empty, until the iommufd is closed.
pub struct Iommufd<K: IommufdKernel> {
    space: Space<Ioas<K>>,
    /// The page tables that track dirty pages.
    tables: Mutex<Vec<Id>>,
}

/// An address space as a [`Space`] uses it.
#[derive(Debug)]
struct Ioas<K> {
    kernel: K,
    id: Id,
}

impl<K: IommufdKernel> Backend for Ioas<K> {
    unsafe fn map(&self, flags: MapFlags, iova: u64, vaddr: u64, size: u64) -> KernelResult<()> {
        // SAFETY: the caller's promise.
        unsafe { self.kernel.map(self.id, flags, Some(iova), vaddr, size) }.map(drop)
    }

    fn unmap(&self, iova: u64, size: u64) -> KernelResult<u64> {
        match self.kernel.unmap(self.id, iova, size) {
            Err(Errno::NOENT) => Ok(0),
            result => result,
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
    /// [`Error::Gone`]: the kernel does not have address spaces. [`Error::Unsupported`]: it
    /// reports no page size, or no address that can be mapped. Otherwise the kernel's.
    pub fn new(kernel: K, tuning: Tuning) -> Result<Iommufd<K>> {
        let id = kernel.new_ioas().map_err(|errno| lost("make", errno, Range::ALL))?;
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

    /// The id of the address space, to attach devices to.
    pub fn ioas(&self) -> Id {
        self.space.backend.id
    }

    /// Reads anew from the kernel what can be mapped: call it after a device was attached or
    /// detached.
    ///
    /// # Errors
    /// As [`new`](Self::new); the geometry is unchanged then.
    pub fn refresh(&self) -> Result<()> {
        self.space.set_geometry(geometry_of(self.kernel(), self.ioas())?);
        Ok(())
    }

    /// Unmaps everything at one go; returns how many bytes were mapped. Concurrent calls to map or
    /// unmap fail.
    ///
    /// # Errors
    /// The kernel's; mappings that remain are still known here.
    pub fn unmap_all(&self) -> Result<u128> {
        self.space.unmap_all(|| self.space.backend.unmap(0, u64::MAX))
    }

    /// A page table of this address space for a bound device, whose hardware tracks dirty pages in
    /// it: attach the device to it instead of [`ioas`](Self::ioas). The domain removes it.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: the hardware cannot. Otherwise the kernel's.
    pub fn dirty_table(&self, device: Id) -> Result<Id> {
        let table =
            self.kernel().new_hwpt(device, self.ioas(), true).map_err(|errno| match errno {
                Errno::OPNOTSUPP => Error::Unsupported("the hardware does not track dirty pages"),
                errno => lost("make a table that notes dirty pages of", errno, Range::ALL),
            })?;
        self.tables.lock().push(table);
        Ok(table)
    }

    /// Starts to track which pages devices with a [`dirty_table`](Self::dirty_table) write to;
    /// calling it twice is fine.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: there is no such table. Otherwise the kernel's.
    pub fn start_dirty(&self) -> Result<()> {
        self.track(true)
    }

    fn track(&self, on: bool) -> Result<()> {
        let track = |table| {
            let result = self.kernel().track_dirty(table, on);
            result.map_err(|errno| lost("track dirty pages of", errno, Range::ALL))
        };
        self.dirty_tables()?.into_iter().try_for_each(track)
    }

    /// Marks in `map` the pages in `range` that devices have written since the last call; they may
    /// keep writing. Each bit is reported once: one that lies outside of `map` is lost.
    ///
    /// # Errors
    /// [`Error::WouldSplit`]: a mapping lies only partly in `range`, and nothing was read.
    /// Otherwise the kernel's; bits that were read before the error are marked.
    pub fn read_dirty(&self, range: Range, map: &mut DirtyMap) -> Result<()> {
        let tables = self.dirty_tables()?;
        for piece in self.space.made_in(range)? {
            self.collect(&tables, piece, map)?;
        }
        Ok(())
    }

    /// Unmaps `range`, and marks in `map` the pages that devices had written in it and that were
    /// not reported before; returns how many bytes were mapped.
    ///
    /// An iommufd reads the bits and unmaps in two steps: a write between them is not reported. So
    /// stop the device's DMA to this memory before the call.
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
                let result = self.kernel().dirty(table, piece.first().0, size(piece), bitmap);
                result.map_err(|errno| lost("read the dirty pages of", errno, piece))
            })
        })
    }

    fn dirty_tables(&self) -> Result<Vec<Id>> {
        let tables = self.tables.lock().clone();
        match tables.is_empty() {
            true => Err(Error::Unsupported("no table of the address space tracks dirty pages")),
            false => Ok(tables),
        }
    }
}

fn geometry_of<K: IommufdKernel>(kernel: &K, ioas: Id) -> Result<Geometry> {
    let found = kernel.iova_ranges(ioas);
    let found = found.map_err(|errno| lost("say what can be mapped of", errno, Range::ALL))?;
    let sizes = PageSizes::from_granule(found.alignment.max(PAGE))
        .ok_or(Error::Unsupported("the kernel reports no page size"))?;
    space::geometry(sizes, &found.ranges, &kernel.reserved_regions())
        .ok_or(Error::Unsupported("the kernel reports no mappable range"))
}

space::is_a_domain!(Iommufd, IommufdKernel);

impl<K: IommufdKernel> Drop for Iommufd<K> {
    fn drop(&mut self) {
        if self.usage().entries > 0
            && let Err(error) = self.unmap_all()
        {
            tracing::warn!(
                %error,
                "dropping the domain: unmapping failed, its mappings stay until the iommufd is closed"
            );
        }
        // If a device is still attached, the kernel keeps the tables until the iommufd is closed.
        for table in std::mem::take(self.tables.get_mut()) {
            let _ = self.kernel().destroy(table);
        }
        let _ = self.kernel().destroy(self.ioas());
    }
}
