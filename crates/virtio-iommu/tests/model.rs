//! The device against a naive model of it, request by request.

mod common;

use std::fmt;

use common::{
    model::{DEVERR, INVAL, NOENT, NOMEM, OK, PROBE, RANGE, UNSUPP},
    program,
    twin::{Met, Shape, Twin},
};
use proptest::prelude::*;

/// A program; shown as a whole, since what its bytes mean is told by what it does.
#[derive(Clone)]
struct Program(Vec<u8>);

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

fn programs() -> impl Strategy<Value = Program> {
    proptest::collection::vec(any::<u8>(), 0..2000).prop_map(Program)
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
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut met = Met::default();
    for _ in 0..600 {
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .take(2000)
        .collect();
        let Met { answers, spanning, mappings } = program::run(&bytes);
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
