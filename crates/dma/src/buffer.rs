//! What can be mapped, and which way its data goes.

use ringfence_iommu::{Address, HostAddr, Prot};
use ringfence_mem::{HostSlice, ReadSlice};

/// The direction of the data (rule [L43]).
///
/// [L43]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l43
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The device reads.
    ToDevice,
    /// The device writes.
    FromDevice,
    /// The device does both.
    Bidirectional,
}

impl Direction {
    /// What the device is allowed.
    pub const fn prot(self) -> Prot {
        match self {
            Direction::ToDevice => Prot::READ,
            Direction::FromDevice => Prot::WRITE,
            Direction::Bidirectional => Prot::RW,
        }
    }
}

/// Memory that can be mapped for a device: an owned buffer that knows its place in the addresses
/// that a domain maps to.
///
/// # Safety
/// * The memory stays where it is, and stays memory, for as long as the buffer value exists,
///   wherever the value itself is moved, and also when the value is forgotten.
/// * Nothing else uses the memory meanwhile, except through the value.
/// * Each call of [`for_each_segment`](Self::for_each_segment) lists the same segments.
pub unsafe trait DmaBuffer<T: Address> {
    /// Calls `each` with the address and the length in bytes of every piece, in order. The caller
    /// skips pieces of length 0.
    fn for_each_segment(&self, each: &mut dyn FnMut(T, u64));

    /// The number of bytes: the sum of the pieces.
    fn len(&self) -> u64 {
        let mut len = 0u64;
        self.for_each_segment(&mut |_, piece| len = len.saturating_add(piece));
        len
    }

    /// Calls `each` with the bytes themselves, for copying from, piece by piece: the same bytes in
    /// the same order as the segments, but perhaps in other pieces. Returns false if the CPU
    /// cannot reach all of them, as the default does: then the buffer cannot be bounced.
    ///
    /// Pieces, not `&[u8]`, as the bytes may lie in memory that another process writes. A `&[u8]`
    /// of memory private to this process converts by `into`.
    fn for_each_slice(&self, each: &mut dyn FnMut(ReadSlice<'_>)) -> bool {
        let _ = each;
        false
    }

    /// As [`for_each_slice`](Self::for_each_slice), for copying to.
    fn for_each_slice_mut(&mut self, each: &mut dyn FnMut(HostSlice<'_>)) -> bool {
        let _ = each;
        false
    }

    /// Whether there are no bytes. Such a buffer cannot be mapped.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A buffer that may be read while the device works on it.
///
/// # Safety
/// All accesses to the memory through a shared reference to the buffer are atomic or volatile, or
/// copies that tolerate concurrent change, so that a device that writes meanwhile does not cause a
/// data race.
pub unsafe trait SharedMemory {}

// SAFETY: a vector owns its heap memory, which stays put when the vector is moved or forgotten; it
// cannot grow while a mapping owns it.
unsafe impl DmaBuffer<HostAddr> for Vec<u8> {
    fn for_each_segment(&self, each: &mut dyn FnMut(HostAddr, u64)) {
        each(HostAddr(self.as_ptr().expose_provenance() as u64), <[u8]>::len(self) as u64);
    }

    fn for_each_slice(&self, each: &mut dyn FnMut(ReadSlice<'_>)) -> bool {
        each((&self[..]).into());
        true
    }

    fn for_each_slice_mut(&mut self, each: &mut dyn FnMut(HostSlice<'_>)) -> bool {
        each((&mut self[..]).into());
        true
    }
}

/// A scatter list: several buffers, mapped at one contiguous IOVA range (rules [L35], [L44]-[L46]).
///
/// Each buffer begins at its own offset in a granule, so that on a domain of 4 KiB granules there
/// is a segment for each buffer that does not join the one before in whole granules; there are
/// never more segments than pieces, unless a piece, with its offset in its granule, is longer than
/// a segment may be.
///
/// [L35]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l35
/// [L44]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l44
/// [L46]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l46
// SAFETY: each element is a buffer, and the list cannot change while a mapping owns it.
unsafe impl<T: Address, B: DmaBuffer<T>> DmaBuffer<T> for Vec<B> {
    fn for_each_segment(&self, each: &mut dyn FnMut(T, u64)) {
        self.iter().for_each(|buffer| buffer.for_each_segment(each));
    }

    fn for_each_slice(&self, each: &mut dyn FnMut(ReadSlice<'_>)) -> bool {
        self.iter().all(|buffer| buffer.for_each_slice(each))
    }

    fn for_each_slice_mut(&mut self, each: &mut dyn FnMut(HostSlice<'_>)) -> bool {
        self.iter_mut().all(|buffer| buffer.for_each_slice_mut(each))
    }
}
