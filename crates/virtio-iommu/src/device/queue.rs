//! Serving a request virtqueue without blocking.

use std::sync::Arc;

use ringfence_mem::Translate;
use ringfence_virtq::{RingError, device::Queue};

use super::{Backing, Device};

/// What a [`RequestQueue::poll`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// How many requests were carried out.
    pub handled: usize,
    /// How many replies were published.
    pub published: usize,
    /// Whether replies wait for an invalidation: poll again soon, whatever the ring says.
    pub pending: bool,
    /// Whether the driver wants an interrupt for what was published.
    pub interrupt: bool,
}

impl Progress {
    /// Whether nothing was done.
    pub fn is_idle(&self) -> bool {
        self.handled == 0 && self.published == 0
    }
}

/// What a request queue has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// MAP requests.
    pub maps: u64,
    /// UNMAP requests.
    pub unmaps: u64,
    /// Other requests, unknown ones among them.
    pub others: u64,
    /// Requests that were not answered with OK.
    pub refused: u64,
    /// Invalidations waited for, one a domain and batch.
    pub syncs: u64,
}

/// Serves one request virtqueue. Belongs to one thread at a time.
#[derive(Debug)]
pub struct RequestQueue<B: Backing> {
    device: Arc<Device<B>>,
    queue: Queue,
    counters: Counters,
}

impl<B: Backing> RequestQueue<B> {
    /// Serves `queue` for `device`.
    pub fn new(device: Arc<Device<B>>, queue: Queue) -> RequestQueue<B> {
        RequestQueue { device, queue, counters: Counters::default() }
    }

    /// Does what can be done now: carries out all requests in the ring, in order, starts the
    /// invalidations that they need, and publishes the replies once these are over. While replies
    /// wait, no further request is carried out; the poll only looks whether the wait is over.
    ///
    /// # Errors
    /// The driver broke the ring; the device needs a reset (rule V30).
    pub fn poll(&mut self, mem: &impl Translate) -> Result<Progress, RingError> {
        let _ = (mem, &self.device, &self.counters);
        todo!()
    }

    /// The virtqueue, to suppress and enable kicks or to ask for its indices.
    pub fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Ends the service. Call it when nothing is pending, else replies are lost.
    pub fn into_queue(self) -> Queue {
        self.queue
    }
}
