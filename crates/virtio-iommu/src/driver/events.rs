//! The driver's end of the event queue.

use ringfence_mem::Window;
use ringfence_virtq::{Desc, RingError, driver::Queue};

use crate::wire::{FAULT_LEN, FaultRecord};

/// The bytes kept for each record.
const SLOT: usize = 32;

/// Keeps the event queue filled with buffers and reads the fault records that come back.
#[derive(Debug)]
pub struct EventReceiver {
    queue: Queue,
    memory: Window,
    addr: u64,
}

impl EventReceiver {
    /// The bytes of shared memory that a queue of `size` needs for its buffers.
    pub fn buffer_bytes(size: u16) -> usize {
        usize::from(size) * SLOT
    }

    /// Fills `queue` with buffers in `memory`, which the device sees at `addr`. Kick afterwards.
    ///
    /// # Panics
    /// If `memory` is smaller than [`buffer_bytes`](Self::buffer_bytes).
    pub fn new(queue: Queue, memory: Window, addr: u64) -> EventReceiver {
        let size = queue.size();
        assert!(memory.len() >= Self::buffer_bytes(size), "too little memory for {size} events");
        let mut receiver = EventReceiver { queue, memory, addr };
        (0..size.into()).for_each(|slot| receiver.give(slot));
        receiver.queue.publish();
        receiver
    }

    fn give(&mut self, slot: u64) {
        let buffer = Desc::writable(self.addr + slot * SLOT as u64, FAULT_LEN as u32);
        // One descriptor for each buffer: there is room.
        let _ = self.queue.add(&[buffer], slot);
    }

    /// Calls `each` with every record that arrived, and gives its buffer back to the device;
    /// malformed records, and records to be ignored (rule [V43]), are skipped. True if the device
    /// wants a kick.
    ///
    /// # Errors
    /// The device broke the ring.
    ///
    /// [V43]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v43
    pub fn poll(&mut self, mut each: impl FnMut(FaultRecord)) -> Result<bool, RingError> {
        let mut given = false;
        // One round of the ring at most, so that a device that floods us does not keep us here.
        for _ in 0..self.queue.size() {
            let Some(used) = self.queue.pop()? else { break };
            let mut bytes = [0; FAULT_LEN];
            let len = bytes.len().min(used.len as usize);
            self.memory.read(used.token as usize * SLOT, &mut bytes[..len]);
            if let Some(record) = FaultRecord::parse(&bytes[..len]) {
                each(record);
            }
            self.give(used.token);
            given = true;
        }
        if given {
            self.queue.publish();
        }
        Ok(given && self.queue.needs_kick())
    }

    /// The queue, to enable notifications before sleeping.
    pub fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }
}
