//! A device's cache.

use alloc::vec::Vec;

use crate::{
    Address, Iova, Prot, Range, SoftDomain,
    shootdown::{Invalidation, Reader},
    table::Translation,
};

/// A device that translates by a [`SoftDomain`], and keeps whatever it found until it is invalidated: the
/// least friendly one that there may be.
#[derive(Debug)]
pub struct Cache {
    reader: Reader,
    found: Vec<(Range, Translation)>,
}

impl Cache {
    /// An empty one; `reader` is one of the domain's readers.
    pub fn new(reader: Reader) -> Cache {
        Cache { reader, found: Vec::new() }
    }

    /// Where an access leads, by the cache or by `domain`.
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
                // No more than was looked for: what lies around it may come and go.
                self.found.push((Range::new(iova, iova)?, found));
                found
            }
        };
        translation.prot.allows(prot).then(|| translation.target(iova))
    }

    /// A quiet point: whatever was invalidated is forgotten.
    pub fn quiet(&mut self) {
        let found = &mut self.found;
        self.reader.poll(|gone| match gone {
            Invalidation::All => found.clear(),
            Invalidation::Range(range) => found.retain(|(held, _)| !range.overlaps(*held)),
        });
    }
}
