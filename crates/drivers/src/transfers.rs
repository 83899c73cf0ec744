//! Buffers that a device works on: mapped before and unmapped after, with shared syncs.

use core::{fmt, mem};

use ringfence_dma::{
    Device, Direction, DmaBuffer, MapBatch, MapError, Mapping, Returned, UnmapBatch, UnmapError,
};
use ringfence_iommu::Domain;
use ringfence_iova::Allocator;

/// The transfers of one queue of a device: the part of a driver that is the same for every device.
///
/// A transfer has a number, by which the driver recognises the device's completion, a buffer of
/// type `B` (`Vec<_>`: a scatter list) unless its memory is mapped already, and the driver's own
/// record, `W`. Its steps are:
///
/// 1. [`take`](Self::take) gives it a number; the driver fills in [`work`](Self::work).
/// 2. [`map`](Self::map) gathers its buffer, and [`begin_maps`](Self::begin_maps) starts one map sync
///    for all that were gathered.
/// 3. [`poll_maps`](Self::poll_maps) hands out those that the IOMMU has mapped; the driver puts
///    them into the device's ring.
/// 4. The device completes it. [`end`](Self::end) gathers the buffer once more, and
///    [`begin_unmaps`](Self::begin_unmaps) starts one invalidation for all that were gathered.
/// 5. [`poll_unmaps`](Self::poll_unmaps) hands out the buffers that the device reaches no longer
///    (under a lazy policy: no longer for long), and the number is free again.
///
/// Under a policy that shares its syncs
/// ([`Policy::batches_maps`](ringfence_dma::Policy::batches_maps),
/// [`batches_unmaps`](ringfence_dma::Policy::batches_unmaps)) only [`wait`](Self::wait),
/// [`finish_maps`](Self::finish_maps) and [`finish_unmaps`](Self::finish_unmaps) wait here. Once it
/// has grown to the number of transfers in flight it allocates nothing. Drop unmaps what it holds,
/// and waits for that: a driver first has the device forget the transfers, or keeps their memory
/// ([`take_submitted`](Self::take_submitted)).
pub struct Transfers<D: Domain + 'static, A: Allocator + 'static, B, W> {
    maps: MapBatch<D, A, B, usize>,
    unmaps: UnmapBatch<D, A, B, usize>,
    slots: Vec<Slot<B, W>>,
    free: Vec<usize>,
    most: usize,
}

struct Slot<B, W> {
    work: W,
    state: State<B>,
}

impl<B, W> Slot<B, W> {
    /// The state of a transfer that has only a number so far.
    #[track_caller]
    fn taken(&mut self, at: usize) -> &mut State<B> {
        assert!(matches!(self.state, State::Taken), "transfer {at} has begun before, or has ended");
        &mut self.state
    }
}

enum State<B> {
    Free,
    /// It has a number.
    Taken,
    Mapping,
    /// The device has it, or is about to get it.
    Submitted(Option<Mapping<B>>),
    Unmapping,
}

impl<B> State<B> {
    /// Gathers a mapping, to be unmapped.
    fn ending<D: Domain, A: Allocator>(
        unmaps: &mut UnmapBatch<D, A, B, usize>,
        mapping: Mapping<B>,
        at: usize,
        free: &mut Vec<usize>,
    ) -> State<B> {
        match unmaps.push(mapping, at) {
            Ok(()) => State::Unmapping,
            // The driver has replaced it with another device's mapping: it is dropped here.
            Err(_) => {
                free.push(at);
                State::Free
            }
        }
    }
}

impl<D: Domain, A: Allocator, B, W> Transfers<D, A, B, W> {
    /// At most `most` transfers at a time, whose buffers `device` maps.
    pub fn new(device: &Device<D, A>, most: usize) -> Self {
        Transfers {
            maps: device.map_batch(),
            unmaps: device.unmap_batch(),
            slots: Vec::new(),
            free: Vec::new(),
            most,
        }
    }

    /// How many more transfers there can be.
    pub fn room(&self) -> usize {
        self.most - self.under_way()
    }

    /// How many transfers have a number.
    pub fn under_way(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// A number for a transfer, less than the maximum; `None`: none is free. Its
    /// [`work`](Self::work) is that of the previous transfer with the number.
    pub fn take(&mut self) -> Option<usize>
    where
        W: Default,
    {
        let at = match self.free.pop() {
            Some(at) => at,
            None if self.slots.len() < self.most => {
                self.slots.push(Slot { work: W::default(), state: State::Free });
                self.slots.len() - 1
            }
            None => return None,
        };
        self.slots[at].state = State::Taken;
        Some(at)
    }

    /// The driver's record of a transfer.
    ///
    /// # Panics
    /// The number was never taken.
    #[track_caller]
    pub fn work(&mut self, at: usize) -> &mut W {
        &mut self.slots[at].work
    }

    /// Gives back the number of a transfer whose buffer is not mapped, or could not be.
    ///
    /// # Panics
    /// There is no such transfer with the number.
    #[track_caller]
    pub fn release(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        assert!(
            matches!(slot.state, State::Taken | State::Submitted(None)),
            "transfer {at} has a buffer, or has ended"
        );
        slot.state = State::Free;
        self.free.push(at);
    }

    /// Records that the device gets a transfer that has no buffer to map.
    ///
    /// # Panics
    /// The number was not just [taken](Self::take).
    #[track_caller]
    pub fn submit_unmapped(&mut self, at: usize) {
        *self.slots[at].taken(at) = State::Submitted(None);
    }

    /// Gathers a transfer's buffer, to be mapped.
    ///
    /// # Errors
    /// As [`MapBatch::push`]. The transfer keeps its number.
    ///
    /// # Panics
    /// The number was not just [taken](Self::take).
    #[track_caller]
    pub fn map(&mut self, at: usize, buffer: B, direction: Direction) -> Result<(), MapError<B>>
    where
        B: DmaBuffer<D::Target>,
    {
        let state = self.slots[at].taken(at);
        self.maps.push(buffer, direction, at).map_err(|(_, error)| error)?;
        *state = State::Mapping;
        Ok(())
    }

    /// Starts to map what was gathered, with one sync.
    pub fn begin_maps(&mut self) {
        self.maps.begin();
    }

    /// Whether buffers are being mapped, or are gathered for it.
    pub fn is_mapping(&self) -> bool {
        !self.maps.is_empty()
    }

    /// Hands out what is mapped; returns how many transfers. `submit` puts a transfer into the
    /// device's ring, and returns whether it did. If not, or if the buffer could not be mapped, the
    /// transfer ends here: [`poll_unmaps`](Self::poll_unmaps) hands out a buffer that the device
    /// never got, and a number whose buffer could not be mapped is free.
    pub fn poll_maps(
        &mut self,
        mut submit: impl FnMut(usize, &mut W, Result<&mut Mapping<B>, MapError<B>>) -> bool,
    ) -> usize {
        if self.maps.is_empty() {
            return 0;
        }
        let (slots, free, unmaps) = (&mut self.slots, &mut self.free, &mut self.unmaps);
        self.maps.poll(|at, mapping| {
            let Slot { work, state } = &mut slots[at];
            match mapping {
                Ok(mut mapping) => {
                    if submit(at, work, Ok(&mut mapping)) {
                        *state = State::Submitted(Some(mapping));
                        return;
                    }
                    // The device never got it, and wrote nothing.
                    let noted = mapping.note_written(0..0);
                    debug_assert!(noted.is_ok(), "no bytes lie in every mapping");
                    *state = State::ending(unmaps, mapping, at, free);
                }
                Err(error) => {
                    submit(at, work, Err(error));
                    *state = State::Free;
                    free.push(at);
                }
            }
        })
    }

    /// As [`poll_maps`](Self::poll_maps) for all that was gathered, and waits for it.
    pub fn finish_maps(
        &mut self,
        mut submit: impl FnMut(usize, &mut W, Result<&mut Mapping<B>, MapError<B>>) -> bool,
    ) {
        self.maps.begin();
        while !self.maps.is_empty() {
            self.maps.wait();
            self.poll_maps(&mut submit);
        }
    }

    /// A transfer that the device has, and its mapping if it has one. `None`: there is no such
    /// transfer; a device that names it is broken.
    pub fn submitted(&mut self, at: usize) -> Option<(&mut W, Option<&mut Mapping<B>>)> {
        match self.slots.get_mut(at)? {
            Slot { work, state: State::Submitted(mapping) } => Some((work, mapping.as_mut())),
            _ => None,
        }
    }

    /// The device has completed it: gathers the transfer's buffer, to be unmapped; returns how many
    /// are gathered. A transfer without a buffer keeps its number, and counts as submitted, until
    /// [`release`](Self::release).
    ///
    /// # Panics
    /// The device does not have the transfer.
    #[track_caller]
    pub fn end(&mut self, at: usize) -> usize {
        let State::Submitted(mapping) = &mut self.slots[at].state else {
            panic!("transfer {at} was not submitted")
        };
        if let Some(mapping) = mapping.take() {
            self.slots[at].state = State::ending(&mut self.unmaps, mapping, at, &mut self.free);
        }
        self.unmaps.gathered()
    }

    /// Gathers a mapping of the caller's, under a number that was just [taken](Self::take), to be
    /// unmapped; its IOVA is then handed out too, as [`Mapping::unmap_watched`] does. Returns how
    /// many are gathered.
    ///
    /// # Errors
    /// The mapping is of another device; it is given back, and the number stays taken.
    ///
    /// # Panics
    /// The number was not just taken.
    #[track_caller]
    #[allow(clippy::result_large_err, reason = "what is given back is moved as it came")]
    pub fn end_watched(&mut self, at: usize, mapping: Mapping<B>) -> Result<usize, Mapping<B>> {
        let state = self.slots[at].taken(at);
        self.unmaps.push_watched(mapping, at)?;
        *state = State::Unmapping;
        Ok(self.unmaps.gathered())
    }

    /// Starts to unmap what was gathered, with one invalidation.
    pub fn begin_unmaps(&mut self) {
        self.unmaps.begin();
    }

    /// Whether buffers are being unmapped, or are gathered for it.
    pub fn is_unmapping(&self) -> bool {
        !self.unmaps.is_empty()
    }

    /// Hands out the buffers that are unmapped, and frees their numbers; returns how many. If one
    /// could not be unmapped, `each` gets the error: the device may still reach it, and it is
    /// leaked with the error.
    pub fn poll_unmaps(
        &mut self,
        mut each: impl FnMut(usize, &mut W, Result<Returned<B>, UnmapError<B>>),
    ) -> usize {
        if self.unmaps.is_empty() {
            return 0;
        }
        let (slots, free) = (&mut self.slots, &mut self.free);
        self.unmaps.poll(|at, returned| {
            let slot = &mut slots[at];
            slot.state = State::Free;
            free.push(at);
            each(at, &mut slot.work, returned);
        })
    }

    /// As [`poll_unmaps`](Self::poll_unmaps) for all that was gathered, and waits for it.
    pub fn finish_unmaps(
        &mut self,
        mut each: impl FnMut(usize, &mut W, Result<Returned<B>, UnmapError<B>>),
    ) {
        self.unmaps.begin();
        while !self.unmaps.is_empty() {
            self.unmaps.wait();
            self.poll_unmaps(&mut each);
        }
    }

    /// Waits for the IOMMU: until the oldest map sync is over, or else the oldest invalidation, if
    /// one was begun. Maps first: the device is still without the transfers that wait for them.
    pub fn wait(&mut self) {
        if self.maps.is_empty() { self.unmaps.wait() } else { self.maps.wait() }
    }

    /// Takes all transfers that the device has, and whose memory it may be working on: their
    /// records, and their mappings, which the caller drops, keeps or forgets. A number is free once
    /// the iterator has passed it.
    pub fn take_submitted(&mut self) -> impl Iterator<Item = (&mut W, Option<Mapping<B>>)> {
        let free = &mut self.free;
        self.slots.iter_mut().enumerate().filter_map(|(at, slot)| {
            match mem::replace(&mut slot.state, State::Free) {
                State::Submitted(mapping) => {
                    free.push(at);
                    Some((&mut slot.work, mapping))
                }
                other => {
                    slot.state = other;
                    None
                }
            }
        })
    }
}

impl<D: Domain, A: Allocator, B, W> fmt::Debug for Transfers<D, A, B, W> {
    ringfence_sync::shows!(Transfers as it, under_way: it.under_way(), most: it.most);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ringfence_dma::{DmaConfig, Policy};
    use ringfence_iommu::{
        Geometry, HostAddr, Iova, PageSizes, Range, SoftDomain, shootdown::Shootdown, table::Limits,
    };
    use ringfence_iova::{Aperture, Slabs};
    use ringfence_sync::cpu::OsCpu;

    use super::*;

    type Space = Slabs<OsCpu>;
    type Soft = Arc<SoftDomain<HostAddr>>;
    type Test = Transfers<Soft, Space, Vec<u8>, u64>;

    /// A device with room for `pages` pages of addresses.
    fn device(pages: u64, policy: Policy) -> Device<Soft, Space> {
        let end = pages * 4096 - 1;
        let aperture = Range::new(Iova(0), Iova(end)).unwrap();
        let geometry = Geometry::new(PageSizes::from_granule(4096).unwrap(), aperture);
        let domain = SoftDomain::new(geometry, Limits::NONE, Shootdown::new(1));
        let space = Slabs::new(Aperture::new(0, end, 4096).unwrap(), OsCpu::new());
        Device::builder(domain).allocator(space).config(DmaConfig::new(policy)).build().unwrap()
    }

    fn map(transfers: &mut Test, work: u64) -> usize {
        let at = transfers.take().unwrap();
        *transfers.work(at) = work;
        transfers.map(at, vec![0; 64], Direction::FromDevice).unwrap();
        at
    }

    /// The records of all transfers that are unmapped in the end.
    fn unmapped(transfers: &mut Test) -> Vec<u64> {
        let mut all = Vec::new();
        transfers.finish_unmaps(|_, work, returned| {
            assert_eq!(returned.unwrap().buffer.len(), 64);
            all.push(*work);
        });
        all
    }

    #[test]
    fn what_is_under_way_together_shares_its_syncs() {
        let device = device(1 << 20, Policy::StrictMap);
        let mut transfers = Test::new(&device, 8);
        for round in 0..3 {
            let numbers: Vec<usize> = (0..8).map(|work| map(&mut transfers, work)).collect();
            assert_eq!((transfers.room(), transfers.take()), (0, None));
            transfers.begin_maps();
            let mut mapped = Vec::new();
            transfers.finish_maps(|at, &mut work, mapping| {
                assert!(mapping.unwrap().len() == 64);
                mapped.push((at, work));
                true
            });
            assert_eq!(mapped, numbers.iter().copied().zip(0..).collect::<Vec<_>>());
            for (gathered, &at) in (1..).zip(&numbers) {
                assert_eq!(transfers.end(at), gathered);
                assert!(transfers.submitted(at).is_none(), "it is completed");
            }
            assert_eq!(unmapped(&mut transfers), (0..8).collect::<Vec<_>>());
            let stats = device.stats();
            assert_eq!((stats.map_syncs, stats.unmap_syncs), (round + 1, round + 1));
            assert_eq!(transfers.under_way(), 0);
        }
    }

    #[test]
    fn what_was_not_submitted_comes_back() {
        let device = device(1 << 20, Policy::StrictMap);
        let mut transfers = Test::new(&device, 8);
        let [kept, refused] = [1, 2].map(|work| map(&mut transfers, work));
        transfers.finish_maps(|at, _, _| at == kept);
        assert!(transfers.submitted(refused).is_none() && transfers.submitted(kept).is_some());
        assert!(transfers.submitted(7).is_none() && transfers.submitted(usize::MAX).is_none());
        assert_eq!(unmapped(&mut transfers), [2]);
        assert_eq!(transfers.under_way(), 1);
        let held: Vec<_> =
            transfers.take_submitted().map(|(work, mapping)| (*work, mapping)).collect();
        assert!(matches!(held[..], [(1, Some(_))]));
        assert_eq!(transfers.under_way(), 0);
        drop(transfers);
        assert_eq!(device.stats().unmaps, 1, "what was taken outlives the queue");
    }

    #[test]
    fn a_buffer_that_cannot_be_mapped_comes_back_at_once() {
        let device = device(2, Policy::Strict);
        let mut transfers = Test::new(&device, 8);
        let mut held = 0;
        let refused = loop {
            let at = transfers.take().unwrap();
            match transfers.map(at, vec![0; 64], Direction::ToDevice) {
                Ok(()) => held += 1,
                Err(error) => break (at, error.into_buffer().unwrap().len()),
            }
            assert!(held <= 2, "two pages hold two mappings");
        };
        assert_eq!(refused.1, 64);
        transfers.release(refused.0);
        assert_eq!(transfers.under_way(), held);
    }

    #[test]
    fn a_transfer_without_a_buffer_keeps_its_number_until_it_is_released() {
        let mut transfers = Test::new(&device(16, Policy::Strict), 2);
        let at = transfers.take().unwrap();
        assert!(transfers.submitted(at).is_none());
        transfers.submit_unmapped(at);
        assert!(matches!(transfers.submitted(at), Some((_, None))));
        transfers.end(at);
        assert_eq!(transfers.room(), 1);
        transfers.release(at);
        assert_eq!(transfers.room(), 2);
    }

    #[test]
    #[should_panic(expected = "transfer 0 was not submitted")]
    fn a_completion_of_what_was_not_submitted_is_refused() {
        let mut transfers = Test::new(&device(16, Policy::Strict), 2);
        let at = map(&mut transfers, 0);
        transfers.end(at);
    }
}
