//! The record of what a queue has taken and not completed, from which another process goes on after
//! a crash of this one.

use std::{collections::VecDeque, sync::Arc};

use ringfence_mem::{AccessError, Translate};
use ringfence_vhost_user::{
    InflightRegion, PackedBuffer, PackedDescriptor, PackedInflight, SplitInflight,
};
use ringfence_virtq::{
    Area, Chain, Desc, RingError,
    device::{self, Stored},
    layout,
};

use super::RequestQueue;
use crate::requests::{QueueError, Serve};

/// A queue's part of the record.
pub(super) enum Record {
    Split {
        inflight: SplitInflight,
        /// The used index, with what is not published yet.
        used: u16,
    },
    Packed(PackedInflight),
}

/// The record of a queue, before and after its ring was found.
pub(super) struct Recorded {
    region: Arc<InflightRegion>,
    queue: u16,
    record: Option<Record>,
    /// What an earlier process took and did not complete: it is taken again before anything else.
    again: VecDeque<Again>,
}

/// A chain that an earlier process took.
enum Again {
    Head(u16),
    Packed(PackedBuffer),
}

/// The base of a packed ring of which all is in flight, at the beginning of every second lap: used
/// position 0 with wrap 0, available position 0 with wrap 1.
const WHOLE_RING: u32 = 1 << 15;

/// The entry of a chain that needs none: a split ring's entry is its head.
const NO_ENTRY: u16 = u16::MAX;

impl Recorded {
    pub(super) fn new(region: Arc<InflightRegion>, queue: u16) -> Recorded {
        Recorded { region, queue, record: None, again: VecDeque::new() }
    }

    /// Whether the record has not been opened yet.
    pub(super) fn is_closed(&self) -> bool {
        self.record.is_none()
    }

    /// Determines from the ring and the record where to go on; returns the queue of `config`, not
    /// yet found.
    pub(super) fn open(
        &mut self,
        config: &device::RingConfig,
        mem: &impl Translate,
    ) -> Result<device::Queue, QueueError> {
        let base = match config.packed {
            false => {
                let mut idx = [0; 2];
                let addr = config.used.saturating_add(layout::IDX as u64);
                mem.read(addr, &mut idx).map_err(|error| unreachable(Area::Used, addr, error))?;
                let used = u16::from_le_bytes(idx);
                let (inflight, heads) = self.region.split(self.queue, config.size, used)?;
                self.again = heads.into_iter().map(Again::Head).collect();
                let base = inflight.base().into();
                self.record = Some(Record::Split { inflight, used });
                base
            }
            true => {
                let flags_at = |at: u16| -> Result<u16, QueueError> {
                    let (mut flags, offset) = ([0; 2], usize::from(at) * layout::DESC_SIZE + 14);
                    let addr = config.desc.saturating_add(offset as u64);
                    mem.read(addr, &mut flags)
                        .map_err(|error| unreachable(Area::Descriptors, addr, error))?;
                    Ok(u16::from_le_bytes(flags))
                };
                // A front end may send 0 for a new ring. Whether it is new is seen in its descriptors.
                let mut ring = device::Queue::postponed(*config)?;
                ring.revalidate(mem)?;
                let (queue, size) = (self.queue, config.size);
                let (inflight, buffers) =
                    self.region.packed(queue, size, ring.next_avail(), flags_at)?;
                self.again = buffers.into_iter().map(Again::Packed).collect();
                let base = match inflight.base() {
                    // Front ends send this for an empty ring (see `RingConfig::base`). So the used
                    // position is passed twice; what is taken again moves the other.
                    WHOLE_RING => 0,
                    base => base,
                };
                self.record = Some(Record::Packed(inflight));
                base
            }
        };
        Ok(device::Queue::postponed(device::RingConfig { base, ..*config })?)
    }

    /// Takes the next chain that an earlier process had taken into `chain`, and returns its entry;
    /// `None` if there are no more.
    pub(super) fn take_again(
        &mut self,
        ring: &mut device::Queue,
        mem: &impl Translate,
        chain: &mut Chain,
    ) -> Option<Result<u16, RingError>> {
        let taken = match self.again.front()? {
            Again::Head(head) => ring.take_head(mem, *head, chain).map(|()| NO_ENTRY),
            Again::Packed(PackedBuffer { slot, descriptors }) => {
                let descs: Vec<Desc> = descriptors.iter().map(buffer).collect();
                let stored = match descriptors[..] {
                    [PackedDescriptor { addr, len, flags, .. }]
                        if flags & layout::DESC_F_INDIRECT != 0 =>
                    {
                        Stored::Table { addr, len }
                    }
                    _ => Stored::Buffers(&descs),
                };
                // The driver's id is in the last of them.
                let id = descriptors.last().map_or(0, |desc| desc.id);
                ring.take_stored(mem, id, stored, chain).map(|()| *slot)
            }
        };
        if taken.is_ok() {
            self.again.pop_front();
        }
        Some(taken)
    }

    /// Whether there are chains to take again.
    pub(super) fn has_more(&self) -> bool {
        !self.again.is_empty()
    }

    /// Records that a chain is taken, before it has any effect. Returns its entry; `None` if there
    /// is no room for it, which there is for all that a ring holds.
    pub(super) fn take(&mut self, chain: &Chain) -> Option<u16> {
        match self.record.as_mut()? {
            Record::Split { inflight, .. } => {
                inflight.take(chain.head());
                Some(NO_ENTRY)
            }
            Record::Packed(inflight) => {
                let next = |at: usize| if at == 0 { 0 } else { layout::DESC_F_NEXT };
                let id = chain.head();
                match chain.table() {
                    Some((addr, len)) => {
                        let flags = layout::DESC_F_INDIRECT;
                        inflight.take(&[PackedDescriptor { addr, len, flags, id }])
                    }
                    None => {
                        let left = (0..chain.descs().len()).rev();
                        let descriptors = chain.descs().iter().zip(left).map(|(desc, left)| {
                            let write = if desc.write { layout::DESC_F_WRITE } else { 0 };
                            let flags = write | next(left);
                            PackedDescriptor { addr: desc.addr, len: desc.len, flags, id }
                        });
                        inflight.take(&descriptors.collect::<Vec<_>>())
                    }
                }
            }
        }
    }

    /// Records that a chain is completed.
    pub(super) fn complete(&mut self, head: u16, entry: u16) {
        match &mut self.record {
            Some(Record::Split { inflight, used }) => {
                inflight.complete(head);
                *used = used.wrapping_add(1);
            }
            Some(Record::Packed(inflight)) => inflight.complete(entry),
            None => {}
        }
    }

    /// Records that the chain that was taken last was put back into the ring; only while no
    /// completed chain is unpublished.
    pub(super) fn forget(&mut self, head: u16, entry: u16) {
        match &mut self.record {
            Some(Record::Split { inflight, used }) => {
                // As if it had been completed, and nothing published.
                inflight.complete(head);
                inflight.publish(|| *used);
            }
            Some(Record::Packed(inflight)) => inflight.forget(entry),
            None => {}
        }
    }

    /// Publishes completed chains; returns whether the driver wants an interrupt.
    pub(super) fn publish(&mut self, ring: &mut device::Queue) -> bool {
        let mut wanted = false;
        match &mut self.record {
            Some(Record::Split { inflight, used }) => inflight.publish(|| {
                wanted = ring.publish_used();
                *used
            }),
            Some(Record::Packed(inflight)) => inflight.publish(|| wanted = ring.publish_used()),
            None => wanted = ring.publish_used(),
        }
        wanted
    }
}

/// Takes the next chain, first those that an earlier process took. Returns its entry in the record;
/// `None`: there is no chain.
#[inline(always)]
pub(super) fn take_next(
    ring: &mut device::Queue,
    recorded: Option<&mut Recorded>,
    mem: &impl Translate,
    chain: &mut Chain,
) -> Result<Option<u16>, RingError> {
    let Some(recorded) = recorded else {
        return Ok(ring.pop(mem, chain)?.then_some(NO_ENTRY));
    };
    if let Some(taken) = recorded.take_again(ring, mem, chain) {
        return taken.map(Some);
    }
    if !ring.pop(mem, chain)? {
        return Ok(None);
    }
    // The record has room for as many as a ring holds.
    recorded.take(chain).map(Some).ok_or(RingError::Format)
}

fn unreachable(area: Area, addr: u64, error: AccessError) -> RingError {
    RingError::Unreachable { area, addr, error }
}

fn buffer(desc: &PackedDescriptor) -> Desc {
    Desc { addr: desc.addr, len: desc.len, write: desc.flags & layout::DESC_F_WRITE != 0 }
}

impl<S: Serve> RequestQueue<S> {
    /// Checks that the record still exists. If the front end has truncated the file, a successor
    /// finds nothing after a crash: completed requests could be done again, and others never. As
    /// with a ring whose memory is gone, the queue stops rather than going on without it.
    ///
    /// # Errors
    /// The file was truncated.
    pub(super) fn check_record(&self) -> Result<(), QueueError> {
        match &self.recorded {
            Some(recorded) if recorded.region.is_lost() => Err(QueueError::RecordLost),
            _ => Ok(()),
        }
    }

    /// Records requests in progress in `region`, as queue `queue`, and goes on with what is
    /// recorded there. To be called before the ring is found.
    pub fn record(&mut self, region: Arc<InflightRegion>, queue: u16) {
        self.recorded = Some(Recorded::new(region, queue));
    }

    /// Finds the ring through `mem`, at the position in the record if there is one.
    ///
    /// # Errors
    /// The ring is not there, or broken; the record is broken.
    pub fn find(&mut self, mem: &impl Translate) -> Result<(), QueueError> {
        if let Some(recorded) = &mut self.recorded
            && recorded.is_closed()
        {
            self.ring = recorded.open(self.ring.config(), mem)?;
        }
        self.check_record()?;
        Ok(self.ring.revalidate(mem)?)
    }
}
