//! Faults on their way to the driver.

use std::sync::Arc;

use ringfence_iommu::{Fault, FaultSink};
use ringfence_mem::Translate;
use ringfence_virtq::{RingError, device::Queue};

use super::Progress;

/// Faults that wait for a buffer: bounded, what is too many is dropped and counted (rule V29).
/// Shared by whoever reports and the [`EventQueue`].
#[derive(Debug)]
pub struct FaultQueue {}

impl FaultQueue {
    /// A queue in which `capacity` faults can wait.
    pub fn new(capacity: usize) -> Arc<FaultQueue> {
        let _ = capacity;
        todo!()
    }

    /// How many faults were dropped.
    pub fn dropped(&self) -> u64 {
        todo!()
    }

    /// How many faults wait.
    pub fn waiting(&self) -> usize {
        todo!()
    }
}

impl FaultSink for FaultQueue {
    fn report(&self, fault: Fault) {
        let _ = fault;
        todo!()
    }
}

/// Serves the event virtqueue: puts waiting faults into the driver's buffers.
#[derive(Debug)]
pub struct EventQueue {
    faults: Arc<FaultQueue>,
    queue: Queue,
}

impl EventQueue {
    /// Serves `queue` from `faults`.
    pub fn new(faults: Arc<FaultQueue>, queue: Queue) -> EventQueue {
        EventQueue { faults, queue }
    }

    /// Delivers what waits, as far as there are buffers.
    ///
    /// # Errors
    /// The driver broke the ring.
    pub fn poll(&mut self, mem: &impl Translate) -> Result<Progress, RingError> {
        let _ = (mem, &self.faults);
        todo!()
    }

    /// The virtqueue.
    pub fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }

    /// Ends the service.
    pub fn into_queue(self) -> Queue {
        self.queue
    }
}
