//! Requests in a ring, cut into arbitrary pieces, in memory that changes as soon as it was read.

mod common;

use common::{
    pieces::{Met, run},
    program::{Program, random},
};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn pieces_of_requests_are_read_once_and_make_one_request(
        bytes in proptest::collection::vec(any::<u8>(), 0..2000).prop_map(Program),
    ) {
        // rule V7
        // rule V8
        // rule V26
        run(&bytes.0);
    }
}

#[test]
fn rings_meet_every_end() {
    let mut met = Met::default();
    for seed in 1..100 {
        let Met { completed, unreadable, unwritable } = run(&random(seed, 2000));
        met.completed += completed;
        met.unreadable += unreadable;
        met.unwritable += unwritable;
    }
    assert!(met.completed > 1000 && met.unreadable > 50 && met.unwritable > 50, "{met:?}");
}
