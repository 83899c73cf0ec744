//! The driver's end of a virtqueue.

mod end;
mod ids;
mod packed;
mod split;

use ringfence_mem::Window;

use self::{packed::Packed, split::Split};
use crate::{
    AddError, Area, Desc, RingError,
    either::{Format, either},
    layout,
};

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

/// The driver's end: adds chains, publishes them in batches, takes them back.
///
/// Chains come back in any order. Dropping the queue forgets the chains in flight: stop the device
/// first, or it goes on using their buffers.
#[derive(Debug)]
pub struct Queue(Format<Split, Packed>);

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
        Ok(Queue(match config.packed {
            false => Format::Split(Split::new(config, rings)?),
            true => Format::Packed(Packed::new(config, rings)?),
        }))
    }

    /// How many descriptors the queue has.
    pub fn size(&self) -> u16 {
        either!(&self.0, ring => ring.size())
    }

    /// How many descriptors are free.
    pub fn free_descs(&self) -> u16 {
        either!(&self.0, ring => ring.free_descs())
    }

    /// How many chains are added and not yet taken back.
    pub fn in_flight(&self) -> u16 {
        either!(&self.0, ring => ring.in_flight())
    }

    /// What broke the queue, if something did.
    pub fn broken(&self) -> Option<RingError> {
        either!(&self.0, ring => ring.broken())
    }

    /// Adds a chain of buffers, readable ones first. [`pop`](Self::pop) returns `token` with it.
    /// The device sees it after [`publish`](Self::publish).
    ///
    /// # Errors
    /// [`AddError`]; nothing has changed then.
    #[inline(always)]
    pub fn add(&mut self, descs: &[Desc], token: u64) -> Result<(), AddError> {
        either!(&mut self.0, ring => ring.add(descs, token))
    }

    /// Adds a chain through an indirect table, which takes only one descriptor of the queue. The
    /// table is written to `table`, which the device sees at `table_addr`, and must not change
    /// until the chain comes back. `INDIRECT_DESC` must have been negotiated.
    ///
    /// # Errors
    /// [`AddError`]; nothing has changed then.
    #[inline]
    pub fn add_indirect(
        &mut self,
        table_addr: u64,
        table: &Window,
        descs: &[Desc],
        token: u64,
    ) -> Result<(), AddError> {
        either!(&mut self.0, ring => ring.add_indirect(table_addr, table, descs, token))
    }

    /// Adds chains of one buffer each, with their tokens, until `buffers` ends or the queue is
    /// full; returns how many. Nothing is taken from `buffers` that is not added.
    ///
    /// # Errors
    /// [`AddError::Broken`]; [`AddError::Wraps`] with the position of the refused buffer; those
    /// before it are added.
    #[inline]
    pub fn add_burst(
        &mut self,
        buffers: impl IntoIterator<Item = (Desc, u64)>,
    ) -> Result<usize, AddError> {
        either!(&mut self.0, ring => ring.add_burst(buffers))
    }

    /// Makes all chains added so far visible to the device.
    #[inline]
    pub fn publish(&mut self) {
        either!(&mut self.0, ring => ring.publish());
    }

    /// Whether the device wants a kick for what was published since the last call.
    #[inline]
    #[must_use]
    pub fn needs_kick(&mut self) -> bool {
        either!(&mut self.0, ring => ring.needs_kick())
    }

    /// Takes back the next chain that the device has used, if there is one.
    ///
    /// # Errors
    /// [`RingError`]: the device broke the rules; every later call returns the same.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Used>, RingError> {
        either!(&mut self.0, ring => ring.pop())
    }

    /// Takes back as many chains as the device has used and `out` holds; returns how many.
    ///
    /// # Errors
    /// As [`pop`](Self::pop), for the first chain; if a later one is at fault, those before it are
    /// returned, and the next call fails.
    #[inline]
    pub fn pop_burst(&mut self, out: &mut [Used]) -> Result<usize, RingError> {
        either!(&mut self.0, ring => ring.pop_burst(out))
    }

    /// Disables interrupts. A hint: one may still come.
    #[inline]
    pub fn suppress_notifications(&mut self) {
        either!(&mut self.0, ring => ring.suppress_notifications());
    }

    /// Enables an interrupt with the next used chain. True if one is there already, for which none
    /// may come, or if the queue is broken: look again before going to sleep. To be called before
    /// each sleep, also when the last call was not followed by
    /// [`suppress_notifications`](Self::suppress_notifications).
    #[must_use]
    pub fn enable_notifications(&mut self) -> bool {
        either!(&mut self.0, ring => ring.enable_notifications())
    }
}
