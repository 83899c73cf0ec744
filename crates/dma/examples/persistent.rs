//! An arena that is mapped once, for all I/Os in it; and what that exposes.

use std::sync::Arc;

use ringfence_dma::{Device, Direction};
use ringfence_iommu::{Domain, HostAddr, SoftDomain};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let domain = SoftDomain::<HostAddr>::x86();
    let device = Device::builder(Arc::clone(&domain)).build()?;

    let arena = device.map_persistent(vec![0u8; 1 << 20], Direction::FromDevice)?;
    let requests = device.stats().map_calls;
    for io in 0..1000u64 {
        let part = (io % 16) << 16;
        // For descriptors. The program tracks which part of the arena is in use.
        let segments: Vec<_> = arena.segments_for(part..part + (64 << 10))?.collect();
        assert_eq!(segments.len(), 1);
        // ... the device writes there and reports it ...
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
