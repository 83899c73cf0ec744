//! A real type1 container.

use std::{
    fs::File,
    mem::{self, offset_of},
};

use parking_lot::Mutex;
use ringfence_iommu::ReservedRegion;
use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP, VFIO_IOMMU_DIRTY_PAGES_FLAG_START,
    VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP, VFIO_TYPE1v2_IOMMU, VFIO_UNMAP_ALL, VFIO_UPDATE_VADDR,
    vfio_bitmap, vfio_iommu_type1_dirty_bitmap, vfio_iommu_type1_dirty_bitmap_get,
    vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap,
};

use super::{
    Bitmap, Device, Extension, Group, KernelResult, Locked, MapFlags, Sysfs, Type1Info,
    Type1Kernel, UnmapFlags, info, ioctl, open,
};
use crate::{
    error::{Error, Result},
    memlock,
};

const GET_API_VERSION: u32 = ioctl::vfio(0);
const CHECK_EXTENSION: u32 = ioctl::vfio(1);
const SET_IOMMU: u32 = ioctl::vfio(2);
const GET_INFO: u32 = ioctl::vfio(12);
const MAP_DMA: u32 = ioctl::vfio(13);
const UNMAP_DMA: u32 = ioctl::vfio(14);
const DIRTY_PAGES: u32 = ioctl::vfio(17);

/// A container without a group: nothing can be mapped in it yet, so it has no method for that.
///
/// ```compile_fail,E0599
/// use ringfence_vfio::kernel::{Container, Type1Kernel, UnmapFlags};
///
/// let container = Container::open().unwrap();
/// container.unmap(UnmapFlags::ALL, 0, 0, None);
/// ```
///
/// ```no_run
/// use ringfence_vfio::kernel::{Container, Group, Type1Kernel, UnmapFlags};
///
/// let container = Container::open().unwrap().attach(Group::open(7).unwrap()).unwrap();
/// container.unmap(UnmapFlags::ALL, 0, 0, None);
/// ```
#[derive(Debug)]
pub struct Container {
    file: File,
}

impl Container {
    /// A new container of this machine's kernel.
    ///
    /// # Errors
    /// There is no VFIO here, access is denied, or VFIO has no type 1.
    pub fn open() -> Result<Container> {
        let failed = || Error::new("open a VFIO container");
        let file = open("/dev/vfio/vfio").map_err(|errno| {
            failed().because(errno).remedy(match errno {
                Errno::NOENT | Errno::NODEV => "load the module vfio_iommu_type1 (and vfio-pci)",
                Errno::ACCESS | Errno::PERM => "give this user /dev/vfio/vfio",
                _ => "",
            })
        })?;
        let call = |request, argument| {
            ioctl::number(&file, request, argument).map_err(|errno| failed().because(errno))
        };
        if call(GET_API_VERSION, 0)? != VFIO_API_VERSION as i32 {
            return Err(failed().remedy("the kernel speaks another version of VFIO"));
        }
        if call(CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU as usize)? == 0 {
            return Err(failed().remedy("the kernel has no type 1: load vfio_iommu_type1"));
        }
        Ok(Container { file })
    }

    /// Puts the first group into the container: from then on the kernel says what can be mapped,
    /// and mappings are possible.
    ///
    /// # Errors
    /// The kernel refuses: the error says what to do.
    pub fn attach(self, group: Group) -> Result<Attached> {
        group.join(&self.file)?;
        ioctl::number(&self.file, SET_IOMMU, VFIO_TYPE1v2_IOMMU as usize).map_err(|errno| {
            let operation = format!("give VFIO group {} an IOMMU of type 1", group.number());
            Error::new(operation).because(errno).remedy(match errno {
                Errno::PERM => {
                    "its interrupts are not isolated: turn interrupt remapping on, or, where the \
                     device is trusted not to forge any, load vfio_iommu_type1 with \
                     allow_unsafe_interrupts=1"
                }
                Errno::NODEV => "no IOMMU isolates it",
                _ => "",
            })
        })?;
        Ok(Attached { file: self.file, groups: Mutex::new(vec![group]) })
    }
}

/// A type1v2 container with a group in it, or several: a [`Type1Kernel`].
///
/// Dropping it does not end mappings while a [`Device`] of it lives.
#[derive(Debug)]
pub struct Attached {
    file: File,
    groups: Mutex<Vec<Group>>,
}

impl Attached {
    /// Puts another group into the container: its devices can access what is mapped, and less may
    /// be mappable afterwards (rule [L61]).
    ///
    /// # Errors
    /// The kernel refuses: a mapping lies where the group does not allow one, or the group is in a
    /// container already. Nothing was changed.
    ///
    /// [L61]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l61
    pub fn add(&self, group: Group) -> Result<()> {
        group.join(&self.file)?;
        self.groups.lock().push(group);
        Ok(())
    }

    /// A device of one of the groups, by its name on its bus: `0000:00:04.0`.
    ///
    /// # Errors
    /// The groups have no such device, or the kernel refuses it.
    pub fn device(&self, name: &str) -> Result<Device> {
        let groups = self.groups.lock();
        let mut failed = Error::new(format!("open {name}")).remedy("no group is attached");
        for group in groups.iter() {
            match group.device(name) {
                Ok(device) => return Ok(device),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    /// A request about dirty pages, with its payload behind the header.
    fn dirty_pages<T>(&self, flags: u32, with: T) -> KernelResult<()> {
        #[repr(C)]
        struct Argument<T> {
            header: vfio_iommu_type1_dirty_bitmap,
            with: T,
        }
        let header = vfio_iommu_type1_dirty_bitmap {
            argsz: ioctl::size::<Argument<T>>(),
            flags,
            ..Default::default()
        };
        // SAFETY: the request's structure; a bitmap that it names is borrowed by the caller.
        unsafe { ioctl::memory(&self.file, DIRTY_PAGES, &mut Argument { header, with }) }.map(drop)
    }
}

impl Type1Kernel for Attached {
    fn info(&self) -> KernelResult<Type1Info> {
        Ok(info::parse(&ioctl::reply(&self.file, GET_INFO, 0)?))
    }

    fn has(&self, extension: Extension) -> bool {
        let number = match extension {
            Extension::UnmapAll => VFIO_UNMAP_ALL,
            Extension::UpdateVaddr => VFIO_UPDATE_VADDR,
        };
        ioctl::number(&self.file, CHECK_EXTENSION, number as usize).is_ok_and(|has| has > 0)
    }

    unsafe fn map(&self, flags: MapFlags, iova: u64, vaddr: u64, size: u64) -> KernelResult<()> {
        let argsz = ioctl::size::<vfio_iommu_type1_dma_map>();
        let mut map = vfio_iommu_type1_dma_map { argsz, flags: flags.bits(), vaddr, iova, size };
        // SAFETY: the request's own structure; the memory that it names is the caller's promise.
        unsafe { ioctl::memory(&self.file, MAP_DMA, &mut map) }.map(drop)
    }

    fn unmap(
        &self,
        flags: UnmapFlags,
        iova: u64,
        size: u64,
        dirty: Option<Bitmap<'_>>,
    ) -> KernelResult<u64> {
        #[repr(C)]
        struct Argument {
            unmap: vfio_iommu_type1_dma_unmap,
            bitmap: vfio_bitmap,
        }
        let plain = offset_of!(Argument, bitmap);
        let argsz = if dirty.is_some() { size_of::<Argument>() } else { plain } as u32;
        let flags = flags.bits();
        let unmap = vfio_iommu_type1_dma_unmap { argsz, flags, iova, size, ..Default::default() };
        let mut argument = Argument { unmap, bitmap: raw(dirty) };
        // SAFETY: the request's own structure; the bitmap is borrowed meanwhile. The kernel refuses
        // a request for bits without a bitmap, for its size.
        unsafe { ioctl::memory(&self.file, UNMAP_DMA, &mut argument) }?;
        Ok(argument.unmap.size)
    }

    fn track_dirty(&self, on: bool) -> KernelResult<()> {
        let flag =
            if on { VFIO_IOMMU_DIRTY_PAGES_FLAG_START } else { VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP };
        self.dirty_pages(flag, ())
    }

    fn dirty(&self, iova: u64, size: u64, dirty: Bitmap<'_>) -> KernelResult<()> {
        let bitmap = raw(Some(dirty));
        let get = vfio_iommu_type1_dirty_bitmap_get { iova, size, bitmap };
        self.dirty_pages(VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP, get)
    }

    fn reserved_regions(&self) -> Vec<ReservedRegion> {
        let groups: Vec<u32> = self.groups.lock().iter().map(Group::number).collect();
        Sysfs::default().reserved_regions_of(&groups)
    }

    fn locked(&self) -> Option<Locked> {
        memlock::of_this_process("VmLck:")
    }
}

/// A bitmap in the kernel's form; one of zero bytes for `None`.
fn raw(dirty: Option<Bitmap<'_>>) -> vfio_bitmap {
    match dirty {
        Some(Bitmap { page, words }) => vfio_bitmap {
            pgsize: page,
            size: mem::size_of_val(words) as u64,
            data: words.as_mut_ptr(),
        },
        None => vfio_bitmap { pgsize: 0, size: 0, data: std::ptr::null_mut() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_no_container_says_so() {
        // A file in place of the kernel's: each request fails with ENOTTY.
        let groups = Mutex::default();
        let attached = Attached { file: tempfile::tempfile().unwrap(), groups };
        assert_eq!(attached.info(), Err(Errno::NOTTY));
        assert!(!attached.has(Extension::UnmapAll));
        assert_eq!(attached.unmap(UnmapFlags::ALL, 0, 0, None), Err(Errno::NOTTY));
        assert_eq!(attached.track_dirty(true), Err(Errno::NOTTY));
        let mut words = [0; 4];
        let bitmap = Bitmap { page: 4096, words: &mut words };
        assert_eq!(attached.dirty(0, 4096, bitmap), Err(Errno::NOTTY));
        assert!(attached.device("0000:00:00.0").is_err());
    }
}
