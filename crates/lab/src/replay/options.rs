//! What to replay, and how; lists of names as the command line gives them.

use ringfence_dma::Policy;

use crate::{
    allocators::{AllocatorKind, PlacementName},
    list,
    progress::Kind,
};

/// What to replay, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The allocators, in order.
    pub allocators: Vec<AllocatorKind>,
    /// The policies, in order.
    pub policies: Vec<Policy>,
    /// Bits of the aperture; `None`: as many as the recorded addresses have, at least 32.
    pub aperture_bits: Option<u32>,
    /// Where our allocator puts ranges; the others have placements of their own.
    pub placement: PlacementName,
    /// Measured rounds of every allocator; one more before them warms up.
    pub repeat: u32,
    /// Slots of a flush queue; `None`: as Linux tunes it.
    pub flush_queue_slots: Option<usize>,
    /// Its timer in milliseconds; `None`: as Linux tunes it.
    pub flush_queue_ms: Option<u64>,
    /// How to show progress.
    pub progress: Kind,
}

#[cfg(test)]
impl Default for Options {
    fn default() -> Options {
        Options {
            allocators: AllocatorKind::ALL.to_vec(),
            policies: default_policies(),
            aperture_bits: None,
            placement: PlacementName::default(),
            repeat: 15,
            flush_queue_slots: None,
            flush_queue_ms: None,
            progress: Kind::Auto,
        }
    }
}

/// Whether `policy` can be replayed: a recording holds no data that could be copied.
pub(super) fn is_replayable(policy: Policy) -> bool {
    !policy.bounces()
}

/// All policies that protect and can be replayed.
pub fn default_policies() -> Vec<Policy> {
    let protects = |policy: &Policy| *policy != Policy::Off && is_replayable(*policy);
    Policy::ALL.into_iter().filter(protects).collect()
}

/// The policies of a list such as `strict,lazy-mq+map`.
///
/// # Errors
/// A name is unknown or that of a policy that cannot be replayed, or the list is empty or names one
/// twice.
pub fn parse_policies(text: &str) -> Result<Vec<Policy>, String> {
    let policies: Vec<Policy> = list::parse(text, "list of policies")?;
    match policies.iter().find(|policy| !is_replayable(**policy)) {
        Some(policy) => Err(format!(
            "{policy} cannot be replayed: it copies, and a recording holds no data; `ringfence compare \
             --policy {policy}` measures it"
        )),
        None => Ok(policies),
    }
}

/// The placement called `name`; a recording's buffers are in no ring that could be one chunk.
///
/// # Errors
/// No placement here has that name.
pub fn parse_placement(name: &str) -> Result<PlacementName, String> {
    use PlacementName::{Highest, Lowest, Size};
    PlacementName::parse_of(name, &[Size, Lowest, Highest])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_policies_name_each_once() {
        assert_eq!(parse_policies("strict, off").unwrap(), [Policy::Strict, Policy::Off]);
        assert!(parse_policies("strict,strict").unwrap_err().contains("twice"));
        assert!(parse_policies(",").unwrap_err().contains("empty"));
        assert_eq!(parse_placement("lowest"), Ok(PlacementName::Lowest));
        assert_eq!(parse_placement("size"), parse_placement("size-aligned"));
        for name in ["low", "ring"] {
            assert!(parse_placement(name).unwrap_err().contains("size, lowest"), "{name}");
        }
        assert!(parse_policies("strictest").unwrap_err().contains("lazy-mq+map"));
    }

    #[test]
    fn what_copies_is_not_replayed() {
        for policy in ["bounce", "auto"] {
            let error = parse_policies(&format!("strict,{policy}")).unwrap_err();
            assert!(error.starts_with(policy) && error.contains("no data"), "{error}");
        }
        let defaults = default_policies();
        assert_eq!(defaults.len(), 6);
        assert!(!defaults.iter().any(|policy| policy.bounces() || *policy == Policy::Off));
    }
}
