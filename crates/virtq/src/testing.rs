//! Memory for the tests of whoever drives a queue: a mapping between two guard pages.

use std::sync::Arc;

use ringfence_mem::{Access, AccessError, HostSlice, Translate, Window};

use crate::{device, driver};

/// Memory that a device sees at one address. An access past either end of the mapping, through
/// whatever pointer, hits a guard page.
#[derive(Clone, Debug)]
pub struct Ram {}

impl Ram {
    /// Zeroed memory of at least `len` bytes (whole pages) at the device's address `base` (a
    /// multiple of 4096, so that the alignment of addresses is that of memory).
    ///
    /// # Panics
    /// If there is no memory.
    pub fn new(base: u64, len: usize) -> Ram {
        let _ = (base, len);
        todo!()
    }

    /// The same memory, seen in pieces that do not cross a multiple of `piece` bytes, as if each
    /// were mapped elsewhere. Windows still lie in one piece.
    pub fn fragmented(self, piece: u64) -> Ram {
        let _ = piece;
        todo!()
    }

    /// The address of its first byte, as the device sees it.
    pub fn base(&self) -> u64 {
        todo!()
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        todo!()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Translate for Ram {
    fn slices<F>(&self, addr: u64, len: u64, access: Access, each: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        let _ = (addr, len, access, each);
        todo!()
    }

    fn window(&self, addr: u64, len: u64, access: Access) -> Result<Window, AccessError> {
        let _ = (addr, len, access);
        todo!()
    }
}

/// Both ends of a queue of `size` whose areas begin at `addr` in `ram`, which must hold
/// [`offsets(size).len`](crate::layout::offsets) bytes there; indirect descriptors allowed.
///
/// # Panics
/// If they do not fit.
pub fn pair(ram: &Ram, addr: u64, size: u16, event_idx: bool) -> (driver::Queue, device::Queue) {
    let _ = (ram, addr, size, event_idx);
    let _: Option<Arc<()>> = None;
    todo!()
}
