//! The device against a naive model of it, request by request.

mod common;

use common::{
    model::{DEVERR, INVAL, NOENT, NOMEM, OK, PROBE, RANGE, UNSUPP},
    program,
    twin::{Met, Shape, Twin, shape},
};
use proptest::prelude::*;

fn programs() -> impl Strategy<Value = program::Program> {
    proptest::collection::vec(any::<u8>(), 0..2000).prop_map(program::Program)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn whatever_the_requests_the_device_matches_the_model(
        program in programs(),
    ) {
        // rule V5
        // rule V8
        // rule V9
        // rule V12
        // rule V13
        // rule V14
        // rule V16
        // rule V20
        // rule V22
        // rule V24
        // rule V26
        program::run(&program.0);
    }
}

/// The programs are worth running: every status occurs, and there are mappings to compare.
#[test]
fn programs_meet_every_status() {
    let mut met = Met::default();
    for seed in 1..600 {
        let Met { completions, spanning, mappings } = program::run(&program::random(seed, 2000));
        completions.iter().for_each(|(completion, count)| {
            *met.completions.entry(*completion).or_default() += count
        });
        met.spanning += spanning;
        met.mappings = met.mappings.max(mappings);
    }
    let expected = [
        (1, vec![OK, UNSUPP, INVAL, RANGE, NOENT, NOMEM]),
        (2, vec![OK, INVAL, NOENT]),
        (3, vec![OK, UNSUPP, INVAL, RANGE, NOENT, NOMEM]),
        (4, vec![OK, UNSUPP, INVAL, RANGE, NOENT]),
        (5, vec![OK, DEVERR, INVAL, NOENT]),
    ];
    for (kind, statuses) in expected {
        for status in statuses {
            assert!(
                met.completions.contains_key(&(kind, status)),
                "{kind} is never completed with {status}"
            );
        }
    }
    assert!(met.spanning > 20, "{met:?}");
    assert!(met.mappings > 5, "{met:?}");
}

#[test]
fn a_probe_cut_short_is_left_alone_unless_probes_were_negotiated() {
    // rule V24
    let mut twin = Twin::new(Shape::default());
    assert_eq!(twin.request(0, &[5, 0, 0, 0, 1, 0], 516, true), Some(INVAL));
    twin.negotiate(!PROBE);
    assert_eq!(twin.request(0, &[5, 0, 0, 0, 1, 0], 516, true), None);
    assert_eq!(twin.request(0, &[5, 0, 0, 0], 4, true), None);
}

/// A MAP or an UNMAP, as bytes.
fn request(kind: u32, (first, last): (u64, u64), phys: u64) -> Vec<u8> {
    let mut bytes = [kind, 1].map(u32::to_le_bytes).concat();
    bytes.extend([first, last].map(u64::to_le_bytes).concat());
    if kind == 3 {
        bytes.extend(phys.to_le_bytes());
    }
    bytes.extend([if kind == 3 { 3 } else { 0 }, 0, 0, 0]);
    bytes
}

#[test]
fn all_addresses_at_once_with_every_granule() {
    // rule V15
    // rule V20
    // rule V22
    // rule V38
    const ALL: (u64, u64) = (0, u64::MAX);
    for bit in [0, 1, 9, 12, 16, 30, 62, 63] {
        let granule = 1u64 << bit;
        let mut twin = Twin::new(shape(granule, ALL, 0x77));
        assert_eq!(
            twin.request(0, &[1, 1, 1, 0, 0].map(u32::to_le_bytes).concat(), 4, true),
            Some(OK)
        );
        assert_eq!(twin.request(0, &request(3, ALL, 0), 4, true), Some(OK));
        twin.compare();
        twin.compare_accesses();
        // What leads beyond the last address, what is taken already, what would be cut.
        assert_ne!(twin.request(0, &request(3, ALL, granule), 4, true), Some(OK));
        assert_eq!(twin.request(0, &request(3, (0, granule - 1), 0), 4, true), Some(INVAL));
        assert_eq!(twin.request(0, &request(4, (granule, u64::MAX), 0), 4, true), Some(RANGE));
        twin.compare();
        assert_eq!(twin.request(0, &request(4, ALL, 0), 4, true), Some(OK));
        assert_eq!(twin.model.count(), 0);
        // The first granule and the last, crosswise.
        let end = u64::MAX - (granule - 1);
        assert_eq!(twin.request(0, &request(3, (0, granule - 1), end), 4, true), Some(OK));
        assert_eq!(twin.request(0, &request(3, (end, u64::MAX), 0), 4, true), Some(OK));
        twin.compare();
        twin.compare_accesses();
        assert_eq!(twin.request(0, &request(4, ALL, 0), 4, true), Some(OK));
        twin.compare();
        assert_eq!(twin.model.count(), 0);
    }
}
