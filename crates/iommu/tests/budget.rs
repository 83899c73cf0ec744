//! What several domains may hold together.

use std::{sync::Arc, thread};

use proptest::{prelude::*, test_runner::TestRunner};
use ringfence_iommu::{
    Domain, Error, Gather, Geometry, GuestPhys, Iova, Map, PageSizes, Prot, Range, SoftDomain,
    shootdown::Shootdown,
    table::{Budget, Limits},
};

type Soft = SoftDomain<GuestPhys>;

/// More than the size of a node, which is private to the crate.
const NODE: u64 = 5 << 10;

fn domains(budget: &Arc<Budget>, count: usize) -> Vec<Arc<Soft>> {
    let shootdown = Shootdown::new(1);
    let geometry = Geometry::new(PageSizes::X86, Range::ALL);
    let domain = || Soft::within(geometry.clone(), Arc::clone(budget), Arc::clone(&shootdown));
    (0..count).map(|_| domain()).collect()
}

fn page(n: u64) -> Range {
    Range::from_len(Iova(n << 12), 4096).unwrap()
}

fn map(domain: &Soft, n: u64) -> Result<(), Error> {
    domain.map(Map::new(page(n), GuestPhys(0), Prot::RW))
}

fn unmap(domain: &Soft, range: Range) {
    let mut gather = Gather::new();
    domain.unmap(range, &mut gather).unwrap();
    domain.iotlb_sync(&mut gather).unwrap();
}

fn sum(domains: &[Arc<Soft>], what: fn(&Soft) -> u64) -> u64 {
    domains.iter().map(|domain| what(domain)).sum()
}

#[test]
fn mappings_are_limited_in_all_domains_together_to_the_last_one() {
    let budget = Budget::new(Limits { mappings: 1000, ..Limits::NONE });
    let domains = domains(&budget, 7);
    for n in 0..1000 {
        map(&domains[n as usize % 7], n).unwrap();
    }
    for domain in &domains {
        let full = Error::Full { what: "mappings", used: 1000, limit: 1000 };
        assert_eq!(map(domain, 5000), Err(full));
    }
    unmap(&domains[3], page(3));
    map(&domains[6], 5000).unwrap();
    assert!(map(&domains[6], 5001).is_err());
    drop(domains);
    assert_eq!(budget.taken_mappings(), 0);
}

#[test]
fn what_one_domain_emptied_is_there_for_another() {
    // Lone pages far apart: each costs a node, and more where the paths to them branch.
    let budget = Budget::new(Limits { table_bytes: 64 * NODE, ..Limits::NONE });
    let domains = domains(&budget, 2);
    for (mine, other) in [(0, 1), (1, 0), (0, 1)] {
        let held = (0..).take_while(|&n| map(&domains[mine], n << 20).is_ok()).count() as u64;
        assert!(held > 20);
        assert!(matches!(map(&domains[other], 0), Err(Error::Full { what: "table bytes", .. })));
        assert!(budget.table_bytes() <= 64 * NODE);
        // One by one, so that the emptied nodes stay where they are.
        (0..held).for_each(|n| unmap(&domains[mine], page(n << 20)));
        assert!(domains[mine].table_bytes() > 20 * 4096);
    }
    drop(domains);
    assert_eq!(budget.table_bytes(), 0);
}

#[test]
fn threads_that_map_in_domains_of_their_own_never_pass_it_together() {
    let limits = Limits { table_bytes: 300 * NODE, mappings: 3000 };
    let budget = Budget::new(limits);
    let domains = domains(&budget, 3);
    let seed = TestRunner::default().rng().next_u64();
    thread::scope(|scope| {
        for (number, domain) in domains.iter().enumerate() {
            let budget = &budget;
            scope.spawn(move || {
                let mut state = seed.wrapping_add(number as u64);
                for step in 0..20_000_u64 {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                    let n = (state >> 33) % 3000;
                    // Half of them lie far apart.
                    let n = if n.is_multiple_of(2) { n << 18 } else { n };
                    match step % 5000 {
                        4999 => unmap(domain, Range::ALL),
                        step if step.is_multiple_of(3) => unmap(domain, page(n)),
                        _ => _ = map(domain, n),
                    }
                    assert!(budget.table_bytes() <= limits.table_bytes);
                    assert!(budget.taken_mappings() <= limits.mappings);
                    assert!(domain.mappings() <= limits.mappings);
                }
            });
        }
    });
    assert_eq!(budget.table_bytes(), sum(&domains, Soft::table_bytes));
    assert!(budget.taken_mappings() >= sum(&domains, Soft::mappings));
}

proptest! {
    #[test]
    fn the_books_are_right_after_every_step(
        steps in proptest::collection::vec((0usize..4, 0u64..40, 0u8..8), 1..200),
    ) {
        let limits = Limits { table_bytes: 12 * NODE, mappings: 20 };
        let budget = Budget::new(limits);
        let domains = domains(&budget, 4);
        for (at, n, what) in steps {
            let n = if what.is_multiple_of(2) { n } else { n << 27 };
            let before = (sum(&domains, Soft::mappings), domains[at].iova_to_phys(Iova(n << 12)));
            match what {
                0..=4 => match map(&domains[at], n) {
                    Ok(()) => prop_assert!(before.1.is_none() && before.0 < 20),
                    Err(Error::Full { what: "mappings", .. }) => prop_assert_eq!(before.0, 20),
                    Err(Error::Full { .. }) => {}
                    Err(error) => prop_assert!(before.1.is_some(), "{}", error),
                },
                5 => unmap(&domains[at], Range::ALL),
                _ => unmap(&domains[at], page(n)),
            }
            prop_assert!(budget.table_bytes() <= limits.table_bytes);
            prop_assert_eq!(budget.table_bytes(), sum(&domains, Soft::table_bytes));
            prop_assert!(budget.taken_mappings() <= limits.mappings);
            prop_assert!(budget.taken_mappings() >= sum(&domains, Soft::mappings));
        }
    }
}
