//! Many chains taken at once.

use crate::{Chain, ChainFault, Desc};

/// A queue of chains that are taken and not given back, their buffers one after the other, to which
/// [`pop_more`](super::Queue::pop_more) appends. Made once, and refilled.
#[derive(Clone, Debug, Default)]
pub struct Burst {
    descs: Vec<Desc>,
    chains: Vec<Part>,
    /// Those before it are removed.
    first: usize,
    /// For chains that are longer than one buffer.
    pub(super) chain: Chain,
}

/// A chain's range of the buffers.
#[derive(Clone, Copy, Debug)]
struct Part {
    head: u16,
    from: u32,
    /// The end of the buffers that the device reads.
    readable: u32,
    to: u32,
}

/// How many removed chains keep their room: moving those behind them costs little if it is rare.
const SLACK: usize = 512;

impl Part {
    /// Adjusts for so many buffers that are removed before its own.
    fn lower(&mut self, by: u32) {
        (self.from, self.readable, self.to) = (self.from - by, self.readable - by, self.to - by);
    }
}

/// One chain of a [`Burst`].
#[derive(Clone, Copy, Debug)]
pub struct Taken<'b> {
    head: u16,
    descs: &'b [Desc],
    readable: usize,
}

impl<'b> Taken<'b> {
    /// Identifies it when it is given back, as [`Chain::head`].
    #[inline]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// All buffers: those that the device reads, then those that it writes.
    #[inline]
    pub fn descs(&self) -> &'b [Desc] {
        self.descs
    }

    /// The buffers that the device reads.
    #[inline]
    pub fn readable(&self) -> &'b [Desc] {
        &self.descs[..self.readable]
    }

    /// The buffers that the device writes.
    #[inline]
    pub fn writable(&self) -> &'b [Desc] {
        &self.descs[self.readable..]
    }

    /// Bytes that the device may read, as [`Chain::readable_len`].
    pub fn readable_len(&self) -> u64 {
        self.readable().iter().map(|desc| u64::from(desc.len)).sum()
    }

    /// Bytes that the device may write, as [`Chain::writable_len`].
    pub fn writable_len(&self) -> u64 {
        self.writable().iter().map(|desc| u64::from(desc.len)).sum()
    }
}

impl Burst {
    /// An empty burst.
    pub fn new() -> Burst {
        Burst::default()
    }

    /// How many chains it holds.
    #[inline]
    pub fn len(&self) -> usize {
        self.chains.len() - self.first
    }

    /// Whether it holds none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Chain `index`, in the order of the ring; `None` behind the last.
    #[inline]
    pub fn get(&self, index: usize) -> Option<Taken<'_>> {
        self.chains.get(self.first.saturating_add(index)).map(|part| self.taken(part))
    }

    /// The chains' heads, in the order of the ring.
    #[inline]
    pub fn heads(&self) -> impl ExactSizeIterator<Item = u16> {
        self.chains[self.first..].iter().map(|part| part.head)
    }

    /// The chains, in the order of the ring.
    #[inline]
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Taken<'_>> + ExactSizeIterator {
        self.chains[self.first..].iter().map(|part| self.taken(part))
    }

    #[inline]
    fn taken(&self, part: &Part) -> Taken<'_> {
        let descs = &self.descs[part.from as usize..part.to as usize];
        let readable = (part.readable - part.from) as usize;
        Taken { head: part.head, descs, readable }
    }

    /// Makes it empty; keeps its allocations.
    #[inline]
    pub fn clear(&mut self) {
        self.descs.clear();
        self.chains.clear();
        self.first = 0;
    }

    /// Removes the first `count` chains, or all if there are fewer.
    #[inline]
    pub fn forget(&mut self, count: usize) {
        self.first += count.min(self.len());
        if self.is_empty() {
            self.clear();
        } else if self.first >= SLACK {
            self.close_up();
        }
    }

    /// Removes chain `index`, and keeps those around it.
    pub fn remove(&mut self, index: usize) {
        let index = self.first.saturating_add(index);
        if index < self.chains.len() {
            let Part { from, to, .. } = self.chains.remove(index);
            self.descs.drain(from as usize..to as usize);
            self.chains[index..].iter_mut().for_each(|part| part.lower(to - from));
        }
    }

    /// Removes all but the first `count` chains.
    pub fn truncate(&mut self, count: usize) {
        self.chains.truncate(self.first.saturating_add(count));
        self.descs.truncate(self.chains.last().map_or(0, |part| part.to as usize));
    }

    /// Closes the gap of removed chains.
    #[cold]
    fn close_up(&mut self) {
        let gone = self.chains[self.first].from;
        self.descs.drain(..gone as usize);
        self.chains.drain(..self.first);
        self.chains.iter_mut().for_each(|part| part.lower(gone));
        self.first = 0;
    }

    /// Appends a chain of one buffer, descriptor `at` of the ring.
    #[inline]
    pub(super) fn push(&mut self, head: u16, at: u16, desc: Desc) -> Result<(), ChainFault> {
        let Desc { addr, len, write } = desc;
        if desc.wraps() {
            return Err(ChainFault::Wraps { at, addr, len });
        }
        // At most 2^15 chains, plus some that are removed, of at most 2^16 buffers each.
        let from = self.descs.len() as u32;
        let (readable, to) = (from + u32::from(!write), from + 1);
        self.descs.push(desc);
        self.chains.push(Part { head, from, readable, to });
        Ok(())
    }

    /// Appends the chain that `self.chain` holds.
    pub(super) fn push_chain(&mut self) {
        let Chain { head, readable, ref descs, .. } = self.chain;
        let from = self.descs.len() as u32;
        self.descs.extend_from_slice(descs);
        let to = self.descs.len() as u32;
        self.chains.push(Part { head, from, readable: from + readable, to });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        One(u64),
        Many(usize),
        Forget(usize),
        Remove(usize),
        Truncate(usize),
        Clear,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            60 => any::<u64>().prop_map(|addr| Step::One(addr >> 1)),
            20 => (0..4usize).prop_map(Step::Many),
            20 => (0..6usize).prop_map(Step::Forget),
            4 => (0..300usize).prop_map(Step::Remove),
            1 => (300..400usize).prop_map(Step::Truncate),
            1 => Just(Step::Clear),
        ]
    }

    #[test]
    fn there_is_no_chain_at_the_last_of_all_numbers() {
        let mut burst = Burst::new();
        (0..3).for_each(|head| burst.push(head, 0, Desc::readable(0, 7)).unwrap());
        burst.forget(1);
        assert!(burst.get(usize::MAX).is_none());
        burst.remove(usize::MAX);
        burst.truncate(usize::MAX);
        assert!(burst.heads().eq([1, 2]));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever is removed, from either end or between, the remaining chains are unchanged.
        #[test]
        fn it_is_a_queue(steps in prop::collection::vec(step(), 1..3000)) {
            let (mut burst, mut plain) = (Burst::new(), VecDeque::new());
            for (at, step) in steps.into_iter().enumerate() {
                let head = at as u16;
                match step {
                    Step::One(addr) => {
                        let desc = Desc { addr, len: 7, write: at % 2 == 0 };
                        burst.push(head, 0, desc).unwrap();
                        plain.push_back((head, vec![desc]));
                    }
                    Step::Many(count) => {
                        burst.chain.clear();
                        burst.chain.head = head;
                        let descs = vec![Desc::readable(at as u64, 3); count];
                        descs.iter().for_each(|&desc| burst.chain.push(0, desc).unwrap());
                        burst.push_chain();
                        plain.push_back((head, descs));
                    }
                    Step::Forget(count) => {
                        burst.forget(count);
                        plain.drain(..count.min(plain.len()));
                    }
                    Step::Remove(index) => {
                        burst.remove(index);
                        plain.remove(index);
                    }
                    Step::Truncate(count) => {
                        burst.truncate(count);
                        plain.truncate(count);
                    }
                    Step::Clear => {
                        burst.clear();
                        plain.clear();
                    }
                }
                prop_assert_eq!(burst.len(), plain.len());
                prop_assert!(burst.chains.len() <= plain.len() + SLACK);
            }
            let all: Vec<Desc> = plain.iter().flat_map(|(_, descs)| descs.clone()).collect();
            prop_assert_eq!(burst.descs(), all);
            prop_assert!(burst.heads().eq(plain.iter().map(|&(head, _)| head)));
            for (at, (head, descs)) in plain.iter().enumerate() {
                let taken = burst.get(at).unwrap();
                prop_assert_eq!(taken.head(), *head);
                prop_assert_eq!(taken.descs(), &descs[..]);
                prop_assert!(taken.readable().iter().all(|desc| !desc.write));
                prop_assert!(taken.writable().iter().all(|desc| desc.write));
            }
            prop_assert!(burst.get(plain.len()).is_none());
        }
    }
}
