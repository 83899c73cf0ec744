//! Memory for tests of queues: a mapping between two guard pages.

use core::{ffi::c_void, ptr, ptr::NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use ringfence_mem::{Access, AccessError, HostSlice, Translate, Window};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use crate::{
    Desc, RingError,
    device::{self, Burst},
    driver,
};

const PAGE: usize = 4096;

/// A mapping with a page before and after it that nothing may touch.
#[derive(Debug)]
struct Mapping {
    whole: NonNull<c_void>,
    len: usize,
}

// SAFETY: it owns its mapping, which any thread may access and unmap.
unsafe impl Send for Mapping {}
// SAFETY: as above; it gives out no references.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize) -> rustix::io::Result<Mapping> {
        let whole = len + 2 * PAGE;
        let (none, all) = (ProtFlags::empty(), MprotectFlags::READ | MprotectFlags::WRITE);
        // SAFETY: a new mapping, of which only the part between the guards is made accessible.
        unsafe {
            let at = mmap_anonymous(ptr::null_mut(), whole, none, MapFlags::SHARED)?;
            mprotect(at.byte_add(PAGE), len, all)?;
            Ok(Mapping { whole: NonNull::new_unchecked(at), len })
        }
    }

    fn start(&self) -> NonNull<u8> {
        // SAFETY: the mapping is longer than the guard page at its beginning.
        unsafe { self.whole.cast().add(PAGE) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping; windows hold an Arc of it, slices a borrow.
        let _ = unsafe { munmap(self.whole.as_ptr(), self.len + 2 * PAGE) };
    }
}

/// Memory that a device sees at one address. An access past either end of the mapping, through any
/// pointer, hits a guard page. Clones share the memory.
#[derive(Clone, Debug)]
pub struct Ram {
    base: u64,
    piece: u64,
    mapping: Arc<Mapping>,
    windows: Arc<Mutex<Vec<Window>>>,
}

impl Ram {
    /// Zeroed memory of at least `len` bytes (whole pages) at the device's address `base`, a
    /// multiple of 4096, so that the alignment of addresses is that of memory.
    ///
    /// # Panics
    /// There is no memory, or `base` is invalid for so much.
    pub fn new(base: u64, len: usize) -> Ram {
        let len = len.max(1).next_multiple_of(PAGE);
        assert!(base.is_multiple_of(PAGE as u64), "{base:#x} is not on a page");
        assert!(base.checked_add(len as u64 - 1).is_some(), "{len} bytes at {base:#x} wrap");
        let mapping = Arc::new(Mapping::new(len).expect("memory for a test"));
        Ram { base, piece: u64::MAX, mapping, windows: Arc::default() }
    }

    /// The same memory, seen in pieces that do not cross a multiple of `piece` bytes from its base,
    /// as if each were mapped elsewhere. Windows are still contiguous.
    ///
    /// # Panics
    /// `piece` is 0.
    pub fn fragmented(self, piece: u64) -> Ram {
        assert!(piece > 0, "pieces of no bytes");
        Ram { piece, ..self }
    }

    /// The address of its first byte, as the device sees it.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.mapping.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Invalidates all windows made so far, as an IOTLB does when the mapping under them goes.
    pub fn invalidate_windows(&self) {
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        windows.drain(..).for_each(|window| window.invalidate());
    }

    /// The offset of the bytes in the mapping.
    fn offset(&self, addr: u64, len: u64, access: Access) -> Result<usize, AccessError> {
        if len > 0 && addr.checked_add(len - 1).is_none() {
            return Err(AccessError::Overflow { addr, len });
        }
        let size = self.len() as u64;
        match addr.checked_sub(self.base) {
            Some(offset) if offset < size && len <= size - offset => Ok(offset as usize),
            Some(offset) if offset < size => {
                Err(AccessError::OutsideMemory { addr: self.base.saturating_add(size), access })
            }
            _ => Err(AccessError::OutsideMemory { addr, access }),
        }
    }
}

impl Translate for Ram {
    fn slices<F>(&self, addr: u64, len: u64, access: Access, mut each: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        if len == 0 {
            return Ok(());
        }
        let start = self.offset(addr, len, access)?;
        let end = start + len as usize;
        let mut at = start;
        while at < end {
            let piece = (self.piece - at as u64 % self.piece).min((end - at) as u64) as usize;
            // SAFETY: `offset` checked that the bytes lie in the mapping, which `self` keeps and
            // to which no reference is ever made.
            each(unsafe { HostSlice::new(self.mapping.start().add(at), piece) });
            at += piece;
        }
        Ok(())
    }

    fn window(&self, addr: u64, len: u64, access: Access) -> Result<Window, AccessError> {
        let offset = self.offset(addr, len, access)?;
        let keep = Arc::clone(&self.mapping);
        // SAFETY: `offset` checked that the bytes lie in the mapping, which `keep` holds and to
        // which no reference is ever made.
        let window = unsafe { Window::new(keep.start().add(offset), len as usize, keep) };
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        windows.retain(|window| !window.is_last());
        windows.push(window.clone());
        Ok(window)
    }
}

/// Windows of the areas of a split queue of `size` that begin at `addr` in `ram`, and the
/// configuration with which the device's end finds them; indirect descriptors allowed.
/// [`layout::offsets`](crate::layout::offsets) places the areas.
///
/// # Panics
/// They do not fit.
pub fn areas(
    ram: &Ram,
    addr: u64,
    size: u16,
    event_idx: bool,
) -> (driver::Rings, device::RingConfig) {
    areas_of(ram, addr, driver::QueueConfig { size, event_idx, packed: false })
}

/// As [`areas`], for either format.
///
/// # Panics
/// They do not fit.
pub fn areas_of(
    ram: &Ram,
    addr: u64,
    config: driver::QueueConfig,
) -> (driver::Rings, device::RingConfig) {
    let driver::QueueConfig { size, event_idx, packed } = config;
    let at = config.offsets();
    let whole = ram.window(addr, at.len as u64, Access::ReadWrite);
    let rings = driver::Rings::placed(&whole.expect("the areas lie in the memory"), &config);
    let [desc, avail, used] = [at.desc, at.avail, at.used].map(|offset| addr + offset as u64);
    let base = device::RingConfig::start(packed);
    let config =
        device::RingConfig { size, desc, avail, used, event_idx, indirect: true, packed, base };
    (rings.expect("there is room"), config)
}

/// Both ends of a split queue of `size` whose areas begin at `addr` in `ram`, which must hold
/// [`offsets(size).len`](crate::layout::offsets) bytes there; indirect descriptors allowed.
///
/// # Panics
/// They do not fit.
pub fn pair(ram: &Ram, addr: u64, size: u16, event_idx: bool) -> (driver::Queue, device::Queue) {
    pair_of(ram, addr, driver::QueueConfig { size, event_idx, packed: false })
}

/// As [`pair`], for either format.
///
/// # Panics
/// They do not fit.
pub fn pair_of(
    ram: &Ram,
    addr: u64,
    config: driver::QueueConfig,
) -> (driver::Queue, device::Queue) {
    let (rings, at) = areas_of(ram, addr, config);
    let driver = driver::Queue::with_config(config, rings).expect("a legal queue");
    let device = device::Queue::new(at, ram).expect("a legal queue");
    (driver, device)
}

impl device::Queue {
    /// As [`pop_more`](Self::pop_more), into `burst` after it is emptied.
    ///
    /// # Errors
    /// As there.
    pub fn pop_burst(
        &mut self,
        mem: &impl Translate,
        most: usize,
        burst: &mut Burst,
    ) -> Result<usize, RingError> {
        burst.clear();
        self.pop_more(mem, most, burst)
    }
}

impl Burst {
    /// The buffers of all chains, one after the other.
    pub fn descs(&self) -> Vec<Desc> {
        self.iter().flat_map(|taken| taken.descs()).copied().collect()
    }
}
