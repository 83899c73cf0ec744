//! The cost of an invalidation while a disk hangs for more than a minute, and the cost of a
//! neighbour's requests to an honest front end. Not a test: `cargo test --release -p ringfence-cli
//! --test hostile -- --ignored --nocapture figures` prints it, as root.

use std::{
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    process::Pid,
    thread::{CpuSet, sched_setaffinity},
};

use crate::{
    common::Place,
    descriptors::{CHANGES, KINDS},
    fuse::Fuse,
    guest::{BASE, Desc, NEXT, PLATFORM, Ring, Session, WRITE},
    honest::{Device, NEIGHBOUR, next_front_end},
    messages::{MESSAGES, ORDERS, PLACES, SHARING},
    rings::RINGS,
    service::{Attack, Service, threads},
    wire::{iotlb, request::IOTLB_MSG},
};

const ROUNDS: usize = 11;
const EACH: Duration = Duration::from_secs(2);
/// Reads in flight.
const DEPTH: u16 = 16;
/// The size of rings and data; invalidations are for addresses behind it.
const USED: u64 = 512 << 10;

/// The least, the median and the greatest.
fn median(all: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut all: Vec<f64> = all.collect();
    all.sort_by(f64::total_cmp);
    [0, all.len() / 2, all.len() - 1].map(|at| all[at])
}

/// Reads at that many places at a time, all of them again and again.
fn read(session: &Session, ring: &mut Ring, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        offer_reads(session, ring, 100 << 10);
        let mut done = 0;
        while done < DEPTH && !over.load(Ordering::Relaxed) {
            match ring.take(&session.ram) {
                Some(_) => done += 1,
                None => thread::sleep(Duration::from_micros(20)),
            }
        }
    }
}

/// Puts as many reads into the ring as may be in flight, of sectors below `sectors`.
fn offer_reads(session: &Session, ring: &mut Ring, sectors: u64) {
    let ram = &session.ram;
    for slot in 0..DEPTH {
        let at = ram.data() + 8192 * u64::from(slot);
        ram.put(at, &[0; 8]);
        ram.put(at + 8, &u64::to_le_bytes(4096 * u64::from(slot) % sectors));
        let first = 3 * slot;
        let chain = [
            Desc(at, 16, NEXT, first + 1),
            Desc(at + 4096, 512, NEXT | WRITE, first + 2),
            Desc(at + 16, 1, WRITE, 0),
        ];
        ring.place(ram, first, &chain);
        ring.offer(ram, first);
    }
}

/// Reads a second over a while, with one kick for all that are put in at a time.
fn rate(session: &Session, ring: &mut Ring, time: Duration) -> f64 {
    let (begun, mut count) = (Instant::now(), 0);
    while begun.elapsed() < time {
        offer_reads(session, ring, 4096);
        let mut done = 0;
        while done < DEPTH {
            match ring.take(&session.ram) {
                Some(_) => done += 1,
                None => std::hint::spin_loop(),
            }
        }
        count += u64::from(DEPTH);
    }
    count as f64 / begun.elapsed().as_secs_f64()
}

/// The cost of the sandbox: reads of 512 bytes through io_uring, 16 at a time, in a service with a
/// sandbox and in one without, in turns.
#[test]
#[ignore = "figures"]
fn a_disk_with_a_sandbox_and_without() {
    // With that many rounds the median lies between the 10th and the 22nd with 95 %.
    const ROUNDS: usize = 31;
    let services = ["on", "off"].map(|how| {
        let place = Place::new();
        place.write("disk.img", vec![0; 4 << 20]);
        Service::with_more(place, Device::Disk, "disk.img", &["--sandbox", how])
    });
    let sessions = [0, 1].map(|at| services[at].target().open(0));
    let mut rings = [0, 1].map(|at| sessions[at].ring(0));
    let mut ratios = [(); ROUNDS].map(|()| {
        let rates =
            [0, 1].map(|at| rate(&sessions[at], &mut rings[at], Duration::from_millis(300)));
        println!("{:>10.0} {:>10.0} reads/s", rates[0], rates[1]);
        rates[0] / rates[1]
    });
    ratios.sort_by(f64::total_cmp);
    let [low, middle, high] = [9, 15, 21].map(|at| ratios[at]);
    println!("on/off: {middle:.3} [{low:.3}, {high:.3}], median of {ROUNDS} rounds, 95 %");
    drop(sessions);
    services.into_iter().for_each(Service::end);
}

/// How long invalidations took over a while, from the message to its reply, µs: the median and the
/// slowest hundredth.
fn invalidate(session: &Session) -> [f64; 2] {
    let begun = Instant::now();
    let mut took = Vec::new();
    while begun.elapsed() < EACH {
        let page = BASE + USED + 4096 * (took.len() as u64 % 64);
        assert!(session.client.set(IOTLB_MSG, &iotlb(page, 4096, page, 3, 2), &[]));
        let begun = Instant::now();
        assert!(session.client.set(IOTLB_MSG, &iotlb(page, 4096, 0, 0, 3), &[]));
        took.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    took.sort_by(f64::total_cmp);
    [50, 99].map(|part| took[took.len() * part / 100])
}

/// A service with its disk on a file system of its own.
fn service() -> (Fuse, Service) {
    let place = Place::new();
    let fuse = Fuse::mount(&place.path("fuse"), 64 << 20);
    let more = ["--direct", "--disk-buffers", "own"];
    let service = Service::with_more(place, Device::Disk, "fuse/image", &more);
    (fuse, service)
}

fn open(service: &Service) -> Session {
    let session = service.target().open(PLATFORM);
    assert!(session.client.set(IOTLB_MSG, &iotlb(BASE, USED, BASE, 3, 2), &[]));
    session
}

#[test]
#[ignore = "figures; mounts a file system of FUSE, which takes root"]
fn an_invalidation_beside_a_disk_that_hangs() {
    let [(_reads, first), (_idle, second), (hangs, third)] = [(); 3].map(|()| service());
    let sessions = [&first, &second, &third].map(open);
    let [mut reads, mut held] = [0, 2].map(|at| sessions[at].ring(0));
    let over = AtomicBool::new(false);
    let [p99s, idle] = thread::scope(|scope| {
        scope.spawn(|| read(&sessions[0], &mut reads, &over));
        scope.spawn(|| read(&sessions[2], &mut held, &over));
        hangs.hold(true);
        hangs.await_held(1);
        // In a thread of its own, so that the others end whatever happens here.
        let rounds = scope.spawn(|| rounds(&sessions)).join();
        over.store(true, Ordering::Relaxed);
        rounds.expect("it has panicked")
    });
    for (name, ratios) in [("a disk that works", p99s), ("an idle one", idle)] {
        let [least, middle, most] = median(ratios.into_iter());
        println!(
            "p99, hangs / {name}: {middle:.2} [{least:.2}, {most:.2}], median of {ROUNDS} rounds"
        );
    }
    hangs.hold(false);
    drop(sessions);
    for service in [first, second, third] {
        service.end();
    }
}

/// Prints the figures of each, and returns how many times as long the slowest hundredth took where
/// the disk hangs, compared with the others.
fn rounds(sessions: &[Session; 3]) -> [Vec<f64>; 2] {
    println!("{:>16}{:>18}{:>18}", "works", "idle", "hangs");
    println!("{}", format!("{:>8}{:>10}", "p50", "p99 us").repeat(3));
    let mut ratios = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        let took = [0, 1, 2].map(|at| invalidate(&sessions[at]));
        println!("{}", took.map(|[p50, p99]| format!("{p50:>8.1}{p99:>10.1}")).concat());
        ratios[0].push(took[2][1] / took[0][1]);
        ratios[1].push(took[2][1] / took[1][1]);
    }
    ratios
}

/// Under attack, alone, and beside consecutive connections of an honest front end. The neighbour
/// whose requests are timed never waits for a CPU (it has a real-time priority, which takes root),
/// and the threads that serve it share a CPU only with each other: the attacker and the threads
/// that talk to it are on the other. The rest of the cost is what the service itself takes from one
/// for the other.
#[test]
#[ignore = "figures; gives threads a real-time priority, which takes root"]
fn a_neighbour_of_one_that_is_attacked() {
    const ROUNDS: usize = 5;
    let lists = [MESSAGES, PLACES, ORDERS, SHARING, RINGS, KINDS, CHANGES];
    println!(
        "a neighbour's requests, p99 in us, and ratios with their least and greatest of {ROUNDS} rounds"
    );
    println!("  alone  honest attacked        attacked/alone       attacked/honest");
    for device in [Device::Guarded, Device::Net] {
        place(None, 1);
        let service = Service::start(device);
        place(None, 0);
        // The threads that talk to front ends, and those that they start.
        let talks = |(_, name): &(Pid, String)| name == "front";
        service.threads().filter(talks).for_each(|(id, _)| place(Some(id), 0));
        for (id, _) in threads("self".into()).filter(|(_, name)| name == NEIGHBOUR) {
            place(Some(id), 0);
            goes_first(id);
        }
        for (name, attack) in lists.concat() {
            let rounds = [(); ROUNDS].map(|()| beside(&service, device, attack));
            let p99s = [0, 1, 2].map(|at| median(rounds.iter().map(|round| round[at]))[1]);
            let ratios = [0, 1].map(|at| median(rounds.iter().map(|round| round[2] / round[at])));
            println!(
                "{}{} {device:?}: {name}",
                p99s.map(|p99| format!("{p99:>7} ")).concat(),
                ratios
                    .map(|[least, middle, most]| format!(
                        "{:>22}",
                        format!("{middle:.2} [{least:.2}, {most:.2}]")
                    ))
                    .concat()
            );
        }
        service.end();
    }
}

/// Makes a thread, or this one, run on one CPU.
fn place(thread: Option<Pid>, cpu: usize) {
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    sched_setaffinity(thread, &cpus).unwrap();
}

/// Makes a thread run whenever it can.
fn goes_first(thread: Pid) {
    let id = thread.as_raw_nonzero().to_string();
    assert!(Command::new("chrt").args(["--fifo", "--pid", "1", &id]).status().unwrap().success());
}

/// p99s of a neighbour's requests. On a quiet machine none takes anything like a time-out.
fn beside(service: &Service, device: Device, attack: Attack) -> [f64; 3] {
    const TIME: Duration = Duration::from_millis(300);
    let p99 = |mut took: Vec<u64>| {
        took.sort_unstable();
        let longest = Duration::from_micros(*took.last().unwrap());
        assert!(longest < Duration::from_millis(1750), "a neighbour's request took {longest:?}");
        took[took.len() * 99 / 100] as f64
    };
    [
        p99(service.neighbour_beside(TIME, |_| thread::sleep(TIME))),
        p99(service.neighbour_beside(TIME, |target| next_front_end(&target.socket, device, 1))),
        p99(service.neighbour_beside(TIME, attack)),
    ]
}
