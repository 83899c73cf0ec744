//! Reads the first block of an NVMe disk that is bound to vfio-pci: `nvme 0000:01:00.0`.
//!
//! The controller can reach only the block's buffer, while it reads it, and the queues.

use std::sync::Arc;

use ringfence_dma::{Device, DmaConfig, Policy};
use ringfence_drivers::nvme::{Buffer, Controller, ControllerConfig, Data, Op};
use ringfence_iova::{Aperture, Slabs};
use ringfence_sync::cpu::OsCpu;
use ringfence_vfio::{Tuning, Type1, kernel::Attached};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(address) = std::env::args().nth(1) else {
        println!("nvme PCI-ADDRESS: of a disk that vfio-pci has");
        return Ok(());
    };
    let container = Attached::of_device(&address)?;
    let pci = container.device(&address)?;
    pci.set_bus_master(true)?;
    let domain = Arc::new(Type1::new(container, Tuning::default())?);
    let addresses = Slabs::new(Aperture::new(0, (1 << 39) - 1, 4096)?, OsCpu::new());
    let device = Device::builder(domain)
        .allocator(addresses)
        .config(DmaConfig::new(Policy::StrictMap))
        .build()?;

    let disk = Controller::start(device, pci.bar(0)?, ControllerConfig::default())?;
    println!("{:?}", disk.identity());
    for space in disk.namespaces() {
        println!("namespace {}: {} blocks of {}", space.id(), space.blocks(), space.block_bytes());
        let mut queue = disk.queue(32)?;
        let data = Data::Buffer(Buffer::new(space.block_bytes() as usize).ok_or("no memory")?);
        let read = queue.carry_out(space, Op::Read { lba: 0 }, data)?;
        read.outcome?;
        if let Data::Buffer(block) = read.data {
            println!("its first bytes: {:02x?}", &block[..16]);
        }
    }
    disk.shut_down()?;
    Ok(())
}
