//! Unmapping together what completed together.

#![allow(clippy::result_large_err, reason = "a mapping that is given back is moved as it came")]

use core::{fmt, mem::ManuallyDrop, panic::Location};
use std::{collections::VecDeque, sync::Arc};

use ringfence_iommu::{Domain, Error, Gather, Partial, Pending, Range, Result};
use ringfence_iova::Allocator;

use super::{Flight, Flights, join};
use crate::{
    Device, Mapping, Returned, UnmapError,
    counter::Count,
    flush::{Removed, Watch},
    mapping::Owner,
    port::Port,
    waits::timed,
};

/// Unmaps mappings of one device together: touching ranges as one, with one invalidation for all,
/// after which the buffers go back to their owner (rule [L17], for each of them).
///
/// `B` is the buffer, `T` a tag that comes back with it, such as a request number.
///
/// Made by [`Device::unmap_batch`](crate::Device::unmap_batch). Dropping it unmaps what it holds,
/// and waits for that. It allocates nothing once it has grown to the number of mappings pushed at a
/// time.
///
/// [L17]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l17
pub struct UnmapBatch<D: Domain + 'static, A: Allocator + 'static, B, T = ()> {
    port: Arc<Port<D, A>>,
    /// Members pushed but not begun; then begun but not handed out. After a panic they are leaked
    /// rather than dropped while the device may reach the buffers.
    gathered: Vec<Member<B, T>>,
    begun: VecDeque<Member<B, T>>,
    flights: Flights,
}

impl<D: Domain + 'static, A: Allocator + 'static> Device<D, A> {
    /// A queue that unmaps mappings of this device together.
    pub fn unmap_batch<B, T>(&self) -> UnmapBatch<D, A, B, T> {
        UnmapBatch {
            port: Arc::clone(&self.port),
            gathered: Vec::new(),
            begun: VecDeque::new(),
            flights: Flights::default(),
        }
    }
}

struct Member<B, T> {
    tag: T,
    mapping: ManuallyDrop<Mapping<B>>,
    watched: bool,
    state: State,
}

impl<B, T> Member<B, T> {
    /// Whether its outcome is still unknown.
    fn is_open(&self) -> bool {
        matches!(self.state, State::Open(_))
    }
}

/// The outcome of a member.
enum State {
    /// None yet: its flight decides. `Some` if its IOVA is watched.
    Open(Option<Arc<Watch>>),
    /// Known before its flight was over.
    Known(Result<Option<Arc<Watch>>>),
}

impl<D: Domain + 'static, A: Allocator + 'static, B, T> UnmapBatch<D, A, B, T> {
    /// Adds a mapping. Nothing happens to it before [`begin`](Self::begin).
    ///
    /// # Errors
    /// The mapping belongs to another device; it is given back.
    #[track_caller]
    pub fn push(&mut self, mapping: Mapping<B>, tag: T) -> core::result::Result<(), Mapping<B>> {
        self.add(mapping, tag, false)
    }

    /// As [`push`](Self::push), and hands out the IOVA too when it is unmapped, as
    /// [`Mapping::unmap_watched`] does.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    #[track_caller]
    pub fn push_watched(
        &mut self,
        mapping: Mapping<B>,
        tag: T,
    ) -> core::result::Result<(), Mapping<B>> {
        self.add(mapping, tag, true)
    }

    #[track_caller]
    fn add(
        &mut self,
        mapping: Mapping<B>,
        tag: T,
        watched: bool,
    ) -> core::result::Result<(), Mapping<B>> {
        let mapping = mapping.unmapping(self.port.device_id())?;
        let shared = &*self.port.shared;
        if let (Some(detector), Some(span)) = (&shared.detector, mapping.placed.span) {
            let now_ns = shared.clock.now_ns();
            detector.lock().unmapping(span.range, Some(Location::caller()), now_ns);
        }
        self.gathered.push(Member { tag, mapping, watched, state: State::Open(None) });
        Ok(())
    }

    /// How many mappings were pushed but not begun.
    pub fn gathered(&self) -> usize {
        self.gathered.len()
    }

    /// Whether every buffer was handed out.
    pub fn is_empty(&self) -> bool {
        self.gathered.is_empty() && self.begun.is_empty()
    }

    /// Starts to unmap all that was pushed. Removes their translations and begins one invalidation
    /// for all ([`Policy::batches_unmaps`](crate::Policy::batches_unmaps)), or queues them for one;
    /// under a policy that shares no syncs, or with a bound of exposed bytes, it unmaps them one by
    /// one, and waits as [`Mapping::unmap`] does.
    ///
    /// [`poll`](Self::poll) reports failures.
    pub fn begin(&mut self) {
        if self.gathered.is_empty() {
            return;
        }
        self.end_bounces();
        let mode = self.port.shared.mode.get();
        let lazily = mode.policy.is_lazy() && mode.policy.batches_maps() && !mode.bounds_bytes;
        if mode.policy.batches_unmaps() || lazily {
            self.begin_together(lazily);
        } else {
            self.unmap_each();
        }
    }

    /// Ends the copies, which have nothing to wait for: copies back what the device wrote. (They
    /// are still handed out in order.)
    fn end_bounces(&mut self) {
        let clock = &self.port.shared.clock;
        for member in &mut self.gathered {
            if member.mapping.end_bounce(true, member.watched) {
                let watch = member.watched.then(|| Watch::new(clock.now_ns()));
                member.state = State::Known(Ok(watch));
            }
        }
    }

    fn unmap_each(&mut self) {
        self.push_settled();
        for mut member in self.gathered.drain(..) {
            if member.is_open() {
                let unmapped =
                    self.port.unmap(member.mapping.placed.span, false, member.watched, None);
                member.state = State::Known(unmapped);
            }
            self.begun.push_back(member);
            self.flights.board();
        }
    }

    /// Adds a flight for members whose outcomes are known.
    fn push_settled(&mut self) {
        let ranges = self.flights.ranges();
        let sync = Pending::map(&self.port.shared.domain, ranges);
        self.flights.queue.push_back(Flight { sync, members: 0, settled: true, timed: false });
    }

    /// Removes the translations of all that was pushed, touching ranges as one; also returns those
    /// for which that failed.
    fn remove(&mut self, gather: &mut Gather) -> (Vec<Range>, Vec<(Range, Error)>) {
        let mut ranges = self.flights.ranges();
        ranges.extend(
            self.gathered.iter().filter_map(|member| Some(member.mapping.placed.span?.range)),
        );
        join(&mut ranges);
        // Usually empty: then it allocates nothing.
        let mut failed = Vec::new();
        let mut rest = &ranges[..];
        while let Err(Partial { done, error }) = self.port.shared.domain.unmap_pages(rest, gather) {
            failed.push((rest[done], error));
            rest = &rest[done + 1..];
        }
        (ranges, failed)
    }

    /// Removes all translations; then begins one invalidation for all or, if `lazily`, queues each
    /// range for a flush (rule L18).
    fn begin_together(&mut self, lazily: bool) {
        let port = Arc::clone(&self.port);
        let (shared, counters) = (&*port.shared, &*port.counters);
        let open = self.gathered.iter().filter(|member| member.is_open()).count();
        if open == 0 {
            return self.unmap_each();
        }
        let start = shared.sampler.start(counters.unmap_batches.get());
        counters.unmap_batches.add(1);
        let mut gather = if lazily { Gather::queued() } else { Gather::new() };
        let (ranges, failed) = self.remove(&mut gather);
        let watched = self.gathered.iter().any(|member| member.watched);
        let since_ns = if lazily || watched { shared.clock.now_ns() } else { 0 };
        let sync = if lazily {
            self.flights.reuse(ranges);
            Pending::map(&shared.domain, self.flights.ranges())
        } else {
            counters.unmap_syncs.add(u64::from(!ranges.is_empty()));
            Pending::unmap(&shared.domain, ranges, &mut gather)
        };
        // Before its members: each has a flight whatever panics, a clock, a domain or an allocator.
        let timed = !lazily && start.is_some();
        self.flights.queue.push_back(Flight { sync, members: 0, settled: lazily, timed });
        for mut member in self.gathered.drain(..) {
            if member.is_open() {
                let span = member.mapping.placed.span;
                let failed = span.and_then(|span| {
                    let (_, error) = failed.iter().find(|(held, _)| held.covers(span.range))?;
                    Some((span.range, *error))
                });
                if let Some((range, error)) = failed {
                    shared.quarantine(range);
                    member.state = State::Known(Err(error));
                } else if lazily {
                    // Rule L21: the first entry carries the pages of all, as it is queued after all
                    // of them were unlinked.
                    let mut queue = |span| {
                        let removed = Removed { since_ns, pages: gather.take_pages() };
                        shared.queue(span, removed, false, member.watched, counters)
                    };
                    member.state = State::Known(span.map_or(Ok(None), &mut queue));
                } else if member.watched {
                    member.state = State::Open(Some(Watch::new(since_ns)));
                }
                if let State::Known(unmapped) = &member.state {
                    counters.note_unmap(unmapped);
                }
            }
            self.begun.push_back(member);
            self.flights.board();
        }
        shared.sampler.stop(start, open as u64, &counters.unmap_time);
    }

    /// Hands out, in the order in which they were pushed, the buffers whose invalidation is over;
    /// returns how many, errors included. Never waits.
    ///
    /// An error means that the device may still reach the buffer, which is therefore not handed
    /// back as safe.
    pub fn poll(
        &mut self,
        mut each: impl FnMut(T, core::result::Result<Returned<B>, UnmapError<B>>),
    ) -> usize {
        let port = Arc::clone(&self.port);
        let (shared, counters) = (&*port.shared, &*port.counters);
        let mut handed_out = 0;
        while let Some(flight) = self.flights.queue.front_mut() {
            if !flight.sync.poll(&shared.domain) {
                break;
            }
            let Flight { sync, members, settled, timed } = flight;
            if !*settled {
                // All of them before the first is handed out, so as not to time the caller's code.
                let start = if *timed { shared.sampler.start_always() } else { None };
                for Member { mapping, state, .. } in self.begun.iter_mut().take(*members) {
                    let span = mapping.placed.span;
                    let range = span.map_or(Range::ALL, |span| span.range);
                    if let State::Open(watcher) = state
                        && let Some(result) = sync.outcome(range)
                    {
                        let watcher = watcher.take();
                        // If what follows panics, its range may be free already: it is not settled again,
                        // and its buffer is not handed back.
                        let unknown = Error::NoMemory { operation: "unmap", range };
                        *state = State::Known(Err(unknown));
                        let unmapped = match span {
                            Some(_) => shared.settle(range, watcher, result, counters),
                            None => Ok(watcher),
                        };
                        counters.note_unmap(&unmapped);
                        *state = State::Known(unmapped);
                    }
                }
                shared.sampler.stop(start, 0, &counters.unmap_time);
                *settled = true;
            }
            while *members > 0 {
                // Counted first, so that the count stays right if the caller's code panics.
                *members -= 1;
                let Some(Member { tag, mapping, state, .. }) = self.begun.pop_front() else {
                    break;
                };
                let State::Known(unmapped) = state else { unreachable!("the sync is over") };
                handed_out += 1;
                each(tag, ManuallyDrop::into_inner(mapping).give_back(unmapped));
            }
            self.flights.land();
        }
        handed_out
    }

    /// Waits until the oldest invalidation that was begun is over, if there is one.
    pub fn wait(&mut self) {
        let (shared, waits) = (&self.port.shared, &self.port.counters.waits.unmap);
        self.flights.wait(|sync| timed(&*shared.clock, waits, || sync.wait(&shared.domain)));
    }

    /// Unmaps all that is left, waits for it, and hands it out.
    pub fn finish(
        &mut self,
        mut each: impl FnMut(T, core::result::Result<Returned<B>, UnmapError<B>>),
    ) {
        self.begin();
        while !self.flights.queue.is_empty() {
            self.wait();
            self.poll(&mut each);
        }
    }
}

impl<D: Domain + 'static, A: Allocator + 'static, B, T> Drop for UnmapBatch<D, A, B, T> {
    fn drop(&mut self) {
        // Errors keep their buffers and leak them, as the device may still reach them.
        self.finish(|_, _| ());
    }
}

impl<D: Domain + 'static, A: Allocator + 'static, B, T> fmt::Debug for UnmapBatch<D, A, B, T> {
    ringfence_sync::shows!(UnmapBatch as it, gathered: it.gathered.len(), begun: it.begun.len());
}
