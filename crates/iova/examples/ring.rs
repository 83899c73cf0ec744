//! A device queue with a contiguous chunk of addresses, and one without.
//!
//! Run with `cargo run -p ringfence-iova --example ring`.

use std::{collections::BTreeSet, error::Error, sync::Arc};

use ringfence_iova::{Allocator, Aperture, Request, Ring, Slabs};
use ringfence_sync::cpu::OsCpu;

const PAGE: u64 = 4096;
const IN_FLIGHT: usize = 512;

fn main() -> Result<(), Box<dyn Error>> {
    let space = Arc::new(Slabs::new(Aperture::new(0, (1 << 48) - 1, PAGE)?, OsCpu::new()));
    // Another device of the domain, which takes a page after each page of our queue.
    let ring = Ring::new(Arc::clone(&space), IN_FLIGHT as u64 * PAGE)?;
    println!("the chunk is {:#x} to {:#x}", ring.chunk().first(), ring.chunk().last());
    show("without a ring", &run(&*space, &*space)?);
    show("with one", &run(&ring, &*space)?);

    // A range larger than the chunk comes from below, and is counted.
    let large = ring.alloc(&Request::new(1 << 30))?;
    println!("1 GiB at {large:#x}; {} request fell back", ring.fallbacks());
    ring.free(large, 1 << 30)?;
    // A wrong free is refused.
    println!("{}", ring.free(ring.chunk().first(), PAGE).expect_err("nothing is there"));
    Ok(())
}

/// Three laps of a queue of pages, while another device allocates; the last lap's addresses.
fn run(queue: &dyn Allocator, other: &dyn Allocator) -> Result<Vec<u64>, Box<dyn Error>> {
    let page = Request::new(PAGE);
    let (mut slots, mut others) = (Vec::new(), Vec::new());
    for _ in 0..IN_FLIGHT {
        slots.push(queue.alloc(&page)?);
        others.push(other.alloc(&page)?);
    }
    for n in 0..3 * IN_FLIGHT {
        let (slot, other_slot) = (n % IN_FLIGHT, n * 7 % IN_FLIGHT);
        other.free(others[other_slot], PAGE)?;
        queue.free(slots[slot], PAGE)?;
        others[other_slot] = other.alloc(&page)?;
        slots[slot] = queue.alloc(&page)?;
    }
    let last = slots.clone();
    slots.into_iter().try_for_each(|iova| queue.free(iova, PAGE))?;
    others.into_iter().try_for_each(|iova| other.free(iova, PAGE))?;
    Ok(last)
}

fn show(what: &str, addresses: &[u64]) {
    let next = addresses.windows(2).filter(|pair| pair[1] == pair[0] + PAGE).count();
    let tables: BTreeSet<u64> = addresses.iter().map(|iova| iova >> 21).collect();
    println!("{what}: {next} of {} lie beside the last, {} leaf tables", IN_FLIGHT, tables.len());
}
