//! Buffers that are free, the one that was free the longest first.

/// A queue of buffers with room for all there are.
#[derive(Debug)]
pub(crate) struct Fifo {
    ring: Box<[u32]>,
    /// How many were ever taken and put.
    taken: usize,
    put: usize,
}

impl Fifo {
    /// One that holds `buffers`.
    pub(crate) fn new(buffers: std::ops::Range<u32>) -> Fifo {
        let mut ring: Vec<u32> = buffers.collect();
        let put = ring.len();
        ring.resize(put.next_power_of_two(), 0);
        Fifo { ring: ring.into(), taken: 0, put }
    }

    pub(crate) fn len(&self) -> usize {
        self.put - self.taken
    }

    #[inline]
    pub(crate) fn take(&mut self) -> Option<u32> {
        (self.len() > 0).then(|| {
            let buffer = self.ring[self.taken & (self.ring.len() - 1)];
            self.taken += 1;
            buffer
        })
    }

    /// Puts back what was taken.
    #[inline]
    pub(crate) fn put(&mut self, buffer: u32) {
        debug_assert!(self.len() < self.ring.len(), "more than there are");
        let last = self.ring.len() - 1;
        self.ring[self.put & last] = buffer;
        self.put += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_take_turns() {
        let mut fifo = Fifo::new(3..6);
        for wanted in [3, 4, 5, 3, 4, 5, 3] {
            let buffer = fifo.take().unwrap();
            assert_eq!((buffer, fifo.len()), (wanted, 2));
            fifo.put(buffer);
        }
        assert!((0..3).all(|_| fifo.take().is_some()) && fifo.take().is_none());
    }
}
