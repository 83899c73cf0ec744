//! Our pinner over the kernel's registered buffers.

use std::sync::Arc;

use anyhow::{Context, Result};
use ringfence_iommu::{HostAddr, Iova, Prot, Range};
use ringfence_vfio::{
    Account,
    pin::{Pinner, Uring},
};

use super::{
    measure::Subject,
    memory::Memory,
    set::{BASE, PAGE, Set, iova},
};

/// Our pinner, with the memory behind a window and everything that it does for its users: account,
/// permissions, counts, dirty bits.
pub(super) struct Ours {
    pinner: Pinner<Uring>,
    /// Called for each page, not for the list.
    each: bool,
}

impl Ours {
    /// A pinner that holds the part of a set that is pinned already.
    ///
    /// # Errors
    /// There is no io_uring, or that part cannot be pinned.
    pub(super) fn new(set: &Set, memory: &Memory, each: bool) -> Result<Ours> {
        let backing = Uring::new().context("io_uring")?;
        let mut pinner = Pinner::new(backing, Arc::new(Account::new("bench pin")));
        let window = Range::from_len(Iova(BASE), memory.len as u64).context("no memory")?;
        pinner.add_window(window, HostAddr(memory.page(0) as u64), Prot::RW)?;
        for run in &set.held {
            pinner.pin_range(iova(run.first), (run.pages * PAGE) as u64, Prot::RW)?;
        }
        Ok(Ours { pinner, each })
    }
}

impl Subject for Ours {
    #[inline(always)]
    fn pin(&mut self, set: &Set) -> Result<()> {
        if self.each {
            for iova in &set.iovas {
                self.pinner.pin(std::slice::from_ref(iova), Prot::RW)?;
            }
            return Ok(());
        }
        Ok(self.pinner.pin(&set.iovas, Prot::RW)?)
    }

    #[inline(always)]
    fn unpin(&mut self, set: &Set) -> Result<()> {
        if self.each {
            for iova in &set.iovas {
                self.pinner.unpin(std::slice::from_ref(iova))?;
            }
            return Ok(());
        }
        Ok(self.pinner.unpin(&set.iovas)?)
    }
}
