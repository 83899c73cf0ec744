//! What front ends can make the service log.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use crate::{
    common::{LIMIT, Place},
    guest::{BASE, OTHER, PLATFORM, Session},
    honest::Device,
    service::Service,
    wire::{Client, iotlb, request::IOTLB_MSG},
};

/// Sends that many IOTLB updates for memory that does not exist.
fn refused(base: u64, socket: &Path, times: usize) {
    let session = Session::open_at(base, socket, PLATFORM);
    let _channel = session.give_channel();
    let nowhere = iotlb(0, 4096, 1 << 60, 3, 2);
    for _ in 0..times {
        assert!(!session.client.set(IOTLB_MSG, &nowhere, &[]));
    }
}

#[test]
fn a_flood_of_warnings_leaves_room_for_others() {
    let more = ["--metrics", "unix:figures"];
    let mut service = Service::with_more(Place::new(), Device::Net, "", &more);
    service.drop_neighbour();
    let begun = Instant::now();
    for _ in 0..4 {
        refused(BASE, &service.path("hostile"), 500);
    }
    refused(OTHER, &service.path("other"), 1);
    // Another kind of line, from the source that floods.
    Client::connect(&service.path("hostile")).raw(&[0xff; 12], &[]);
    let logs = |what: &str| {
        while !service.log().contains(what) {
            assert!(begun.elapsed() < LIMIT, "it does not log {what:?}:\n{}", service.log());
            thread::sleep(Duration::from_millis(1));
        }
    };
    logs("net 1: IOTLB_MSG was refused");
    logs("hostile: connection ended: ");
    let lines =
        service.log().lines().filter(|line| line.contains("net 0: IOTLB_MSG was refused")).count();
    // And one every ten seconds.
    let most = 16 + begun.elapsed().as_secs() as usize / 10 + 1;
    assert!((16..=most).contains(&lines), "{lines} lines in {:?}", begun.elapsed());
    let count = service.figure("log_lines_left_out_total");
    assert!((2000 - most..=2000 - 16).contains(&count), "{count} were left out");
    service.terminate();
    let log = service.ended_with(0);
    assert!(log.contains(" lines were left out: there were too many"), "{log}");
}
