//! Maps a buffer and takes it back, under each policy: when does the device lose it?

use std::sync::Arc;

use ringfence_dma::{Device, Direction, DmaConfig, Policy};
use ringfence_iommu::{Domain, HostAddr, SoftDomain};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Copies have an example of their own.
    for policy in Policy::ALL.into_iter().filter(|policy| !policy.bounces()) {
        // A domain in software.
        let domain = SoftDomain::<HostAddr>::x86();
        let device = Device::builder(Arc::clone(&domain)).config(DmaConfig::new(policy)).build()?;

        // The mapping owns the buffer: no other code can touch what the device may access.
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
