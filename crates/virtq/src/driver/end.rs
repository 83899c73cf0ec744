//! What the driver's ends of both formats share: the chains that are added and taken back.

use core::fmt;

use ringfence_mem::Window;
use ringfence_sync::atomic::{Ordering, fence};

use super::{
    QueueConfig, Rings, Used,
    ids::{Ids, UsedChain},
};
use crate::{AddError, Desc, RingError, layout};

/// The parts specific to a format: its areas.
pub(super) trait Format: fmt::Debug + Sized {
    /// The driver's position in them. It is copied out for a burst and back after it: kept in the
    /// queue, it would be stored and loaded again for each chain.
    type Position: Copy + fmt::Debug;

    /// The areas, initialised, and the initial position.
    ///
    /// # Errors
    /// The size is invalid, or an area is too small for it.
    fn new(config: QueueConfig, rings: Rings) -> Result<(Self, Self::Position), RingError>;

    /// Writes a chain of several descriptors, for which there is room, under the first free id;
    /// returns its last id.
    fn write(&self, at: &mut Self::Position, ids: &Ids, descs: &[Desc]) -> u16;

    /// Writes a chain of one descriptor, for which there is room, under the first free id:
    /// address, length and flags.
    fn write_one(&self, at: &mut Self::Position, ids: &Ids, desc: (u64, u32, u16));

    /// Descriptor `position` of an indirect table of `count`.
    fn entry(desc: &Desc, position: usize, count: usize) -> [u8; layout::DESC_SIZE];

    /// Makes visible what was written since the last call: at least one chain.
    fn publish(&self, at: &mut Self::Position, ids: &Ids);

    /// Whether the device wants a kick for what was published since the last call.
    fn needs_kick(&self, at: &mut Self::Position, ids: &Ids) -> bool;

    /// Looks for what the device has given back, if less than `most` is known.
    ///
    /// # Errors
    /// More chains are reported than there can be.
    fn look(&self, at: &mut Self::Position, ids: &Ids, most: usize) -> Result<(), RingError>;

    /// The next chain that the device has given back, as far as is known.
    fn next(&self, at: &Self::Position, ids: &Ids) -> Option<UsedChain>;

    /// Advances past a chain of so many descriptors that was taken back.
    fn forward(&self, at: &mut Self::Position, count: u16);

    /// Disables interrupts.
    fn suppress(&self, ids: &Ids);

    /// Enables an interrupt with the next used chain.
    fn enable(&self, at: &Self::Position, ids: &Ids);
}

/// The driver's end of a queue of format `F`.
#[derive(Debug)]
pub(super) struct End<F: Format> {
    areas: F,
    at: F::Position,
    ids: Ids,
    /// Whether interrupts are enabled.
    notify: bool,
    broken: Option<RingError>,
}

impl<F: Format> End<F> {
    /// As [`Queue::with_config`](super::Queue::with_config), for this format.
    ///
    /// # Errors
    /// As there.
    pub(super) fn new(config: QueueConfig, rings: Rings) -> Result<End<F>, RingError> {
        let (areas, at) = F::new(config, rings)?;
        Ok(End { areas, at, ids: Ids::new(config.size), notify: true, broken: None })
    }

    #[cold]
    fn break_with(&mut self, error: RingError) -> RingError {
        self.broken = Some(error);
        error
    }

    #[inline]
    fn look(&mut self, most: usize) -> Result<(), RingError> {
        let looked = self.areas.look(&mut self.at, &self.ids, most);
        looked.map_err(|error| self.break_with(error))
    }
}

/// The flag of a buffer that the device writes.
#[inline]
pub(super) fn write_flag(desc: &Desc) -> u16 {
    if desc.write { layout::DESC_F_WRITE } else { 0 }
}

impl<F: Format> End<F> {
    /// Checks a chain that takes `wanted` descriptors of the queue, and may have `most` buffers;
    /// returns its writable bytes.
    #[inline(always)]
    fn checked(&self, descs: &[Desc], wanted: usize, most: u16) -> Result<u32, AddError> {
        if let Some(error) = self.broken {
            return Err(AddError::Broken(error));
        }
        if descs.is_empty() {
            return Err(AddError::Empty);
        }
        let free = self.free_descs();
        if descs.len() > usize::from(most) {
            return Err(AddError::TooMany { wanted: descs.len(), size: most });
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

    pub(super) fn size(&self) -> u16 {
        self.ids.size()
    }

    pub(super) fn free_descs(&self) -> u16 {
        self.ids.free
    }

    pub(super) fn in_flight(&self) -> u16 {
        self.ids.in_flight()
    }

    pub(super) fn broken(&self) -> Option<RingError> {
        self.broken
    }

    // Callers pass chains of constant length: the compiler unrolls the loops over it.
    #[inline(always)]
    pub(super) fn add(&mut self, descs: &[Desc], token: u64) -> Result<(), AddError> {
        let room = self.checked(descs, descs.len(), self.size())?;
        let tail = if let [only] = descs {
            let one = (only.addr, only.len, write_flag(only));
            self.areas.write_one(&mut self.at, &self.ids, one);
            self.ids.first
        } else {
            self.areas.write(&mut self.at, &self.ids, descs)
        };
        self.ids.add(tail, descs.len() as u16, room, token);
        Ok(())
    }

    #[inline]
    pub(super) fn add_indirect(
        &mut self,
        table_addr: u64,
        table: &Window,
        descs: &[Desc],
        token: u64,
    ) -> Result<(), AddError> {
        // Virtio 2.7.5.3.1 allows a table no more buffers than the queue has; Linux's drivers have
        // more, and devices take them.
        let room = self.checked(descs, 1, self.size().max(layout::MAX_INDIRECT))?;
        let bytes = descs.len() * layout::DESC_SIZE;
        if table.len() < bytes {
            return Err(AddError::Table { wanted: descs.len(), len: table.len() });
        }
        for (position, desc) in descs.iter().enumerate() {
            let entry = F::entry(desc, position, descs.len());
            table.write(position * layout::DESC_SIZE, &entry);
        }
        // Fits: `checked` limited the chain to 2^15 buffers.
        let desc = (table_addr, bytes as u32, layout::DESC_F_INDIRECT);
        self.areas.write_one(&mut self.at, &self.ids, desc);
        self.ids.add(self.ids.first, 1, room, token);
        Ok(())
    }

    #[inline]
    pub(super) fn add_burst(
        &mut self,
        buffers: impl IntoIterator<Item = (Desc, u64)>,
    ) -> Result<usize, AddError> {
        if let Some(error) = self.broken {
            return Err(AddError::Broken(error));
        }
        let mut at = self.at;
        let (mut added, mut refused) = (0, None);
        let mut buffers = buffers.into_iter();
        while self.ids.free > 0
            && let Some((desc, token)) = buffers.next()
        {
            if desc.wraps() {
                refused = Some(AddError::Wraps { at: added });
                break;
            }
            let one = (desc.addr, desc.len, write_flag(&desc));
            self.areas.write_one(&mut at, &self.ids, one);
            let room = if desc.write { desc.len } else { 0 };
            self.ids.add(self.ids.first, 1, room, token);
            added += 1;
        }
        self.at = at;
        refused.map_or(Ok(added), Err)
    }

    #[inline]
    pub(super) fn publish(&mut self) {
        if self.ids.publish() {
            self.areas.publish(&mut self.at, &self.ids);
        }
    }

    #[inline]
    pub(super) fn needs_kick(&mut self) -> bool {
        self.areas.needs_kick(&mut self.at, &self.ids)
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Result<Option<Used>, RingError> {
        let mut out = [Used::default()];
        Ok(match self.pop_burst(&mut out)? {
            0 => None,
            _ => Some(out[0]),
        })
    }

    #[inline(always)]
    pub(super) fn pop_burst(&mut self, out: &mut [Used]) -> Result<usize, RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        self.look(out.len())?;
        let mut at = self.at;
        let (mut done, mut error) = (0, None);
        for place in out {
            let Some(chain) = self.areas.next(&at, &self.ids) else { break };
            match self.ids.take(chain) {
                Ok((used, count)) => {
                    *place = used;
                    self.areas.forward(&mut at, count);
                    done += 1;
                }
                Err(found) => {
                    error = Some(found);
                    break;
                }
            }
        }
        self.at = at;
        match error.map(|error| self.break_with(error)) {
            Some(error) if done == 0 => Err(error),
            // Those before it are returned first: the next call fails again.
            _ => Ok(done),
        }
    }

    #[inline]
    pub(super) fn suppress_notifications(&mut self) {
        // The device reads this cache line: do not touch it without need.
        if core::mem::replace(&mut self.notify, false) {
            self.areas.suppress(&self.ids);
        }
    }

    pub(super) fn enable_notifications(&mut self) -> bool {
        self.notify = true;
        self.areas.enable(&self.at, &self.ids);
        // The mirror image of the device's `publish_used`, argued in `needs_kick` of `split.rs`:
        // either we see what the device has published, or it sees that interrupts are enabled.
        fence(Ordering::SeqCst);
        // A broken queue must be reported as well.
        self.broken.is_some()
            || self.look(1).is_err()
            || self.areas.next(&self.at, &self.ids).is_some()
    }
}
