//! How a device end reaches memory: always by address, always checked.

use core::{fmt, ptr::NonNull};
use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering},
    },
};

use crate::HostSlice;

/// What an access does to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// The device reads.
    Read,
    /// The device writes.
    Write,
    /// The device does both.
    ReadWrite,
}

impl Access {
    /// Whether it reads.
    pub const fn reads(self) -> bool {
        matches!(self, Access::Read | Access::ReadWrite)
    }

    /// Whether it writes.
    pub const fn writes(self) -> bool {
        matches!(self, Access::Write | Access::ReadWrite)
    }
}

/// Why an address could not be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// Translation has nothing at the address.
    #[error("{access:?} at {addr:#x}: not mapped")]
    Unmapped {
        /// The first address without a translation.
        addr: u64,
        /// The access that failed.
        access: Access,
    },
    /// Not reachable yet, for instance after an IOTLB miss. The access may be retried once the
    /// translation has arrived.
    #[error("{access:?} at {addr:#x}: not reachable yet")]
    Again {
        /// The first address that cannot be reached yet.
        addr: u64,
        /// The access that failed.
        access: Access,
    },
    /// There is a translation, but it does not permit this access.
    #[error("{access:?} at {addr:#x}: not permitted")]
    NotPermitted {
        /// The first address that does not permit it.
        addr: u64,
        /// The access that failed.
        access: Access,
    },
    /// The (translated) address lies in no memory region.
    #[error("{access:?} at {addr:#x}: outside of memory")]
    OutsideMemory {
        /// The first address outside.
        addr: u64,
        /// The access that failed.
        access: Access,
    },
    /// Address plus length passes 2^64.
    #[error("{len} bytes at {addr:#x} pass the end of the address space")]
    Overflow {
        /// The address.
        addr: u64,
        /// The length.
        len: u64,
    },
    /// Bytes that must lie in one piece (a ring) do not.
    #[error("{len} bytes at {addr:#x} do not lie in one piece")]
    Fragmented {
        /// The address.
        addr: u64,
        /// The length.
        len: u64,
    },
    /// The memory behind the address is gone: its file was truncated.
    #[error("the memory behind {addr:#x} is gone: its file was truncated")]
    Lost {
        /// The address.
        addr: u64,
    },
}

/// How a device end reaches memory. A plain table of regions implements it for guest-physical
/// addresses, an IOTLB for IOVAs.
///
/// Each worker thread has its own value, which caches inside, hence `&self`.
pub trait Translate {
    /// Calls `each` with every piece of the `len` bytes at `addr`, in order.
    ///
    /// # Errors
    /// Some address cannot be reached; pieces before it may have been visited already, as a
    /// device's DMA may have moved data before the address that faults. A `len` of 0 visits
    /// nothing and succeeds.
    fn slices<F>(&self, addr: u64, len: u64, access: Access, each: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>);

    /// A lasting view of the `len` bytes at `addr` (`len` > 0), for ring areas: translated once,
    /// valid until an invalidation touches it.
    ///
    /// # Errors
    /// Some address cannot be reached, or the bytes do not lie in one piece.
    fn window(&self, addr: u64, len: u64, access: Access) -> Result<Window, AccessError>;

    /// Checks the accesses made since the last call: an error if any may have touched memory that
    /// is gone (a truncated file). Call it before results are published.
    ///
    /// # Errors
    /// [`AccessError::Lost`].
    fn check(&self) -> Result<(), AccessError> {
        Ok(())
    }

    /// A fast path: the `len` bytes at `addr` (`len` > 0), if a quick lookup finds that
    /// [`slices`](Self::slices) would give them as one piece. On `None` the caller uses `slices`;
    /// an implementation may always return `None`.
    #[inline]
    fn piece(&self, addr: u64, len: u64, access: Access) -> Option<HostSlice<'_>> {
        let _ = (addr, len, access);
        None
    }

    /// Copies `out.len()` bytes from `addr`.
    ///
    /// # Errors
    /// As [`slices`](Self::slices).
    #[inline(always)]
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let len = out.len() as u64;
        // Inlined, so that the copy has a constant length where the caller's buffer has one.
        if let Some(piece) = self.piece(addr, len, Access::Read)
            && piece.len() == out.len()
        {
            piece.copy_to(out);
            return Ok(());
        }
        read_pieces(self, addr, out)
    }

    /// Copies `data` to `addr`.
    ///
    /// # Errors
    /// As [`slices`](Self::slices).
    #[inline(always)]
    fn write(&self, addr: u64, data: &[u8]) -> Result<(), AccessError> {
        let len = data.len() as u64;
        if let Some(piece) = self.piece(addr, len, Access::Write)
            && piece.len() == data.len()
        {
            piece.copy_from(data);
            self.mark(piece);
            return Ok(());
        }
        write_pieces(self, addr, data)
    }

    /// Marks bytes in the dirty log, if writes are logged (rule [D26]): a piece that
    /// [`slices`](Self::slices) gave for a write, or a part of it. Code that writes otherwise than
    /// by [`write`](Self::write) calls this once the bytes are there and before the driver is
    /// notified.
    ///
    /// [D26]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d26
    #[inline]
    fn mark(&self, piece: HostSlice<'_>) {
        let _ = piece;
    }

    /// Whether writes are logged, so that it is worth [marking](Self::mark) them.
    #[inline]
    fn is_logged(&self) -> bool {
        false
    }
}

/// [`Translate::read`] of what may lie in several pieces.
fn read_pieces<T>(mem: &T, addr: u64, out: &mut [u8]) -> Result<(), AccessError>
where
    T: Translate + ?Sized,
{
    let (len, mut done) = (out.len() as u64, 0);
    mem.slices(addr, len, Access::Read, |piece| done += piece.copy_to(&mut out[done..]))
}

/// [`Translate::write`] of what may lie in several pieces.
fn write_pieces<T>(mem: &T, addr: u64, data: &[u8]) -> Result<(), AccessError>
where
    T: Translate + ?Sized,
{
    let (len, mut done) = (data.len() as u64, 0);
    mem.slices(addr, len, Access::Write, |piece| {
        done += piece.copy_from(&data[done..]);
        mem.mark(piece);
    })
}

/// A lasting view of one piece of shared memory, such as a ring area.
///
/// It keeps the bytes mapped in this process. [`is_valid`](Self::is_valid) returns whether the
/// *address* that it was made from still leads there; an invalidation clears that.
#[derive(Clone)]
pub struct Window {
    base: NonNull<u8>,
    len: usize,
    valid: Arc<AtomicBool>,
    /// Keeps the memory mapped.
    keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the pointer leads to shared memory that `keep` holds mapped wherever the window goes, and
// every access goes through atomics or copies of plain bytes.
unsafe impl Send for Window {}
// SAFETY: as above; no method has interior state beside the atomics.
unsafe impl Sync for Window {}

impl fmt::Debug for Window {
    ringfence_sync::shows!(Window as it, len: it.len, valid: it.is_valid());
}

impl Window {
    /// A view of `len` bytes at `base`.
    ///
    /// # Safety
    /// The bytes stay mapped readable and writable for as long as `keep` lives, and no Rust
    /// reference to any of them exists meanwhile.
    pub unsafe fn new(base: NonNull<u8>, len: usize, keep: Arc<dyn Any + Send + Sync>) -> Window {
        Window { base, len, valid: Arc::new(AtomicBool::new(true)), keep }
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the view begins at a multiple of `align` in this process's addresses, as
    /// [`u16_at`](Self::u16_at) and [`u32_at`](Self::u32_at) need. Alignment of the address that a
    /// peer chose implies little about that: check before a ring is built on a view.
    pub fn is_aligned(&self, align: usize) -> bool {
        (self.base.as_ptr() as usize).is_multiple_of(align)
    }

    /// Whether the translation that this view came from is still valid.
    // Ordering: a thread that uses a window has a quiet point, before which it is invalidated and
    // before which nothing else uses the memory: that orders them, not this flag.
    #[inline]
    pub fn is_valid(&self) -> bool {
        self.valid.load(Ordering::Acquire)
    }

    /// Marks this view, and all clones of it, as no longer valid.
    // Ordering: see `is_valid`.
    pub fn invalidate(&self) {
        self.valid.store(false, Ordering::Release);
    }

    /// Whether this is the last of the view, its clones and their parts, so that its maker may
    /// forget it.
    pub fn is_last(&self) -> bool {
        Arc::strong_count(&self.valid) == 1
    }

    /// The part of `len` bytes from `offset`, sharing the validity of the whole; `None` if it
    /// would pass the end.
    pub fn part(&self, offset: usize, len: usize) -> Option<Window> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| Window {
            // SAFETY: `offset` lies within the view (checked above).
            base: unsafe { self.base.add(offset) },
            len,
            valid: Arc::clone(&self.valid),
            keep: Arc::clone(&self.keep),
        })
    }

    /// The bytes as a slice to copy from and to.
    pub fn slice(&self) -> HostSlice<'_> {
        // SAFETY: `keep`, borrowed through `self`, holds the bytes mapped.
        unsafe { HostSlice::new(self.base, self.len) }
    }

    /// Copies bytes out from `offset`.
    ///
    /// # Panics
    /// If that passes the end: the owner of a ring computes its offsets, a peer never does.
    #[inline]
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        self.slice_at(offset, out.len()).copy_to(out);
    }

    /// Copies bytes in at `offset`.
    ///
    /// # Panics
    /// As [`read`](Self::read).
    #[inline]
    pub fn write(&self, offset: usize, data: &[u8]) {
        self.slice_at(offset, data.len()).copy_from(data);
    }

    /// The 16-bit word at `offset`, native order.
    ///
    /// # Panics
    /// If that passes the end or is not aligned in memory.
    #[inline]
    pub fn u16_at(&self, offset: usize) -> &AtomicU16 {
        let at = self.slice_at(offset, 2).as_ptr();
        assert!((at as usize).is_multiple_of(2), "a 16-bit ring field must be aligned");
        // SAFETY: in bounds and aligned (checked above), mapped while `self` lives; peers access
        // it as an atomic too.
        unsafe { AtomicU16::from_ptr(at.cast()) }
    }

    /// The 32-bit word at `offset`, native order.
    ///
    /// # Panics
    /// As [`u16_at`](Self::u16_at).
    #[inline]
    pub fn u32_at(&self, offset: usize) -> &AtomicU32 {
        let at = self.slice_at(offset, 4).as_ptr();
        assert!((at as usize).is_multiple_of(4), "a 32-bit ring field must be aligned");
        // SAFETY: as in `u16_at`.
        unsafe { AtomicU32::from_ptr(at.cast()) }
    }

    #[inline]
    fn slice_at(&self, offset: usize, len: usize) -> HostSlice<'_> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "past the window");
        // SAFETY: in bounds (checked above); mapped while `self` lives.
        unsafe { HostSlice::new(self.base.add(offset), len) }
    }
}
