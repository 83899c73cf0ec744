//! The driver's end of a request queue behind the DMA API.

use ringfence_dma::{
    Device, Direction, DmaBuffer, Error, MapError, Mapping, Policy, Returned, Segment, UnmapError,
};
use ringfence_iommu::{Address, Domain};
use ringfence_iova::Allocator;
use ringfence_virtq::{AddError, RingError, blk::Kind};
use std::time::Duration;

use super::queue::{Done, DriverQueue};
use crate::transfers::Transfers;

/// How requests share mappings and syncs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batching {
    /// The most requests that are mapped with one sync, and the most mappings that are unmapped
    /// with one. 1 (or 0): each by itself.
    pub requests: usize,
    /// The most buffers that become one mapping, where they are adjacent in memory and have the
    /// same direction: one MAP and one UNMAP for all of them. Such a mapping is unmapped as a
    /// whole, so that a buffer waits for the last of its neighbours. So that the device has others
    /// meanwhile, a quarter of the requests under way are one at most, or 4 if that is more. 1 (or 0): none
    /// are joined, as under [`Policy::Bounce`] and under policies without
    /// [shared syncs](ringfence_dma::Policy::batches_maps).
    pub chunk: usize,
}

impl Batching {
    /// The most buffers that become one mapping while so many requests are under way.
    fn joined(self, under_way: usize) -> usize {
        self.chunk.min((under_way / 4).max(FEW))
    }
}

/// Up to so many buffers are joined however few requests are under way: that they wait for one another costs less
/// than to map each by itself.
const FEW: usize = 4;

impl Default for Batching {
    /// 64 requests per sync, 16 buffers per mapping.
    fn default() -> Batching {
        Batching { requests: 64, chunk: 16 }
    }
}

/// A request that is completed, and whose buffer the device can no longer reach (under a lazy
/// policy: no longer for long).
#[derive(Debug)]
pub struct Completion<B> {
    /// The number that the request was submitted with.
    pub token: u64,
    /// Its buffer.
    pub buffer: B,
    /// The device's result, or why the request was not submitted.
    pub outcome: Result<Done, NotSubmitted>,
}

/// Why a request was never submitted to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotSubmitted {
    /// Its buffer, or one that was to be mapped with it, could not be mapped.
    #[error("its buffer, or one that was to be mapped with it, could not be mapped")]
    Map(#[source] Error),
    /// It does not fit the ring.
    #[error("it does not fit the ring")]
    Add(#[source] AddError),
}

/// Why a queue cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MappedError {
    /// A buffer could not be mapped, and the mapped part of it not unmapped again: it is leaked.
    #[error("a buffer was mapped in part and could not be unmapped again: it is leaked")]
    Map(#[source] Error),
    /// A buffer could not be unmapped: the device may still reach it, and it is leaked.
    #[error("a buffer could not be unmapped, and is leaked")]
    Unmap(#[source] ringfence_iommu::Error),
    /// The device broke the ring.
    #[error("the device broke the rules of the ring")]
    Ring(#[from] RingError),
    /// The device completed a request that is not in flight.
    #[error("the device completed a request that is not in flight ({0:#x})")]
    Stray(u64),
}

/// The outcome of unmapping a mapping of the caller's.
pub type Unmapped<B> = Result<Returned<Vec<B>>, UnmapError<Vec<B>>>;

/// Requests whose token has this bit are not the queue's: they were put into
/// [`raw`](MappedQueue::raw), and their completions are handed to the caller unchanged.
pub const FOREIGN: u64 = 1 << 63;

/// Group numbers have 31 bits: memory runs out before.
const MOST_GROUPS: usize = 1 << 31;

struct Request {
    kind: Kind,
    sector: u64,
    token: u64,
    /// Its buffer's range among the bytes of its group.
    bytes: core::ops::Range<u64>,
    outcome: Option<Result<Done, NotSubmitted>>,
}

/// Requests whose buffers are one transfer. Without requests: a mapping of the caller's.
#[derive(Default)]
struct Group {
    requests: Vec<Request>,
    /// How many of them are not completed.
    left: usize,
}

struct Staged<B> {
    kind: Kind,
    sector: u64,
    buffer: B,
    token: u64,
    /// Where the buffer begins and ends in memory; the end is wrong if the buffer is in pieces.
    first: u64,
    next: Option<u64>,
}

/// The driver's end of one request queue, which maps the buffers of requests and unmaps those of
/// completions.
///
/// Requests that are submitted before a [`publish`](Self::publish) share one map sync; completions
/// that one [`reap`](Self::reap) finds share one invalidation. Under a policy that shares its syncs
/// neither call waits: a later `reap` submits a request to the device once the IOMMU has its
/// mapping, and returns a buffer once its invalidation is over. A completion is never held back so
/// that others can join it.
///
/// Drop unmaps the buffers that the device still has, and waits for that under a strict policy. Reset the
/// device first under any other, and where buffers are copied: it may still be working on them.
pub struct MappedQueue<D: Domain + 'static, A: Allocator + 'static, B> {
    queue: DriverQueue,
    batching: Batching,
    staged: Vec<Staged<B>>,
    transfers: Transfers<D, A, Vec<B>, Group>,
    /// Empty lists, for reuse.
    lists: Vec<Vec<B>>,
    segments: Vec<Segment>,
    /// Requests that were mapped, or are being mapped, and are not submitted to the device yet.
    waiting: usize,
    /// Requests that were submitted, and not handed out yet.
    under_way: usize,
    /// Requests that could not be submitted, with their buffers.
    refused: Vec<Completion<B>>,
    /// The outcome of unmapping a foreign mapping.
    foreign: Option<Unmapped<B>>,
}

impl<D: Domain, A: Allocator, B: DmaBuffer<D::Target>> MappedQueue<D, A, B> {
    /// A queue whose buffers `device` maps.
    pub fn new(queue: DriverQueue, device: &Device<D, A>, batching: Batching) -> Self {
        let batching = Batching {
            requests: batching.requests.max(1),
            // Without a shared sync there is no reason to wait for neighbours. And a copy has none.
            chunk: match device.effective_policy() {
                policy if policy.batches_maps() && policy != Policy::Bounce => {
                    batching.chunk.clamp(1, batching.requests.max(1))
                }
                _ => 1,
            },
        };
        MappedQueue {
            queue,
            batching,
            staged: Vec::new(),
            transfers: Transfers::new(device, MOST_GROUPS),
            lists: Vec::new(),
            segments: Vec::new(),
            waiting: 0,
            under_way: 0,
            refused: Vec::new(),
            foreign: None,
        }
    }

    /// How many more requests can be submitted.
    pub fn room(&self) -> usize {
        self.queue.room().saturating_sub(self.staged.len() + self.waiting)
    }

    /// How many kicks were sent.
    pub fn kicks(&self) -> u64 {
        self.queue.kicks()
    }

    /// The queue itself, for requests with tokens that have the bit [`FOREIGN`].
    pub fn raw(&mut self) -> &mut DriverQueue {
        &mut self.queue
    }

    /// Adds a request; [`publish`](Self::publish) starts it, and is called here once there are
    /// [`Batching::requests`]. If it cannot be submitted, [`reap`](Self::reap) returns it, with the
    /// reason. `sector` counts 512 bytes. A request without data, such as a flush, has no buffer to
    /// map: it goes through [`raw`](Self::raw).
    ///
    /// # Errors
    /// The queue cannot go on.
    pub fn submit(
        &mut self,
        kind: Kind,
        sector: u64,
        buffer: B,
        token: u64,
    ) -> Result<(), MappedError> {
        let (mut first, mut next) = (0, None);
        if self.batching.chunk > 1 {
            let mut pieces = 0;
            buffer.for_each_segment(&mut |target, len| {
                pieces += 1;
                if pieces == 1 {
                    first = target.as_u64();
                    next = first.checked_add(len);
                } else if next == Some(target.as_u64()) {
                    next = target.as_u64().checked_add(len);
                } else {
                    next = None;
                }
            });
        }
        self.staged.push(Staged { kind, sector, buffer, token, first, next });
        self.under_way += 1;
        if self.staged.len() >= self.batching.requests {
            self.publish()?;
        }
        Ok(())
    }

    /// Maps what was submitted, and gives the device all requests whose mappings are complete.
    ///
    /// # Errors
    /// The queue cannot go on.
    pub fn publish(&mut self) -> Result<(), MappedError> {
        if !self.staged.is_empty() {
            self.map_staged()?;
        }
        self.advance()
    }

    fn map_staged(&mut self) -> Result<(), MappedError> {
        if self.batching.chunk > 1 {
            // The order of requests in flight together means nothing; that of their buffers does.
            let key = |staged: &Staged<B>| (staged.kind.code(), staged.first);
            if !self.staged.is_sorted_by_key(key) {
                self.staged.sort_unstable_by_key(key);
            }
        }
        let most = self.batching.joined(self.under_way);
        let mut staged = std::mem::take(&mut self.staged);
        let mut result = Ok(());
        let mut open: Option<(usize, Vec<B>, Kind, Option<u64>)> = None;
        for Staged { kind, sector, buffer, token, first, next } in staged.drain(..) {
            let len = buffer.len();
            let joins = open.as_ref().is_some_and(|(_, list, held, end)| {
                list.len() < most && *held == kind && *end == Some(first)
            });
            if !joins && let Some((group, list, kind, _)) = open.take() {
                result = result.and(self.push(group, list, kind));
            }
            let (group, list, _, end) = open.get_or_insert_with(|| {
                let group = self.transfers.take().expect("memory ends before");
                (group, self.lists.pop().unwrap_or_default(), kind, None)
            });
            *end = next;
            let requests = &mut self.transfers.work(*group).requests;
            let from = requests.last().map_or(0, |request| request.bytes.end);
            let bytes = from..from.saturating_add(len);
            requests.push(Request { kind, sector, token, bytes, outcome: None });
            list.push(buffer);
        }
        self.staged = staged;
        if let Some((group, list, kind, _)) = open {
            result = result.and(self.push(group, list, kind));
        }
        self.transfers.begin_maps();
        result
    }

    fn push(&mut self, group: usize, list: Vec<B>, kind: Kind) -> Result<(), MappedError> {
        let direction = match kind {
            Kind::In | Kind::GetId => Direction::FromDevice,
            _ => Direction::ToDevice,
        };
        let count = list.len();
        match self.transfers.map(group, list, direction) {
            Ok(()) => {
                self.waiting += count;
                Ok(())
            }
            Err(error) => {
                let refused = refuse(self.transfers.work(group), &mut self.refused, error);
                self.transfers.release(group);
                refused
            }
        }
    }

    /// Gives the device the requests whose mappings are complete by now.
    fn advance(&mut self) -> Result<(), MappedError> {
        let (queue, segments, waiting) = (&mut self.queue, &mut self.segments, &mut self.waiting);
        let (refused, mut result) = (&mut self.refused, Ok(()));
        let handed_out = self.transfers.poll_maps(|at, group, mapping| {
            *waiting -= group.requests.len();
            match mapping {
                Ok(mapping) => {
                    group.submit(at, queue, segments, mapping);
                    // If none of them fits the ring, all come back.
                    group.left > 0
                }
                Err(error) => {
                    let refused = refuse(group, refused, error);
                    result = std::mem::replace(&mut result, Ok(())).and(refused);
                    false
                }
            }
        });
        if handed_out > 0 {
            self.queue.publish();
        }
        result
    }

    /// Does what can be done without waiting: gives the device mapped requests, unmaps completed
    /// ones, and hands out what is unmapped; returns how many. `foreign` gets the completions of
    /// others' requests. Takes no more than `limit` completions.
    ///
    /// # Errors
    /// The queue cannot go on.
    pub fn reap(
        &mut self,
        limit: usize,
        mut foreign: impl FnMut(&mut Self, Done),
        mut each: impl FnMut(Completion<B>),
    ) -> Result<usize, MappedError> {
        self.advance()?;
        for _ in 0..limit {
            let Some(done) = self.queue.reap()? else { break };
            if done.token & FOREIGN != 0 {
                foreign(self, done);
                continue;
            }
            let at = (done.token >> 32) as usize;
            let stray = MappedError::Stray(done.token);
            let Some((group, Some(mapping))) = self.transfers.submitted(at) else {
                return Err(stray);
            };
            let request = group.requests.get_mut(done.token as u32 as usize);
            let request = request.filter(|request| request.outcome.is_none()).ok_or(stray)?;
            request.outcome = Some(Ok(Done { token: request.token, ..done }));
            if matches!(request.kind, Kind::In | Kind::GetId) {
                // As many bytes as the device reports, without the status; limited to the request's
                // buffer.
                let core::ops::Range { start, end } = request.bytes;
                let written = u64::from(done.written.saturating_sub(1)).min(end - start);
                let noted = mapping.note_written(start..start + written);
                debug_assert!(noted.is_ok(), "a request's bytes lie in its mapping");
            }
            group.left -= 1;
            if group.left == 0 && self.transfers.end(at) >= self.batching.requests {
                self.transfers.begin_unmaps();
            }
        }
        self.transfers.begin_unmaps();
        self.hand_out(&mut each)
    }

    /// Has the queue unmap a mapping of the caller's together with the next of its own, watched;
    /// [`take_foreign`](Self::take_foreign) returns the outcome. One at a time. A mapping of
    /// another device is dropped, without an outcome.
    pub fn unmap_foreign(&mut self, mapping: Mapping<Vec<B>>) {
        let at = self.transfers.take().expect("memory ends before");
        match self.transfers.end_watched(at, mapping) {
            Ok(gathered) if gathered >= self.batching.requests => self.transfers.begin_unmaps(),
            Ok(_) => {}
            // It belongs to another device: it is unmapped here, by itself.
            Err(_) => self.transfers.release(at),
        }
    }

    /// The outcome of [`unmap_foreign`](Self::unmap_foreign), once it is over.
    pub fn take_foreign(&mut self) -> Option<Unmapped<B>> {
        self.foreign.take()
    }

    fn hand_out(&mut self, each: &mut impl FnMut(Completion<B>)) -> Result<usize, MappedError> {
        let (refused, under_way) = (self.refused.len(), &mut self.under_way);
        self.refused.drain(..).for_each(|completion| {
            *under_way -= 1;
            each(completion);
        });
        let (lists, foreign) = (&mut self.lists, &mut self.foreign);
        let (mut count, mut result) = (refused, Ok(()));
        self.transfers.poll_unmaps(|_, group, returned| {
            if group.requests.is_empty() {
                *foreign = Some(returned);
                return;
            }
            *under_way -= group.requests.len();
            match returned {
                Ok(Returned { buffer: mut list, .. }) => {
                    for (request, buffer) in group.requests.drain(..).zip(list.drain(..)) {
                        let Some(outcome) = request.outcome else { continue };
                        count += 1;
                        each(Completion { token: request.token, buffer, outcome });
                    }
                    lists.push(list);
                }
                Err(error) => {
                    group.requests.clear();
                    result = Err(MappedError::Unmap(error.error()));
                }
            }
        });
        result.map(|()| count)
    }

    /// Waits until there may be something to reap, or for about `limit`: polls or sleeps, depending
    /// on the notify mode. While the IOMMU has work to do it waits for that, without a limit.
    pub fn wait(&mut self, limit: Duration) {
        if !self.transfers.is_mapping() && !self.transfers.is_unmapping() {
            return self.queue.wait(limit);
        }
        if !self.queue.look_again() {
            // The IOMMU completes soon, whatever the disk does.
            self.transfers.wait();
        }
    }
}

impl Group {
    /// Puts the requests into the ring. One that does not fit gets its outcome at once.
    fn submit<B>(
        &mut self,
        at: usize,
        queue: &mut DriverQueue,
        segments: &mut Vec<Segment>,
        mapping: &Mapping<Vec<B>>,
    ) {
        self.left = self.requests.len();
        let alone = self.requests.len() == 1;
        for (index, request) in self.requests.iter_mut().enumerate() {
            let data = if alone {
                mapping.segments()
            } else {
                segments.clear();
                segments.extend(mapping.segments_of(request.bytes.clone()));
                &*segments
            };
            let token = (at as u64) << 32 | index as u64;
            if let Err(error) = queue.submit(request.kind, request.sector, data, token) {
                request.outcome = Some(Err(NotSubmitted::Add(error)));
                self.left -= 1;
            }
        }
    }
}

/// Returns the requests of a group whose buffers could not be mapped.
fn refuse<B>(
    group: &mut Group,
    refused: &mut Vec<Completion<B>>,
    error: MapError<Vec<B>>,
) -> Result<(), MappedError> {
    let why = error.error();
    let requests = group.requests.drain(..);
    let list = error.into_buffer().ok_or(MappedError::Map(why))?;
    refused.extend(requests.zip(list).map(|(request, buffer)| Completion {
        token: request.token,
        buffer,
        outcome: Err(NotSubmitted::Map(why)),
    }));
    Ok(())
}
