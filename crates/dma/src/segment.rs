//! Segments, for descriptors.

use core::fmt;

use arrayvec::ArrayVec;

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

/// How many segments a mapping holds without a heap allocation. A buffer in one piece, or made of
/// whole granules, has one.
const INLINE: usize = 4;

/// The segments of a mapping.
#[derive(Debug)]
pub(crate) enum Segments {
    Inline(ArrayVec<Segment, INLINE>),
    Spilled(Vec<Segment>),
}

impl Segments {
    pub(crate) const fn new() -> Segments {
        Segments::Inline(ArrayVec::new_const())
    }

    /// Removes all segments.
    pub(crate) fn clear(&mut self) {
        match self {
            Segments::Inline(few) => few.clear(),
            Segments::Spilled(many) => many.clear(),
        }
    }

    pub(crate) fn as_slice(&self) -> &[Segment] {
        match self {
            Segments::Inline(few) => few,
            Segments::Spilled(many) => many,
        }
    }

    pub(crate) fn last_mut(&mut self) -> Option<&mut Segment> {
        match self {
            Segments::Inline(few) => few.last_mut(),
            Segments::Spilled(many) => many.last_mut(),
        }
    }

    pub(crate) fn push(&mut self, segment: Segment) {
        match self {
            Segments::Inline(few) => {
                if let Err(full) = few.try_push(segment) {
                    let mut many = Vec::with_capacity(4 * INLINE);
                    many.extend(few.drain(..));
                    many.push(full.element());
                    *self = Segments::Spilled(many);
                }
            }
            Segments::Spilled(many) => many.push(segment),
        }
    }
}
