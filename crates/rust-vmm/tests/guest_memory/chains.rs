//! A translation that fails in the middle of a chain never makes the request shorter.

use std::{ops::Deref, sync::atomic::Ordering, thread};

use ringfence_iotlb::Miss;
use ringfence_rust_vmm::{Failure, FailureScope};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, Permissions};

use crate::{front_end::*, rings::*};

/// IOVA 0 maps to this address, and so on.
const BASE: u64 = 0x20_0000;
const INDIRECT_TABLE: u64 = 0x5000;
/// The addresses of the chain's buffers, a page each: four to read, two to write.
const BUFFERS: [u64; 6] = [0x6000, 0x7000, 0x8000, 0x9000, 0xa000, 0xb000];
const LEN: u32 = 100;
const HEAD: u16 = 3;

/// Writes a chain whose descriptors lie in both pages of the table, or in a table of its own, and
/// makes it available.
fn chain(bench: &Bench, indirect: bool) {
    let memory = &*bench.memory;
    memory.write_slice(&[0; END as usize], GuestAddress(BASE)).unwrap();
    let order = if indirect { [0, 1, 2, 3, 4, 5] } else { [HEAD, 300, 4, 301, 5, 302] };
    let table = BASE + if indirect { INDIRECT_TABLE } else { TABLE };
    for (at, addr) in BUFFERS.into_iter().enumerate() {
        let next = order.get(at + 1).copied();
        let flags = if at >= 4 { WRITE } else { 0 } | next.map_or(0, |_| NEXT);
        descriptor(memory, table, order[at], (addr, LEN, flags, next.unwrap_or(0)));
    }
    if indirect {
        descriptor(memory, BASE + TABLE, HEAD, (INDIRECT_TABLE, 6 * 16, INDIRECT, 0));
    }
    publish(memory, BASE + AVAIL, 0, HEAD);
}

/// Everything but the page at `hole`.
fn map_around(bench: &Bench, hole: u64) {
    for page in (0..0x10_000).step_by(PAGE as usize).filter(|&page| page != hole) {
        bench.map(page, BASE + page, PAGE);
    }
}

const STYLES: [(Style, FailureScope); 4] = [
    (Style::OneGuard, FailureScope::Guard),
    (Style::ByDescriptor, FailureScope::Guard),
    (Style::ManyGuards, FailureScope::Space),
    (Style::ByDescriptor, FailureScope::Space),
];

#[test]
fn a_chain_that_is_not_translated_to_its_end_is_never_served_as_a_shorter_one() {
    let pages = [0x1000, 0x5000].into_iter().chain(BUFFERS);
    for (hole, (style, scope)) in pages.flat_map(|hole| STYLES.map(|style| (hole, style))) {
        let bench = bench();
        let space = bench.space_that(scope);
        let indirect = hole == INDIRECT_TABLE;
        chain(&bench, indirect);
        map_around(&bench, hole);
        let before: Vec<u8> = BUFFERS[4..].iter().flat_map(|&at| bytes(&bench, at)).collect();
        // First with gaps in the table, which are faults; then with a front end that refuses the
        // misses.
        serve(&space, &mut queue(), style);
        assert_eq!(used(&*bench.memory, BASE + USED), [], "{hole:#x} {style:?}");
        space.recover();
        let refuses = |bench: &Bench, misses: Vec<Miss>| {
            misses.iter().for_each(|miss| bench.iotlb.refuse(range(miss.iova.0, 1), miss.access));
        };
        bench.with_front_end(refuses, || serve(&space, &mut queue(), style));
        assert_eq!(used(&*bench.memory, BASE + USED), [], "{hole:#x} {style:?}");
        let failures = space.counters().failures.load(Ordering::Relaxed);
        assert!(failures >= 2, "{failures}");
        // A device that writes as it goes may have written to the buffers before the hole.
        if !matches!(style, Style::ByDescriptor) {
            let after: Vec<u8> = BUFFERS[4..].iter().flat_map(|&at| bytes(&bench, at)).collect();
            assert!(before == after || hole == 0, "{hole:#x} {style:?}");
        }
        // Once the translation is there, the request is served completely.
        space.recover();
        let mends = |bench: &Bench, misses: Vec<Miss>| {
            misses.iter().for_each(|miss| bench.map(page_of(miss), BASE + page_of(miss), PAGE));
        };
        bench.with_front_end(mends, || serve(&space, &mut queue(), style));
        assert_eq!(used(&*bench.memory, BASE + USED), [(u32::from(HEAD), 2 * LEN)], "{hole:#x}");
        let read: Vec<u8> = BUFFERS[..2].iter().flat_map(|&at| bytes(&bench, at)).collect();
        let written: Vec<u8> = BUFFERS[4..].iter().flat_map(|&at| bytes(&bench, at)).collect();
        assert!(read.iter().map(|byte| byte.wrapping_add(1)).eq(written), "{hole:#x} {style:?}");
    }
}

fn bytes(bench: &Bench, iova: u64) -> [u8; LEN as usize] {
    let mut bytes = [0; LEN as usize];
    bench.memory.read_slice(&mut bytes, GuestAddress(BASE + iova)).unwrap();
    bytes
}

#[test]
fn nor_is_one_whose_translation_does_not_come_in_time() {
    for (style, scope) in STYLES {
        let bench = short_timeout();
        let space = bench.space_that(scope);
        chain(&bench, false);
        map_around(&bench, 0x1000);
        ignore_misses(&bench);
        serve(&space, &mut queue(), style);
        assert_eq!(used(&*bench.memory, BASE + USED), []);
        assert!(space.counters().timeouts.load(Ordering::Relaxed) > 0);
    }
}

#[test]
fn nor_is_one_that_was_changed_while_a_part_of_it_was_waited_for() {
    for (style, scope) in STYLES {
        let bench = bench();
        let space = bench.space_that(scope);
        chain(&bench, false);
        map_around(&bench, BUFFERS[2]);
        let front_end = |bench: &Bench, misses: Vec<Miss>| {
            // A translation that was used already has changed by the time the rest is there.
            bench.map(BUFFERS[0], BASE + 0xf000, PAGE);
            misses.iter().for_each(|miss| bench.map(page_of(miss), BASE + page_of(miss), PAGE));
        };
        bench.with_front_end(front_end, || serve(&space, &mut queue(), style));
        assert_eq!(used(&*bench.memory, BASE + USED), [], "{style:?}");
    }
}

#[test]
fn a_device_that_checks_completes_the_request_with_an_error_and_serves_the_next() {
    let bench = bench();
    let space = bench.space();
    chain(&bench, false);
    publish(&*bench.memory, BASE + AVAIL, 1, 7);
    descriptor(&*bench.memory, BASE + TABLE, 7, (BUFFERS[4], 8, WRITE, 0));
    map_around(&bench, BUFFERS[3]);
    let mut queue = queue();
    loop {
        let memory = space.memory();
        let Some(chain) = queue.pop_descriptor_chain(memory.clone()) else { break };
        let head = chain.head_index();
        let count = chain.clone().count() as u64;
        let buffers: Vec<_> = chain.collect();
        let access = |write| if write { Permissions::Write } else { Permissions::Read };
        let parts = buffers.iter().map(|d| (d.addr(), d.len() as usize, access(d.is_write_only())));
        let served = memory.prefetch(parts).map(|()| count);
        assert_eq!(memory.check().is_ok(), served.is_ok());
        // Through a new guard if the request's own has failed.
        let memory = if served.is_ok() { memory } else { space.memory() };
        queue.add_used(memory.deref(), head, served.map_or(0, |count| count as u32)).unwrap();
    }
    assert_eq!(used(&*bench.memory, BASE + USED), [(u32::from(HEAD), 0), (7, 1)]);
}

#[test]
fn two_queues_of_a_device_fail_by_themselves() {
    let bench = bench();
    bench.map(0, BASE, PAGE);
    let space = bench.space_that(FailureScope::Space);
    let other = space.another().unwrap();
    let alive = space.memory();
    assert!(alive.read_obj::<u8>(GuestAddress(0)).is_ok());
    assert!(space.clone().memory().read_obj::<u8>(GuestAddress(0x8000)).is_err());
    let failure = Failure::Refused { addr: 0x8000 };
    assert_eq!((space.failure(), alive.check()), (Some(failure), Err(failure)));
    assert!(space.memory().read_obj::<u8>(GuestAddress(0)).is_err());
    thread::scope(|scope| {
        scope.spawn(|| assert!(other.memory().read_obj::<u8>(GuestAddress(0)).is_ok()));
    });
    assert_eq!(space.recover(), Some(failure));
    assert_eq!(space.recover(), None);
    assert!(space.memory().read_obj::<u8>(GuestAddress(0)).is_ok());
    assert!(alive.check().is_ok(), "it did not fail itself");
}

#[test]
fn a_ring_that_is_not_translated_is_not_valid_yet() {
    // rule D22
    let bench = bench();
    let space = bench.space_that(FailureScope::Space);
    bench.memory.write_slice(&[0; END as usize], GuestAddress(BASE)).unwrap();
    map_around(&bench, USED);
    let mut queue = queue();
    assert!(!queue.is_valid(space.memory().deref()));
    bench.map(USED, BASE + USED, PAGE);
    assert!(queue.is_valid(space.memory().deref()), "the check has failed nothing");
    assert_eq!(queue.iter(space.memory()).unwrap().count(), 0);
    bench.shootdown.wait(bench.unmap(AVAIL, 1));
    assert!(queue.iter(space.memory()).is_err());
    assert_eq!(space.failure(), Some(Failure::Refused { addr: AVAIL + 2 }));
}
