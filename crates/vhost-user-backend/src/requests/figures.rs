//! What a device has done, for monitoring.
//!
//! Ordering: `left` and `holds` change under the lock of `stuck`. The thread that starts a ring has stopped
//! the ring before it, so it sees what that ring left behind. What the kernel has done (Release) comes
//! before what is served afterwards (Acquire).

use std::{
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use ringfence_run::worker::Unit;

use super::{QueueStats, Serve, queue::Remains};
use crate::IotlbTally;

/// How many rings may be left behind, each with its buffers, before the next ones wait for the
/// disk: otherwise a front end that reconnects while a read does not end would fill the memory.
pub const MOST_LEFT: usize = 16;

/// What a device has done over all its connections. Workers write it, any thread reads it.
pub struct RequestFigures<S: Serve> {
    queues: Box<[QueueFigures]>,
    /// What its IOTLBs have counted.
    pub iotlb: IotlbTally,
    /// Rings that stopped because of an error.
    pub failures: AtomicU64,
    /// Rings whose connection ended before their I/O: the disk has not completed it. Keeps what the
    /// kernel may still write to.
    stuck: Mutex<Vec<Remains<S>>>,
    /// How many there are, and whether they hold up other rings.
    left: Arc<AtomicUsize>,
    holds: AtomicBool,
}

/// One queue's [`QueueStats`]. In a cache line of their own: the queue's worker writes them all the
/// time.
#[derive(Default)]
#[repr(align(128))]
struct QueueFigures([AtomicU64; 7]);

impl<S: Serve> RequestFigures<S> {
    /// For a device of so many queues that has done nothing.
    pub fn new(queues: u16) -> RequestFigures<S> {
        RequestFigures {
            queues: (0..queues).map(|_| QueueFigures::default()).collect(),
            iotlb: IotlbTally::default(),
            failures: AtomicU64::new(0),
            stuck: Mutex::default(),
            left: Arc::default(),
            holds: AtomicBool::new(false),
        }
    }

    /// What each queue has done.
    pub fn queues(&self) -> impl Iterator<Item = QueueStats> + '_ {
        self.queues.iter().map(|queue| {
            let mut stats = QueueStats::default();
            for (into, from) in stats.fields().into_iter().zip(&queue.0) {
                *into = from.load(Ordering::Relaxed);
            }
            stats
        })
    }

    /// What all have done.
    pub fn sum(&self) -> QueueStats {
        self.queues().fold(QueueStats::default(), |mut sum, mut stats| {
            sum.fields().into_iter().zip(stats.fields()).for_each(|(sum, more)| *sum += *more);
            sum
        })
    }

    /// How many rings are gone with I/O that has not ended.
    pub fn stuck(&self) -> usize {
        self.left.load(Ordering::Acquire)
    }

    /// The same, for use after these figures are dropped: rings that are left then stay left.
    pub fn left(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.left)
    }

    /// Whether no ring of the device is served, as I/O that is left of earlier rings could take
    /// effect after what the driver requests now: a write, or data into memory that was a driver's.
    /// Reads into buffers of the service hold nothing up, unless there are very many.
    #[inline]
    pub fn holds(&self) -> bool {
        self.holds.load(Ordering::Acquire)
    }

    /// Keeps what is left of a queue until the kernel is done with it.
    pub(super) fn keep(&self, remains: Remains<S>) {
        let mut stuck = self.stuck.lock();
        stuck.push(remains);
        self.count(&stuck);
    }

    /// Drops what the kernel is done with. Invalidations may wait for its leases, so workers call
    /// this.
    #[inline]
    pub(super) fn reap(&self) -> bool {
        self.stuck() > 0 && self.reap_stuck()
    }

    #[cold]
    fn reap_stuck(&self) -> bool {
        let mut stuck = self.stuck.lock();
        let before = stuck.len();
        stuck.retain_mut(|remains| remains.reap() > 0);
        self.count(&stuck);
        stuck.len() != before
    }

    fn count(&self, stuck: &[Remains<S>]) {
        let holds = stuck.len() > MOST_LEFT || stuck.iter().any(Remains::holds);
        self.holds.store(holds, Ordering::Release);
        self.left.store(stuck.len(), Ordering::Release);
    }

    /// Adds what queue `index` has done since the last call. Each queue has one worker at a time.
    pub(super) fn add(&self, index: u16, mut more: QueueStats) {
        if let Some(queue) = self.queues.get(usize::from(index)) {
            for (into, more) in queue.0.iter().zip(more.fields()) {
                into.store(into.load(Ordering::Relaxed) + *more, Ordering::Relaxed);
            }
        }
    }
}

impl<S: Serve> Drop for RequestFigures<S> {
    /// Does not wait for the kernel, which may never be done. What it writes to stays where it is
    /// until the process ends.
    fn drop(&mut self) {
        self.reap();
        self.stuck.get_mut().drain(..).for_each(std::mem::forget);
    }
}

/// How often to check whether the kernel is done with stuck rings: it wakes no worker then, since
/// it signals the eventfd of a queue that is gone.
const EVERY_NS: u64 = 5_000_000;

/// Drops what stopped queues kept, once the kernel is done with it: memory, and leases that
/// invalidations wait for. On its own, it is the unit that a device leaves on its workers when a
/// connection is over.
pub struct Reaper<S: Serve> {
    figures: Arc<RequestFigures<S>>,
    pub(super) due_ns: u64,
}

impl<S: Serve> Reaper<S> {
    /// For the queues of these figures.
    pub fn new(figures: &Arc<RequestFigures<S>>) -> Reaper<S> {
        Reaper { figures: Arc::clone(figures), due_ns: 0 }
    }
}

impl<S: Serve> Unit for Reaper<S> {
    #[inline]
    fn poll(&mut self, now_ns: u64) -> bool {
        if self.figures.stuck() == 0 {
            return false;
        }
        self.due_ns = now_ns.saturating_add(EVERY_NS);
        self.figures.reap()
    }

    fn next_due(&self) -> Option<u64> {
        (self.figures.stuck() > 0).then_some(self.due_ns)
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}

    fn wakers<'a>(&'a self, _: &mut Vec<BorrowedFd<'a>>) {}
}
