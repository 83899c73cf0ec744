//! A device that user space owns, and its registers.

use std::{fs::File, mem::offset_of, sync::Arc};

use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_REGION_INFO_CAP_SPARSE_MMAP, VFIO_REGION_INFO_FLAG_CAPS,
    VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE,
    vfio_region_info, vfio_region_info_cap_sparse_mmap,
};

use super::{Bar, Region, chain::Chain, ioctl};
use crate::error::{Error, Result};

const GET_REGION_INFO: u32 = ioctl::vfio(8);
const RESET: u32 = ioctl::vfio(11);

/// The command register in a PCI device's configuration space, and its bits for memory registers
/// and bus mastering.
const COMMAND: u64 = 4;
const MEMORY: u16 = 1 << 1;
const MASTER: u16 = 1 << 2;

/// More than any reply to `VFIO_DEVICE_GET_REGION_INFO` has, in words of 64 bits.
const LARGEST_INFO: usize = 1 << 13;

/// A device, ours until this is dropped.
///
/// It keeps its [container](super::Attached) and the mappings there alive in the kernel.
#[derive(Debug)]
pub struct Device {
    name: String,
    file: Arc<File>,
}

impl Device {
    pub(super) fn new(name: &str, file: File) -> Device {
        Device { name: name.into(), file: Arc::new(file) }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
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

    /// Turns DMA, interrupts and memory registers of a PCI device on or off.
    ///
    /// # Errors
    /// It is not a PCI device.
    pub fn set_bus_master(&self, on: bool) -> Result<()> {
        let config = self.config()?;
        let command = u16::from_ne_bytes(config.read(COMMAND)?);
        let command = if on { command | MEMORY | MASTER } else { command & !MASTER };
        config.write(COMMAND, command.to_ne_bytes())
    }

    fn failed(&self, what: &str, errno: Errno) -> Error {
        Error::new(format!("{what} {}", self.name)).with_errno(errno)
    }

    fn info(&self, index: u32) -> Result<Info> {
        let words = self.raw_info(index);
        let (words, info) =
            words.map_err(|errno| self.failed(&format!("find region {index} of"), errno))?;
        let missing = || Error::new(format!("find region {index} of {}", self.name));
        if info.size == 0 || info.offset.checked_add(info.size).is_none() {
            return Err(missing().remedy("it has none"));
        }
        let flags = info.flags;
        if flags & VFIO_REGION_INFO_FLAG_READ == 0 && flags & VFIO_REGION_INFO_FLAG_WRITE == 0 {
            return Err(missing().remedy("it can be neither read nor written"));
        }
        let file = Arc::clone(&self.file);
        let region = Region::new(file, info.offset, info.size);
        Ok(Info { region, areas: areas(&words, &info) })
    }

    fn raw_info(&self, index: u32) -> super::KernelResult<(Vec<u64>, vfio_region_info)> {
        let mut words = vec![0_u64; 32];
        loop {
            words.fill(0);
            let header = vfio_region_info {
                argsz: size_of_val(&words[..]) as u32,
                index,
                ..Default::default()
            };
            const { assert!(align_of::<vfio_region_info>() <= align_of::<u64>()) };
            // SAFETY: there is room for the structure, which consists of numbers only.
            unsafe { words.as_mut_ptr().cast::<vfio_region_info>().write(header) };
            // SAFETY: the buffer begins with the request's structure, which states the buffer's
            // size.
            unsafe { ioctl::memory(&*self.file, GET_REGION_INFO, &mut words[..]) }?;
            // SAFETY: as for the write above.
            let info = unsafe { words.as_ptr().cast::<vfio_region_info>().read() };
            let needed = (info.argsz as usize).div_ceil(8);
            if needed <= words.len() {
                return Ok((words, info));
            }
            if needed > LARGEST_INFO {
                return Err(Errno::TOOBIG);
            }
            words = vec![0; needed];
        }
    }
}

struct Info {
    region: Region,
    areas: Vec<(u64, u64)>,
}

/// The parts of a region that may be mapped: where and how long.
fn areas(words: &[u64], info: &vfio_region_info) -> Vec<(u64, u64)> {
    if info.flags & VFIO_REGION_INFO_FLAG_MMAP == 0 {
        return Vec::new();
    }
    let whole = vec![(0, info.size)];
    if info.flags & VFIO_REGION_INFO_FLAG_CAPS == 0 {
        return whole;
    }
    let words = super::bytes(words);
    let sparse = Chain::new(words, info.cap_offset)
        .find(|capability| capability.id == VFIO_REGION_INFO_CAP_SPARSE_MMAP);
    let Some(sparse) = sparse else { return whole };
    let count = sparse.u32(offset_of!(vfio_region_info_cap_sparse_mmap, nr_areas)).unwrap_or(0);
    sparse.pairs(offset_of!(vfio_region_info_cap_sparse_mmap, areas), count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_mapped_is_what_the_kernel_says() {
        let info = |flags, cap_offset| vfio_region_info {
            flags,
            cap_offset,
            size: 0x4000,
            ..Default::default()
        };
        let mapped = VFIO_REGION_INFO_FLAG_MMAP;
        assert_eq!(areas(&[], &info(0, 0)), []);
        assert_eq!(areas(&[], &info(mapped, 0)), [(0, 0x4000)]);
        let caps = mapped | VFIO_REGION_INFO_FLAG_CAPS;
        let header = u64::from(VFIO_REGION_INFO_CAP_SPARSE_MMAP);
        let words = [0, 0, 0, 0, header, 2, 0, 0x1000, 0x3000, 0x1000];
        assert_eq!(areas(&words, &info(caps, 32)), [(0, 0x1000), (0x3000, 0x1000)]);
        assert_eq!(areas(&words, &info(caps, 0)), [(0, 0x4000)], "no such capability");
        assert_eq!(areas(&words, &info(caps, u32::MAX)), [(0, 0x4000)]);
    }
}
