//! A device that user space owns, and its registers.

use std::{fs::File, mem::offset_of, sync::Arc};

use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_REGION_INFO_CAP_SPARSE_MMAP, VFIO_REGION_INFO_FLAG_CAPS,
    VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE,
    vfio_region_info, vfio_region_info_cap_sparse_mmap,
};

use super::{
    Bar, Region,
    chain::{Chain, u32_at, u64_at},
    ioctl,
};
use crate::error::{Error, Result};

const GET_REGION_INFO: u32 = ioctl::vfio(8);
const RESET: u32 = ioctl::vfio(11);

/// The command register in a PCI device's configuration space, and its bits for memory registers
/// and bus mastering.
const COMMAND: u64 = 4;
const MEMORY: u16 = 1 << 1;
const MASTER: u16 = 1 << 2;

/// A device, ours until this is dropped.
///
/// It keeps its [container](super::Attached) and the mappings there alive in the kernel.
#[derive(Debug)]
pub struct Device {
    name: String,
    pub(super) file: Arc<File>,
    /// The iommufd that it is bound to: its own descriptor must be closed before this one.
    _iommu: Option<Arc<File>>,
}

impl Device {
    pub(super) fn new(name: &str, file: File, iommu: Option<Arc<File>>) -> Device {
        Device { name: name.into(), file: Arc::new(file), _iommu: iommu }
    }

    /// Its name on its bus.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Resets it by the means of its bus (a function level reset, say).
    ///
    /// # Errors
    /// The kernel has no way to: the device's driver has to reset it by its registers.
    pub fn reset(&self) -> Result<()> {
        ioctl::number(&*self.file, RESET, 0).map(drop).map_err(|errno| {
            self.failed("reset", errno).remedy(match errno {
                Errno::NOTTY => "its bus has no way to",
                _ => "",
            })
        })
    }

    /// A region by its number: for a PCI device its BARs (0 to 5), its ROM and its configuration
    /// space.
    ///
    /// # Errors
    /// It has no such region.
    pub fn region(&self, index: u32) -> Result<Region> {
        self.info(index).map(|info| info.region)
    }

    /// The configuration space of a PCI device.
    ///
    /// # Errors
    /// It is not a PCI device.
    pub fn config(&self) -> Result<Region> {
        self.region(VFIO_PCI_CONFIG_REGION_INDEX)
    }

    /// A BAR of a PCI device, mapped into this process as far as the kernel allows that.
    ///
    /// # Errors
    /// It has no such BAR, or there is no room for it.
    pub fn bar(&self, index: u32) -> Result<Bar> {
        let Info { region, areas } = self.info(index)?;
        Bar::new(region, &areas).map_err(|errno| self.failed(&format!("map BAR {index} of"), errno))
    }

    /// Turns bus mastering of a PCI device on or off: without it the device does no DMA and sends
    /// no MSIs. Turning it on also enables the device's memory registers, which stay enabled.
    ///
    /// # Errors
    /// It is not a PCI device, or does not respond.
    pub fn set_bus_master(&self, on: bool) -> Result<()> {
        let config = self.config()?;
        let command = u16::from_ne_bytes(config.read(COMMAND)?);
        let command = if on { command | MEMORY | MASTER } else { command & !MASTER };
        config.write(COMMAND, command.to_ne_bytes())
    }

    fn failed(&self, what: &str, errno: Errno) -> Error {
        Error::new(format!("{what} {}", self.name)).because(errno)
    }

    fn info(&self, index: u32) -> Result<Info> {
        let what = format!("find region {index} of");
        let reply = ioctl::reply(&*self.file, GET_REGION_INFO, index);
        let reply = reply.map_err(|errno| self.failed(&what, errno))?;
        let missing = |why| Err(Error::new(format!("{what} {}", self.name)).remedy(why));
        let size = u64_at(&reply, offset_of!(vfio_region_info, size)).unwrap_or(0);
        let offset = u64_at(&reply, offset_of!(vfio_region_info, offset)).unwrap_or(0);
        if size == 0 || offset.checked_add(size).is_none() {
            return missing("it has none");
        }
        let flags = u32_at(&reply, offset_of!(vfio_region_info, flags)).unwrap_or(0);
        if flags & (VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE) == 0 {
            return missing("it can be neither read nor written");
        }
        let region = Region::new(Arc::clone(&self.file), offset, size);
        Ok(Info { region, areas: areas(&reply, flags, size) })
    }
}

struct Info {
    region: Region,
    areas: Vec<(u64, u64)>,
}

/// The parts of a region that may be mapped: where and how long.
fn areas(reply: &[u8], flags: u32, size: u64) -> Vec<(u64, u64)> {
    type Cap = vfio_region_info_cap_sparse_mmap;
    if flags & VFIO_REGION_INFO_FLAG_MMAP == 0 {
        return Vec::new();
    }
    let first = u32_at(reply, offset_of!(vfio_region_info, cap_offset));
    let first = first.filter(|_| flags & VFIO_REGION_INFO_FLAG_CAPS != 0).unwrap_or(0);
    let mut chain = Chain::new(reply, first);
    match chain.find(|capability| capability.id == VFIO_REGION_INFO_CAP_SPARSE_MMAP) {
        Some(sparse) => {
            let count = u32_at(sparse.bytes, offset_of!(Cap, nr_areas)).unwrap_or(0);
            sparse.pairs(offset_of!(Cap, areas), count).collect()
        }
        None => vec![(0, size)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_mapped_is_what_the_kernel_says() {
        let areas = |words: &[u64], flags: u32, cap_offset: u32| {
            let mut reply: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            reply.resize(reply.len().max(32), 0);
            let at = offset_of!(vfio_region_info, cap_offset);
            reply[at..at + 4].copy_from_slice(&cap_offset.to_ne_bytes());
            areas(&reply, flags, 0x4000)
        };
        let mapped = VFIO_REGION_INFO_FLAG_MMAP;
        assert_eq!(areas(&[], 0, 0), []);
        assert_eq!(areas(&[], mapped, 0), [(0, 0x4000)]);
        let caps = mapped | VFIO_REGION_INFO_FLAG_CAPS;
        let header = u64::from(VFIO_REGION_INFO_CAP_SPARSE_MMAP);
        let words = [0, 0, 0, 0, header, 2, 0, 0x1000, 0x3000, 0x1000];
        assert_eq!(areas(&words, caps, 32), [(0, 0x1000), (0x3000, 0x1000)]);
        assert_eq!(areas(&words, caps, 0), [(0, 0x4000)], "no such capability");
        assert_eq!(areas(&words, caps, u32::MAX), [(0, 0x4000)]);
    }
}
