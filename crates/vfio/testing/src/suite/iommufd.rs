//! The checks of an iommufd.

use rustix::io::Errno;

use super::{Checked, Outcome, Stop, expect, memory::Memory, not_applicable, outcome};
use ringfence_vfio::kernel::{Bitmap, Id, IommufdKernel, KernelResult, MapFlags};

const RW: MapFlags = MapFlags::READ.union(MapFlags::WRITE);
const PAGE: u64 = 4096;
/// Pages of memory that the checks map.
const PAGES: u64 = 16;

/// What a check works with: an address space of its own.
struct Bench<'a, K> {
    kernel: &'a K,
    memory: &'a Memory,
    device: Option<Id>,
    ioas: Id,
}

/// Checks what can be seen of `kernel`, with a page table for `device` if given. No device is
/// attached to what the checks make.
///
/// # Errors
/// The kernel's, if no check could begin.
pub fn iommufd<K: IommufdKernel>(kernel: &K, device: Option<Id>) -> KernelResult<Vec<Outcome>> {
    let memory = Memory::new(PAGES, PAGE)?;
    let mut outcomes = Vec::new();
    let mut clean = true;
    for (rule, check, run) in Bench::<K>::CHECKS {
        let ioas = kernel.new_ioas()?;
        let bench = Bench { kernel, memory: &memory, device, ioas };
        outcomes.push(outcome(rule, check, run(&bench)));
        clean &= kernel.unmap(ioas, 0, u64::MAX).is_ok();
        if let Err(errno) = kernel.destroy(ioas) {
            let why = format!("its address space cannot be destroyed: {errno:?}");
            outcomes.push(outcome("DESTROY", check, Err(Stop::Fail(why))));
        }
    }
    if !clean {
        memory.leak();
    }
    Ok(outcomes)
}

/// A call, what is checked of it, and how.
type Check<'a, K> = (&'static str, &'static str, fn(&Bench<'a, K>) -> Checked);

impl<'a, K: IommufdKernel> Bench<'a, K> {
    const CHECKS: [Check<'a, K>; 8] = [
        ("MAP", "sizes and wrap", Self::arguments),
        ("MAP", "no mapping without a permission", Self::permission),
        ("MAP", "nothing is mapped over", Self::overlap),
        ("MAP", "an address is chosen", Self::choose),
        ("UNMAP", "nothing is cut", Self::cut),
        ("UNMAP", "several mappings, and everything", Self::several),
        ("DESTROY", "what is used stays", Self::destroy),
        ("DIRTY", "tracking", Self::dirty),
    ];

    /// Maps pages at the page number `at`.
    fn map(&self, at: u64, pages: u64) -> KernelResult<u64> {
        self.raw(self.ioas, RW, Some(at * PAGE), self.memory.addr(PAGE), pages * PAGE)
    }

    fn raw(
        &self,
        id: Id,
        flags: MapFlags,
        iova: Option<u64>,
        vaddr: u64,
        size: u64,
    ) -> KernelResult<u64> {
        // SAFETY: the memory is used for nothing else, no device is attached, and no bytes are
        // read.
        unsafe { self.kernel.map(id, flags, iova, vaddr, size) }
    }

    fn unmap(&self, at: u64, pages: u64) -> KernelResult<u64> {
        Ok(self.kernel.unmap(self.ioas, at * PAGE, pages * PAGE)? / PAGE)
    }

    fn arguments(&self) -> Checked {
        let vaddr = self.memory.addr(PAGE);
        expect(self.raw(self.ioas, RW, Some(0), vaddr, 0), Err(Errno::INVAL))?;
        expect(self.raw(self.ioas, RW, Some(0), vaddr, u64::MAX), Err(Errno::OVERFLOW))?;
        expect(self.raw(self.ioas, RW, Some(u64::MAX - 1), vaddr, PAGE), Err(Errno::OVERFLOW))?;
        expect(self.raw(Id::new(u32::MAX), RW, Some(0), vaddr, PAGE), Err(Errno::NOENT))
    }

    fn permission(&self) -> Checked {
        let vaddr = self.memory.addr(PAGE);
        match self.raw(self.ioas, MapFlags::empty(), Some(0), vaddr, PAGE) {
            Ok(_) => not_applicable("Linux before 6.11 maps without a permission"),
            result => expect(result, Err(Errno::INVAL)),
        }
    }

    fn overlap(&self) -> Checked {
        expect(self.map(8, 4), Ok(8 * PAGE))?;
        for (at, pages) in [(8, 4), (7, 2), (11, 2), (9, 1), (0, 16)] {
            expect(self.map(at, pages), Err(Errno::EXIST))?;
        }
        Ok(())
    }

    fn choose(&self) -> Checked {
        let ranges = self.kernel.iova_ranges(self.ioas)?.ranges;
        let mut taken = Vec::new();
        for pages in [1, 4, 16, 3] {
            let at = self.raw(self.ioas, RW, None, self.memory.addr(PAGE), pages * PAGE)?;
            let len = pages * PAGE;
            let place = ringfence_iommu::Range::from_len(ringfence_iommu::Iova(at), len);
            let free = place.is_some_and(|place| ranges.iter().any(|range| range.covers(place)));
            expect((free, at % PAGE), (true, 0))?;
            taken.push((at, len));
        }
        for (at, len) in taken {
            expect(self.kernel.unmap(self.ioas, at, len), Ok(len))?;
        }
        Ok(())
    }

    fn cut(&self) -> Checked {
        expect(self.unmap(0, 16), Err(Errno::NOENT))?;
        self.map(8, 4)?;
        for (at, pages) in [(8, 3), (9, 3), (9, 2), (7, 2), (11, 2)] {
            expect(self.unmap(at, pages), Err(Errno::NOENT))?;
        }
        expect(self.unmap(8, 4), Ok(4))
    }

    fn several(&self) -> Checked {
        for at in [2, 8, 12] {
            self.map(at, 2)?;
        }
        expect(self.unmap(0, 11), Ok(4))?;
        expect(self.kernel.unmap(self.ioas, 0, u64::MAX), Ok(2 * PAGE))?;
        expect(self.kernel.unmap(self.ioas, 0, u64::MAX), Ok(0))?;
        expect(self.kernel.unmap(self.ioas, 0, 0), Err(Errno::INVAL))
    }

    fn destroy(&self) -> Checked {
        expect(self.kernel.destroy(Id::new(u32::MAX)), Err(Errno::NOENT))?;
        let Some(device) = self.device else { return not_applicable("no device is bound") };
        let hwpt = self.kernel.new_hwpt(device, self.ioas, false)?;
        let busy = self.kernel.destroy(self.ioas);
        self.kernel.destroy(hwpt)?;
        expect(busy, Err(Errno::BUSY))?;
        expect(self.kernel.destroy(hwpt), Err(Errno::NOENT))
    }

    fn dirty(&self) -> Checked {
        let Some(device) = self.device else { return not_applicable("no device is bound") };
        let hwpt = match self.kernel.new_hwpt(device, self.ioas, true) {
            Err(Errno::OPNOTSUPP) => return not_applicable("the hardware cannot track"),
            hwpt => hwpt?,
        };
        let checked = self.dirty_of(hwpt);
        self.kernel.destroy(hwpt)?;
        checked
    }

    fn dirty_of(&self, hwpt: Id) -> Checked {
        let first = self.raw(self.ioas, RW, None, self.memory.addr(PAGE), 4 * PAGE)?;
        for on in [true, true] {
            expect(self.kernel.track_dirty(hwpt, on), Ok(()))?;
        }
        let mut words = [0b1_0000];
        let bitmap = Bitmap { page: PAGE, words: &mut words };
        expect(self.kernel.dirty(hwpt, first, 4 * PAGE, bitmap), Ok(()))?;
        expect(words, [0b1_0000])?;
        expect(self.kernel.track_dirty(hwpt, false), Ok(()))
    }
}
