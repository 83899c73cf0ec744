//! A type1 container as a domain.

use ringfence_iommu::{
    Error, Geometry, HostAddr, Iova, Map, PageSizes, Partial, Range, Result, SyncToken, Work,
};
use rustix::io::Errno;

use crate::{
    DirtyMap,
    kernel::{
        Bitmap, DirtyInfo, Extension, KernelResult, MapFlags, Type1Info, Type1Kernel, UnmapFlags,
    },
    space::{self, Backend, Space, Tuning, Usage, lost, size},
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
pub struct Type1<K: Type1Kernel> {
    pub(crate) space: Space<Container<K>>,
    dirty: Option<DirtyInfo>,
}

/// A container as a [`Space`] uses it.
#[derive(Debug)]
pub(crate) struct Container<K>(pub(crate) K);

impl<K: Type1Kernel> Backend for Container<K> {
    unsafe fn map(&self, flags: MapFlags, iova: u64, vaddr: u64, size: u64) -> KernelResult<()> {
        // SAFETY: the caller's promise.
        unsafe { self.0.map(flags, iova, vaddr, size) }
    }

    fn unmap(&self, iova: u64, size: u64) -> KernelResult<u64> {
        self.0.unmap(UnmapFlags::empty(), iova, size, None)
    }

    fn refusal(&self, errno: Errno, range: Range, entries: u64) -> Error {
        let available = self.0.info().ok().and_then(|info| info.available).map(u64::from);
        space::refused(errno, range, entries, available, self.0.locked())
    }
}

impl<K: Type1Kernel> Type1<K> {
    /// A domain over a container in which nothing is mapped.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: the kernel reports no page size, or no address that can be mapped.
    /// [`Error::Gone`]: it is no container any more. Otherwise the kernel's.
    pub fn new(kernel: K, tuning: Tuning) -> Result<Type1<K>> {
        let info = info_of(&kernel)?;
        let geometry = geometry_of(&kernel, &info)?;
        let granule = geometry.page_sizes.granule();
        // The bits of a mapping must fit a bitmap, or they could never be read.
        let bits = info.dirty.map_or(u64::MAX, |dirty| dirty.max_bytes.saturating_mul(8));
        let chunk = tuning.chunk.min(bits.saturating_mul(granule));
        let space = Space::new(Container(kernel), geometry, Tuning { chunk, ..tuning });
        Ok(Type1 { space, dirty: info.dirty })
    }

    /// The container.
    pub fn kernel(&self) -> &K {
        &self.space.backend.0
    }

    /// Reads anew from the kernel what can be mapped: call it after a group was added or removed.
    ///
    /// # Errors
    /// As [`new`](Self::new); the geometry is unchanged then.
    pub fn refresh(&self) -> Result<()> {
        let info = info_of(self.kernel())?;
        self.space.set_geometry(geometry_of(self.kernel(), &info)?);
        Ok(())
    }

    /// How many more mappings the kernel would make (rule [L51]); `None` if it does not say.
    ///
    /// [L51]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l51
    pub fn available(&self) -> Option<u64> {
        self.kernel().info().ok()?.available.map(u64::from)
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
        match self.kernel().has(Extension::UnmapAll) {
            true => self.space.unmap_all(|| self.kernel().unmap(UnmapFlags::ALL, 0, 0, None)),
            false => self.space.unmap(Range::ALL),
        }
    }

    /// Starts to track which pages devices write to (rule [L63]); calling it twice is fine.
    ///
    /// # Errors
    /// [`Error::Unsupported`], or the kernel's.
    ///
    /// [L63]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l63
    pub fn start_dirty(&self) -> Result<()> {
        self.track(true)
    }

    fn track(&self, on: bool) -> Result<()> {
        self.page()?;
        let result = self.kernel().track_dirty(on);
        result.map_err(|errno| lost("track dirty pages of", errno, Range::ALL))
    }

    /// Marks in `map` the pages in `range` that devices have written since the last call; they may
    /// keep writing. Each bit is reported once: one that lies outside of `map` is lost.
    ///
    /// # Errors
    /// [`Error::WouldSplit`]: a mapping lies only partly in `range`, and nothing was read.
    /// Otherwise the kernel's; bits that were read before the error are marked.
    pub fn read_dirty(&self, range: Range, map: &mut DirtyMap) -> Result<()> {
        let page = self.page()?;
        for piece in self.space.made_in(range)? {
            space::collect(piece, page, map, |bitmap| {
                let result = self.kernel().dirty(piece.first().0, size(piece), bitmap);
                result.map_err(|errno| lost("read the dirty pages of", errno, piece))
            })?;
        }
        Ok(())
    }

    /// Unmaps `range`, and marks in `map` the pages that devices had written in it and that were
    /// not reported before (rule [L63]); returns how many bytes were mapped.
    ///
    /// # Errors
    /// As [`unmap_pages`](ringfence_iommu::Domain::unmap_pages); what was removed before is marked.
    ///
    /// [L63]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l63
    pub fn unmap_dirty(&self, range: Range, map: &mut DirtyMap) -> Result<u128> {
        let page = self.page()?;
        self.space.unmap_with(range, &mut |piece| {
            space::collect(piece, page, map, |Bitmap { page, words }| {
                self.space.remove_by(piece, piece.len(), &mut || {
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

    /// The page size of dirty bits: the smallest that the kernel offers (rule L63).
    fn page(&self) -> Result<u64> {
        let sizes = self.dirty.and_then(|dirty| PageSizes::new(dirty.page_sizes));
        let sizes = sizes.ok_or(Error::Unsupported("the kernel does not track dirty pages"))?;
        Ok(sizes.granule())
    }
}

fn info_of(kernel: &impl Type1Kernel) -> Result<Type1Info> {
    kernel.info().map_err(|errno| lost("say what can be mapped of", errno, Range::ALL))
}

fn geometry_of<K: Type1Kernel>(kernel: &K, info: &Type1Info) -> Result<Geometry> {
    let sizes = PageSizes::new(info.page_sizes)
        .ok_or(Error::Unsupported("the kernel reports no page size"))?;
    let ranges = info.ranges.as_deref().unwrap_or(&[Range::ALL]);
    // Linux makes a mapping that ends with the address space, but never finds it again: nothing
    // removes it. So the last page cannot be mapped.
    let below = Range::new(Iova(0), Iova(u64::MAX - sizes.granule()));
    let findable = |range: &Range| range.intersection(below?);
    let ranges: Vec<Range> = ranges.iter().filter_map(findable).collect();
    space::geometry(sizes, &ranges, &kernel.reserved_regions())
        .ok_or(Error::Unsupported("the kernel reports no mappable range"))
}

space::is_a_domain!(Type1, Type1Kernel);

impl<K: Type1Kernel> Drop for Type1<K> {
    fn drop(&mut self) {
        if self.usage().entries > 0
            && let Err(error) = self.unmap_all()
        {
            tracing::warn!(
                %error,
                "dropping the domain: unmapping failed, its mappings stay until the container is closed"
            );
        }
    }
}
