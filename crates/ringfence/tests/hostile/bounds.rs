//! What a peer can take of a service: at each bound something of its own ends or waits, and nobody else's.

use crate::{
    common::Place,
    honest::Device,
    service::Service,
    wire::{Client, request::GET_FEATURES},
};

const FIGURES: [&str; 2] = ["--metrics", "unix:figures"];

/// Of a kind of device, with figures.
fn service(device: Device) -> Service {
    let place = Place::new();
    ["disk.img", "other.img"].iter().for_each(|name| _ = place.write(name, vec![0; 4 << 20]));
    Service::with_more(place, device, "disk.img", &FIGURES)
}

#[test]
fn connections_that_send_nothing_hold_up_nobody() {
    // Finding B6.
    for device in [Device::Disk, Device::Guarded, Device::Net] {
        let mut service = service(device);
        let socket = service.path("hostile");
        let silent: Vec<Client> = (0..40).map(|_| Client::connect(&socket)).collect();
        service.still_serves("silent connections");
        // The first have given way to those behind them, one of them to the front end that was just served.
        silent[..25].iter().for_each(Client::drain);
        assert_eq!(service.figure("silent_connections_total"), 25);
        // One of the others speaks late, and is served; from now on it can be silent.
        assert!(silent[39].number(GET_FEATURES).is_some());
        let later: Vec<Client> = (0..40).filter_map(|_| Client::connect_now(&socket)).collect();
        assert!(silent[39].number(GET_FEATURES).is_some());
        assert_eq!(service.figure("silent_connections_total"), 25);
        drop((silent, later));
        service.still_serves("a connection that spoke late");
        service.end();
    }
}
