//! A real iommufd, and devices that are opened by their own nodes instead of by their groups.

use std::{fs::File, os::fd::AsRawFd, sync::Arc};

use iommufd_bindings::{
    IOMMUFD_CMD_DESTROY, IOMMUFD_CMD_HWPT_ALLOC, IOMMUFD_CMD_HWPT_GET_DIRTY_BITMAP,
    IOMMUFD_CMD_HWPT_SET_DIRTY_TRACKING, IOMMUFD_CMD_IOAS_ALLOC, IOMMUFD_CMD_IOAS_IOVA_RANGES,
    IOMMUFD_CMD_IOAS_MAP, IOMMUFD_CMD_IOAS_UNMAP, iommu_destroy, iommu_hwpt_alloc,
    iommu_hwpt_get_dirty_bitmap, iommu_hwpt_set_dirty_tracking, iommu_ioas_alloc,
    iommu_ioas_iova_ranges, iommu_ioas_map, iommu_ioas_unmap, iommu_iova_range,
    iommufd_hwpt_alloc_flags_IOMMU_HWPT_ALLOC_DIRTY_TRACKING as ALLOC_DIRTY_TRACKING,
    iommufd_hwpt_set_dirty_tracking_flags_IOMMU_HWPT_DIRTY_TRACKING_ENABLE as TRACKING_ENABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA as MAP_FIXED_IOVA,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE as MAP_READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE as MAP_WRITEABLE,
};
use parking_lot::Mutex;
use ringfence_iommu::{Iova, Range, ReservedRegion};
use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{vfio_device_attach_iommufd_pt, vfio_device_bind_iommufd};

use super::{
    Bitmap, Device, Id, IommufdKernel, IovaRanges, KernelResult, Locked, MapFlags, Sysfs, ioctl,
    open,
};
use crate::{
    error::{Error, Result},
    memlock,
};

const BIND_IOMMUFD: u32 = ioctl::vfio(18);
const ATTACH_PT: u32 = ioctl::vfio(19);

/// More ranges than any address space has.
const MOST_RANGES: u32 = 1 << 16;

/// A real iommufd: an [`IommufdKernel`].
#[derive(Clone, Debug)]
pub struct IommuFile {
    file: Arc<File>,
    /// The groups of devices that were bound.
    groups: Arc<Mutex<Vec<u32>>>,
}

impl IommuFile {
    /// Opens a new one.
    ///
    /// # Errors
    /// This machine has no iommufd, or access is denied.
    pub fn open() -> Result<IommuFile> {
        let file = open("/dev/iommu").map_err(|errno| {
            Error::new("open an iommufd").because(errno).remedy(match errno {
                Errno::NOENT | Errno::NODEV => {
                    "load the module iommufd; a kernel without CONFIG_IOMMUFD has type1 only"
                }
                Errno::ACCESS | Errno::PERM => "give this user /dev/iommu",
                _ => "",
            })
        })?;
        Ok(IommuFile::of(file))
    }

    fn of(file: File) -> IommuFile {
        IommuFile { file: Arc::new(file), groups: Arc::default() }
    }

    /// Opens a PCI device by its own node and binds it, so that it can be attached to tables of
    /// this iommufd.
    ///
    /// # Errors
    /// It has no node, is in use, or its interrupts are not isolated: the error says what to do.
    pub fn bind(&self, device: &str) -> Result<Bound> {
        let failed = || Error::new(format!("open {device} for an iommufd"));
        let node = Sysfs::default().node_of(device).map_err(|error| {
            failed().because(error).remedy(
                "it has no node in /dev/vfio/devices: give it to the driver vfio-pci; a kernel \
                 without CONFIG_VFIO_DEVICE_CDEV has groups only",
            )
        })?;
        let file = open(&format!("/dev/vfio/devices/{node}"));
        let file = file.map_err(|errno| failed().because(errno))?;
        let mut bind = vfio_device_bind_iommufd {
            argsz: ioctl::size::<vfio_device_bind_iommufd>(),
            iommufd: self.file.as_raw_fd(),
            ..Default::default()
        };
        // SAFETY: the request's own structure.
        unsafe { ioctl::memory(&file, BIND_IOMMUFD, &mut bind) }.map_err(|errno| {
            failed().because(errno).remedy(match errno {
                Errno::BUSY | Errno::INVAL => "another process has it open, or has its group",
                Errno::PERM => {
                    "its interrupts are not isolated: turn interrupt remapping on, or, where the \
                     device is trusted not to forge any, load iommufd with allow_unsafe_interrupts=1"
                }
                _ => "",
            })
        })?;
        self.groups.lock().extend(Sysfs::default().group_of(device));
        let device = Device::new(device, file, Some(Arc::clone(&self.file)));
        Ok(Bound { device, id: Id(bind.out_devid) })
    }

    /// Makes a request with `argument` as its structure.
    ///
    /// # Safety
    /// As [`ioctl::memory`].
    unsafe fn call<T>(&self, command: u32, argument: &mut T) -> KernelResult<()> {
        // SAFETY: the caller's promise.
        unsafe { ioctl::memory(&*self.file, ioctl::iommufd(command), argument) }.map(drop)
    }
}

/// A device that is bound to an iommufd. It can access no memory until a table is attached.
#[derive(Debug)]
#[non_exhaustive]
pub struct Bound {
    /// Its registers. It stays bound, and attached, as long as this is open.
    pub device: Device,
    /// Its id in the iommufd.
    pub id: Id,
}

impl Bound {
    /// Attaches the device to an address space (or to one of its hardware page tables): it can
    /// access what is mapped there, and nothing else any more. Less may be mappable afterwards.
    ///
    /// # Errors
    /// A mapping lies where the device does not allow one; its hardware cannot use the table.
    pub fn attach(&self, table: Id) -> Result<()> {
        let argsz = ioctl::size::<vfio_device_attach_iommufd_pt>();
        let mut pt = vfio_device_attach_iommufd_pt { argsz, pt_id: table.0, ..Default::default() };
        // SAFETY: the request's own structure.
        unsafe { ioctl::memory(&self.device.file, ATTACH_PT, &mut pt) }.map(drop).map_err(|errno| {
            let operation = format!("attach {} to an address space", self.device.name());
            Error::new(operation).because(errno).remedy(match errno {
                Errno::INVAL => {
                    "what is mapped lies where the device cannot have it, or its hardware cannot use \
                     that table"
                }
                _ => "",
            })
        })
    }
}

impl IommufdKernel for IommuFile {
    fn new_ioas(&self) -> KernelResult<Id> {
        let size = ioctl::size::<iommu_ioas_alloc>();
        let mut alloc = iommu_ioas_alloc { size, ..Default::default() };
        // SAFETY: the request's own structure.
        unsafe { self.call(IOMMUFD_CMD_IOAS_ALLOC, &mut alloc) }?;
        Ok(Id(alloc.out_ioas_id))
    }

    fn destroy(&self, id: Id) -> KernelResult<()> {
        let mut destroy = iommu_destroy { size: ioctl::size::<iommu_destroy>(), id: id.0 };
        // SAFETY: the request's own structure.
        unsafe { self.call(IOMMUFD_CMD_DESTROY, &mut destroy) }
    }

    fn iova_ranges(&self, ioas: Id) -> KernelResult<IovaRanges> {
        let mut room = vec![iommu_iova_range::default(); 16];
        loop {
            let mut query = iommu_ioas_iova_ranges {
                size: ioctl::size::<iommu_ioas_iova_ranges>(),
                ioas_id: ioas.0,
                num_iovas: room.len() as u32,
                allowed_iovas: room.as_mut_ptr().expose_provenance() as u64,
                ..Default::default()
            };
            // SAFETY: the request's own structure; the array that it names has as many entries as
            // it states, and is ours alone.
            let result = unsafe { self.call(IOMMUFD_CMD_IOAS_IOVA_RANGES, &mut query) };
            let count = query.num_iovas as usize;
            match result {
                Err(Errno::MSGSIZE) if count > room.len() && query.num_iovas <= MOST_RANGES => {
                    room.resize(count, iommu_iova_range::default());
                    continue;
                }
                result => result?,
            }
            room.truncate(count);
            let range = |it: &iommu_iova_range| Range::new(Iova(it.start), Iova(it.last));
            let mut ranges: Vec<Range> = room.iter().filter_map(range).collect();
            ranges.sort();
            return Ok(IovaRanges { ranges, alignment: query.out_iova_alignment });
        }
    }

    unsafe fn map(
        &self,
        ioas: Id,
        flags: MapFlags,
        iova: Option<u64>,
        vaddr: u64,
        size: u64,
    ) -> KernelResult<u64> {
        let mut map = iommu_ioas_map {
            size: ioctl::size::<iommu_ioas_map>(),
            flags: map_flags(flags, iova)?,
            ioas_id: ioas.0,
            user_va: vaddr,
            length: size,
            iova: iova.unwrap_or(0),
            ..Default::default()
        };
        // SAFETY: the request's own structure; the memory that it names is the caller's promise.
        unsafe { self.call(IOMMUFD_CMD_IOAS_MAP, &mut map) }?;
        Ok(map.iova)
    }

    fn unmap(&self, ioas: Id, iova: u64, size: u64) -> KernelResult<u64> {
        let mut unmap = iommu_ioas_unmap {
            size: ioctl::size::<iommu_ioas_unmap>(),
            ioas_id: ioas.0,
            iova,
            length: size,
        };
        // SAFETY: the request's own structure.
        unsafe { self.call(IOMMUFD_CMD_IOAS_UNMAP, &mut unmap) }?;
        Ok(unmap.length)
    }

    fn new_hwpt(&self, device: Id, ioas: Id, dirty: bool) -> KernelResult<Id> {
        let mut alloc = iommu_hwpt_alloc {
            size: ioctl::size::<iommu_hwpt_alloc>(),
            flags: if dirty { ALLOC_DIRTY_TRACKING } else { 0 },
            dev_id: device.0,
            pt_id: ioas.0,
            ..Default::default()
        };
        // SAFETY: the request's own structure, which names no other memory.
        unsafe { self.call(IOMMUFD_CMD_HWPT_ALLOC, &mut alloc) }?;
        Ok(Id(alloc.out_hwpt_id))
    }

    fn track_dirty(&self, hwpt: Id, on: bool) -> KernelResult<()> {
        let mut track = iommu_hwpt_set_dirty_tracking {
            size: ioctl::size::<iommu_hwpt_set_dirty_tracking>(),
            flags: if on { TRACKING_ENABLE } else { 0 },
            hwpt_id: hwpt.0,
            ..Default::default()
        };
        // SAFETY: the request's own structure.
        unsafe { self.call(IOMMUFD_CMD_HWPT_SET_DIRTY_TRACKING, &mut track) }
    }

    fn dirty(&self, hwpt: Id, iova: u64, size: u64, dirty: Bitmap<'_>) -> KernelResult<()> {
        let Bitmap { page, words } = dirty;
        // The request does not state the size of the bitmap.
        let bits = size.checked_div(page).map(u128::from);
        if bits.is_none_or(|bits| bits > words.len() as u128 * 64) {
            return Err(Errno::INVAL);
        }
        let mut get = iommu_hwpt_get_dirty_bitmap {
            size: ioctl::size::<iommu_hwpt_get_dirty_bitmap>(),
            hwpt_id: hwpt.0,
            iova,
            length: size,
            page_size: page,
            data: words.as_mut_ptr().expose_provenance() as u64,
            ..Default::default()
        };
        // SAFETY: the request's own structure; the bitmap that it names has a bit for each page, and is
        // borrowed meanwhile.
        unsafe { self.call(IOMMUFD_CMD_HWPT_GET_DIRTY_BITMAP, &mut get) }
    }

    fn reserved_regions(&self) -> Vec<ReservedRegion> {
        Sysfs::default().reserved_regions_of(&self.groups.lock())
    }

    fn locked(&self) -> Option<Locked> {
        memlock::of_this_process("VmPin:")
    }
}

fn map_flags(flags: MapFlags, iova: Option<u64>) -> KernelResult<u32> {
    if !(MapFlags::READ | MapFlags::WRITE).contains(flags) {
        return Err(Errno::OPNOTSUPP);
    }
    let bit = |on, bit| if on { bit } else { 0 };
    Ok(bit(flags.contains(MapFlags::READ), MAP_READABLE)
        | bit(flags.contains(MapFlags::WRITE), MAP_WRITEABLE)
        | bit(iova.is_some(), MAP_FIXED_IOVA))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_iommufds_own() {
        assert_eq!(map_flags(MapFlags::READ, Some(0)), Ok(5));
        assert_eq!(map_flags(MapFlags::READ | MapFlags::WRITE, None), Ok(6));
        assert_eq!(map_flags(MapFlags::VADDR, None), Err(Errno::OPNOTSUPP));
    }

    #[test]
    fn what_takes_no_iommufd_says_so() {
        // A file in place of the kernel's: each request fails with ENOTTY.
        let kernel = IommuFile::of(tempfile::tempfile().unwrap());
        assert_eq!(kernel.new_ioas(), Err(Errno::NOTTY));
        assert_eq!(kernel.destroy(Id(1)), Err(Errno::NOTTY));
        assert_eq!(kernel.iova_ranges(Id(1)), Err(Errno::NOTTY));
        assert_eq!(kernel.unmap(Id(1), 0, u64::MAX), Err(Errno::NOTTY));
        assert_eq!(kernel.new_hwpt(Id(1), Id(2), true), Err(Errno::NOTTY));
        assert_eq!(kernel.track_dirty(Id(1), true), Err(Errno::NOTTY));
        assert!(kernel.bind("no such device").is_err());
    }

    #[test]
    fn a_bitmap_that_is_too_small_never_reaches_the_kernel() {
        // rule L63
        let kernel = IommuFile::of(tempfile::tempfile().unwrap());
        let mut words = [0; 2];
        let mut read =
            |page, size| kernel.dirty(Id(1), 0, size, Bitmap { page, words: &mut words });
        assert_eq!(read(4096, 128 * 4096), Err(Errno::NOTTY), "the call was made");
        assert_eq!(read(4096, 129 * 4096), Err(Errno::INVAL));
        assert_eq!(read(0, 4096), Err(Errno::INVAL));
    }
}
