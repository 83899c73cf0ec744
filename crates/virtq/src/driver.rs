//! The driver's end of a split virtqueue.

use ringfence_mem::Window;

use crate::{AddError, Desc, RingError};

/// The memory of the three areas. Sizes and alignments: see [`layout`](crate::layout).
#[derive(Clone, Debug)]
pub struct Rings {
    /// The descriptor table.
    pub desc: Window,
    /// The available ring, which this end writes.
    pub avail: Window,
    /// The used ring, which the device writes.
    pub used: Window,
}

/// A chain that the device has given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// What [`add`](Queue::add) was given with the chain.
    pub token: u64,
    /// How many bytes the device says it wrote: at most the chain's writable bytes.
    pub len: u32,
}

/// The driver's end: adds chains, publishes them in batches, takes them back.
#[derive(Debug)]
pub struct Queue {}

impl Queue {
    /// A new queue over zeroed or old memory: the areas are initialised, so the device must not
    /// yet use them. Interrupts are wanted at first.
    ///
    /// # Errors
    /// [`RingError::Size`], [`RingError::TooSmall`], [`RingError::Misaligned`].
    pub fn new(size: u16, rings: Rings, event_idx: bool) -> Result<Queue, RingError> {
        let _ = (size, rings, event_idx);
        todo!()
    }

    /// How many descriptors the queue has.
    pub fn size(&self) -> u16 {
        todo!()
    }

    /// How many descriptors are free.
    pub fn free_descs(&self) -> u16 {
        todo!()
    }

    /// How many chains are added and not yet taken back.
    pub fn in_flight(&self) -> u16 {
        todo!()
    }

    /// What broke the queue, if something did.
    pub fn broken(&self) -> Option<RingError> {
        todo!()
    }

    /// Adds a chain of buffers, readable ones first. `token` comes back with it from
    /// [`pop`](Self::pop). The device sees it after [`publish`](Self::publish).
    ///
    /// # Errors
    /// [`AddError`]; nothing has changed then.
    pub fn add(&mut self, descs: &[Desc], token: u64) -> Result<(), AddError> {
        let _ = (descs, token);
        todo!()
    }

    /// Adds a chain through an indirect table, which takes one descriptor of the queue only. The
    /// table is written to `table`, which the device sees at `table_addr`, and must stay as it is
    /// until the chain comes back. `INDIRECT_DESC` must have been negotiated.
    ///
    /// # Errors
    /// [`AddError`]; nothing has changed then.
    pub fn add_indirect(
        &mut self,
        table_addr: u64,
        table: &Window,
        descs: &[Desc],
        token: u64,
    ) -> Result<(), AddError> {
        let _ = (table_addr, table, descs, token);
        todo!()
    }

    /// Makes all chains added so far visible to the device.
    pub fn publish(&mut self) {
        todo!()
    }

    /// Whether the device wants a kick for what was published since the last call.
    pub fn needs_kick(&mut self) -> bool {
        todo!()
    }

    /// Takes back the next chain that the device has used, if there is one.
    ///
    /// # Errors
    /// [`RingError`]: the device broke the rules; every later call returns the same.
    pub fn pop(&mut self) -> Result<Option<Used>, RingError> {
        todo!()
    }

    /// Asks the device for no interrupts. A hint: one may still come.
    pub fn suppress_notifications(&mut self) {
        todo!()
    }

    /// Asks the device for an interrupt with the next used chain. True if one is there already,
    /// for which none may come: look again before going to sleep.
    #[must_use]
    pub fn enable_notifications(&mut self) -> bool {
        todo!()
    }
}
