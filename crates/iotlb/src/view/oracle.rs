//! Views against a naive oracle.

use std::{collections::BTreeMap, sync::Arc};

use proptest::prelude::*;
use ringfence_iommu::{Domain, GuestPhys, Map, Prot};
use ringfence_mem::{Access, AccessError, PAGE_SIZE, Translate, Window};

use super::prot_of;
use super::tests::{
    Bench, PAGE, REGIONS, bench, domain, host, is_over, joined, memory, pages, unmap,
};
use crate::Binding;

/// The I/O virtual pages that the property test plays with: around the border of a cache's block,
/// others that share its slots, and the last ones there are.
const SPOTS: [u64; 3] = [0x100 - 8, 0x300 - 8, (u64::MAX >> 12) - 15];
const SPOT: u64 = 16;

fn iova_page(n: u64) -> u64 {
    SPOTS[(n / SPOT) as usize] + n % SPOT
}

/// Guest-physical pages: all regions, the gap, and some that lie before.
fn gpa_page(n: u64) -> u64 {
    if n < 24 { 12 + n } else { (u64::MAX >> 12) - 7 + (n - 24) }
}

#[derive(Clone, Debug)]
enum Op {
    Map { domain: usize, page: u64, count: u64, target: u64, prot: Prot },
    Unmap { domain: usize, pick: usize },
    Bind(usize),
    Access { page: u64, offset: u64, len: u64, access: Access },
    Window { page: u64, offset: u64, len: u64, access: Access },
    Sleep,
    NewMemory,
}

fn op() -> impl Strategy<Value = Op> {
    let prot = prop_oneof![Just(Prot::READ), Just(Prot::WRITE), Just(Prot::RW), Just(Prot::RW)];
    let access = || prop_oneof![Just(Access::Read), Just(Access::Write), Just(Access::ReadWrite)];
    let reach = || (0..3 * SPOT, 0..PAGE, prop_oneof![1..64u64, 1..5 * PAGE], access());
    prop_oneof![
        4 => (0..2usize, 0..3 * SPOT, 1..6u64, 0..32u64, prot).prop_map(
            |(domain, page, count, target, prot)| Op::Map { domain, page, count, target, prot }
        ),
        2 => (0..2usize, any::<usize>()).prop_map(|(domain, pick)| Op::Unmap { domain, pick }),
        1 => (0..4usize).prop_map(Op::Bind),
        8 => reach()
            .prop_map(|(page, offset, len, access)| Op::Access { page, offset, len, access }),
        2 => reach()
            .prop_map(|(page, offset, len, access)| Op::Window { page, offset, len, access }),
        1 => Just(Op::Sleep),
        1 => Just(Op::NewMemory),
    ]
}

/// What a view should do, in the simplest words.
#[derive(Default)]
struct Oracle {
    /// By page: where it leads, and what is allowed.
    domains: [BTreeMap<u64, (u64, Prot)>; 2],
    mappings: [Vec<(u64, u64)>; 2],
    /// Blocked, bypass, or one of the domains.
    bound: usize,
}

impl Oracle {
    /// The guest-physical address, or why there is none.
    fn translate(&self, addr: u64, access: Access) -> Result<u64, AccessError> {
        let gpa = match self.bound {
            0 => return Err(AccessError::Unmapped { addr, access }),
            1 => addr,
            n => match self.domains[n - 2].get(&(addr >> 12)) {
                None => return Err(AccessError::Unmapped { addr, access }),
                Some(&(_, prot)) if !prot.contains(prot_of(access)) => {
                    return Err(AccessError::NotPermitted { addr, access });
                }
                Some(&(target, _)) => target << 12 | addr & (PAGE - 1),
            },
        };
        let inside = REGIONS.iter().any(|&(first, count)| (gpa >> 12).wrapping_sub(first) < count);
        if inside { Ok(gpa) } else { Err(AccessError::OutsideMemory { addr, access }) }
    }

    /// The guest-physical address of each page's part, and how it ends.
    fn walk(&self, addr: u64, len: u64, access: Access) -> (Vec<(u64, u64)>, Option<AccessError>) {
        let mut parts = Vec::new();
        let Some(last) = addr.checked_add(len - 1) else {
            return (parts, Some(AccessError::Overflow { addr, len }));
        };
        let mut at = addr;
        loop {
            let end = last.min(at | (PAGE - 1));
            match self.translate(at, access) {
                Ok(gpa) => parts.push((gpa, end - at + 1)),
                Err(error) => return (parts, Some(error)),
            }
            if end == last {
                return (parts, None);
            }
            at = end + 1;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]
    #[test]
    fn a_view_reaches_what_the_oracle_predicts_and_nothing_else(
        ops in proptest::collection::vec(op(), 1..80)
    ) {
        let Bench { shootdown, endpoint, domain: first, mut memory, mut view, faults } = bench();
        let domains = [first, domain(&shootdown)];
        let mut oracle = Oracle { bound: 2, ..Oracle::default() };
        let mut windows: Vec<(u64, u64, Access, Window)> = Vec::new();
        for op in ops {
            match op {
                Op::Map { domain, page, count, target, prot } => {
                    // Not across the borders of a spot or of the targets.
                    let count = count.min(SPOT - page % SPOT).min(32 - target);
                    let count = if target < 24 { count.min(24 - target) } else { count };
                    let (iova, gpa) = (iova_page(page), gpa_page(target));
                    let mapped = domains[domain].map(Map::new(pages(iova << 12, count), GuestPhys(gpa << 12), prot));
                    let table = &mut oracle.domains[domain];
                    prop_assert_eq!(mapped.is_ok(), table.range(iova..=iova + (count - 1)).next().is_none());
                    if mapped.is_ok() {
                        table.extend((0..count).map(|n| (iova + n, (gpa + n, prot))));
                        oracle.mappings[domain].push((iova, count));
                    }
                }
                Op::Unmap { domain, pick } => {
                    let mappings = &mut oracle.mappings[domain];
                    if mappings.is_empty() {
                        continue;
                    }
                    let (iova, count) = mappings.swap_remove(pick % mappings.len());
                    let table = &mut oracle.domains[domain];
                    table.retain(|page, _| page.wrapping_sub(iova) >= count);
                    let token = unmap(&domains[domain], iova << 12, count);
                    view.quiet();
                    prop_assert!(is_over(&domains[domain], token));
                }
                Op::Bind(to) => {
                    oracle.bound = to;
                    let token = endpoint.bind(match to {
                        0 => Binding::Blocked,
                        1 => Binding::Bypass,
                        n => Binding::Domain(Arc::clone(&domains[n - 2])),
                    });
                    view.quiet();
                    prop_assert!(shootdown.is_over(token));
                }
                Op::Access { page, offset, len, access } => {
                    let addr = iova_page(page) << 12 | offset;
                    let (parts, error) = oracle.walk(addr, len, access);
                    let reported = faults.0.lock().len();
                    // Before the access, so that the run is new at times.
                    let run = view.around(addr, access);
                    prop_assert_eq!(run.is_some(), oracle.translate(addr, access).is_ok());
                    if let Some((first, run)) = run {
                        prop_assert!(addr.wrapping_sub(first) < run.len() as u64);
                        for offset in (0..run.len()).step_by(PAGE_SIZE).chain([run.len() - 1]) {
                            let gpa = oracle.translate(first + offset as u64, access);
                            let at = run.as_ptr() as usize + offset;
                            prop_assert_eq!(gpa.map(|gpa| host(&memory, gpa)), Ok(at));
                        }
                    }
                    let mut visited = Vec::new();
                    let result = view.slices(addr, len, access, |piece| {
                        let at = piece.as_ptr() as usize;
                        visited.extend([(at, at + piece.len())]);
                    });
                    prop_assert_eq!(result.err(), error);
                    let refused = error.is_some_and(|e| !matches!(e, AccessError::Overflow { .. }));
                    prop_assert_eq!(faults.0.lock().len() - reported, usize::from(refused));
                    // Both as maximal runs of this process's addresses.
                    let expected = parts.iter().map(|&(gpa, len)| {
                        let at = host(&memory, gpa);
                        (at, at + len as usize)
                    });
                    prop_assert_eq!(joined(visited.into_iter()), joined(expected));
                }
                Op::Window { page, offset, len, access } => {
                    let addr = iova_page(page) << 12 | offset;
                    let (parts, error) = oracle.walk(addr, len, access);
                    let runs = joined(parts.iter().map(|&(gpa, len)| {
                        let at = host(&memory, gpa);
                        (at, at + len as usize)
                    }));
                    match view.window(addr, len, access) {
                        Ok(window) => {
                            let at = window.slice().as_ptr() as usize;
                            prop_assert_eq!(runs, [(at, at + window.len())]);
                            prop_assert!(error.is_none() && window.len() as u64 == len);
                            windows.push((addr, len, access, window));
                        }
                        Err(AccessError::Fragmented { .. }) => prop_assert!(runs.len() > 1),
                        Err(other) => prop_assert_eq!(Some(other), error),
                    }
                }
                Op::Sleep => {
                    view.offline();
                    view.online();
                }
                Op::NewMemory => {
                    let old = std::mem::replace(&mut memory, self::memory());
                    view.set_memory(Arc::clone(&memory));
                    // Nothing but windows keeps it.
                    windows.retain(|(.., window)| window.is_valid());
                    prop_assert!(windows.is_empty());
                    prop_assert_eq!(Arc::strong_count(&old), 1);
                }
            }
            // A window that is valid leads where its addresses do.
            for (addr, len, access, window) in windows.iter().filter(|(.., w)| w.is_valid()) {
                let (parts, error) = oracle.walk(*addr, *len, *access);
                prop_assert_eq!(error, None);
                let at = window.slice().as_ptr() as usize;
                let runs = joined(parts.iter().map(|&(gpa, len)| {
                    let at = host(&memory, gpa);
                    (at, at + len as usize)
                }));
                prop_assert_eq!(runs, [(at, at + window.len())]);
            }
        }
    }
}
