//! A PCI device without a driver, used as root can: its registers through sysfs.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::{Path, PathBuf},
    ptr::null_mut,
    sync::Arc,
};

use anyhow::{Context, Result, ensure};

const DEVICES: &str = "/sys/bus/pci/devices";
const COMMAND: u64 = 4;
const MEMORY_AND_BUS_MASTER: u16 = 2 | 4;

/// A function of a PCI device that no driver has.
pub(crate) struct Function {
    folder: PathBuf,
    config: File,
    number: u32,
}

impl Function {
    /// Every function of a kind, in the order of their addresses, taken from its driver and allowed
    /// to use the bus.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn all(vendor: u16, device: u16) -> Result<Vec<Function>> {
        let mut folders = Vec::new();
        for entry in fs::read_dir(DEVICES)? {
            let folder = entry?.path();
            if number(&folder, "vendor")? == vendor && number(&folder, "device")? == device {
                folders.push(folder);
            }
        }
        folders.sort();
        folders.into_iter().map(Function::take).collect()
    }

    fn take(folder: PathBuf) -> Result<Function> {
        let name = folder.file_name().and_then(|name| name.to_str()).context("no name")?;
        let number = requester(name).with_context(|| format!("{name} is no PCI address"))?;
        if folder.join("driver").exists() {
            fs::write(folder.join("driver/unbind"), name)?;
        }
        let config = OpenOptions::new().read(true).write(true).open(folder.join("config"))?;
        let function = Function { folder, config, number };
        let command = u16::from_le_bytes(function.config(COMMAND)?) | MEMORY_AND_BUS_MASTER;
        function.config.write_all_at(&command.to_le_bytes(), COMMAND)?;
        Ok(function)
    }

    /// How the bus knows it: what a virtio-iommu calls an endpoint.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Bytes of its configuration space.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn config<const N: usize>(&self, at: u64) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.config.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }

    /// The registers behind one of its base addresses.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn registers(&self, bar: u8) -> Result<Registers> {
        let path = self.folder.join(format!("resource{bar}"));
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.with_context(|| format!("{}", path.display()))?;
        let len = file.metadata()?.len() as usize;
        let both = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let at =
            unsafe { libc::mmap(null_mut(), len, both, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        ensure!(at != libc::MAP_FAILED, "{}: {}", path.display(), io::Error::last_os_error());
        Ok(Registers { mapped: Arc::new(Mapped { at: at as usize, len }), first: 0, len })
    }
}

/// A number that sysfs has for a device.
fn number(folder: &Path, name: &str) -> Result<u16> {
    let text = fs::read_to_string(folder.join(name))?;
    Ok(u16::from_str_radix(text.trim().trim_start_matches("0x"), 16)?)
}

/// The number of the function at an address such as `0000:00:05.1`: its bus, then device and
/// function.
fn requester(address: &str) -> Option<u32> {
    let (_, rest) = address.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let [bus, device, function] =
        [bus, device, function].map(|part| u32::from_str_radix(part, 16).ok());
    Some(bus? << 8 | device? << 3 | function?)
}

struct Mapped {
    at: usize,
    len: usize,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: made in `registers`; all that use it hold this.
        unsafe { libc::munmap(self.at as *mut _, self.len) };
    }
}

/// Registers of a device, or a part of them.
#[derive(Clone)]
pub(crate) struct Registers {
    mapped: Arc<Mapped>,
    first: usize,
    len: usize,
}

/// What a register can be: an integer that is read and written at once.
pub(crate) trait Register: Copy {}
impl Register for u8 {}
impl Register for u16 {}
impl Register for u32 {}
impl Register for u64 {}

impl Registers {
    /// `len` bytes of them from `first`.
    ///
    /// # Errors
    /// There are fewer.
    pub(crate) fn part(&self, first: u32, len: u32) -> Result<Registers> {
        let end = (first as usize).checked_add(len as usize);
        ensure!(end.is_some_and(|end| end <= self.len), "registers that the device does not have");
        let (mapped, first) = (Arc::clone(&self.mapped), self.first + first as usize);
        Ok(Registers { mapped, first, len: len as usize })
    }

    /// How many bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn read<R: Register>(&self, at: usize) -> R {
        // SAFETY: within what is mapped and aligned, as `at` checks; what a device returns is a
        // number.
        unsafe { self.at::<R>(at).read_volatile() }
    }

    pub(crate) fn write<R: Register>(&self, at: usize, value: R) {
        // SAFETY: as in `read`.
        unsafe { self.at::<R>(at).write_volatile(value) }
    }

    /// # Panics
    /// If the register is not within these: its place is known when the program is written.
    fn at<R>(&self, at: usize) -> *mut R {
        let size = size_of::<R>();
        let place = self.mapped.at + self.first + at;
        assert!(at + size <= self.len && place.is_multiple_of(size), "no register at {at:#x}");
        place as *mut R
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_has_the_number_that_the_bus_knows_it_by() {
        assert_eq!(requester("0000:00:02.0"), Some(0x10));
        assert_eq!(requester("0001:01:1f.7"), Some(0x1ff));
        for wrong in ["", "0000:00:02", "00:02.0", "0000:00:02.x"] {
            assert_eq!(requester(wrong), None, "{wrong}");
        }
    }
}
