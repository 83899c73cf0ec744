//! Which entry makes room when an IOTLB is full.

use ringfence_iommu::{GuestPhys, Iova, Range, SoftDomain};

/// The beginnings of entries, for picking one at random; some may be gone.
pub(crate) struct Victims {
    firsts: Vec<Iova>,
    random: u64,
}

impl Victims {
    pub(crate) fn new(seed: u64) -> Victims {
        Victims { firsts: Vec::new(), random: seed }
    }

    /// An entry that begins with `first` was put in.
    pub(crate) fn add(&mut self, first: Iova, domain: &SoftDomain<GuestPhys>) {
        if self.firsts.len() as u64 > 2 * domain.mappings() + 64 {
            self.firsts.sort_unstable_by_key(|first| first.0);
            self.firsts.dedup();
            self.firsts.retain(|&first| domain.mapping(first).is_some());
        }
        self.firsts.push(first);
    }

    /// One of those that are still there; it counts as gone from now on.
    pub(crate) fn pick(&mut self, domain: &SoftDomain<GuestPhys>) -> Option<Range> {
        while !self.firsts.is_empty() {
            // SplitMix64; seeded so that nobody can tell which entry goes.
            self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = self.random;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let at =
                ((u128::from(mixed ^ (mixed >> 31)) * self.firsts.len() as u128) >> 64) as usize;
            let first = self.firsts.swap_remove(at);
            if let Some(mapping) = domain.mapping(first) {
                return Some(mapping.range);
            }
        }
        None
    }
}
