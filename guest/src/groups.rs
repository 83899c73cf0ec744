//! Two disks of two groups: apart, in a container each, one does not reach what the other may; together,
//! in one container, both reach the same. And what a container's requests do in great numbers.

use std::{sync::Arc, time::Instant};

use anyhow::{Context, Result, ensure};
use ringfence_iommu::{Domain, Gather, HostAddr, Iova, Map, Prot, Range};
use ringfence_mem::GuestRam;
use ringfence_vfio::{
    Tuning, Type1,
    kernel::{Attached, Container, Device, Group},
};

use crate::{
    PAGE, STATIC, TAKEN,
    blk::{Disk, Io, LIMIT},
    bytes, map, pattern, unmap,
};

/// A disk by its PCI address, and its group.
pub(crate) type Named<'a> = (&'a str, u32);

/// The memory of the second disk's rings: elsewhere than the first one's, so that both can lie in one
/// domain.
const SECOND: u64 = STATIC + (4 << 20);

fn container(group: u32) -> Result<Attached> {
    Ok(Container::open()?.attach(Group::open(group)?)?)
}

fn domain(container: Attached) -> Result<Type1<Attached>> {
    Ok(Type1::new(container, Tuning::default())?)
}

fn start(device: &Device, domain: &Type1<Attached>, at: u64) -> Result<Disk> {
    let ram = GuestRam::new(2 << 20, at)?;
    map(domain, &ram)?;
    Disk::start(device, Arc::clone(&ram))
}

/// Whether a disk can write its sector 0 to the page at [`TAKEN`], and its sector 8 from it.
fn reaches(disk: &mut Disk) -> Result<[bool; 2]> {
    let io = |write, sector| Io { write, sector, addr: TAKEN, len: PAGE as u32 };
    Ok([disk.one(io(false, 0), LIMIT)?, disk.one(io(true, 8), LIMIT)?])
}

/// Puts bytes onto the disk's first sectors from its own memory.
fn fill(disk: &mut Disk, at: u64, content: &[u8]) -> Result<()> {
    let own = disk.carve(PAGE)?;
    disk.ram().slice(own, PAGE)?.copy_from(content);
    let io = |sector| Io { write: true, sector, addr: at + own as u64, len: PAGE as u32 };
    disk.all([io(0), io(8)])
}

/// All that the two may and may not.
pub(crate) fn check(first: Named<'_>, second: Named<'_>) -> Result<()> {
    apart(first, second).context("apart")?;
    together(first, second).context("together")
}

fn apart(first: Named<'_>, second: Named<'_>) -> Result<()> {
    let (one, other) = (container(first.1)?, container(second.1)?);
    let devices = (one.device(first.0)?, other.device(second.0)?);
    let (one, other) = (domain(one)?, domain(other)?);
    let (mut disk, mut stranger) =
        (start(&devices.0, &one, STATIC)?, start(&devices.1, &other, SECOND)?);
    fill(&mut disk, STATIC, &pattern(PAGE, 1))?;
    fill(&mut stranger, SECOND, &pattern(PAGE, 2))?;

    // A page of the first one's domain: the same address leads the other nowhere.
    let page = GuestRam::new(PAGE, TAKEN)?;
    map(&one, &page)?;
    page.slice(0, PAGE)?.copy_from(&pattern(PAGE, 3));
    for _ in 0..3 {
        ensure!(reaches(&mut stranger)? == [false, false], "a stranger reaches the page");
    }
    ensure!(bytes(&page, 0, PAGE)? == pattern(PAGE, 3), "a stranger has written to the page");
    ensure!(reaches(&mut disk)? == [true, true], "the page is out of its own disk's reach");
    ensure!(bytes(&page, 0, PAGE)? == pattern(PAGE, 1), "the page has another disk's bytes");

    // The same address in the other's domain is another page.
    let others = GuestRam::new(PAGE, TAKEN)?;
    map(&other, &others)?;
    ensure!(reaches(&mut stranger)? == [true, true], "a mapped page is out of reach");
    ensure!(bytes(&others, 0, PAGE)? == pattern(PAGE, 2), "the page has the wrong bytes");
    ensure!(
        bytes(&page, 0, PAGE)? == pattern(PAGE, 1),
        "one domain's disk wrote to another's page"
    );

    // What ends in one domain goes on in the other.
    unmap(&one, &page)?;
    ensure!(reaches(&mut disk)? == [false, false], "an unmapped page is in reach");
    ensure!(reaches(&mut stranger)? == [true, true], "an unmap has taken another domain's page");
    println!("apart");
    Ok(())
}

fn together(first: Named<'_>, second: Named<'_>) -> Result<()> {
    let both = container(first.1)?;
    both.add(Group::open(second.1)?)?;
    let devices = (both.device(first.0)?, both.device(second.0)?);
    let both = domain(both)?;
    let mut disks =
        [(start(&devices.0, &both, STATIC)?, STATIC), (start(&devices.1, &both, SECOND)?, SECOND)];
    let page = GuestRam::new(PAGE, TAKEN)?;
    map(&both, &page)?;
    for (n, (disk, at)) in disks.iter_mut().enumerate() {
        fill(disk, *at, &pattern(PAGE, 4 + n))?;
        ensure!(reaches(disk)? == [true, true], "disk {n} does not reach the shared page");
        ensure!(bytes(&page, 0, PAGE)? == pattern(PAGE, 4 + n), "disk {n} wrote something else");
    }
    unmap(&both, &page)?;
    for (n, (disk, _)) in disks.iter_mut().enumerate() {
        ensure!(reaches(disk)? == [false, false], "disk {n} reaches what was unmapped");
    }
    println!("together");
    Ok(())
}

/// Maps and unmaps pages of a group no device of which is used, until that many mappings have come
/// and gone.
pub(crate) fn requests(group: u32, count: usize) -> Result<()> {
    const PAGES: usize = 16;
    let domain = domain(container(group)?)?;
    let ram = GuestRam::new(PAGES * PAGE, STATIC)?;
    ram.slice(0, PAGES * PAGE)?.fill_zero();
    let range = |at: usize, len: usize| {
        Range::from_len(Iova(STATIC + (at * PAGE) as u64), (len * PAGE) as u64).context("no range")
    };
    let (mut mapped, begun) = (0, Instant::now());
    while mapped < count {
        // Every other page, so that each is a mapping of its own.
        for at in 0..PAGES {
            let (range, from) = (range(2 * at, 1)?, ram.user_addr() + (at * PAGE) as u64);
            // SAFETY: memory that lives as long as the process.
            domain.map(unsafe { Map::of(range, HostAddr(from), Prot::RW) })?;
            domain.iotlb_sync_map(range)?;
        }
        let mut gather = Gather::new();
        let removed = domain.unmap(range(0, 2 * PAGES)?, &mut gather)?;
        domain.iotlb_sync(&mut gather)?;
        ensure!(removed == (PAGES * PAGE) as u128, "an unmap removed {removed:#x} bytes");
        mapped += PAGES;
    }
    println!("requests {mapped} {:.3}", begun.elapsed().as_secs_f64());
    Ok(())
}
