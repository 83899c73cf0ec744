//! Small pieces of coherent memory: descriptors, headers, mailboxes.
//!
//! [`Device::alloc_coherent`](crate::Device::alloc_coherent) maps whole granules, with a request
//! to the IOMMU and a wait for it; a descriptor of 64 bytes wants neither a granule nor a wait. A
//! [`CoherentPool`] maps chunks and cuts blocks from them.

mod buddy;

use core::fmt;
use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use ringfence_iommu::{Domain, Iova};
use ringfence_iova::Allocator;

use self::buddy::{Buddy, Place};
use crate::{Coherent, Device, DmaBuffer, Error, OutOfBounds, SharedMemory};

/// The logarithm of the smallest block: no two blocks share a cache line.
const SMALLEST: u32 = 6;

/// Memory that a pool can cut up: what is done to it goes to a part of it.
///
/// Offsets lie in the memory: the pool sees to that.
pub trait PoolMemory: SharedMemory {
    /// Copies from `offset` on.
    fn read(&self, offset: u64, bytes: &mut [u8]);
    /// Copies to `offset`.
    fn write(&self, offset: u64, bytes: &[u8]);
    /// Fills `len` bytes from `offset` on with zeros.
    fn zero(&self, offset: u64, len: u64);
}

/// How a pool grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolLimits {
    /// Bytes of a chunk, and of the largest block: a power of two, whole granules of domain and
    /// allocator.
    pub chunk: u64,
    /// Bytes of all chunks together.
    pub max: u64,
}

impl Default for PoolLimits {
    /// Chunks of 64 KiB, 4 MiB in all.
    fn default() -> PoolLimits {
        PoolLimits { chunk: 64 << 10, max: 4 << 20 }
    }
}

/// Why a pool gave no block, or could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// Chunks of this size cannot be mapped or cut up.
    #[error("a chunk of {chunk:#x} bytes is no power of two of whole granules of {granule:#x}")]
    Chunk {
        /// What was asked for.
        chunk: u64,
        /// The larger granule of domain and allocator.
        granule: u64,
    },
    /// A block of no bytes.
    #[error("a block of no bytes")]
    Empty,
    /// No chunk holds such a block.
    #[error("{asked:#x} bytes are more than a chunk of {chunk:#x} holds")]
    TooLarge {
        /// What was asked for.
        asked: u64,
        /// Bytes of a chunk.
        chunk: u64,
    },
    /// The pool has grown as far as it may, and no hole is large enough.
    #[error("no hole for {asked:#x} bytes, and the pool has {used:#x} of {max:#x} bytes")]
    Full {
        /// What was asked for.
        asked: u64,
        /// Bytes of all chunks.
        used: u64,
        /// The bound.
        max: u64,
    },
    /// Whoever supplies memory has none.
    #[error("there is no memory for another chunk")]
    NoMemory,
    /// What was supplied is not as long as a chunk, or not in one piece for the device, or (under
    /// policy `off`) not aligned to its length.
    #[error("the memory supplied for a chunk is not one aligned piece of its length")]
    Unfit,
    /// A chunk could not be mapped.
    #[error("cannot map a chunk: {0}")]
    Map(#[from] Error),
}

/// What a pool holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Chunks that are mapped.
    pub chunks: u64,
    /// Bytes of them, and of those that could not be unmapped.
    pub chunk_bytes: u64,
    /// Blocks in use.
    pub blocks: u64,
    /// Bytes of them, rounded up as they are.
    pub block_bytes: u64,
}

/// A pool of small blocks of coherent memory. Cheap to clone; all clones are the same pool.
///
/// Blocks are powers of two from 64 bytes to a chunk, aligned to their size for the device, and
/// zeroed. A chunk is mapped when no hole is left; one that falls empty is unmapped and given back,
/// but for one that is kept for the next block.
pub struct CoherentPool<B: PoolMemory>(Arc<Inner<B>>);

struct Inner<B> {
    limits: PoolLimits,
    /// Maps another chunk. Held while that is done, so that a crowd that finds no hole maps one
    /// chunk, and others find holes meanwhile.
    grow: Mutex<Grow<B>>,
    state: Mutex<State<B>>,
}

type Grow<B> = Box<dyn FnMut() -> Result<Coherent<B>, PoolError> + Send>;

struct State<B> {
    buddy: Buddy,
    chunks: BTreeMap<u64, Arc<Coherent<B>>>,
    /// The chunk that is kept although it is empty.
    spare: Option<u64>,
    next: u64,
    stats: PoolStats,
}

impl<B: PoolMemory> Clone for CoherentPool<B> {
    fn clone(&self) -> Self {
        CoherentPool(Arc::clone(&self.0))
    }
}

impl<B: PoolMemory> CoherentPool<B> {
    /// An empty pool of memory of `device`. `supply` is asked for chunks: memory of so many bytes,
    /// in one piece and beginning with a granule. What it gave is dropped when a chunk goes.
    ///
    /// # Errors
    /// The chunks' size makes no sense.
    pub fn new<D, A>(
        device: &Device<D, A>,
        limits: PoolLimits,
        mut supply: impl FnMut(u64) -> Option<B> + Send + 'static,
    ) -> Result<Self, PoolError>
    where
        D: Domain + 'static,
        A: Allocator + 'static,
        B: DmaBuffer<D::Target> + 'static,
    {
        let chunk = limits.chunk;
        let granule = device.domain().geometry().page_sizes.granule();
        let granule = granule.max(device.allocator().granule()).max(1 << SMALLEST);
        if !chunk.is_power_of_two() || !chunk.is_multiple_of(granule) {
            return Err(PoolError::Chunk { chunk, granule });
        }
        let device = device.clone();
        let grow = move || {
            let memory = supply(chunk).ok_or(PoolError::NoMemory)?;
            let coherent = device.alloc_coherent(memory).map_err(|failed| failed.error())?;
            let fits = match coherent.segments() {
                [only] => only.len == chunk && only.addr.is_multiple_of(chunk),
                _ => false,
            };
            if fits { Ok(coherent) } else { Err(PoolError::Unfit) }
        };
        Ok(CoherentPool(Arc::new(Inner {
            limits,
            grow: Mutex::new(Box::new(grow)),
            state: Mutex::new(State {
                buddy: Buddy::new(SMALLEST, chunk.trailing_zeros()),
                chunks: BTreeMap::new(),
                spare: None,
                next: 0,
                stats: PoolStats::default(),
            }),
        })))
    }

    /// A block of at least `len` bytes, all zero.
    ///
    /// # Errors
    /// It is larger than a chunk, or there is no hole for it and no chunk to be had.
    pub fn alloc(&self, len: u64) -> Result<Block<B>, PoolError> {
        let chunk = self.0.limits.chunk;
        if len == 0 {
            return Err(PoolError::Empty);
        }
        if len > chunk {
            return Err(PoolError::TooLarge { asked: len, chunk });
        }
        let order = len.next_power_of_two().trailing_zeros().max(SMALLEST);
        let found = self.0.state.lock().alloc(order);
        let (place, chunk) = match found {
            Some(found) => found,
            None => self.grow(len, order)?,
        };
        let block = Block { pool: Arc::clone(&self.0), chunk: Some(chunk), place, order };
        // It may have been someone else's: what he left there is not for others.
        block.memory().zero(place.1, block.len());
        Ok(block)
    }

    /// What the pool holds.
    pub fn stats(&self) -> PoolStats {
        self.0.state.lock().stats
    }

    fn grow(&self, asked: u64, order: u32) -> Result<(Place, Arc<Coherent<B>>), PoolError> {
        let PoolLimits { chunk, max } = self.0.limits;
        let mut grow = self.0.grow.lock();
        {
            let mut state = self.0.state.lock();
            if let Some(found) = state.alloc(order) {
                return Ok(found);
            }
            let used = state.stats.chunk_bytes;
            if used.checked_add(chunk).is_none_or(|bytes| bytes > max) {
                return Err(PoolError::Full { asked, used, max });
            }
        }
        // Nobody else grows meanwhile, so the bound holds.
        let coherent = grow()?;
        let mut state = self.0.state.lock();
        let number = state.next;
        state.next += 1;
        state.chunks.insert(number, Arc::new(coherent));
        state.stats.chunks += 1;
        state.stats.chunk_bytes += chunk;
        state.buddy.add(number);
        Ok(state.alloc(order).expect("a chunk holds every block"))
    }
}

impl<B> State<B> {
    fn alloc(&mut self, order: u32) -> Option<(Place, Arc<Coherent<B>>)> {
        let place = self.buddy.alloc(order)?;
        self.stats.blocks += 1;
        self.stats.block_bytes += 1 << order;
        if self.spare == Some(place.0) {
            self.spare = None;
        }
        let chunk = self.chunks.get(&place.0).expect("blocks lie in chunks");
        Some((place, Arc::clone(chunk)))
    }

    /// Takes a block back. Returns its chunk if that is to go.
    fn free(&mut self, place: Place, order: u32) -> Option<Arc<Coherent<B>>> {
        self.stats.blocks -= 1;
        self.stats.block_bytes -= 1 << order;
        self.buddy.free(place, order);
        let number = place.0;
        if !self.buddy.is_empty(number) {
            return None;
        }
        if self.spare.is_none() {
            self.spare = Some(number);
            return None;
        }
        self.buddy.remove(number);
        self.stats.chunks -= 1;
        self.chunks.remove(&number)
    }
}

impl<B: PoolMemory> fmt::Debug for CoherentPool<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CoherentPool")
            .field("limits", &self.0.limits)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// A piece of a pool's memory, shared with the device until it is dropped. It may outlive the pool.
///
/// A block that is dropped stays within the device's reach as long as its chunk does: the next owner
/// gets it zeroed, and no other protection.
#[must_use = "dropping a block gives it back"]
pub struct Block<B: PoolMemory> {
    pool: Arc<Inner<B>>,
    /// Taken by `drop`.
    chunk: Option<Arc<Coherent<B>>>,
    place: Place,
    order: u32,
}

impl<B: PoolMemory> Block<B> {
    fn chunk(&self) -> &Coherent<B> {
        self.chunk.as_ref().expect("a block has its chunk until it is dropped")
    }

    /// The address of the first byte for the device, a multiple of [`len`](Self::len).
    pub fn iova(&self) -> Iova {
        // A chunk is one segment, and was checked to hold all of its blocks.
        Iova(self.chunk().iova().0 + self.place.1)
    }

    /// How many bytes there are: what was asked for, rounded up to a power of two.
    pub fn len(&self) -> u64 {
        1 << self.order
    }

    /// Always false.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The chunk's memory, other blocks and all; this one begins at [`offset`](Self::offset).
    pub fn memory(&self) -> &B {
        self.chunk().memory()
    }

    /// Where in its chunk the block begins.
    pub fn offset(&self) -> u64 {
        self.place.1
    }

    /// Copies from `at` on, counted from the block's start.
    ///
    /// # Errors
    /// That is not all in the block.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), OutOfBounds> {
        let offset = self.check(at, bytes.len())?;
        self.memory().read(offset, bytes);
        Ok(())
    }

    /// Copies to `at`, counted from the block's start.
    ///
    /// # Errors
    /// That is not all in the block.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let offset = self.check(at, bytes.len())?;
        self.memory().write(offset, bytes);
        Ok(())
    }

    fn check(&self, at: u64, len: usize) -> Result<u64, OutOfBounds> {
        let end = at.saturating_add(len as u64);
        if end <= self.len() {
            Ok(self.place.1 + at)
        } else {
            Err(OutOfBounds { start: at, end, len: self.len() })
        }
    }
}

impl<B: PoolMemory> Drop for Block<B> {
    fn drop(&mut self) {
        // First let go of the chunk, so that whoever finds it empty has it alone.
        self.chunk = None;
        let gone = self.pool.state.lock().free(self.place, self.order);
        // Not under the lock: to unmap it is to wait for the device.
        let Some(coherent) = gone.and_then(Arc::into_inner) else { return };
        // What could not be unmapped is leaked, and counts for good: the bound is one of memory.
        if coherent.free().is_ok() {
            self.pool.state.lock().stats.chunk_bytes -= self.pool.limits.chunk;
        }
    }
}

impl<B: PoolMemory> fmt::Debug for Block<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block").field("iova", &self.iova()).field("len", &self.len()).finish()
    }
}
