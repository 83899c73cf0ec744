//! The regions that a front end shared, checked and mapped.

use crate::{
    Access, AccessError, Found, GuestRam, HostSlice, MemError, PAGE_SIZE, Region, Span, Spans,
    Window, mapping::Mapping, sigbus,
};
use core::ptr::NonNull;
use rustix::fs::{self, AtFlags, SealFlags, Statx, StatxFlags};
use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
};

#[derive(Clone, Debug)]
struct Mapped {
    region: Region,
    /// `None`: its file is not memory, and is not mapped.
    place: Option<RegionMapping>,
    /// Whether seals keep the mapped part of the file from being truncated.
    sealed: bool,
    /// Which file: its device and inode.
    file: (u32, u32, u64),
}

/// The place of a region in this process.
#[derive(Clone, Debug)]
struct RegionMapping {
    mapping: Arc<Mapping>,
    /// Where the region begins: a file of huge pages may have to be mapped from before it.
    base: NonNull<u8>,
}

impl Mapped {
    fn is_lost(&self) -> bool {
        self.place.as_ref().is_some_and(|place| place.mapping.is_lost())
    }
}

/// The mapped regions in the order of one address space, in which they begin at `first`.
fn spans(
    what: &'static str,
    mapped: &[Mapped],
    first: fn(&Region) -> u64,
) -> Result<Spans, MemError> {
    // Cannot wrap: `Region::check` passed.
    let range = |m: &Mapped| (first(&m.region), first(&m.region) + (m.region.size - 1));
    let mut ranges: Vec<(u64, u64)> = mapped.iter().map(range).collect();
    ranges.sort_unstable();
    if let Some(pair) = ranges.windows(2).find(|pair| pair[0].1 >= pair[1].0) {
        return Err(MemError::Overlap { what, addr: pair[1].0 });
    }
    let spans = mapped.iter().enumerate().filter_map(|(region, m)| {
        let (first, last) = range(m);
        Some(Span { first, last, base: m.place.as_ref()?.base, region })
    });
    // SAFETY: regions that are mapped whole, for as long as the `Memory` that holds this lives.
    Ok(unsafe { Spans::new(spans.collect()) })
}

/// An immutable set of mapped regions: what a back end may touch of the front end's memory.
///
/// A change makes a new one; an `Arc` that is still held keeps the old one alive.
#[derive(Debug)]
pub struct Memory {
    /// In guest-physical order.
    mapped: Box<[Mapped]>,
    /// The regions by guest-physical address.
    pub(crate) by_gpa: Spans,
    /// The regions by address of the front end's process.
    pub(crate) by_user: Spans,
}

// SAFETY: the pointers lead into the mappings that `mapped` owns; they are only ever given out as
// `HostSlice`s that borrow `self`.
unsafe impl Send for Memory {}
// SAFETY: as above; nothing in here changes.
unsafe impl Sync for Memory {}

impl Memory {
    /// The most regions of one memory: as many as QEMU and rust-vmm's back ends take.
    pub const MAX_REGIONS: usize = 509;

    /// Checks regions, each with the descriptor of its file, and maps them.
    ///
    /// Only files that are memory are mapped: of tmpfs, which has memfds, and hugetlbfs. A page of
    /// any other file may take as long to come as its file system likes, and an access would wait
    /// for it. Such a region [is in the table](Self::regions), but [none of its
    /// addresses](Self::unmapped) leads anywhere.
    ///
    /// # Errors
    /// No region or too many; a region of zero bytes, one whose addresses wrap or are not
    /// page-aligned, two that overlap (in guest-physical or in user addresses), a file that is too
    /// short, more than 4096 mapped regions in this process, or a refusal of the system. Nothing
    /// stays mapped then.
    pub fn map(regions: Vec<(Region, impl AsFd)>) -> Result<Arc<Memory>, MemError> {
        if regions.is_empty() {
            return Err(MemError::NoRegions);
        }
        if regions.len() > Self::MAX_REGIONS {
            let count = regions.len();
            return Err(MemError::TooManyRegions { count, max: Self::MAX_REGIONS });
        }
        // All checks that cost nothing come before the first mapping.
        for (region, _) in &regions {
            region.check()?;
        }
        let mapped = regions
            .into_iter()
            .map(|(region, fd)| map_region(region, fd.as_fd()))
            .collect::<Result<_, _>>()?;
        Self::from_mapped(mapped)
    }

    /// A second mapping of memory that this process made itself, as a peer would see it.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn of_ram(ram: &GuestRam) -> Result<Arc<Memory>, MemError> {
        Self::from_mapped(vec![map_region(ram.region(), ram.fd())?])
    }

    /// This memory and one region more (ADD_MEM_REG); existing mappings stay where they are.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn with(&self, region: Region, fd: impl AsFd) -> Result<Arc<Memory>, MemError> {
        if self.mapped.len() == Self::MAX_REGIONS {
            let count = self.mapped.len() + 1;
            return Err(MemError::TooManyRegions { count, max: Self::MAX_REGIONS });
        }
        region.check()?;
        let mut mapped = self.mapped.to_vec();
        mapped.push(map_region(region, fd.as_fd())?);
        Self::from_mapped(mapped)
    }

    /// Whether it has this very region already, of the same file. For a region that is not mapped,
    /// the file does not matter.
    pub fn has(&self, region: &Region, fd: BorrowedFd<'_>) -> bool {
        let mut same = self.mapped.iter().filter(|m| m.region == *region);
        same.any(|m| m.place.is_none() || stat(fd).is_ok_and(|stat| identity(&stat) == m.file))
    }

    /// Whether the two agree on every guest-physical address that both have: that it is the same
    /// byte of the same file. One memory of a guest may have regions that the other does not have
    /// yet; a region that is not mapped in either contradicts nothing.
    pub fn agrees_with(&self, other: &Memory) -> bool {
        self.mapped.iter().all(|a| {
            let mut overlapping = other.mapped.iter().filter(|b| {
                let (first, last) = (a.region.gpa, a.region.gpa + (a.region.size - 1));
                first <= b.region.gpa + (b.region.size - 1) && b.region.gpa <= last
            });
            // Equal distances from the beginning of the file. Wrapped differences cannot be equal
            // by chance, since both positions in the files lie below 2^63.
            let shift = |m: &Mapped| m.region.mmap_offset.wrapping_sub(m.region.gpa);
            let nowhere = |b: &Mapped| a.place.is_none() || b.place.is_none();
            overlapping.all(|b| nowhere(b) || a.file == b.file && shift(a) == shift(b))
        })
    }

    /// This memory without one of its regions (REM_MEM_REG): the one with the same addresses and
    /// size. The result may be without any.
    ///
    /// # Errors
    /// [`MemError::NoSuchRegion`].
    pub fn without(&self, region: &Region) -> Result<Arc<Memory>, MemError> {
        let same = |other: &Region| {
            (other.gpa, other.user_addr, other.size) == (region.gpa, region.user_addr, region.size)
        };
        let mut mapped = self.mapped.to_vec();
        mapped.retain(|m| !same(&m.region));
        if mapped.len() == self.mapped.len() {
            return Err(MemError::NoSuchRegion { gpa: region.gpa, size: region.size });
        }
        Self::from_mapped(mapped)
    }

    /// A memory of regions that passed [`Region::check`].
    fn from_mapped(mut mapped: Vec<Mapped>) -> Result<Arc<Memory>, MemError> {
        mapped.sort_unstable_by_key(|m| m.region.gpa);
        let by_gpa = spans("guest-physical address", &mapped, |region| region.gpa)?;
        let by_user = spans("user address", &mapped, |region| region.user_addr)?;
        Ok(Arc::new(Memory { mapped: mapped.into(), by_gpa, by_user }))
    }

    /// The regions, in guest-physical order.
    pub fn regions(&self) -> impl ExactSizeIterator<Item = &Region> + Clone {
        self.mapped.iter().map(|m| &m.region)
    }

    /// The regions that are not mapped, since their files are not memory.
    pub fn unmapped(&self) -> impl Iterator<Item = &Region> + Clone {
        self.mapped.iter().filter(|m| m.place.is_none()).map(|m| &m.region)
    }

    /// Whether the file of every mapped region is sealed against truncation, so that none of it can
    /// be [`lost`](Self::lost) unless the machine itself runs out of (huge) pages.
    pub fn is_sealed(&self) -> bool {
        self.mapped.iter().all(|m| m.sealed)
    }

    /// The bytes from a guest-physical address to the end of its region; `None` if no mapped region
    /// has the address.
    #[inline]
    pub fn find_gpa(&self, gpa: u64) -> Option<Found<'_>> {
        self.by_gpa.find(gpa)
    }

    /// The bytes from an address of the front end's process to the end of its region; `None` if no
    /// mapped region has the address.
    #[inline]
    pub fn find_user(&self, addr: u64) -> Option<Found<'_>> {
        self.by_user.find(addr)
    }

    /// The guest-physical address of an address of the front end's process; `None` if no mapped
    /// region has the address.
    pub fn user_to_gpa(&self, addr: u64) -> Option<u64> {
        let span = self.by_user.span(addr)?;
        // Cannot wrap: the offset is less than the region's size.
        Some(self.mapped[span.region].region.gpa + (addr - span.first))
    }

    /// The guest-physical ranges, each as (first address, length in bytes), of what this process
    /// reaches as `piece`. They are several where regions lie side by side by chance; bytes outside
    /// of this memory have none.
    pub fn gpas(&self, piece: HostSlice<'_>) -> impl Iterator<Item = (u64, u64)> + '_ {
        let (first, end) = span(piece.as_ptr(), piece.len());
        self.mapped.iter().filter_map(move |m| {
            // Mapped, so its length fits this process's address space.
            let place = m.place.as_ref()?;
            let (base, limit) = span(place.base.as_ptr(), m.region.size as usize);
            let (from, to) = (first.max(base), end.min(limit));
            (from < to).then(|| (m.region.gpa + (from - base) as u64, (to - from) as u64))
        })
    }

    /// Whether any region's file was truncated under us and an access has run into that after
    /// [`sigbus::install`](crate::sigbus::install) (without which such an access ends the process).
    /// One load as long as nothing in this process was ever lost.
    #[inline]
    pub fn lost(&self) -> bool {
        sigbus::any_lost() && self.mapped.iter().any(Mapped::is_lost)
    }

    /// As [`lost`](Self::lost), for one region (see [`Found::region`]).
    ///
    /// # Panics
    /// If there is no such region, and any memory of this process is lost.
    #[inline]
    pub fn is_lost(&self, region: usize) -> bool {
        sigbus::any_lost() && self.mapped[region].is_lost()
    }

    /// Fails if any region was lost, whichever a device has touched: the driver must not truncate
    /// any. Call it after the accesses that it covers.
    ///
    /// # Errors
    /// [`AccessError::Lost`], with the guest-physical address of the first region that is.
    pub fn check(&self) -> Result<(), AccessError> {
        // Ordering: another thread may have met the hole first and put the zeroes there that we read. It has
        // set the mark before that: we must look for the mark only after our own accesses.
        fence(Ordering::Acquire);
        if !self.lost() {
            return Ok(());
        }
        let lost = self.regions().enumerate().find(|&(at, _)| self.is_lost(at));
        Err(AccessError::Lost { addr: lost.map_or(0, |(_, region)| region.gpa) })
    }

    /// The `len` bytes at `addr` by `table`, held for as long as the window lives.
    pub(crate) fn window(
        self: &Arc<Memory>,
        table: &Spans,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<Window, AccessError> {
        // SAFETY: the mappings live as long as the memory.
        let (window, region) = unsafe { table.window(addr, len, access, Arc::clone(self) as _) }?;
        if self.is_lost(region) { Err(AccessError::Lost { addr }) } else { Ok(window) }
    }
}

/// Where bytes of this process begin, and end.
fn span(base: *mut u8, len: usize) -> (usize, usize) {
    (base as usize, (base as usize).saturating_add(len))
}

/// The file of a descriptor, as far as the kernel knows it without a request to the file system:
/// FUSE may take as long as it likes to reply.
fn stat(fd: BorrowedFd<'_>) -> Result<Statx, MemError> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    fs::statx(fd, c"", flags, StatxFlags::BASIC_STATS)
        .map_err(MemError::os("statx of shared memory"))
}

fn identity(stat: &Statx) -> (u32, u32, u64) {
    (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino)
}

/// The size of the pages that a file is mapped in. The file must be memory.
fn page_of(fd: BorrowedFd<'_>) -> Result<u64, MemError> {
    const HUGETLBFS_MAGIC: u64 = 0x958458f6;
    // SAFETY: a call without pointers.
    let system = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let system = u64::try_from(system).unwrap_or(0).max(PAGE_SIZE as u64);
    let stat = fs::fstatfs(fd).map_err(MemError::os("fstatfs of shared memory"))?;
    if stat.f_type as u64 & 0xffff_ffff != HUGETLBFS_MAGIC {
        return Ok(system);
    }
    // The kernel gives a power of two; anything else would make a wrong mask.
    Ok(u64::try_from(stat.f_bsize).ok().filter(|size| size.is_power_of_two()).unwrap_or(system))
}

/// Maps a region that passed [`Region::check`].
fn map_region(region: Region, fd: BorrowedFd<'_>) -> Result<Mapped, MemError> {
    // Only tmpfs (which has memfds) and hugetlbfs have seals; a file of any other file system is
    // left alone.
    let Ok(seals) = fs::fcntl_get_seals(fd) else {
        return Ok(Mapped { region, place: None, sealed: true, file: Default::default() });
    };
    let file = identity(&stat(fd)?);
    let sealed = seals.contains(SealFlags::SHRINK);
    let needed = region.mmap_offset + region.size;
    // First the seals, then the size: a file that is sealed now cannot become shorter than what we
    // see.
    let actual = stat(fd)?.stx_size;
    if needed > actual {
        return Err(MemError::FileTooShort { needed, actual });
    }
    let page = page_of(fd)?;
    let start = region.mmap_offset & !(page - 1);
    // Fails only where the span does not fit `usize`: `needed` is at most the size of a file.
    let wraps =
        MemError::Wraps { what: "mmap offset", addr: region.mmap_offset, size: region.size };
    let Some(len) =
        needed.checked_next_multiple_of(page).and_then(|end| usize::try_from(end - start).ok())
    else {
        return Err(wraps);
    };
    let mut mapping = Mapping::file(fd, start, len)?;
    // Sealed or not: a hole punched in a file of huge pages also faults once the pool is empty.
    mapping.watch(page as usize)?;
    // SAFETY: `mmap_offset - start` is less than `len`.
    let base = unsafe { mapping.base().add((region.mmap_offset - start) as usize) };
    let place = Some(RegionMapping { mapping: Arc::new(mapping), base });
    Ok(Mapped { region, place, sealed, file })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::os::fd::OwnedFd;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn file(pages: u64) -> OwnedFd {
        let fd = fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        fs::ftruncate(&fd, pages * PAGE).unwrap();
        fd
    }

    fn region(gpa: u64, size: u64, user_addr: u64, mmap_offset: u64) -> Region {
        Region { gpa, size, user_addr, mmap_offset }
    }

    fn map(regions: &[(Region, u64)]) -> Result<Arc<Memory>, MemError> {
        Memory::map(regions.iter().map(|&(region, pages)| (region, file(pages))).collect())
    }

    #[test]
    fn a_table_without_regions_or_with_too_many_is_refused() {
        assert!(matches!(map(&[]), Err(MemError::NoRegions)));
        let many: Vec<_> = (0..510).map(|i| (region(i * PAGE, PAGE, i * PAGE, 0), 1)).collect();
        assert!(matches!(map(&many), Err(MemError::TooManyRegions { count: 510, max: 509 })));
        assert!(map(&many[..509]).is_ok());
    }

    #[test]
    fn a_file_that_is_not_memory_is_not_mapped_and_no_address_in_it_translates() {
        // A file on a disk, which a process (FUSE) may serve.
        let disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        disk.set_len(4 * PAGE).unwrap();
        let disk: OwnedFd = disk.into();
        let (foreign, own) = (region(0, 2 * PAGE, 64 * PAGE, 0), region(2 * PAGE, PAGE, 0, 0));
        let again = disk.try_clone().unwrap();
        let memory = Memory::map(vec![(foreign, disk), (own, file(1))]).unwrap();
        assert_eq!(memory.unmapped().collect::<Vec<_>>(), [&foreign]);
        assert_eq!(memory.regions().len(), 2);
        assert!(memory.has(&foreign, again.as_fd()) && memory.has(&foreign, file(2).as_fd()));
        let (own_too, others) = (file(1), file(2));
        let second = Memory::map(vec![(foreign, others), (own, own_too)]).unwrap();
        assert!(!memory.agrees_with(&second), "another file of memory");
        let third = Memory::map(vec![(foreign, file(2))]).unwrap();
        assert!(memory.agrees_with(&third) && third.agrees_with(&memory));
        for addr in [0, PAGE, 2 * PAGE - 1] {
            assert!(memory.find_gpa(addr).is_none());
            assert!(memory.find_user(64 * PAGE + addr).is_none());
            assert!(memory.user_to_gpa(64 * PAGE + addr).is_none());
        }
        assert!(memory.find_gpa(2 * PAGE).is_some() && memory.find_user(0).is_some());
        // It takes up its addresses all the same.
        let over = memory.with(region(PAGE, PAGE, 128 * PAGE, 0), file(1));
        assert!(matches!(over, Err(MemError::Overlap { .. })));
        assert_eq!(memory.without(&foreign).unwrap().unmapped().count(), 0);
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        let null = OwnedFd::from(std::fs::File::open("/dev/zero").unwrap());
        for fd in [again, pipe, null] {
            let all = Memory::map(vec![(foreign, fd)]).unwrap();
            assert!(all.find_gpa(0).is_none() && all.check().is_ok());
        }
    }

    #[test]
    fn memories_agree_if_what_both_have_is_the_same() {
        let (one, other) = (file(8), file(8));
        let memory = |file: &OwnedFd, gpa: u64, pages: u64, offset: u64| {
            let region = region(gpa * PAGE, pages * PAGE, 0, offset * PAGE);
            Memory::map(vec![(region, file.try_clone().unwrap())]).unwrap()
        };
        let all = memory(&one, 16, 8, 0);
        for (with, agrees) in [
            (memory(&one, 16, 8, 0), true),
            (memory(&one, 18, 4, 2), true),
            (memory(&one, 18, 4, 1), false),
            (memory(&other, 16, 8, 0), false),
            (memory(&other, 23, 8, 0), false),
            (memory(&other, 24, 8, 0), true),
            (memory(&other, 8, 8, 0), true),
        ] {
            assert_eq!((all.agrees_with(&with), with.agrees_with(&all)), (agrees, agrees));
        }
    }

    #[test]
    fn a_region_of_zero_bytes_is_refused() {
        assert!(matches!(map(&[(region(0, 0, 0, 0), 1)]), Err(MemError::Empty)));
    }

    #[test]
    fn a_region_whose_addresses_wrap_is_refused() {
        let end = u64::MAX - (PAGE - 1);
        assert!(map(&[(region(end, PAGE, end, 0), 1)]).is_ok());
        for bad in [
            region(end, PAGE + 1, 0, 0),
            region(0, PAGE + 1, end, 0),
            region(0, PAGE + 1, 0, end),
            region(0, u64::MAX, 0, PAGE),
        ] {
            assert!(matches!(map(&[(bad, 2)]), Err(MemError::Wraps { .. })), "{bad:?}");
        }
    }

    #[test]
    fn a_region_that_is_not_page_aligned_is_refused() {
        for bad in [region(8, PAGE, 0, 0), region(0, PAGE, 8, 0), region(0, PAGE, 0, 8)] {
            assert!(matches!(map(&[(bad, 2)]), Err(MemError::Misaligned { .. })), "{bad:?}");
        }
    }

    #[test]
    fn a_file_that_ends_before_its_region_is_refused() {
        let error = map(&[(region(0, 2 * PAGE, 0, PAGE), 2)]).unwrap_err();
        assert!(matches!(error, MemError::FileTooShort { needed: 0x3000, actual: 0x2000 }));
        assert!(map(&[(region(0, 2 * PAGE, 0, PAGE), 3)]).is_ok());
    }

    #[test]
    fn regions_that_overlap_in_either_address_space_are_refused() {
        let a = (region(0, 2 * PAGE, 0x10_0000, 0), 2);
        let gpa = map(&[a, (region(PAGE, PAGE, 0x20_0000, 0), 1)]).unwrap_err();
        assert!(matches!(gpa, MemError::Overlap { what: "guest-physical address", addr: PAGE }));
        let user = map(&[a, (region(0x8000, PAGE, 0x10_1000, 0), 1)]).unwrap_err();
        assert!(matches!(user, MemError::Overlap { what: "user address", addr: 0x10_1000 }));
        assert!(map(&[a, (region(2 * PAGE, PAGE, 0x10_2000, 0), 1)]).is_ok());
    }

    #[test]
    fn user_addresses_resolve_through_the_region_that_holds_them() {
        // rule D3
        let memory = map(&[
            (region(0x10_0000, 2 * PAGE, 0x7f00_0000_0000, 0), 2),
            (region(0, PAGE, 0x7f00_0000_2000, 0), 1),
        ])
        .unwrap();
        assert_eq!(memory.user_to_gpa(0x7f00_0000_1234), Some(0x10_1234));
        assert_eq!(memory.user_to_gpa(0x7f00_0000_2234), Some(0x234));
        assert_eq!(memory.user_to_gpa(0x7f00_0000_3000), None);
        assert_eq!(memory.user_to_gpa(0x10_0000), None);
        let (user, gpa) =
            (memory.find_user(0x7f00_0000_1234).unwrap(), memory.find_gpa(0x10_1234).unwrap());
        assert_eq!(user.slice.as_ptr(), gpa.slice.as_ptr());
        assert_eq!(user.slice.len(), 0x2000 - 0x1234);
    }

    #[test]
    fn a_region_can_be_added_and_removed_and_the_rest_stays_where_it_is() {
        let memory = map(&[(region(0, PAGE, 0, 0), 1)]).unwrap();
        let more = region(PAGE, PAGE, PAGE, 0);
        let two = memory.with(more, file(1)).unwrap();
        assert_eq!(two.regions().len(), 2);
        let at = |memory: &Memory| memory.find_gpa(0).unwrap().slice.as_ptr();
        assert_eq!(at(&memory), at(&two));
        assert!(matches!(two.with(more, file(1)), Err(MemError::Overlap { .. })));
        let (same, other) = (file(2), region(2 * PAGE, PAGE, 2 * PAGE, PAGE));
        let three = two.with(other, same.try_clone().unwrap()).unwrap();
        assert!(three.has(&other, same.as_fd()) && !two.has(&other, same.as_fd()));
        assert!(!three.has(&other, file(2).as_fd()));
        assert!(!three.has(&Region { mmap_offset: 0, ..other }, same.as_fd()));
        let one = two.without(&more).unwrap();
        assert!(one.find_gpa(PAGE).is_none() && two.find_gpa(PAGE).is_some());
        assert!(matches!(one.without(&more), Err(MemError::NoSuchRegion { .. })));
        let none = one.without(&region(0, PAGE, 0, 0)).unwrap();
        assert!(none.find_gpa(0).is_none());
    }

    #[test]
    fn seals_are_seen() {
        let ram = GuestRam::new(PAGE_SIZE, 0).unwrap();
        assert!(Memory::of_ram(&ram).unwrap().is_sealed());
        assert!(!map(&[(region(0, PAGE, 0, 0), 1)]).unwrap().is_sealed());
    }
}
