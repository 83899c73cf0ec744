//! Answers in the order of the requests, while a guest may move to another back end.
//!
//! A request that waits for a translation when its ring stops gets none any more: whoever stops a
//! ring waits for us. It can be put back for the next back end, but only if nothing that was taken
//! after it has been answered. The record of what is in flight is no help: it stays where it is.
//! So as long as writes are logged, what is done before its turn is not answered yet; and what is not
//! answered can be done again.

use std::collections::VecDeque;

use super::{RequestQueue, State};
use crate::requests::Serve;

/// The order in which requests are answered.
pub(super) struct Order {
    /// All that were taken and not answered, the oldest first.
    pub(super) taken: VecDeque<u16>,
    /// It is given up at the next round: now the ring need not be where it was.
    ends: bool,
}

impl<S: Serve> RequestQueue<S> {
    /// Answers in order from now on, or as they come.
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

    /// Gives the order up, if that is wanted, or in any case.
    pub(super) fn end_order(&mut self, in_any_case: bool) {
        if let Some(Order { taken, .. }) = self.order.take_if(|order| order.ends || in_any_case) {
            taken.into_iter().for_each(|at| self.give_back_done(at));
        }
    }

    /// A request was taken.
    pub(super) fn enqueue(&mut self, at: u16) {
        if let Some(order) = &mut self.order {
            order.taken.push_back(at);
        }
    }

    /// Gives back those at the head that are done.
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

    /// How many are done and wait for their turn.
    pub(super) fn done(&self) -> usize {
        let taken = self.order.iter().flat_map(|order| &order.taken);
        taken.filter(|&&at| self.slots[usize::from(at)].is_done()).count()
    }
}
