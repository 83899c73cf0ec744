//! Where the memory of bounce slots comes from.

use core::ptr::NonNull;
use std::alloc::{Layout, alloc_zeroed, dealloc};

use ringfence_iommu::{Address, HostAddr};

/// Memory that the CPU and, once it is mapped, a device reach: the same bytes for both.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<T> {
    /// Where it begins in the addresses that a domain maps to.
    pub target: T,
    /// Where it begins for this process.
    pub ptr: NonNull<u8>,
    /// How many bytes.
    pub len: u64,
    /// What `target` is a multiple of, at the least: as it was asked for.
    pub align: u64,
}

// SAFETY: it names memory, as its maker promised ([`BounceMemory`]), and may do so in any thread.
unsafe impl<T: Send> Send for Chunk<T> {}

/// Who supplies the memory of bounce slots: on demand, and gets it back when it has been idle.
///
/// # Safety
/// What [`take`](Self::take) returns is memory of that length, in one piece at `target`, aligned as
/// asked for, and at `ptr`; it stays there, readable and writable, and is nobody else's until it
/// is given back (for good, if it never is).
pub unsafe trait BounceMemory<T: Address>: Send + Sync {
    /// `len` bytes, whose `target` is a multiple of `align`, a power of two; `None` if there are none. What they hold does
    /// not matter.
    fn take(&self, len: u64, align: u64) -> Option<Chunk<T>>;

    /// Takes back what [`take`](Self::take) gave: no device reaches it any more.
    fn give_back(&self, chunk: Chunk<T>);
}

/// This process's own memory, from its heap.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostMemory;

impl HostMemory {
    fn layout(len: u64, align: u64) -> Option<Layout> {
        let layout = Layout::from_size_align(len.try_into().ok()?, align.try_into().ok()?).ok()?;
        (layout.size() > 0).then_some(layout)
    }
}

// SAFETY: heap memory stays where it is until it is freed, in `give_back` alone.
unsafe impl BounceMemory<HostAddr> for HostMemory {
    fn take(&self, len: u64, align: u64) -> Option<Chunk<HostAddr>> {
        let layout = Self::layout(len, align)?;
        // SAFETY: the layout is not empty.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Chunk { target: HostAddr(ptr.as_ptr().expose_provenance() as u64), ptr, len, align })
    }

    fn give_back(&self, chunk: Chunk<HostAddr>) {
        let Some(layout) = Self::layout(chunk.len, chunk.align) else { return };
        // SAFETY: `take` made it, with this layout.
        unsafe { dealloc(chunk.ptr.as_ptr(), layout) }
    }
}
