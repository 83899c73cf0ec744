use super::{
    leaf::{places, word_fit, word_prefix},
    *,
};
use proptest::prelude::*;
use std::vec;

/// How many granules are free from each granule on.
fn runs(free: &[bool]) -> Vec<u64> {
    let mut runs = vec![0; free.len() + 1];
    for at in (0..free.len()).rev() {
        runs[at] = if free[at] { runs[at + 1] + 1 } else { 0 };
    }
    runs
}

/// The largest request that has a place, by trying each place.
fn naive_fit(free: &[bool]) -> u64 {
    let runs = runs(free);
    let alignment = |at: usize| if at == 0 { u64::MAX } else { 1 << at.trailing_zeros() };
    (0..free.len()).map(|at| runs[at].min(alignment(at))).max().unwrap_or(0)
}

fn naive_places(free: &[bool], count: u64) -> impl DoubleEndedIterator<Item = u64> {
    let (runs, step) = (runs(free), count.next_power_of_two() as usize);
    (0..free.len()).step_by(step).filter(move |at| runs[*at] >= count).map(|at| at as u64)
}

proptest! {
    #[test]
    fn a_words_fit_and_places_are_those_of_its_bits(word in prop_oneof![
        any::<u64>(), Just(0), Just(u64::MAX),
        (0..64u32, any::<u64>()).prop_map(|(n, x)| x | (u64::MAX >> n)),
        (any::<u64>(), any::<u64>()).prop_map(|(a, b)| a | b),
        (0..64u32, 0..64u32).prop_map(|(a, b)| (u64::MAX >> a) << b),
    ]) {
        let free: Vec<bool> = (0..64).map(|bit| word >> bit & 1 == 1).collect();
        prop_assert_eq!(u64::from(word_fit(word)), naive_fit(&free));
        let prefix = free.iter().take_while(|free| **free).count();
        prop_assert_eq!(usize::from(word_prefix(word)), prefix);
        for count in 1..=64 {
            let bits = naive_places(&free, count).fold(0u64, |bits, at| bits | 1 << at);
            prop_assert_eq!(places(word, &Natural::new(count)), bits);
        }
    }
}

/// 3 levels above the leaves, at the bottom and at the top of the 64-bit space.
const GRANULES: u64 = 1 << 18;

#[derive(Clone, Debug)]
enum Op {
    Take { at: u64, count: u64 },
    Give { at: u64, count: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    let count = prop_oneof![1..80u64, 1..3000u64, 1..GRANULES, (0..18u32).prop_map(|bit| 1 << bit)];
    // Often at round addresses, where blocks begin.
    let at = (0..GRANULES, 0..18u32).prop_map(|(at, bit)| at >> bit << bit);
    (at, count, any::<bool>()).prop_map(|(at, count, take)| {
        let count = count.min(GRANULES - at);
        if take { Op::Take { at, count } } else { Op::Give { at, count } }
    })
}

/// Frees or takes exactly those granules of a range that are not so yet.
fn apply(tree: &mut Tree, free: &mut [bool], base: u64, op: &Op) {
    let (at, count, to) = match *op {
        Op::Take { at, count } => (at, count, false),
        Op::Give { at, count } => (at, count, true),
    };
    let mut start = at;
    while start < at + count {
        let here = free[start as usize];
        let end = (start..at + count).find(|n| free[*n as usize] != here).unwrap_or(at + count);
        if here != to {
            match to {
                true => tree.give(base + start, end - start),
                false => tree.take(base + start, end - start),
            }
            free[start as usize..end as usize].fill(to);
        }
        start = end;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_tree_knows_what_fits_and_where(
        top in any::<bool>(),
        ops in proptest::collection::vec(op(), 1..60),
        counts in proptest::collection::vec(prop_oneof![1..100u64, 1..5000u64, 1..GRANULES], 8),
        limits in proptest::collection::vec(0..GRANULES, 8),
    ) {
        let base = if top { u64::MAX - (GRANULES - 1) } else { 0 };
        let mut tree = Tree::new(base + (GRANULES - 1));
        let mut free = vec![false; GRANULES as usize];
        apply(&mut tree, &mut free, base, &Op::Give { at: 1, count: GRANULES - 1 });
        for op in &ops {
            // Granule 0 is never free.
            let op = match *op {
                Op::Give { at: 0, count: 1 } => continue,
                Op::Give { at: 0, count } => Op::Give { at: 1, count: count - 1 },
                ref op => op.clone(),
            };
            apply(&mut tree, &mut free, base, &op);
        }
        prop_assert_eq!(tree.free(), free.iter().filter(|free| **free).count() as u64);
        prop_assert_eq!(tree.fit(), naive_fit(&free));
        for (count, limit) in counts.into_iter().zip(limits) {
            let ends = |at: &u64| at + (count - 1) <= limit;
            let highest = naive_places(&free, count).rev().find(ends).map(|at| base + at);
            prop_assert_eq!(tree.highest(count, base + limit), highest);
            let lowest = naive_places(&free, count).find(ends).map(|at| base + at);
            prop_assert_eq!(tree.lowest(count, base + limit), lowest);
            let taken = (limit..GRANULES).find(|n| !free[*n as usize]).map(|n| base + n);
            prop_assert_eq!(tree.first_taken(base + limit, base + (GRANULES - 1)), taken);
        }
        // Taken and given back as a whole, the tree is as new.
        apply(&mut tree, &mut free, base, &Op::Take { at: 1, count: GRANULES - 1 });
        apply(&mut tree, &mut free, base, &Op::Take { at: 0, count: 1 });
        prop_assert_eq!(tree.fit(), 0);
        let nodes = tree.inners.nodes.len() - tree.inners.unused.len();
        prop_assert_eq!((nodes, tree.leaves.nodes.len()), (1, tree.leaves.unused.len()));
    }
}

#[test]
fn all_of_64_bits_is_one_tree() {
    let mut tree = Tree::new(u64::MAX);
    tree.give(1, u64::MAX);
    assert_eq!(tree.fit(), 1 << 63);
    assert_eq!(tree.highest(1 << 63, u64::MAX), Some(1 << 63));
    assert_eq!(tree.highest((1 << 63) + 1, u64::MAX), None);
    assert_eq!(tree.highest(1, u64::MAX), Some(u64::MAX));
    assert_eq!(tree.lowest(1, u64::MAX), Some(1));
    assert_eq!(tree.lowest(3, u64::MAX), Some(4));
    assert_eq!(tree.first_taken(1, u64::MAX), None);
    tree.take(u64::MAX, 1);
    assert_eq!(tree.first_taken(1, u64::MAX), Some(u64::MAX));
    assert_eq!(tree.highest(1 << 62, u64::MAX), Some(1 << 63));
    assert_eq!(tree.highest((1 << 62) - 1, u64::MAX), Some(3 << 62));
    assert!(tree.memory() < 16 << 10);
}
