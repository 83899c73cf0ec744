//! An address space of an iommufd as a domain.

use parking_lot::Mutex;
use ringfence_iommu::{Error, Geometry, PageSizes, Range, Result};
use rustix::io::Errno;

use crate::{
    DirtyMap,
    kernel::{Id, IommufdKernel, KernelResult, MapFlags},
    space::{self, Backend, Space, Tuning, lost, size},
};

/// Used where the kernel reports a smaller alignment: without devices an address space takes any
/// address.
const PAGE: u64 = 4096;

/// A domain over an address space (IOAS) of an iommufd, real
/// ([`IommuFile`](crate::kernel::IommuFile)) or a fake of it. It maps to addresses of this process,
/// whose pages the kernel pins while a device is attached.
///
/// As with [`Type1`](crate::Type1), the work is done when a call returns. Mappings may be made
/// before a device is attached; [`refresh`](Space::refresh) reads the geometry anew after that.
///
/// Dropping it unmaps everything, and removes the address space; if a device is still attached, the
/// kernel keeps that, empty, until the iommufd is closed.
pub type Iommufd<K> = Space<Ioas<K>>;

/// An address space as a [`Space`] uses it; removed when it is dropped.
pub struct Ioas<K: IommufdKernel> {
    kernel: K,
    id: Id,
    /// The page tables that track dirty pages.
    tables: Mutex<Vec<Id>>,
}

impl<K: IommufdKernel> Backend for Ioas<K> {
    const NAME: &'static str = "Iommufd";

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

    fn unmap_all(&self) -> KernelResult<u64> {
        self.unmap(0, u64::MAX)
    }

    fn refusal(&self, errno: Errno, range: Range, entries: u64) -> Error {
        space::refused(errno, range, entries, None, self.kernel.locked())
    }

    fn geometry(&self) -> Result<Geometry> {
        let found = self.kernel.iova_ranges(self.id);
        let found = found.map_err(|errno| lost("say what can be mapped of", errno, Range::ALL))?;
        let sizes = PageSizes::from_granule(found.alignment.max(PAGE))
            .ok_or(Error::Unsupported("the kernel reports no page size"))?;
        space::geometry(sizes, &found.ranges, &self.kernel.reserved_regions())
            .ok_or(Error::Unsupported("the kernel reports no mappable range"))
    }

    fn track(&self, on: bool) -> Result<()> {
        self.dirty_tables()?.into_iter().try_for_each(|table| {
            let result = self.kernel.track_dirty(table, on);
            result.map_err(|errno| lost("track dirty pages of", errno, Range::ALL))
        })
    }

    fn dirty_page(&self, granule: u64) -> Result<u64> {
        self.dirty_tables().map(|_| granule)
    }

    fn collect(&self, piece: Range, page: u64, map: &mut DirtyMap) -> Result<()> {
        self.dirty_tables()?.into_iter().try_for_each(|table| {
            space::collect(piece, page, map, |bitmap| {
                let result = self.kernel.dirty(table, piece.first().0, size(piece), bitmap);
                result.map_err(|errno| lost("read the dirty pages of", errno, piece))
            })
        })
    }
}

impl<K: IommufdKernel> Ioas<K> {
    fn dirty_tables(&self) -> Result<Vec<Id>> {
        let tables = self.tables.lock().clone();
        match tables.is_empty() {
            true => Err(Error::Unsupported("no table of the address space tracks dirty pages")),
            false => Ok(tables),
        }
    }
}

impl<K: IommufdKernel> Drop for Ioas<K> {
    fn drop(&mut self) {
        // If a device is still attached, the kernel keeps them until the iommufd is closed.
        for id in std::mem::take(self.tables.get_mut()).into_iter().chain([self.id]) {
            let _ = self.kernel.destroy(id);
        }
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
        let ioas = Ioas { kernel, id, tables: Mutex::default() };
        let geometry = ioas.geometry()?;
        Ok(Space::over(ioas, geometry, tuning))
    }

    /// The iommufd.
    pub fn kernel(&self) -> &K {
        &self.backend.kernel
    }

    /// The id of the address space, to attach devices to.
    pub fn ioas(&self) -> Id {
        self.backend.id
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
        self.backend.tables.lock().push(table);
        Ok(table)
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
        let page = self.dirty_page()?;
        self.unmap_with(range, &mut |piece| {
            self.backend.collect(piece, page, map)?;
            self.remove(piece)
        })
    }
}
