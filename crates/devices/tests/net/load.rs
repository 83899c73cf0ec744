//! The driver that loads back ends: what it sends comes back whole, with every kind of addresses;
//! and it detects what does not.

use std::{
    os::unix::net::UnixStream,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use ringfence_devices::net::{Link, Net};
use ringfence_lab::load::net::{Addressing, Expect, NetDriver, Options};
use ringfence_run::worker::Notify;
use ringfence_vhost_user::Server;

use crate::rig::{Driver, LONG, Setup, device, options};

/// A connection to a device, served by a thread that ends with it.
fn connect(net: &Arc<Net>) -> (UnixStream, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut server = Server::new(theirs, net.connect(0));
    (ours, std::thread::spawn(move || server.serve().unwrap()))
}

fn small(addressing: Addressing, packed: bool, prefill: bool) -> Options {
    let (rx_buffers, tx_buffers, ring) = (200, 200, 64);
    Options { addressing, ring, rx_buffers, tx_buffers, packed, prefill }
}

/// Runs the driver until `done` returns true.
fn until(driver: &mut NetDriver, what: &str, mut done: impl FnMut(&mut NetDriver) -> bool) {
    let begun = Instant::now();
    while !done(driver) {
        driver.serve_misses().unwrap();
        assert!(begun.elapsed() < LONG, "this does not come: {what}; {:?}", driver.arrivals);
        if begun.elapsed() > Duration::from_millis(1) {
            std::thread::yield_now();
        }
    }
}

/// Sends `count` frames through a loop.
fn loop_through(driver: &mut NetDriver, count: u64) {
    until(driver, "all frames", |driver| {
        driver.receive().unwrap();
        let left = count - driver.arrivals.sent;
        let most = driver.window().min(left as usize).min(64);
        driver.send(most).unwrap();
        driver.arrivals.good == count
    });
    let arrivals = &driver.arrivals;
    assert_eq!((arrivals.sent, arrivals.outstanding()), (count, 0));
    assert_eq!((arrivals.lost, arrivals.corrupt, arrivals.late), (0, 0, 0));
}

const FRAMES: u64 = 5_000;
/// Misses that rings may take before their translations are sent.
const RINGS: u64 = 8;

#[test]
fn every_frame_comes_back_by_whatever_addresses() {
    let entries = [(4096, true), (4096, false), (65536, false), (2 << 20, true), (1 << 30, true)];
    let lasting = entries.map(|(entry, mergeable)| Addressing::Static { entry, mergeable });
    for addressing in [Addressing::Physical].into_iter().chain(lasting) {
        for (packed, prefill) in [(false, false), (true, true)] {
            let net = device(options(Link::Loopback, 1), 1, Notify::Adaptive);
            let (stream, thread) = connect(&net);
            let options = small(addressing, packed, prefill);
            let mut driver = NetDriver::open(stream, options, Expect::Own).unwrap();
            loop_through(&mut driver, FRAMES);
            let messages = driver.messages();
            match addressing {
                Addressing::Physical => assert_eq!(messages, Default::default()),
                Addressing::Static { .. } if prefill => assert!(messages.misses <= RINGS),
                Addressing::Static { entry: 4096, .. } => {
                    assert!(messages.misses >= 200, "a page at least: {messages:?}");
                }
                // One entry for all memory came with the rings.
                Addressing::Static { entry, .. } if entry == 1 << 30 => {
                    assert!(messages.misses <= RINGS);
                }
                _ => assert!(messages.misses > 0, "{addressing:?}"),
            }
            assert_eq!(messages.invalidations, 0);
            driver.stop().unwrap();
            thread.join().unwrap();
        }
    }
}

#[test]
fn addresses_of_one_use_are_missed_or_pushed_and_invalidated() {
    for (push, packed) in [(false, false), (false, true), (true, false), (true, true)] {
        let net = device(options(Link::Loopback, 1), 1, Notify::Adaptive);
        let (stream, thread) = connect(&net);
        let options = small(Addressing::Fresh { push }, packed, false);
        let mut driver = NetDriver::open(stream, options, Expect::Own).unwrap();
        loop_through(&mut driver, FRAMES);
        let messages = driver.messages();
        match push {
            true => assert!(messages.misses <= RINGS, "{messages:?}"),
            // Each frame lies in a fresh page, twice.
            false => assert!(messages.misses >= 2 * FRAMES, "{messages:?}"),
        }
        assert!(messages.invalidations > 0 && messages.invalidations <= 2 * FRAMES);
        driver.round_trips(100, 1).unwrap();
        driver.round_trips(100, 64).unwrap();
        driver.stop().unwrap();
        thread.join().unwrap();
    }
}

#[test]
fn one_way_at_a_time() {
    for addressing in [
        Addressing::Physical,
        Addressing::Static { entry: 4096, mergeable: false },
        Addressing::Fresh { push: false },
        Addressing::Fresh { push: true },
    ] {
        for notify in [Notify::Adaptive, Notify::Sleep] {
            let net = device(options(Link::Probe, 1), 1, notify);
            let (stream, thread) = connect(&net);
            let options = small(addressing, false, false);
            let mut driver = NetDriver::open(stream, options, Expect::Foreign).unwrap();
            until(&mut driver, "frames to be taken", |driver| {
                driver.send(64).unwrap();
                driver.taken > FRAMES
            });
            until(&mut driver, "frames to come", |driver| {
                driver.receive().unwrap();
                driver.arrivals.good > FRAMES
            });
            assert_eq!(driver.arrivals.corrupt, 0);
            until(&mut driver, "the ring to be empty", |driver| {
                driver.send(0).unwrap();
                driver.queued() == 0
            });
            let taken = driver.taken;
            driver.stop().unwrap();
            thread.join().unwrap();
            assert_eq!(net.counters(0)[1].packets(), taken, "the device's own count");
        }
    }
}

/// Echoes packets after `tamper` has changed them.
fn tampered(tamper: impl Fn(u64, Vec<u8>) -> Option<Vec<u8>>) -> NetDriver {
    const COUNT: usize = 40;
    let net = device(options(Link::Peer, 1), 1, Notify::Adaptive);
    let mut other = Driver::running(&net, 1, Setup::new(false));
    other.offer_all(0, 2048);
    let (stream, _thread) = connect(&net);
    let options = small(Addressing::Physical, false, false);
    let mut driver = NetDriver::open(stream, options, Expect::Own).unwrap();
    driver.send(COUNT).unwrap();
    let (mut seen, mut sent) = (0, 0);
    until(&mut driver, "what was sent on", |driver| {
        driver.send(0).unwrap();
        while let Some((_, bytes)) = other.receive(0) {
            if let Some(bytes) = tamper(seen, bytes) {
                other.send(0, &bytes);
                sent += 1;
            }
            seen += 1;
        }
        driver.receive().unwrap();
        let arrivals = &driver.arrivals;
        seen == COUNT as u64 && arrivals.good + arrivals.corrupt + arrivals.late == sent
    });
    driver
}

#[test]
fn a_changed_byte_and_a_lost_frame_are_found() {
    let driver = tampered(|_, bytes| Some(bytes));
    assert_eq!((driver.arrivals.good, driver.arrivals.corrupt), (40, 0), "the rig is fair");

    for at in [0, 16, 63] {
        let driver = tampered(|number, mut bytes| {
            bytes[at] ^= u8::from(number == 7);
            Some(bytes)
        });
        let arrivals = &driver.arrivals;
        assert_eq!((arrivals.good, arrivals.corrupt, arrivals.lost), (39, 1, 0), "byte {at}");
    }

    let driver = tampered(|number, bytes| (number != 7).then_some(bytes));
    let arrivals = &driver.arrivals;
    assert_eq!((arrivals.good, arrivals.corrupt, arrivals.lost), (39, 0, 1));

    let driver = tampered(|number, mut bytes| {
        bytes.truncate(if number == 7 { 63 } else { 64 });
        Some(bytes)
    });
    assert_eq!(driver.arrivals.corrupt, 1, "too short");
}
