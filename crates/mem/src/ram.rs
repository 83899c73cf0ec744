//! Memory that this process makes and shares.

use crate::{HostSlice, MemError, PAGE_SIZE, Region, Window, mapping::Mapping, region::aligned};
use rustix::fs::{self, FallocateFlags, MemfdFlags, SealFlags};
use std::{
    any::Any,
    fmt,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Guest memory, made and owned by this process: a sealed memory file, mapped. Its bytes are zero
/// at first.
pub struct GuestRam {
    fd: OwnedFd,
    map: Mapping,
    gpa: u64,
    /// Everything before was carved.
    carved: AtomicUsize,
}

impl fmt::Debug for GuestRam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GuestRam({:#x} bytes at {:#x})", self.len(), self.gpa)
    }
}

impl GuestRam {
    /// Makes memory of `len` bytes that begins at guest-physical address `gpa`; both multiples of
    /// [`PAGE_SIZE`]. The file is sealed: its size can no longer change.
    ///
    /// # Errors
    /// A length of zero, misalignment, addresses that wrap, or a refusal of the system.
    pub fn new(len: usize, gpa: u64) -> Result<Arc<GuestRam>, MemError> {
        let size = len as u64;
        if len == 0 {
            return Err(MemError::Empty);
        }
        aligned("length", size)?;
        aligned("guest-physical address", gpa)?;
        if gpa.checked_add(size - 1).is_none() || i64::try_from(size).is_err() {
            return Err(MemError::Wraps { what: "guest-physical address", addr: gpa, size });
        }
        let fd = fs::memfd_create("ringfence-ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(MemError::os("memfd_create"))?;
        fs::ftruncate(&fd, size).map_err(MemError::os("ftruncate of guest memory"))?;
        fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(MemError::os("sealing guest memory"))?;
        let map = Mapping::file(fd.as_fd(), 0, len)?;
        Ok(Arc::new(GuestRam { fd, map, gpa, carved: AtomicUsize::new(0) }))
    }

    /// The file, to hand to a back end.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The first guest-physical address.
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// How many bytes; never zero.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// The first address in this process.
    pub fn user_addr(&self) -> u64 {
        self.map.base().as_ptr() as u64
    }

    /// This memory as SET_MEM_TABLE describes it.
    pub fn region(&self) -> Region {
        Region {
            gpa: self.gpa,
            size: self.len() as u64,
            user_addr: self.user_addr(),
            mmap_offset: 0,
        }
    }

    /// A lasting view of the `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`MemError::OutOfBounds`].
    pub fn window(self: &Arc<Self>, offset: usize, len: usize) -> Result<Window, MemError> {
        self.check(offset, len)?;
        let keep: Arc<dyn Any + Send + Sync> = Arc::clone(self) as _;
        // SAFETY: in bounds (just checked), mapped while `keep` lives; nothing makes references.
        Ok(unsafe { Window::new(self.map.base().add(offset), len, keep) })
    }

    /// The `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`MemError::OutOfBounds`].
    pub fn slice(&self, offset: usize, len: usize) -> Result<HostSlice<'_>, MemError> {
        self.check(offset, len)?;
        // SAFETY: in bounds (just checked), mapped while `self` is borrowed.
        Ok(unsafe { HostSlice::new(self.map.base().add(offset), len) })
    }

    fn check(&self, offset: usize, len: usize) -> Result<(), MemError> {
        out_of_bounds(offset, len, self.len())
    }

    /// Sets `len` bytes aside, for good, and returns their offset, a multiple of `align`. Several
    /// threads may carve at the same time. Do not mix this with offsets of your own choice: memory
    /// that is not carved may be carved later.
    ///
    /// # Errors
    /// [`MemError::Full`].
    ///
    /// # Panics
    /// If `align` is no power of two.
    pub fn carve(&self, len: usize, align: usize) -> Result<usize, MemError> {
        assert!(align.is_power_of_two(), "an alignment is a power of two");
        let start = |from: usize| from.checked_next_multiple_of(align).unwrap_or(usize::MAX);
        let end = |from| start(from).checked_add(len).filter(|&end| end <= self.len());
        let carved = self.carved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end);
        let full = |from| self.len().saturating_sub(start(from)) as u64;
        carved.map(start).map_err(|from| MemError::Full { len: len as u64, left: full(from) })
    }

    /// Gives the pages of the `len` bytes at `offset` back to the system, whatever maps them: they
    /// read as zero, and take memory again when they are touched. Both are multiples of
    /// [`PAGE_SIZE`]. The size of the memory does not change: the seals allow holes.
    ///
    /// Other users of these bytes see them change, as by a write.
    ///
    /// # Errors
    /// [`MemError::Misaligned`], [`MemError::OutOfBounds`], or a refusal of the system; the bytes
    /// are unchanged then.
    pub fn discard(&self, offset: usize, len: usize) -> Result<(), MemError> {
        self.check(offset, len)?;
        aligned("offset", offset as u64)?;
        aligned("length", len as u64)?;
        if len == 0 {
            return Ok(());
        }
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fs::fallocate(&self.fd, hole, offset as u64, len as u64)
            .map_err(MemError::os("fallocate of a hole in guest memory"))
    }

    /// How many bytes of it take memory of the system: pages that were touched and not
    /// [discarded](Self::discard).
    ///
    /// # Errors
    /// A refusal of the system.
    pub fn resident(&self) -> Result<u64, MemError> {
        let stat = fs::fstat(&self.fd).map_err(MemError::os("fstat of guest memory"))?;
        // In units of 512 bytes, whatever the page size.
        Ok(stat.st_blocks as u64 * 512)
    }

    /// Maps pages of this memory (`frames`: their offsets in bytes, in any order) once more, into
    /// one contiguous span of this process's addresses. It is like an application's buffer, whose
    /// pages lie anywhere in guest-physical memory. Frames that follow each other need only one
    /// mapping.
    ///
    /// # Errors
    /// No frame, an offset that is not page-aligned or beyond the end, more runs than the kernel
    /// allows mappings, or a refusal of the system.
    pub fn scattered(self: &Arc<Self>, frames: &[u64]) -> Result<ScatteredView, MemError> {
        let page = PAGE_SIZE as u64;
        if frames.is_empty() {
            return Err(MemError::Empty);
        }
        for &frame in frames {
            aligned("frame", frame)?;
            if frame >= self.len() as u64 {
                let size = self.len() as u64;
                return Err(MemError::OutOfBounds { offset: frame, len: page, size });
            }
        }
        let runs = || frames.chunk_by(|a, b| a.checked_add(page) == Some(*b));
        let too_many = |mappings| {
            let max = max_map_count();
            MemError::TooManyMappings { pages: frames.len(), mappings, max }
        };
        let mappings = runs().count();
        if mappings > max_map_count() {
            return Err(too_many(mappings));
        }
        // Cannot wrap where frames are distinct; they may repeat.
        let Some(len) = frames.len().checked_mul(PAGE_SIZE) else {
            return Err(too_many(mappings));
        };
        let mut map = Mapping::reserve(len)?;
        let mut at = 0;
        for run in runs() {
            let bytes = run.len() * PAGE_SIZE;
            map.place(at, self.fd(), run[0], bytes).map_err(|errno| match errno {
                // The process has other mappings too: only this call finds that they are too many.
                rustix::io::Errno::NOMEM => too_many(mappings),
                other => MemError::os("mmap of a scattered page")(other),
            })?;
            at += bytes;
        }
        Ok(ScatteredView { map, frames: frames.into(), ram: Arc::clone(self) })
    }
}

fn out_of_bounds(offset: usize, len: usize, size: usize) -> Result<(), MemError> {
    if offset.checked_add(len).is_some_and(|end| end <= size) {
        return Ok(());
    }
    Err(MemError::OutOfBounds { offset: offset as u64, len: len as u64, size: size as u64 })
}

/// How many mappings the kernel allows a process.
fn max_map_count() -> usize {
    std::fs::read_to_string("/proc/sys/vm/max_map_count")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(65530)
}

/// Pages of a [`GuestRam`], contiguous for the CPU, scattered in guest-physical addresses.
pub struct ScatteredView {
    map: Mapping,
    /// The offset of each page in the memory.
    frames: Box<[u64]>,
    ram: Arc<GuestRam>,
}

impl fmt::Debug for ScatteredView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ScatteredView({} pages of {:?})", self.frames.len(), self.ram)
    }
}

impl ScatteredView {
    /// How many bytes; never zero.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// All bytes, to copy from and to.
    pub fn slice(&self) -> HostSlice<'_> {
        // SAFETY: the whole span is mapped while `self` is borrowed; nothing makes references.
        unsafe { HostSlice::new(self.map.base(), self.map.len()) }
    }

    /// Calls `each` with (guest-physical address, length) of every contiguous run of the `len`
    /// bytes at `offset`, in order, neighbouring pages merged.
    ///
    /// # Errors
    /// [`MemError::OutOfBounds`]; nothing was visited then.
    pub fn runs(
        &self,
        offset: usize,
        len: usize,
        mut each: impl FnMut(u64, u64),
    ) -> Result<(), MemError> {
        out_of_bounds(offset, len, self.len())?;
        let mut at = offset;
        let end = offset + len;
        while at < end {
            let first = self.frames[at / PAGE_SIZE];
            let start = at;
            let mut frame = first;
            at = (at / PAGE_SIZE + 1) * PAGE_SIZE;
            while at < end && self.frames[at / PAGE_SIZE] == frame + PAGE_SIZE as u64 {
                frame = self.frames[at / PAGE_SIZE];
                at += PAGE_SIZE;
            }
            let gpa = self.ram.gpa + first + (start % PAGE_SIZE) as u64;
            each(gpa, (at.min(end) - start) as u64);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    #[test]
    fn a_sealed_memory_cannot_change_its_size() {
        let ram = GuestRam::new(4 * PAGE_SIZE, 0).unwrap();
        assert!(fs::ftruncate(ram.fd(), PAGE).is_err());
        assert!(fs::ftruncate(ram.fd(), 8 * PAGE).is_err());
        assert!(fs::fcntl_add_seals(ram.fd(), SealFlags::WRITE).is_err());
    }

    #[test]
    fn memory_that_ends_at_the_last_address_is_legal_and_beyond_is_not() {
        assert!(GuestRam::new(PAGE_SIZE, u64::MAX - (PAGE - 1)).is_ok());
        let wraps = GuestRam::new(2 * PAGE_SIZE, u64::MAX - (PAGE - 1));
        assert!(matches!(wraps, Err(MemError::Wraps { .. })));
        assert!(matches!(GuestRam::new(0, 0), Err(MemError::Empty)));
        assert!(matches!(GuestRam::new(100, 0), Err(MemError::Misaligned { .. })));
        assert!(matches!(GuestRam::new(PAGE_SIZE, 1), Err(MemError::Misaligned { .. })));
    }

    #[test]
    fn carved_pieces_are_aligned_and_apart_until_the_memory_is_full() {
        let ram = GuestRam::new(2 * PAGE_SIZE, 0).unwrap();
        assert_eq!(ram.carve(10, 1).unwrap(), 0);
        let full = ram.carve(2 * PAGE_SIZE - 10, 16);
        assert!(matches!(full, Err(MemError::Full { left: 8176, .. })), "{full:?}");
        assert_eq!(ram.carve(10, 16).unwrap(), 16);
        assert_eq!(ram.carve(PAGE_SIZE, PAGE_SIZE).unwrap(), PAGE_SIZE);
        assert!(matches!(ram.carve(1, 1), Err(MemError::Full { left: 0, .. })));
        assert!(matches!(ram.carve(usize::MAX, 4096), Err(MemError::Full { .. })));
        assert_eq!(ram.carve(0, 1).unwrap(), 2 * PAGE_SIZE);
    }

    #[test]
    fn a_window_past_the_end_is_refused() {
        let ram = GuestRam::new(PAGE_SIZE, 0).unwrap();
        assert!(ram.window(0, PAGE_SIZE).is_ok());
        assert!(matches!(ram.window(1, PAGE_SIZE), Err(MemError::OutOfBounds { .. })));
        assert!(matches!(ram.slice(usize::MAX, 2), Err(MemError::OutOfBounds { .. })));
        let window = ram.window(4, 8).unwrap();
        drop(ram);
        // The window keeps the memory.
        window.write(0, &[7; 8]);
        assert!(window.is_aligned(4) && !window.is_aligned(8));
    }

    #[test]
    fn a_scattered_view_shows_the_pages_of_the_memory_in_its_own_order() {
        let ram = GuestRam::new(8 * PAGE_SIZE, 0x10_0000).unwrap();
        for page in 0..8u8 {
            ram.slice(page as usize * PAGE_SIZE, PAGE_SIZE).unwrap().copy_from(&[page; PAGE_SIZE]);
        }
        let order = [5, 6, 7, 2, 0, 1].map(|page| page * PAGE);
        let view = ram.scattered(&order).unwrap();
        assert_eq!(view.len(), 6 * PAGE_SIZE);
        let gpa_of = |offset| {
            let mut found = None;
            view.runs(offset, 1, |gpa, _| found = Some(gpa)).ok()?;
            found
        };
        for (index, frame) in order.into_iter().enumerate() {
            let mut byte = [0];
            view.slice().part(index * PAGE_SIZE + 9, 1).copy_to(&mut byte);
            assert_eq!(u64::from(byte[0]), frame / PAGE);
            assert_eq!(gpa_of(index * PAGE_SIZE + 9), Some(0x10_0000 + frame + 9));
        }
        assert_eq!(gpa_of(6 * PAGE_SIZE), None);
        view.slice().part(3 * PAGE_SIZE, 1).copy_from(&[99]);
        let mut byte = [0];
        ram.slice(2 * PAGE_SIZE, 1).unwrap().copy_to(&mut byte);
        assert_eq!(byte, [99]);
    }

    #[test]
    fn pages_that_are_discarded_are_zero_and_take_no_memory() {
        let ram = GuestRam::new(8 * PAGE_SIZE, 0x10_0000).unwrap();
        let view = ram.scattered(&[3 * PAGE]).unwrap();
        let byte = |page: usize| {
            let mut byte = [0];
            ram.slice(page * PAGE_SIZE + 5, 1).unwrap().copy_to(&mut byte);
            byte[0]
        };
        let pages = || ram.resident().unwrap() / PAGE;
        assert_eq!(pages(), 0);
        ram.slice(0, ram.len()).unwrap().copy_from(&vec![7; ram.len()]);
        assert_eq!(pages(), 8);
        ram.discard(2 * PAGE_SIZE, 3 * PAGE_SIZE).unwrap();
        assert_eq!(pages(), 5);
        assert_eq!([1, 2, 3, 4, 5].map(byte), [7, 0, 0, 0, 7]);
        // Every mapping shows the same memory.
        view.slice().part(5, 1).copy_from(&[9]);
        assert_eq!((byte(3), ram.len()), (9, 8 * PAGE_SIZE));
        ram.discard(8 * PAGE_SIZE, 0).unwrap();
        assert!(matches!(ram.discard(1, PAGE_SIZE), Err(MemError::Misaligned { .. })));
        assert!(matches!(ram.discard(0, 1), Err(MemError::Misaligned { .. })));
        let beyond = ram.discard(7 * PAGE_SIZE, 2 * PAGE_SIZE);
        assert!(matches!(beyond, Err(MemError::OutOfBounds { .. })));
        assert!(ram.discard(PAGE_SIZE, usize::MAX - PAGE_SIZE + 1).is_err());
        assert_eq!(byte(0), 7);
    }

    #[test]
    fn runs_of_a_scattered_view_merge_neighbouring_pages() {
        let ram = GuestRam::new(8 * PAGE_SIZE, 0x10_0000).unwrap();
        let view = ram.scattered(&[5, 6, 7, 2, 0, 1].map(|page| page * PAGE)).unwrap();
        let runs = |offset, len| {
            let mut runs = Vec::new();
            view.runs(offset, len, |gpa, len| runs.push((gpa - 0x10_0000, len))).map(|()| runs)
        };
        assert_eq!(
            runs(0, 6 * PAGE_SIZE).unwrap(),
            [(5 * PAGE, 3 * PAGE), (2 * PAGE, PAGE), (0, 2 * PAGE)]
        );
        assert_eq!(runs(100, 50).unwrap(), [(5 * PAGE + 100, 50)]);
        assert_eq!(runs(PAGE_SIZE - 1, 2).unwrap(), [(6 * PAGE - 1, 2)]);
        assert_eq!(runs(3 * PAGE_SIZE - 1, 2).unwrap(), [(8 * PAGE - 1, 1), (2 * PAGE, 1)]);
        assert_eq!(runs(0, 0).unwrap(), []);
        assert!(runs(1, 6 * PAGE_SIZE).is_err());
    }

    #[test]
    fn frames_outside_the_memory_and_views_of_too_many_runs_are_refused() {
        let ram = GuestRam::new(2 * PAGE_SIZE, 0).unwrap();
        assert!(matches!(ram.scattered(&[]), Err(MemError::Empty)));
        assert!(matches!(ram.scattered(&[1]), Err(MemError::Misaligned { .. })));
        assert!(matches!(ram.scattered(&[2 * PAGE]), Err(MemError::OutOfBounds { .. })));
        assert!(matches!(ram.scattered(&[0, !(PAGE - 1)]), Err(MemError::OutOfBounds { .. })));
        // The same page again and again: no two of them are one run.
        let error = ram.scattered(&vec![0; max_map_count() + 1]).unwrap_err();
        assert!(matches!(error, MemError::TooManyMappings { .. }));
        assert!(error.to_string().contains("vm.max_map_count"));
    }
}
