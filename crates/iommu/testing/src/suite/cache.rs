//! A device's cache.

use ringfence_iommu::{
    Address, Iova, Prot, Range, SoftDomain, shootdown::Reader, table::Translation,
};

/// A device that translates through a [`SoftDomain`] and caches everything it finds until it is
/// invalidated: the worst case.
#[derive(Debug)]
pub struct Cache {
    reader: Reader,
    found: Vec<(Range, Translation)>,
}

impl Cache {
    /// An empty cache; `reader` is one of the domain's readers.
    pub fn new(reader: Reader) -> Cache {
        Cache { reader, found: Vec::new() }
    }

    /// The target of an access, from the cache or from `domain`; `None` if it is refused.
    ///
    /// # Panics
    /// As [`SoftDomain::translate`].
    pub fn access<T: Address>(
        &mut self,
        domain: &SoftDomain<T>,
        iova: Iova,
        prot: Prot,
    ) -> Option<u64> {
        let hit = self.found.iter().find(|(range, _)| range.contains(iova)).map(|(_, hit)| *hit);
        let translation = match hit {
            Some(hit) => hit,
            None => {
                let found = domain.translate(&self.reader, iova)?;
                // Only the address that was accessed: its neighbours may come and go.
                self.found.push((Range::new(iova, iova)?, found));
                found
            }
        };
        translation.prot.allows(prot).then(|| translation.target(iova))
    }

    /// A quiet point: drops what was invalidated.
    pub fn quiet(&mut self) {
        let found = &mut self.found;
        self.reader.poll(|gone| found.retain(|(held, _)| !gone.overlaps(*held)));
    }
}
