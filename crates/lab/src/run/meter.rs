//! How much memory the bounce pools of a link have, and had at most.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use ringfence_dma::{BounceMemory, Chunk};
use ringfence_iommu::Address;

/// Memory for bounce slots, counted.
pub(super) struct Metered<M> {
    memory: M,
    meter: Arc<Meter>,
}

/// What is taken, bytes.
#[derive(Debug, Default)]
pub(super) struct Meter {
    now: AtomicU64,
    most: AtomicU64,
}

impl Meter {
    /// The most bytes that were taken at a time.
    pub(super) fn most(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }
}

impl<M> Metered<M> {
    pub(super) fn new(memory: M) -> Metered<M> {
        Metered { memory, meter: Arc::default() }
    }

    pub(super) fn meter(&self) -> Arc<Meter> {
        Arc::clone(&self.meter)
    }
}

// SAFETY: every chunk is the memory's own, as it came; what is counted changes nothing.
unsafe impl<T: Address, M: BounceMemory<T>> BounceMemory<T> for Metered<M> {
    fn take(&self, len: u64, align: u64) -> Option<Chunk<T>> {
        let chunk = self.memory.take(len, align)?;
        let now = self.meter.now.fetch_add(chunk.len, Ordering::Relaxed).saturating_add(chunk.len);
        self.meter.most.fetch_max(now, Ordering::Relaxed);
        Some(chunk)
    }

    fn give_back(&self, chunk: Chunk<T>) {
        self.meter.now.fetch_sub(chunk.len, Ordering::Relaxed);
        self.memory.give_back(chunk);
    }
}

#[cfg(test)]
mod tests {
    use ringfence_dma::HostMemory;

    use super::*;

    #[test]
    fn the_most_is_what_was_taken_at_a_time() {
        let memory = Metered::new(HostMemory);
        let meter = memory.meter();
        let one = memory.take(8192, 4096).unwrap();
        let other = memory.take(4096, 4096).unwrap();
        memory.give_back(one);
        let third = memory.take(4096, 4096).unwrap();
        assert_eq!((meter.now.load(Ordering::Relaxed), meter.most()), (8192, 12288));
        // What cannot be had is not counted.
        assert!(memory.take(u64::MAX, 4096).is_none());
        [other, third].into_iter().for_each(|chunk| memory.give_back(chunk));
        assert_eq!((meter.now.load(Ordering::Relaxed), meter.most()), (0, 12288));
    }
}
