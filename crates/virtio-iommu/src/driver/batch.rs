//! Many mappings at a time: locks are taken once for many requests, and the device sees these in
//! groups.

use ringfence_iommu::{Gather, GuestPhys, Map, Partial, Range, Result};

use super::{ViommuDomain, domain::State, report::Sent, ring::Ring};
use crate::wire::{MapRequest, Request, UnmapRequest};

/// How many requests become visible together: those that share cache lines of the ring, and few
/// enough that the device begins while the others are written.
const TOGETHER: usize = 8;

/// How many requests are put into the ring before other threads have a chance.
const AT_ONCE: usize = 64;

impl ViommuDomain {
    /// As [`map_pages`](ringfence_iommu::Domain::map_pages).
    pub(super) fn send_maps(&self, maps: &[Map<GuestPhys>]) -> Result<(), Partial> {
        self.each(maps, |state, ring, map| {
            let (domain, range, target, flags) = (self.id, map.range(), map.target(), map.prot());
            self.check_kind(range, flags)?;
            state.check(map)?;
            let request = Request::Map(MapRequest { domain, range, phys: target.0, flags });
            let seq = ring.map_or(Some(0), |ring| ring.put(&request, Sent::Map));
            if let Some(seq) = seq {
                state.shadow.insert(range, target, flags, seq);
            }
            Ok(seq.is_some())
        })
    }

    /// As [`unmap_pages`](ringfence_iommu::Domain::unmap_pages).
    pub(super) fn send_unmaps(
        &self,
        ranges: &[Range],
        gather: &mut Gather,
    ) -> Result<u128, Partial> {
        let mut bytes = 0;
        self.each(ranges, |state, ring, &range| {
            state.geometry.check_unmap(range)?;
            if let Some(covered) = state.shadow.covered(range)? {
                let unmap = Request::Unmap(UnmapRequest { domain: self.id, range: covered.hull });
                if ring.is_some_and(|ring| ring.put(&unmap, Sent::Unmap).is_none()) {
                    return Ok(false);
                }
                bytes += covered.bytes;
                state.shadow.remove(covered);
            }
            gather.add(range);
            state.failed_maps.forget(range);
            Ok(true)
        })?;
        Ok(bytes)
    }

    /// Carries out `step` for each item, under the locks: false where the ring has no room, which is made.
    /// The ring is there if the domain is attached.
    #[inline]
    fn each<T>(
        &self,
        items: &[T],
        mut step: impl FnMut(&mut State, Option<&mut Ring>, &T) -> Result<bool>,
    ) -> Result<(), Partial> {
        let mut done = 0;
        while done < items.len() {
            let mut state = self.settled();
            if !self.is_attached() {
                for item in &items[done..] {
                    step(&mut state, None, item).map_err(|error| Partial { done, error })?;
                    done += 1;
                }
                return Ok(());
            }
            let mut ring = self.driver.ring().map_err(|error| Partial { done, error })?;
            let until = items.len().min(done + AT_ONCE);
            while done < until {
                match step(&mut state, Some(&mut ring), &items[done]) {
                    Ok(true) => done += 1,
                    Err(error) => {
                        ring.publish();
                        return Err(Partial { done, error });
                    }
                    Ok(false) => {
                        ring.publish();
                        // The device may have completed requests that no thread has reaped yet.
                        let reaped = self.driver.reap(&mut ring);
                        reaped.map_err(|error| Partial { done, error })?;
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
            if full {
                self.driver.make_room().map_err(|error| Partial { done, error })?;
            }
        }
        Ok(())
    }
}
