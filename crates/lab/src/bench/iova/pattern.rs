//! What is varied: patterns, sizes and live sets, and which of their combinations are informative.

use std::{fmt, str::FromStr};

use serde_json::Value;

use crate::list::{Units, named, number, short};

/// The largest range of a benchmark, in granules.
pub const LARGEST: u64 = 4096;
/// Ranges of a `batch`.
pub const BATCH: usize = 256;
/// Ranges that are churned beside a full set of other sizes.
pub const BESIDE: u64 = 1024;
/// The most live ranges that can be requested.
const MOST_LIVE: u64 = 10_000_000;
/// Of numbers of live ranges.
const UNITS: Units = ("km", 1000);

named! {
    /// In which order ranges are allocated and freed, in the order they are run on one set: `random` changes
    /// it and comes last.
    Pattern, "unknown pattern {:?}: there are {}":
    /// The same range is allocated and freed, again and again.
    Hot = "hot",
    /// The same, of 16 granules aligned to 16.
    Aligned16 = "aligned16",
    /// 256 ranges are allocated, then freed in that order.
    Batch = "batch",
    /// A random live range is freed, another is allocated.
    Random = "random",
}

/// How large ranges are: so many granules, or any number of them from the least to the most, all
/// equally likely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Size {
    /// The least.
    pub min: u64,
    /// The most; not less, not above [`LARGEST`].
    pub max: u64,
}

impl Size {
    /// What `aligned16` allocates.
    pub const SIXTEEN: Size = Size { min: 16, max: 16 };
    /// What is measured by default.
    pub const DEFAULTS: [Size; 4] = [
        Size { min: 1, max: 1 },
        Size { min: 1, max: 32 },
        Size { min: 33, max: 512 },
        Size::SIXTEEN,
    ];

    /// As a parameter in JSON: a number, or text for a mix.
    pub fn value(&self) -> Value {
        if self.min == self.max { self.min.into() } else { self.to_string().into() }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.min, self.max) {
            (min, max) if min == max => f.pad(&min.to_string()),
            (min, max) => f.pad(&format!("{min}-{max}")),
        }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        let (min, max) = text.split_once('-').unwrap_or((text, text));
        match (min.trim().parse(), max.trim().parse()) {
            (Ok(min), Ok(max)) if 1 <= min && min <= max && max <= LARGEST => Ok(Size { min, max }),
            _ => Err(format!(
                "{text:?} is not a size: give granules from 1 to {LARGEST}, such as 16, or a mix \
                 such as 1-32"
            )),
        }
    }
}

/// What is allocated while an operation is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Live {
    /// So many ranges, of the sizes that are measured.
    Count(u64),
    /// The aperture was filled with aligned blocks, and random ones were freed.
    Full {
        /// How much is left, %.
        percent: u64,
        /// Granules of a block.
        block: u64,
    },
}

impl Live {
    /// What is measured by default.
    pub const DEFAULTS: [Live; 7] = [
        Live::Count(0),
        Live::Count(1000),
        Live::Count(10_000),
        Live::Count(100_000),
        Live::Full { percent: 48, block: 16 },
        Live::Full { percent: 90, block: 16 },
        Live::Full { percent: 48, block: 1 },
    ];

    /// As a parameter in JSON: a number, or text for a full set.
    pub fn value(&self) -> Value {
        match *self {
            Live::Count(count) => count.into(),
            Live::Full { .. } => self.to_string().into(),
        }
    }

    /// Whether it is a part of the aperture.
    pub fn is_full(&self) -> bool {
        matches!(self, Live::Full { .. })
    }
}

impl fmt::Display for Live {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match *self {
            Live::Count(count) => short(count, UNITS),
            Live::Full { percent, block: 16 } => format!("{percent}%"),
            Live::Full { percent, block } => format!("{percent}%x{block}"),
        };
        f.pad(&text)
    }
}

impl FromStr for Live {
    type Err = String;

    fn from_str(text: &str) -> Result<Live, String> {
        parse_live(text).ok_or_else(|| {
            format!(
                "{text:?} is not a live set: give a number of ranges up to 10m (0, 1k, 100k), or a \
                 part of the aperture from 1% to 99% (48%, in blocks of 16 granules; 48%x1 in \
                 blocks of 1)"
            )
        })
    }
}

fn parse_live(text: &str) -> Option<Live> {
    if let Some((percent, block)) = text.split_once('%') {
        let block = match block {
            "" => 16,
            block => block.strip_prefix('x')?.parse().ok()?,
        };
        let percent = percent.parse().ok()?;
        let right = (1..=99).contains(&percent) && (1..=LARGEST).contains(&block);
        return (right && u64::is_power_of_two(block)).then_some(Live::Full { percent, block });
    }
    number(text, "", UNITS, 0..=MOST_LIVE).ok().map(Live::Count)
}

/// One thing to measure, for every implementation and number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cell {
    /// What is allocated.
    pub live: Live,
    /// What is allocated and freed.
    pub size: Size,
    /// In which order.
    pub pattern: Pattern,
}

impl Cell {
    /// Whether it is possible.
    fn is_possible(&self) -> bool {
        match self.pattern {
            Pattern::Aligned16 => self.size == Size::SIXTEEN,
            Pattern::Random => self.live != Live::Count(0),
            Pattern::Hot | Pattern::Batch => true,
        }
    }

    /// Whether it shows something that others do not.
    fn is_informative(&self) -> bool {
        let large = self.size.max > 32;
        match (self.pattern, self.live) {
            // `aligned16` is that.
            (Pattern::Hot, _) if self.size == Size::SIXTEEN => false,
            // A live set is seen in the other patterns; this is about caches that run over.
            (Pattern::Batch, live) => matches!(live, Live::Count(0 | 10_000)),
            // Made for ranges that seldom fit a hole of random single granules.
            (pattern, Live::Full { block: 1, .. }) => {
                pattern == Pattern::Aligned16 || pattern == Pattern::Random && self.size.max == 1
            }
            // Random blocks of 16 leave next to no holes of hundreds: only failures would be timed.
            (_, Live::Full { .. }) => !large,
            _ => true,
        }
    }

    /// All combinations, so ordered that those of one set stand together. With `all`, also those
    /// which show nothing that others do not.
    pub fn plan(lives: &[Live], sizes: &[Size], patterns: &[Pattern], all: bool) -> Vec<Cell> {
        let named = |cell: &Cell| cell.pattern == Pattern::Aligned16 || sizes.contains(&cell.size);
        // `aligned16` has its size, whatever the others are.
        let own = (!sizes.contains(&Size::SIXTEEN)).then_some(Size::SIXTEEN);
        let mut cells = Vec::new();
        for live in lives {
            for size in sizes.iter().chain(&own) {
                let of = |pattern| Cell { live: *live, size: *size, pattern };
                let cells_of_set =
                    Pattern::ALL.into_iter().filter(|p| patterns.contains(p)).map(of);
                cells.extend(cells_of_set.filter(|cell| {
                    named(cell) && cell.is_possible() && (all || cell.is_informative())
                }));
            }
        }
        cells
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::list::List;

    #[test]
    fn a_live_set_reads_as_it_is_written() {
        for (text, live) in [
            ("0", Live::Count(0)),
            ("7", Live::Count(7)),
            ("1k", Live::Count(1000)),
            ("100k", Live::Count(100_000)),
            ("10m", Live::Count(10_000_000)),
            ("48%", Live::Full { percent: 48, block: 16 }),
            ("48%x1", Live::Full { percent: 48, block: 1 }),
        ] {
            assert_eq!(text.parse(), Ok(live));
            assert_eq!(live.to_string(), text);
        }
        for text in ["", "k", "-1", "1g", "11m", "0%", "100%", "48%x", "48%x3", "48%16", "%", "é"]
        {
            assert!(text.parse::<Live>().unwrap_err().contains("live set"), "{text}");
        }
    }

    #[test]
    fn a_size_reads_as_it_is_written() {
        for text in ["1", "16", "1-32", "33-512", "4096"] {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
        for text in ["", "0", "2-1", "4097", "-", "1-", "a"] {
            assert!(text.parse::<Size>().unwrap_err().contains("granules"), "{text}");
        }
        assert_eq!(Size { min: 1, max: 32 }.value(), "1-32");
        assert_eq!(Size::SIXTEEN.value(), 16);
    }

    #[test]
    fn a_list_holds_each_once() {
        fn list<T: FromStr<Err = String> + PartialEq>(text: &str) -> Result<Vec<T>, String> {
            text.parse().map(|List(items)| items)
        }
        assert_eq!(list::<Size>("1, 16").unwrap().len(), 2);
        assert!(list::<Size>("1,1").unwrap_err().contains("twice"));
        assert!(list::<Pattern>(",").unwrap_err().contains("empty"));
        assert!(list::<Pattern>("cold").unwrap_err().contains("aligned16"));
    }

    #[test]
    fn the_default_plan_has_every_live_set_and_size() {
        let cells = Cell::plan(&Live::DEFAULTS, &Size::DEFAULTS, &Pattern::ALL, false);
        for live in Live::DEFAULTS {
            assert!(cells.iter().any(|cell| cell.live == live), "{live}");
        }
        for size in Size::DEFAULTS {
            assert!(cells.iter().any(|cell| cell.size == size), "{size}");
        }
        assert!(!cells.iter().any(|c| c.pattern == Pattern::Random && c.live == Live::Count(0)));
        let mut seen = std::collections::HashSet::new();
        assert!(cells.iter().all(|cell| seen.insert(*cell)), "one stands twice");
    }

    #[test]
    fn a_named_cell_is_run_even_if_it_is_uninformative() {
        let full = [Live::Full { percent: 48, block: 16 }];
        let large = [Size { min: 33, max: 512 }];
        assert!(Cell::plan(&full, &large, &[Pattern::Random], false).is_empty());
        assert_eq!(Cell::plan(&full, &large, &[Pattern::Random], true).len(), 1);
        // Impossible combinations are not run.
        assert!(Cell::plan(&[Live::Count(0)], &large, &[Pattern::Random], true).is_empty());
        // `aligned16` has a size of its own.
        let cells = Cell::plan(&full, &large, &[Pattern::Aligned16, Pattern::Hot], true);
        let sizes: Vec<_> = cells.iter().map(|cell| (cell.pattern, cell.size)).collect();
        assert!(sizes.contains(&(Pattern::Aligned16, Size::SIXTEEN)), "{sizes:?}");
        assert!(!sizes.contains(&(Pattern::Hot, Size::SIXTEEN)), "{sizes:?}");
    }
}
