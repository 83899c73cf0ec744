//! Completion in the order of the requests, while a guest may move to another back end.
//!
//! A request that waits for a translation when its ring stops gets none any more: the front end,
//! which stops the ring, waits for us. The request can be put back for the next back end, but only
//! if nothing that was taken after it has been completed. The in-flight record is no help: it stays
//! here. So as long as writes are logged, a request that is done before its turn is not completed
//! yet; and what is not completed can be done again.

use std::collections::VecDeque;

use super::{RequestQueue, State};
use crate::requests::Serve;

/// The order in which requests are completed.
pub(super) struct Order {
    /// All that were taken and not completed, the oldest first.
    pub(super) taken: VecDeque<u16>,
    /// The order ends at the next round: the ring may be unmapped now.
    ends: bool,
}

impl<S: Serve> RequestQueue<S> {
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
