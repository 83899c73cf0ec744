//! The end of a queue: what is under way is answered or put back, and nothing is waited for that
//! may never come.

use std::time::{Duration, Instant};

use super::{BlkQueue, QueueError, Step, store::Store};
use crate::bus::Bus;

impl BlkQueue {
    /// Has all that is under way end, and answers it, so that nothing is lost when the ring stops.
    /// Requests that wait for translations are put back as far as they are the newest and were not
    /// begun; others that cannot go on stay on record, if there is one, or fail: whoever stops a ring
    /// waits for us, and sends no translations meanwhile. If the ring is not mapped nothing can be answered.
    ///
    /// # Errors
    /// As [`poll`](Self::poll); [`QueueError::Stuck`] if the disk does not answer within `patience`:
    /// the queue is to be kept, and [reaped](Self::reap), until the [kernel](Self::in_kernel) is
    /// done with it.
    pub fn stop(&mut self, bus: &Bus, patience: Duration) -> Result<(), QueueError> {
        self.put_back();
        let deadline = Instant::now() + patience;
        let found = self.ring.is_valid() || bus.silently(|| self.find(bus)).is_ok();
        if !found {
            return self.wait_for_kernel(deadline);
        }
        self.away = None;
        while self.free.len() + self.parked.len() + self.done() < self.slots.len() {
            if let Store::File(file) = &mut self.store {
                let stalled = file.stalled.take();
                if stalled.is_none() && file.done.is_empty() {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        let stuck = file.io.in_flight();
                        // What is done is told still.
                        self.publish(bus)?;
                        return Err(QueueError::Stuck(stuck));
                    }
                    file.io.wait(Some(left))?;
                }
                if let Some(at) = stalled {
                    self.advance(at, bus);
                }
            }
            self.reap();
            // Whatever the time is: a real disk may be faster, too.
            self.complete(bus, u64::MAX, u64::MAX);
        }
        if self.order.is_some() {
            // Now also what is done, and not answered.
            self.put_back();
        }
        // What is on record is done by whoever goes on, if that is this front end's.
        if self.recorded.is_none() || self.log.is_on() {
            for at in self.parked.take() {
                self.fail(at, bus);
            }
        }
        self.end_order(true);
        self.publish(bus)
    }

    /// Waits until the kernel has nothing of this queue any more; answers nothing.
    ///
    /// # Errors
    /// As [`stop`](Self::stop).
    pub fn wait_for_kernel(&mut self, deadline: Instant) -> Result<(), QueueError> {
        while let Store::File(file) = &mut self.store
            && file.io.in_flight() > 0
        {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(QueueError::Stuck(file.io.in_flight()));
            }
            file.io.wait(Some(left))?;
            self.reap();
        }
        Ok(())
    }

    /// Puts requests back into the ring that were taken last and not begun.
    fn put_back(&mut self) {
        if self.recorded.as_ref().is_some_and(|recorded| !recorded.forgets()) {
            return;
        }
        let mut waiting = self.parked.take();
        let ordered = self.order.is_some();
        let taken = self.order.iter().flat_map(|order| &order.taken);
        waiting.extend(taken.filter(|&&at| self.slots[usize::from(at)].is_done()));
        waiting.sort_unstable_by_key(|&at| self.slots[usize::from(at)].number);
        while let Some(&at) = waiting.last() {
            let slot = &mut self.slots[usize::from(at)];
            let begun = matches!(slot.step, Step::Busy(_) | Step::Answer(..)) && !ordered;
            let head = slot.chain.head();
            if begun || !self.ring.untake(head) {
                break;
            }
            if let Some(recorded) = &mut self.recorded {
                recorded.forget(head);
            }
            (slot.step, slot.wait) = (Step::Free, None);
            self.free.push(at);
            if let Some(order) = &mut self.order {
                order.taken.retain(|&other| other != at);
            }
            waiting.pop();
        }
        waiting.retain(|&at| !self.slots[usize::from(at)].is_done());
        waiting.into_iter().for_each(|at| self.parked.add(at));
    }
}
