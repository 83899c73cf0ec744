//! What front ends have the log say.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    thread,
    time::Duration,
};

use crate::{
    common::Place,
    guest::{OTHER, PLATFORM, Session},
    honest::Device,
    service::Service,
    wire::{iotlb, request::IOTLB_MSG},
};

/// Says so often where memory is that there is none of.
fn refused(base: u64, socket: &Path, times: usize) {
    let session = Session::open_at(base, socket, PLATFORM);
    let _channel = session.give_channel();
    let nowhere = iotlb(0, 4096, 1 << 60, 3, 2);
    for _ in 0..times {
        assert!(!session.client.set(IOTLB_MSG, &nowhere, &[]));
    }
}

fn left_out(service: &Service) -> usize {
    let mut stream = UnixStream::connect(service.path("figures")).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    let line =
        page.lines().find_map(|line| line.strip_prefix("ringfence_log_lines_left_out_total "));
    line.unwrap_or_else(|| panic!("{page}")).parse().unwrap()
}

#[test]
fn a_flood_of_warnings_leaves_room_for_those_of_others() {
    let more = ["--metrics", "unix:figures"];
    let mut service = Service::with_more(Place::new(), Device::Net, "", &more);
    service.drop_neighbour();
    for _ in 0..4 {
        refused(crate::guest::BASE, &service.path("hostile"), 500);
    }
    refused(OTHER, &service.path("other"), 1);
    while !service.said().contains("net 1: request ") {
        thread::sleep(Duration::from_millis(1));
    }
    let lines = service.said().lines().filter(|line| line.contains("net 0: request ")).count();
    assert!((16..64).contains(&lines), "{lines} lines");
    assert!((1900..2100).contains(&left_out(&service)), "{} were left out", left_out(&service));
    service.terminate();
    service.ends_or_says("lines before this were left out");
}
