//! Many chains taken at once.

use crate::{Chain, ChainFault, Desc};

/// Chains that [`pop_burst`](super::Ring::pop_burst) took, their buffers one after the other. Made
/// once and filled again by every burst.
#[derive(Clone, Debug, Default)]
pub struct Burst {
    descs: Vec<Desc>,
    chains: Vec<Part>,
    /// For chains that are longer than one buffer.
    pub(super) chain: Chain,
}

/// Which of the buffers are a chain's.
#[derive(Clone, Copy, Debug)]
struct Part {
    head: u16,
    /// How many descriptors of the ring it takes.
    count: u16,
    from: u32,
    /// Where those end that the device reads.
    readable: u32,
    to: u32,
}

/// One chain of a [`Burst`].
#[derive(Clone, Copy, Debug)]
pub struct Taken<'b> {
    head: u16,
    count: u16,
    descs: &'b [Desc],
    readable: usize,
}

impl<'b> Taken<'b> {
    /// Its name when it is given back, as [`Chain::head`].
    #[inline]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// How many descriptors of the ring it takes, as [`Chain::count`].
    #[inline]
    pub fn count(&self) -> u16 {
        self.count
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
}

impl Burst {
    /// An empty burst.
    pub fn new() -> Burst {
        Burst::default()
    }

    /// How many chains it holds.
    #[inline]
    pub fn len(&self) -> usize {
        self.chains.len()
    }

    /// Whether it holds none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    /// The buffers of all chains, one after the other: to look up their translations at once.
    #[inline]
    pub fn descs(&self) -> &[Desc] {
        &self.descs
    }

    /// Chain `index`, in the order of the ring.
    #[inline]
    pub fn get(&self, index: usize) -> Option<Taken<'_>> {
        self.chains.get(index).map(|part| self.taken(part))
    }

    /// The chains, in the order of the ring.
    #[inline]
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Taken<'_>> + ExactSizeIterator {
        self.chains.iter().map(|part| self.taken(part))
    }

    #[inline]
    fn taken(&self, part: &Part) -> Taken<'_> {
        let descs = &self.descs[part.from as usize..part.to as usize];
        let readable = (part.readable - part.from) as usize;
        Taken { head: part.head, count: part.count, descs, readable }
    }

    /// Makes it empty; the memory stays.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.descs.clear();
        self.chains.clear();
    }

    /// Appends a chain of one buffer, descriptor `at` of the ring.
    #[inline]
    pub(super) fn push(&mut self, head: u16, at: u16, desc: Desc) -> Result<(), ChainFault> {
        let Desc { addr, len, write } = desc;
        if desc.wraps() {
            return Err(ChainFault::Wraps { at, addr, len });
        }
        // At most 2^15 chains of at most 2^16 buffers each.
        let from = self.descs.len() as u32;
        let (readable, to) = (from + u32::from(!write), from + 1);
        self.descs.push(desc);
        self.chains.push(Part { head, count: 1, from, readable, to });
        Ok(())
    }

    /// Appends the chain that `self.chain` holds.
    pub(super) fn push_chain(&mut self) {
        let Chain { head, count, readable, ref descs, .. } = self.chain;
        let from = self.descs.len() as u32;
        self.descs.extend_from_slice(descs);
        let to = self.descs.len() as u32;
        self.chains.push(Part { head, count, from, readable: from + readable as u32, to });
    }
}
