//! A domain over the real kernel: that it is what the fake one is in the tests.

use std::{fs::File, os::fd::AsRawFd, ptr::null_mut};

use anyhow::{Result, ensure};
use ringfence_iommu::{Domain, Error, Gather, HostAddr, Iova, Map, Prot, Range};
use ringfence_vfio::{
    DirtyMap, Type1, Usage,
    kernel::{Attached, Id, IommuFile},
};
use ringfence_vfio_testing::suite::{self, Outcome, Verdict};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
/// Where all of this lies for devices: nothing else does.
const PLACE: u64 = 0x1_0000_0000;

/// `len` bytes of address space, all of which lead to the same 2 MiB.
fn memory(len: u64) -> Result<u64> {
    let step = 2 * MIB as usize;
    // SAFETY: a name that ends with a zero.
    let fd = unsafe { libc::memfd_create(c"dma".as_ptr(), 0) };
    ensure!(fd >= 0, "memfd: {}", std::io::Error::last_os_error());
    // SAFETY: the descriptor was just made for us.
    let file: File = unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) };
    file.set_len(step as u64)?;
    let (none, flags) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let first = unsafe { libc::mmap(null_mut(), len as usize + step, none, flags, -1, 0) };
    ensure!(first != libc::MAP_FAILED, "no room for {len:#x} bytes");
    let first = (first as usize).next_multiple_of(step);
    for at in (first..first + len as usize).step_by(step) {
        let (both, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: it replaces a part of the mapping that was just made.
        let made = unsafe { libc::mmap(at as *mut _, step, both, flags, file.as_raw_fd(), 0) };
        ensure!(made != libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    }
    Ok(first as u64)
}

fn range(at: u64, len: u64) -> Result<Range> {
    Range::from_len(Iova(PLACE + at), len).ok_or_else(|| anyhow::anyhow!("an empty range"))
}

fn unmap(domain: &Type1<Attached>, range: Range) -> Result<u128, Error> {
    let mut gather = Gather::new();
    let bytes = domain.unmap(range, &mut gather)?;
    domain.iotlb_sync(&mut gather).map(|_synced| bytes)
}

/// The rules of type 1, asked of a container in which nothing is mapped.
pub(crate) fn rules(container: &Attached) -> Result<()> {
    let outcomes = suite::type1(container)?;
    judge(&outcomes)
}

/// The same of an iommufd, with a device that is bound to it.
pub(crate) fn iommufd_rules(kernel: &IommuFile, device: Id) -> Result<()> {
    judge(&suite::iommufd(kernel, Some(device))?)
}

fn judge(outcomes: &[Outcome]) -> Result<()> {
    outcomes.iter().for_each(|outcome| println!("{outcome}"));
    let failed = outcomes.iter().filter(|it| matches!(it.verdict, Verdict::Fail(_))).count();
    ensure!(failed == 0, "{failed} of {} rules are not kept", outcomes.len());
    Ok(())
}

/// Goes through all that a domain owes. Other mappings of it stay as they are.
pub(crate) fn check(domain: &Type1<Attached>) -> Result<()> {
    let geometry = domain.geometry();
    println!("geometry {:#x} {}", geometry.page_sizes.bitmap(), geometry.aperture);
    for region in geometry.reserved.iter() {
        println!("reserved {} {:?}", region.range, region.kind);
    }
    let before = domain.usage();
    budget(domain)?;
    whole(domain)?;
    dirty(domain)?;
    vaddr(domain)?;
    ensure!(domain.usage() == before, "{:?} is left of {before:?}", domain.usage());
    println!("a domain as in the tests");
    Ok(())
}

fn map_of(range: Range, target: HostAddr, prot: Prot) -> Map<HostAddr> {
    // SAFETY: memory of these checks' own, which lives as long as the process, or none.
    unsafe { Map::of(range, target, prot) }
}

/// Page by page is a handful of entries.
fn budget(domain: &Type1<Attached>) -> Result<()> {
    let len = 256 * MIB;
    let memory = memory(len)?;
    let page = |at| Ok(map_of(range(at, PAGE)?, HostAddr(memory + at), Prot::RW));
    let batch = (0..len / PAGE).map(|n| page(n * PAGE)).collect::<Result<Vec<_>>>()?;
    let free = domain.available();
    domain.map_batch(&batch)?;
    let taken = free.zip(domain.available()).map(|(before, now)| before - now);
    ensure!(taken.is_some_and(|taken| taken <= 4), "256 MiB took {taken:?} entries");
    let split = unmap(domain, range(0, PAGE)?);
    ensure!(matches!(split, Err(Error::WouldSplit { .. })), "{split:?}");
    ensure!(unmap(domain, range(0, len)?)? == u128::from(len));
    ensure!(domain.available() == free);
    println!("budget {} maps {taken:?} entries of {free:?}", batch.len());
    Ok(())
}

/// What is refused, and that what is not mapped stays so.
fn whole(domain: &Type1<Attached>) -> Result<()> {
    let memory = HostAddr(memory(2 * MIB)?);
    domain.map(map_of(range(0, 4 * PAGE)?, memory, Prot::READ))?;
    domain.map(map_of(range(4 * PAGE, PAGE)?, memory, Prot::RW))?;
    let again = domain.map(map_of(range(3 * PAGE, PAGE)?, memory, Prot::RW));
    ensure!(matches!(again, Err(Error::Exists { .. })), "{again:?}");
    // No memory lies at this address, which only the kernel knows.
    let absent = domain.map(map_of(range(8 * PAGE, PAGE)?, HostAddr(PAGE), Prot::RW));
    ensure!(matches!(absent, Err(Error::Kernel { errno: 14, .. })), "{absent:?}");
    ensure!(domain.iova_to_phys(Iova(PLACE + 8 * PAGE)).is_none());
    for region in domain.geometry().reserved.iter() {
        let first = Iova(region.range.first().0 & !(PAGE - 1));
        let inside = Range::from_len(first, PAGE).unwrap_or(region.range);
        ensure!(domain.map(map_of(inside, memory, Prot::RW)).is_err(), "{inside} was mapped");
    }
    ensure!(unmap(domain, range(0, 16 * PAGE)?)? == 5 * u128::from(PAGE));
    ensure!(unmap(domain, range(0, 16 * PAGE)?)? == 0);
    Ok(())
}

/// Hardware that does not track writes counts as having written everywhere.
fn dirty(domain: &Type1<Attached>) -> Result<()> {
    let (len, place) = (2 * MIB, range(0, 2 * MIB)?);
    domain.map(map_of(place, HostAddr(memory(len)?), Prot::RW))?;
    domain.start_dirty()?;
    let map = DirtyMap::new(place, PAGE);
    let mut map = map.ok_or_else(|| anyhow::anyhow!("no map of {place}"))?;
    domain.read_dirty(place, &mut map)?;
    ensure!(map.count() == len / PAGE, "{} pages are dirty", map.count());
    map.clear();
    ensure!(domain.unmap_dirty(place, &mut map)? == u128::from(len));
    ensure!(map.count() == len / PAGE, "{} pages were dirty", map.count());
    domain.stop_dirty()?;
    println!("dirty {}", map.count());
    Ok(())
}

/// The memory has moved, and DMA goes on.
fn vaddr(domain: &Type1<Attached>) -> Result<()> {
    let (place, memory) = (range(0, 2 * MIB)?, memory(4 * MIB)?);
    domain.map(map_of(place, HostAddr(memory), Prot::RW))?;
    match domain.begin_vaddr_update() {
        Ok(mut update) => {
            // SAFETY: what is asked about lies twice in this process, one time after the other;
            // everything else stays where it is.
            unsafe {
                update.finish(
                    |range, old| if range == place { HostAddr(memory + 2 * MIB) } else { old },
                )
            }?;
            drop(update);
            let found = domain.iova_to_phys(place.first());
            ensure!(found == Some(HostAddr(memory + 2 * MIB)), "{found:?}");
            println!("process addresses updated");
        }
        Err(Error::Unsupported(why)) => println!("process addresses stay: {why}"),
        Err(error) => return Err(error.into()),
    }
    ensure!(unmap(domain, place)? == u128::from(2 * MIB));
    ensure!(domain.usage().mismatches == Usage::default().mismatches);
    Ok(())
}
