//! Guest memory for bounce slots.

use core::ptr::NonNull;
use std::sync::Arc;

use ringfence_dma::{BounceMemory, Chunk};
use ringfence_iommu::GuestPhys;
use ringfence_iova::{Align, Allocator, Aperture, Placement, Request, SlabConfig, Slabs};
use ringfence_mem::{GuestRam, MemError};
use ringfence_sync::cpu::OneCpu;

use super::PAGE;

/// Guest memory for bounce slots: a carved region, of which pages are populated only while they are
/// taken.
#[derive(Debug)]
pub struct RamMemory {
    ram: Arc<GuestRam>,
    /// Its guest-physical addresses.
    space: Slabs<OneCpu>,
}

impl RamMemory {
    /// Sets `len` bytes of the addresses of `ram` aside, whole pages. A page at address 0 is not
    /// used.
    ///
    /// # Errors
    /// There are not so many left, or none is to be used.
    pub fn carve(ram: &Arc<GuestRam>, len: usize) -> Result<RamMemory, MemError> {
        // What cannot be rounded up does not fit.
        let len = len.checked_next_multiple_of(PAGE).unwrap_or(len);
        let rest = len.checked_sub(1).ok_or(MemError::Empty)? as u64;
        let first = ram.gpa() + ram.carve(len, PAGE)? as u64;
        let pages = Aperture::new(first, first + rest, PAGE as u64).map_err(|_| MemError::Empty)?;
        let (placement, limits) = (Placement::Lowest, Vec::new());
        let config = SlabConfig { placement, limits, ..SlabConfig::default() };
        Ok(RamMemory { ram: Arc::clone(ram), space: Slabs::with_config(pages, OneCpu, config) })
    }
}

// SAFETY: what is taken lies in the region, which was carved for this value, and overlaps nothing
// else that was taken and not given back; the memory stays mapped as long as `ram` lives, and the
// pool that takes from this value holds it.
unsafe impl BounceMemory<GuestPhys> for RamMemory {
    fn take(&self, len: u64, align: u64) -> Option<Chunk<GuestPhys>> {
        let gpa = self.space.alloc(&Request::new(len).align(Align::Bytes(align))).ok()?;
        // It lies in the memory, whose size fits this process's address space.
        let slice = self.ram.slice((gpa - self.ram.gpa()) as usize, len as usize).ok()?;
        let ptr = NonNull::new(slice.as_ptr())?;
        Some(Chunk { target: GuestPhys(gpa), ptr, len, align })
    }

    unsafe fn give_back(&self, chunk: Chunk<GuestPhys>) {
        let offset = (chunk.target.0 - self.ram.gpa()) as usize;
        let pages = (chunk.len as usize).next_multiple_of(PAGE);
        // Before it can be taken again. If the system refuses, the pages stay, which only wastes
        // them.
        let _ = self.ram.discard(offset, pages);
        self.space.free(chunk.target.0, chunk.len).expect("a chunk is given back once");
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::{super::PagedBuffer, *};

    const GPA: u64 = 0x10_3000;
    const PAGES: usize = 64;

    fn memory() -> (Arc<GuestRam>, RamMemory) {
        let ram = GuestRam::new((PAGES + 3) * PAGE, GPA).unwrap();
        ram.carve(PAGE, PAGE).unwrap();
        let memory = RamMemory::carve(&ram, PAGES * PAGE - 1).unwrap();
        (ram, memory)
    }

    #[test]
    fn a_length_that_cannot_be_rounded_up_does_not_fit() {
        let (ram, _) = memory();
        let refused = RamMemory::carve(&ram, usize::MAX);
        assert!(matches!(refused, Err(MemError::Full { len: u64::MAX, .. })), "{refused:?}");
        assert!(matches!(RamMemory::carve(&ram, 0), Err(MemError::Empty)));
        let view = ram.scattered(&[0, PAGE as u64]).unwrap();
        assert_eq!(PagedBuffer::cut(view, [PAGE, usize::MAX]).len(), 1);
    }

    fn blocks(ram: &GuestRam) -> i64 {
        rustix::fs::fstat(ram.fd()).unwrap().st_blocks * 512 / PAGE as i64
    }

    #[test]
    fn what_is_given_back_takes_no_memory_and_comes_again_zeroed() {
        let (ram, memory) = memory();
        assert_eq!(blocks(&ram), 0, "nothing is set aside");
        let chunk = memory.take(3 * PAGE as u64, PAGE as u64).unwrap();
        assert_eq!(chunk.target.0, GPA + PAGE as u64, "the lowest");
        // SAFETY: the chunk is ours, and so long.
        unsafe { chunk.ptr.as_ptr().write_bytes(7, 3 * PAGE) };
        assert_eq!(blocks(&ram), 3);
        // SAFETY: it was taken above.
        unsafe { memory.give_back(chunk) };
        assert_eq!(blocks(&ram), 0);
        let again = memory.take(3 * PAGE as u64, PAGE as u64).unwrap();
        assert_eq!((again.target, again.ptr), (chunk.target, chunk.ptr));
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(again.ptr.as_ptr(), 3 * PAGE) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        // SAFETY: it was taken above.
        unsafe { memory.give_back(again) };
        assert!(memory.take((PAGES as u64 + 1) * PAGE as u64, 1).is_none());
        assert!(memory.take(u64::MAX, 1).is_none());
        assert!(memory.take(1, 1 << 63).is_none());
    }

    proptest! {
        #[test]
        fn pieces_never_overlap_and_all_of_it_comes_together_again(
            ops in prop::collection::vec((any::<bool>(), 1u64..20 * 4096, 0u32..18, any::<usize>()), 1..60),
        ) {
            let (_ram, memory) = memory();
            let all = GPA + PAGE as u64..GPA + (1 + PAGES as u64) * PAGE as u64;
            let mut live: Vec<Chunk<GuestPhys>> = Vec::new();
            let pages = |chunk: &Chunk<GuestPhys>| chunk.len.next_multiple_of(PAGE as u64);
            for (take, len, log, which) in ops {
                if take {
                    let align = 1u64 << log;
                    let free = |at: u64| {
                        let end = at + len.next_multiple_of(PAGE as u64);
                        at.is_multiple_of(align)
                            && at.is_multiple_of(PAGE as u64)
                            && end <= all.end
                            && live.iter().all(|c| c.target.0 + pages(c) <= at || end <= c.target.0)
                    };
                    // The oracle checks every page.
                    let expected = all.clone().step_by(PAGE).find(|&at| free(at));
                    let taken = memory.take(len, align);
                    prop_assert_eq!(taken.map(|chunk| chunk.target.0), expected);
                    live.extend(taken);
                } else if !live.is_empty() {
                    let which = which % live.len();
                    // SAFETY: it was taken, and is live.
                    unsafe { memory.give_back(live.swap_remove(which)) };
                }
            }
            // SAFETY: they were taken, and are live.
            live.into_iter().for_each(|chunk| unsafe { memory.give_back(chunk) });
            let whole = memory.take((PAGES * PAGE) as u64, 1).map(|chunk| chunk.target.0);
            prop_assert_eq!(whole, Some(all.start));
        }
    }
}
