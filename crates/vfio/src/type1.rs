//! A type1 container as a domain.

use ringfence_iommu::{Error, Geometry, Iova, PageSizes, Range, Result};
use rustix::io::Errno;

use crate::{
    DirtyMap,
    kernel::{
        Bitmap, DirtyInfo, Extension, KernelResult, MapFlags, Type1Info, Type1Kernel, UnmapFlags,
    },
    space::{self, Backend, Space, Tuning, lost, size},
};

/// A domain over a VFIO type1 container, real ([`Attached`](crate::kernel::Attached)) or a fake of
/// it. It maps to addresses of this process, whose pages the kernel pins.
///
/// A map and an unmap are system calls that are complete when they return: nothing can be deferred
/// ([`deferred_flush`](ringfence_iommu::Capabilities::deferred_flush)), and a lazy policy over it
/// becomes a strict one. The last page of the address space is outside of the aperture, whatever
/// the kernel says: Linux can map it but not unmap it. An error number of the kernel that has no
/// name of its own becomes [`Error::Kernel`].
///
/// Dropping it unmaps everything, so that devices that live longer can access nothing.
pub type Type1<K> = Space<Container<K>>;

/// A container as a [`Space`] uses it.
pub struct Container<K> {
    kernel: K,
    dirty: Option<DirtyInfo>,
}

impl<K: Type1Kernel> Backend for Container<K> {
    const NAME: &'static str = "Type1";

    unsafe fn map(&self, flags: MapFlags, iova: u64, vaddr: u64, size: u64) -> KernelResult<()> {
        // SAFETY: the caller's promise.
        unsafe { self.kernel.map(flags, iova, vaddr, size) }
    }

    fn unmap(&self, iova: u64, size: u64) -> KernelResult<u64> {
        self.kernel.unmap(UnmapFlags::empty(), iova, size, None)
    }

    fn has_unmap_all(&self) -> bool {
        self.kernel.has(Extension::UnmapAll)
    }

    fn unmap_all(&self) -> KernelResult<u64> {
        self.kernel.unmap(UnmapFlags::ALL, 0, 0, None)
    }

    fn refusal(&self, errno: Errno, range: Range, entries: u64) -> Error {
        let available = self.kernel.info().ok().and_then(|info| info.available).map(u64::from);
        space::refused(errno, range, entries, available, self.kernel.locked())
    }

    fn geometry(&self) -> Result<Geometry> {
        let info = info_of(&self.kernel)?;
        let sizes = PageSizes::new(info.page_sizes)
            .ok_or(Error::Unsupported("the kernel reports no page size"))?;
        let ranges = info.ranges.as_deref().unwrap_or(&[Range::ALL]);
        // Linux makes a mapping that ends with the address space, but never finds it again: nothing
        // removes it. So the last page cannot be mapped.
        let below = Range::new(Iova(0), Iova(u64::MAX - sizes.granule()));
        let findable = |range: &Range| range.intersection(below?);
        let ranges: Vec<Range> = ranges.iter().filter_map(findable).collect();
        space::geometry(sizes, &ranges, &self.kernel.reserved_regions())
            .ok_or(Error::Unsupported("the kernel reports no mappable range"))
    }

    fn track(&self, on: bool) -> Result<()> {
        self.dirty_page(0)?;
        let result = self.kernel.track_dirty(on);
        result.map_err(|errno| lost("track dirty pages of", errno, Range::ALL))
    }

    /// The smallest that the kernel offers (rule L63).
    fn dirty_page(&self, _: u64) -> Result<u64> {
        let sizes = self.dirty.and_then(|dirty| PageSizes::new(dirty.page_sizes));
        let sizes = sizes.ok_or(Error::Unsupported("the kernel does not track dirty pages"))?;
        Ok(sizes.granule())
    }

    fn collect(&self, piece: Range, page: u64, map: &mut DirtyMap) -> Result<()> {
        space::collect(piece, page, map, |bitmap| {
            let result = self.kernel.dirty(piece.first().0, size(piece), bitmap);
            result.map_err(|errno| lost("read the dirty pages of", errno, piece))
        })
    }
}

impl<K: Type1Kernel> Type1<K> {
    /// A domain over a container in which nothing is mapped.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: the kernel reports no page size, or no address that can be mapped.
    /// [`Error::Gone`]: it is no container any more. Otherwise the kernel's.
    pub fn new(kernel: K, tuning: Tuning) -> Result<Type1<K>> {
        let dirty = info_of(&kernel)?.dirty;
        let container = Container { kernel, dirty };
        let geometry = container.geometry()?;
        let granule = geometry.page_sizes.granule();
        // The bits of a mapping must fit a bitmap, or they could never be read.
        let bits = dirty.map_or(u64::MAX, |dirty| dirty.max_bytes.saturating_mul(8));
        let chunk = tuning.chunk.min(bits.saturating_mul(granule));
        Ok(Space::over(container, geometry, Tuning { chunk, ..tuning }))
    }

    /// The container.
    pub fn kernel(&self) -> &K {
        &self.backend.kernel
    }

    /// How many more mappings the kernel would make (rule [L51]); `None` if it does not say.
    ///
    /// [L51]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l51
    pub fn available(&self) -> Option<u64> {
        self.kernel().info().ok()?.available.map(u64::from)
    }

    /// Unmaps `range`, and marks in `map` the pages that devices had written in it and that were
    /// not reported before (rule [L63]); returns how many bytes were mapped.
    ///
    /// # Errors
    /// As [`unmap_pages`](ringfence_iommu::Domain::unmap_pages); what was removed before is marked.
    ///
    /// [L63]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l63
    pub fn unmap_dirty(&self, range: Range, map: &mut DirtyMap) -> Result<u128> {
        let page = self.dirty_page()?;
        self.unmap_with(range, &mut |piece| {
            space::collect(piece, page, map, |Bitmap { page, words }| {
                self.remove_by(piece, piece.len(), &mut || {
                    let bitmap = Bitmap { page, words: &mut *words };
                    self.kernel().unmap(
                        UnmapFlags::GET_DIRTY,
                        piece.first().0,
                        size(piece),
                        Some(bitmap),
                    )
                })
            })
        })
    }
}

fn info_of(kernel: &impl Type1Kernel) -> Result<Type1Info> {
    kernel.info().map_err(|errno| lost("say what can be mapped of", errno, Range::ALL))
}
