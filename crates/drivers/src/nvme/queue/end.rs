//! The end of a queue with commands in flight.

use std::mem::{forget, take};

use ringfence_dma::{DmaBuffer, Returned};
use ringfence_iommu::{Domain, HostAddr};
use ringfence_iova::Allocator;

use super::{
    super::{Completion, Error, Failure, Registers},
    IoQueue, end_of, not_mapped,
};

impl<D, A, R, B> IoQueue<D, A, R, B>
where
    D: Domain<Target = HostAddr> + 'static,
    A: Allocator + 'static,
    R: Registers,
    B: DmaBuffer<HostAddr>,
{
    /// Stops the controller with all its queues and hands out what this one holds: commands in
    /// flight as [`Failure::Abandoned`]. For a queue that cannot go on.
    ///
    /// # Errors
    /// The controller does not stop: data that it works on is not handed out, since it may still
    /// write there. Or data could not be unmapped, and is leaked.
    pub fn abandon(&mut self, mut each: impl FnMut(Completion<B>)) -> Result<(), Error> {
        self.failed.get_or_insert(Error::Stopped);
        self.inner.stop()?;
        self.submitted = 0;
        let (spare, mut result) = (&mut self.spare, Ok(()));
        self.refused.drain(..).for_each(&mut each);
        // The controller never gets commands that are mapped only now.
        self.transfers.finish_maps(|_, noted, mapping| match mapping {
            Ok(_) => true,
            Err(error) => {
                let refused = not_mapped(noted, error, spare).map(&mut each);
                result = std::mem::replace(&mut result, Ok(())).and(refused);
                false
            }
        });
        for at in 0..self.depth {
            if let Some(Some(completion)) = end_of(&mut self.transfers, at, Err(Failure::Abandoned))
            {
                each(completion);
            }
        }
        self.transfers.finish_unmaps(|_, noted, returned| match returned {
            Ok(Returned { buffer: list, .. }) => each(noted.unmapped(list, spare)),
            Err(error) => result = Err(Error::Unmap(error.error())),
        });
        result
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
        // It may go on for ever. It cannot reach what is unmapped, unless nothing is translated.
        let confined = self.inner.is_confined();
        for (noted, mapping) in self.transfers.take_submitted() {
            match mapping {
                Some(mapping) if confined && !mapping.is_bounced() => drop(mapping),
                held => forget((held, take(&mut noted.kept))),
            }
        }
        if !confined {
            forget(self.rings.take());
        }
    }
}
