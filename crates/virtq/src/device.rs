//! The device's end of a virtqueue.

mod burst;
mod end;
mod flight;
mod packed;
mod split;
mod table;
mod written;

use ringfence_mem::{Access, Translate, Window};

pub use self::{
    burst::{Burst, Taken},
    written::Written,
};
use self::{packed::Packed, split::Split};
use crate::{
    Area, Chain, Desc, RingError,
    either::{Format, either},
    layout,
};

/// The addresses of the areas, as the device sees them, and what was negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingConfig {
    /// How many descriptors: at most 32768; a power of two if the ring is split.
    pub size: u16,
    /// Address of the descriptor table; of a packed queue, of its ring.
    pub desc: u64,
    /// Address of the available ring; of a packed queue, of the driver's event structure.
    pub avail: u64,
    /// Address of the used ring; of a packed queue, of the device's event structure.
    pub used: u64,
    /// Whether `EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// Whether `INDIRECT_DESC` was negotiated.
    pub indirect: bool,
    /// Whether `RING_PACKED` was negotiated.
    pub packed: bool,
    /// Where to start from, as in vhost-user's `SET_VRING_BASE`: what
    /// [`next_avail`](Queue::next_avail) returned when the queue was stopped, or
    /// [`start`](Self::start) for a new one. For a split queue, the available index. For a packed
    /// one, the place of the next available descriptor in the low 16 bits, of the next used one in
    /// the high 16, each with its wrap counter in bit 15; if the high half is 0 and the low one has
    /// its wrap counter set, both places are the same. 0 for a packed queue in which nothing was
    /// ever given back is its start too: some front ends start all queues with 0.
    pub base: u32,
}

impl RingConfig {
    /// The `base` of a queue that was never used.
    pub const fn start(packed: bool) -> u32 {
        if packed { 0x8000_8000 } else { 0 }
    }

    /// The address of each of the three areas, its size in bytes, and the device's access to it.
    pub fn areas(&self) -> [(u64, usize, Access); 3] {
        let RingConfig { size, desc, avail, used, event_idx, packed, .. } = *self;
        let descs = layout::desc_bytes(size);
        if packed {
            let event = layout::packed::EVENT_SIZE;
            return [
                (desc, descs, Access::ReadWrite),
                (avail, event, Access::Read),
                (used, event, Access::Write),
            ];
        }
        // Without EVENT_IDX the events need not exist.
        let events = if event_idx { 0 } else { 2 };
        // Require only the access that each area is for: a used ring need only be writable.
        [
            (desc, descs, Access::Read),
            (avail, layout::avail_bytes(size) - events, Access::Read),
            (used, layout::used_bytes(size) - events, Access::Write),
        ]
    }
}

/// The most descriptors that one [`peek_from`](Queue::peek_from) reads in the ring, and the most
/// that it reads in indirect tables.
pub const PEEK_DESCS: usize = 512;

/// What [`peek_from`](Queue::peek_from) shows. It is unchecked and may be gone by the time that the
/// chain is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Glimpse {
    /// A buffer.
    Buffer(Desc),
    /// An indirect table, which the device reads.
    Table {
        /// Its address.
        addr: u64,
        /// Its length in bytes.
        len: u32,
    },
}

/// A chain of a packed ring as stored in an in-flight record: its place in the ring may be
/// overwritten.
#[derive(Clone, Copy, Debug)]
pub enum Stored<'a> {
    /// Its buffers, one for each descriptor.
    Buffers(&'a [Desc]),
    /// Its indirect table.
    Table {
        /// Its address.
        addr: u64,
        /// Its length in bytes.
        len: u32,
    },
}

/// A window of an area.
fn window(
    mem: &impl Translate,
    area: Area,
    (addr, len, access): (u64, usize, Access),
) -> Result<Window, RingError> {
    mem.window(addr, len as u64, access).map_err(|error| RingError::Unreachable {
        area,
        addr,
        error,
    })
}

/// The device's end: takes chains, gives them back in batches.
#[derive(Debug)]
pub struct Queue(Format<Split, Packed>);

impl Queue {
    /// A queue over the areas that `config` names. The used index of a split ring continues from
    /// the value in the used ring. Kicks are enabled at first (`enable_kicks` need not be called).
    ///
    /// # Errors
    /// [`RingError::Size`] or [`PackedSize`](RingError::PackedSize), [`RingError::Misaligned`],
    /// [`RingError::Unreachable`], [`RingError::Base`] or [`PackedBase`](RingError::PackedBase).
    pub fn new(config: RingConfig, mem: &impl Translate) -> Result<Queue, RingError> {
        let mut queue = Queue::postponed(config)?;
        queue.revalidate(mem)?;
        Ok(queue)
    }

    /// A queue whose areas need not be there yet (rules [D21], [D22]: a ring may be started before
    /// its addresses are known). It is not [valid](Self::is_valid), and has no chains, until
    /// [`revalidate`](Self::revalidate) has found them.
    ///
    /// # Errors
    /// [`RingError::Size`] or [`PackedSize`](RingError::PackedSize), [`RingError::Base`] or
    /// [`PackedBase`](RingError::PackedBase).
    ///
    /// [D21]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d21
    /// [D22]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d22
    pub fn postponed(config: RingConfig) -> Result<Queue, RingError> {
        Ok(Queue(match config.packed {
            false => Format::Split(Split::postponed(config)?),
            true => Format::Packed(Packed::postponed(config)?),
        }))
    }

    /// As [`postponed`](Self::postponed), for a split queue that an earlier device has left without
    /// reporting its position: it continues at the used index, whatever [`RingConfig::base`] is.
    /// What that device took and did not give back is taken again.
    ///
    /// # Errors
    /// As there; [`RingError::Format`] if the ring is packed, which does not hold its position.
    pub fn postponed_at_used(config: RingConfig) -> Result<Queue, RingError> {
        match config.packed {
            false => {
                let mut ring = Split::postponed(RingConfig { base: 0, ..config })?;
                ring.at_used = true;
                Ok(Queue(Format::Split(ring)))
            }
            true => Err(RingError::Format),
        }
    }

    /// Whether the queue's position is unknown: it is [to continue at the used
    /// index](Self::postponed_at_used) and was not found yet.
    pub fn is_lost(&self) -> bool {
        match &self.0 {
            Format::Split(ring) => ring.is_lost(),
            Format::Packed(_) => false,
        }
    }

    /// Takes into `chain` the chain at `head` of a split ring, which an earlier device took and did
    /// not give back: its descriptors, which are still the device's, are read again. It counts as
    /// in flight. To be called for all of them, on a valid queue, before others are taken;
    /// [`RingConfig::base`] is the used index, or that plus the number of those chains.
    ///
    /// # Errors
    /// As [`pop`](Self::pop); [`RingError::Format`] if the ring is packed.
    ///
    /// # Panics
    /// Chains were taken from the ring already, or it was never valid.
    pub fn take_head(
        &mut self,
        mem: &impl Translate,
        head: u16,
        chain: &mut Chain,
    ) -> Result<(), RingError> {
        match &mut self.0 {
            Format::Split(ring) => ring.take_head(mem, head, chain),
            Format::Packed(_) => Err(RingError::Format),
        }
    }

    /// Takes into `chain` the chain `id` of a packed ring, which an earlier device took and did not
    /// give back, from a record of it. It counts as in flight. To be called for all of them before
    /// others are taken; [`RingConfig::base`] has the used place twice, or that and where these
    /// chains end.
    ///
    /// # Errors
    /// As [`pop`](Self::pop); [`RingError::Format`] if the ring is split.
    ///
    /// # Panics
    /// Chains were taken from the ring already.
    pub fn take_stored(
        &mut self,
        mem: &impl Translate,
        id: u16,
        stored: Stored<'_>,
        chain: &mut Chain,
    ) -> Result<(), RingError> {
        match &mut self.0 {
            Format::Split(_) => Err(RingError::Format),
            Format::Packed(ring) => ring.take_stored(mem, id, stored, chain),
        }
    }

    /// The configuration that the queue was made from, with the current addresses.
    pub fn config(&self) -> &RingConfig {
        either!(&self.0, ring => ring.config())
    }

    /// Whether the areas were found and the translations of all three are still valid. To be
    /// checked before each round of work (rules [D21], [D22]). While it is false the areas must be
    /// left alone (they may not be the driver's any more, though accesses stay sound) until
    /// [`revalidate`](Self::revalidate) has found them again.
    ///
    /// [D21]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d21
    /// [D22]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d22
    #[inline]
    pub fn is_valid(&self) -> bool {
        either!(&self.0, ring => ring.is_valid())
    }

    /// Translates the areas' addresses: for the first time if the queue was
    /// [postponed](Queue::postponed), or again after an invalidation. Indices continue.
    ///
    /// # Errors
    /// [`RingError::Unreachable`] or [`RingError::Misaligned`]: this does not break the queue, a
    /// later attempt may succeed. The first time, [`RingError::Base`], which breaks it. The error
    /// that broke the queue, if one did.
    pub fn revalidate(&mut self, mem: &impl Translate) -> Result<(), RingError> {
        either!(&mut self.0, ring => ring.revalidate(mem))
    }

    /// Moves the areas (`SET_VRING_ADDR` on a running ring): the queue is not valid until
    /// [`revalidate`](Self::revalidate) has found them. Indices and chains in flight stay the same,
    /// so that the driver must have moved the contents.
    pub fn relocate(&mut self, desc: u64, avail: u64, used: u64) {
        either!(&mut self.0, ring => ring.relocate(desc, avail, used));
    }

    /// What broke the queue, if something did.
    pub fn broken(&self) -> Option<RingError> {
        either!(&self.0, ring => ring.broken())
    }

    /// Takes the next available chain into `chain`; false if there is none. The head stays this
    /// device's until [`push_used`](Self::push_used), and no other chain with it is taken
    /// meanwhile: a device may store a request's state under its head.
    ///
    /// # Errors
    /// [`RingError`]: the driver broke the rules; every later call returns the same (but see
    /// [`ChainFault::IndirectUnreachable`](crate::ChainFault::IndirectUnreachable)). `chain` is
    /// empty then.
    #[inline]
    pub fn pop(&mut self, mem: &impl Translate, chain: &mut Chain) -> Result<bool, RingError> {
        either!(&mut self.0, ring => ring.pop(mem, chain))
    }

    /// Takes up to `most` available chains, and appends them to `burst`; returns how many. A split
    /// ring's index is read once for all of them.
    ///
    /// # Errors
    /// As [`pop`](Self::pop), for the first chain; if a later one is at fault, those before it are
    /// returned, and the next call fails.
    #[inline]
    pub fn pop_more(
        &mut self,
        mem: &impl Translate,
        most: usize,
        burst: &mut Burst,
    ) -> Result<usize, RingError> {
        either!(&mut self.0, ring => ring.pop_more(mem, most, burst))
    }

    /// About how much there is that the driver has made available and that was not taken, as far as
    /// `most`: of a split ring chains, of a packed one descriptors, of which at least half are counted,
    /// and those, too, that the driver is about to make available. A hint: nothing is checked.
    #[inline]
    pub fn ready(&self, most: u16) -> u16 {
        either!(&self.0, ring => ring.ready(most))
    }

    /// Shows `each` the buffers of the available chains `skip .. ahead`, of which 0 is the next to
    /// be taken, and of their indirect tables as far as these can be read, without taking them: to
    /// request all translations that they will need at once. Returns how many chains were seen,
    /// those skipped included: what to skip when more have come, as long as none is taken. Nothing
    /// is checked, errors are ignored, and no more descriptors are read than [`PEEK_DESCS`] in the
    /// ring, and as many in indirect tables.
    ///
    /// Tables are read through `mem` after `each` was shown them: `mem` may note a miss in such a
    /// read.
    pub fn peek_from(
        &mut self,
        mem: &impl Translate,
        skip: u16,
        ahead: u16,
        each: impl FnMut(Glimpse),
    ) -> u16 {
        either!(&mut self.0, ring => ring.peek_from(mem, skip, ahead, each))
    }

    /// Puts the chain `head` back, untouched, as if it had not been taken: the next
    /// [`pop`](Self::pop) takes it again. Only for the chain that was taken last, so that several
    /// are put back in reverse order; for any other `head` returns false and changes nothing.
    pub fn untake(&mut self, head: u16) -> bool {
        either!(&mut self.0, ring => ring.untake(head))
    }

    /// Gives the chain `head` back, `len` bytes of it written. The driver sees it after
    /// [`publish_used`](Self::publish_used). Works on a broken queue too, for the chains that were
    /// taken before.
    ///
    /// # Panics
    /// `head` is not in flight, or the areas were never found: the device's own mistake.
    #[inline]
    pub fn push_used(&mut self, head: u16, len: u32) {
        either!(&mut self.0, ring => ring.push_used(head, len));
    }

    /// Gives chains back, in this order: each its head, and the bytes written.
    ///
    /// # Panics
    /// As [`push_used`](Self::push_used).
    #[inline]
    pub fn push_used_burst(&mut self, used: impl IntoIterator<Item = (u16, u32)>) {
        either!(&mut self.0, ring => ring.push_used_burst(used));
    }

    /// Makes all chains given back so far visible to the driver. True if it wants an interrupt.
    #[inline]
    #[must_use]
    pub fn publish_used(&mut self) -> bool {
        either!(&mut self.0, ring => ring.publish_used())
    }

    /// Disables kicks. A hint: one may still come.
    #[inline]
    pub fn suppress_kicks(&mut self) {
        either!(&mut self.0, ring => ring.suppress_kicks());
    }

    /// Enables a kick with the next available chain. True if one is there already, for which none
    /// may come, or if the queue is broken: look again before going to sleep. To be called before
    /// each sleep, also when the last call was not followed by
    /// [`suppress_kicks`](Self::suppress_kicks).
    #[must_use]
    pub fn enable_kicks(&mut self) -> bool {
        either!(&mut self.0, ring => ring.enable_kicks())
    }

    /// The queue's position, for `GET_VRING_BASE` when it stops (see [`RingConfig::base`]).
    pub fn next_avail(&self) -> u32 {
        either!(&self.0, ring => ring.next_avail())
    }

    /// How many chains are taken and not yet given back; in a split ring also those of an earlier
    /// device that are not taken again.
    pub fn in_flight(&self) -> u16 {
        either!(&self.0, ring => ring.in_flight())
    }

    /// Shows `each` what this end has written into the areas since the last call and
    /// [published](Self::publish_used): for a dirty log (rule [D26]). To be called after each
    /// publication, before more is given back, and before the areas are looked up again. For a
    /// packed ring it shows all descriptors that were given back, of which only the first of each
    /// chain was written.
    ///
    /// [D26]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d26
    pub fn written(&mut self, each: impl FnMut(Written<'_>)) {
        either!(&mut self.0, ring => ring.written(each));
    }
}
