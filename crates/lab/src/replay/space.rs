//! How ranges lie: the span that they take, the table pages that they need, the holes between.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a leaf table page covers: 512 pages of 4 KiB.
pub const TABLE_PAGE_SPAN: u64 = 2 << 20;

/// The ranges that are in use in several domains, and what was seen of them so far.
#[derive(Debug, Default)]
pub struct Space {
    domains: Vec<Domain>,
    ranges: u64,
    bytes: u128,
    span: u128,
    peak_ranges: u64,
    peak_bytes: u128,
    peak_span: u128,
}

#[derive(Debug, Default)]
struct Domain {
    /// By their first addresses, the last ones.
    ranges: BTreeMap<u64, u64>,
    touched: Regions,
}

/// What a space was like at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// Since the first operation, by the recording's clock.
    pub seconds: f64,
    /// Bytes in use.
    pub live_bytes: u64,
    /// From the lowest to the highest address in use; of several domains the sum.
    pub span_bytes: u64,
    /// [`Space::fragmentation`].
    pub fragmentation: f64,
}

/// What was seen over all moments, as it is reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peaks {
    /// Most ranges that were in use at once.
    #[serde(rename = "peak_live_ranges")]
    pub ranges: u64,
    /// Most bytes that were in use at once.
    #[serde(rename = "peak_live_bytes")]
    pub bytes: u64,
    /// The high-water mark: the widest span from the lowest to the highest address in use at one
    /// time. Of several domains the sum, here and below.
    pub span_bytes: u64,
    /// From the lowest to the highest address that was ever in use (to [`TABLE_PAGE_SPAN`]).
    pub extent_bytes: u64,
    /// Regions of [`TABLE_PAGE_SPAN`] that were ever touched: leaf table pages.
    pub table_pages: u64,
}

impl Space {
    /// An empty space of so many domains.
    pub fn new(domains: usize) -> Space {
        let domains = (0..domains).map(|_| Domain::default()).collect();
        Space { domains, ..Space::default() }
    }

    /// Takes the addresses from `first` to `last`.
    ///
    /// # Errors
    /// An address that is already taken. Nothing has changed.
    pub fn insert(&mut self, domain: usize, first: u64, last: u64) -> Result<(), u64> {
        let domain = &mut self.domains[domain];
        if let Some((start, end)) = domain.ranges.range(..=last).next_back()
            && *end >= first
        {
            return Err((*start).max(first));
        }
        self.span -= domain.span();
        domain.ranges.insert(first, last);
        domain.touched.insert(first / TABLE_PAGE_SPAN, last / TABLE_PAGE_SPAN);
        self.span += domain.span();
        self.ranges += 1;
        self.bytes += u128::from(last - first) + 1;
        self.peak_ranges = self.peak_ranges.max(self.ranges);
        self.peak_bytes = self.peak_bytes.max(self.bytes);
        self.peak_span = self.peak_span.max(self.span);
        Ok(())
    }

    /// Frees the range that begins at `first`; returns whether there is one.
    pub fn remove(&mut self, domain: usize, first: u64) -> bool {
        let domain = &mut self.domains[domain];
        let before = domain.span();
        let Some(last) = domain.ranges.remove(&first) else { return false };
        self.span = self.span - before + domain.span();
        self.ranges -= 1;
        self.bytes -= u128::from(last - first) + 1;
        true
    }

    /// The part of the span that is not in use: 0 where all ranges lie side by side (or there are
    /// none), towards 1 where they are far apart.
    ///
    /// A measure of placement, not of what an allocator could still give: it shows how much more
    /// table memory and how many more IOTLB entries the ranges take than needed.
    pub fn fragmentation(&self) -> f64 {
        match self.span {
            0 => 0.0,
            span => 1.0 - self.bytes as f64 / span as f64,
        }
    }

    /// The space at this moment.
    pub fn moment(&self, time_ns: u64) -> Moment {
        Moment {
            seconds: time_ns as f64 / 1e9,
            live_bytes: saturated(self.bytes),
            span_bytes: saturated(self.span),
            fragmentation: self.fragmentation(),
        }
    }

    /// What was seen so far.
    pub fn peaks(&self) -> Peaks {
        let touched = || self.domains.iter().map(|domain| &domain.touched);
        let extent: u128 = touched().map(|regions| extent(&regions.intervals)).sum();
        Peaks {
            ranges: self.peak_ranges,
            bytes: saturated(self.peak_bytes),
            span_bytes: saturated(self.peak_span),
            extent_bytes: saturated(extent * u128::from(TABLE_PAGE_SPAN)),
            table_pages: touched().map(|regions| regions.count).sum(),
        }
    }
}

fn saturated(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

impl Domain {
    fn span(&self) -> u128 {
        extent(&self.ranges)
    }
}

/// From the beginning of the first interval to the end of the last.
fn extent(intervals: &BTreeMap<u64, u64>) -> u128 {
    match (intervals.first_key_value(), intervals.last_key_value()) {
        (Some((first, _)), Some((_, last))) => u128::from(last - first) + 1,
        _ => 0,
    }
}

/// Numbers that were touched, as intervals that neither overlap nor meet.
#[derive(Debug, Default)]
struct Regions {
    intervals: BTreeMap<u64, u64>,
    count: u64,
}

impl Regions {
    /// Region numbers are below 2^43: nothing here wraps.
    fn insert(&mut self, mut first: u64, mut last: u64) {
        while let Some((&start, &end)) = self.intervals.range(..=last + 1).next_back()
            && end + 1 >= first
        {
            self.intervals.remove(&start);
            self.count -= end - start + 1;
            (first, last) = (first.min(start), last.max(end));
        }
        self.intervals.insert(first, last);
        self.count += last - first + 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_side_by_side_are_not_fragmented() {
        let mut space = Space::new(2);
        assert_eq!(space.fragmentation(), 0.0);
        space.insert(0, 0x1000, 0x1fff).unwrap();
        space.insert(0, 0x2000, 0x2fff).unwrap();
        // Another domain's addresses are other ones.
        space.insert(1, 0x1000, 0x1fff).unwrap();
        assert_eq!(space.fragmentation(), 0.0);
        space.insert(0, 0x5000, 0x5fff).unwrap();
        assert_eq!(
            space.moment(2_000_000_000),
            Moment {
                seconds: 2.0,
                live_bytes: 0x4000,
                span_bytes: 0x6000,
                fragmentation: 1.0 - 4.0 / 6.0,
            }
        );
        assert!(space.remove(0, 0x5000) && !space.remove(0, 0x5000));
        assert_eq!(space.fragmentation(), 0.0);
        let peaks = Peaks {
            ranges: 4,
            bytes: 0x4000,
            span_bytes: 0x6000,
            extent_bytes: 2 * TABLE_PAGE_SPAN,
            table_pages: 2,
        };
        assert_eq!(space.peaks(), peaks);
    }

    #[test]
    fn what_overlaps_is_refused_with_the_address() {
        let mut space = Space::new(1);
        space.insert(0, 10, 20).unwrap();
        assert_eq!(space.insert(0, 20, 30), Err(20));
        assert_eq!(space.insert(0, 0, 100), Err(10));
        assert_eq!(space.insert(0, 12, 13), Err(12));
        assert_eq!(space.peaks().ranges, 1);
    }

    #[test]
    fn all_addresses_are_a_range() {
        let mut space = Space::new(1);
        space.insert(0, 0, u64::MAX).unwrap();
        let peaks = space.peaks();
        assert_eq!((peaks.bytes, peaks.span_bytes), (u64::MAX, u64::MAX));
        assert_eq!(peaks.table_pages, 1 << 43);
        assert!(space.remove(0, 0));
    }

    proptest! {
        #[test]
        fn regions_are_counted_once(
            inserted in prop::collection::vec((0u64..60, 0u64..10), 1..40),
        ) {
            let (mut regions, mut oracle) = (Regions::default(), BTreeSet::new());
            for (first, more) in inserted {
                regions.insert(first, first + more);
                oracle.extend(first..=first + more);
                prop_assert_eq!(regions.count, oracle.len() as u64);
                let width = oracle.last().unwrap() - oracle.first().unwrap() + 1;
                prop_assert_eq!(extent(&regions.intervals), u128::from(width));
            }
        }
    }
}
