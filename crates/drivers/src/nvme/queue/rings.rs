//! The memory that a queue and the controller share.

use std::sync::atomic::Ordering;

use ringfence_dma::{Coherent, Segment};

use super::super::{NotSubmitted, Op, Registers, pages::Pages, prp, ring::Pair, wire::Command};

/// The memory that a queue shares with the controller.
pub(super) struct Rings<R> {
    pub(super) pair: Pair<R>,
    /// A PRP list for each command.
    pub(super) lists: Coherent<Pages>,
    pub(super) list_bytes: u64,
}

impl<R: Registers> Rings<R> {
    /// Adds a command whose data lies in `segments`.
    pub(super) fn push(
        &mut self,
        at: usize,
        command: Command,
        segments: impl Iterator<Item = Segment>,
    ) -> Result<(), NotSubmitted> {
        let offset = at as u64 * self.list_bytes;
        let (list, room) = (self.lists.memory(), (self.list_bytes / 8) as usize);
        let data = prp::entries(segments, self.lists.iova().0 + offset, room, |n, page| {
            list.long(offset as usize + 8 * n).store(page.to_le(), Ordering::Relaxed);
        })?;
        self.pair.push(&command.data(data));
        Ok(())
    }

    /// Adds a command without data. The range of a deallocation takes the place of the PRP list.
    pub(super) fn push_bare(&mut self, at: usize, command: Command, op: Op) {
        let offset = at as u64 * self.list_bytes;
        let mut data = [0; 2];
        if let Op::Deallocate { lba, blocks } = op {
            let list = self.lists.memory();
            let first = u64::from(blocks) << 32;
            list.long(offset as usize).store(first.to_le(), Ordering::Relaxed);
            list.long(offset as usize + 8).store(lba.to_le(), Ordering::Relaxed);
            data[0] = self.lists.iova().0 + offset;
        }
        self.pair.push(&command.data(data));
    }
}
