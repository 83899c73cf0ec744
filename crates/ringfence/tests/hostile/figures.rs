//! What an invalidation costs while a disk hangs. Not a test: `cargo test --release -p ringfence --test hostile
//! -- --ignored --nocapture figures` prints it, as root.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::{
    common::Place,
    fuse::Fuse,
    guest::{BASE, Desc, NEXT, PLATFORM, Ring, Session, WRITE},
    honest::Device,
    service::Service,
    wire::{iotlb, request::IOTLB_MSG},
};

const ROUNDS: usize = 11;
const EACH: usize = 2000;
/// Reads that are under way.
const DEPTH: u16 = 16;
/// What rings and data need; what is invalidated lies behind it.
const USED: u64 = 512 << 10;

/// Reads at so many places at a time, all of them again and again.
fn read(session: &Session, ring: &mut Ring, over: &AtomicBool) {
    let ram = &session.ram;
    let mut sector = 0;
    while !over.load(Ordering::Relaxed) {
        for slot in 0..DEPTH {
            let at = ram.data() + 8192 * u64::from(slot);
            sector = (sector + 4096) % (100 << 10);
            ram.put(at, &[0; 8]);
            ram.put(at + 8, &u64::to_le_bytes(sector));
            let first = 3 * slot;
            let chain = [
                Desc(at, 16, NEXT, first + 1),
                Desc(at + 4096, 512, NEXT | WRITE, first + 2),
                Desc(at + 16, 1, WRITE, 0),
            ];
            ring.place(ram, first, &chain);
            ring.offer(ram, first);
        }
        let mut done = 0;
        while done < DEPTH && !over.load(Ordering::Relaxed) {
            match ring.take(ram) {
                Some(_) => done += 1,
                None => thread::sleep(Duration::from_micros(20)),
            }
        }
    }
}

/// How long each of many invalidations took, from the message to its answer, µs.
fn invalidate(session: &Session) -> Vec<f64> {
    let took = (0..EACH as u64).map(|number| {
        let page = BASE + USED + 4096 * (number % 64);
        assert!(session.client.set(IOTLB_MSG, &iotlb(page, 4096, page, 3, 2), &[]));
        let begun = Instant::now();
        assert!(session.client.set(IOTLB_MSG, &iotlb(page, 4096, 0, 0, 3), &[]));
        begun.elapsed().as_secs_f64() * 1e6
    });
    let mut took: Vec<f64> = took.collect();
    took.sort_by(f64::total_cmp);
    took
}

#[test]
#[ignore = "figures; mounts a file system of FUSE, which takes root"]
fn an_invalidation_beside_a_disk_that_hangs() {
    let place = Place::new();
    let fuse = Fuse::mount(&place.path("fuse"), 64 << 20);
    let more = ["--direct", "--disk-buffers", "own"];
    let service = Service::with_more(place, Device::Disk, "fuse/image", &more);
    let session = service.target().open(PLATFORM);
    assert!(session.client.set(IOTLB_MSG, &iotlb(BASE, USED, BASE, 3, 2), &[]));
    let mut ring = session.ring(0);
    let over = AtomicBool::new(false);
    let mut ratios = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| read(&session, &mut ring, &over));
        println!(
            "{:>12} {:>8} {:>12} {:>8} {:>6}",
            "answers p50", "p99", "hangs p50", "p99", "ratio"
        );
        for _ in 0..ROUNDS {
            let answers = invalidate(&session);
            fuse.hold(true);
            fuse.await_held(usize::from(DEPTH));
            let hangs = invalidate(&session);
            fuse.hold(false);
            let at = |all: &[f64], part: usize| all[all.len() * part / 100];
            let [a50, a99, h50, h99] =
                [at(&answers, 50), at(&answers, 99), at(&hangs, 50), at(&hangs, 99)];
            println!("{a50:>9.1} us {a99:>8.1} {h50:>9.1} us {h99:>8.1} {:>6.2}", h99 / a99);
            ratios.push(h99 / a99);
        }
        over.store(true, Ordering::Relaxed);
    });
    ratios.sort_by(f64::total_cmp);
    println!("p99: hangs / answers: median {:.2} of {ROUNDS} rounds", ratios[ROUNDS / 2]);
    drop(session);
    service.end();
}
