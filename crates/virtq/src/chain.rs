//! A chain of descriptors, copied out of the ring.

use ringfence_mem::{AccessError, Translate};

use crate::ChainFault;

/// One buffer: a range of memory that the device reads or writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Desc {
    /// Its address, as the device sees it: an IOVA with `ACCESS_PLATFORM`, else guest-physical.
    pub addr: u64,
    /// Its length in bytes. 0 is legal: an empty buffer.
    pub len: u32,
    /// Whether the device writes it (and does not read it).
    pub write: bool,
}

impl Desc {
    /// A buffer that the device reads.
    pub const fn readable(addr: u64, len: u32) -> Desc {
        Desc { addr, len, write: false }
    }

    /// A buffer that the device writes.
    pub const fn writable(addr: u64, len: u32) -> Desc {
        Desc { addr, len, write: true }
    }

    /// Whether the buffer passes the end of the address space. It may end with its last byte.
    #[inline]
    pub(crate) fn wraps(&self) -> bool {
        // For an empty buffer: whether its address does, which it cannot.
        self.addr.checked_add(u64::from(self.len.saturating_sub(1))).is_none()
    }
}

/// A chain as the device's end took it from the ring: our own copy, checked, the indirect table
/// flattened. Made once and refilled by every [`pop`](crate::device::Queue::pop), so that no
/// request allocates.
///
/// The addresses in it are *not* checked: every use goes through [`Translate`], which returns an
/// error if an address leads nowhere.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    pub(crate) head: u16,
    /// How many descriptors of the ring it takes.
    pub(crate) count: u16,
    /// Address and length of the indirect table that it ends with.
    pub(crate) table: Option<(u64, u32)>,
    pub(crate) descs: Vec<Desc>,
    pub(crate) readable: u32,
    pub(crate) readable_len: u32,
    pub(crate) writable_len: u32,
}

impl Chain {
    /// An empty chain, to be filled by [`pop`](crate::device::Queue::pop).
    pub fn new() -> Chain {
        Chain::default()
    }

    /// The index of its first descriptor, or in a packed ring its buffer id: identifies it when it
    /// is given back.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// How many descriptors of the ring itself it takes, an indirect one included.
    pub fn count(&self) -> u16 {
        self.count
    }

    /// Address and length in bytes of the indirect table, if it has one. In a packed ring all its
    /// buffers lie in that table; so an in-flight record can refer to the chain by it
    /// ([`Stored`](crate::device::Stored)).
    pub fn table(&self) -> Option<(u64, u32)> {
        self.table
    }

    /// All buffers: those that the device reads, then those that it writes.
    pub fn descs(&self) -> &[Desc] {
        &self.descs
    }

    /// The buffers that the device reads.
    #[inline]
    pub fn readable(&self) -> &[Desc] {
        &self.descs[..self.readable as usize]
    }

    /// The buffers that the device writes.
    #[inline]
    pub fn writable(&self) -> &[Desc] {
        &self.descs[self.readable as usize..]
    }

    /// Bytes that the device may read: at most 2^32 - 1, together with the writable ones.
    #[inline]
    pub fn readable_len(&self) -> u64 {
        self.readable_len.into()
    }

    /// Bytes that the device may write.
    #[inline]
    pub fn writable_len(&self) -> u64 {
        self.writable_len.into()
    }

    /// Copies bytes out of the readable part, from `offset` on, as many as there are or `out`
    /// holds; returns how many.
    ///
    /// # Errors
    /// An address cannot be reached.
    pub fn read_at(
        &self,
        mem: &impl Translate,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, AccessError> {
        let mut done = 0;
        for Desc { addr, len, .. } in cut(self.readable(), offset, out.len() as u64) {
            let end = done + len as usize;
            mem.read(addr, &mut out[done..end])?;
            done = end;
        }
        Ok(done)
    }

    /// Copies bytes into the writable part, at `offset`, as many as `data` has or there is room
    /// for; returns how many.
    ///
    /// # Errors
    /// An address cannot be reached.
    pub fn write_at(
        &self,
        mem: &impl Translate,
        offset: u64,
        data: &[u8],
    ) -> Result<usize, AccessError> {
        let mut done = 0;
        for Desc { addr, len, .. } in cut(self.writable(), offset, data.len() as u64) {
            let end = done + len as usize;
            mem.write(addr, &data[done..end])?;
            done = end;
        }
        Ok(done)
    }

    /// Makes it empty; keeps its allocation.
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.descs.clear();
        (self.head, self.count, self.table) = (0, 0, None);
        (self.readable, self.readable_len, self.writable_len) = (0, 0, 0);
    }

    /// Appends descriptor `at` of some table, our copy of it, if it is allowed here.
    #[inline]
    pub(crate) fn push(&mut self, at: u16, desc: Desc) -> Result<(), ChainFault> {
        let Desc { addr, len, .. } = desc;
        if desc.wraps() {
            return Err(ChainFault::Wraps { at, addr, len });
        }
        let total = u64::from(self.readable_len) + u64::from(self.writable_len) + u64::from(len);
        if total > u64::from(u32::MAX) {
            return Err(ChainFault::TooLong { total });
        }
        if desc.write {
            self.writable_len += len;
        } else {
            if (self.readable as usize) < self.descs.len() {
                return Err(ChainFault::Order { at });
            }
            self.readable += 1;
            self.readable_len += len;
        }
        self.descs.push(desc);
        Ok(())
    }

    /// As [`push`](Self::push) to an empty chain.
    #[inline]
    pub(crate) fn push_only(&mut self, at: u16, only: Desc) -> Result<(), ChainFault> {
        debug_assert!(self.descs.is_empty());
        let Desc { addr, len, write } = only;
        if only.wraps() {
            return Err(ChainFault::Wraps { at, addr, len });
        }
        self.readable = (!write).into();
        (self.readable_len, self.writable_len) = if write { (0, len) } else { (len, 0) };
        self.descs.push(only);
        Ok(())
    }

    /// As [`push`](Self::push) to an empty chain, of a readable buffer and then of a writable one.
    #[inline]
    pub(crate) fn push_pair(
        &mut self,
        (at, read): (u16, Desc),
        (after, written): (u16, Desc),
    ) -> Result<(), ChainFault> {
        debug_assert!(self.descs.is_empty() && !read.write && written.write);
        for (at, desc) in [(at, read), (after, written)] {
            if desc.wraps() {
                return Err(ChainFault::Wraps { at, addr: desc.addr, len: desc.len });
            }
        }
        let total = u64::from(read.len) + u64::from(written.len);
        if total > u64::from(u32::MAX) {
            return Err(ChainFault::TooLong { total });
        }
        (self.readable, self.readable_len, self.writable_len) = (1, read.len, written.len);
        self.descs.extend_from_slice(&[read, written]);
        Ok(())
    }
}

/// The buffers that hold `len` bytes of `descs` from byte `offset` on, the first and last cut to
/// fit; fewer if `descs` ends before. With it a device skips the header or the status byte.
///
/// Yields no empty buffers. The descriptors are to be those of a [`Chain`], none of which passes
/// the end of the address space.
pub fn cut(descs: &[Desc], offset: u64, len: u64) -> impl Iterator<Item = Desc> + '_ {
    let (mut skip, mut left) = (offset, len);
    descs.iter().filter_map(move |desc| {
        let from = skip.min(desc.len.into()) as u32;
        skip -= u64::from(from);
        let take = left.min((desc.len - from).into()) as u32;
        left -= u64::from(take);
        // A part that is not empty begins inside the buffer: the sum saturates only for a buffer of
        // no chain, and its use fails then.
        let addr = desc.addr.saturating_add(from.into());
        (take > 0).then_some(Desc { addr, len: take, ..*desc })
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Any, more often at the end of the address space.
    fn addr() -> impl Strategy<Value = u64> {
        prop_oneof![any::<u64>(), (0..4u64).prop_map(|below| u64::MAX - below)]
    }

    /// Any, more often very short or very long.
    fn len() -> impl Strategy<Value = u32> {
        prop_oneof![any::<u32>(), 0..4u32, (0..4u32).prop_map(|below| u32::MAX - below)]
    }

    #[test]
    fn a_chain_fits_in_a_line_of_a_cache() {
        assert!(size_of::<Chain>() <= 64);
    }

    proptest! {
        #[test]
        fn one_buffer_alone_is_as_any(addr in addr(), len in len(), write in any::<bool>()) {
            let desc = Desc { addr, len, write };
            let (mut only, mut plain) = (Chain::new(), Chain::new());
            prop_assert_eq!(only.push_only(3, desc), plain.push(3, desc));
            prop_assert_eq!((only.readable(), only.writable()), (plain.readable(), plain.writable()));
            let lens = |chain: &Chain| (chain.readable_len(), chain.writable_len());
            prop_assert_eq!(lens(&only), lens(&plain));
        }

        #[test]
        fn a_pair_is_two_buffers_one_after_the_other(
            read in (addr(), len()), written in (addr(), len()),
        ) {
            let read = Desc::readable(read.0, read.1);
            let written = Desc::writable(written.0, written.1);
            let (mut pair, mut plain) = (Chain::new(), Chain::new());
            let pushed = plain.push(3, read).and_then(|()| plain.push(5, written));
            prop_assert_eq!(pair.push_pair((3, read), (5, written)), pushed);
            if pushed.is_ok() {
                prop_assert_eq!((pair.readable(), pair.writable()), (plain.readable(), plain.writable()));
                let lens = |chain: &Chain| (chain.readable_len(), chain.writable_len());
                prop_assert_eq!(lens(&pair), lens(&plain));
            }
        }

        #[test]
        fn a_buffer_wraps_if_its_last_byte_lies_below_its_first(addr in addr(), len in len()) {
            let last = u128::from(addr) + u128::from(len).saturating_sub(1);
            prop_assert_eq!(Desc::readable(addr, len).wraps(), last > u128::from(u64::MAX));
        }
    }
}
