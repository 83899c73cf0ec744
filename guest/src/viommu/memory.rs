//! Memory whose address devices know: huge pages, as each is one stretch of physical memory.

use std::{
    any::Any,
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    ptr::{NonNull, null_mut},
    sync::Arc,
};

use anyhow::{Context, Result, ensure};
use ringfence_mem::Window;

/// The bytes of a huge page.
const HUGE: usize = 2 << 20;
const PAGE: usize = 4096;

/// A huge page, and where it lies in physical memory.
pub(crate) struct Memory {
    window: Window,
    addr: u64,
}

/// Keeps it mapped.
struct Mapped(usize);

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: made in `Memory::new`, and nothing leads into it once this goes.
        unsafe { libc::munmap(self.0 as *mut _, HUGE) };
    }
}

impl Memory {
    /// Takes a huge page, which the kernel makes if it has none to spare.
    ///
    /// # Errors
    /// There is none to be had, or the kernel does not say where it lies.
    pub(crate) fn new() -> Result<Memory> {
        let count = "/proc/sys/vm/nr_hugepages";
        let now: usize = fs::read_to_string(count)?.trim().parse()?;
        fs::write(count, (now + 1).to_string())?;
        let both = libc::PROT_READ | libc::PROT_WRITE;
        // Shared, so that nothing ever makes a copy of it that lies elsewhere.
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_POPULATE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let at = unsafe { libc::mmap(null_mut(), HUGE, both, flags, -1, 0) };
        ensure!(at != libc::MAP_FAILED, "a huge page: {}", io::Error::last_os_error());
        let keep: Arc<dyn Any + Send + Sync> = Arc::new(Mapped(at as usize));
        let base = NonNull::new(at.cast()).context("memory at address 0")?;
        // SAFETY: mapped as long as `keep` lives, and accessed through this window only.
        let window = unsafe { Window::new(base, HUGE, keep) };
        Ok(Memory { window, addr: physical(at as usize)? })
    }

    /// Its first byte, for devices.
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    /// The rest of it, from an offset.
    ///
    /// # Errors
    /// It is not that long.
    pub(crate) fn from(&self, offset: usize) -> Result<Memory> {
        let rest = self.window.len().checked_sub(offset);
        let window = rest.and_then(|len| self.window.part(offset, len)).context("no memory")?;
        Ok(Memory { window, addr: self.addr + offset as u64 })
    }

    /// All of it, for this program.
    pub(crate) fn window(&self) -> &Window {
        &self.window
    }
}

/// Where the page at an address of this process lies.
fn physical(at: usize) -> Result<u64> {
    let mut entry = [0; 8];
    let offset = at / PAGE * entry.len();
    File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, offset as u64)?;
    let entry = u64::from_le_bytes(entry);
    // Bit 63: it is there. The 55 lowest are its number, which only root can read.
    let number = entry & ((1 << 55) - 1);
    ensure!(entry >> 63 == 1 && number != 0, "the kernel does not say where memory lies");
    Ok(number * PAGE as u64)
}
