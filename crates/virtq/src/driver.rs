//! The driver's end of a virtqueue.

mod end;
mod names;
mod packed;
mod split;

use ringfence_mem::Window;

pub use self::{end::End, packed::Packed, split::Split};
use crate::{AddError, Area, Desc, RingError, layout};

/// The shape of a queue, and what was negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// How many descriptors: at most 32768; a power of two if the ring is split.
    pub size: u16,
    /// Whether `EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// Whether `RING_PACKED` was negotiated.
    pub packed: bool,
}

impl QueueConfig {
    /// Where the areas lie in one allocation, and how long that is.
    pub const fn offsets(&self) -> layout::Offsets {
        if self.packed { layout::packed::offsets(self.size) } else { layout::offsets(self.size) }
    }

    /// Bytes of the three areas: of the descriptors, the second, and the third.
    const fn area_bytes(&self) -> [usize; 3] {
        let QueueConfig { size, packed, .. } = *self;
        let desc = layout::desc_bytes(size);
        match packed {
            false => [desc, layout::avail_bytes(size), layout::used_bytes(size)],
            true => [desc, layout::packed::EVENT_SIZE, layout::packed::EVENT_SIZE],
        }
    }
}

/// The memory of the three areas. Sizes and alignments: see [`layout`].
#[derive(Clone, Debug)]
pub struct Rings {
    /// The descriptor table; of a packed queue, its ring.
    pub desc: Window,
    /// The available ring, which this end writes; of a packed queue, the driver's event structure.
    pub avail: Window,
    /// The used ring, which the device writes; of a packed queue, the device's event structure.
    pub used: Window,
}

impl Rings {
    /// The areas of a split queue of `size` at the beginning of `memory`, placed by
    /// [`layout::offsets`].
    ///
    /// # Errors
    /// [`RingError::TooSmall`].
    pub fn in_window(memory: &Window, size: u16) -> Result<Rings, RingError> {
        Rings::placed(memory, &QueueConfig { size, event_idx: true, packed: false })
    }

    /// The areas of a queue at the beginning of `memory`, placed by [`QueueConfig::offsets`].
    ///
    /// # Errors
    /// [`RingError::TooSmall`].
    pub fn placed(memory: &Window, config: &QueueConfig) -> Result<Rings, RingError> {
        let (at, [desc, avail, used]) = (config.offsets(), config.area_bytes());
        let small = RingError::TooSmall { area: Area::Used, len: memory.len(), needed: at.len };
        let part = |offset, len| memory.part(offset, len).ok_or(small);
        Ok(Rings {
            desc: part(at.desc, desc)?,
            avail: part(at.avail, avail)?,
            used: part(at.used, used)?,
        })
    }
}

/// A chain that the device has given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// The token passed to [`add`](Queue::add) with the chain.
    pub token: u64,
    /// How many bytes the device reports as written: at most the chain's writable bytes.
    pub len: u32,
}

/// What the ends of both formats can do, for a data path that is compiled for each ([`Queue`] has
/// the same methods and dispatches on each call).
pub trait Ring {
    /// How many descriptors the queue has.
    fn size(&self) -> u16;

    /// How many descriptors are free.
    fn free_descs(&self) -> u16;

    /// How many chains are added and not yet taken back.
    fn in_flight(&self) -> u16;

    /// What broke the queue, if something did.
    fn broken(&self) -> Option<RingError>;

    /// Adds a chain of buffers, readable ones first. [`pop`](Self::pop) returns `token` with it.
    /// The device sees it after [`publish`](Self::publish).
    ///
    /// # Errors
    /// [`AddError`]; nothing has changed then.
    fn add(&mut self, descs: &[Desc], token: u64) -> Result<(), AddError>;

    /// Adds a chain through an indirect table, which takes only one descriptor of the queue. The
    /// table is written to `table`, which the device sees at `table_addr`, and must not change
    /// until the chain comes back. `INDIRECT_DESC` must have been negotiated.
    ///
    /// # Errors
    /// [`AddError`]; nothing has changed then.
    fn add_indirect(
        &mut self,
        table_addr: u64,
        table: &Window,
        descs: &[Desc],
        token: u64,
    ) -> Result<(), AddError>;

    /// Adds chains of one buffer each, with their tokens, until `buffers` ends or the queue is
    /// full; returns how many. Nothing is taken from `buffers` that is not added.
    ///
    /// # Errors
    /// [`AddError::Broken`]; [`AddError::Wraps`] with the position of the refused buffer; those
    /// before it are added.
    fn add_burst(
        &mut self,
        buffers: impl IntoIterator<Item = (Desc, u64)>,
    ) -> Result<usize, AddError>;

    /// Makes all chains added so far visible to the device.
    fn publish(&mut self);

    /// Whether the device wants a kick for what was published since the last call.
    #[must_use]
    fn needs_kick(&mut self) -> bool;

    /// Takes back the next chain that the device has used, if there is one.
    ///
    /// # Errors
    /// [`RingError`]: the device broke the rules; every later call returns the same.
    fn pop(&mut self) -> Result<Option<Used>, RingError>;

    /// Takes back as many chains as the device has used and `out` holds; returns how many.
    ///
    /// # Errors
    /// As [`pop`](Self::pop), for the first chain; if a later one is at fault, those before it are
    /// returned, and the next call fails.
    fn pop_burst(&mut self, out: &mut [Used]) -> Result<usize, RingError>;

    /// Disables interrupts. A hint: one may still come.
    fn suppress_notifications(&mut self);

    /// Enables an interrupt with the next used chain. True if one is there already, for which none
    /// may come: look again before going to sleep. To be called before each sleep, also when the
    /// last call was not followed by [`suppress_notifications`](Self::suppress_notifications).
    #[must_use]
    fn enable_notifications(&mut self) -> bool;
}

/// Checks a chain that takes `wanted` descriptors of the queue; returns its writable bytes.
#[inline(always)]
fn checked(queue: &impl Ring, descs: &[Desc], wanted: usize) -> Result<u32, AddError> {
    if let Some(error) = queue.broken() {
        return Err(AddError::Broken(error));
    }
    if descs.is_empty() {
        return Err(AddError::Empty);
    }
    let (size, free) = (queue.size(), queue.free_descs());
    if descs.len() > usize::from(size) {
        return Err(AddError::TooMany { wanted: descs.len(), size });
    }
    if wanted > usize::from(free) {
        return Err(AddError::Full { wanted, free });
    }
    // At most 2^15 lengths of 32 bits: the sums cannot overflow.
    let (mut total, mut room) = (0_u64, 0);
    let mut writes = false;
    for (at, desc) in descs.iter().enumerate() {
        if writes && !desc.write {
            return Err(AddError::Order { at });
        }
        if desc.wraps() {
            return Err(AddError::Wraps { at });
        }
        writes = desc.write;
        total += u64::from(desc.len);
        room += if desc.write { u64::from(desc.len) } else { 0 };
    }
    if total > u64::from(u32::MAX) {
        return Err(AddError::TooLong { total });
    }
    Ok(room as u32)
}

/// The driver's end: adds chains, publishes them in batches, takes them back.
///
/// Chains come back in any order. Dropping the queue forgets the chains in flight: stop the device
/// first, or it goes on using their buffers.
// Queues are few, and live as long as their device: the larger variant costs nothing.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub enum Queue {
    /// Of a split ring.
    Split(Split),
    /// Of a packed ring.
    Packed(Packed),
}

/// Forwards a call to either format.
macro_rules! either {
    ($queue:expr, $ring:ident => $call:expr) => {
        match $queue {
            Queue::Split($ring) => $call,
            Queue::Packed($ring) => $call,
        }
    };
}

impl Queue {
    /// A new queue with a split ring, as [`with_config`](Self::with_config).
    ///
    /// # Errors
    /// As there.
    pub fn new(size: u16, rings: Rings, event_idx: bool) -> Result<Queue, RingError> {
        Queue::with_config(QueueConfig { size, event_idx, packed: false }, rings)
    }

    /// A new queue over zeroed or old memory: the areas are initialised, so the device must not yet
    /// use them. Interrupts are enabled at first.
    ///
    /// # Errors
    /// [`RingError::Size`] or [`PackedSize`](RingError::PackedSize), [`RingError::TooSmall`],
    /// [`RingError::Misaligned`].
    pub fn with_config(config: QueueConfig, rings: Rings) -> Result<Queue, RingError> {
        Ok(match config.packed {
            false => Queue::Split(Split::new(config, rings)?),
            true => Queue::Packed(Packed::new(config, rings)?),
        })
    }

    /// As [`Ring::size`].
    pub fn size(&self) -> u16 {
        either!(self, ring => ring.size())
    }

    /// As [`Ring::free_descs`].
    pub fn free_descs(&self) -> u16 {
        either!(self, ring => ring.free_descs())
    }

    /// As [`Ring::in_flight`].
    pub fn in_flight(&self) -> u16 {
        either!(self, ring => ring.in_flight())
    }

    /// As [`Ring::broken`].
    pub fn broken(&self) -> Option<RingError> {
        either!(self, ring => ring.broken())
    }

    /// As [`Ring::add`].
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn add(&mut self, descs: &[Desc], token: u64) -> Result<(), AddError> {
        either!(self, ring => ring.add(descs, token))
    }

    /// As [`Ring::add_indirect`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn add_indirect(
        &mut self,
        table_addr: u64,
        table: &Window,
        descs: &[Desc],
        token: u64,
    ) -> Result<(), AddError> {
        either!(self, ring => ring.add_indirect(table_addr, table, descs, token))
    }

    /// As [`Ring::add_burst`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn add_burst(
        &mut self,
        buffers: impl IntoIterator<Item = (Desc, u64)>,
    ) -> Result<usize, AddError> {
        either!(self, ring => ring.add_burst(buffers))
    }

    /// As [`Ring::publish`].
    #[inline]
    pub fn publish(&mut self) {
        either!(self, ring => ring.publish());
    }

    /// As [`Ring::needs_kick`].
    #[inline]
    #[must_use]
    pub fn needs_kick(&mut self) -> bool {
        either!(self, ring => ring.needs_kick())
    }

    /// As [`Ring::pop`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Used>, RingError> {
        either!(self, ring => ring.pop())
    }

    /// As [`Ring::pop_burst`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn pop_burst(&mut self, out: &mut [Used]) -> Result<usize, RingError> {
        either!(self, ring => ring.pop_burst(out))
    }

    /// As [`Ring::suppress_notifications`].
    #[inline]
    pub fn suppress_notifications(&mut self) {
        either!(self, ring => ring.suppress_notifications());
    }

    /// As [`Ring::enable_notifications`].
    #[must_use]
    pub fn enable_notifications(&mut self) -> bool {
        either!(self, ring => ring.enable_notifications())
    }
}
