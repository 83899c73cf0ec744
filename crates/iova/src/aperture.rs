//! The addresses that an allocator may hand out, and requests in terms of them.

use crate::{Align, AllocError, AllocReason, Request, ReserveError};

/// The addresses that an allocator may hand out: inclusive bounds and a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Aperture {
    /// The lowest and the highest usable granule, by number; never 0 (rule L2).
    pub(crate) low: u64,
    pub(crate) high: u64,
    shift: u32,
}

/// Why bounds and granule do not make an [`Aperture`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ApertureError {
    /// The granule is not a power of two.
    #[error("a granule of {granule:#x} bytes is not a power of two")]
    BadGranule {
        /// The granule.
        granule: u64,
    },
    /// No whole granule lies within, apart from that of IOVA 0.
    #[error("no usable granule of {granule:#x} bytes lies between {first:#x} and {last:#x}")]
    Empty {
        /// The lower bound.
        first: u64,
        /// The upper bound.
        last: u64,
        /// The granule.
        granule: u64,
    },
}

impl Aperture {
    /// The whole granules from `first` to `last`, both included, except that of IOVA 0 (rule [L2]).
    ///
    /// # Errors
    /// The granule is not a power of two, or nothing is left.
    ///
    /// [L2]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l2
    pub const fn new(first: u64, last: u64, granule: u64) -> Result<Aperture, ApertureError> {
        if !granule.is_power_of_two() {
            return Err(ApertureError::BadGranule { granule });
        }
        let shift = granule.trailing_zeros();
        let low = match first >> shift {
            // Round up, and at least 1. A granule number only wraps for granules of one byte,
            // which divide every address.
            0 => 1,
            number if first & (granule - 1) != 0 => number + 1,
            number => number,
        };
        match last_whole(last, shift) {
            Some(high) if low <= high => Ok(Aperture { low, high, shift }),
            _ => Err(ApertureError::Empty { first, last, granule }),
        }
    }

    /// The lowest address that is ever handed out.
    pub const fn first(&self) -> u64 {
        self.low << self.shift
    }

    /// The last address of the last range that can be handed out.
    pub const fn last(&self) -> u64 {
        self.end_of(self.high)
    }

    /// The granule, in bytes.
    pub const fn granule(&self) -> u64 {
        1 << self.shift
    }

    /// The first `granules` of this aperture, or all of it.
    pub(crate) const fn truncated(self, granules: u64) -> Aperture {
        // `granules` is at least 1; comparing distances avoids overflow.
        let extent = granules.saturating_sub(1);
        let high = if extent < self.high - self.low { self.low + extent } else { self.high };
        Aperture { high, ..self }
    }

    /// The number of the granule that contains `address`.
    pub(crate) const fn number(&self, address: u64) -> u64 {
        address >> self.shift
    }

    /// The number of the last granule that ends at or below `address`.
    pub(crate) const fn last_whole(&self, address: u64) -> Option<u64> {
        last_whole(address, self.shift)
    }

    /// The first address of a granule.
    pub(crate) const fn start_of(&self, number: u64) -> u64 {
        number << self.shift
    }

    /// The last address of a granule.
    pub(crate) const fn end_of(&self, number: u64) -> u64 {
        (number << self.shift) | ((1 << self.shift) - 1)
    }

    /// How many granules `size` bytes take; 0 for 0.
    pub(crate) const fn granules(&self, size: u64) -> u64 {
        (size >> self.shift) + (size & (self.granule() - 1) != 0) as u64
    }

    /// The number of the granule that starts at `iova`, and how many granules `size` bytes take;
    /// `None` if such a range can never have been handed out.
    pub(crate) fn range_of(&self, iova: u64, size: u64) -> Option<(u64, u64)> {
        let count = self.granules(size);
        let number = self.number(iova);
        let fits = iova & (self.granule() - 1) == 0
            && count != 0
            && number >= self.low
            && number <= self.high
            && count - 1 <= self.high - number;
        fits.then_some((number, count))
    }

    /// The granules that `first..=last` touches within the aperture; `None` if there are none.
    pub(crate) fn clip(&self, first: u64, last: u64) -> Result<Option<(u64, u64)>, ReserveError> {
        if first > last {
            return Err(ReserveError::Inverted { first, last });
        }
        let low = self.number(first).max(self.low);
        let high = self.number(last).min(self.high);
        Ok((low <= high).then_some((low, high)))
    }

    /// Checks a request and expresses it in granules.
    pub(crate) fn wanted(&self, request: &Request) -> Result<GranuleRequest, AllocError> {
        self.try_wanted(request).map_err(|reason| AllocError { request: *request, reason })
    }

    fn try_wanted(&self, request: &Request) -> Result<GranuleRequest, AllocReason> {
        if request.size == 0 {
            return Err(AllocReason::ZeroSize);
        }
        let count = self.granules(request.size);
        let align = match request.align {
            Align::Size => count.checked_next_power_of_two().ok_or(AllocReason::TooBig)?,
            Align::Bytes(bytes) if bytes.is_power_of_two() => (bytes >> self.shift).max(1),
            Align::Bytes(_) => return Err(AllocReason::BadAlign),
        };
        let boundary = request.boundary;
        let segment = boundary >> self.shift;
        // A mask below the granule's own has no room for a granule.
        if boundary & boundary.wrapping_add(1) != 0
            || boundary < self.granule() - 1
            || count - 1 > segment
        {
            return Err(AllocReason::BadBoundary { boundary });
        }
        let too_small = AllocReason::ApertureTooSmall { first: self.first(), last: self.last() };
        let limit = last_whole(request.limit, self.shift).ok_or(too_small)?.min(self.high);
        let wanted = GranuleRequest { count, align, limit, boundary: segment };
        // A request that fails even if everything is free can never be met, and needs no search.
        match wanted.highest_in(self.low, limit) {
            Some(_) => Ok(wanted),
            None => Err(too_small),
        }
    }

    pub(crate) fn exhausted(&self, request: &Request, limit: u64) -> AllocError {
        let reason = AllocReason::Exhausted { first: self.first(), last: self.end_of(limit) };
        AllocError { request: *request, reason }
    }
}

/// The number of the last granule that ends at or below `last`.
const fn last_whole(last: u64, shift: u32) -> Option<u64> {
    match last.checked_add(1) {
        None => Some(u64::MAX >> shift),
        Some(end) => (end >> shift).checked_sub(1),
    }
}

/// A [`Request`] in granules, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GranuleRequest {
    /// How many granules; not 0, and no more than fit a segment.
    pub(crate) count: u64,
    /// The alignment of the first granule: a power of two.
    pub(crate) align: u64,
    /// The last granule that may be used; within the aperture.
    pub(crate) limit: u64,
    /// The mask of a segment.
    pub(crate) boundary: u64,
}

impl GranuleRequest {
    /// The highest place in the hole `low..=high`.
    pub(crate) fn highest_in(&self, low: u64, high: u64) -> Option<u64> {
        let place = self.below(high)?;
        let last = place + (self.count - 1);
        let place = if (place ^ last) & !self.boundary != 0 {
            // It crosses into the segment of its last granule: end just before that segment. One
            // step is enough, as either the segment size is a multiple of the alignment or the
            // other way round, and the range is no larger than a segment.
            self.below((last & !self.boundary).checked_sub(1)?)?
        } else {
            place
        };
        (place >= low).then_some(place)
    }

    /// The highest aligned place that ends at or below `high`.
    fn below(&self, high: u64) -> Option<u64> {
        Some(high.checked_sub(self.count - 1)? & !(self.align - 1))
    }

    /// The lowest place in `low..=high`.
    pub(crate) fn lowest_in(&self, low: u64, high: u64) -> Option<u64> {
        let place = self.above(low)?;
        let last = place.checked_add(self.count - 1)?;
        let place = if (place ^ last) & !self.boundary != 0 {
            // Start with the segment of its last granule: see `highest_in`.
            self.above(last & !self.boundary)?
        } else {
            place
        };
        let last = place.checked_add(self.count - 1)?;
        (last <= high).then_some(place)
    }

    /// The lowest aligned place at or above `low`.
    fn above(&self, low: u64) -> Option<u64> {
        Some(low.checked_add(self.align - 1)? & !(self.align - 1))
    }

    /// Whether every range that meets this request also meets `other`: if `other` found nothing,
    /// this request will not either.
    pub(crate) fn is_at_least(&self, other: &GranuleRequest) -> bool {
        self.count >= other.count
            && self.align >= other.align
            && self.limit <= other.limit
            && self.boundary <= other.boundary
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    #[test]
    fn bounds_are_rounded_inwards_to_granules_and_zero_is_left_out() {
        // rules L1, L2
        let aperture = Aperture::new(0, u64::MAX, 4096).unwrap();
        assert_eq!((aperture.first(), aperture.last()), (4096, u64::MAX));
        let aperture = Aperture::new(0x1001, 0x4ffe, 4096).unwrap();
        assert_eq!((aperture.first(), aperture.last()), (0x2000, 0x3fff));
        let aperture = Aperture::new(0, u64::MAX, 1).unwrap();
        assert_eq!((aperture.first(), aperture.last()), (1, u64::MAX));
        let aperture = Aperture::new(0, u64::MAX, 1 << 63).unwrap();
        assert_eq!((aperture.first(), aperture.last()), (1 << 63, u64::MAX));
        for granule in [0, 3, 4097, u64::MAX] {
            let error = Aperture::new(0, u64::MAX, granule).unwrap_err();
            assert_eq!(error, ApertureError::BadGranule { granule });
        }
        for (first, last) in [(0, 4095), (0, 0), (0x1001, 0x2ffe), (0x2000, 0x1000)] {
            assert!(matches!(Aperture::new(first, last, 4096), Err(ApertureError::Empty { .. })));
        }
    }

    #[test]
    fn invalid_requests_and_those_that_do_not_fit_are_different_errors() {
        let aperture = Aperture::new(0, 0xffff_ffff, 4096).unwrap();
        let why = |request: Request| aperture.wanted(&request).unwrap_err().reason;
        let page = Request::new(4096);
        assert_eq!(why(Request::new(0)), AllocReason::ZeroSize);
        let bytes = Aperture::new(0, u64::MAX, 1).unwrap();
        assert_eq!(bytes.wanted(&Request::new(u64::MAX)).unwrap_err().reason, AllocReason::TooBig);
        for bad in [0, 3, u64::MAX] {
            assert_eq!(why(page.align(Align::Bytes(bad))), AllocReason::BadAlign);
        }
        for boundary in [0, 1, 0x5fff, 0xfffe, u64::MAX - 1, 0x7ff] {
            assert_eq!(why(page.boundary(boundary)), AllocReason::BadBoundary { boundary });
        }
        let boundary = 0xfff;
        assert_eq!(
            why(Request::new(4097).boundary(boundary)),
            AllocReason::BadBoundary { boundary }
        );
        let small = AllocReason::ApertureTooSmall { first: 4096, last: 0xffff_ffff };
        for request in [
            Request::new(u64::MAX),
            Request::new(1 << 32),
            // Aligned to its size, it could start only at 0.
            Request::new((1 << 31) + 1),
            page.limit(0),
            page.limit(0x1ffe),
            page.align(Align::Bytes(1 << 63)),
        ] {
            assert_eq!(why(request), small);
        }
    }

    /// The mask of a segment, and a number of granules that fits it.
    fn boundary_and_count() -> impl Strategy<Value = (u64, u64)> {
        let boundary =
            prop_oneof![8 => (0..8u32).prop_map(|bits| (1 << bits) - 1), 1 => Just(u64::MAX)];
        boundary
            .prop_flat_map(|boundary: u64| (Just(boundary), 1..=boundary.saturating_add(1).min(69)))
    }

    proptest! {
        #[test]
        fn a_place_in_a_hole_is_the_highest_or_lowest_there_is(
            base in prop_oneof![Just(0u64), Just(u64::MAX - 255)],
            low in 0..256u64, extent in 0..256u64,
            (boundary, count) in boundary_and_count(), align in 0..8u32,
        ) {
            let high = (low + extent).min(255);
            let wanted = GranuleRequest { count, align: 1 << align, limit: u64::MAX, boundary };
            let fits: Vec<u64> = (low..=high)
                .filter(|n| n + (count - 1) <= high)
                .map(|n| base + n)
                .filter(|n| n % wanted.align == 0)
                .filter(|n| (n ^ (n + (count - 1))) & !boundary == 0)
                .collect();
            let (low, high) = (base + low, base + high);
            prop_assert_eq!(wanted.highest_in(low, high), fits.last().copied());
            prop_assert_eq!(wanted.lowest_in(low, high), fits.first().copied());
        }
    }
}
