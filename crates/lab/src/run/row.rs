//! The rows of a comparison, by name.

use std::{fmt, str::FromStr};

use ringfence_dma::Policy;

use super::DiskChoice;
use crate::allocators::AllocatorKind;

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// The job without virtqueues: the disk in the job's own process.
    Host,
    /// The job through an io_uring on the disk's file: what an application without virtual devices
    /// does, and the peer of `off` on a RAM disk.
    IoUring,
    /// The job through virtqueues, in buffers that are mapped once and stay mapped: the device
    /// reaches them as long as the job runs.
    Persistent,
    /// The job through virtqueues, each I/O in memory of the bounce pools, filled and read in place:
    /// nothing is copied or mapped, and the device reaches that memory as long as the job runs.
    ZeroCopy,
    /// The job through virtqueues, without an IOMMU, at `ringfence proxy`: the device reaches copies of
    /// the requests in flight, in the proxy's memory.
    Proxy,
    /// The job through virtqueues and the DMA API under a policy.
    Policy(Policy),
    /// The same under a lazy policy, in a lazy domain of the virtio-iommu: a proposal, not part of
    /// the specification. The device completes an UNMAP before its invalidation.
    LazyDomain(Policy),
}

/// The suffix of a lazy domain's row after its policy's name.
const FLUSH: &str = "+flush";
/// The rows that are no policy's.
const OTHERS: [(Row, &str); 5] = [
    (Row::Host, "host"),
    (Row::IoUring, "io_uring"),
    (Row::Persistent, "persistent"),
    (Row::ZeroCopy, "zero-copy"),
    (Row::Proxy, "proxy"),
];

impl Row {
    /// What `compare` runs by default.
    pub(super) fn defaults(disk: &DiskChoice) -> Vec<Row> {
        let io_uring = (*disk == DiskChoice::Ram).then_some(Row::IoUring);
        let without = std::iter::once(Row::Host).chain(io_uring);
        without.chain(Policy::ALL.into_iter().map(Row::Policy)).collect()
    }

    /// Whether its memory stays mapped as long as the job runs.
    pub(super) fn stays_mapped(self) -> bool {
        matches!(self, Row::Persistent | Row::ZeroCopy)
    }

    /// The policy under which it runs; `off`: nothing is mapped.
    pub(super) fn policy(self) -> Policy {
        match self {
            Row::Policy(policy) | Row::LazyDomain(policy) => policy,
            Row::Host | Row::IoUring | Row::Proxy => Policy::Off,
            // What is mapped once needs one sync, and is unmapped only at the end.
            Row::Persistent | Row::ZeroCopy => Policy::StrictMap,
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let other = OTHERS.iter().find(|(row, _)| row == self);
        match self {
            Row::LazyDomain(policy) => f.pad(&format!("{policy}{FLUSH}")),
            row => f.pad(other.map_or_else(|| row.policy().name(), |(_, name)| name)),
        }
    }
}

impl FromStr for Row {
    type Err = String;

    fn from_str(name: &str) -> Result<Row, String> {
        if let Some(policy) = name.strip_suffix(FLUSH).and_then(|name| name.parse::<Policy>().ok())
            && policy.is_lazy()
        {
            return Ok(Row::LazyDomain(policy));
        }
        if let Some((row, _)) = OTHERS.iter().find(|(_, other)| *other == name) {
            return Ok(*row);
        }
        let policy: Result<Policy, _> = name.parse();
        policy.map(Row::Policy).map_err(|error| {
            let others = OTHERS.map(|(_, name)| name).join(", ");
            format!("{error}; also {others}, and {FLUSH} behind a lazy policy")
        })
    }
}

/// A row, and the allocator of its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) row: Row,
    /// `None` where nothing is mapped.
    pub(crate) allocator: Option<AllocatorKind>,
}

impl Line {
    /// The lines of a table: a row that maps is there once for each allocator.
    pub(crate) fn all(rows: &[Row], allocators: &[AllocatorKind]) -> Vec<Line> {
        let lines = |&row: &Row| -> Vec<Line> {
            match row.policy() {
                Policy::Off => vec![Line { row, allocator: None }],
                _ => allocators.iter().map(|&kind| Line { row, allocator: Some(kind) }).collect(),
            }
        };
        rows.iter().flat_map(lines).collect()
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.allocator {
            Some(kind) => write!(f, "{}/{kind}", self.row),
            None => self.row.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::list::List;

    fn parse_list(text: &str) -> Result<Vec<Row>, String> {
        text.parse().map(|List(rows)| rows)
    }

    #[test]
    fn what_maps_is_there_once_for_each_allocator() {
        let rows = parse_list("host,off,proxy,persistent,zero-copy,bounce").unwrap();
        let lines = Line::all(&rows, &[AllocatorKind::RbTree, AllocatorKind::Ringfence]);
        let names: Vec<String> = lines.iter().map(Line::to_string).collect();
        let of = |row| [format!("{row}/rbtree"), format!("{row}/ringfence")];
        let wanted = ["persistent", "zero-copy", "bounce"].map(of).concat();
        assert_eq!(names, [&["host", "off", "proxy"].map(str::to_owned)[..], &wanted].concat());
    }

    #[test]
    fn rows_are_named_as_the_table_names_them() {
        let rows = parse_list("host, off,lazy-mq+map,io_uring,persistent,zero-copy,auto").unwrap();
        let names: Vec<String> = rows.iter().map(Row::to_string).collect();
        let wanted = ["host", "off", "lazy-mq+map", "io_uring", "persistent", "zero-copy", "auto"];
        assert_eq!(names, wanted);
        assert!(parse_list("off,off").is_err());
        let lazy = parse_list("lazy-mq+map+flush,lazy-sq+flush,lazy-sq").unwrap();
        assert_eq!(lazy[0], Row::LazyDomain(Policy::LazyMqMap));
        let names: Vec<String> = lazy.iter().map(Row::to_string).collect();
        assert_eq!(names, ["lazy-mq+map+flush", "lazy-sq+flush", "lazy-sq"]);
        // A policy that waits for every unmap gains nothing from a lazy domain.
        for none in ["strict+flush", "auto+flush", "host+flush", "+flush"] {
            assert!(parse_list(none).is_err(), "{none}");
        }
        assert!(parse_list("").is_err());
        let error = parse_list("of").unwrap_err();
        assert!(error.contains("strict+map") && error.contains("zero-copy"), "{error}");
    }

    #[test]
    fn default_rows_begin_without_virtqueues_and_hold_every_policy() {
        let rows = Row::defaults(&DiskChoice::Paced);
        assert_eq!(rows[0], Row::Host);
        assert_eq!(rows.len(), 1 + Policy::ALL.len());
        assert_eq!(Row::defaults(&DiskChoice::Ram)[..2], [Row::Host, Row::IoUring]);
    }
}
