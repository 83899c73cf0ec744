//! What programs are made of.

use proptest::{collection::vec, prelude::*};
use ringfence_devices::disk::DiskBuffers;
use ringfence_dma::{
    BounceConfig, BounceLimits, Detector, Direction, Distrust, DmaConfig, FlushTuning, Policy,
    QueueKind, TimerKind, Trust, Written,
};
use ringfence_iommu_testing::{Kind, Stage};
use ringfence_run::worker::Notify;

use crate::{
    lying::Lie,
    rig::{Addresses, Kind as Translation, Setup},
};

/// The pieces of a buffer: the offset of each in its first page, and its length.
pub(super) type Pieces = Vec<(u64, u64)>;

/// What a program does while asynchronous I/O is under way.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Meanwhile {
    Unmap,
    Detach,
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Map {
        pieces: Pieces,
        direction: Direction,
        from: usize,
    },
    MapList {
        buffers: Vec<Pieces>,
        direction: Direction,
        from: usize,
    },
    Coherent {
        pieces: Pieces,
        from: usize,
    },
    Persistent {
        pieces: Pieces,
        from: usize,
    },
    Unmap {
        which: usize,
    },
    UnmapWatched {
        which: usize,
    },
    Drop {
        which: usize,
    },
    Unwatch {
        which: usize,
    },
    /// A persistent mapping at work: the CPU writes, the device reads and writes, the CPU reads.
    Use {
        which: usize,
    },
    /// Asynchronous I/O of the device, which goes on while the program does.
    Hold {
        which: usize,
        worker: usize,
        us: u64,
        /// Whether to unmap or detach at once what it is under way to.
        then: Option<Meanwhile>,
    },
    /// Maps these together, and begins to; [`Collect`](Step::Collect) hands them out.
    Submit {
        buffers: Vec<Pieces>,
        direction: Direction,
        from: usize,
        /// Whether to begin them together.
        at_once: bool,
    },
    Collect {
        wait: bool,
    },
    /// Begins to unmap `count` mappings together; [`Reap`](Step::Reap) hands the buffers out.
    Complete {
        which: usize,
        count: usize,
        watched: bool,
        at_once: bool,
    },
    Reap {
        wait: bool,
    },
    /// Changes the policy meanwhile.
    Switch {
        policy: Policy,
    },
    Tune {
        tuning: FlushTuning,
    },
    /// Part of a copy is made visible to the CPU, or to the device.
    Sync {
        which: usize,
        part: (u64, u64),
        for_cpu: bool,
    },
    /// A claim that the device has written so much of a copy.
    Note {
        which: usize,
        part: (u64, u64),
    },
    /// A buffer in pool memory.
    Take {
        len: u64,
        direction: Direction,
    },
    Fill {
        which: usize,
    },
    GiveBack {
        which: usize,
    },
    Trim,
    Flush,
    Wait {
        ms: u64,
    },
    MoveToCpu(usize),
    /// The device is detached from its domain; attached again it reaches what is mapped then.
    Detach,
    Attach,
    /// Both, one after the other.
    Renew,
    Fail {
        kind: Kind,
        stage: Stage,
        nth: u64,
    },
    Mend,
}

impl Step {
    /// Whether it maps, or unmaps or detaches what asynchronous I/O is under way to.
    pub(crate) fn holds(&self) -> bool {
        let holds = matches!(self, Step::Hold { then: Some(_), .. });
        holds || matches!(self, Step::Map { .. } | Step::Coherent { .. } | Step::Persistent { .. })
    }

    pub(crate) fn detaches(&self) -> bool {
        let then = matches!(self, Step::Hold { then: Some(Meanwhile::Detach), .. });
        then || matches!(self, Step::Detach | Step::Renew)
    }
}

fn pieces() -> impl Strategy<Value = Pieces> {
    let offset = prop_oneof![3 => Just(0u64), 2 => 0..4096u64];
    let len = prop_oneof![Just(4096u64), Just(8192), 1..12_000u64, 1..600u64];
    vec((offset, len), 1..4)
}

pub(crate) fn direction() -> impl Strategy<Value = Direction> {
    prop_oneof![
        Just(Direction::ToDevice),
        Just(Direction::FromDevice),
        Just(Direction::Bidirectional)
    ]
}

fn failure() -> impl Strategy<Value = Step> {
    // A map that fails has changed nothing, as the trait has it: never afterwards.
    let call = prop_oneof![
        Just((Kind::Map, Stage::Before)),
        Just((Kind::SyncMap, Stage::Before)),
        Just((Kind::SyncMap, Stage::After)),
        Just((Kind::Unmap, Stage::Before)),
        Just((Kind::Unmap, Stage::After)),
        Just((Kind::Sync, Stage::Before)),
        Just((Kind::Sync, Stage::After)),
        Just((Kind::SyncEnd, Stage::After)),
        Just((Kind::FlushAll, Stage::Before)),
        Just((Kind::FlushAll, Stage::After)),
    ];
    (call, 1..4u64).prop_map(|((kind, stage), nth)| Step::Fail { kind, stage, nth })
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let from = 0..96usize;
    let which = || any::<usize>();
    let lists = vec(pieces(), 1..4);
    let batches = vec(pieces(), 1..5);
    prop_oneof![
        7 => (pieces(), direction(), from.clone())
            .prop_map(|(pieces, direction, from)| Step::Map { pieces, direction, from }),
        2 => (lists, direction(), from.clone())
            .prop_map(|(buffers, direction, from)| Step::MapList { buffers, direction, from }),
        2 => (batches, direction(), from.clone(), any::<bool>()).prop_map(
            |(buffers, direction, from, at_once)| {
                Step::Submit { buffers, direction, from, at_once }
            }
        ),
        2 => any::<bool>().prop_map(|wait| Step::Collect { wait }),
        3 => (which(), 1..6usize, any::<bool>(), any::<bool>()).prop_map(
            |(which, count, watched, at_once)| Step::Complete { which, count, watched, at_once }
        ),
        2 => any::<bool>().prop_map(|wait| Step::Reap { wait }),
        1 => (pieces(), from).prop_map(|(pieces, from)| Step::Coherent { pieces, from }),
        6 => which().prop_map(|which| Step::Unmap { which }),
        1 => which().prop_map(|which| Step::UnmapWatched { which }),
        1 => which().prop_map(|which| Step::Drop { which }),
        1 => which().prop_map(|which| Step::Unwatch { which }),
        1 => which().prop_map(|which| Step::Use { which }),
        2 => (which(), 0..2usize, 0..400u64)
            .prop_map(|(which, worker, us)| Step::Hold { which, worker, us, then: None }),
        1 => (which(), 0..2usize, 0..3000u64, meanwhile()).prop_map(
            |(which, worker, us, then)| Step::Hold { which, worker, us, then: Some(then) }
        ),
        1 => (pieces(), 0..96usize)
            .prop_map(|(pieces, from)| Step::Persistent { pieces, from }),
        1 => policy().prop_map(|policy| Step::Switch { policy }),
        1 => any::<bool>().prop_flat_map(tuning).prop_map(|tuning| Step::Tune { tuning }),
        3 => (which(), part(), any::<bool>())
            .prop_map(|(which, part, for_cpu)| Step::Sync { which, part, for_cpu }),
        3 => (which(), part()).prop_map(|(which, part)| Step::Note { which, part }),
        3 => (prop_oneof![1..4096u64, 1..9000u64], direction())
            .prop_map(|(len, direction)| Step::Take { len, direction }),
        1 => which().prop_map(|which| Step::Fill { which }),
        2 => which().prop_map(|which| Step::GiveBack { which }),
        1 => Just(Step::Trim),
        1 => Just(Step::Flush),
        1 => (0..20u64).prop_map(|ms| Step::Wait { ms }),
        1 => (0..2usize).prop_map(Step::MoveToCpu),
        1 => Just(Step::Detach),
        2 => Just(Step::Attach),
        1 => Just(Step::Renew),
        3 => failure(),
        1 => Just(Step::Mend),
    ]
}

fn meanwhile() -> impl Strategy<Value = Meanwhile> {
    prop_oneof![3 => Just(Meanwhile::Unmap), 1 => Just(Meanwhile::Detach)]
}

/// Its offset and length, cut to the buffer if too large.
fn part() -> impl Strategy<Value = (u64, u64)> {
    (prop_oneof![Just(0u64), 0..12_000u64], prop_oneof![Just(u64::MAX), 0..5000u64])
}

pub(crate) fn policy() -> impl Strategy<Value = Policy> {
    let protecting: Vec<_> = Policy::ALL.into_iter().filter(|p| *p != Policy::Off).collect();
    let bouncing = vec![Policy::Bounce, Policy::Auto];
    prop_oneof![3 => prop::sample::select(protecting), 2 => prop::sample::select(bouncing)]
}

prop_compose! {
    pub(crate) fn tuning(per_cpu: bool)(
        slots in 2..6usize,
        interval_ms in 1..20u64,
        max_exposure_ms in prop_oneof![3 => Just(None), 1 => (1..10u64).prop_map(Some)],
        max_exposure_bytes in prop_oneof![2 => Just(None), 1 => (1..60_000u64).prop_map(Some)],
    ) -> FlushTuning {
        let kind = if per_cpu { QueueKind::PerCpu } else { QueueKind::Single };
        let high_water = None;
        FlushTuning { kind, slots, high_water, interval_ms, max_exposure_ms, max_exposure_bytes }
    }
}

/// Pools, or none; from pools that hold nothing to pools that hold all that a program maps.
fn bounces() -> impl Strategy<Value = Option<(BounceLimits, usize)>> {
    let largest = prop_oneof![Just(4096u64), Just(16_384), Just(1 << 20)];
    let limits = (largest, 1..5u64, 1..30u64).prop_map(|(largest, times, idle_ms)| BounceLimits {
        largest,
        max_bytes: largest * times,
        idle_ms,
    });
    prop_oneof![1 => Just(None), 3 => (limits, 1..64usize).prop_map(Some)]
}

prop_compose! {
    fn bounce()(
        threshold in prop_oneof![Just(1u64 << 20), 0..16_000u64],
        quota in prop_oneof![2 => Just(1u64 << 20), 1 => 0..60_000u64],
        reported in any::<bool>(),
    ) -> BounceConfig {
        let written = if reported { Written::Reported } else { Written::Unknown };
        BounceConfig { threshold, quota, written }
    }
}

/// `ORACLE_KIND` picks one of them; else few go by messages, the fewer the larger `most`.
pub(crate) fn kind(most: u32) -> impl Strategy<Value = Translation> {
    let kinds = [
        (most, "virtio-iommu", Translation::Viommu),
        (most, "lazy", Translation::LazyViommu),
        (most, "table", Translation::Table),
        (most, "iotlb", Translation::Asked),
        (4, "vhost-user", Translation::VhostUser),
    ];
    let only = std::env::var("ORACLE_KIND").ok();
    let kinds = kinds.into_iter().filter(|(_, name, _)| only.as_deref().is_none_or(|o| o == *name));
    let kinds = kinds.map(|(weight, _, kind)| (weight, Just(kind))).collect();
    prop::strategy::Union::new_weighted(kinds)
}

prop_compose! {
    pub(crate) fn setup()(
        policy in policy(),
        tuning in tuning(false),
        untrusted in prop::bool::weighted(0.2),
        bounces in bounces(),
        bounce in bounce(),
        detect in prop_oneof![
            3 => Just(None),
            1 => (0..6usize, 1..200_000u64).prop_map(|(ranges, bytes)| {
                Some(Detector { ranges, bytes })
            }),
        ],
        boundary in prop_oneof![3 => Just(u64::MAX), 1 => Just(0x3fff), 1 => Just(0xffff)],
        max_segment in prop_oneof![3 => Just(u64::MAX), 1 => 4096..20_000u64],
        granule in prop_oneof![3 => Just(4096u64), 1 => Just(512)],
        addresses in prop_oneof![
            Just(Addresses::Slabs),
            Just(Addresses::FewSlabs),
            Just(Addresses::Magazines),
            Just(Addresses::Tree)
        ],
        at_the_top in any::<bool>(),
        mappings in prop_oneof![2 => Just(1u64 << 16), 1 => 4..40u64],
        table_bytes in prop_oneof![5 => Just(16u64 << 20), 1 => (1u64 << 14)..(1 << 17)],
        notify in prop_oneof![2 => Just(Notify::Adaptive), 1 => Just(Notify::Sleep)],
        ring_size in prop_oneof![Just(8u16), Just(64)],
        probe_first in any::<bool>(),
        // Each access that is refused takes turns of three threads there.
        kind in kind(100),
        // All that is mapped fits, or not even the data.
        space in prop_oneof![3 => Just(1u64 << 20), 1 => Just(1 << 18)],
        // An access needs two at once, and a random one is evicted: of fewer, it may wait for too long.
        entries in prop_oneof![1 => Just(1u64 << 16), 1 => 4..20u64],
        leaves_queued in any::<bool>(),
        disk in prop_oneof![
            2 => Just(None),
            1 => Just(Some(DiskBuffers::Guest)),
            1 => Just(Some(DiskBuffers::Own))
        ],
    ) -> Setup {
        let config = DmaConfig {
            flush: Some(FlushTuning { kind: policy.queue_kind().unwrap_or_default(), ..tuning }),
            trust: match untrusted {
                true => Trust::Untrusted { why: Distrust::Described },
                false => Trust::Trusted,
            },
            detect,
            bounce,
            segment_boundary: boundary,
            max_segment,
            timer: TimerKind::Manual,
            ..DmaConfig::new(policy)
        };
        let lie = Lie::Nothing;
        Setup {
            config, granule, addresses, at_the_top, mappings, table_bytes, notify, ring_size, probe_first, kind,
            space, entries, leaves_queued, bounces, disk, lie, renews: None,
        }
    }
}
