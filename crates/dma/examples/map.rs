//! Maps a buffer, lets the device at it, and takes it back: under each policy.

use std::sync::Arc;

use ringfence_dma::{Device, Direction, DmaConfig, Policy};
use ringfence_iommu::{
    Domain, Geometry, HostAddr, Iova, PageSizes, Range, SoftDomain, shootdown::Shootdown,
    table::Limits,
};
use ringfence_iova::{Aperture, Slabs};
use ringfence_sync::cpu::OsCpu;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Copies have an example of their own.
    for policy in Policy::ALL.into_iter().filter(|policy| !policy.bounces()) {
        // A domain in software, over 48 bits of addresses in granules of 4 KiB.
        let aperture = Range::new(Iova(0), Iova((1 << 48) - 1)).expect("not empty");
        let sizes = PageSizes::from_granule(4096).expect("a power of two");
        let geometry = Geometry::new(sizes, aperture);
        let domain = SoftDomain::<HostAddr>::new(geometry, Limits::NONE, Shootdown::new(8));
        let allocator = Slabs::new(Aperture::new(0, (1 << 48) - 1, 4096)?, OsCpu::new());
        let device = Device::new(Arc::clone(&domain), allocator, DmaConfig::new(policy))?;

        // The mapping owns the buffer: nobody touches what the device may touch.
        let mapping = device.map(vec![0u8; 64 << 10], Direction::FromDevice)?;
        let target = domain.iova_to_phys(mapping.iova());
        if let Some(why) = device.fallback() {
            println!("{policy:>11}  works as {}: {why}", device.effective_policy());
        }
        println!(
            "{policy:>11}: the device gets {:x?}, which lead to {target:?}",
            mapping.segments()
        );

        let (buffer, stale) = mapping.unmap_watched()?;
        let after = domain.iova_to_phys(stale.iova());
        println!("{:>11}  unmapped, {} bytes are back, it leads to {after:?}", "", buffer.len());
        if policy.is_lazy() {
            assert_eq!(stale.released_at_ns(), None);
            device.flush()?;
            let stale_ns = stale.released_at_ns().map(|at| at - stale.queued_at_ns());
            println!("{:>11}  a cached translation was good for {stale_ns:?} ns more", "");
        }
    }
    Ok(())
}
