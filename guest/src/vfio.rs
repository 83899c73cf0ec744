//! VFIO, as the kernel's `include/uapi/linux/vfio.h` has it: a container of one group, type 1.

use std::{
    fs::File,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::PathBuf,
};

use anyhow::{Context, Result, ensure};
use ringfence_mem::GuestRam;

/// `_IO(';', 100 + n)`.
const fn request(n: u64) -> u64 {
    0x3b64 + n
}

const GET_API_VERSION: u64 = request(0);
const CHECK_EXTENSION: u64 = request(1);
const SET_IOMMU: u64 = request(2);
const GROUP_GET_STATUS: u64 = request(3);
const GROUP_SET_CONTAINER: u64 = request(4);
const GROUP_GET_DEVICE_FD: u64 = request(6);
const DEVICE_GET_REGION_INFO: u64 = request(8);
const DEVICE_RESET: u64 = request(11);
const IOMMU_MAP_DMA: u64 = request(13);
const IOMMU_UNMAP_DMA: u64 = request(14);

const TYPE1V2_IOMMU: usize = 3;
const GROUP_VIABLE: u32 = 1;
const DMA_READ_WRITE: u32 = 3;
/// The region of a PCI device's configuration space; those before it are its BARs.
pub(crate) const CONFIG: u32 = 7;

#[repr(C)]
struct GroupStatus {
    argsz: u32,
    flags: u32,
}

#[repr(C)]
struct RegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    size: u64,
    offset: u64,
}

#[repr(C)]
struct DmaMap {
    argsz: u32,
    flags: u32,
    vaddr: u64,
    iova: u64,
    size: u64,
}

#[repr(C)]
struct DmaUnmap {
    argsz: u32,
    flags: u32,
    iova: u64,
    size: u64,
}

/// A container: what its devices may reach.
pub(crate) struct Container {
    group: File,
    container: File,
}

fn open(path: PathBuf) -> Result<File> {
    let file = File::options().read(true).write(true).open(&path);
    file.with_context(|| path.display().to_string())
}

/// An ioctl whose argument is a number.
fn number(file: &File, request: u64, argument: usize) -> std::io::Result<i32> {
    // SAFETY: the requests that this is used for take a number, or none, and touch no memory.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, argument) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(result) }
}

/// An ioctl whose argument is a structure that says how large it is.
///
/// # Safety
/// `T` is the structure of that request, and its `argsz` is its size.
unsafe fn structure<T>(file: &File, request: u64, argument: &mut T) -> std::io::Result<i32> {
    // SAFETY: the kernel reads and writes within the structure, which is borrowed meanwhile.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, argument as *mut T) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(result) }
}

impl Container {
    /// A container with one group, named by its number.
    pub(crate) fn open(group: &str) -> Result<Container> {
        let container = open("/dev/vfio/vfio".into())?;
        ensure!(number(&container, GET_API_VERSION, 0)? == 0, "another version of VFIO");
        ensure!(number(&container, CHECK_EXTENSION, TYPE1V2_IOMMU)? > 0, "VFIO without type 1");
        let group = open(format!("/dev/vfio/{group}").into())?;
        let mut status = GroupStatus { argsz: size_of::<GroupStatus>() as u32, flags: 0 };
        // SAFETY: the request's own structure.
        unsafe { structure(&group, GROUP_GET_STATUS, &mut status) }.context("group status")?;
        ensure!(status.flags & GROUP_VIABLE != 0, "another driver has a device of the group");
        let mut descriptor: i32 = container.as_raw_fd();
        // SAFETY: the request's argument is a descriptor's number by address.
        unsafe { structure(&group, GROUP_SET_CONTAINER, &mut descriptor) }.context("container")?;
        number(&container, SET_IOMMU, TYPE1V2_IOMMU).context("VFIO_SET_IOMMU")?;
        Ok(Container { group, container })
    }

    /// A device of the group, reset.
    pub(crate) fn device(&self, address: &str) -> Result<Device> {
        let name = std::ffi::CString::new(address)?;
        // SAFETY: the request reads a string that ends with a zero.
        let fd =
            unsafe { libc::ioctl(self.group.as_raw_fd(), GROUP_GET_DEVICE_FD as _, name.as_ptr()) };
        ensure!(fd >= 0, "{address}: {}", std::io::Error::last_os_error());
        // SAFETY: the kernel has just made it for us.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        // A device that cannot be reset this way is reset by its driver.
        let _ = number(&file, DEVICE_RESET, 0);
        Ok(Device { file })
    }

    /// Lets devices reach memory at its guest-physical address, which is an IOVA here.
    pub(crate) fn map(&self, ram: &GuestRam) -> Result<()> {
        let mut map = DmaMap {
            argsz: size_of::<DmaMap>() as u32,
            flags: DMA_READ_WRITE,
            vaddr: ram.user_addr(),
            iova: ram.gpa(),
            size: ram.len() as u64,
        };
        // SAFETY: the request's own structure; the memory it names is mapped while `ram` lives, and
        // what a device does to it is what anyone it is shared with may do.
        unsafe { structure(&self.container, IOMMU_MAP_DMA, &mut map) }.context("MAP_DMA")?;
        Ok(())
    }

    /// Takes it away again: over when this returns.
    pub(crate) fn unmap(&self, ram: &GuestRam) -> Result<()> {
        let mut unmap = DmaUnmap {
            argsz: size_of::<DmaUnmap>() as u32,
            flags: 0,
            iova: ram.gpa(),
            size: ram.len() as u64,
        };
        // SAFETY: the request's own structure.
        unsafe { structure(&self.container, IOMMU_UNMAP_DMA, &mut unmap) }.context("UNMAP_DMA")?;
        ensure!(unmap.size == ram.len() as u64, "UNMAP_DMA removed {:#x} bytes", unmap.size);
        Ok(())
    }
}

/// A device's registers.
pub(crate) struct Device {
    file: File,
}

impl Device {
    /// A part of the device: `CONFIG`, or a BAR by number.
    pub(crate) fn region(&self, index: u32) -> Result<Region<'_>> {
        let mut info = RegionInfo {
            argsz: size_of::<RegionInfo>() as u32,
            flags: 0,
            index,
            cap_offset: 0,
            size: 0,
            offset: 0,
        };
        // SAFETY: the request's own structure.
        unsafe { structure(&self.file, DEVICE_GET_REGION_INFO, &mut info) }
            .with_context(|| format!("region {index}"))?;
        ensure!(info.size > 0, "region {index} is not there");
        Ok(Region { file: &self.file, offset: info.offset, size: info.size })
    }
}

/// A part of a device, read and written a register at a time.
#[derive(Clone, Copy)]
pub(crate) struct Region<'d> {
    file: &'d File,
    offset: u64,
    size: u64,
}

impl Region<'_> {
    /// The part of `len` bytes at `at`.
    pub(crate) fn part(self, at: u64, len: u64) -> Result<Self> {
        ensure!(at.checked_add(len).is_some_and(|end| end <= self.size), "beyond the region");
        Ok(Region { offset: self.offset + at, size: len, ..self })
    }

    pub(crate) fn read<const N: usize>(&self, at: u64) -> Result<[u8; N]> {
        ensure!(at + N as u64 <= self.size, "no register at {at:#x}");
        let mut value = [0; N];
        self.file.read_exact_at(&mut value, self.offset + at)?;
        Ok(value)
    }

    pub(crate) fn write<const N: usize>(&self, at: u64, value: [u8; N]) -> Result<()> {
        ensure!(at + N as u64 <= self.size, "no register at {at:#x}");
        Ok(self.file.write_all_at(&value, self.offset + at)?)
    }
}
