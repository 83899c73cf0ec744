//! A device of rust-vmm behind an IOMMU: virtio-queue over an IOTLB whose front end supplies each
//! translation on a miss. `cargo run --package ringfence-rust-vmm --example device`
use ringfence_iommu::{GuestPhys, Iova, Prot, Range, shootdown::Shootdown};
use ringfence_iotlb::{Binding, Endpoint, Iotlb, IotlbConfig, Miss, MissSink};
use ringfence_rust_vmm::{FailureScope, IotlbAddressSpace};
use std::{error::Error, io::Read, ops::Deref, sync::Arc, sync::mpsc, thread};
use virtio_queue::{Queue, QueueT, desc::split::Descriptor};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryMmap};

/// The guest-physical address of the driver's address 0.
const BASE: u64 = 0x10_0000;

struct FrontEnd(mpsc::Sender<Miss>);

impl MissSink for FrontEnd {
    fn send(&self, misses: &[Miss]) -> usize {
        misses.iter().take_while(|&&miss| self.0.send(miss).is_ok()).count()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let ranges = [(GuestAddress(BASE), 0x10_0000)];
    let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&ranges)?);
    // The driver: a request at IOVA 0x3ffe, in two pages, and a ring below it.
    memory.write_slice(b"hello, device", GuestAddress(BASE + 0x3ffe))?;
    memory.write_obj(Descriptor::new(0x3ffe, 13, 0, 0), GuestAddress(BASE))?;
    memory.write_obj(1u16, GuestAddress(BASE + 0x1002))?;
    let shootdown = Shootdown::new(4);
    let iotlb = Iotlb::new(IotlbConfig::default(), Arc::clone(&shootdown));
    let (to, misses) = mpsc::channel();
    iotlb.set_miss_sink(Some(Arc::new(FrontEnd(to))));
    let table = Arc::clone(&iotlb);
    thread::spawn(move || {
        for Miss { iova: Iova(addr), access, .. } in misses {
            println!("front end: {addr:#x} for {access:?}");
            let page = Range::from_len(Iova(addr & !0xfff), 4096).expect("a page");
            table.update(page, GuestPhys(BASE + page.first().0), Prot::RW).expect("room");
        }
    });
    // The device, as it would be written for plain memory.
    let endpoint = Endpoint::new(1, shootdown, Binding::Iotlb(iotlb));
    let space = IotlbAddressSpace::with_scope(endpoint, Arc::clone(&memory), FailureScope::Guard)
        .ok_or("a reader too many")?;
    let mut queue = Queue::new(16)?;
    queue.try_set_avail_ring_address(GuestAddress(0x1000))?;
    queue.try_set_used_ring_address(GuestAddress(0x2000))?;
    queue.set_ready(true);
    let guard = space.memory();
    let chain = queue.pop_descriptor_chain(guard.clone()).ok_or("no request")?;
    let (head, mut request) = (chain.head_index(), String::new());
    chain.reader(guard.deref())?.read_to_string(&mut request)?;
    guard.check()?; // before it is published: an error may have looked like an end
    queue.add_used(guard.deref(), head, 0)?;

    let published: u16 = memory.read_obj(GuestAddress(BASE + 0x2002))?;
    assert_eq!((request.as_str(), published), ("hello, device", 1));
    println!("device: {request:?}; {:?}", space.counters());
    Ok(())
}
