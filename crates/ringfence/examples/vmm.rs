//! virtio-iommu in a VMM of rust-vmm:
//! `cargo run -p ringfence --features rust-vmm --example vmm`
use ringfence::rust_vmm::virtio_queue::{Queue as VmmQueue, QueueT};
use ringfence::rust_vmm::vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use ringfence::rust_vmm::vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};
use ringfence::rust_vmm::vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use ringfence::rust_vmm::{GuestBus, IotlbAddressSpace, VmmIommu};
use ringfence::{viommu::*, vmm::*, *};
use std::{sync::Arc, thread, time::Duration};

/// In place of a guest: KVM would signal the descriptor when the guest writes to the doorbell.
struct Guest(EventFd);
impl Transport for Guest {
    fn kick(&self, _queue: u16) {
        let _ = self.0.write(1);
    }
    fn wait(&self, _queue: u16, _timeout: Duration) {
        thread::yield_now();
    }
}

fn main() -> core::result::Result<(), Box<dyn std::error::Error>> {
    // The VMM's part: guest memory, an endpoint, and the virtio-iommu before it.
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 16 << 20)])?;
    let (memory, shootdown) = (GuestMemoryAtomic::new(memory), Shootdown::new(4));
    let endpoint = Endpoint::new(8, Arc::clone(&shootdown), Binding::Blocked);
    let all = Geometry::new(PageSizes::X86, Range::ALL);
    let behind = Endpoints::new([Arc::clone(&endpoint)], shootdown, all, Limits::NONE);
    let iommu = VmmIommu::new(Arc::new(behind), Default::default(), Default::default())?;
    // The guest's driver sets up its queue; `ack_features`, the kick and the ring's place are ours.
    let (config, (ring, at, size)) = (iommu.local().device().config(), (0x1_0000, 0x2_0000, 64));
    let (config, features) = (IommuConfig::parse(&config)?, negotiate(iommu.local().features()));
    iommu.local().ack_features(features.bits() | F_VERSION_1)?;
    let (kick, bus) = (EventFd::new(EFD_NONBLOCK)?, GuestBus::new(memory.memory())?);
    let front = Rings::in_window(&bus.window(ring, 0x1000, Access::ReadWrite)?, size)?;
    let (front, bell) = (Queue::new(size, front, false)?, Arc::new(Guest(kick.try_clone()?)));
    let window = bus.window(at, Driver::buffer_bytes(size, &config) as u64, Access::ReadWrite)?;
    let (buffers, options) = (Buffers { window, addr: at }, DriverConfig::default());
    let driver = Driver::new(bell, front, buffers, config, features, options)?;
    // The VMM's part at DRIVER_OK: it knows the addresses from its transport.
    let (mut queue, areas) = (VmmQueue::new(size)?, layout::offsets(size));
    queue.try_set_desc_table_address(GuestAddress(ring + areas.desc as u64))?;
    queue.try_set_avail_ring_address(GuestAddress(ring + areas.avail as u64))?;
    queue.try_set_used_ring_address(GuestAddress(ring + areas.used as u64))?;
    queue.set_ready(true);
    iommu.activate(memory.clone(), vec![(0, queue, kick)], |_queue| { /* its irqfd */ })?;
    // A device of rust-vmm behind endpoint 8; the guest maps a page; the device uses it.
    let device = IotlbAddressSpace::new(endpoint, memory.clone()).ok_or("a reader too many")?;
    let range = Range::from_len(Iova(0x10_0000), 0x1000).ok_or("no range")?;
    let domain = driver.domain()?;
    domain.attach(8)?;
    domain.map(Map::new(range, GuestPhys(0x7000), Prot::RW))?;
    domain.iotlb_sync_map(range)?;
    device.memory().write_obj(*b"dma", GuestAddress(0x10_0040))?;
    let found: [u8; 3] = memory.memory().read_obj(GuestAddress(0x7040))?;
    println!("written at 0x100040, found at 0x7040: {:?}", std::str::from_utf8(&found)?);
    Ok(()) // The driver ends before its device, which completes its requests.
}
