//! The allocator of a device: slabs per CPU, a reserved range, 32 bits first.
//!
//! Run with `cargo run -p ringfence-iova --example stack`.

use std::{error::Error, sync::Arc};

use ringfence_iova::{Allocator, Aperture, Preferred32, Request, Slabs};
use ringfence_sync::cpu::OsCpu;

fn main() -> Result<(), Box<dyn Error>> {
    // What VFIO reports for a PC's IOMMU: 39 bits of 4 KiB pages, without the MSI window.
    let space = Arc::new(Slabs::new(Aperture::new(0, (1 << 39) - 1, 4096)?, OsCpu::new()));
    space.reserve(0xfee0_0000, 0xfeef_ffff)?;
    // Page 16 belongs to something else.
    space.reserve(0x1_0000, 0x1_0fff)?;
    // One device in it; others would share the space and have a preference of their own.
    let device = Preferred32::new(Arc::clone(&space));

    let buffers: Vec<(u64, u64)> = [512, 4096, 4096, 3 * 4096, 64 << 10, 1 << 20]
        .into_iter()
        .map(|size| Ok((device.alloc(&Request::new(size))?, size)))
        .collect::<Result<_, Box<dyn Error>>>()?;
    for (iova, size) in &buffers {
        println!("{size:>8} bytes at {iova:#012x}");
    }
    for (iova, size) in &buffers {
        device.free(*iova, *size)?;
    }
    // A second free is refused.
    let (iova, size) = buffers[0];
    println!("{}", device.free(iova, size).expect_err("it is free"));
    // Nothing that large exists: the error says so.
    println!("{}", device.alloc(&Request::new(1 << 50)).expect_err("larger than the aperture"));

    let stats = device.stats();
    println!(
        "{} allocated with {} searches; {} ranges are kept for the next",
        stats.allocs, stats.searches, stats.cached_ranges
    );
    Ok(())
}
