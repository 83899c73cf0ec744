//! Statistics of a device.

// The atomics of `std` under loom too: counts are not a way for threads to agree.
use std::sync::atomic::AtomicU64;

use crate::{
    Sampled,
    auto::Tally,
    counter::{Count, TimeCounter},
    waits::CallerWaits,
};

/// How much memory was reachable for how long after it was unmapped (lazy policies only).
///
/// An unmapped range counts from the moment its translation was removed until the end of the flush
/// that covers it (or of a later one, if its IOVA is only then released): the figures are never
/// less than the real exposure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exposure {
    /// The sum of bytes × nanoseconds over all released ranges.
    pub byte_ns: u128,
    /// The longest exposure of a released range, in nanoseconds.
    pub max_age_ns: u64,
    /// Ranges released.
    pub released: u64,
}

/// Counts since the device was made, over all its clones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Successful map calls of all kinds (also under `off`).
    pub maps: u64,
    /// Map calls that failed.
    pub map_failures: u64,
    /// Unmaps, explicit or by drop, that succeeded.
    pub unmaps: u64,
    /// Unmaps that failed: their memory is leaked, their IOVAs are quarantined.
    pub unmap_failures: u64,
    /// Bytes of the buffers that were mapped.
    pub bytes: u64,
    /// Ranges given to [`map_pages`](ringfence_iommu::Domain::map_pages).
    pub map_calls: u64,
    /// [`iotlb_sync_map`](ringfence_iommu::Domain::iotlb_sync_map) calls.
    pub map_syncs: u64,
    /// [`iotlb_sync`](ringfence_iommu::Domain::iotlb_sync) calls.
    pub unmap_syncs: u64,
    /// [`sync_for_cpu`](crate::Mapping::sync_for_cpu) calls.
    pub syncs_for_cpu: u64,
    /// [`sync_for_device`](crate::Mapping::sync_for_device) calls.
    pub syncs_for_device: u64,
    /// Whole-domain flushes, failed ones included.
    pub flushes: u64,
    /// Whole-domain flushes that failed; the entries they should have released stayed queued.
    pub flush_failures: u64,
    /// Flushes that a caller had to make because its queue was full.
    pub full_queue_flushes: u64,
    /// Flushes that a caller had to make to keep a bound of exposure: in bytes, in time, or because
    /// the policy or the tuning became stricter while it unmapped.
    pub bound_flushes: u64,
    /// Unmaps under a lazy policy that were done strictly, as there was no room for them under the
    /// bound of exposed bytes.
    pub bound_unmaps: u64,
    /// Released ranges that had been exposed for longer than
    /// [`max_exposure_ms`](crate::FlushTuning::max_exposure_ms), including those queued before it
    /// was set.
    pub late_releases: u64,
    /// Unmapped ranges that still wait in a flush queue.
    pub queued: u64,
    /// The same in bytes.
    pub queued_bytes: u64,
    /// IOVA ranges that are never reused because their invalidation failed.
    pub quarantined: u64,
    /// The same in bytes of address space.
    pub quarantined_bytes: u64,
    /// Freed IOVA ranges that the use-after-unmap detector currently holds back.
    pub withheld: u64,
    /// The same in bytes of address space.
    pub withheld_bytes: u64,
    /// Current persistent mappings. The device reaches them whatever the policy: they are exposed
    /// by choice, and count as neither strict nor lazy.
    pub persistent: u64,
    /// The same in bytes of their buffers.
    pub persistent_bytes: u64,
    /// Mappings that were copies in bounce slots, a part of [`maps`](Self::maps).
    pub bounced: u64,
    /// Bytes that were copied for them, in and out.
    pub copied_bytes: u64,
    /// Mappings that were to be copies, but were mapped for lack of a slot or of a way to copy
    /// them.
    pub not_bounced: u64,
    /// Buffers in pool memory that are currently taken
    /// ([`Device::take_buffer`](crate::Device::take_buffer)): reachable whatever the policy, as
    /// persistent mappings are.
    pub taken: u64,
    /// The same in bytes.
    pub taken_bytes: u64,
    /// How long unmapped memory stayed reachable.
    pub exposure: Exposure,
    /// Thread time in map calls.
    pub map_time: Sampled,
    /// Thread time in unmap calls.
    pub unmap_time: Sampled,
    /// Thread time of timer expiries (all are timed when sampling is on): work that a lazy policy
    /// moves out of the unmap calls.
    pub expiry_time: Sampled,
    /// IOVA ranges that went back to the allocator, by unmaps and by flushes. (A use-after-unmap
    /// detector gets them first: [`withheld`](Self::withheld) of them are not back yet.)
    pub frees: u64,
    /// Time in the allocator's `alloc`, which every map calls, except of a copy or under `off`.
    /// Unlike the times above it is wall time: see
    /// [`DmaConfig::sample_every`](crate::DmaConfig::sample_every).
    pub alloc_time: Sampled,
    /// Time in the allocator's `free`, as [`alloc_time`](Self::alloc_time).
    pub free_time: Sampled,
}

/// The counters that [`Stats`] has under the same names, and others.
macro_rules! counters {
    ($($name:ident)*) => {
        /// The counters of one clone of a device. Each clone counts in cache lines of its own.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
            /// Batches begun: their numbers decide which are timed.
            pub(crate) map_batches: AtomicU64,
            pub(crate) unmap_batches: AtomicU64,
            pub(crate) map_time: TimeCounter,
            pub(crate) unmap_time: TimeCounter,
            pub(crate) alloc_time: TimeCounter,
            pub(crate) frees: FreeCounters,
            pub(crate) waits: CallerWaits,
            /// What was copied and mapped by choice; `None` for a device without pools.
            pub(crate) tally: Option<Box<Tally>>,
        }

        impl Counters {
            pub(crate) fn add_to(&self, stats: &mut Stats) {
                $(stats.$name += self.$name.get();)*
                self.map_time.add_to(&mut stats.map_time);
                self.unmap_time.add_to(&mut stats.unmap_time);
                self.alloc_time.add_brief_to(&mut stats.alloc_time);
                self.frees.add_to(stats);
            }
        }
    };
}

counters! {
    maps map_failures unmaps unmap_failures bytes map_calls map_syncs unmap_syncs
    syncs_for_cpu syncs_for_device full_queue_flushes bound_flushes bound_unmaps
    bounced copied_bytes not_bounced
    // Live ones: the clone that made one also counts its end.
    persistent persistent_bytes taken taken_bytes
}

/// Ranges given back to the allocator.
#[derive(Debug, Default)]
pub(crate) struct FreeCounters {
    /// How many ranges.
    pub(crate) count: AtomicU64,
    pub(crate) time: TimeCounter,
}

impl FreeCounters {
    pub(crate) fn add_to(&self, stats: &mut Stats) {
        stats.frees += self.count.get();
        self.time.add_brief_to(&mut stats.free_time);
    }
}

impl Counters {
    /// With a tally, if `chooses`.
    pub(crate) fn new(chooses: bool) -> Counters {
        Counters { tally: chooses.then(Box::default), ..Counters::default() }
    }

    /// Counts an unmap by its outcome.
    pub(crate) fn note_unmap<T>(&self, ended: &ringfence_iommu::Result<T>) {
        match ended {
            Ok(_) => self.unmaps.add(1),
            Err(_) => self.unmap_failures.add(1),
        }
    }
}
