//! Bounds on what a peer can take of a service: at each of them the peer's own work ends or waits,
//! and no other's.

use std::{fs::File, os::fd::AsFd as _};

use rustix::{
    fs::{MemfdFlags, memfd_create},
    process::Signal,
};

use crate::{
    common::Place,
    guest::{BASE, Desc, INDIRECT, INDIRECT_DESC, LOG_ALL, NEXT, SIZE, WRITE},
    honest::Device,
    service::Service,
    wire::{Client, request::*, words},
};

const FIGURES: [&str; 2] = ["--metrics", "unix:figures"];

/// A service with a kind of device, with metrics.
fn service(device: Device) -> Service {
    let place = Place::new();
    place.write("disk.img", vec![0; 4 << 20]);
    Service::with_more(place, device, "disk.img", &FIGURES)
}

#[test]
fn connections_that_send_nothing_delay_no_other() {
    // Finding B6.
    for device in [Device::Disk, Device::Guarded, Device::Net] {
        let mut service = service(device);
        let socket = service.path("hostile");
        let silent: Vec<Client> = (0..40).map(|_| Client::connect(&socket)).collect();
        service.still_serves("silent connections");
        // The first connections have given way to later ones, one of them to the front end that was
        // just served.
        silent[..25].iter().for_each(Client::drain);
        assert_eq!(service.figure("silent_connections_total"), 25);
        // A late one of the others sends something, and is served; from now on it may be silent.
        assert!(silent[39].number(GET_FEATURES).is_some());
        let later: Vec<Client> = (0..40).filter_map(|_| Client::connect_now(&socket)).collect();
        assert!(silent[39].number(GET_FEATURES).is_some());
        assert_eq!(service.figure("silent_connections_total"), 25);
        drop((silent, later));
        service.still_serves("a connection that spoke late");
        service.end();
    }
}

#[test]
fn memory_beyond_the_part_of_a_connection_is_refused() {
    // Finding B9. The shares of one socket, of three and of two.
    let half = 1 << 46;
    for (device, part) in
        [(Device::Disk, half / 2), (Device::Guarded, half / 3), (Device::Net, half / 2)]
    {
        let mut service = service(device);
        let file = File::from(memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(1 << 47).unwrap();
        let fd = [file.as_fd()];
        let session = service.target().open(LOG_ALL);
        let region = |at: u64, size: u64| words(&[0, at, size, at, 0]);
        let add = |at, size| session.client.set(ADD_MEM_REG, &region(at, size), &fd);
        // The session's existing memory counts.
        let (at, rest) = (1 << 50, (part - SIZE) & !0xfff);
        assert!(add(at, rest));
        assert!(!add(1 << 51, 4096));
        assert_eq!(service.figure("mapped_bytes") as u64 % SIZE, rest % SIZE);
        let table = |size| [words(&[1]), words(&[at, size, at, 0])].concat();
        assert!(!session.client.set(SET_MEM_TABLE, &table(part + 4096), &fd));
        // It keeps its memory, and continues.
        let mut ring = session.ring(service.target().index());
        service.target().works(&session, &mut ring);
        assert!(session.client.set(REM_MEM_REG, &region(at, rest), &[]));
        assert!(add(at, rest - 4096) && add(1 << 51, 4096));
        assert!(session.stop(ring.index).is_some());
        // SET_LOG_BASE has no reply that could say that it is refused.
        session.client.send(SET_LOG_BASE, &words(&[4096, 0]), &fd);
        session.client.drain();
        service.still_serves("too much memory");
        service.end();
    }
}

#[test]
fn long_requests_are_completed_and_delay_no_other() {
    // Finding B11. Of 127 MiB each, all of them to the same memory.
    let own = ["--disk-buffers", "own"];
    for (device, image, more) in [
        (Device::Disk, "long.img", &own),
        (Device::Guarded, "long.img,disk-buffers=guest", &FIGURES),
    ] {
        let place = Place::new();
        File::create(place.path("long.img")).unwrap().set_len(128 << 20).unwrap();
        let mut service = Service::with_more(place, device, image, more);
        service.attack("long requests", |target| {
            let session = target.open(INDIRECT_DESC);
            let (ram, mut ring) = (&session.ram, session.ring(0));
            let (header, status, table) = (ram.data(), ram.data() + 64, ram.data() + 4096);
            ram.put(header, &[0; 16]);
            ram.put(status, &[0xff]);
            let half = SIZE / 2;
            let data = (1..255).map(|at| Desc(BASE + half, half as u32, NEXT | WRITE, at + 1));
            let chain = [Desc(header, 16, NEXT, 1)].into_iter().chain(data);
            let chain: Vec<u8> =
                chain.chain([Desc(status, 1, WRITE, 0)]).flat_map(Desc::bytes).collect();
            ram.put(table, &chain);
            for slot in 0..8 {
                ring.place(ram, slot, &[Desc(table, chain.len() as u32, INDIRECT, 0)]);
                ring.offer(ram, slot);
            }
            for _ in 0..8 {
                assert_eq!(ring.wait(ram).1, 254 * half as u32 + 1);
            }
            assert_eq!(ram.get::<1>(status), [0]);
            assert!(session.stop(0).is_some());
        });
        service.end();
    }
}

#[test]
fn a_service_that_may_not_have_the_descriptors_for_its_rings_does_not_begin() {
    let place = Place::of("/bin/sh");
    place.write("disk.img", vec![0; 1 << 20]);
    let run = |limit: &str, queues: &str| {
        let script = format!("ulimit -n {limit} && exec \"$0\" \"$@\"");
        let service =
            ["blk", "--socket", "s", "--image", "disk.img", "--log", "warn", "--queues", queues];
        place.start(&[&["-c", &script, env!("CARGO_BIN_EXE_ringfence")], &service[..]].concat())
    };
    let ended = run("1024", "256").wait();
    assert_eq!(ended.code(), 1, "{ended}");
    for words in
        ["cannot serve 256 rings", "2915 descriptors", "1024", "LimitNOFILE=", "fewer queues"]
    {
        assert!(ended.err.contains(words), "{ended}");
    }
    assert!(!place.path("s").exists());
    // That many are enough for the service, but not if a front end is hostile.
    let running = run("3000", "256");
    drop(Client::connect(&place.path("s")));
    running.signal(Signal::TERM);
    let ended = running.wait();
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(ended.err.contains("front ends that do harm may take 3741 descriptors"), "{ended}");
}
