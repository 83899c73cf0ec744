//! Which entry makes room when an IOTLB is full.

use ringfence_iommu::{GuestPhys, Iova, Range, SoftDomain};

/// The beginnings of entries, for picking one at random; some may be gone.
pub(crate) struct Victims {
    /// Empty until something is evicted, and once most of them were gone.
    firsts: Vec<Iova>,
    random: u64,
}

impl Victims {
    pub(crate) fn new(seed: u64) -> Victims {
        Victims { firsts: Vec::new(), random: seed }
    }

    /// An entry that begins with `first` was put in.
    pub(crate) fn add(&mut self, first: Iova, domain: &SoftDomain<GuestPhys>) {
        if self.firsts.is_empty() {
            return;
        }
        if self.firsts.len() as u64 > 2 * domain.mappings() + 64 {
            // Most of them are gone, or duplicates: the next eviction lists them anew.
            self.firsts = Vec::new();
        } else {
            self.firsts.push(first);
        }
    }

    /// The index of a random entry; there must be one.
    fn random(&mut self) -> usize {
        // SplitMix64; seeded so that a guest cannot predict which entry is evicted.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(mixed ^ (mixed >> 31)) * self.firsts.len() as u128) >> 64) as usize
    }

    /// One of those that are still there; it counts as gone from now on.
    pub(crate) fn pick(&mut self, domain: &SoftDomain<GuestPhys>) -> Option<Range> {
        loop {
            if self.firsts.is_empty() {
                domain.for_each(|mapping| self.firsts.push(mapping.range.first()));
            }
            if self.firsts.is_empty() {
                return None;
            }
            let at = self.random();
            let first = self.firsts.swap_remove(at);
            if let Some(mapping) = domain.mapping(first) {
                return Some(mapping.range);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use ringfence_iommu::{
        Domain, Gather, Geometry, Map, PageSizes, Prot, shootdown::Shootdown, table::Limits,
    };
    use std::{collections::BTreeSet, sync::Arc};

    fn domain() -> Arc<SoftDomain<GuestPhys>> {
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        SoftDomain::new(geometry, Limits::NONE, Shootdown::new(1))
    }

    fn page(number: u64) -> Range {
        Range::from_len(Iova(number << 12), 4096).unwrap()
    }

    fn add(victims: &mut Victims, domain: &SoftDomain<GuestPhys>, number: u64) {
        domain.map(Map::new(page(number), GuestPhys(0), Prot::RW)).unwrap();
        victims.add(page(number).first(), domain);
    }

    #[test]
    fn every_entry_can_be_picked_and_those_that_are_gone_cannot() {
        let (domain, mut victims) = (domain(), Victims::new(1));
        for number in 0..10_000 {
            add(&mut victims, &domain, number);
            if number >= 100 {
                domain.unmap(page(number - 100), &mut Gather::new()).unwrap();
            }
            // From here on they are listed.
            match number % 1000 {
                500 => assert!(victims.pick(&domain).is_some()),
                501 => assert_eq!(victims.firsts.last(), Some(&page(number).first())),
                _ => {}
            }
            assert!(victims.firsts.len() < 1000, "{}", victims.firsts.len());
        }
        let mut picked = BTreeSet::new();
        while let Some(range) = victims.pick(&domain) {
            domain.unmap(range, &mut Gather::new()).unwrap();
            picked.insert(range.first().0 >> 12);
        }
        assert_eq!(picked, (9_900..10_000).collect());
    }

    #[test]
    fn one_that_comes_and_goes_again_and_again_takes_no_more_room() {
        let (domain, mut victims) = (domain(), Victims::new(1));
        add(&mut victims, &domain, 8);
        for number in 0..10_000 {
            add(&mut victims, &domain, 7);
            if number == 10 {
                assert!(victims.pick(&domain).is_some());
            }
            assert!(victims.firsts.len() < 1000, "{}", victims.firsts.len());
            domain.unmap(page(7), &mut Gather::new()).unwrap();
        }
        domain.unmap(page(8), &mut Gather::new()).unwrap();
        assert_eq!(victims.pick(&domain), None);
    }
}
