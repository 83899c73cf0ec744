//! The software controller's way to memory: through a domain's translation.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use ringfence_iommu::{HostAddr, Iova, Prot, SoftDomain, shootdown::Reader};

/// A device's way to memory.
pub(crate) trait Bus: Send {
    /// Reads; returns whether all of it is allowed.
    fn read(&mut self, iova: u64, into: &mut [u8]) -> bool;
    /// Writes; returns whether all of it is allowed. Four bytes are one store, after all earlier
    /// ones.
    fn write(&mut self, iova: u64, from: &[u8]) -> bool;
    /// A quiet point: earlier translations are no longer used.
    fn quiet(&mut self);
    /// There is nothing to do for a while.
    fn rest(&mut self);
    /// How many mappings there are.
    fn mapped(&self) -> u64;
}

/// Through a domain in this process.
pub(crate) struct SoftBus {
    domain: Arc<SoftDomain<HostAddr>>,
    reader: Reader,
    /// Whether an unmapped address is one of the process, as where nothing is translated.
    bypass: bool,
}

impl SoftBus {
    pub(crate) fn new(domain: &Arc<SoftDomain<HostAddr>>, bypass: bool) -> SoftBus {
        let reader = domain.shootdown().reader().expect("room for a reader");
        SoftBus { domain: Arc::clone(domain), reader, bypass }
    }

    /// Calls `each` for each piece of the range: its address, and its offset and length in the
    /// range.
    fn pieces(
        &mut self,
        iova: u64,
        len: usize,
        prot: Prot,
        mut each: impl FnMut(*mut u8, usize, usize),
    ) -> bool {
        let mut at = 0;
        while at < len {
            let here = Iova(iova + at as u64);
            let (target, room) = match self.domain.translate(&self.reader, here) {
                Some(found) if found.prot.contains(prot) => {
                    (found.target(here), (found.range.last().0 - here.0).saturating_add(1))
                }
                None if self.bypass => (here.0, u64::MAX),
                _ => return false,
            };
            let part = room.min((len - at) as u64) as usize;
            each(std::ptr::with_exposed_provenance_mut(target as usize), at, part);
            at += part;
        }
        true
    }
}

impl Bus for SoftBus {
    fn read(&mut self, iova: u64, into: &mut [u8]) -> bool {
        let to = into.as_mut_ptr();
        self.pieces(iova, into.len(), Prot::READ, |from, at, len| {
            // SAFETY: what is mapped is memory of a buffer that the device owns, and stays so until
            // this reader's next quiet point; `at` and `len` lie in `into`.
            unsafe { std::ptr::copy_nonoverlapping(from, to.add(at), len) }
        })
    }

    fn write(&mut self, iova: u64, from: &[u8]) -> bool {
        self.pieces(iova, from.len(), Prot::WRITE, |to, at, len| {
            if let Ok(word) = from.try_into() {
                // SAFETY: as below; a word that lies in one piece is aligned.
                unsafe { AtomicU32::from_ptr(to.cast()) }
                    .store(u32::from_ne_bytes(word), Ordering::Release);
                return;
            }
            // SAFETY: as in `read`, the other way round.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().add(at), to, len) }
        })
    }

    fn quiet(&mut self) {
        self.reader.online(|_| {});
        self.reader.poll(|_| {});
    }

    fn rest(&mut self) {
        self.reader.offline();
    }

    fn mapped(&self) -> u64 {
        self.domain.mappings()
    }
}
