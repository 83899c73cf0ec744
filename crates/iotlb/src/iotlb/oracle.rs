//! An IOTLB and a view of it, against a naive oracle.

use std::collections::BTreeMap;

use proptest::prelude::*;
use ringfence_mem::{Access, AccessError, Translate};

use super::{
    tests::{GPA, PAGE, bench_with},
    *,
};
use crate::view::tests::host;

/// What the oracle counts in: a quarter of a page, so that entries begin and end within pages.
const ATOM: u64 = 1024;
/// The I/O virtual addresses that the property test plays with: around borders of what a cache may
/// be made of, and the last ones there are.
const SPOTS: [u64; 3] = [0x20_0000 - 8 * PAGE, 0x60_0000 - 8 * PAGE, u64::MAX - 16 * PAGE + 1];
/// The atoms of a spot.
const SPOT: u64 = 64;

fn atom_at(n: u64) -> u64 {
    SPOTS[(n / SPOT) as usize] + n % SPOT * ATOM
}

#[derive(Clone, Debug)]
enum Op {
    Update { at: u64, count: u64, target: u64, prot: Prot },
    Invalidate { at: u64, count: u64 },
    Everything,
    Retain { target: u64, count: u64 },
    Access { at: u64, offset: u64, len: u64, access: Access },
    Prefetch { at: u64, len: u64, access: Access },
    Quiet,
    Sleep,
}

fn op() -> impl Strategy<Value = Op> {
    let prot = prop_oneof![Just(Prot::READ), Just(Prot::WRITE), Just(Prot::RW), Just(Prot::RW)];
    let access = || prop_oneof![Just(Access::Read), Just(Access::Write), Just(Access::ReadWrite)];
    // Mostly whole pages, some of which lead on from each other.
    let at = || prop_oneof![3 => (0..3 * SPOT / 4).prop_map(|page| page * 4), 1 => 0..3 * SPOT];
    let count = || prop_oneof![3 => (1..6u64).prop_map(|pages| pages * 4), 1 => 1..20u64];
    let target = || prop_oneof![3 => (0..16u64).prop_map(|page| page * 4), 1 => 0..64u64];
    let linear = (at(), count()).prop_map(|(at, count)| Op::Update {
        at,
        count,
        target: at % 64,
        prot: Prot::RW,
    });
    prop_oneof![
        4 => (at(), count(), target(), prot)
            .prop_map(|(at, count, target, prot)| Op::Update { at, count, target, prot }),
        6 => linear,
        3 => (at(), count()).prop_map(|(at, count)| Op::Invalidate { at, count }),
        1 => Just(Op::Everything),
        1 => (target(), count()).prop_map(|(target, count)| Op::Retain { target, count }),
        12 => (at(), 0..ATOM, prop_oneof![1..64u64, 1..6 * PAGE], access())
            .prop_map(|(at, offset, len, access)| Op::Access { at, offset, len, access }),
        2 => (at(), 1..6 * PAGE, access())
            .prop_map(|(at, len, access)| Op::Prefetch { at, len, access }),
        4 => Just(Op::Quiet),
        1 => Just(Op::Sleep),
    ]
}

/// What the front end has updated and not invalidated: by atom, where it leads and what it allows.
type Truth = BTreeMap<u64, (u64, Prot)>;

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]
    #[test]
    fn what_a_view_translates_is_true_or_was_since_its_last_quiet_point(
        entries in prop_oneof![Just(3u64), Just(1000)],
        ops in proptest::collection::vec(op(), 1..120),
    ) {
        run(entries, &ops)?;
    }
}

/// The entries of the IOTLB itself, which holds less than the truth: some are evicted, and an
/// invalidation takes those that it overlaps as a whole.
type Table = Vec<(Range, Prot)>;

fn table_of(iotlb: &Iotlb) -> Table {
    let mut table = Table::new();
    iotlb.domain.for_each(|mapping| table.push((mapping.range, mapping.prot)));
    table
}

fn holds(table: &Table, addr: u64, access: Access) -> bool {
    table.iter().any(|(range, prot)| range.contains(Iova(addr)) && prot.allows(wanted(access)))
}

/// Runs `ops` on an IOTLB of at most `entries`, and on the oracle beside it. Returns how many
/// prefetches found everything although the access then found less.
fn run(entries: u64, ops: &[Op]) -> std::result::Result<usize, TestCaseError> {
    let again = Duration::from_secs(1000);
    let mut bench = bench_with(IotlbConfig { entries, again, ..IotlbConfig::default() });
    // The last is now.
    let mut truths = vec![Truth::new()];
    // What the table has held since the last quiet point. The last is now.
    let mut tables = vec![Table::new()];
    let mut tokens = Vec::new();
    let mut overtaken = 0;
    for op in ops.iter().cloned() {
        let now = truths.last().unwrap().clone();
        match op {
            Op::Update { at, count, target, prot } => {
                // Not across the end of a spot, nor of memory.
                let count = count.min(SPOT - at % SPOT).min(64 - target);
                let range = Range::from_len(Iova(atom_at(at)), count * ATOM).unwrap();
                let gpa = GPA + target * ATOM;
                let mut then = now;
                then.extend((0..count).map(|n| (at + n, (gpa + n * ATOM, prot))));
                truths.push(then);
                tokens.push(bench.iotlb.update(range, GuestPhys(gpa), prot).unwrap());
                prop_assert!(bench.iotlb.entries() <= entries);
                // The newest entry is there, whatever was evicted for it.
                for n in 0..count {
                    let access = if prot == Prot::READ { Access::Read } else { Access::Write };
                    prop_assert!(
                        bench
                            .view
                            .silently(|| bench.view.slices(atom_at(at + n), ATOM, access, |_| ()))
                            .is_ok()
                    );
                }
            }
            Op::Invalidate { at, count } => {
                let count = count.min(SPOT - at % SPOT);
                let range = Range::from_len(Iova(atom_at(at)), count * ATOM).unwrap();
                let mut then = now;
                then.retain(|atom, _| atom.wrapping_sub(at) >= count);
                truths.push(then);
                tokens.push(bench.iotlb.invalidate(range).unwrap());
            }
            Op::Everything => {
                truths.push(Truth::new());
                tokens.push(bench.iotlb.invalidate(Range::ALL).unwrap());
                prop_assert_eq!(bench.iotlb.entries(), 0);
            }
            Op::Retain { target, count } => {
                let gone = GPA + target * ATOM..GPA + (target + count) * ATOM;
                let keep =
                    |first: GuestPhys, last: GuestPhys| last.0 < gone.start || gone.end <= first.0;
                let mut then = now;
                then.retain(|_, (gpa, _)| !gone.contains(gpa));
                truths.push(then);
                tokens.push(bench.iotlb.retain_targets(keep).unwrap());
                // What a view holds of entries that were evicted before goes with the memory.
                bench.view.set_memory(Arc::clone(&bench.memory));
            }
            Op::Quiet => bench.view.quiet(),
            Op::Sleep => {
                bench.view.offline();
                bench.view.online();
            }
            Op::Prefetch { at, len, access } => {
                let Some(_) = atom_at(at).checked_add(len) else { continue };
                let ready = bench.view.prefetch(atom_at(at), len, access);
                match bench.view.slices(atom_at(at), len, access, |_| ()) {
                    Ok(()) => prop_assert!(ready),
                    Err(AccessError::Again { addr, .. }) => {
                        prop_assert!(!holds(tables.last().unwrap(), addr, access), "{addr:#x}");
                        // The prefetch may have found it, but in the cache alone.
                        let held = tables.iter().any(|table| holds(table, addr, access));
                        prop_assert!(!ready || held, "{addr:#x}");
                        overtaken += usize::from(ready);
                    }
                    Err(other) => prop_assert!(false, "{other}"),
                }
            }
            Op::Access { at, offset, len, access } => {
                let addr = atom_at(at) + offset;
                let mut reached = Vec::new();
                let end = bench.view.slices(addr, len, access, |piece| {
                    reached.push((piece.as_ptr() as usize, piece.len()));
                });
                let wraps = addr.checked_add(len - 1).is_none();
                prop_assert_eq!(wraps, matches!(end, Err(AccessError::Overflow { .. })));
                let mut done = 0;
                for (from, bytes) in reached {
                    for part in 0..bytes as u64 {
                        // One byte of each atom, and the last one.
                        if !(addr + done + part).is_multiple_of(ATOM) && part != 0 {
                            continue;
                        }
                        let byte = addr + done + part;
                        let is = |truth: &Truth| {
                            let atom =
                                (0..3 * SPOT).find(|&n| byte.wrapping_sub(atom_at(n)) < ATOM);
                            atom.and_then(|atom| truth.get(&atom)).is_some_and(|&(gpa, prot)| {
                                prot.allows(wanted(access))
                                    && host(&bench.memory, gpa) + (byte % ATOM) as usize
                                        == from + part as usize
                            })
                        };
                        prop_assert!(truths.iter().any(is), "{byte:#x}");
                    }
                    done += bytes as u64;
                }
                match end {
                    Ok(()) => prop_assert_eq!(done, len),
                    Err(AccessError::Again { addr: at, .. }) => {
                        prop_assert_eq!(at, addr + done);
                        prop_assert!(!holds(tables.last().unwrap(), at, access), "{at:#x}");
                    }
                    Err(other) => prop_assert!(wraps, "{other}"),
                }
            }
        }
        tables.push(table_of(&bench.iotlb));
        if matches!(op, Op::Quiet | Op::Sleep) {
            tables.drain(..tables.len() - 1);
            truths.drain(..truths.len() - 1);
            for token in tokens.drain(..) {
                prop_assert!(bench.shootdown.is_over(token));
            }
        }
    }
    prop_assert!(bench.faults.0.lock().is_empty());
    Ok(overtaken)
}

/// A part of a buffer is in the cache alone, as its entry was removed as a whole when an update
/// overlapped it. Looking up the next part puts that in its place: the prefetch has found both, and
/// the access does not find the first.
#[test]
fn a_prefetch_may_find_what_the_access_behind_it_does_not() {
    let update = |at, count, target, prot| Op::Update { at, count, target, prot };
    let few = [
        update(0, 4, 0, Prot::READ),
        update(68, 12, 4, Prot::RW),
        update(133, 12, 0, Prot::WRITE),
        update(144, 16, 16, Prot::RW),
        update(0, 20, 32, Prot::READ),
        Op::Prefetch { at: 133, len: 12289, access: Access::Write },
    ];
    let many = [
        update(88, 4, 24, Prot::RW),
        update(0, 12, 0, Prot::RW),
        update(88, 8, 24, Prot::RW),
        update(84, 4, 20, Prot::RW),
        Op::Quiet,
        update(68, 20, 0, Prot::READ),
        Op::Prefetch { at: 84, len: 4097, access: Access::Write },
    ];
    for (entries, ops) in [(3, &few[..]), (1000, &many)] {
        assert_eq!(run(entries, ops).unwrap(), 1, "{entries} entries");
        // Not once a quiet point has dropped what the table no longer holds.
        let (last, before) = ops.split_last().unwrap();
        let quiet = [before, &[Op::Quiet, last.clone()]].concat();
        assert_eq!(run(entries, &quiet).unwrap(), 0, "{entries} entries");
    }
}

fn wanted(access: Access) -> Prot {
    match access {
        Access::Read => Prot::READ,
        Access::Write => Prot::WRITE,
        Access::ReadWrite => Prot::RW,
    }
}
