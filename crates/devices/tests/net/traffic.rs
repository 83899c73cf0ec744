//! What is sent arrives, byte for byte, in order, once.

use std::sync::Arc;

use ringfence_devices::net::{GRACE, Link, Lost, Net, NetOptions, wire};
use ringfence_mem::GuestRam;
use ringfence_run::worker::{Notify, Worker};
use ringfence_vhost_user::Handler;

use crate::rig::{Driver, PAGE, Setup, device, options, packet, until, without_updates};

/// Lengths that matter: around a buffer's, a page's and the longest.
const LENGTHS: [usize; 12] = [1, 14, 60, 64, 500, 1500, 2036, 2037, 4084, 4085, 9000, 65_549];

/// Sends packets of many lengths and cuts from one driver to another (or itself), and checks each.
fn exchange(
    drivers: &mut [&mut Driver],
    from: usize,
    to: usize,
    pair: u16,
    count: usize,
    longest: usize,
) {
    let lengths: Vec<usize> = LENGTHS.into_iter().filter(|&len| len <= longest).collect();
    let of = |n: usize| packet(n, lengths[n % lengths.len()]);
    let (mut sent, mut got, mut back) = (0, 0, 0);
    until("all packets", drivers, |drivers| {
        back += drivers[from].reclaim(pair);
        // A ring has room for packets of four pieces.
        if sent < count && sent - back < 12 {
            let cuts: &[u32] = match sent % 5 {
                0 | 1 => &[],
                2 => &[12],
                3 => &[5, 7],
                _ => &[12, 1, 30],
            };
            drivers[from].send_as(pair, wire::Header::default(), &of(sent), cuts);
            sent += 1;
        }
        while let Some((header, bytes)) = drivers[to].receive(pair) {
            assert_eq!((header.flags, header.gso_type), (0, 0));
            assert!(bytes == of(got), "packet {got}: {} bytes", bytes.len());
            got += 1;
        }
        got == count && back == count
    });
}

fn counted(net: &Arc<Net>, end: usize, ring: usize) -> (u64, u64) {
    let counters = &net.counters(end)[ring];
    (counters.packets(), Lost::ALL.iter().map(|&why| counters.lost(why)).sum())
}

#[test]
fn packets_come_back_byte_for_byte() {
    // rule D23: buffers span entries.
    for translated in [false, true] {
        for packed in [false, true] {
            for event_idx in [false, true] {
                let setup = Setup { packed, event_idx, ..Setup::new(translated) };
                let net = device(options(Link::Loopback, 1), 1, Notify::Adaptive);
                let mut driver = Driver::running(&net, 0, setup);
                driver.offer_all(0, 2048);
                exchange(&mut [&mut driver], 0, 0, 0, 300, usize::MAX);
                assert_eq!((counted(&net, 0, 0), counted(&net, 0, 1)), ((300, 0), (300, 0)));
            }
        }
    }
}

#[test]
fn a_worker_that_sleeps_is_woken_by_packets_and_by_updates() {
    for packed in [false, true] {
        let setup = Setup { packed, event_idx: true, ..Setup::new(true) };
        let net = device(options(Link::Loopback, 1), 1, Notify::Sleep);
        let mut driver = Driver::running(&net, 0, setup);
        driver.offer_all(0, 2048);
        exchange(&mut [&mut driver], 0, 0, 0, 60, 1500);
    }
}

#[test]
fn what_one_device_sends_the_other_receives() {
    for (a, b) in [(false, false), (true, false), (true, true)] {
        let net = device(options(Link::Peer, 2), 1, Notify::Adaptive);
        let setup = |translated, packed| Setup { pairs: 2, packed, ..Setup::new(translated) };
        let mut first = Driver::running(&net, 0, setup(a, true));
        let mut second = Driver::running(&net, 1, setup(b, false));
        for pair in 0..2 {
            first.offer_all(pair, 2048);
            second.offer_all(pair, 1600);
        }
        let both = &mut [&mut first, &mut second];
        for pair in 0..2 {
            exchange(both, 0, 1, pair, 100, usize::MAX);
            exchange(both, 1, 0, pair, 100, usize::MAX);
        }
        for end in 0..2 {
            assert!((0..4).all(|ring| counted(&net, end, ring) == (100, 0)));
        }
    }
}

#[test]
fn memory_that_is_replaced_under_two_devices_is_unmapped_by_no_worker() {
    for translated in [false, true] {
        let workers: Arc<[Worker]> = [Worker::spawn("net", Notify::Adaptive).unwrap()].into();
        let net = Net::new(options(Link::Peer, 1), Arc::clone(&workers)).unwrap();
        let mut ends = [0, 1].map(|end| Driver::running(&net, end, Setup::new(translated)));
        ends.iter_mut().for_each(|end| end.offer_all(0, 2048));
        for _ in 0..10 {
            for Driver { front, ram, .. } in &mut ends {
                front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
            }
            let [first, second] = &mut ends;
            exchange(&mut [first, second], 0, 1, 0, 10, 1500);
        }
        // A ring that is not in the new memory keeps the old one until it stops.
        let elsewhere = GuestRam::new(PAGE as usize, 0).unwrap();
        for Driver { front, .. } in &mut ends {
            front.set_mem_table(&[(elsewhere.region(), elsewhere.fd())]).unwrap();
        }
        drop(ends);
        let unmapped = workers[0].call(|_| ringfence_mem::unmapped_here());
        assert_eq!(unmapped, Some(0), "translated: {translated}");
    }
}

/// As a front end changes a region: it removes it, and adds it again.
#[test]
fn rings_whose_memory_goes_and_comes_back_go_on() {
    let net = device(options(Link::Peer, 1), 1, Notify::Adaptive);
    let mut ends = [0, 1].map(|end| Driver::running(&net, end, Setup::new(false)));
    ends.iter_mut().for_each(|end| end.offer_all(0, 2048));
    let elsewhere = GuestRam::new(PAGE as usize, 0).unwrap();
    for round in 0..10 {
        for Driver { front, ram, .. } in &mut ends[..1 + round % 2] {
            front.set_mem_table(&[(elsewhere.region(), elsewhere.fd())]).unwrap();
            front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
        }
        let [first, second] = &mut ends;
        exchange(&mut [first, second], 0, 1, 0, 10, 1500);
    }
    assert!((0..2).all(|ring| counted(&net, 1, ring).1 == 0));
}

#[test]
fn a_pair_that_only_the_sender_uses_ends_at_another_of_the_receiver() {
    let net = device(options(Link::Peer, 2), 1, Notify::Adaptive);
    let mut many = Driver::running(&net, 0, Setup { pairs: 2, ..Setup::new(false) });
    let mut one = Driver::running(&net, 1, Setup::new(false));
    one.offer_all(0, 2048);
    many.send(1, &packet(5, 100));
    until("the packet", &mut [&mut many, &mut one], |drivers| {
        drivers[1].receive(0).is_some_and(|(_, bytes)| bytes == packet(5, 100))
    });
}

#[test]
fn pairs_of_a_loopback_do_not_mix() {
    let setup = Setup { pairs: 3, ..Setup::new(true) };
    let net = device(options(Link::Loopback, 3), 2, Notify::Adaptive);
    let mut driver = Driver::running(&net, 0, setup);
    for pair in 0..3 {
        driver.offer_all(pair, 2048);
    }
    for pair in [2, 0, 1] {
        exchange(&mut [&mut driver], 0, 0, pair, 50, 9000);
    }
}

#[test]
fn without_mergeable_buffers_a_packet_takes_one_or_is_lost() {
    let net = device(options(Link::Loopback, 1), 1, Notify::Adaptive);
    let mut driver = Driver::running(&net, 0, Setup { features: 0, ..Setup::new(true) });
    driver.offer_all(0, 2048);
    exchange(&mut [&mut driver], 0, 0, 0, 100, 2036);
    driver.send(0, &packet(1, 2037));
    driver.send(0, &packet(2, 2036));
    until("the shorter one", &mut [&mut driver], |drivers| {
        drivers[0].receive(0).is_some_and(|(_, bytes)| bytes == packet(2, 2036))
    });
    assert_eq!(net.counters(0)[1].lost(Lost::TooLong), 1);
}

#[test]
fn what_is_not_a_packet_is_dropped_and_counted() {
    let net = device(options(Link::Loopback, 1), 1, Notify::Adaptive);
    let mut driver = Driver::running(&net, 0, Setup::new(false));
    driver.offer_all(0, 2048);
    // Shorter than a header; a buffer that the device would write; longer than any packet.
    let at = driver.addr(64 * PAGE);
    for desc in [
        ringfence_virtq::Desc::readable(at, 11),
        ringfence_virtq::Desc::writable(at, 100),
        ringfence_virtq::Desc::readable(at, 70_000),
    ] {
        driver.queue(1).add(&[desc], 0).unwrap();
    }
    driver.publish(1);
    driver.send(0, &packet(7, 80));
    until("the good one", &mut [&mut driver], |drivers| {
        drivers[0].receive(0).is_some_and(|(_, bytes)| bytes == packet(7, 80))
    });
    until("all back", &mut [&mut driver], {
        let mut back = 0;
        move |drivers| {
            back += drivers[0].reclaim(0);
            back == 4
        }
    });
    assert_eq!(net.counters(0)[1].lost(Lost::Malformed), 3);
}

#[test]
fn work_that_the_receiver_cannot_do_is_not_left_to_it() {
    use wire::feature::{CSUM, GUEST_CSUM};
    let net = device(options(Link::Peer, 1), 1, Notify::Adaptive);
    let able = Setup { features: CSUM | GUEST_CSUM, ..Setup::new(false) };
    let mut able = Driver::running(&net, 0, able);
    let mut unable = Driver::running(&net, 1, Setup { features: CSUM, ..Setup::new(false) });
    able.offer_all(0, 2048);
    unable.offer_all(0, 2048);
    let header = wire::Header {
        flags: wire::NEEDS_CSUM,
        csum_start: 34.into(),
        csum_offset: 6.into(),
        ..Default::default()
    };
    able.send_as(0, header, &packet(1, 100), &[]);
    able.send(0, &packet(2, 100));
    unable.send_as(0, header, &packet(3, 100), &[]);
    let both = &mut [&mut able, &mut unable];
    until("the one that needs nothing", both, |drivers| {
        drivers[1].receive(0).is_some_and(|(_, bytes)| bytes == packet(2, 100))
    });
    until("the one that is left to be done", both, |drivers| {
        drivers[0].receive(0).is_some_and(|(header, bytes)| {
            header.flags == wire::NEEDS_CSUM && bytes == packet(3, 100)
        })
    });
    assert_eq!(net.counters(0)[1].lost(Lost::Offload), 1);
}

/// Whatever the headers of a guest's packets, another guest gets none with offsets outside the
/// packet.
#[test]
fn offsets_that_lead_out_of_a_packet_do_not_pass_from_one_guest_to_another() {
    use wire::feature::{CSUM, GUEST_CSUM, GUEST_TSO4, HOST_TSO4};
    let features = CSUM | GUEST_CSUM | HOST_TSO4 | GUEST_TSO4;
    for link in [Link::Peer, Link::Loopback] {
        let ends = link.ends();
        let net = device(options(link, 1), 1, Notify::Adaptive);
        let mut drivers: Vec<Driver> = (0..ends)
            .map(|end| Driver::running(&net, end, Setup { features, ..Setup::new(false) }))
            .collect();
        let last = ends - 1;
        let good = wire::Header {
            flags: wire::NEEDS_CSUM,
            gso_type: 1,
            hdr_len: 54.into(),
            gso_size: 20.into(),
            csum_start: 34.into(),
            csum_offset: 16.into(),
            num_buffers: 0.into(),
        };
        let bad = [
            wire::Header { csum_start: 0xffff.into(), ..good },
            wire::Header { csum_start: 81.into(), ..good },
            wire::Header { csum_start: 2.into(), ..good },
            wire::Header { csum_offset: 0xffff.into(), ..good },
            wire::Header { gso_size: 0.into(), ..good },
            wire::Header { flags: 0, ..good },
            wire::Header { gso_type: 0, csum_start: 34.into(), csum_offset: 65.into(), ..good },
        ];
        drivers[last].offer_all(0, 2048);
        // In one piece, and in several.
        for cuts in [&[][..], &[7, 40]] {
            for header in bad {
                drivers[0].send_as(0, header, &packet(1, 100), cuts);
            }
        }
        // A hint that is too large is made to fit.
        let hint = wire::Header { hdr_len: 0xffff.into(), ..good };
        drivers[0].send_as(0, hint, &packet(2, 100), &[]);
        let mut all: Vec<&mut Driver> = drivers.iter_mut().collect();
        until("the one that is right", &mut all, |drivers| {
            drivers[last].receive(0).is_some_and(|(header, bytes)| {
                assert_eq!(bytes, packet(2, 100), "the first to come");
                assert_eq!((header.hdr_len.get(), header.csum_start.get()), (100, 34));
                true
            })
        });
        assert_eq!(net.counters(0)[1].lost(Lost::Malformed), 2 * bad.len() as u64);
    }
}

#[test]
fn a_receiver_without_buffers_holds_up_the_sender_for_a_moment_only() {
    let made = NetOptions { grace: GRACE, ..options(Link::Peer, 1) };
    let net = device(made, 1, Notify::Adaptive);
    let mut sender = Driver::running(&net, 0, Setup::new(false));
    // No receiver.
    sender.send(0, &packet(1, 100));
    until("dropped", &mut [&mut sender], |drivers| drivers[0].reclaim(0) == 1);
    assert_eq!(net.counters(0)[1].lost(Lost::NoReceiver), 1);
    // A receiver without buffers.
    let mut receiver = Driver::running(&net, 1, Setup::new(false));
    (2..30).for_each(|n| sender.send(0, &packet(n, 100)));
    let both = &mut [&mut sender, &mut receiver];
    let mut back = 0;
    until("dropped", both, |drivers| {
        back += drivers[0].reclaim(0);
        back == 28
    });
    assert_eq!(net.counters(0)[1].lost(Lost::NoRoom), 28);
    // With buffers again.
    both[1].offer_all(0, 2048);
    both[0].send(0, &packet(30, 100));
    until("the packet", both, |drivers| {
        drivers[1].receive(0).is_some_and(|(_, bytes)| bytes == packet(30, 100))
    });
}

#[test]
fn a_ring_that_is_disabled_has_no_effect() {
    // rule D28: what is sent is discarded, nothing is received.
    let net = device(options(Link::Loopback, 1), 1, Notify::Adaptive);
    let mut driver = Driver::running(&net, 0, Setup::new(false));
    driver.offer_all(0, 2048);
    driver.front.set_vring_enable(1, false).unwrap();
    driver.send(0, &packet(1, 100));
    until("discarded", &mut [&mut driver], |drivers| drivers[0].reclaim(0) == 1);
    driver.front.set_vring_enable(1, true).unwrap();
    driver.front.set_vring_enable(0, false).unwrap();
    driver.send(0, &packet(2, 100));
    until("discarded", &mut [&mut driver], |drivers| drivers[0].reclaim(0) == 1);
    driver.front.set_vring_enable(0, true).unwrap();
    driver.send(0, &packet(3, 100));
    until("the packet", &mut [&mut driver], |drivers| {
        drivers[0].receive(0).is_some_and(|(_, bytes)| bytes == packet(3, 100))
    });
    let lost = &net.counters(0)[1];
    assert_eq!((lost.lost(Lost::Disabled), lost.lost(Lost::NoReceiver)), (1, 1));
}

#[test]
fn a_ring_that_stops_goes_on_where_it_was() {
    // rule D28
    for packed in [false, true] {
        let net = device(options(Link::Loopback, 1), 1, Notify::Adaptive);
        let mut driver = Driver::running(&net, 0, Setup { packed, ..Setup::new(true) });
        driver.offer_all(0, 2048);
        exchange(&mut [&mut driver], 0, 0, 0, 70, 1500);
        // Taken, and not to be sent as their translations are missing.
        driver.invalidate(crate::rig::IOVA + 64 * PAGE, u64::MAX);
        (0..20).for_each(|n| driver.send(0, &packet(n, 200)));
        without_updates("a miss", &mut driver, |driver| {
            driver.listen();
            !driver.unresolved.is_empty()
        });
        let bases = [1, 0].map(|ring| (ring, driver.front.get_vring_base(ring).unwrap()));
        assert_eq!(driver.reclaim(0), 0, "nothing was lost");
        bases.into_iter().rev().for_each(|(ring, base)| driver.go_on(ring, base));
        let mut got = 0;
        until("all packets", &mut [&mut driver], |drivers| {
            while let Some((_, bytes)) = drivers[0].receive(0) {
                assert_eq!(bytes, packet(got, 200));
                got += 1;
            }
            got == 20
        });
    }
}

#[test]
fn a_driver_that_is_gone_makes_room_for_the_next() {
    let net = device(options(Link::Peer, 1), 1, Notify::Adaptive);
    let mut stays = Driver::running(&net, 0, Setup::new(true));
    stays.offer_all(0, 2048);
    for translated in [true, false, true] {
        let mut comes = Driver::running(&net, 1, Setup::new(translated));
        comes.offer_all(0, 2048);
        let both = &mut [&mut stays, &mut comes];
        exchange(both, 0, 1, 0, 40, 9000);
        exchange(both, 1, 0, 0, 40, 9000);
    }
}

#[test]
fn a_device_reports_what_it_is() {
    let made =
        NetOptions { mac: Some([2, 3, 4, 5, 6, 7]), mtu: Some(9000), ..options(Link::Loopback, 4) };
    let net = device(made, 1, Notify::Adaptive);
    let mut backend = net.connect(0);
    let mut space = [0xff; 14];
    backend.config(0, &mut space).unwrap();
    assert_eq!(space, [2, 3, 4, 5, 6, 7, 1, 0, 4, 0, 0x28, 0x23, 0xff, 0xff]);
    assert!(backend.config(250, &mut [0; 7]).is_err());
    let offered = backend.offer().features;
    for bit in [wire::feature::MQ, wire::feature::MAC, wire::feature::MTU] {
        assert!(offered & bit != 0);
    }
    assert_eq!(backend.offer().queues, 8);
    let platform = ringfence_virtq::F_ACCESS_PLATFORM;
    assert_eq!(offered & platform, platform);
    drop(backend);
    let plain = NetOptions { iommu: false, ..options(Link::Loopback, 1) };
    assert_eq!(device(plain, 1, Notify::Adaptive).connect(0).offer().features & platform, 0);
}
