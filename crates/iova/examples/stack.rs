//! Linux's stack of allocators for a PCI device: tree, magazines per CPU, 32 bits first.
//!
//! Run with `cargo run -p ringfence-iova --example stack`.

use std::{error::Error, sync::Arc};

use ringfence_iova::{Allocator, Aperture, Magazines, Preferred32, RbTree, Request};
use ringfence_sync::cpu::OsCpu;

fn main() -> Result<(), Box<dyn Error>> {
    // A domain of 48 bits with 4 KiB pages; interrupts are raised by writes at 0xfee0_0000.
    let tree = RbTree::new(Aperture::new(0, (1 << 48) - 1, 4096)?);
    tree.reserve(0xfee0_0000, 0xfeef_ffff)?;
    let space = Arc::new(Magazines::new(tree, OsCpu::new()));
    // One device in it; others would share the space and have a preference of their own.
    let device = Preferred32::new(Arc::clone(&space));

    let buffers: Vec<(u64, u64)> = [512, 4096, 3 * 4096, 64 << 10, 1 << 20]
        .into_iter()
        .map(|size| Ok((device.alloc(&Request::new(size))?, size)))
        .collect::<Result<_, Box<dyn Error>>>()?;
    for (iova, size) in &buffers {
        println!("{size:>8} bytes at {iova:#012x}");
    }
    for (iova, size) in buffers {
        device.free(iova, size)?;
    }
    // All but the largest are in a magazine now: the next request of that size costs no search.
    device.alloc(&Request::new(64 << 10))?;

    // Nothing that large exists: the error says so.
    let error = device.alloc(&Request::new(1 << 50)).expect_err("larger than the aperture");
    println!("{error}");

    let stats = device.stats();
    println!(
        "{} allocated, {} of them from magazines; {} ranges still cached, {} searches",
        stats.allocs, stats.cache_hits, stats.cached_ranges, stats.searches
    );
    Ok(())
}
