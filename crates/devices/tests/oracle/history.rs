//! The requests to a domain, and when they were made: every judgement is based on this.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
};

use parking_lot::Mutex;
use ringfence_iommu::{
    Domain, Error, Gather, GuestPhys, Iova, Map, Partial, Prot, Range, Result, SyncToken, Work,
};

/// A counter that all threads share: what has the lower number came first.
#[derive(Clone, Default)]
pub(crate) struct Sequence(Arc<AtomicU64>);

impl Sequence {
    pub(crate) fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }
}

/// One mapping that was requested.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) range: Range,
    pub(crate) target: u64,
    pub(crate) prot: Prot,
    /// The thread that mapped it.
    pub(crate) by: ThreadId,
    /// Before it was requested.
    pub(crate) mapped: u64,
    /// Whether a sync has reported that the device has it.
    pub(crate) ready: bool,
    /// After its removal was requested.
    pub(crate) unmapped: Option<u64>,
    /// Whether an invalidation that covers it has begun, without a wait for it yet.
    pub(crate) begun: bool,
    /// After the invalidation that covers it: from then on no device may reach it.
    pub(crate) closed: Option<u64>,
}

impl Piece {
    /// Where `addr` leads by this piece.
    pub(crate) fn target_of(&self, addr: u64) -> u64 {
        self.target + (addr - self.range.first().0)
    }
}

#[derive(Default)]
struct State {
    pieces: Vec<Piece>,
    /// The pieces that are not closed.
    open: Vec<usize>,
    violations: Vec<String>,
    /// Where the memory of slots is.
    slots: core::ops::Range<u64>,
}

/// A slot that is mapped: where for the device, where in memory, and how many bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotAt {
    pub(crate) iova: u64,
    pub(crate) gpa: u64,
    pub(crate) len: u64,
    pub(crate) prot: Prot,
}

impl State {
    fn open_slots(&self) -> impl Iterator<Item = SlotAt> + '_ {
        let pieces = self.open.iter().map(|&at| &self.pieces[at]);
        pieces.filter(|piece| self.slots.contains(&piece.target)).map(|piece| SlotAt {
            iova: piece.range.first().0,
            gpa: piece.target,
            len: piece.range.len() as u64,
            prot: piece.prot,
        })
    }
}

/// All that was ever mapped.
#[derive(Clone, Default)]
pub(crate) struct History {
    pub(crate) sequence: Sequence,
    state: Arc<Mutex<State>>,
}

impl History {
    /// How many pieces there were so far.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().pieces.len()
    }

    /// The pieces from number `from` on.
    pub(crate) fn since(&self, from: usize) -> Vec<Piece> {
        self.state.lock().pieces[from..].to_vec()
    }

    /// From now on, mappings to this memory are slots, and not buffers.
    pub(crate) fn set_slots(&self, slots: core::ops::Range<u64>) {
        self.state.lock().slots = slots;
    }

    /// The slots that the device reaches.
    pub(crate) fn slots(&self) -> Vec<SlotAt> {
        self.state.lock().open_slots().collect()
    }

    /// Where an access to a slot leads, if it is one that is allowed.
    pub(crate) fn in_slot(&self, addr: u64, wanted: Prot) -> Option<u64> {
        let state = self.state.lock();
        let mut here = state.open_slots().filter(|slot| slot.prot.allows(wanted));
        here.find_map(|slot| {
            let at = addr.checked_sub(slot.iova).filter(|at| *at < slot.len)?;
            Some(slot.gpa + at)
        })
    }

    /// The numbers of the pieces from number `from` on that lead to buffers.
    pub(crate) fn numbers(&self, from: usize) -> Vec<usize> {
        let state = self.state.lock();
        let data = |at: &usize| !state.slots.contains(&state.pieces[*at].target);
        (from..state.pieces.len()).filter(data).collect()
    }

    pub(crate) fn pieces(&self, numbers: &[usize]) -> Vec<Piece> {
        let state = self.state.lock();
        numbers.iter().map(|&at| state.pieces[at].clone()).collect()
    }

    pub(crate) fn is_slot(&self, piece: &Piece) -> bool {
        self.state.lock().slots.contains(&piece.target)
    }

    /// Memory of a slot goes back to where it was taken from: no device may reach it.
    pub(crate) fn gives_back(&self, gpa: u64, len: u64) {
        let mut state = self.state.lock();
        let held =
            state.open_slots().find(|slot| slot.gpa < gpa + len && gpa < slot.gpa + slot.len);
        if let Some(held) = held {
            state.violations.push(format!("memory of {held:x?} is given back"));
        }
    }

    /// Whether all of these pieces are closed.
    pub(crate) fn closed(&self, numbers: &[usize]) -> bool {
        let state = self.state.lock();
        numbers.iter().all(|&at| state.pieces[at].closed.is_some())
    }

    /// Whether syncs have reported that the device has all that is mapped from `first` to `last`.
    pub(crate) fn is_ready(&self, first: u64, last: u64) -> bool {
        let range = Range::new(Iova(first), Iova(last)).expect("ordered");
        let state = self.state.lock();
        let mapped = state.open.iter().map(|&at| &state.pieces[at]);
        mapped.filter(|piece| piece.range.overlaps(range)).all(|piece| piece.ready)
    }

    /// Addresses that were mapped while they were still to be kept free (rule L19).
    pub(crate) fn violations(&self) -> Vec<String> {
        self.state.lock().violations.clone()
    }

    fn map(&self, range: Range, target: u64, prot: Prot) -> usize {
        let mut state = self.state.lock();
        let mapped = self.sequence.next();
        let held = state.open.iter().map(|&at| &state.pieces[at]).find(|p| p.range.overlaps(range));
        if let Some(held) = held {
            let violation = format!("{range} is mapped at {mapped} over {held:?}");
            state.violations.push(violation);
        }
        let by = thread::current().id();
        let (ready, unmapped, begun, closed) = (false, None, false, None);
        let piece = Piece { range, target, prot, by, mapped, ready, unmapped, begun, closed };
        state.pieces.push(piece);
        let number = state.pieces.len() - 1;
        state.open.push(number);
        number
    }

    fn make_ready(&self, ranges: &[Range]) {
        let mut state = self.state.lock();
        let State { pieces, open, .. } = &mut *state;
        for &at in open.iter() {
            pieces[at].ready |= ranges.iter().any(|range| range.covers(pieces[at].range));
        }
    }

    /// Calls `each` with every open piece; closes those for which it is true.
    fn close(&self, mut each: impl FnMut(&mut Piece) -> bool) {
        let now = self.sequence.next();
        let mut state = self.state.lock();
        let State { pieces, open, .. } = &mut *state;
        open.retain(|&at| {
            let closes = each(&mut pieces[at]);
            if closes {
                pieces[at].closed = Some(now);
            }
            !closes
        });
    }
}

/// A domain that records its calls.
pub(crate) struct Recorded<D> {
    inner: D,
    history: History,
    /// Flushes under way, and when they began.
    flushes: Mutex<Vec<(SyncToken, u64)>>,
}

impl<D> Recorded<D> {
    pub(crate) fn new(inner: D, history: History) -> Recorded<D> {
        Recorded { inner, history, flushes: Mutex::default() }
    }
}

impl<D> Recorded<D> {
    /// Closes what a flush covers that began then (rule L19): what was unmapped before, and nothing else.
    fn flushed(&self, began: u64) {
        self.history.close(|piece| piece.unmapped.is_some_and(|unmapped| unmapped < began));
    }

    /// Closes what was begun of `ranges`. Addresses are a batch's own until it has handed them out.
    fn synced(&self, ranges: &[Range]) {
        self.history
            .close(|piece| piece.begun && ranges.iter().any(|range| range.covers(piece.range)));
    }
}

// SAFETY: all calls pass to the inner domain, which fulfils the contract.
unsafe impl<D: Domain<Target = GuestPhys>> Domain for Recorded<D> {
    type Target = GuestPhys;

    ringfence_iommu::pass_on!(inner: geometry, capabilities, sync_wait, iova_to_phys);

    fn map_pages(&self, maps: &[Map<GuestPhys>]) -> Result<(), Partial> {
        let number =
            |map: &Map<GuestPhys>| self.history.map(map.range(), map.target().0, map.prot());
        let numbers: Vec<usize> = maps.iter().map(number).collect();
        let result = self.inner.map_pages(maps);
        if let Err(Partial { done, .. }) = result {
            // Nothing was changed by these.
            let mut state = self.history.state.lock();
            for &number in &numbers[done..] {
                state.open.retain(|&at| at != number);
                let piece = &mut state.pieces[number];
                piece.closed = Some(piece.mapped);
            }
        }
        result
    }

    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        let result = self.inner.unmap_pages(ranges, gather);
        let done = result.map_or_else(|partial| partial.done, |_| ranges.len());
        let now = self.history.sequence.next();
        self.history.close(|piece| {
            let gone = ranges[..done].iter().any(|range| range.covers(piece.range));
            if piece.unmapped.is_some() || !gone {
                return false;
            }
            piece.unmapped = Some(now);
            // What the device had refused to map needs no invalidation, and gets none.
            !gather.is_queued() && !gather.ranges().iter().any(|r| r.overlaps(piece.range))
        });
        result
    }

    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        let began = self.history.sequence.next();
        let token = self.inner.sync_begin(work)?;
        let done = token == SyncToken::DONE;
        match work {
            Work::Map(ranges) if done => self.history.make_ready(ranges),
            Work::Map(_) => {}
            Work::Unmap { ranges, .. } => {
                self.history.close(|piece| {
                    piece.begun |= piece.unmapped.is_some_and(|unmapped| unmapped < began)
                        && ranges.iter().any(|range| range.covers(piece.range));
                    false
                });
                if done {
                    self.synced(ranges);
                }
            }
            Work::All if done => self.flushed(began),
            Work::All => self.flushes.lock().push((token, began)),
        }
        Ok(token)
    }

    fn sync_poll(
        &self,
        token: SyncToken,
        work: Work<'_>,
        failed: &mut dyn FnMut(Range, Error),
    ) -> bool {
        let mut failures = Vec::new();
        let over = self.inner.sync_poll(token, work, &mut |range, error| {
            failures.push(range);
            failed(range, error);
        });
        if !over {
            return false;
        }
        let well = |ranges: &[Range]| -> Vec<Range> {
            let well = |range: &&Range| !failures.iter().any(|failed| failed.overlaps(**range));
            ranges.iter().filter(well).copied().collect()
        };
        match work {
            Work::Map(ranges) => self.history.make_ready(&well(ranges)),
            Work::Unmap { ranges, .. } => self.synced(&well(ranges)),
            Work::All => {
                // Flushes that began at different times may share a token: it is over for all of them.
                let mut flushes = self.flushes.lock();
                let of_token = |flush: &&(SyncToken, u64)| flush.0 == token;
                let began = flushes.iter().filter(of_token).map(|(_, began)| *began).max();
                let began = began.expect("it was begun");
                if let Some(first) = flushes.iter().position(|(held, _)| *held == token) {
                    flushes.remove(first);
                }
                if failures.is_empty() {
                    self.flushed(began);
                }
            }
        }
        true
    }
}
