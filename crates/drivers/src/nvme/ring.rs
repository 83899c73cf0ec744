//! A queue pair: commands go into one queue, completions come out of the other.

use std::sync::{Arc, atomic::Ordering};

use ringfence_dma::{Coherent, Device};
use ringfence_iommu::{Domain, HostAddr};
use ringfence_iova::Allocator;

use super::{
    Error, Registers, Status,
    pages::{PAGE, Pages},
    wire::{COMMAND_BYTES, COMPLETION_BYTES, Command, CompletionEntry},
};

/// A pair of queues with the same number of entries.
///
/// With at most [`depth`](Self::depth) commands in flight neither can overflow: the device has
/// consumed what it has completed, and the rest is less than a ring.
pub(super) struct Pair<R> {
    registers: Arc<R>,
    memory: Coherent<Pages>,
    /// Entries of each of the two.
    pub(super) entries: u32,
    /// Where completions begin in the memory.
    completions: usize,
    /// Where the next command goes, and the tail in the last doorbell write.
    tail: u32,
    doorbell_tail: u32,
    /// Where the next completion comes, the phase that marks it as new, and the head in the last
    /// doorbell write.
    head: u32,
    phase: bool,
    taken: u32,
    submit_doorbell: u64,
    complete_doorbell: u64,
}

impl<R: Registers> Pair<R> {
    /// Empty queues of `entries`, at least 2.
    ///
    /// # Errors
    /// There is no memory for them.
    pub(super) fn new<D: Domain<Target = HostAddr>, A: Allocator>(
        device: &Device<D, A>,
        registers: &Arc<R>,
        entries: u32,
        (submit_doorbell, complete_doorbell): (u64, u64),
    ) -> Result<Pair<R>, Error> {
        let completions = (entries as usize * COMMAND_BYTES).next_multiple_of(PAGE as usize);
        let len = completions + entries as usize * COMPLETION_BYTES;
        Ok(Pair {
            registers: Arc::clone(registers),
            memory: Pages::shared(device, len)?,
            entries,
            completions,
            tail: 0,
            doorbell_tail: 0,
            head: 0,
            phase: true,
            taken: 0,
            submit_doorbell,
            complete_doorbell,
        })
    }

    /// The device addresses of the commands and of the completions.
    pub(super) fn places(&self) -> (u64, u64) {
        let first = self.memory.iova().0;
        (first, first + self.completions as u64)
    }

    /// How many commands may be in flight.
    pub(super) fn depth(&self) -> u32 {
        self.entries - 1
    }

    /// Adds a command; [`ring`](Self::ring) notifies the device. The caller observes the depth.
    pub(super) fn push(&mut self, command: &Command) {
        let at = self.tail as usize * COMMAND_BYTES;
        for (n, word) in command.0.iter().enumerate() {
            self.memory.memory().word(at + 4 * n).store(word.to_le(), Ordering::Relaxed);
        }
        self.tail = (self.tail + 1) % self.entries;
    }

    /// Notifies the device of all commands that were added, with one doorbell write.
    pub(super) fn ring(&mut self) {
        if self.doorbell_tail != self.tail {
            // The commands and their data come before the doorbell, as `Registers` promises.
            self.registers.write32(self.submit_doorbell, self.tail);
            self.doorbell_tail = self.tail;
        }
    }

    /// The next completion, as the device wrote it: untrusted.
    pub(super) fn pop(&mut self) -> Option<CompletionEntry> {
        let at = self.completions + self.head as usize * COMPLETION_BYTES;
        let memory = self.memory.memory();
        // Ordering: the word with the phase first; what the device wrote before it is then visible. A
        // device is no thread, and no model has it; x86 keeps the order of loads for it too.
        let last = u32::from_le(memory.word(at + 12).load(Ordering::Acquire));
        if (last >> 16 & 1 != 0) != self.phase {
            return None;
        }
        let result = u32::from_le(memory.word(at).load(Ordering::Relaxed));
        self.head += 1;
        if self.head == self.entries {
            (self.head, self.phase) = (0, !self.phase);
        }
        Some(CompletionEntry { result, id: last as u16, status: Status::new((last >> 16) as u16) })
    }

    /// Returns the room of the completions that were taken to the device.
    pub(super) fn release(&mut self) {
        if self.taken != self.head {
            // The entries were read before the doorbell, as `Registers` promises: the device may
            // overwrite them.
            self.registers.write32(self.complete_doorbell, self.head);
            self.taken = self.head;
        }
    }
}
