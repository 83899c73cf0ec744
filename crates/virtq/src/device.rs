//! The device's end of a split virtqueue.

use ringfence_mem::Translate;

use crate::{Chain, RingError};

/// Where the areas lie, as the device sees them, and what was negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// How many descriptors: a power of two, at most 32768.
    pub size: u16,
    /// Address of the descriptor table.
    pub desc: u64,
    /// Address of the available ring.
    pub avail: u64,
    /// Address of the used ring.
    pub used: u64,
    /// Whether `EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// Whether `INDIRECT_DESC` was negotiated.
    pub indirect: bool,
    /// The available index to start from: 0, or what [`next_avail`](Queue::next_avail) said when
    /// the queue was stopped.
    pub base: u16,
}

/// The device's end: takes chains, gives them back in batches.
#[derive(Debug)]
pub struct Queue {}

impl Queue {
    /// A queue over the areas that `config` names. The used index goes on from what the used ring
    /// holds. Kicks are wanted at first (`enable_kicks` need not be called).
    ///
    /// # Errors
    /// [`RingError::Size`], [`RingError::Misaligned`], [`RingError::Unreachable`],
    /// [`RingError::Base`].
    pub fn new(config: Config, mem: &impl Translate) -> Result<Queue, RingError> {
        let _ = (config, mem);
        todo!()
    }

    /// What the queue was made from.
    pub fn config(&self) -> &Config {
        todo!()
    }

    /// Whether the translations of all three areas still stand. To be asked before each round of
    /// work (rules D21, D22); while it is false nothing else may be called but
    /// [`revalidate`](Self::revalidate), [`next_avail`](Self::next_avail) and the like.
    pub fn is_valid(&self) -> bool {
        todo!()
    }

    /// Translates the areas' addresses again, after an invalidation. Indices go on.
    ///
    /// # Errors
    /// [`RingError::Unreachable`] or [`RingError::Misaligned`]: this does not break the queue, a
    /// later attempt may succeed. The error that broke the queue, if one did.
    pub fn revalidate(&mut self, mem: &impl Translate) -> Result<(), RingError> {
        let _ = mem;
        todo!()
    }

    /// What broke the queue, if something did.
    pub fn broken(&self) -> Option<RingError> {
        todo!()
    }

    /// Takes the next available chain into `chain`; false if there is none. The head stays this
    /// device's until [`push_used`](Self::push_used), and no other chain with it is taken
    /// meanwhile.
    ///
    /// # Errors
    /// [`RingError`]: the driver broke the rules; every later call returns the same (but see
    /// [`ChainFault::IndirectUnreachable`](crate::ChainFault::IndirectUnreachable)). `chain` is
    /// empty then.
    pub fn pop(&mut self, mem: &impl Translate, chain: &mut Chain) -> Result<bool, RingError> {
        let _ = (mem, chain);
        todo!()
    }

    /// Gives the chain `head` back, `len` bytes of it written. The driver sees it after
    /// [`publish_used`](Self::publish_used).
    ///
    /// # Panics
    /// If `head` is not in flight: the device's own mistake.
    pub fn push_used(&mut self, head: u16, len: u32) {
        let _ = (head, len);
        todo!()
    }

    /// Makes all chains given back so far visible to the driver. True if it wants an interrupt.
    #[must_use]
    pub fn publish_used(&mut self) -> bool {
        todo!()
    }

    /// Asks the driver for no kicks. A hint: one may still come.
    pub fn suppress_kicks(&mut self) {
        todo!()
    }

    /// Asks the driver for a kick with the next available chain. True if one is there already, for
    /// which none may come: look again before going to sleep.
    #[must_use]
    pub fn enable_kicks(&mut self) -> bool {
        todo!()
    }

    /// The next available index: what `GET_VRING_BASE` answers when the queue stops.
    pub fn next_avail(&self) -> u16 {
        todo!()
    }

    /// How many chains are taken and not yet given back.
    pub fn in_flight(&self) -> u16 {
        todo!()
    }
}
