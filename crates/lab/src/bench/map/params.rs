//! What can be varied, by name.

use crate::list::{PLAIN, counted, named};

named! {
    /// The device.
    Implementation, "unknown implementation {:?}: there are {}":
    /// Ours.
    Ringfence = "ringfence",
    /// A B-tree of mappings for each domain, all behind one reader-writer lock; UNMAP looks at
    /// every mapping of the domain. The design of cloud-hypervisor's.
    BTreeMap = "btreemap",
    /// The same, but UNMAP looks at what lies in its range.
    BTreeMapRange = "btreemap-range",
}

named! {
    /// What is measured.
    Op, "unknown measurement {:?}: there are {}":
    /// MAP and UNMAP, both ends on one core: driver and device take turns in one thread.
    OneCore = "one-core",
    /// MAP and UNMAP, driver and device on a core each.
    TwoCores = "two-cores",
    /// As one-core, once for one domain and once for two at a time, each with a thread and a request
    /// queue of its own.
    TwoDomains = "two-domains",
    /// One UNMAP and one MAP, each by itself, of a random mapping among many.
    OneOf = "one-of",
    /// ATTACH of an endpoint to a domain with many mappings.
    Attach = "attach",
    /// Table memory a mapping.
    Memory = "memory",
}

named! {
    /// What else differs between devices of a contest.
    Form, "unknown form {:?}: there are {}":
    /// Nothing.
    Usual = "",
    /// The two threads have a device each, and nothing in common: what they still cost each other
    /// is the machine's.
    Apart = "apart",
    /// The endpoint translates in a table of its own, as one that VFIO passes through: each mapping
    /// must be made there too.
    Mirror = "mirror",
}

named! {
    /// How the pages of a batch lie.
    Order, "unknown order {:?}: there are {}":
    /// Side by side.
    Contiguous = "contiguous",
    /// In random order, no two side by side.
    Scattered = "scattered",
}

named! {
    /// How the mappings lie whose table memory is measured.
    Spread, "unknown spread {:?}: there are {}":
    /// 4 KiB pages side by side, mapped to pages in no order.
    Dense = "dense",
    /// One page in each 2 MiB.
    TwoMiB = "2m",
    /// One page in each 1 GiB.
    OneGiB = "1g",
    /// Random pages in 48 bits of addresses.
    Random = "random",
}

counted! {
    /// How many mappings come and go together.
    Batch(usize), "batch", PLAIN, 1..=1024
}

counted! {
    /// How many mappings a domain holds: `1k`, `1m`.
    Live(usize), "number of mappings", ("km", 1000), 2..=4_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        assert_eq!("256".parse(), Ok(Batch(256)));
        for wrong in ["", "0", "1025", "-1", "1k"] {
            assert!(wrong.parse::<Batch>().is_err(), "{wrong}");
        }
        for text in ["2", "1k", "1500", "64k", "1m"] {
            assert_eq!(text.parse::<Live>().unwrap().to_string(), text);
        }
        assert_eq!("1M".parse(), Ok(Live(1_000_000)));
        for wrong in ["", "1", "k", "5m", "0.5k", "99999999999999999999m"] {
            assert!(wrong.parse::<Live>().is_err(), "{wrong}");
        }
        assert!("vfio".parse::<Implementation>().unwrap_err().contains("btreemap-range"));
        assert!("unmap".parse::<Op>().unwrap_err().contains("two-domains"));
    }
}
