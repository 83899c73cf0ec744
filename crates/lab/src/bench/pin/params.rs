//! What can be varied, by name.

use crate::list::{PLAIN, counted, named};

named! {
    /// The implementation.
    Implementation, "unknown implementation {:?}: there are {}":
    /// Our pinner, the whole list in one call.
    Ringfence = "ringfence",
    /// The fastest call for one page, by hand, once a page, without accounting.
    PageByPage = "page-by-page",
    /// Our pinner, called once a page.
    RingfenceEach = "ringfence-each",
    /// The runs of the list, found beforehand, by hand, as many in a call as is fastest: the
    /// kernel's part of our pinner's time.
    RunsByHand = "runs-by-hand",
}

named! {
    /// What backs the memory.
    Backing, "unknown kind of memory {:?}: there are {}":
    /// Pages of 4 KiB.
    Small = "4k",
    /// Transparent huge pages.
    Thp = "thp",
    /// Huge pages that the administrator has reserved.
    Hugetlb = "hugetlb",
}

named! {
    /// How the pages of a list lie.
    Lie, "unknown list {:?}: there are {} (or half, which is mixed)":
    /// Side by side, in order.
    Contiguous = "contiguous",
    /// In random order, no two of them side by side.
    Random = "random",
    /// Half of them in runs of up to 16, between which as many lie alone.
    Mixed = "mixed" | "half",
    /// Side by side, but every other run of up to 16 is pinned already.
    Pinned = "pinned",
}

counted! {
    /// How many pages a list has.
    Pages(usize), "number of pages", PLAIN, 1..=16384
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for list in Lie::ALL {
            assert_eq!(list.to_string().parse(), Ok(list));
        }
        assert_eq!("half".parse(), Ok(Lie::Mixed));
        assert!("sorted".parse::<Lie>().unwrap_err().contains("contiguous, random"));
        assert!("2m".parse::<Backing>().unwrap_err().contains("4k, thp, hugetlb"));
        assert_eq!("4096".parse(), Ok(Pages(4096)));
        for wrong in ["", "0", "-1", "16385", "4k"] {
            assert!(wrong.parse::<Pages>().is_err(), "{wrong}");
        }
    }
}
