//! The end of a queue: requests in progress are completed or put back, without waiting for anything
//! that may never come. And completion in the order of the requests, while a guest may move to
//! another back end.
//!
//! A request that waits for a translation when its ring stops gets none any more: the front end,
//! which stops the ring, waits for us. The request can be put back for the next back end, but only
//! if nothing that was taken after it has been completed. The in-flight record is no help: it stays
//! here. So as long as writes are logged, a request that is done before its turn is not completed
//! yet; and what is not completed can be done again.

use std::collections::VecDeque;

use super::{RequestQueue, State, Taken, inflight::Recorded};
use crate::{
    Bus,
    requests::{QueueError, Serve},
};

/// The order in which requests are completed.
pub(super) struct Order {
    /// All that were taken and not completed, the oldest first.
    pub(super) taken: VecDeque<u16>,
    /// The order ends at the next round: the ring may be unmapped now.
    ends: bool,
}

impl<S: Serve> RequestQueue<S> {
    /// Begins to stop the ring: nothing more is taken from it. Requests that wait for translations
    /// are put back, as far as they are the newest and were not begun. From now on
    /// [`wind_down`](Self::wind_down) takes the place of [`poll`](Self::poll).
    pub fn begin_stop(&mut self, bus: &Bus) {
        // If the ring is not mapped, no request can be completed.
        let gone = self.away.take().is_some_and(|away| away.retry_at.is_none());
        self.mapped_at_stop =
            !gone && (self.ring.is_valid() || bus.silently(|| self.find(bus)).is_ok());
        self.reap();
        // What is put back is taken from the record, which may not be ahead of the ring.
        if self.stats.requests == self.published || self.mapped_at_stop && self.publish(bus).is_ok()
        {
            self.put_back();
        }
    }

    /// Advances and completes requests in progress, so that nothing is lost when the ring stops;
    /// true if all have ended. Never waits: a request that the disk has not completed may never
    /// end. Requests that cannot go on stay on record, if there is one, or fail at the end: the
    /// front end, which stops the ring, waits for that, and sends no updates meanwhile.
    ///
    /// # Errors
    /// As [`poll`](Self::poll). The queue may still be in the [kernel](Self::in_kernel).
    pub fn wind_down(&mut self, bus: &Bus) -> Result<bool, QueueError> {
        let ended = self.wind_down_further(bus);
        self.lost |= matches!(ended, Err(QueueError::Lost(_)));
        ended
    }

    fn wind_down_further(&mut self, bus: &Bus) -> Result<bool, QueueError> {
        self.serve.begin_round();
        self.reap();
        if !self.mapped_at_stop {
            let over = self.in_kernel() == 0;
            // Nothing can be completed, and no other process does it if the guest moves.
            self.lost |= over && self.log.is_on() && (self.is_busy() || self.must_do_record());
            return Ok(over);
        }
        loop {
            // Regardless of the clock: a real disk may be faster, too.
            self.complete(bus, u64::MAX, u64::MAX);
            // After `complete`, which makes room for them: no other event may wake the worker.
            self.advance_stalled(bus);
            if self.must_do_record() {
                self.take_what_is_on_record(bus)?;
            }
            // Nor may an event that comes with what is reaped here.
            while self.reap() {
                self.complete(bus, u64::MAX, u64::MAX);
            }
            if self.free.len() + self.parked.len() + self.done() == self.slots.len() {
                break;
            }
            self.serve.kick()?;
            self.publish_if_any(bus)?;
            let rests = self.in_kernel() == 0 && !self.is_spent();
            if !(rests && self.is_stalled() && !self.parked.is_empty()) {
                return Ok(false);
            }
            // Requests that wait for translations, of which none comes any more, have the room that
            // others wait for.
            self.end_parked(bus)?;
        }
        let more = self.must_do_record();
        if self.order.is_some() && !more {
            // Now also requests that are done but not completed. What is put back is taken from the
            // record, which may not be ahead of the ring.
            self.publish(bus)?;
            self.put_back();
        }
        self.end_parked(bus)?;
        if more {
            // The next round takes more of the record, as there is room now.
            return Ok(false);
        }
        self.end_order(true);
        self.publish(bus)?;
        Ok(true)
    }

    /// Ends requests that wait for translations: they fail. Or they stay on record, with those that
    /// wait for the room that they have: another process of this front end does what is on record,
    /// unless the guest moves.
    fn end_parked(&mut self, bus: &Bus) -> Result<(), QueueError> {
        if self.recorded.is_some() && !self.log.is_on() {
            self.stalled.drain(..).for_each(|at| self.parked.add(at));
            return Ok(());
        }
        let left = self.parked.take();
        if !S::FAILS && !left.is_empty() {
            self.publish(bus)?;
            return Err(QueueError::Lost(left.len()));
        }
        for at in left {
            self.fail(at, bus);
        }
        Ok(())
    }

    /// Whether an earlier process took chains that this one has not taken again, and no other does
    /// what is on record, as the guest moves.
    pub(in crate::requests) fn must_do_record(&self) -> bool {
        self.log.is_on() && self.recorded.as_ref().is_some_and(Recorded::has_more)
    }

    /// Takes chains that an earlier process took, as far as there is room.
    fn take_what_is_on_record(&mut self, bus: &Bus) -> Result<(), QueueError> {
        while self.must_do_record()
            && !self.is_occupied()
            && !self.is_full()
            && let Some(&at) = self.free.last()
        {
            match self.take_one(at, bus)? {
                Taken::Nothing => break,
                Taken::Chain => {
                    self.hold(at);
                    self.go_on(at, bus);
                }
                // The front end sends no update meanwhile.
                Taken::Table(_) => self.give_head_up(at)?,
            }
        }
        Ok(())
    }

    /// Puts back into the ring the requests that were taken last and not begun.
    fn put_back(&mut self) {
        let mut waiting = self.parked.take();
        let left = |&at: &u16| self.serve.is_left(&self.slots[usize::from(at)].request);
        self.stalled.retain(|at| !left(at));
        let busy = |&at: &u16| matches!(self.slots[usize::from(at)].state, State::Taken);
        let all = (0..self.slots.len() as u16).filter(busy).filter(left);
        let more: Vec<u16> = all.filter(|at| !waiting.contains(at)).collect();
        waiting.extend(more);
        let ordered = self.order.is_some();
        let taken = self.order.iter().flat_map(|order| &order.taken);
        waiting.extend(taken.filter(|&&at| self.slots[usize::from(at)].is_done()));
        waiting.sort_unstable_by_key(|&at| self.slots[usize::from(at)].number);
        while let Some(&at) = waiting.last() {
            let slot = &mut self.slots[usize::from(at)];
            let begun = self.serve.is_begun(&slot.request) && !slot.is_done() && !ordered;
            let head = slot.chain.head();
            if begun || !self.ring.untake(head) {
                break;
            }
            if let Some(recorded) = &mut self.recorded {
                recorded.forget(head, slot.entry);
            }
            self.serve.end(&mut slot.request);
            slot.end(&mut self.held);
            self.free.push(at);
            if let Some(order) = &mut self.order {
                order.taken.retain(|&other| other != at);
            }
            waiting.pop();
        }
        waiting.retain(|&at| !self.slots[usize::from(at)].is_done());
        waiting.into_iter().for_each(|at| self.parked.add(at));
    }

    /// Completes requests in order from now on, or as they are done.
    pub(in crate::requests) fn set_ordered(&mut self, ordered: bool) {
        match &mut self.order {
            Some(order) => order.ends = !ordered,
            None if ordered => {
                let busy = |&at: &u16| !matches!(self.slots[usize::from(at)].state, State::Free);
                let mut taken: Vec<u16> = (0..self.slots.len() as u16).filter(busy).collect();
                taken.sort_unstable_by_key(|&at| self.slots[usize::from(at)].number);
                self.order = Some(Order { taken: taken.into(), ends: false });
            }
            None => {}
        }
    }

    /// Ends the order, if that was requested, or in any case.
    pub(super) fn end_order(&mut self, in_any_case: bool) {
        if let Some(Order { taken, .. }) = self.order.take_if(|order| order.ends || in_any_case) {
            taken.into_iter().for_each(|at| self.give_back_done(at));
        }
    }

    /// Appends a request that was taken.
    pub(super) fn enqueue(&mut self, at: u16) {
        if let Some(order) = &mut self.order {
            order.taken.push_back(at);
        }
    }

    /// Completes those at the head that are done.
    pub(super) fn give_back_in_order(&mut self) {
        while let Some(order) = &mut self.order
            && let Some(&at) = order.taken.front()
            && self.slots[usize::from(at)].is_done()
        {
            order.taken.pop_front();
            self.give_back_done(at);
        }
    }

    fn give_back_done(&mut self, at: u16) {
        if let State::Done { ok, used } = self.slots[usize::from(at)].state {
            self.give_back(at, ok, used);
        }
    }

    /// How many requests are done and wait for their turn.
    pub(super) fn done(&self) -> usize {
        let taken = self.order.iter().flat_map(|order| &order.taken);
        taken.filter(|&&at| self.slots[usize::from(at)].is_done()).count()
    }
}
