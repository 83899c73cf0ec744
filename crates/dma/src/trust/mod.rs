//! Trust: which policies a device may have.
//!
//! A device that anyone can plug in, or that another party implements, may try to reach memory that
//! is not meant for it. The stale window of lazy invalidation would let it: so an untrusted device
//! is never lazy and never unprotected, whatever was requested (rule L28). Devices are trusted
//! unless something marks them otherwise; *lazy* is never a default.
//!
//! There are two sources: a description ([`Trust::described`]) and sysfs ([`Trust::from_sysfs`]).
//!
//! A buffer of an untrusted device that does not fill its granules is copied into a bounce slot,
//! whatever the policy, so that its neighbours stay out of reach (rule L48); without pools, or
//! without a slot, it is not mapped at all (rule L50).

mod sysfs;

use core::fmt;
use std::{io, path::PathBuf};

use crate::Policy;

pub use sysfs::Finding;

/// Why a device works under another policy than the requested one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Fallback {
    /// A lazy policy was requested, but the domain invalidates before an unmap returns: there is
    /// nothing to defer.
    #[error("the domain cannot defer its flushes, so lazy falls back to strict")]
    NoDeferredFlush,
    /// The device is untrusted: it gets strict protection, whatever was requested (rule L28).
    #[error("the device is untrusted ({why}), so it gets strict protection")]
    Untrusted {
        /// Why it is not trusted.
        why: Distrust,
    },
    /// The detector is on: it sees a use after unmap only if the device can no longer reach the
    /// memory.
    #[error("the use-after-unmap detector is on, which needs strict protection")]
    Detector,
    /// The device was made without bounce pools.
    #[error("the device has no bounce pools, so it maps strictly")]
    NoPools,
}

/// Whether a device is expected to follow its driver's instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Trust {
    /// It may have any policy.
    #[default]
    Trusted,
    /// It gets strict protection only.
    Untrusted {
        /// Why it is not trusted.
        why: Distrust,
    },
}

/// A reason not to trust a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Distrust {
    /// Its description says so.
    #[error("it was described as untrusted")]
    Described,
    /// The user can remove it, or something it is attached to; Linux reports this for everything
    /// behind an external-facing PCI port.
    #[error("it can be removed by the user")]
    Removable,
    /// It lies behind a port that the device tree marks as external-facing.
    #[error("it lies behind an external-facing port")]
    ExternalFacing,
    /// The kernel marks it, or something it is attached to, as untrusted.
    #[error("the kernel marks it untrusted")]
    Marked,
    /// Nothing could be determined about it, for example after a [`TrustError`].
    #[error("its trust could not be determined")]
    Unknown,
}

impl Trust {
    /// The trust from an explicit description.
    pub const fn described(trusted: bool) -> Trust {
        if trusted { Trust::Trusted } else { Trust::Untrusted { why: Distrust::Described } }
    }

    /// Whether the device may work under `policy` (rule L28).
    pub const fn allows(self, policy: Policy) -> bool {
        matches!(self, Trust::Trusted) || policy.is_strict()
    }
}

impl fmt::Display for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trust::Trusted => f.write_str("trusted"),
            Trust::Untrusted { why } => write!(f, "untrusted: {why}"),
        }
    }
}

/// The strict policy nearest to `policy`.
fn confined(policy: Policy) -> Policy {
    match policy {
        // Distrust alone does not rule out bouncing; other reasons do, and then the device maps.
        Policy::Off | Policy::Bounce | Policy::Auto => Policy::StrictMap,
        other => other.to_strict(),
    }
}

/// The properties of a device that decide which policies it can have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Means {
    pub(crate) trust: Trust,
    /// Whether the use-after-unmap detector is on.
    pub(crate) detecting: bool,
    /// Whether its domain can defer flushes.
    pub(crate) deferred_flush: bool,
    /// Whether it has bounce pools.
    pub(crate) pools: bool,
}

/// Why a device cannot have `policy`; `None` if it can. Distrust is the first reason reported.
pub(crate) fn against(policy: Policy, means: Means) -> Option<Fallback> {
    match means.trust {
        Trust::Untrusted { why } if !means.trust.allows(policy) => {
            Some(Fallback::Untrusted { why })
        }
        // A slot used after its unmap may already belong to the next mapping.
        _ if means.detecting && (!policy.is_strict() || policy.bounces()) => {
            Some(Fallback::Detector)
        }
        _ if policy.is_lazy() && !means.deferred_flush => Some(Fallback::NoDeferredFlush),
        _ if policy.bounces() && !means.pools => Some(Fallback::NoPools),
        _ => None,
    }
}

/// A policy that was demanded but that the device cannot have (rule L28).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the policy {policy} is demanded but not possible: {because}")]
pub struct Refused {
    /// The demanded policy.
    pub policy: Policy,
    /// Why not.
    #[source]
    pub because: Fallback,
}

/// The policy in force when `policy` is requested, and why if it is another one. If `demanded`, only
/// the requested policy is acceptable.
pub(crate) fn decide(
    policy: Policy,
    demanded: bool,
    means: Means,
) -> Result<(Policy, Option<Fallback>), Refused> {
    match against(policy, means) {
        None => Ok((policy, None)),
        Some(because) if demanded => Err(Refused { policy, because }),
        Some(because) => Ok((confined(policy), Some(because))),
    }
}

/// Why the trust of a device could not be determined. Never a reason to trust it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrustError {
    /// The path does not lead to a device in sysfs.
    #[error("{} is not a device in sysfs", .0.display())]
    NotADevice(PathBuf),
    /// A file exists but cannot be read.
    #[error("cannot read {}: {error}", .file.display())]
    Unreadable {
        /// Which file.
        file: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// A file has invalid contents.
    #[error("{}: invalid contents {contents:?}", .file.display())]
    Invalid {
        /// Which file.
        file: PathBuf,
        /// Its contents.
        contents: String,
    },
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const UNTRUSTED: Trust = Trust::Untrusted { why: Distrust::Removable };
    const BECAUSE: Fallback = Fallback::Untrusted { why: Distrust::Removable };

    fn all(trust: Trust) -> Means {
        Means { trust, detecting: false, deferred_flush: true, pools: true }
    }

    #[test]
    fn the_table_of_decisions() {
        // rule L28
        use Policy::*;
        let granted = |policy| Ok((policy, None));
        let instead = |policy| Ok((policy, Some(BECAUSE)));
        let refused = |policy| Err(Refused { policy, because: BECAUSE });
        // untrusted | untrusted and demanded; a trusted device gets what is requested
        let table = [
            (Off, instead(StrictMap), refused(Off)),
            (Strict, granted(Strict), granted(Strict)),
            (StrictMap, granted(StrictMap), granted(StrictMap)),
            (LazySq, instead(Strict), refused(LazySq)),
            (LazyMq, instead(Strict), refused(LazyMq)),
            (LazySqMap, instead(StrictMap), refused(LazySqMap)),
            (LazyMqMap, instead(StrictMap), refused(LazyMqMap)),
            (Bounce, granted(Bounce), granted(Bounce)),
            (Auto, granted(Auto), granted(Auto)),
        ];
        assert_eq!(table.map(|row| row.0), Policy::ALL);
        for (policy, untrusted, demanded) in table {
            let decide = |trust, demanded| decide(policy, demanded, all(trust));
            assert_eq!(decide(Trust::Trusted, false), granted(policy));
            assert_eq!(decide(Trust::Trusted, true), granted(policy));
            assert_eq!(decide(UNTRUSTED, false), untrusted);
            assert_eq!(decide(UNTRUSTED, true), demanded);
            // What is allowed is what is not replaced.
            for trust in [Trust::default(), UNTRUSTED, Trust::described(false)] {
                let (in_force, fallback) = decide(trust, false).unwrap();
                assert!(trust.allows(in_force));
                assert_eq!(trust.allows(policy), fallback.is_none());
                assert_eq!(trust.allows(policy), in_force == policy);
            }
            assert_eq!(UNTRUSTED.allows(policy), policy.is_strict());
        }
        assert_eq!(Trust::default(), Trust::Trusted);
    }

    #[test]
    fn a_refusal_reports_its_reason() {
        assert_eq!(
            decide(Policy::Off, true, all(Trust::described(false))).unwrap_err().to_string(),
            "the policy off is demanded but not possible: the device is untrusted (it was \
             described as untrusted), so it gets strict protection"
        );
    }
}
