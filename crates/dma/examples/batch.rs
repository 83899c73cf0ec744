//! A driver's loop: one sync for what is submitted together, one for what completes together.

use ringfence_dma::{Device, Direction};
use ringfence_iommu::{HostAddr, SoftDomain};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let domain = SoftDomain::<HostAddr>::x86();
    let device = Device::builder(domain).build()?;

    // This thread's queues; `usize` is the tag that comes back with a buffer.
    let mut maps = device.map_batch::<Vec<u8>, usize>();
    let mut unmaps = device.unmap_batch::<Vec<u8>, usize>();
    let mut free: Vec<Vec<u8>> = (0..16).map(|_| vec![0; 4096]).collect();
    let mut on_the_ring = Vec::new();
    for _ in 0..100 {
        for (request, buffer) in free.drain(..).enumerate() {
            maps.push(buffer, Direction::FromDevice, request)
                .map_err(|(_, error)| error.error())?;
        }
        maps.begin();
        // Another driver would poll its ring here. Mappings that are synced are handed out.
        while !maps.is_empty() {
            maps.poll(|request, mapping| match mapping {
                Ok(mapping) => on_the_ring.push((request, mapping)),
                Err(error) => eprintln!("request {request}: {error}"),
            });
        }
        // ... the device completes the requests ...
        for (request, mapping) in on_the_ring.drain(..) {
            unmaps.push(mapping, request).expect("a mapping of this device");
        }
        unmaps.begin();
        while !unmaps.is_empty() {
            unmaps.poll(|request, returned| match returned {
                // The device can no longer reach it.
                Ok(returned) => free.push(returned.buffer),
                Err(error) => eprintln!("request {request}: {error}"),
            });
        }
    }
    let stats = device.stats();
    println!(
        "{} maps, {} map syncs; {} unmaps, {} invalidations",
        stats.maps, stats.map_syncs, stats.unmaps, stats.unmap_syncs
    );
    assert_eq!((stats.maps, stats.map_syncs, stats.unmap_syncs), (1600, 100, 100));
    Ok(())
}
