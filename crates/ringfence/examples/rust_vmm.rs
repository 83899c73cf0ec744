//! A device of rust-vmm behind an IOMMU, unchanged:
//! `cargo run -p ringfence --features rust-vmm --example rust_vmm`
use std::{io::Read, ops::Deref, sync::Arc};

use ringfence::rust_vmm::virtio_queue::{Queue, QueueT, desc::split::Descriptor};
use ringfence::rust_vmm::vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryMmap};
use ringfence::{rust_vmm::IotlbAddressSpace, vmm::*, *};

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    // The driver: a ring at its address 0, a request of 13 bytes in two pages at 0x3ffe.
    let base = 0x10_0000;
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(base), 0x10_0000)])?;
    memory.write_obj(Descriptor::new(0x3ffe, 13, 0, 0), GuestAddress(base))?;
    memory.write_obj(1u16, GuestAddress(base + 0x1002))?;
    memory.write_slice(b"hello, device", GuestAddress(base + 0x3ffe))?;
    // The IOMMU: what the driver may be reached at.
    let shootdown = Shootdown::new(4);
    let geometry = Geometry::new(PageSizes::X86, Range::ALL);
    let domain = SoftDomain::new(geometry, Limits::NONE, Arc::clone(&shootdown));
    let pages = Range::new(Iova(0), Iova(0x4fff)).ok_or("no range")?;
    domain.map(Map::new(pages, GuestPhys(base), Prot::RW))?;
    // The device, as it is over plain memory.
    let endpoint = Endpoint::new(1, shootdown, Binding::Domain(domain));
    let space = IotlbAddressSpace::new(endpoint, Arc::new(memory)).ok_or("a reader too many")?;
    let mut queue = Queue::new(16)?;
    queue.try_set_avail_ring_address(GuestAddress(0x1000))?;
    queue.try_set_used_ring_address(GuestAddress(0x2000))?;
    queue.set_ready(true);
    let guard = space.memory();
    let chain = queue.pop_descriptor_chain(guard.clone()).ok_or("no request")?;
    let (head, mut request) = (chain.head_index(), String::new());
    chain.reader(guard.deref())?.read_to_string(&mut request)?;
    guard.check()?; // an access that the IOMMU refused may have looked like an end
    queue.add_used(guard.deref(), head, 0)?;
    println!("device: {request:?}; {:?}", space.counters());
    Ok(())
}
