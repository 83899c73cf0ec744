//! What the device's end has written into the areas of a queue, for a dirty log.

use ringfence_mem::{HostSlice, Window};

use crate::{Area, layout};

/// Bytes of an area that the device's end has written.
#[derive(Clone, Copy, Debug)]
pub struct Written<'w> {
    /// The area.
    pub area: Area,
    /// Where they begin in it, in bytes.
    pub offset: usize,
    /// The bytes, in this process.
    pub piece: HostSlice<'w>,
}

impl<'w> Written<'w> {
    #[inline]
    pub(super) fn new(area: Area, window: &'w Window, offset: usize, len: usize) -> Written<'w> {
        Written { area, offset, piece: window.slice().part(offset, len) }
    }
}

/// The entries of `entry` bytes from index `first` on, `count` of them, in a ring of `size` whose
/// entries begin at `start`: offset and length of at most two ranges.
#[inline]
pub(super) fn entries(
    (start, entry): (usize, usize),
    first: u16,
    count: u16,
    size: u16,
) -> impl Iterator<Item = (usize, usize)> {
    let straight = count.min(size - first);
    [(first, straight), (0, count - straight)]
        .into_iter()
        .filter(|&(_, count)| count > 0)
        .map(move |(at, count)| (start + entry * usize::from(at), entry * usize::from(count)))
}

/// Where the entries of a used ring begin, and how many bytes each has.
pub(super) const USED: (usize, usize) = (layout::RING, 8);
/// As [`USED`], for the descriptors of a packed ring.
pub(super) const PACKED: (usize, usize) = (0, layout::DESC_SIZE);
