//! The in-flight region of a split ring.

use super::{InflightError, Part, broken};

/// Bytes before the entries: features, version, size, then these two.
pub(super) const HEAD: usize = 16;
const LAST_BATCH_HEAD: usize = 12;
const USED_IDX: usize = 14;

/// Bytes of an entry: inflight (u8), padding, next (u16), counter (u64).
pub(super) const ENTRY: usize = 16;
const INFLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

fn entry(head: u16) -> usize {
    HEAD + usize::from(head) * ENTRY
}

/// A split ring's in-flight entries, recorded for the next process.
///
/// Call [`take`](Self::take) for each chain before it is carried out, [`complete`](Self::complete)
/// before the driver sees its element of the used ring, and show it in [`publish`](Self::publish).
#[derive(Debug)]
pub struct SplitInflight {
    part: Part,
    /// Orders the entries that are taken.
    counter: u64,
    last_batch_head: u16,
    /// Completed, not published.
    batch: Vec<u16>,
    base: u16,
}

impl SplitInflight {
    pub(super) fn open(
        part: Part,
        used_idx: u16,
    ) -> Result<(SplitInflight, Vec<u16>), InflightError> {
        let size = part.size;
        if part.is_new()? {
            part.clear(entry(size));
            part.put16(USED_IDX, used_idx);
            part.born();
            let batch = Vec::with_capacity(size.into());
            let new = SplitInflight { part, counter: 0, last_batch_head: 0, batch, base: used_idx };
            return Ok((new, Vec::new()));
        }
        let flags = |part: &Part| -> Vec<u16> {
            (0..size).filter(|&head| part.get8(entry(head) + INFLIGHT) != 0).collect()
        };
        let last_batch_head = part.get16(LAST_BATCH_HEAD);
        let published = used_idx.wrapping_sub(part.get16(USED_IDX));
        // The driver saw a batch of which not all entries were cleared.
        if published != 0 && !flags(&part).is_empty() {
            if published > size {
                return Err(broken("the distance to the used index", published));
            }
            let mut head = last_batch_head;
            for _ in 0..published {
                if head >= size {
                    return Err(broken("the head of a completed chain", head));
                }
                part.put8(entry(head) + INFLIGHT, 0);
                head = part.get16(entry(head) + NEXT);
            }
        }
        part.put16(USED_IDX, used_idx);
        let mut heads: Vec<(u64, u16)> = flags(&part)
            .into_iter()
            .map(|head| (part.get64(entry(head) + COUNTER), head))
            .collect();
        heads.sort_unstable();
        let counter = heads.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        let heads: Vec<u16> = heads.into_iter().map(|(_, head)| head).collect();
        // They were taken in the order of the available ring.
        let base = used_idx.wrapping_add(heads.len() as u16);
        let batch = Vec::with_capacity(size.into());
        Ok((SplitInflight { part, counter, last_batch_head, batch, base }, heads))
    }

    /// The index of the available ring at which to go on, behind all that earlier processes took.
    pub fn base(&self) -> u16 {
        self.base
    }

    /// Takes the chain with this head; call it before the chain has any effect. A head beyond the
    /// queue's size is ignored.
    #[inline]
    pub fn take(&mut self, head: u16) {
        if head >= self.part.size {
            return;
        }
        self.part.put64(entry(head) + COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.part.put8(entry(head) + INFLIGHT, 1);
    }

    /// Completes the chain with this head; the next [`publish`](Self::publish) shows its element of
    /// the used ring.
    #[inline]
    pub fn complete(&mut self, head: u16) {
        if head < self.part.size && self.batch.len() < usize::from(self.part.size) {
            self.batch.push(head);
        }
    }

    /// Shows the driver what was completed since the last call: `show` advances the used ring's
    /// index by as many elements, and returns the new index.
    pub fn publish(&mut self, show: impl FnOnce() -> u16) {
        for &head in &self.batch {
            self.part.put16(entry(head) + NEXT, self.last_batch_head);
            self.part.put16(LAST_BATCH_HEAD, head);
            self.last_batch_head = head;
        }
        let used_idx = show();
        for head in self.batch.drain(..) {
            self.part.put8(entry(head) + INFLIGHT, 0);
        }
        self.part.put16(USED_IDX, used_idx);
    }
}
