//! Every call, recorded.

use alloc::{collections::VecDeque, sync::Arc, vec::Vec};
use core::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

use ringfence_sync::{clock::Clock, lock::SpinLock};

use super::event::{Call, Event, Outcome, Ranges};
use crate::{
    Address, Capabilities, Domain, Gather, Geometry, Iova, Prot, Range, Result, SyncToken,
    table::Mapping,
};

/// Where events go.
pub trait EventSink: Send + Sync {
    /// Takes an event. Called by the thread whose call it was, after the call.
    fn record(&self, event: Event);
}

impl<S: EventSink + ?Sized> EventSink for Arc<S> {
    fn record(&self, event: Event) {
        (**self).record(event);
    }
}

/// A domain that records every call that goes through it, with its time, thread and outcome.
pub struct Traced<D, S, C> {
    inner: D,
    sink: S,
    clock: C,
    thread: fn() -> u64,
}

impl<D, S: EventSink, C: Clock> Traced<D, S, C> {
    /// Records to `sink`. `thread` gives the number that events of the calling thread carry.
    pub fn new(inner: D, sink: S, clock: C, thread: fn() -> u64) -> Traced<D, S, C> {
        Traced { inner, sink, clock, thread }
    }

    /// The domain inside.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    fn record<R>(
        &self,
        call: Call,
        run: impl FnOnce() -> Result<R>,
        outcome: impl FnOnce(&R) -> Outcome,
    ) -> Result<R> {
        let time_ns = self.clock.now_ns();
        let result = run();
        let duration_ns = self.clock.now_ns().saturating_sub(time_ns);
        let outcome = match &result {
            Ok(done) => outcome(done),
            Err(error) => Outcome::Failed(error.into()),
        };
        self.sink.record(Event { time_ns, duration_ns, thread: (self.thread)(), call, outcome });
        result
    }
}

fn ranges(gather: &Gather) -> Ranges {
    gather.ranges().into()
}

fn over_or_pending(&over: &bool) -> Outcome {
    if over { Outcome::Over } else { Outcome::Pending }
}

impl<D: Domain, S: EventSink, C: Clock> Domain for Traced<D, S, C> {
    type Target = D::Target;

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn map_pages(&self, range: Range, target: D::Target, prot: Prot) -> Result<()> {
        let call = Call::Map { range, target: target.as_u64(), prot };
        self.record(call, || self.inner.map_pages(range, target, prot), |()| Outcome::Done)
    }

    fn iotlb_sync_map(&self, range: Range) -> Result<()> {
        let call = Call::SyncMap { range };
        self.record(call, || self.inner.iotlb_sync_map(range), |()| Outcome::Done)
    }

    fn unmap_pages(&self, range: Range, gather: &mut Gather) -> Result<u128> {
        let call = Call::Unmap { range, queued: gather.is_queued() };
        let run = || self.inner.unmap_pages(range, gather);
        self.record(call, run, |&bytes| Outcome::Bytes(bytes))
    }

    fn iotlb_sync(&self, gather: &mut Gather) -> Result<()> {
        let call = Call::Sync { ranges: ranges(gather), queued: gather.is_queued() };
        self.record(call, || self.inner.iotlb_sync(gather), |()| Outcome::Done)
    }

    fn flush_iotlb_all(&self) -> Result<()> {
        self.record(Call::FlushAll, || self.inner.flush_iotlb_all(), |()| Outcome::Done)
    }

    fn iova_to_phys(&self, iova: Iova) -> Option<D::Target> {
        let run = || Ok(self.inner.iova_to_phys(iova));
        let outcome = |found: &Option<D::Target>| match found {
            Some(target) => Outcome::Found(target.as_u64()),
            None => Outcome::Nothing,
        };
        self.record(Call::Lookup { iova }, run, outcome).ok().flatten()
    }

    /// Not recorded: it changes nothing, and what it finds has no room in an event.
    fn mappings_from(&self, iova: Iova, into: &mut Vec<Mapping>) -> Result<()> {
        self.inner.mappings_from(iova, into)
    }

    fn iotlb_sync_begin(&self, gather: &mut Gather) -> Result<SyncToken> {
        let call = Call::SyncBegin { ranges: ranges(gather), queued: gather.is_queued() };
        let run = || self.inner.iotlb_sync_begin(gather);
        self.record(call, run, |&SyncToken(token)| Outcome::Begun(token))
    }

    fn iotlb_sync_poll(&self, token: SyncToken, ranges: &[Range]) -> Result<bool> {
        let run = || self.inner.iotlb_sync_poll(token, ranges);
        self.record(Call::SyncPoll { token: token.0 }, run, over_or_pending)
    }

    fn iotlb_sync_map_begin(&self, ranges: &[Range]) -> Result<SyncToken> {
        let run = || self.inner.iotlb_sync_map_begin(ranges);
        let call = Call::SyncMapBegin { ranges: ranges.into() };
        self.record(call, run, |&SyncToken(token)| Outcome::Begun(token))
    }

    fn iotlb_sync_map_poll(&self, token: SyncToken, ranges: &[Range]) -> Result<bool> {
        let run = || self.inner.iotlb_sync_map_poll(token, ranges);
        self.record(Call::SyncMapPoll { token: token.0 }, run, over_or_pending)
    }

    fn iotlb_sync_wait(&self, token: SyncToken) -> Result<()> {
        let run = || self.inner.iotlb_sync_wait(token);
        self.record(Call::SyncWait { token: token.0 }, run, |()| Outcome::Done)
    }
}

impl<D: fmt::Debug, S, C> fmt::Debug for Traced<D, S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Traced").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// Keeps the last events in memory.
pub struct Ring {
    capacity: usize,
    events: SpinLock<VecDeque<Event>>,
    lost: AtomicU64,
}

impl Ring {
    /// Keeps the last `capacity` events, for which it takes memory now.
    pub fn new(capacity: usize) -> Ring {
        let events = SpinLock::new(VecDeque::with_capacity(capacity));
        Ring { capacity, events, lost: AtomicU64::new(0) }
    }

    /// Takes the events out, oldest first.
    pub fn take(&self) -> Vec<Event> {
        self.events.lock().drain(..).collect()
    }

    /// How many events had to give way to younger ones.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

impl EventSink for Ring {
    fn record(&self, event: Event) {
        let mut events = self.events.lock();
        if events.len() >= self.capacity {
            self.lost.fetch_add(1, Ordering::Relaxed);
            if events.pop_front().is_none() {
                return;
            }
        }
        events.push_back(event);
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("capacity", &self.capacity)
            .field("lost", &self.lost())
            .finish_non_exhaustive()
    }
}

/// Writes events as text, one a line, in the format of [`Event`].
///
/// Lines are written under a spin lock: give it a writer that does not block for long.
pub struct TextSink<W> {
    out: SpinLock<W>,
    lost: AtomicU64,
}

impl<W: fmt::Write + Send> TextSink<W> {
    /// Writes to `out`.
    pub fn new(out: W) -> TextSink<W> {
        TextSink { out: SpinLock::new(out), lost: AtomicU64::new(0) }
    }

    /// The writer.
    pub fn into_inner(self) -> W {
        self.out.into_inner()
    }

    /// How many events the writer failed to write, in whole or in part.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

impl<W: fmt::Write + Send> EventSink for TextSink<W> {
    fn record(&self, event: Event) {
        if writeln!(self.out.lock(), "{event}").is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl<W> fmt::Debug for TextSink<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextSink").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use alloc::string::String;
    use ringfence_sync::clock::ManualClock;

    use super::*;
    use crate::{
        GuestPhys,
        wrap::fake::{Fake, page},
    };

    fn traced<S: EventSink>(sink: S) -> Traced<Fake, S, ManualClock> {
        Traced::new(Fake::default(), sink, ManualClock::stepping(5), || 9)
    }

    #[test]
    fn calls_are_written_in_order_with_time_thread_and_outcome() {
        let sink = Arc::new(TextSink::new(String::new()));
        let domain = traced(Arc::clone(&sink));
        domain.map_pages(page(1), GuestPhys(0x8000), Prot::READ).unwrap();
        assert!(domain.map_pages(page(1), GuestPhys(0x8000), Prot::READ).is_err());
        domain.iotlb_sync_map(page(1)).unwrap();
        assert!(domain.iova_to_phys(Iova(0x1004)).is_some());
        let mut gather = Gather::new();
        domain.unmap_pages(page(1), &mut gather).unwrap();
        domain.iotlb_sync(&mut gather).unwrap();
        domain.unmap_pages(page(1), &mut Gather::queued()).unwrap();
        domain.flush_iotlb_all().unwrap();
        drop(domain);
        let text = Arc::into_inner(sink).unwrap().into_inner();
        let expected = "\
0 5 9 map 0x1000-0x1fff 0x8000 r = ok
10 5 9 map 0x1000-0x1fff 0x8000 r = error exists
20 5 9 sync-map 0x1000-0x1fff = ok
30 5 9 lookup 0x1004 = 0x8004
40 5 9 unmap 0x1000-0x1fff = 4096
50 5 9 sync 0x1000-0x1fff = ok
60 5 9 unmap 0x1000-0x1fff queued = 0
70 5 9 flush-all = ok
";
        assert_eq!(text, expected);
        for line in text.lines() {
            let event: Event = line.parse().unwrap();
            assert_eq!(alloc::format!("{event}"), line);
        }
    }

    #[test]
    fn a_ring_keeps_the_last_events_and_counts_the_others() {
        let ring = Arc::new(Ring::new(2));
        let domain = traced(Arc::clone(&ring));
        for n in 0..5 {
            domain.iotlb_sync_map(page(n)).unwrap();
        }
        let kept: Vec<_> = ring.take().iter().map(|event| event.call.clone()).collect();
        assert_eq!(kept, [Call::SyncMap { range: page(3) }, Call::SyncMap { range: page(4) }]);
        assert_eq!(ring.lost(), 3);
        assert!(ring.take().is_empty());
        let none = Ring::new(0);
        traced(none).flush_iotlb_all().unwrap();
    }

    #[test]
    fn a_writer_that_fails_loses_events_and_not_the_call() {
        struct Broken;
        impl fmt::Write for Broken {
            fn write_str(&mut self, _: &str) -> fmt::Result {
                Err(fmt::Error)
            }
        }
        let sink = Arc::new(TextSink::new(Broken));
        traced(Arc::clone(&sink)).flush_iotlb_all().unwrap();
        assert_eq!(sink.lost(), 1);
    }
}
