//! A user-space driver of a virtio disk, inside a guest, over VFIO: what the device may reach is
//! what this program maps, and the kernel's unsafe mode without an IOMMU is not needed.
//!
//! `vfio-blk PCI-ADDRESS GROUP`: writes and reads sectors through memory that is mapped once, then
//! takes a page away and asks the device for it. `vfio-blk domain GROUP`: asks the kernel
//! for its rules and tries what a domain owes, without a device. `vfio-blk groups ADDRESS GROUP ADDRESS
//! GROUP`: two disks in two domains, and in one. `vfio-blk requests GROUP COUNT`: that many mappings that
//! no device uses. A line for each thing that was found in order; the first that is not ends the program
//! with an error.

mod blk;
mod domain;
mod groups;
mod pci;

use std::{env, sync::Arc, thread::sleep, time::Duration};

use anyhow::{Context, Result, ensure};
use blk::{Disk, Io};
use ringfence_iommu::{Domain, Gather, HostAddr, Iova, Map, Prot, Range};
use ringfence_mem::GuestRam;
use ringfence_vfio::{
    Iommufd, Tuning, Type1,
    kernel::{Container, Device, Group, IommuFile},
};

/// Where the memory of all I/O lies for the device.
const STATIC: u64 = 0x0100_0000;
/// Where the page lies that is taken away: far from it, so that nothing merges them.
const TAKEN: u64 = 0x0500_0000;
const PAGE: usize = 4096;

fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let mut next = |what| arguments.next().with_context(|| format!("{what} is missing"));
    let (address, group) = (next("the device's PCI address")?, next("its group")?);
    if group == "iommufd" {
        return iommufd(&address);
    }
    if address == "requests" {
        return groups::requests(group.parse()?, next("how many")?.parse()?);
    }
    if address == "groups" {
        // What was taken for a group is the first disk's address.
        let first = (group.as_str(), next("its group")?.parse()?);
        let address = next("the second disk's PCI address")?;
        return groups::check(first, (&address, next("its group")?.parse()?));
    }
    if address == "domain" {
        let container = Container::open()?.attach(Group::open(group.parse()?)?)?;
        domain::rules(&container)?;
        return domain::check(&Type1::new(container, Tuning::default())?);
    }
    let opened = ringfence_vfio::open(&address)?;
    drive(&opened.domain, &opened.device)
}

/// The same over an iommufd, after its rules have been asked.
fn iommufd(address: &str) -> Result<()> {
    let file = IommuFile::open()?;
    let bound = file.bind(address)?;
    domain::iommufd_rules(&file, bound.id)?;
    let domain = Iommufd::new(file, Tuning::default())?;
    bound.attach(domain.ioas())?;
    domain.refresh()?;
    println!("geometry {:?}", domain.geometry());
    drive(&domain, &bound.device)
}

/// Data comes back as it was written, and what is not mapped is out of reach.
fn drive(domain: &impl Domain<Target = HostAddr>, device: &Device) -> Result<()> {
    // A device that cannot be reset this way is reset by its driver.
    let _ = device.reset();
    let ram = GuestRam::new(4 << 20, STATIC)?;
    map(domain, &ram)?;
    let mut disk = Disk::start(device, Arc::clone(&ram))?;
    println!("capacity {}", disk.capacity());
    static_mapping(&mut disk)?;
    isolation(domain, &mut disk)?;
    println!("over");
    Ok(())
}

/// Lets devices reach memory at its guest-physical address, which is an IOVA here.
fn map(domain: &impl Domain<Target = HostAddr>, ram: &GuestRam) -> Result<()> {
    let range = place(ram)?;
    // SAFETY: the memory lives as long as the domain.
    domain.map(unsafe { Map::of(range, HostAddr(ram.user_addr()), Prot::RW) })?;
    domain.iotlb_sync_map(range)?;
    Ok(())
}

/// Takes it away again: over when this returns.
fn unmap(domain: &impl Domain<Target = HostAddr>, ram: &GuestRam) -> Result<()> {
    let mut gather = Gather::new();
    let removed = domain.unmap(place(ram)?, &mut gather)?;
    ensure!(removed == ram.len() as u128, "an unmap removed {removed:#x} bytes");
    domain.iotlb_sync(&mut gather)?;
    Ok(())
}

fn place(ram: &GuestRam) -> Result<Range> {
    Range::from_len(Iova(ram.gpa()), ram.len() as u64).context("no memory")
}

/// Reads back what was written, in requests of several sizes, many at a time.
fn static_mapping(disk: &mut Disk) -> Result<()> {
    let room = 1 << 20;
    let (out, back) = (disk.carve(room)?, disk.carve(room)?);
    for size in [512, 4096, 65536] {
        let count = room / size;
        for at in 0..count {
            disk.ram().slice(out + at * size, size)?.copy_from(&pattern(size, at));
        }
        let io = |write, base: usize| {
            move |at: usize| Io {
                write,
                sector: (at * size / 512) as u64,
                addr: STATIC + (base + at * size) as u64,
                len: size as u32,
            }
        };
        disk.all((0..count).map(io(true, out)))?;
        disk.ram().slice(back, room)?.fill_zero();
        disk.all((0..count).map(io(false, back)))?;
        for at in 0..count {
            ensure!(
                bytes(disk.ram(), back + at * size, size)? == pattern(size, at),
                "request {at} of {size} bytes did not come back as it was written"
            );
        }
        println!("static {size} {count}");
    }
    Ok(())
}

/// What is not mapped any more is out of the device's reach, both ways, and back in it once it is
/// mapped again.
fn isolation(domain: &impl Domain<Target = HostAddr>, disk: &mut Disk) -> Result<()> {
    let page = GuestRam::new(PAGE, TAKEN)?;
    let own = disk.carve(PAGE)?;
    let over_page = |write, sector| Io { write, sector, addr: TAKEN, len: PAGE as u32 };
    let over_own =
        |write, sector| Io { write, sector, addr: STATIC + own as u64, len: PAGE as u32 };
    let (public, secret) = (pattern(PAGE, 1), pattern(PAGE, 2));

    // Sector 0 has public data; the device has used the page, and knows where it lies.
    disk.ram().slice(own, PAGE)?.copy_from(&public);
    disk.all([over_own(true, 0), over_own(true, 8)])?;
    map(domain, &page)?;
    disk.all([over_page(false, 0)])?;
    ensure!(bytes(&page, 0, PAGE)? == public, "the device did not write to a mapped page");

    page.slice(0, PAGE)?.copy_from(&secret);
    unmap(domain, &page)?;
    for round in 0..3 {
        let read = disk.one(over_page(false, 0), Duration::from_secs(30))?;
        ensure!(!read, "a read into a page that was unmapped succeeded (round {round})");
        let write = disk.one(over_page(true, 8), Duration::from_secs(30))?;
        ensure!(!write, "a write from a page that was unmapped succeeded (round {round})");
    }
    ensure!(bytes(&page, 0, PAGE)? == secret, "the device wrote to a page that was unmapped");
    disk.all([over_own(false, 8)])?;
    ensure!(bytes(disk.ram(), own, PAGE)? == public, "a page that was unmapped is on the disk");
    println!("unmapped is out of reach");

    // The device may have kept for a moment that there is nothing.
    sleep(Duration::from_millis(100));
    map(domain, &page)?;
    disk.all([over_page(true, 8)])?;
    disk.all([over_own(false, 8)])?;
    ensure!(bytes(disk.ram(), own, PAGE)? == secret, "the page was mapped again and not read");
    println!("mapped again is in reach");
    Ok(())
}

/// Bytes that say where they belong.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    let mut state = (len as u64) << 32 ^ (seed as u64 + 1);
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..len).map(next).collect()
}

fn bytes(ram: &GuestRam, offset: usize, len: usize) -> Result<Vec<u8>> {
    let mut out = vec![0; len];
    ram.slice(offset, len)?.copy_to(&mut out);
    Ok(out)
}
