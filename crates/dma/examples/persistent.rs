//! An arena that is mapped once, for all the I/Os in it; and what that exposes.

use std::sync::Arc;

use ringfence_dma::{Device, Direction, DmaConfig, Policy};
use ringfence_iommu::{
    Domain, Geometry, HostAddr, Iova, PageSizes, Range, SoftDomain, shootdown::Shootdown,
    table::Limits,
};
use ringfence_iova::{Aperture, Slabs};
use ringfence_sync::cpu::OsCpu;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let aperture = Range::new(Iova(0), Iova((1 << 48) - 1)).expect("not empty");
    let sizes = PageSizes::from_granule(4096).expect("a power of two");
    let geometry = Geometry::new(sizes, aperture);
    let domain = SoftDomain::<HostAddr>::new(geometry, Limits::NONE, Shootdown::new(8));
    let allocator = Slabs::new(Aperture::new(0, (1 << 48) - 1, 4096)?, OsCpu::new());
    let device = Device::new(Arc::clone(&domain), allocator, DmaConfig::new(Policy::StrictMap))?;

    let arena = device.map_persistent(vec![0u8; 1 << 20], Direction::FromDevice)?;
    let requests = device.stats().map_calls;
    for io in 0..1000u64 {
        let part = (io % 16) << 16;
        // What goes into descriptors. Who owns which part of the arena is the program's affair.
        let segments: Vec<_> = arena.segments_for(part..part + (64 << 10))?.collect();
        assert_eq!(segments.len(), 1);
        // ... the device writes there, and says so ...
        arena.sync_for_cpu(part..part + (64 << 10))?;
    }
    let stats = device.stats();
    println!("1000 I/Os, {} requests to the domain for them", stats.map_calls - requests);
    println!("all the while the device reaches {} bytes", stats.persistent_bytes);

    let iova = arena.iova();
    let buffer = arena.unmap()?;
    println!("{} bytes are back; {iova:?} leads to {:?}", buffer.len(), domain.iova_to_phys(iova));
    assert_eq!(device.stats().persistent_bytes, 0);
    Ok(())
}
