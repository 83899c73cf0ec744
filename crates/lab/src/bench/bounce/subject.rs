//! What is measured in one process: our pools through the DMA API, and a linear pool.

use std::sync::Arc;

use ringfence_dma::{
    BounceConfig, BounceLimits, BounceMemory, BouncePools, Chunk, Device, Direction, DmaConfig,
    HostMemory, Mapping, Policy, Written,
};
use ringfence_iommu::{
    Geometry, HostAddr, PageSizes, Range, SoftDomain, shootdown::Shootdown, table::Limits,
};
use ringfence_iova::{Aperture, Slabs};
use ringfence_sync::cpu::OsCpu;

use super::linear::{LONGEST, Linear, SLOT};
use crate::list::named;

named! {
    /// What is done with a buffer.
    Op, "unknown operation {:?}: there are {}":
    /// A slot is taken and given back, and nothing copied.
    Take = "take",
    /// The device reads: copied in.
    ToDevice = "to",
    /// The device writes all of it, and reports so: copied back.
    FromDevice = "from",
    /// The device writes an unknown part: copied in, and back.
    Preloaded = "preloaded",
    /// Copied in, and back.
    Both = "both",
}

impl Op {
    const fn direction(self) -> Direction {
        match self {
            Op::ToDevice => Direction::ToDevice,
            Op::FromDevice | Op::Preloaded => Direction::FromDevice,
            Op::Take | Op::Both => Direction::Bidirectional,
        }
    }

    /// Whether something comes back.
    pub(super) const fn comes_back(self) -> bool {
        !matches!(self, Op::Take | Op::ToDevice)
    }
}

/// Pools as threads use them, each with a number, that of its CPU among those that are used.
pub(super) trait Subject: Send + Sync {
    /// A buffer while the device has it.
    type Held: Send;

    /// Maps a buffer for the device; `None` if that fails, and the buffer is lost.
    fn begin(&self, thread: usize, buffer: Vec<u8>, op: Op) -> Option<Self::Held>;

    /// Unmaps it, after the device has written its first `written` bytes. `None` if it was not
    /// mapped.
    fn end(&self, held: Self::Held, op: Op, written: usize) -> Option<Vec<u8>>;

    /// Takes a slot and gives it back; false if there is none.
    fn take(&self, thread: usize, len: usize) -> bool;

    /// Where the device sees the buffer, and where that is in this process.
    fn seen(&self, held: &Self::Held) -> Option<(u64, *mut u8)>;

    /// Whether the device finds the buffer's bytes in the slot under `op`; else it finds zeros.
    fn loads(&self, op: Op) -> bool;

    /// Buffers that the device has; or bytes of slots, where the pool counts only these.
    fn in_use(&self) -> u64;
}

type Soft = Arc<SoftDomain<HostAddr>>;
type SoftDevice = Device<Soft, Arc<Slabs<OsCpu>>>;

/// Our pools: devices of one domain in this process, one whose driver knows how much was written,
/// and one whose driver does not.
pub(super) struct Ours {
    domain: Soft,
    reported: SoftDevice,
    unknown: SoftDevice,
}

impl Ours {
    /// Pools without slots.
    ///
    /// # Errors
    /// The pools cannot be set up.
    pub(super) fn new() -> anyhow::Result<Ours> {
        let sizes = PageSizes::from_granule(4096).expect("a power of two");
        let geometry = Geometry::new(sizes, Range::ALL);
        let domain: Soft = SoftDomain::new(geometry, Limits::NONE, Shootdown::new(1));
        let aperture = Aperture::new(0, (1 << 48) - 1, 4096)?;
        let allocator = Arc::new(Slabs::new(aperture, OsCpu::new()));
        // Room for all that is held meanwhile, in whole granules. The pools do not shrink
        // meanwhile: only maps and unmaps are measured.
        let limits =
            BounceLimits { max_bytes: 1 << 30, idle_ms: 1 << 30, ..BounceLimits::default() };
        let pools = {
            let (domain, allocator) = (Arc::clone(&domain), Arc::clone(&allocator));
            BouncePools::new(domain, allocator, HostMemory, limits)?
        };
        let device = |written| {
            let bounce = BounceConfig { quota: 1 << 30, written, ..BounceConfig::default() };
            let config = DmaConfig { bounce, ..DmaConfig::new(Policy::Bounce) };
            let (domain, allocator) = (Arc::clone(&domain), Arc::clone(&allocator));
            Device::builder(domain).allocator(allocator).config(config).pools(&pools).build()
        };
        let (reported, unknown) = (device(Written::Reported)?, device(Written::Unknown)?);
        Ok(Ours { domain, reported, unknown })
    }

    fn device(&self, op: Op) -> &SoftDevice {
        if op == Op::Preloaded { &self.unknown } else { &self.reported }
    }
}

impl Subject for Ours {
    type Held = Mapping<Vec<u8>>;

    #[inline]
    fn begin(&self, _: usize, buffer: Vec<u8>, op: Op) -> Option<Mapping<Vec<u8>>> {
        self.device(op).map(buffer, op.direction()).ok()
    }

    #[inline]
    fn end(&self, mut held: Mapping<Vec<u8>>, op: Op, written: usize) -> Option<Vec<u8>> {
        if op == Op::FromDevice {
            held.note_written(0..written as u64).ok()?;
        }
        held.unmap().ok()
    }

    #[inline]
    fn take(&self, _: usize, len: usize) -> bool {
        self.reported.take_buffer(len as u64, Direction::Bidirectional).is_ok()
    }

    fn seen(&self, held: &Mapping<Vec<u8>>) -> Option<(u64, *mut u8)> {
        let iova = held.iova();
        let [whole] = held.segments() else { return None };
        if !held.is_bounced() || (whole.addr, whole.len) != (iova.0, held.len()) {
            return None;
        }
        let mapping = self.domain.mapping(iova)?;
        let inside = iova.0 - mapping.range.first().0;
        let addr = usize::try_from(mapping.target.checked_add(inside)?).ok()?;
        Some((iova.0, std::ptr::with_exposed_provenance_mut(addr)))
    }

    fn loads(&self, op: Op) -> bool {
        op != Op::FromDevice
    }

    fn in_use(&self) -> u64 {
        self.reported.pools().map_or(0, |pools| pools.stats().slots)
    }
}

/// A linear pool, and its block.
pub(super) struct SwiotlbLike {
    slots: Linear,
    block: Chunk<HostAddr>,
}

// SAFETY: the block is memory that lives as long as the pool; a thread accesses it only in slots
// that it has taken.
unsafe impl Sync for SwiotlbLike {}

impl Drop for SwiotlbLike {
    fn drop(&mut self) {
        // SAFETY: it was taken when this was made, and goes with it.
        unsafe { HostMemory.give_back(self.block) };
    }
}

impl SwiotlbLike {
    /// With a block of about so many bytes, and an area for each CPU; `None` if there is no memory.
    pub(super) fn new(bytes: u64, cpus: usize) -> Option<SwiotlbLike> {
        let slots = Linear::new(bytes, cpus);
        let block = HostMemory.take(slots.bytes(), 4096)?;
        // SAFETY: the block has this length, and nothing else refers to it yet. Writing makes its
        // pages present before anything is timed, as those of a block that was set aside at boot.
        unsafe { block.ptr.as_ptr().write_bytes(0, slots.bytes() as usize) };
        Some(SwiotlbLike { slots, block })
    }

    /// How many buffers of this length it holds when it is full.
    pub(super) fn holds(&self, len: usize) -> usize {
        // From a page on, a buffer begins at one.
        let each = (len as u64).next_multiple_of(if len < 4096 { SLOT } else { 4096 });
        let segments = self.slots.bytes() / LONGEST;
        LONGEST.checked_div(each).map_or(0, |in_one| (segments * in_one) as usize)
    }

    fn at(&self, offset: u64) -> *mut u8 {
        self.block.ptr.as_ptr().wrapping_add(offset as usize)
    }
}

impl Subject for SwiotlbLike {
    /// A buffer and where its copy begins.
    type Held = (Vec<u8>, u64);

    /// Copies in whatever the direction: it does not know what the device will write.
    #[inline]
    fn begin(&self, thread: usize, buffer: Vec<u8>, _op: Op) -> Option<Self::Held> {
        let (original, len) = (buffer.as_ptr().addr() as u64, buffer.len());
        let offset = self.slots.take(thread, original, len as u64, 1)?;
        // SAFETY: the slots from `offset` hold `len` bytes of the block and are this buffer's alone,
        // which lies elsewhere.
        unsafe { self.at(offset).copy_from_nonoverlapping(buffer.as_ptr(), len) };
        Some((buffer, offset))
    }

    #[inline]
    fn end(&self, (mut buffer, offset): Self::Held, op: Op, _: usize) -> Option<Vec<u8>> {
        let (original, len) = (buffer.as_ptr().addr() as u64, buffer.len());
        if op.comes_back() {
            // SAFETY: as in `begin`, the other way.
            unsafe { buffer.as_mut_ptr().copy_from_nonoverlapping(self.at(offset), len) };
        }
        (self.slots.give_back(offset) == Some((original, len as u64))).then_some(buffer)
    }

    #[inline]
    fn take(&self, thread: usize, len: usize) -> bool {
        let taken = self.slots.take(thread, 0, len as u64, 1);
        taken.is_some_and(|offset| self.slots.give_back(offset).is_some())
    }

    fn seen(&self, (_, offset): &Self::Held) -> Option<(u64, *mut u8)> {
        Some((*offset, self.at(*offset)))
    }

    fn loads(&self, _op: Op) -> bool {
        true
    }

    fn in_use(&self) -> u64 {
        self.slots.used()
    }
}
