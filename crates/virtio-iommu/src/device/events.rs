//! Faults on their way to the driver.
//!
//! Ordering: the faults have a lock. `count` spares a thread that; a thread that reports a fault
//! signals the device's event afterwards, and the device looks again.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use ringfence_iommu::{Fault, FaultSink};
use ringfence_mem::Translate;
use ringfence_virtq::{Chain, RingError, device::Queue};

use super::Progress;
use crate::wire::{FAULT_LEN, FaultRecord};

/// Faults that wait for a buffer. Their number is bounded: a fault that finds no room is dropped,
/// and counted (rule [V29]). Shared by what reports faults and the [`EventQueue`].
///
/// [V29]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v29
#[derive(Debug)]
pub struct FaultQueue {
    capacity: usize,
    waiting: Mutex<VecDeque<Fault>>,
    /// The length of `waiting`, to be read without the lock.
    count: AtomicUsize,
    dropped: AtomicU64,
}

impl FaultQueue {
    /// A queue in which `capacity` faults can wait.
    pub fn new(capacity: usize) -> Arc<FaultQueue> {
        Arc::new(FaultQueue {
            capacity,
            waiting: Mutex::new(VecDeque::with_capacity(capacity.min(1024))),
            count: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
        })
    }

    /// How many faults found no room here, or were put into a buffer that could not be written.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// How many faults wait.
    pub fn waiting(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Drops the faults that wait, for a device reset.
    pub fn clear(&self) {
        let mut waiting = self.waiting.lock();
        waiting.clear();
        self.count.store(0, Ordering::Release);
    }

    fn take(&self) -> Option<Fault> {
        if self.waiting() == 0 {
            return None;
        }
        let mut waiting = self.waiting.lock();
        let fault = waiting.pop_front();
        self.count.store(waiting.len(), Ordering::Release);
        fault
    }
}

impl FaultSink for FaultQueue {
    fn report(&self, fault: Fault) {
        let mut waiting = self.waiting.lock();
        if waiting.len() < self.capacity {
            waiting.push_back(fault);
            self.count.store(waiting.len(), Ordering::Release);
        } else {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Serves the event virtqueue: puts waiting faults into the driver's buffers, one each.
#[derive(Debug)]
pub struct EventQueue {
    faults: Arc<FaultQueue>,
    queue: Queue,
    chain: Chain,
}

impl EventQueue {
    /// Serves `queue` from `faults`.
    pub fn new(faults: Arc<FaultQueue>, queue: Queue) -> EventQueue {
        EventQueue { faults, queue, chain: Chain::new() }
    }

    /// Delivers what waits, as far as there are buffers, into as many as the ring has places at
    /// most. A buffer too small for a record is given back empty.
    ///
    /// # Errors
    /// The driver broke the ring.
    pub fn poll(&mut self, mem: &impl Translate) -> Result<Progress, RingError> {
        self.poll_some(mem, usize::MAX)
    }

    /// How many buffers lie in the ring, as far as one look counts them, but no more than there are
    /// faults that wait.
    pub fn ready(&mut self, mem: &impl Translate) -> usize {
        let wanted = self.faults.waiting().try_into().unwrap_or(u16::MAX);
        self.queue.peek_from(mem, 0, wanted, |_| ()).into()
    }

    /// As [`poll`](Self::poll), but takes no more than `most` buffers, which `mem` must cover: see
    /// [`RequestQueue::poll_some`](super::RequestQueue::poll_some).
    ///
    /// # Errors
    /// As there.
    pub fn poll_some(&mut self, mem: &impl Translate, most: usize) -> Result<Progress, RingError> {
        let mut progress = Progress::default();
        // One round of the ring: a driver that offers buffers too small for a record, again and again, holds
        // up nothing else.
        let most = most.min(self.queue.config().size.into());
        // A fault stays in the count until there is a buffer for it: callers use the count to
        // decide whether to poll again.
        while progress.published < most && self.faults.waiting() > 0 {
            if !self.queue.is_valid() {
                self.queue.revalidate(mem)?;
            }
            if !self.queue.pop(mem, &mut self.chain)? {
                break;
            }
            let mut used = 0;
            // The fault is gone if the device was reset meanwhile.
            if self.chain.writable_len() >= FAULT_LEN as u64
                && let Some(fault) = self.faults.take()
            {
                let record = FaultRecord::from(fault).emit();
                match self.chain.write_at(mem, 0, &record) {
                    Ok(_) => used = FAULT_LEN as u32,
                    Err(_) => _ = self.faults.dropped.fetch_add(1, Ordering::Relaxed),
                }
                progress.handled += 1;
            }
            self.queue.push_used(self.chain.head(), used);
            progress.published += 1;
        }
        if progress.published > 0 {
            progress.interrupt = self.queue.publish_used();
        }
        Ok(progress)
    }

    /// The virtqueue.
    pub fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }
}
