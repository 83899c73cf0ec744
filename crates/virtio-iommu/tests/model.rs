//! The device against a naive model of it, request by request.

mod common;

use common::{
    model::{DEVERR, INVAL, NOENT, NOMEM, OK, PROBE, RANGE, UNSUPP},
    program,
    twin::{Met, Shape, Twin},
};
use proptest::prelude::*;

fn programs() -> impl Strategy<Value = program::Program> {
    proptest::collection::vec(any::<u8>(), 0..2000).prop_map(program::Program)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn whatever_is_asked_of_it_the_device_is_what_the_model_says(
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

/// The programs are worth running: every answer that there is occurs, and what is compared is
/// more than nothing.
#[test]
fn programs_meet_every_answer() {
    let mut met = Met::default();
    for seed in 1..600 {
        let Met { answers, spanning, mappings } = program::run(&program::random(seed, 2000));
        answers
            .iter()
            .for_each(|(answer, count)| *met.answers.entry(*answer).or_default() += count);
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
            assert!(met.answers.contains_key(&(kind, status)), "{kind} is never answered {status}");
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
