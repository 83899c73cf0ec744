//! The requests to VFIO type1 and iommufd, after the kernel's
//! `include/uapi/linux/{vfio,iommufd}.h`: the seam between the domains and a kernel, real or fake.
//!
//! Errors are the kernel's own numbers here: the caller knows what it requested, and interprets
//! them.

mod bar;
mod chain;
mod container;
mod device;
mod group;
mod info;
mod ioctl;
mod iommu;
mod region;
mod sysfs;

use std::fs::File;

use bitflags::bitflags;
use ringfence_iommu::{Range, ReservedRegion};
use rustix::io::Errno;

use self::sysfs::{Member, Sysfs};
pub use bar::Bar;
pub use container::{Attached, Container};
pub use device::Device;
pub use group::Group;
pub use iommu::{Bound, IommuFile};
pub use region::Region;

pub use crate::memlock::Locked;

/// The result of a request to the kernel.
pub type KernelResult<T> = Result<T, Errno>;

bitflags! {
    /// How to map (`VFIO_DMA_MAP_FLAG_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct MapFlags: u32 {
        /// The device may read.
        const READ = 1;
        /// The device may write.
        const WRITE = 2;
        /// The mapping exists and gets another process address (rule [L60]).
        ///
        /// [L60]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l60
        const VADDR = 4;
        /// Bits that have no meaning: a kernel refuses them.
        const _ = !0;
    }

    /// How to unmap (`VFIO_DMA_UNMAP_FLAG_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct UnmapFlags: u32 {
        /// Return which pages were written to (rule [L63]).
        ///
        /// [L63]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l63
        const GET_DIRTY = 1;
        /// Everything (rule [L56]).
        ///
        /// [L56]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l56
        const ALL = 2;
        /// Only mark the process address as invalid (rule [L59]).
        ///
        /// [L59]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l59
        const VADDR = 4;
        /// Bits that have no meaning: a kernel refuses them.
        const _ = !0;
    }
}

/// Where dirty bits go: for `VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP` and an unmap with `GET_DIRTY`.
#[derive(Debug)]
pub struct Bitmap<'a> {
    /// The size of a page in bytes.
    pub page: u64,
    /// The bits, zero before the call; the caller merges them afterwards. A kernel may overwrite
    /// the words that hold bits of its mappings.
    pub words: &'a mut [u64],
}

/// What a type1 container supports (`VFIO_IOMMU_GET_INFO`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Type1Info {
    /// Page sizes, as a bitmap; the lowest bit is the granule.
    pub page_sizes: u64,
    /// What can be mapped, in ascending order; `None`: the kernel does not say.
    pub ranges: Option<Vec<Range>>,
    /// How many more mappings there may be; `None`: the kernel does not say.
    pub available: Option<u32>,
    /// Whether and how it tracks dirty pages.
    pub dirty: Option<DirtyInfo>,
}

/// How dirty pages are tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyInfo {
    /// Page sizes of bitmaps, as a bitmap.
    pub page_sizes: u64,
    /// Most bytes of one bitmap.
    pub max_bytes: u64,
}

/// What not every kernel supports (`VFIO_CHECK_EXTENSION`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Extension {
    /// [`UnmapFlags::ALL`].
    UnmapAll,
    /// [`MapFlags::VADDR`] and [`UnmapFlags::VADDR`].
    UpdateVaddr,
}

/// A type1v2 container with a group in it (rules [L51]-[L63]).
///
/// [L51]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l51
/// [L63]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l63
pub trait Type1Kernel: Send + Sync {
    /// What it supports, and how many mappings are left.
    ///
    /// # Errors
    /// The kernel's.
    fn info(&self) -> KernelResult<Type1Info>;

    /// Whether it has `extension`.
    fn has(&self, extension: Extension) -> bool;

    /// Maps `size` bytes at `iova` to the process address `vaddr`.
    ///
    /// # Safety
    /// Until it is unmapped, the memory belongs to the users of the container's devices: these read
    /// and, if `flags` say so, write it behind the compiler's back.
    ///
    /// # Errors
    /// The kernel's (rules [L51], [L53], [L60], [L61]).
    ///
    /// [L51]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l51
    /// [L53]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l53
    /// [L60]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l60
    /// [L61]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l61
    unsafe fn map(&self, flags: MapFlags, iova: u64, vaddr: u64, size: u64) -> KernelResult<()>;

    /// Unmaps `size` bytes at `iova` (both 0 with [`UnmapFlags::ALL`]); returns how many bytes were
    /// mapped (rules [L55]-[L57], [L59]). `dirty` goes with [`UnmapFlags::GET_DIRTY`].
    ///
    /// # Errors
    /// The kernel's.
    ///
    /// [L55]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l55
    /// [L57]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l57
    /// [L59]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l59
    fn unmap(
        &self,
        flags: UnmapFlags,
        iova: u64,
        size: u64,
        dirty: Option<Bitmap<'_>>,
    ) -> KernelResult<u64>;

    /// Starts or stops tracking dirty pages; a repeated call is fine (rule [L63]).
    ///
    /// # Errors
    /// The kernel's.
    ///
    /// [L63]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l63
    fn track_dirty(&self, on: bool) -> KernelResult<()>;

    /// Reads the dirty bits of a range, and clears them in the kernel (rule [L63]).
    ///
    /// # Errors
    /// The kernel's.
    ///
    /// [L63]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l63
    fn dirty(&self, iova: u64, size: u64, dirty: Bitmap<'_>) -> KernelResult<()>;

    /// The regions that must not be mapped for its devices, as far as they are known by name: the
    /// reasons for the gaps between the ranges of [`info`](Self::info). In ascending order.
    fn reserved_regions(&self) -> Vec<ReservedRegion> {
        Vec::new()
    }

    /// How much memory is locked on the account that mappings are charged to, and the limit; `None`
    /// if no limit applies.
    fn locked(&self) -> Option<Locked> {
        None
    }
}

/// The id of an object in an iommufd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(u32);

impl Id {
    /// The id of that number.
    pub const fn new(number: u32) -> Id {
        Id(number)
    }
}

/// Which IOVAs can be mapped in an address space (`IOMMU_IOAS_IOVA_RANGES`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IovaRanges {
    /// In ascending order.
    pub ranges: Vec<Range>,
    /// What addresses and sizes must be multiples of, in bytes.
    pub alignment: u64,
}

/// An iommufd: address spaces (IOAS) and the hardware page tables (HWPT) made from them.
pub trait IommufdKernel: Send + Sync {
    /// A new address space.
    ///
    /// # Errors
    /// The kernel's.
    fn new_ioas(&self) -> KernelResult<Id>;

    /// Removes an object that nothing uses.
    ///
    /// # Errors
    /// The kernel's: EBUSY while it is used.
    fn destroy(&self, id: Id) -> KernelResult<()>;

    /// What can be mapped, given the devices attached now.
    ///
    /// # Errors
    /// The kernel's.
    fn iova_ranges(&self, ioas: Id) -> KernelResult<IovaRanges>;

    /// Maps `size` bytes at the process address `vaddr`: at `iova`, or where the kernel chooses.
    /// Returns the IOVA.
    ///
    /// # Safety
    /// As [`Type1Kernel::map`].
    ///
    /// # Errors
    /// The kernel's.
    unsafe fn map(
        &self,
        ioas: Id,
        flags: MapFlags,
        iova: Option<u64>,
        vaddr: u64,
        size: u64,
    ) -> KernelResult<u64>;

    /// Unmaps; returns how many bytes were mapped. `iova` 0 and `size` `u64::MAX`: the whole
    /// address space. A mapping is never split, and a range without mappings is ENOENT.
    ///
    /// # Errors
    /// The kernel's.
    fn unmap(&self, ioas: Id, iova: u64, size: u64) -> KernelResult<u64>;

    /// A hardware page table for a bound device, made from an address space; `dirty`: one that
    /// tracks dirty pages.
    ///
    /// # Errors
    /// The kernel's: EOPNOTSUPP if the hardware cannot track.
    fn new_hwpt(&self, device: Id, ioas: Id, dirty: bool) -> KernelResult<Id>;

    /// Starts or stops tracking dirty pages.
    ///
    /// # Errors
    /// The kernel's.
    fn track_dirty(&self, hwpt: Id, on: bool) -> KernelResult<()>;

    /// Reads the dirty bits of a range, and clears them in the page table.
    ///
    /// # Errors
    /// The kernel's.
    fn dirty(&self, hwpt: Id, iova: u64, size: u64, dirty: Bitmap<'_>) -> KernelResult<()>;

    /// As [`Type1Kernel::reserved_regions`].
    fn reserved_regions(&self) -> Vec<ReservedRegion> {
        Vec::new()
    }

    /// As [`Type1Kernel::locked`].
    fn locked(&self) -> Option<Locked> {
        None
    }
}

/// Opens a file of the kernel for reading and writing.
fn open(path: &str) -> KernelResult<File> {
    let file = File::options().read(true).write(true).open(path);
    file.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}
