//! Accesses of the container's devices.

use ringfence_iommu::{HostAddr, Range};
use rustix::io::Errno;

use super::{
    super::copy::{REMEMBERED, Refused, load, store},
    State, Type1,
    mapping::Mapping,
};
use ringfence_vfio::kernel::{KernelResult, MapFlags};

impl Type1 {
    /// The target of a device's access at `iova`: the address in this process, and for how many
    /// bytes the translation holds. `None`: the access would be refused.
    ///
    /// The address is valid until the mapping is removed; [`dma_read`](Self::dma_read) and
    /// [`dma_write`](Self::dma_write) keep the mapping until they are done.
    pub fn translate(&self, iova: u64, write: bool) -> Option<(HostAddr, u64)> {
        self.state.lock().translate(iova, write)
    }

    /// A device reads memory: 8 bytes at a time where they are aligned, in ascending order.
    ///
    /// # Errors
    /// The refused access; the bytes before it have been read.
    pub fn dma_read(&self, iova: u64, into: &mut [u8]) -> Result<(), Refused> {
        let mut state = self.state.lock();
        state.pieces(iova, into.len(), false, |at, piece, _| {
            // SAFETY: the caller of `map` promised that mapped memory exists and belongs to the
            // devices until it is unmapped, and it cannot be unmapped while the state is locked.
            unsafe { load(at, &mut into[piece]) };
        })
    }

    /// A device writes memory: 8 bytes at a time where they are aligned; other threads see them
    /// appear in ascending order. Marks what it writes as dirty while that is tracked.
    ///
    /// # Errors
    /// The refused access; the bytes before it have been written.
    pub fn dma_write(&self, iova: u64, bytes: &[u8]) -> Result<(), Refused> {
        let mut state = self.state.lock();
        state.pieces(iova, bytes.len(), true, |at, piece, _| {
            // SAFETY: as in `dma_read`; by the flags, the caller also promised that devices may
            // write it.
            unsafe { store(at, &bytes[piece]) };
        })
    }

    /// The accesses refused since the last call, the first 1,024 of them.
    pub fn refused(&self) -> Vec<Refused> {
        std::mem::take(&mut self.state.lock().refused).into()
    }

    /// An emulated device reads memory through the kernel (`vfio_dma_rw`).
    ///
    /// # Errors
    /// EBUSY while an address is marked invalid (rule [L59]), EINVAL where nothing is mapped, EPERM
    /// without READ, EFAULT where the memory is pretended.
    ///
    /// [L59]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l59
    pub fn rw_read(&self, iova: u64, into: &mut [u8]) -> KernelResult<()> {
        self.state.lock().kernel_pieces(iova, into.len(), false, |at, piece, _| {
            // SAFETY: as in `dma_read`.
            unsafe { load(at, &mut into[piece]) };
        })
    }

    /// An emulated device writes memory through the kernel (`vfio_dma_rw`), which marks it as
    /// dirty.
    ///
    /// # Errors
    /// As [`rw_read`](Self::rw_read); EPERM without READ and WRITE.
    pub fn rw_write(&self, iova: u64, bytes: &[u8]) -> KernelResult<()> {
        self.state.lock().kernel_pieces(iova, bytes.len(), true, |at, piece, _| {
            // SAFETY: as in `dma_write`.
            unsafe { store(at, &bytes[piece]) };
        })
    }
}

/// The bytes of a transfer that a part of it covers.
type Piece = std::ops::Range<usize>;

impl State {
    fn translate(&self, iova: u64, write: bool) -> Option<(HostAddr, u64)> {
        let run = self.domains.first()?.table.at(iova)?;
        let wanted = if write { MapFlags::WRITE } else { MapFlags::READ };
        // A real device still reaches the pages; here only the address, now invalid, leads to them.
        let mapping = self.at(iova).filter(|mapping| !mapping.invalid)?;
        if !run.prot.contains(wanted) || !self.machine.memory.has_bytes() {
            return None;
        }
        let bytes = (run.range.last().0 - iova).saturating_add(1);
        Some((HostAddr(mapping.vaddr(iova)), bytes))
    }

    /// Visits the pieces of a device's access.
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

    /// Visits the pieces of an access by the kernel.
    fn kernel_pieces(
        &mut self,
        iova: u64,
        len: usize,
        write: bool,
        mut each: impl FnMut(HostAddr, Piece, u64),
    ) -> KernelResult<()> {
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

    /// Marks written bytes as dirty, all of them in one mapping.
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
