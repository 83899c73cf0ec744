//! The driver's end of the event queue.

use ringfence_mem::Window;
use ringfence_virtq::{RingError, driver::Queue};

use crate::wire::FaultRecord;

/// Keeps the event queue filled with buffers and reads the fault records that come back.
#[derive(Debug)]
pub struct EventReceiver {}

impl EventReceiver {
    /// The bytes of shared memory that a queue of `size` needs for its buffers.
    pub fn buffer_bytes(size: u16) -> usize {
        let _ = size;
        todo!()
    }

    /// Fills `queue` with buffers in `memory`, which the device sees at `addr`. Kick afterwards.
    ///
    /// # Errors
    /// [`RingError`].
    ///
    /// # Panics
    /// If `memory` is smaller than [`buffer_bytes`](Self::buffer_bytes).
    pub fn new(queue: Queue, memory: Window, addr: u64) -> Result<EventReceiver, RingError> {
        let _ = (queue, memory, addr);
        todo!()
    }

    /// Calls `each` with every record that came, and gives its buffer back to the device. True if
    /// the device wants a kick.
    ///
    /// # Errors
    /// The device broke the ring.
    pub fn poll(&mut self, each: impl FnMut(FaultRecord)) -> Result<bool, RingError> {
        let _ = each;
        todo!()
    }
}
