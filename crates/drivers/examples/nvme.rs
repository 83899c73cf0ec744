//! Reads the first block of an NVMe disk that is bound to vfio-pci: `nvme 0000:01:00.0`.
//!
//! The controller can reach only the block's buffer, while it reads it, and the queues.

use ringfence_dma::Device;
use ringfence_drivers::nvme::{Buffer, Controller, ControllerConfig, Data, Op};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(address) = std::env::args().nth(1) else {
        println!("nvme PCI-ADDRESS: of a disk that vfio-pci has");
        return Ok(());
    };
    let vfio = ringfence_vfio::open(&address)?;
    vfio.device.set_bus_master(true)?;
    let dma = Device::builder(vfio.domain).build()?;

    let disk = Controller::start(dma, vfio.device.bar(0)?, ControllerConfig::default())?;
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
