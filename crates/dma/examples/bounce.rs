//! Copies instead of mappings: for an untrusted device, by choice, and avoided.

use std::sync::Arc;

use ringfence_dma::{
    BounceLimits, BouncePools, Device, Direction, DmaConfig, HostMemory, Policy, Trust,
};
use ringfence_iommu::{Domain, HostAddr, SoftDomain};
use ringfence_iova::{Aperture, Slabs};
use ringfence_sync::cpu::OsCpu;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let domain = SoftDomain::<HostAddr>::x86();
    let slabs = Slabs::new(Aperture::new(0, (1 << 48) - 1, 4096)?, OsCpu::new());
    let allocator = Arc::new(slabs);
    let (in_domain, at) = (Arc::clone(&domain), Arc::clone(&allocator));
    // The pools of the domain, for all devices in it. They take no memory before it is needed.
    let pools = BouncePools::new(in_domain, at, HostMemory, BounceLimits::default())?;
    let device = |policy, trust| {
        let config = DmaConfig { trust, ..DmaConfig::new(policy) };
        let (domain, allocator) = (Arc::clone(&domain), Arc::clone(&allocator));
        Device::builder(domain).allocator(allocator).config(config).pools(&pools).build()
    };

    // 100 bytes share their granule with the rest of the heap: an untrusted device gets a copy.
    let untrusted = device(Policy::StrictMap, Trust::described(false))?;
    let mapping = untrusted.map(vec![7u8; 100], Direction::Bidirectional)?;
    println!("100 bytes of an untrusted device are a copy: {}", mapping.is_bounced());
    println!("it reaches {:?}, the buffer lies elsewhere", domain.iova_to_phys(mapping.iova()));
    println!("{} bytes are back", mapping.unmap()?.len());

    // By choice: no request to the domain once a slot of the size is there.
    let trusted = device(Policy::Bounce, Trust::Trusted)?;
    for _ in 0..1000 {
        trusted.map(vec![1u8; 16 << 10], Direction::ToDevice)?.unmap()?;
    }
    let stats = trusted.stats();
    println!(
        "{} maps, {} requests for them, {} bytes copied",
        stats.maps, stats.map_calls, stats.copied_bytes
    );

    // Without a copy: a buffer of the pool, written in place. It is exposed while it lives.
    let mut buffer = trusted.take_buffer(1500, Direction::ToDevice)?;
    buffer.write(0, &[2; 1500]);
    println!("in place: {:x?}, {} bytes exposed", buffer.segments(), trusted.stats().taken_bytes);
    drop(buffer);
    println!("{:?}", pools.stats());
    Ok(())
}
