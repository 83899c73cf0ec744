//! Where the pieces of a buffer lie in its IOVA range, and the segments for the device.

use core::fmt;

use crate::{DmaConfig, Error};

/// A piece of a mapping as the device sees it, for one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// Its first byte: an IOVA, or under policy `off` a target address.
    pub addr: u64,
    /// How many bytes; never 0.
    pub len: u64,
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{:#x}", self.addr, self.len)
    }
}

/// The limits on pieces and segments of a mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The domain's granule less one.
    granule_mask: u64,
    /// The segment boundary, 2^n-1.
    boundary: u64,
    max_segment: u64,
}

/// A piece of a buffer and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Where its first granule lies, counted from the start of the range; in whole granules.
    pub(crate) offset: u64,
    /// Its first byte, in target addresses.
    pub(crate) target: u64,
    /// How many bytes.
    pub(crate) len: u64,
    /// How many bytes of address space, in whole granules.
    pub(crate) span: u64,
}

impl Limits {
    pub(crate) fn new(config: &DmaConfig, granule: u64) -> Limits {
        Limits {
            granule_mask: granule - 1,
            boundary: config.segment_boundary,
            max_segment: config.max_segment,
        }
    }

    /// The boundary to pass to the allocator for a range of `size` bytes: a range that fits between
    /// two boundaries must not cross one; a longer one is aligned so that it begins on one.
    pub(crate) fn allocation_boundary(&self, size: u64) -> u64 {
        if size - 1 <= self.boundary { self.boundary } else { u64::MAX }
    }

    /// The offset of `target` in its granule.
    pub(crate) fn offset_in_granule(&self, target: u64) -> u64 {
        target & self.granule_mask
    }

    /// Whether `len` bytes at `target` are whole granules.
    pub(crate) fn fills_granules(&self, target: u64, len: u64) -> bool {
        (target | len) & self.granule_mask == 0
    }

    /// Bytes of a granule.
    pub(crate) fn granule(&self) -> u64 {
        self.granule_mask + 1
    }

    /// Whether `len` bytes from `first` contain addresses that differ above the boundary.
    fn crosses(&self, first: u64, len: u64) -> bool {
        (first ^ (first + (len - 1))) & !self.boundary != 0
    }

    /// Adds `len` bytes at `addr` to the segments: joined to the last one if they follow it
    /// (rule L45), cut at segment boundaries and at the largest segment (rule L44).
    pub(crate) fn add(&self, segments: &mut Vec<Segment>, addr: u64, len: u64) {
        if let Some(last) = segments.last_mut()
            && last.addr.checked_add(last.len) == Some(addr)
            && let Some(joined) = last.len.checked_add(len)
            && joined <= self.max_segment
            && !self.crosses(last.addr, joined)
        {
            last.len = joined;
            return;
        }
        let (mut addr, mut left) = (addr, len);
        loop {
            let to_boundary = (self.boundary - (addr & self.boundary)).saturating_add(1);
            let len = left.min(self.max_segment).min(to_boundary);
            segments.push(Segment { addr, len });
            left -= len;
            if left == 0 {
                return;
            }
            addr += len;
        }
    }
}

/// Lays out the pieces of a buffer one after the other. The same pieces give the same layout: it is
/// made once to find how much address space is needed and again to map, so that nothing is stored
/// in between.
#[derive(Debug)]
pub(crate) struct Layout {
    limits: Limits,
    used: u64,
    open: Option<(u64, u64)>,
}

impl Layout {
    pub(crate) fn new(limits: Limits) -> Layout {
        Layout { limits, used: 0, open: None }
    }

    /// Takes the next piece; calls `each` with a run once it is complete.
    ///
    /// Pieces that are adjacent in memory become one run (rule L35), up to the largest segment: so
    /// there are never more segments than pieces (rule L46), unless a piece alone is larger than a
    /// segment may be.
    pub(crate) fn piece(
        &mut self,
        target: u64,
        len: u64,
        each: &mut impl FnMut(Run) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if len == 0 {
            return Ok(());
        }
        if target.checked_add(len - 1).is_none() {
            return Err(Error::TooLong);
        }
        if let Some((start, open_len)) = &mut self.open
            && start.checked_add(*open_len) == Some(target)
            && let Some(joined) = open_len.checked_add(len)
            && joined <= self.limits.max_segment
            && joined - 1 <= self.limits.boundary
        {
            *open_len = joined;
            return Ok(());
        }
        self.close(each)?;
        self.open = Some((target, len));
        Ok(())
    }

    /// Completes the last run; returns the address space needed in all, in whole granules.
    pub(crate) fn finish(
        mut self,
        each: &mut impl FnMut(Run) -> Result<(), Error>,
    ) -> Result<u64, Error> {
        self.close(each)?;
        Ok(self.used)
    }

    fn close(&mut self, each: &mut impl FnMut(Run) -> Result<(), Error>) -> Result<(), Error> {
        let Some((target, len)) = self.open.take() else { return Ok(()) };
        let limits = self.limits;
        let in_granule = limits.offset_in_granule(target);
        let span = len
            .checked_add(in_granule)
            .and_then(|len| len.checked_next_multiple_of(limits.granule()))
            .ok_or(Error::TooLong)?;
        // A run that would cross a boundary begins on the next instead. The pad in between stays
        // unmapped: Linux extends the mapping before it, which exposes the memory that follows it.
        let mut offset = self.used;
        let first = offset.checked_add(in_granule).ok_or(Error::TooLong)?;
        first.checked_add(len - 1).ok_or(Error::TooLong)?;
        if limits.crosses(first, len) && offset & limits.boundary != 0 {
            offset = (offset | limits.boundary).checked_add(1).ok_or(Error::TooLong)?;
        }
        self.used = offset.checked_add(span).ok_or(Error::TooLong)?;
        each(Run { offset, target, len, span })
    }
}
