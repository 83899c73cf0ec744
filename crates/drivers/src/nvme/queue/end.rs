//! How a queue ends that has commands under way.

use std::mem::{forget, take};

use ringfence_dma::DmaBuffer;
use ringfence_iommu::{Domain, HostAddr};
use ringfence_iova::Allocator;

use super::{
    super::{
        Completion, Error, Failure, NotAsked, Registers,
        slot::{Held, State},
    },
    IoQueue,
};

impl<D, A, R, B> IoQueue<D, A, R, B>
where
    D: Domain<Target = HostAddr> + 'static,
    A: Allocator + 'static,
    R: Registers,
    B: DmaBuffer<HostAddr>,
{
    /// Stops the controller with all its queues and hands out what this one holds: what was under way
    /// as [`Failure::Abandoned`]. For a queue that cannot go on.
    ///
    /// # Errors
    /// The controller does not stop: what it works on is not handed out, since it may still write
    /// there. Or data could not be unmapped, and is leaked.
    pub fn abandon(&mut self, mut each: impl FnMut(Completion<B>)) -> Result<(), Error> {
        self.failed.get_or_insert(Error::Stopped);
        self.inner.stop()?;
        self.asked = 0;
        let (slots, free, spare) = (&mut self.slots, &mut self.free, &mut self.spare);
        let unmaps = &mut self.unmaps;
        let mut result = Ok(());
        self.refused.drain(..).for_each(&mut each);
        self.maps.finish(|at, mapping| match mapping {
            Ok(mapping) => slots[usize::from(at)].state = State::Asked(Held::Mapped(mapping)),
            Err(error) => {
                let slot = &mut slots[usize::from(at)];
                slot.state = State::Free;
                free.push(at);
                let why = error.error();
                match error.into_buffer() {
                    Some(list) => each(Completion {
                        token: slot.token,
                        data: slot.data_of(list, spare),
                        outcome: Err(NotAsked::Map(why).into()),
                    }),
                    None => result = Err(Error::Map(why)),
                }
            }
        });
        for (at, slot) in (0..).zip(&mut *slots) {
            match slot.take_asked(Err(Failure::Abandoned)) {
                Some(Held::Mapped(mapping)) => {
                    let pushed = unmaps.push(mapping, at);
                    debug_assert!(pushed.is_ok(), "a mapping of this device");
                }
                Some(Held::Kept(data)) => {
                    slot.state = State::Free;
                    free.push(at);
                    let (token, outcome) = (slot.token, Err(Failure::Abandoned));
                    each(Completion { token, data, outcome });
                }
                None => {}
            }
        }
        let mut count = 0;
        loop {
            result = result.and(self.hand_out(&mut count, &mut each));
            if self.unmaps.is_empty() {
                return result;
            }
            self.unmaps.wait();
        }
    }
}

impl<D, A, R, B> Drop for IoQueue<D, A, R, B>
where
    D: Domain + 'static,
    A: Allocator + 'static,
    R: Registers,
{
    fn drop(&mut self) {
        let deleted = {
            let mut state = self.inner.state.lock();
            let deleted = state.admin.as_mut().map_or(Ok(()), |admin| admin.delete(self.id));
            if deleted.is_ok() {
                state.queues[usize::from(self.id) - 1] = false;
            }
            deleted
        };
        if deleted.is_ok() || self.inner.stop().is_ok() {
            return;
        }
        // It may go on for ever. What is unmapped it cannot reach, unless nothing is translated.
        let confined = self.inner.is_confined();
        for slot in take(&mut self.slots) {
            match slot.state {
                State::Asked(Held::Mapped(mapping)) if confined && !mapping.is_bounced() => {
                    drop(mapping);
                }
                State::Asked(held) => forget(held),
                _ => {}
            }
        }
        if !confined {
            forget(self.rings.take());
        }
    }
}
