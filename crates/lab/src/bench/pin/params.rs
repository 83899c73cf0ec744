//! What can be varied, by name.

use std::{fmt, str::FromStr};

use crate::bench::iotlb::params::named;

named! {
    /// Who pins.
    Implementation, "implementation":
    /// Our pinner, the whole list in one call.
    Ringfence = "ringfence",
    /// The fastest call for one page, by hand, once a page, without any account of what is pinned.
    PageByPage = "page-by-page",
    /// Our pinner, called once a page.
    RingfenceEach = "ringfence-each",
    /// The runs of the list, found beforehand, by hand, as many in a call as is fastest: what the
    /// kernel takes for what our pinner asks it.
    RunsByHand = "runs-by-hand",
}

named! {
    /// What backs the memory.
    Backing, "kind of memory":
    /// Pages of 4 KiB.
    Small = "4k",
    /// Transparent huge pages.
    Thp = "thp",
    /// Huge pages that the administrator has set apart.
    Hugetlb = "hugetlb",
}

/// How the pages of a list lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// Side by side, in order.
    Contiguous,
    /// In random order, no two of them side by side.
    Random,
    /// Half of them in runs of up to 16, between which as many lie alone.
    Mixed,
    /// Side by side, but every other run of up to 16 is pinned already.
    Pinned,
}

impl List {
    /// All of them, in order.
    pub const ALL: [List; 4] = [List::Contiguous, List::Random, List::Mixed, List::Pinned];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            List::Contiguous => "contiguous",
            List::Random => "random",
            List::Mixed => "mixed",
            List::Pinned => "pinned",
        }
    }
}

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for List {
    type Err = String;

    fn from_str(text: &str) -> Result<List, String> {
        let found = List::ALL.into_iter().find(|list| list.name() == text);
        match found {
            Some(list) => Ok(list),
            None if text == "half" => Ok(List::Mixed),
            None => {
                let names = List::ALL.map(List::name).join(", ");
                Err(format!("{text:?} is no list: there are {names} (or half, which is mixed)"))
            }
        }
    }
}

/// How many pages a list has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages(pub usize);

impl Pages {
    /// Those that are measured if nothing else is asked for.
    pub const DEFAULTS: [Pages; 5] = [Pages(1), Pages(8), Pages(64), Pages(512), Pages(4096)];
    /// The longest list.
    pub const MOST: usize = 16384;
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Pages {
    type Err = String;

    fn from_str(text: &str) -> Result<Pages, String> {
        match text.parse() {
            Ok(n) if (1..=Pages::MOST).contains(&n) => Ok(Pages(n)),
            _ => Err(format!("{text:?} is no number of pages from 1 to {}", Pages::MOST)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for list in List::ALL {
            assert_eq!(list.to_string().parse(), Ok(list));
        }
        assert_eq!("half".parse(), Ok(List::Mixed));
        assert!("sorted".parse::<List>().unwrap_err().contains("contiguous, random"));
        assert!("2m".parse::<Backing>().unwrap_err().contains("4k, thp, hugetlb"));
        assert_eq!("4096".parse(), Ok(Pages(4096)));
        for wrong in ["", "0", "-1", "16385", "4k"] {
            assert!(wrong.parse::<Pages>().is_err(), "{wrong}");
        }
    }
}
