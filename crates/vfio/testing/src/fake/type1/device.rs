//! What a device of the container reaches.

use ringfence_iommu::{HostAddr, Range};
use rustix::io::Errno;

use super::{
    super::copy::{REMEMBERED, Refused, load, store},
    State, Type1,
    mapping::Mapping,
};
use ringfence_vfio::kernel::{Answer, MapFlags};

impl Type1 {
    /// What a device's access at `iova` reaches: the address in this process, and for how many bytes
    /// the translation holds. `None`: it would be refused.
    ///
    /// The address is good until the mapping goes; [`dma_read`](Self::dma_read) and
    /// [`dma_write`](Self::dma_write) keep it until they are done.
    pub fn translate(&self, iova: u64, write: bool) -> Option<(HostAddr, u64)> {
        self.state.lock().translate(iova, write)
    }

    /// A device reads memory: 8 bytes at a time where they are aligned, in ascending order.
    ///
    /// # Errors
    /// The access at which it was refused; what lies before has been read.
    pub fn dma_read(&self, iova: u64, into: &mut [u8]) -> Result<(), Refused> {
        let mut state = self.state.lock();
        state.pieces(iova, into.len(), false, |at, piece, _| {
            // SAFETY: `map` was promised that mapped memory is there and the devices' until it is
            // unmapped, and it cannot be while the state is locked.
            unsafe { load(at, &mut into[piece]) };
        })
    }

    /// A device writes memory: 8 bytes at a time where they are aligned, in ascending order, as others
    /// see it too. Marks what it writes as dirty while that is tracked.
    ///
    /// # Errors
    /// The access at which it was refused; what lies before has been written.
    pub fn dma_write(&self, iova: u64, bytes: &[u8]) -> Result<(), Refused> {
        let mut state = self.state.lock();
        state.pieces(iova, bytes.len(), true, |at, piece, _| {
            // SAFETY: as in `dma_read`; that devices write it was promised too, by the flags.
            unsafe { store(at, &bytes[piece]) };
        })
    }

    /// Accesses that were refused since this was asked last, the first 1,024 of them.
    pub fn refused(&self) -> Vec<Refused> {
        std::mem::take(&mut self.state.lock().refused).into()
    }

    /// An emulated device reads memory through the kernel (`vfio_dma_rw`).
    ///
    /// # Errors
    /// EBUSY while an address is marked as gone (rule L59), EINVAL where nothing is mapped, EPERM
    /// without READ.
    pub fn rw_read(&self, iova: u64, into: &mut [u8]) -> Answer<()> {
        self.state.lock().kernel_pieces(iova, into.len(), false, |at, piece, _| {
            // SAFETY: as in `dma_read`.
            unsafe { load(at, &mut into[piece]) };
        })
    }

    /// An emulated device writes memory through the kernel (`vfio_dma_rw`), which marks it as dirty.
    ///
    /// # Errors
    /// As [`rw_read`](Self::rw_read); EPERM without READ and WRITE.
    pub fn rw_write(&self, iova: u64, bytes: &[u8]) -> Answer<()> {
        self.state.lock().kernel_pieces(iova, bytes.len(), true, |at, piece, _| {
            // SAFETY: as in `dma_write`.
            unsafe { store(at, &bytes[piece]) };
        })
    }
}

/// A part of a transfer: which of its bytes.
type Piece = std::ops::Range<usize>;

impl State {
    fn translate(&self, iova: u64, write: bool) -> Option<(HostAddr, u64)> {
        let run = self.domains.first()?.table.at(iova)?;
        let wanted = if write { MapFlags::WRITE } else { MapFlags::READ };
        // A real device reaches the pages of an address that is gone; here only the address is known.
        let mapping = self.at(iova).filter(|mapping| !mapping.invalid)?;
        if !run.prot.contains(wanted) || !self.machine.memory.has_bytes() {
            return None;
        }
        let bytes = (run.range.last().0 - iova).saturating_add(1);
        Some((HostAddr(mapping.vaddr(iova)), bytes))
    }

    /// Goes through the pieces of a device's access.
    fn pieces(
        &mut self,
        iova: u64,
        len: usize,
        write: bool,
        mut each: impl FnMut(HostAddr, Piece, u64),
    ) -> Result<(), Refused> {
        let mut done = 0;
        while done < len {
            let at = iova.checked_add(done as u64);
            let Some((addr, bytes)) = at.and_then(|at| self.translate(at, write)) else {
                let refused = Refused { iova: iova.wrapping_add(done as u64), write };
                if self.refused.len() < REMEMBERED {
                    self.refused.push_back(refused);
                }
                return Err(refused);
            };
            let at = iova + done as u64;
            let count = usize::try_from(bytes).map_or(len - done, |bytes| bytes.min(len - done));
            each(addr, done..done + count, at);
            if write {
                self.mark(at, count as u64);
            }
            done += count;
        }
        Ok(())
    }

    /// Goes through the pieces of an access by the kernel.
    fn kernel_pieces(
        &mut self,
        iova: u64,
        len: usize,
        write: bool,
        mut each: impl FnMut(HostAddr, Piece, u64),
    ) -> Answer<()> {
        if self.invalid > 0 {
            return Err(Errno::BUSY);
        }
        let mut done = 0;
        while done < len {
            let at = iova.checked_add(done as u64).ok_or(Errno::INVAL)?;
            let mapping = self.at(at).ok_or(Errno::INVAL)?;
            let wanted = MapFlags::READ | if write { MapFlags::WRITE } else { MapFlags::READ };
            if !mapping.prot.contains(wanted) {
                return Err(Errno::PERM);
            }
            if !self.machine.memory.has_bytes() {
                return Err(Errno::FAULT);
            }
            let (addr, rest) = (mapping.vaddr(at), mapping.range.last().0 - at);
            let count = usize::try_from(rest).map_or(len - done, |rest| (len - done).min(rest + 1));
            each(HostAddr(addr), done..done + count, at);
            if write {
                self.mark(at, count as u64);
            }
            done += count;
        }
        Ok(())
    }

    /// Marks what was written to, all of it in one mapping.
    fn mark(&mut self, iova: u64, len: u64) {
        let Some(written) = Range::from_len(ringfence_iommu::Iova(iova), len) else { return };
        let first = self.at(iova).map(|mapping| mapping.range.first().0);
        let mapping = first.and_then(|first| self.mappings.get_mut(&first));
        let Some(Mapping { range, dirty: Some(dirty), .. }) = mapping else { return };
        let (from, to) = (iova - range.first().0, written.last().0 - range.first().0);
        for page in from / super::PAGE..=to / super::PAGE {
            dirty.mark(page * super::PAGE);
        }
    }
}
