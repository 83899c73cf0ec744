//! Where the memory of bounce slots comes from.

use core::ptr::NonNull;
use std::alloc::{Layout, alloc_zeroed, dealloc};

use ringfence_iommu::{Address, HostAddr};

/// Memory that the CPU can access and, once it is mapped, a device: the same bytes for both.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<T> {
    /// Its first byte, in the addresses that a domain maps to.
    pub target: T,
    /// Its first byte, for this process.
    pub ptr: NonNull<u8>,
    /// How many bytes.
    pub len: u64,
    /// The requested alignment of `target`.
    pub align: u64,
}

// SAFETY: it refers to memory, as its maker promised ([`BounceMemory`]), which any thread may
// access.
unsafe impl<T: Send> Send for Chunk<T> {}

/// Supplies the memory of bounce slots: on demand, and gets it back when it has been idle.
///
/// # Safety
/// [`take`](Self::take) returns memory of that length, in one piece at `target`, aligned as
/// requested, and at `ptr`; it stays there, readable and writable, and nothing else uses it until
/// it is given back (for ever, if it never is).
pub unsafe trait BounceMemory<T: Address>: Send + Sync {
    /// `len` bytes, whose `target` is a multiple of `align`, a power of two; `None` if there is no
    /// memory. Their contents do not matter.
    fn take(&self, len: u64, align: u64) -> Option<Chunk<T>>;

    /// Takes back what [`take`](Self::take) returned: no device reaches it any more.
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

// SAFETY: heap memory stays where it is until it is freed, which only `give_back` does.
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
