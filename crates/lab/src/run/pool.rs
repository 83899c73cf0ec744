//! The buffers of a job that are not in flight.

use ringfence_drivers::ram::PagedBuffer;

use crate::workload::Op;

/// Free buffers in the order of their addresses. Reads take the lowest and writes the highest, so
/// that I/Os of one kind that are started together have neighbours where there are any, as an
/// allocator by address gives them.
#[derive(Default)]
pub(crate) struct Pool {
    buffers: Vec<Option<PagedBuffer>>,
    /// A bit for each buffer that is there.
    free: Vec<u64>,
}

impl Pool {
    pub(super) fn new(buffers: Vec<PagedBuffer>) -> Pool {
        let mut free = vec![0; buffers.len().div_ceil(64)];
        (0..buffers.len()).for_each(|at| free[at / 64] |= 1 << (at % 64));
        Pool { buffers: buffers.into_iter().map(Some).collect(), free }
    }

    pub(super) fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Takes a free buffer for `op`, and its number; `None` if all are in flight.
    pub(super) fn take(&mut self, op: Op) -> Option<(u32, PagedBuffer)> {
        let word = |word: &u64| *word != 0;
        let at = match op {
            Op::Read => {
                let at = self.free.iter().position(word)?;
                at * 64 + self.free[at].trailing_zeros() as usize
            }
            Op::Write => {
                let at = self.free.iter().rposition(word)?;
                at * 64 + 63 - self.free[at].leading_zeros() as usize
            }
        };
        self.free[at / 64] &= !(1 << (at % 64));
        Some((at as u32, self.buffers[at].take()?))
    }

    /// Takes a buffer back.
    pub(super) fn put(&mut self, number: u32, buffer: PagedBuffer) {
        let at = number as usize;
        self.buffers[at] = Some(buffer);
        self.free[at / 64] |= 1 << (at % 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::link::local_buffers;

    #[test]
    fn reads_take_the_lowest_and_writes_the_highest_free_buffer() {
        let mut pool = Pool::new(local_buffers(&[4096; 130], 256).unwrap());
        let mut take = |op| pool.take(op);
        let (a, first) = take(Op::Read).unwrap();
        let (b, last) = take(Op::Write).unwrap();
        assert_eq!((a, b), (0, 129));
        assert_eq!(take(Op::Read).unwrap().0, 1);
        assert_eq!(take(Op::Write).unwrap().0, 128);
        pool.put(0, first);
        pool.put(129, last);
        let left: Vec<u32> =
            std::iter::from_fn(|| pool.take(Op::Write)).map(|(number, _)| number).collect();
        let wanted: Vec<u32> = (0..=129).filter(|n| ![1, 128].contains(n)).rev().collect();
        assert_eq!(left, wanted);
    }
}
