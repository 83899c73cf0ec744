//! What to replay, and how; lists of names as the command line gives them.

use ringfence_dma::Policy;
use ringfence_iova::Placement;

use crate::{allocators::AllocatorKind, list, progress::Kind};

/// What to replay, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The allocators, in order.
    pub allocators: Vec<AllocatorKind>,
    /// The policies, in order.
    pub policies: Vec<Policy>,
    /// Bits of the aperture; `None`: as many as the recorded addresses have, at least 32.
    pub aperture_bits: Option<u32>,
    /// Where ours puts ranges; the others have placements of their own.
    pub placement: Placement,
    /// Measured rounds of every allocator; one more before them warms up.
    pub repeat: u32,
    /// Slots of a flush queue; `None`: as Linux tunes it.
    pub flush_queue_slots: Option<usize>,
    /// Its timer in milliseconds; `None`: as Linux tunes it.
    pub flush_queue_ms: Option<u64>,
    /// How to show progress.
    pub progress: Kind,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            allocators: AllocatorKind::ALL.to_vec(),
            policies: default_policies(),
            aperture_bits: None,
            placement: Placement::default(),
            repeat: 15,
            flush_queue_slots: None,
            flush_queue_ms: None,
            progress: Kind::Auto,
        }
    }
}

/// All policies that protect.
pub fn default_policies() -> Vec<Policy> {
    Policy::ALL.into_iter().filter(|policy| *policy != Policy::Off).collect()
}

/// The policies of a list such as `strict,lazy-mq+map`.
///
/// # Errors
/// A name is none, or the list is empty or names one twice.
pub fn parse_policies(text: &str) -> Result<Vec<Policy>, String> {
    list::parse(text, "list of policies")
}

/// The placement called `name`.
///
/// # Errors
/// There is none of that name.
pub fn parse_placement(name: &str) -> Result<Placement, String> {
    PLACEMENTS
        .into_iter()
        .find(|(known, _)| *known == name)
        .map(|(_, placement)| placement)
        .ok_or_else(|| {
            let names = PLACEMENTS.map(|(known, _)| known).join(", ");
            format!("no placement is called {name:?}: there are {names}")
        })
}

/// What a placement is called.
pub(super) fn placement_name(placement: Placement) -> &'static str {
    PLACEMENTS.into_iter().find(|(_, known)| *known == placement).map_or("", |(name, _)| name)
}

/// The placements by their names.
const PLACEMENTS: [(&str, Placement); 3] = [
    ("size-aligned", Placement::SizeAligned),
    ("lowest", Placement::Lowest),
    ("highest", Placement::Highest),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_policies_name_each_once() {
        assert_eq!(parse_policies("strict, off").unwrap(), [Policy::Strict, Policy::Off]);
        assert!(parse_policies("strict,strict").unwrap_err().contains("twice"));
        assert!(parse_policies(",").unwrap_err().contains("empty"));
        assert_eq!(parse_placement("lowest"), Ok(Placement::Lowest));
        assert!(parse_placement("low").unwrap_err().contains("size-aligned, lowest"));
        assert!(parse_policies("strictest").unwrap_err().contains("lazy-mq+map"));
    }
}
