//! The registers of a device, in this process's memory.

use std::{fmt, ptr::NonNull};

use rustix::{
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

use super::{KernelResult, Region};
use crate::error::{Error, Result};

/// A BAR of a PCI device: registers of 32 and 64 bits, each access a single one of that width.
///
/// Parts that the kernel does not allow to be mapped (the page of an MSI-X table, on some) are
/// reached by system calls, at the same addresses.
pub struct Bar {
    region: Region,
    areas: Vec<Area>,
}

/// A part of the BAR that is mapped.
struct Area {
    at: u64,
    len: u64,
    memory: NonNull<u8>,
}

// SAFETY: the memory stays mapped until the BAR is dropped, in whichever thread; registers are
// accessed by single volatile accesses, which a device accepts from any thread.
unsafe impl Send for Bar {}
// SAFETY: as above; nothing of the value itself changes.
unsafe impl Sync for Bar {}

impl fmt::Debug for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bar").field("size", &self.size()).finish_non_exhaustive()
    }
}

impl Bar {
    /// Maps those of `areas` that lie in `region`.
    pub(super) fn new(region: Region, areas: &[(u64, u64)]) -> KernelResult<Bar> {
        let mut bar = Bar { region, areas: Vec::with_capacity(areas.len()) };
        for &(at, len) in areas {
            let inside = at.checked_add(len).is_some_and(|end| end <= bar.region.size());
            let Some(size) = usize::try_from(len).ok().filter(|&size| size > 0 && inside) else {
                return Err(Errno::INVAL);
            };
            let (flags, prot) = (MapFlags::SHARED, ProtFlags::READ | ProtFlags::WRITE);
            let place = bar.region.offset + at;
            // SAFETY: a new mapping, at an address of the kernel's choice.
            let memory =
                unsafe { mmap(std::ptr::null_mut(), size, prot, flags, &bar.region.file, place) }?;
            let memory = NonNull::new(memory.cast()).ok_or(Errno::FAULT)?;
            bar.areas.push(Area { at, len, memory });
        }
        Ok(bar)
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.region.size()
    }

    /// Reads the register of 32 bits at `at`, a multiple of 4.
    ///
    /// # Errors
    /// There is no such register; or it is reached by a system call, which fails.
    #[inline]
    pub fn read32(&self, at: u64) -> Result<u32> {
        self.read(at, u32::from_ne_bytes)
    }

    /// Writes the register of 32 bits at `at`, a multiple of 4. A device that the write notifies
    /// sees all that the CPU stored to memory before it, and overwrites nothing that the CPU loaded
    /// before it.
    ///
    /// # Errors
    /// There is no such register; or it is reached by a system call, which fails.
    #[inline]
    pub fn write32(&self, at: u64, value: u32) -> Result<()> {
        self.write(at, value, value.to_ne_bytes())
    }

    /// Reads the register of 64 bits at `at`, a multiple of 8.
    ///
    /// # Errors
    /// There is no such register; or it is reached by a system call, which fails.
    #[inline]
    pub fn read64(&self, at: u64) -> Result<u64> {
        self.read(at, u64::from_ne_bytes)
    }

    /// Writes the register of 64 bits at `at`, a multiple of 8; else as [`write32`](Self::write32).
    ///
    /// # Errors
    /// There is no such register; or it is reached by a system call, which fails.
    #[inline]
    pub fn write64(&self, at: u64, value: u64) -> Result<()> {
        self.write(at, value, value.to_ne_bytes())
    }

    #[inline]
    fn read<T, const N: usize>(&self, at: u64, from: fn([u8; N]) -> T) -> Result<T> {
        match self.register::<T>(at)? {
            // SAFETY: aligned, and within memory that is mapped while `self` is borrowed; a number
            // of any bits.
            Some(register) => Ok(unsafe { register.read_volatile() }),
            None => self.region.read(at).map(from),
        }
    }

    #[inline]
    fn write<T, const N: usize>(&self, at: u64, value: T, bytes: [u8; N]) -> Result<()> {
        before_register();
        match self.register::<T>(at)? {
            // SAFETY: as for reading.
            Some(register) => unsafe { register.write_volatile(value) },
            None => self.region.write(at, bytes)?,
        }
        Ok(())
    }

    /// The register's place in memory; `None` if it is not mapped.
    #[inline]
    fn register<T>(&self, at: u64) -> Result<Option<*mut T>> {
        let size = size_of::<T>() as u64;
        if !at.is_multiple_of(size) || at.checked_add(size).is_none_or(|end| end > self.size()) {
            return Err(self.missing(at, size));
        }
        let area = self.areas.iter().find(|area| {
            let offset = at.wrapping_sub(area.at);
            offset < area.len && area.len - offset >= size
        });
        Ok(area.map(|area| {
            // SAFETY: within the area, as just checked; the area is page-aligned, and so is its
            // offset in the BAR, or the kernel would not have mapped it.
            unsafe { area.memory.as_ptr().add((at - area.at) as usize) }.cast()
        }))
    }

    #[cold]
    fn missing(&self, at: u64, size: u64) -> Error {
        Error::new(format!(
            "reach a register of {size} bytes at {at:#x} of a BAR of {:#x}",
            self.size()
        ))
    }
}

/// Orders earlier accesses to memory before the register write: the device that it notifies reads
/// memory, and writes where it was read.
///
/// Ordering: x86 orders them by itself; only the compiler has to keep the order. Elsewhere a fence
/// orders memory among CPUs, and registers need a stronger barrier.
#[inline]
fn before_register() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier touches nothing.
    unsafe {
        std::arch::asm!("dmb osh", options(nostack, preserves_flags));
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        for area in &self.areas {
            // SAFETY: mapped by `new` with this length, and nothing borrows it any more.
            let _ = unsafe { munmap(area.memory.as_ptr().cast(), area.len as usize) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::FileExt, sync::Arc};

    use super::*;

    /// A file in place of a device: a BAR of 12 KiB at 4 KiB, whose middle page is not mapped.
    fn bar() -> (Bar, std::fs::File) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(0x8000).unwrap();
        let region = Region::new(Arc::new(file.try_clone().unwrap()), 0x1000, 0x3000);
        (Bar::new(region, &[(0, 0x1000), (0x2000, 0x1000)]).unwrap(), file)
    }

    #[test]
    fn registers_are_where_the_device_has_them_mapped_or_not() {
        let (bar, file) = bar();
        for at in [0, 0x0ff8, 0x1000, 0x1ff8, 0x2000, 0x2ff8] {
            bar.write64(at, 0x1122_3344_5566_7788 + at).unwrap();
            let mut seen = [0; 8];
            file.read_exact_at(&mut seen, 0x1000 + at).unwrap();
            assert_eq!(u64::from_ne_bytes(seen), 0x1122_3344_5566_7788 + at);
            assert_eq!(bar.read64(at).unwrap(), 0x1122_3344_5566_7788 + at);
            bar.write32(at, 9).unwrap();
            assert_eq!(bar.read32(at).unwrap(), 9);
            assert_eq!(bar.read32(at + 4).unwrap(), 0x1122_3344);
        }
        assert_eq!(bar.areas.len(), 2);
    }

    #[test]
    fn nothing_lies_beyond_a_bar_or_between_its_registers() {
        let (bar, _) = bar();
        for at in [2, 0x3000, 0x2ffe, u64::MAX, u64::MAX - 3] {
            assert!(bar.read32(at).is_err() && bar.write32(at, 0).is_err(), "{at:#x}");
        }
        for at in [4, 0x3000, 0x2ffc, u64::MAX - 7] {
            assert!(bar.read64(at).is_err() && bar.write64(at, 0).is_err(), "{at:#x}");
        }
    }

    #[test]
    fn areas_outside_of_the_region_are_refused() {
        for areas in [(0, 0x4000), (u64::MAX, 2), (0x1000, u64::MAX), (0, 0)] {
            let file = tempfile::tempfile().unwrap();
            file.set_len(0x8000).unwrap();
            let region = Region::new(Arc::new(file), 0x1000, 0x3000);
            assert!(Bar::new(region, &[areas]).is_err());
        }
    }
}
