//! How a view finds a translation: in its cache, or in the table.

use std::{cell::RefCell, ptr::NonNull};

use ringfence_iommu::{FaultReason, Iova, Prot, Range, table::Translation};
use ringfence_mem::{Access, AccessError, HostSlice};

use super::{View, prot_of};
use crate::{
    Binding, Miss,
    cache::{Entry, Here, offset},
    misses::PAGE,
};

/// A region of memory, by guest-physical address.
#[derive(Clone, Copy)]
pub(super) struct Region {
    first: u64,
    extent: u64,
    base: NonNull<u8>,
}

impl View {
    /// The translation of an address; notes what is missing.
    #[inline]
    pub(super) fn find(&self, addr: u64, access: Access) -> Result<Here, AccessError> {
        self.lookup(addr, access).inspect_err(|error| {
            if matches!(error, AccessError::Again { .. }) {
                note(&self.wanted, addr, access);
            }
        })
    }

    #[inline(always)]
    fn lookup(&self, addr: u64, access: Access) -> Result<Here, AccessError> {
        match self.cache.here(addr, prot_of(access)) {
            Some(here) => {
                self.hits.set(self.hits.get() + 1);
                Ok(here)
            }
            None => self.walk(addr, access).map(|entry| entry.here(addr)),
        }
    }

    #[inline(never)]
    pub(super) fn walk(&self, addr: u64, access: Access) -> Result<Entry, AccessError> {
        assert!(self.reader.is_online(), "access to {addr:#x} through a view that is offline");
        self.misses.set(self.misses.get() + 1);
        let iova = Iova(addr);
        let found = match &self.binding {
            Binding::Iotlb(iotlb) => {
                match iotlb.domain.translate_run(&self.reader, iova, self.cache.search(addr)) {
                    Some(found) if found.prot.allows(prot_of(access)) => Some(found),
                    found => {
                        let missing = (iova, prot_of(access));
                        if !iotlb.is_refused(missing, self.since.get(), &self.waiter) {
                            return Err(AccessError::Again { addr, access });
                        }
                        found
                    }
                }
            }
            Binding::Domain(domain) => {
                domain.translate_run(&self.reader, iova, self.cache.search(addr))
            }
            Binding::Bypass => Some(Translation { range: Range::ALL, delta: 0, prot: Prot::RW }),
            Binding::Blocked => {
                self.fault(FaultReason::NoDomain, addr, access);
                return Err(AccessError::Unmapped { addr, access });
            }
        };
        let Some(Translation { range, delta, prot }) = found else {
            self.fault(FaultReason::Mapping, addr, access);
            return Err(AccessError::Unmapped { addr, access });
        };
        if !prot.allows(prot_of(access)) {
            self.fault(FaultReason::Mapping, addr, access);
            return Err(AccessError::NotPermitted { addr, access });
        }
        let gpa = addr.wrapping_add(delta);
        let Some(region) = self.region(gpa) else {
            self.fault(FaultReason::Unknown, addr, access);
            return Err(AccessError::OutsideMemory { addr, access });
        };
        // As far down and up as both reach, the translation and the region.
        let below = (addr - range.first().0).min(gpa - region.first);
        let above = (range.last().0 - addr).min(region.extent - (gpa - region.first));
        let host = offset(region.base, gpa - region.first - below);
        let entry = Entry::new(addr - below, below + above, host, prot);
        self.cache.put(addr, entry);
        Ok(entry)
    }

    /// The region of memory with `gpa`.
    #[inline]
    fn region(&self, gpa: u64) -> Option<Region> {
        match self.region.get() {
            Some(region) if gpa.wrapping_sub(region.first) <= region.extent => Some(region),
            _ => self.find_region(gpa),
        }
    }

    fn find_region(&self, gpa: u64) -> Option<Region> {
        let number = self.memory.find_gpa(gpa)?.region;
        let &ringfence_mem::Region { gpa: first, size, .. } = self.memory.regions().nth(number)?;
        let base = NonNull::new(self.memory.find_gpa(first)?.slice.as_ptr())?;
        let region = Region { first, extent: size - 1, base };
        self.region.set(Some(region));
        Some(region)
    }

    /// Looks up all that an access will need, so that its misses are sent together, with those of
    /// other prefetches such as of a chain's other buffers. True if nothing is missing: each
    /// address was found, up to the first that is a fault, which is left to the access itself.
    ///
    /// This does not guarantee that the access finds them too: it may return
    /// [`Again`](AccessError::Again) after all, and must then be retried later, as without the
    /// prefetch. Whatever left the table since the last [quiet point](Self::quiet) (an entry that
    /// was invalidated, replaced or evicted) may still be in the cache when it is looked up here,
    /// and lose its place there to another part of the same access before the access is made. Right
    /// after a quiet point, and while the table stays as it is, the access finds all that was found
    /// here.
    ///
    /// Misses beyond the first 256 are sent once these have arrived.
    pub fn prefetch(&self, addr: u64, len: u64, access: Access) -> bool {
        let Some(last) = len.checked_sub(1).and_then(|more| addr.checked_add(more)) else {
            return true;
        };
        let (mut at, mut ready) = (addr, true);
        self.silently(|| {
            loop {
                let next = match self.lookup(at, access) {
                    // The sum is the entry's last address.
                    Ok(here) => (at + here.more).checked_add(1),
                    Err(AccessError::Again { .. }) => {
                        ready = false;
                        if !note(&self.wanted, at, access) {
                            return;
                        }
                        (at | (PAGE - 1)).checked_add(1)
                    }
                    Err(_) => return,
                };
                match next {
                    Some(next) if next <= last => at = next,
                    _ => return,
                }
            }
        });
        ready
    }

    /// The pieces of an access that begins `here` and leaves that entry. Pieces that are contiguous in
    /// this process are merged.
    pub(super) fn pieces<F>(
        &self,
        mut here: Here,
        mut at: u64,
        mut left: u64,
        access: Access,
        mut each: F,
    ) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        let mut held: Option<(NonNull<u8>, usize)> = None;
        // SAFETY: as in `slices`; what was joined are such bytes, one after the other.
        let mut give = |(base, len)| each(unsafe { HostSlice::new(base, len) });
        let result = loop {
            let more = left.min(here.more);
            let (base, bytes) = (here.base, (more as usize).saturating_add(1));
            held = Some(match held {
                Some((first, len)) if first.as_ptr().wrapping_add(len) == base.as_ptr() => {
                    (first, len.saturating_add(bytes))
                }
                other => {
                    other.map(&mut give);
                    (base, bytes)
                }
            });
            if more == left {
                break Ok(());
            }
            left -= more + 1;
            // Cannot wrap: the access does not.
            at += more + 1;
            match self.find(at, access) {
                Ok(found) => here = found,
                Err(error) => break Err(error),
            }
        };
        held.map(&mut give);
        result
    }
}

/// The most misses that are gathered before they are sent.
const BATCH: usize = 256;

/// How many of the last misses are searched for a duplicate before one is added.
const NEAR: usize = 4;

/// Notes what is missing; false if there is no room for it now.
#[cold]
fn note(misses: &RefCell<Vec<Miss>>, addr: u64, access: Access) -> bool {
    let miss = Miss { iova: Iova(addr), access: prot_of(access), again: None };
    let mut misses = misses.borrow_mut();
    let room = misses.len() < BATCH;
    // A duplicate further back is found when they are sent; here it only takes room.
    if room && !misses.iter().rev().take(NEAR).any(|other| other.is_as(miss.iova, miss.access)) {
        misses.push(miss);
    }
    room
}
