use proptest::prelude::*;
use ringfence_dma::Policy;

use super::*;
use crate::{
    allocators::PlacementName,
    list::List,
    progress::Kind,
    replay::{options::default_policies, sample},
};

fn recording(stream: Stream) -> Recording {
    Recording { maps: 100, unmaps: 20, timed: true, stream, ..Recording::default() }
}

fn run(stream: Stream, options: Options, stop: bool) -> TraceReport {
    let recording = recording(stream);
    let (stop, progress) = (Stop::new(stop.into()), Progress::new(Kind::Silent, 1, Duration::ZERO));
    let mut replay = Replay {
        file: "x",
        recording: &recording,
        options: &options,
        stop: &stop,
        progress: &progress,
    };
    let mut trace = replay.describe();
    replay.run(&mut trace).unwrap();
    trace
}

fn short() -> Options {
    crate::bench::options("x --repeat 2")
}

#[test]
fn the_recorded_placement_is_the_recordings_own() {
    let stream = sample::stream();
    let trace = run(stream, short(), false);
    assert_eq!(trace.allocations, trace.frees + trace.live_at_end);
    assert_eq!(trace.operations, trace.allocations + trace.frees);
    assert_eq!((trace.domains, trace.cpus, trace.rounds), (2, 2, 2));
    let recorded = &trace.allocators[0];
    assert_eq!((recorded.name.as_str(), recorded.failures), (RECORDED, 0));
    assert_eq!(recorded.ns_per_op, None);
    // Before the last unmap: what stays, and one buffer.
    assert_eq!(recorded.peaks.ranges, 51);
    assert_eq!(recorded.peaks.table_pages, 2);
    assert_eq!(trace.policies[0].map_requests, 100);
}

#[test]
fn every_allocator_and_policy_has_its_row() {
    let trace = run(sample::stream(), short(), false);
    let names: Vec<&str> = trace.allocators.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names, [RECORDED, "rbtree", "bitmap", "magazines", "ringfence"]);
    for row in &trace.allocators[1..] {
        assert_eq!(row.failures, 0, "{}", row.name);
        assert_eq!(row.peaks.ranges, 51, "{}", row.name);
        assert_eq!(row.peaks.bytes, trace.peak_live_bytes, "{}", row.name);
        assert_eq!(row.fragmentation_over_time.len(), MOMENTS, "{}", row.name);
        assert!((0.0..1.0).contains(&row.fragmentation), "{}", row.name);
        assert!(row.peaks.span_bytes >= trace.peak_live_bytes, "{}", row.name);
        assert!(row.peaks.extent_bytes >= row.peaks.span_bytes / 2, "{}", row.name);
        for estimate in [row.ns_per_op, row.alloc_ns, row.free_ns, row.ratio_to_ringfence] {
            assert!(estimate.is_some(), "{}", row.name);
        }
    }
    assert_eq!(trace.allocators[4].ratio_to_ringfence.unwrap().median, 1.0);
    assert_eq!(trace.policies.len(), 1 + default_policies().len());
}

#[test]
fn ours_puts_ranges_where_the_placement_has_them() {
    let at = |placement| {
        let options = Options { placement, ..short() };
        let trace = run(sample::stream(), options, false);
        (trace.placement, trace.allocators[4].peaks.span_bytes)
    };
    let (name, lowest) = at(PlacementName::Lowest);
    assert_eq!(name, "lowest");
    // Nothing is kept in slabs: side by side, except for alignment.
    assert!(lowest <= at(PlacementName::Size).1);
}

#[test]
fn without_ours_there_is_no_ratio() {
    let options = Options { allocators: List(vec![AllocatorKind::RbTree]), ..short() };
    let trace = run(sample::stream(), options, false);
    assert_eq!(trace.allocators[1].ratio_to_ringfence, None);
    assert!(trace.allocators[1].ns_per_op.is_some());
}

#[test]
fn an_aperture_that_is_too_small_makes_failures_not_an_error() {
    let options = Options { aperture_bits: Some(16), ..short() };
    let trace = run(sample::stream(), options, false);
    for row in &trace.allocators[1..] {
        assert!(row.failures > 0, "{}", row.name);
        assert!(row.peaks.bytes <= 2 << 16, "{}", row.name);
    }
    assert!(trace.policies[1].failures.unwrap() > 0);
}

#[test]
fn the_aperture_is_as_wide_as_the_recorded_addresses() {
    use crate::replay::stream::{Derivation, Stamp};
    for (first, bits) in [(0x1000, 32), (1 << 32, 39), (1 << 40, 48), (1 << 63, 64)] {
        let mut derivation = Derivation::default();
        derivation.map(0, first, first + 4095, 0, Stamp::default());
        let trace = run(derivation.finish(), short(), false);
        assert_eq!(trace.aperture_bits, bits);
        assert_eq!(trace.allocators[1].free_ns, None, "nothing is freed");
    }
}

#[test]
fn a_replay_that_is_stopped_reports_what_is_complete() {
    let trace = run(sample::stream(), short(), true);
    assert_eq!((trace.allocators.len(), trace.rounds), (0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn no_recording_makes_a_replay_fail(
        script in prop::collection::vec(
            (any::<bool>(), 0u32..3, address(), address(), any::<u64>(), 0u64..20_000_000),
            1..60),
        bits in prop::option::of(13u32..=64),
    ) {
        use crate::replay::stream::{Derivation, Stamp};
        let mut derivation = Derivation::default();
        // Nothing to replay is no recording.
        derivation.map(0, 1 << 20, 1 << 21, 0, Stamp::default());
        let mut time_ns = 0;
        for (map, domain, one, other, target, wait) in script {
            time_ns += wait;
            let stamp = Stamp { time_ns: Some(time_ns), cpu: (target % 3) as u16 };
            let (first, last) = (one.min(other), one.max(other));
            match map {
                true => {
                    let target = target.min(u64::MAX - (last - first));
                    derivation.map(domain, first, last, target, stamp);
                }
                false => derivation.unmap(domain, first, last, wait % 2 == 0, stamp),
            }
        }
        let options = Options {
            aperture_bits: bits,
            repeat: 1,
            flush_queue_slots: Some(4),
            policies: List([vec![Policy::Off], default_policies().0].concat()),
            ..short()
        };
        let trace = run(derivation.finish(), options, false);
        prop_assert_eq!(trace.allocators.len(), 5);
        prop_assert_eq!(trace.policies.len(), 2 + default_policies().len());
        for row in &trace.policies[2..] {
            prop_assert!(row.failures.unwrap() <= trace.allocations);
        }
    }
}

/// Small ones, so that ranges meet, and any.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => (0u64..64).prop_map(|page| page * 4096),
        4 => (0u64..64).prop_map(|page| page * 4096 + 4095),
        1 => (0u64..64).prop_map(|page| (page << 30) + 4095),
        1 => any::<u64>(),
        1 => Just(u64::MAX),
    ]
}
