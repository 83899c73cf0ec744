//! Many mappings at a time: locks are taken once for many requests, and the device sees these in
//! groups.

use ringfence_iommu::{Gather, GuestPhys, Prot, Range};

use super::{
    ViommuDomain,
    domain::{Meaning, State},
    report::Sent,
    ring::Ring,
};
use crate::wire::{MapFlags, Request};

/// So many requests become visible together: those that share cache lines of the ring, and few enough
/// that the device begins while the others are written.
const TOGETHER: usize = 8;

/// So many requests are put into the ring before other threads have a chance.
const AT_ONCE: usize = 64;

/// What came of one request.
enum Step {
    Sent,
    /// It is not to be sent.
    Refused,
    /// There is no room for it.
    Full,
}

impl ViommuDomain {
    /// As [`map_pages`](ringfence_iommu::Domain::map_pages) for each of `maps` in turn, until one is
    /// refused; how many were not. What is wrong with the next, `map_pages` of it tells.
    ///
    /// As there, [`iotlb_sync_map`](ringfence_iommu::Domain::iotlb_sync_map) tells what the device
    /// refused.
    pub fn map_batch(&self, maps: &[(Range, GuestPhys, Prot)]) -> usize {
        self.each(maps, |state, ring, &(range, target, prot)| {
            if self.check_kind(range, prot).is_err() || state.check(range, target).is_err() {
                return Step::Refused;
            }
            let flags = MapFlags::from_prot(prot);
            let map = Request::Map { domain: self.id, range, phys: target.0, flags };
            let Some(seq) = ring.map_or(Some(0), |ring| ring.put(&map, Sent::Map)) else {
                return Step::Full;
            };
            state.shadow.insert(range, target, prot, seq);
            Step::Sent
        })
    }

    /// As [`unmap_pages`](ringfence_iommu::Domain::unmap_pages) for each of `ranges` in turn, until
    /// one is refused; how many were not. What is wrong with the next, `unmap_pages` of it tells.
    pub fn unmap_batch(&self, ranges: &[Range], gather: &mut Gather) -> usize {
        self.each(ranges, |state, ring, &range| {
            let granule = state.geometry.page_sizes.granule();
            if self.meaning != Meaning::Mapped || !range.is_aligned(granule) {
                return Step::Refused;
            }
            match state.shadow.covered(range) {
                Err(_) => return Step::Refused,
                Ok(None) => {}
                Ok(Some(covered)) => {
                    let unmap = Request::Unmap { domain: self.id, range: covered.hull };
                    if ring.is_some_and(|ring| ring.put(&unmap, Sent::Unmap).is_none()) {
                        return Step::Full;
                    }
                    state.shadow.remove(covered);
                    gather.add(covered.hull);
                }
            }
            state.failed_maps.forget(range);
            Step::Sent
        })
    }

    /// Carries out `step` for each item, under the locks. The ring is there if the domain is attached.
    #[inline]
    fn each<T>(
        &self,
        items: &[T],
        mut step: impl FnMut(&mut State, Option<&mut Ring>, &T) -> Step,
    ) -> usize {
        let mut done = 0;
        while done < items.len() {
            let mut state = self.settled();
            if !self.is_attached() {
                let noted = items[done..]
                    .iter()
                    .take_while(|item| matches!(step(&mut state, None, item), Step::Sent));
                return done + noted.count();
            }
            let Ok(mut ring) = self.driver.waiting.ring() else { return done };
            let until = items.len().min(done + AT_ONCE);
            while done < until {
                match step(&mut state, Some(&mut ring), &items[done]) {
                    Step::Sent => done += 1,
                    Step::Refused => {
                        ring.publish();
                        return done;
                    }
                    Step::Full => {
                        ring.publish();
                        // The device may have made room that nobody has looked for.
                        if self.driver.waiting.reap(&mut ring).is_err() {
                            return done;
                        }
                        if ring.is_full() {
                            break;
                        }
                    }
                }
                if done.is_multiple_of(TOGETHER) {
                    ring.publish();
                }
            }
            ring.publish();
            let full = done < until;
            drop((ring, state));
            if full && self.driver.make_room().is_err() {
                return done;
            }
        }
        done
    }
}
