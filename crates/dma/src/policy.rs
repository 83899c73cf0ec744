//! The policies by name.

use core::fmt;

use ringfence_sync::named;

named! {
    /// How mappings are made and unmade: what they cost, and what they guarantee.
    ///
    /// The names are those used for measurements on the kernel's mailing list that this crate is
    /// compared with: `sq` is a single flush queue, `mq` one per CPU, `+map` one map sync per mapping
    /// instead of one per [`map_pages`](ringfence_iommu::Domain::map_pages).
    #[derive(Default)]
    #[non_exhaustive]
    Policy, "{:?} is not a policy: it must be one of {}":
    /// No mapping at all: devices use the buffer's own addresses. No protection.
    Off = "off",
    /// Invalidated before the buffer is returned; each map call synced by itself.
    Strict = "strict",
    /// Invalidated before the buffer is returned; one map sync for the whole mapping, and one sync
    /// for all buffers that are submitted, or complete, together.
    #[default]
    StrictMap = "strict+map",
    /// Invalidated later, through one flush queue; each map call synced by itself.
    LazySq = "lazy-sq",
    /// Invalidated later, through a flush queue per CPU; each map call synced by itself.
    LazyMq = "lazy-mq",
    /// Invalidated later, through one flush queue; one map sync for the whole mapping.
    LazySqMap = "lazy-sq+map",
    /// Invalidated later, through a flush queue per CPU; one map sync for the whole mapping.
    LazyMqMap = "lazy-mq+map",
    /// Copied into memory that stays mapped, and back: no request to the IOMMU, and no part of the
    /// buffer is ever reachable. Buffers above a [threshold](crate::BounceConfig::threshold), and
    /// those that find no slot, are mapped as under [`StrictMap`](Self::StrictMap).
    Bounce = "bounce",
    /// Each mapping as under [`Bounce`](Self::Bounce) or [`StrictMap`](Self::StrictMap), whichever
    /// is faster for mappings of its size on this machine. The call that puts the policy into force
    /// measures that, as a rule in less than 200 ms. While other threads want the CPU, what copies
    /// in less than a wake-up is copied; and while threads wait long for syncs, what copies sooner.
    /// While mappings come fast, one way for all of them is tried from time to time, and taken as long as more is done
    /// by it.
    /// [`Device::choices`](crate::Device::choices) returns what was chosen, and why.
    Auto = "auto",
}

impl Policy {
    /// Whether unmapped memory stays reachable for a while.
    pub const fn is_lazy(self) -> bool {
        self.queue_kind().is_some()
    }

    /// Whether no device access to the buffer succeeds once [`unmap`](crate::Mapping::unmap) has
    /// returned.
    pub const fn is_strict(self) -> bool {
        !self.is_lazy() && !matches!(self, Policy::Off)
    }

    /// Whether mappings may be copies in memory that stays mapped.
    pub const fn bounces(self) -> bool {
        matches!(self, Policy::Bounce | Policy::Auto)
    }

    /// Whether one map sync serves a whole mapping, and all buffers submitted together (see
    /// [`MapBatch`](crate::MapBatch)).
    pub const fn batches_maps(self) -> bool {
        !matches!(self, Policy::Off | Policy::Strict | Policy::LazySq | Policy::LazyMq)
    }

    /// Whether buffers that complete together are invalidated together (see
    /// [`UnmapBatch`](crate::UnmapBatch)). A lazy policy has no sync to share.
    pub const fn batches_unmaps(self) -> bool {
        matches!(self, Policy::StrictMap | Policy::Bounce | Policy::Auto)
    }

    /// Which flush queues it has; `None` if it is not lazy.
    pub const fn queue_kind(self) -> Option<QueueKind> {
        match self {
            Policy::LazySq | Policy::LazySqMap => Some(QueueKind::Single),
            Policy::LazyMq | Policy::LazyMqMap => Some(QueueKind::PerCpu),
            _ => None,
        }
    }

    /// The same policy with flush queues of this kind; a policy that is not lazy is unchanged.
    pub(crate) const fn with_queue_kind(self, kind: QueueKind) -> Policy {
        match (self, kind) {
            (Policy::LazySq | Policy::LazyMq, QueueKind::Single) => Policy::LazySq,
            (Policy::LazySq | Policy::LazyMq, QueueKind::PerCpu) => Policy::LazyMq,
            (Policy::LazySqMap | Policy::LazyMqMap, QueueKind::Single) => Policy::LazySqMap,
            (Policy::LazySqMap | Policy::LazyMqMap, QueueKind::PerCpu) => Policy::LazyMqMap,
            _ => self,
        }
    }

    /// The strict policy that syncs maps as this one does; `Off` stays off.
    pub const fn to_strict(self) -> Policy {
        match self {
            Policy::LazySq | Policy::LazyMq => Policy::Strict,
            Policy::LazySqMap | Policy::LazyMqMap => Policy::StrictMap,
            _ => self,
        }
    }
}

/// One flush queue for all, or one for each CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QueueKind {
    /// One for all: the lazy policies with `sq` in their names.
    #[default]
    Single,
    /// One for each CPU: the lazy policies with `mq` in their names.
    PerCpu,
}

impl fmt::Display for QueueKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            QueueKind::Single => "a single flush queue",
            QueueKind::PerCpu => "a flush queue per CPU",
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_policy_is_read_back_from_its_name() {
        for policy in Policy::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert_eq!(Policy::default(), Policy::StrictMap);
    }

    #[test]
    fn the_error_about_a_wrong_name_lists_the_right_ones() {
        let message = "lazy".parse::<Policy>().unwrap_err().to_string();
        for policy in Policy::ALL {
            assert!(message.contains(policy.name()), "{message} does not list {policy}");
        }
        assert!(message.contains("\"lazy\""));
    }

    #[test]
    fn names_say_what_a_policy_does() {
        for policy in Policy::ALL {
            assert_eq!(policy.is_lazy(), policy.name().starts_with("lazy"));
            let strict = policy.name().starts_with("strict");
            assert_eq!(policy.is_strict(), strict || policy.bounces());
            let batches = policy.name().ends_with("+map");
            assert_eq!(policy.batches_maps(), batches || policy.bounces());
            assert!(!policy.to_strict().is_lazy());
            assert_eq!(policy.to_strict().batches_maps(), policy.batches_maps());
            let per_cpu = policy.name().contains("-mq");
            assert_eq!(policy.queue_kind() == Some(QueueKind::PerCpu), per_cpu);
            assert_eq!(policy.queue_kind().is_some(), policy.is_lazy());
            for kind in [QueueKind::Single, QueueKind::PerCpu] {
                let other = policy.with_queue_kind(kind);
                assert_eq!(other.queue_kind(), policy.queue_kind().map(|_| kind));
                assert_eq!(other.to_strict(), policy.to_strict());
            }
        }
    }
}
