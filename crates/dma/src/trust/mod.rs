//! Trust: which policies a device may have.
//!
//! A device that anyone can plug in, or that another party implements, may try to reach memory that
//! is not meant for it. The stale window of lazy invalidation would let it: so an untrusted device
//! is never lazy and never unprotected, whatever was requested (rule L28). Devices are trusted
//! unless something marks them otherwise; *lazy* is never a default.
//!
//! There are three sources: a description ([`Trust::described`]), sysfs ([`Trust::from_sysfs`]) and
//! the platform ([`Platform::detect`]). [`decide`] combines them with the requested policy.
//!
//! A buffer of an untrusted device that does not fill its granules is copied into a bounce slot,
//! whatever the policy, so that its neighbours stay out of reach (rule L48); without pools, or
//! without a slot, it is not mapped at all (rule L50).

mod platform;
mod sysfs;
#[cfg(all(test, not(loom)))]
mod tree;

use core::fmt;
use std::{io, path::PathBuf, sync::Arc};

use crate::Policy;

pub use platform::{Guest, Platform};
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
        match (self, policy) {
            (Trust::Trusted, _)
            | (
                Trust::Untrusted { .. },
                Policy::Strict | Policy::StrictMap | Policy::Bounce | Policy::Auto,
            ) => true,
            (
                Trust::Untrusted { .. },
                Policy::Off
                | Policy::LazySq
                | Policy::LazyMq
                | Policy::LazySqMap
                | Policy::LazyMqMap,
            ) => false,
        }
    }

    /// The policy in force when `policy` is requested, and why if it is another one.
    pub const fn confine(self, policy: Policy) -> (Policy, Option<Fallback>) {
        match against(policy, self, Means::ALL) {
            Some(because) => (confined(policy), Some(because)),
            None => (policy, None),
        }
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
pub(crate) const fn confined(policy: Policy) -> Policy {
    match policy {
        // Distrust alone does not rule out bouncing; other reasons do, and then the device maps.
        Policy::Off | Policy::Bounce | Policy::Auto => Policy::StrictMap,
        other => other.to_strict(),
    }
}

/// The properties of a device, besides trust, that decide which policies it can have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Means {
    /// Whether the use-after-unmap detector is on.
    pub(crate) detecting: bool,
    /// Whether its domain can defer flushes.
    pub(crate) deferred_flush: bool,
    /// Whether it has bounce pools.
    pub(crate) pools: bool,
}

impl Means {
    /// Means that rule out no policy.
    pub(crate) const ALL: Means = Means { detecting: false, deferred_flush: true, pools: true };
}

/// Why a device cannot have `policy`; `None` if it can. Distrust is the first reason reported.
pub(crate) const fn against(policy: Policy, trust: Trust, means: Means) -> Option<Fallback> {
    match trust {
        Trust::Untrusted { why } if !trust.allows(policy) => Some(Fallback::Untrusted { why }),
        // A slot used after its unmap may already belong to the next mapping.
        _ if means.detecting && (!policy.is_strict() || policy.bounces()) => {
            Some(Fallback::Detector)
        }
        _ if policy.is_lazy() && !means.deferred_flush => Some(Fallback::NoDeferredFlush),
        _ if policy.bounces() && !means.pools => Some(Fallback::NoPools),
        _ => None,
    }
}

/// A policy, and the reason for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The policy in force.
    pub policy: Policy,
    /// Why it was chosen.
    pub reason: Reason,
}

/// Why a device works under its policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// It was requested.
    Asked,
    /// No policy was requested.
    Default,
    /// No policy was requested, in a guest that does not trust the machine that implements its
    /// devices.
    ConfidentialGuest(Guest),
    /// Another one was requested, but is not possible.
    Instead {
        /// The requested policy.
        of: Policy,
        /// Why not.
        because: Fallback,
    },
}

impl Decision {
    /// Why the policy is not the requested one; `None` if it is, or if none was requested.
    pub const fn fallback(&self) -> Option<Fallback> {
        match self.reason {
            Reason::Instead { because, .. } => Some(because),
            _ => None,
        }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.policy)?;
        match self.reason {
            Reason::Asked => f.write_str("as requested"),
            Reason::Default => f.write_str("the default"),
            Reason::ConfidentialGuest(guest) => write!(f, "the default of a {guest}"),
            Reason::Instead { of, because } => write!(f, "instead of {of}: {because}"),
        }
    }
}

/// A policy that was demanded but that the device cannot have (rule L28).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the policy {policy} is demanded but not possible: {because}")]
pub struct Refused {
    /// The demanded policy.
    pub policy: Policy,
    /// Why not.
    pub because: Fallback,
}

/// Decides the policy of a device from its trust, the platform, and the wanted policy. If
/// `demanded`, only the wanted policy is acceptable.
///
/// A confidential guest only has a different default: a policy named for a trusted device there is
/// granted.
///
/// # Errors
/// The demanded policy is not possible.
pub fn decide(
    trust: Trust,
    platform: Platform,
    wanted: Option<Policy>,
    demanded: bool,
) -> Result<Decision, Refused> {
    let Some(wanted) = wanted else {
        let policy = platform.default_policy();
        let reason = match platform {
            Platform::Ordinary => Reason::Default,
            Platform::Confidential(guest) => Reason::ConfidentialGuest(guest),
        };
        return Ok(Decision { policy, reason });
    };
    match trust.confine(wanted) {
        (policy, None) => Ok(Decision { policy, reason: Reason::Asked }),
        (_, Some(because)) if demanded => Err(Refused { policy: wanted, because }),
        (policy, Some(because)) => {
            Ok(Decision { policy, reason: Reason::Instead { of: wanted, because } })
        }
    }
}

/// Why the trust of a device could not be determined. Never a reason to trust it.
#[derive(Clone, Debug, thiserror::Error)]
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
        error: Arc<io::Error>,
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
    const TDX: Platform = Platform::Confidential(Guest::Tdx);

    #[test]
    fn the_table_of_decisions() {
        // rule L28
        use Policy::*;
        let granted = |policy| Ok((policy, Reason::Asked));
        let instead = |of, policy| Ok((policy, Reason::Instead { of, because: BECAUSE }));
        let refused = |policy| Err(Refused { policy, because: BECAUSE });
        // trusted | untrusted | untrusted and demanded
        let table = [
            (Off, granted(Off), instead(Off, StrictMap), refused(Off)),
            (Strict, granted(Strict), granted(Strict), granted(Strict)),
            (StrictMap, granted(StrictMap), granted(StrictMap), granted(StrictMap)),
            (LazySq, granted(LazySq), instead(LazySq, Strict), refused(LazySq)),
            (LazyMq, granted(LazyMq), instead(LazyMq, Strict), refused(LazyMq)),
            (LazySqMap, granted(LazySqMap), instead(LazySqMap, StrictMap), refused(LazySqMap)),
            (LazyMqMap, granted(LazyMqMap), instead(LazyMqMap, StrictMap), refused(LazyMqMap)),
            (Bounce, granted(Bounce), granted(Bounce), granted(Bounce)),
            (Auto, granted(Auto), granted(Auto), granted(Auto)),
        ];
        assert_eq!(table.map(|row| row.0), Policy::ALL);
        for platform in [Platform::Ordinary, TDX] {
            let decide = |trust, wanted, demanded| {
                decide(trust, platform, Some(wanted), demanded)
                    .map(|decision| (decision.policy, decision.reason))
            };
            for (wanted, trusted, untrusted, demanded) in table {
                assert_eq!(decide(Trust::Trusted, wanted, false), trusted);
                assert_eq!(decide(Trust::Trusted, wanted, true), trusted);
                assert_eq!(decide(UNTRUSTED, wanted, false), untrusted);
                assert_eq!(decide(UNTRUSTED, wanted, true), demanded);
            }
        }
    }

    #[test]
    fn no_device_is_lazy_or_unprotected_by_default() {
        let guests = [Guest::Tdx, Guest::Sev, Guest::SecureExecution, Guest::Pef];
        let guests = guests.map(Platform::Confidential);
        for platform in [Platform::Ordinary].into_iter().chain(guests) {
            for trust in [Trust::Trusted, UNTRUSTED, Trust::default(), Trust::described(false)] {
                for demanded in [false, true] {
                    let decision = decide(trust, platform, None, demanded).unwrap();
                    assert!(decision.policy.is_strict(), "{decision}");
                    assert!(trust.allows(decision.policy));
                    assert_eq!(decision.fallback(), None);
                    let confidential = matches!(decision.reason, Reason::ConfidentialGuest(_));
                    assert_eq!(confidential, platform != Platform::Ordinary);
                }
            }
        }
        assert_eq!(Trust::default(), Trust::Trusted);
    }

    #[test]
    fn what_is_allowed_is_what_is_not_replaced() {
        for policy in Policy::ALL {
            for trust in [Trust::Trusted, UNTRUSTED] {
                let (in_force, fallback) = trust.confine(policy);
                assert!(trust.allows(in_force));
                assert_eq!(trust.allows(policy), fallback.is_none());
                assert_eq!(trust.allows(policy), in_force == policy);
            }
            assert_eq!(UNTRUSTED.allows(policy), policy.is_strict());
        }
    }

    #[test]
    fn a_decision_reports_its_reason() {
        let decided = |trust, platform, wanted| decide(trust, platform, wanted, false).unwrap();
        assert_eq!(
            decided(UNTRUSTED, TDX, Some(Policy::LazyMqMap)).to_string(),
            "strict+map: instead of lazy-mq+map: the device is untrusted (it can be removed by the \
             user), so it gets strict protection"
        );
        assert_eq!(
            decided(UNTRUSTED, TDX, None).to_string(),
            "strict+map: the default of a confidential guest (TDX)"
        );
        assert_eq!(
            decided(Trust::Trusted, TDX, Some(Policy::LazySq)).to_string(),
            "lazy-sq: as requested"
        );
        assert_eq!(
            decide(Trust::described(false), TDX, Some(Policy::Off), true).unwrap_err().to_string(),
            "the policy off is demanded but not possible: the device is untrusted (it was \
             described as untrusted), so it gets strict protection"
        );
    }
}
