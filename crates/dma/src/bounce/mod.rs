//! Bounce pools: memory that stays mapped, to and from which buffers are copied.

mod copy;
mod pools;
mod taken;

use core::ptr::NonNull;
use std::alloc::{Layout, alloc_zeroed, dealloc};

use ringfence_iommu::{Address, HostAddr, Range};

use crate::Direction;

pub(crate) use copy::{Bytes, SlicesMut};
pub(crate) use pools::Client;
pub use pools::{BounceLimits, BouncePools, BounceStats, ClassStats, Holder};
pub use taken::PoolBuffer;

/// How a device bounces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BounceConfig {
    /// Under [`Policy::Bounce`](crate::Policy::Bounce), the longest mapping that is copied, in
    /// bytes; a longer one is mapped, strictly. Default: 1 MiB.
    pub threshold: u64,
    /// The most bytes of bounce slots that the device may hold at a time. Default: 256 MiB.
    pub quota: u64,
    /// Whether the driver reports how much the device wrote.
    pub written: Written,
}

impl Default for BounceConfig {
    fn default() -> BounceConfig {
        BounceConfig { threshold: 1 << 20, quota: 256 << 20, written: Written::Unknown }
    }
}

/// Whether the driver reports how much of a buffer the device wrote (rule [L49], as far as it
/// applies here).
///
/// [L49]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l49
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Written {
    /// It does not: a slot that the device may write is first loaded with the buffer's bytes, and
    /// all of it is copied back, so that what the device did not write stays as it was.
    #[default]
    Unknown,
    /// It does, by [`Mapping::note_written`](crate::Mapping::note_written) before the unmap
    /// (virtio's used length). A slot that the device only writes is not loaded but zero, and only
    /// what was noted is copied back. If nothing is noted for a mapping, all of it is copied back,
    /// zeros where the device wrote nothing.
    Reported,
}

/// A piece of memory that a pool has handed out. Only the pool may duplicate this value, as holding
/// it means owning the memory.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Its granules, in the device's addresses.
    pub(crate) range: Range,
    /// Its memory, for the CPU.
    pub(crate) ptr: NonNull<u8>,
    /// What the device may do.
    pub(crate) direction: Direction,
    /// How many bytes from its beginning may be non-zero.
    pub(crate) dirty: u64,
    /// The number of the device that had it last; used by the pools only.
    pub(crate) key: u64,
}

// SAFETY: within this process only the holder of a slot touches its memory, from any thread.
unsafe impl Send for Slot {}
// SAFETY: nothing is done to its memory through a shared reference.
unsafe impl Sync for Slot {}

impl Bounced {
    /// A copy of `len` bytes, in a slot that was taken for it.
    pub(crate) fn new(slot: Slot, len: u64, direction: Direction) -> Bounced {
        let back = direction != Direction::ToDevice;
        Bounced { slot, len, back, noted: false, clean: 0 }
    }
}

/// A mapping that is a copy.
#[derive(Debug)]
pub(crate) struct Bounced {
    pub(crate) slot: Slot,
    /// The length of the buffer, in bytes.
    pub(crate) len: u64,
    /// Whether the device may write, so that bytes must be copied back.
    pub(crate) back: bool,
    /// Whether the driver has noted what the device wrote; then that was copied back already, and
    /// the unmap copies nothing.
    pub(crate) noted: bool,
    /// How many bytes from the beginning were copied back and zeroed in the slot.
    pub(crate) clean: u64,
}

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
///
/// Safe code gives nothing back:
/// ```compile_fail,E0133
/// use ringfence_dma::{BounceMemory, HostMemory};
/// let chunk = HostMemory.take(4096, 4096).unwrap();
/// HostMemory.give_back(chunk);
/// ```
/// The same compiles with a promise:
/// ```
/// # use ringfence_dma::{BounceMemory, HostMemory};
/// let chunk = HostMemory.take(4096, 4096).unwrap();
/// // SAFETY: nothing uses it.
/// unsafe { HostMemory.give_back(chunk) };
/// ```
pub unsafe trait BounceMemory<T: Address>: Send + Sync {
    /// `len` bytes, whose `target` is a multiple of `align`, a power of two; `None` if there is no
    /// memory. Their contents do not matter.
    fn take(&self, len: u64, align: u64) -> Option<Chunk<T>>;

    /// Takes back what [`take`](Self::take) returned.
    ///
    /// # Safety
    /// `take` of this value returned `chunk`, which was not given back since, and nothing reaches its
    /// memory any more, no device either.
    unsafe fn give_back(&self, chunk: Chunk<T>);
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

    unsafe fn give_back(&self, chunk: Chunk<HostAddr>) {
        let Some(layout) = Self::layout(chunk.len, chunk.align) else { return };
        // SAFETY: `take` made it, with this layout, as the caller promises.
        unsafe { dealloc(chunk.ptr.as_ptr(), layout) }
    }
}
