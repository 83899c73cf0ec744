//! The same random requests, served over plain memory and over an IOTLB that is small, evicts much
//! and is invalidated all the time: the same bytes in the end.

use std::{sync::Arc, time::Duration};

use proptest::prelude::*;
use ringfence_iotlb::{IotlbConfig, Miss};
use ringfence_rust_vmm::FailureScope;
use virtio_queue::Queue;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::{front_end::*, rings::*};

/// All pages of the memory, in another order; they are the pages from IOVA 0 on.
const PAGES: u64 = 32;
/// The address of the tables of indirect descriptors, one page for all; the buffers follow.
const TABLES: u64 = END;

#[derive(Clone, Debug)]
struct Request {
    /// Address, length, whether the device writes it.
    buffers: Vec<(u64, u32, bool)>,
    indirect: bool,
}

fn request() -> impl Strategy<Value = Request> {
    let buffer = (TABLES + PAGE..PAGES * PAGE - 9000, 0u32..9000);
    let buffers = |write, most| {
        prop::collection::vec(buffer.clone().prop_map(move |(at, len)| (at, len, write)), 0..most)
    };
    (buffers(false, 4), buffers(true, 4), any::<bool>())
        .prop_map(|(read, write, indirect)| Request { buffers: [read, write].concat(), indirect })
}

/// Writes the requests of a round, and makes them available.
fn offer(memory: &GuestMemoryMmap, requests: &[Request], available: &mut u16) {
    let (mut free, mut table) = (0, TABLES);
    for Request { buffers, indirect } in requests.iter().filter(|r| !r.buffers.is_empty()) {
        let head = free;
        let (at, first) = if *indirect { (table, 0) } else { (TABLE, free) };
        for (index, &(addr, len, write)) in buffers.iter().enumerate() {
            let more = index + 1 < buffers.len();
            let flags = if write { WRITE } else { 0 } | if more { NEXT } else { 0 };
            let here = first + index as u16;
            descriptor(memory, at, here, (addr, len, flags, here + 1));
        }
        if *indirect {
            let len = 16 * buffers.len() as u32;
            descriptor(memory, TABLE, head, (table, len, INDIRECT, 0));
            table += u64::from(len);
            free += 1;
        } else {
            free += buffers.len() as u16;
        }
        publish(memory, AVAIL, *available, head);
        *available = available.wrapping_add(1);
    }
}

fn page(memory: &GuestMemoryMmap, gpa: u64) -> [u8; PAGE as usize] {
    let mut bytes = [0; PAGE as usize];
    memory.read_slice(&mut bytes, GuestAddress(gpa)).unwrap();
    bytes
}

/// The guest-physical addresses of the pages of [`REGIONS`].
fn pages() -> Vec<u64> {
    REGIONS.iter().flat_map(|&(first, len)| (first..first + len).step_by(PAGE as usize)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn a_device_does_the_same_over_plain_memory_and_over_an_iotlb(
        rounds in prop::collection::vec(prop::collection::vec(request(), 0..12), 1..4),
        order in Just(pages()).prop_shuffle(),
        in_order in any::<bool>(),
        flush_every in prop::option::of(2u32..8),
        entries in prop::sample::select(vec![64u64, 1 << 10]),
        by_descriptor in any::<bool>(),
        scope in prop::sample::select(vec![FailureScope::Guard, FailureScope::Space]),
    ) {
        // rule D24
        let order = if in_order { pages() } else { order };
        let plain = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), (PAGES * PAGE) as usize)]);
        let plain: Plain = Arc::new(plain.unwrap());
        // Mostly distinct bytes.
        for at in (0..PAGES * PAGE).step_by(8) {
            let word = at.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
            plain.write_obj(if at < END { 0 } else { word }, GuestAddress(at)).unwrap();
        }
        // Misses and evictions are the same in each run of a case.
        let (timeout, again) = (Duration::from_secs(60), Duration::from_secs(60));
        let seed = Some(1);
        let bench =
            bench_with(IotlbConfig { entries, timeout, again, seed, ..IotlbConfig::default() });
        let space = bench.space_that(scope);
        let mut batches = 0u32;
        let front_end = |bench: &Bench, misses: Vec<Miss>| {
            batches += 1;
            if flush_every.is_some_and(|every| batches.is_multiple_of(every)) {
                bench.shootdown.wait(bench.unmap(0, PAGES * PAGE));
            }
            for miss in misses {
                let iova = page_of(&miss);
                bench.map(iova, order[(iova / PAGE) as usize], PAGE);
                // Unneeded entries make it evict needed ones.
                if batches.is_multiple_of(4) {
                    bench.map((1 << 30) + u64::from(batches) * PAGE, order[0], PAGE);
                }
            }
        };
        let style = if by_descriptor { Style::ByDescriptor } else { Style::OneGuard };
        let mut queues: [Queue; 2] = [queue(), queue()];
        let mut available = 0;
        bench.with_front_end(front_end, || {
            for requests in &rounds {
                offer(&plain, requests, &mut available);
                for (at, &gpa) in order.iter().enumerate() {
                    let bytes = page(&plain, at as u64 * PAGE);
                    bench.memory.write_slice(&bytes, GuestAddress(gpa)).unwrap();
                }
                serve(&plain, &mut queues[0], style);
                serve(&space, &mut queues[1], style);
                prop_assert_eq!(used(&*plain, USED).len(), usize::from(available));
                for (at, &gpa) in order.iter().enumerate() {
                    let there = page(&plain, at as u64 * PAGE) == page(&bench.memory, gpa);
                    prop_assert!(there, "page {} at {:#x}", at, gpa);
                }
            }
            Ok(())
        })?;
        prop_assert_eq!(space.failure(), None);
    }
}
