//! What can be varied, by name.

use crate::list::{counted, named};

named! {
    /// What is measured.
    Implementation, "unknown implementation {:?}: there are {}":
    /// Our views, over a table that all views of a device share.
    Ringfence = "ringfence",
    /// The `Iotlb` of the crate vm-memory.
    VmMemory = "vm-memory",
    /// A B-tree by first address.
    BTreeMap = "btreemap",
    /// A sorted list that is walked from its beginning, of at most 2,048 entries: the shape of
    /// DPDK's.
    SortedList = "sorted-list",
    /// A B-tree behind one lock a device, taken for each lookup.
    SingleLock = "single-lock",
}

named! {
    /// What an operation is.
    Order, "unknown order {:?}: there are {}":
    /// A lookup of 64 bytes, in one entry after the other.
    Seq = "seq",
    /// A lookup of 64 bytes in a random entry.
    Random = "random",
    /// The same, where the next address is known only when the last has been translated.
    Dependent = "dependent",
    /// Lookups for a chain of three descriptors in random entries: 16 bytes, 4 KiB and 1 byte.
    Chain = "chain",
    /// A random entry is invalidated, inserted again and looked up.
    Churn = "churn",
    /// Random lookups by one thread and by two that share a device, each of which invalidates an
    /// entry and inserts it again now and then.
    Threads = "threads",
    /// Random lookups by one thread and by two that share a device, while a third one invalidates
    /// an entry, waits until that is over, and inserts it again, 10,000 times a second.
    Steady = "steady",
}

impl Order {
    /// Whether it runs several threads.
    pub const fn is_threads(self) -> bool {
        matches!(self, Order::Threads | Order::Steady)
    }
}

named! {
    /// How entries side by side are related.
    Merge, "unknown way to merge {:?}: there are {}":
    /// They are contiguous in memory.
    Mergeable = "mergeable",
    /// No two of them do.
    Unmergeable = "unmergeable",
}

named! {
    /// How large an entry is.
    Page, "unknown page size {:?}: there are {}":
    /// 4 KiB.
    Small = "4k",
    /// 2 MiB.
    Large = "2m",
    /// 1 GiB.
    Huge = "1g",
}

impl Page {
    /// Its bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Page::Small => 4 << 10,
            Page::Large => 2 << 20,
            Page::Huge => 1 << 30,
        }
    }
}

counted! {
    /// A number of entries: `1`, `512`, `2k`, `64k`.
    Entries(u64), "number of entries", ("k", 1 << 10), 1..=1 << 20
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for one in Implementation::ALL {
            assert_eq!(one.to_string().parse(), Ok(one));
        }
        assert!("dpdk".parse::<Implementation>().unwrap_err().contains("sorted-list"));
        assert!("4K".parse::<Page>().unwrap_err().contains("4k, 2m, 1g"));
        for text in ["1", "512", "2k", "64k", "1024k"] {
            assert_eq!(text.parse::<Entries>().unwrap().to_string(), text);
        }
        for wrong in ["", "0", "k", "-1", "1025k", "99999999999999999999k", "1.5k"] {
            assert!(wrong.parse::<Entries>().is_err(), "{wrong}");
        }
    }
}
