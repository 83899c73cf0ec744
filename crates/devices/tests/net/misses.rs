//! Translations that come late, never, or go away.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use ringfence_devices::net::{Link, Lost, Net, NetOptions};
use ringfence_iotlb::IotlbConfig;
use ringfence_mem::Access;
use ringfence_run::worker::{Notify, Worker};

use crate::rig::{
    BUFFERS_AT, Driver, IOVA, PAGE, SENT_AT, SIZE, Setup, device, options, packet, until,
    without_updates,
};

fn timing_out_after(pairs: u16, timeout: Duration) -> NetOptions {
    let iotlb = IotlbConfig { timeout, ..IotlbConfig::default() };
    NetOptions { iotlb, ..options(Link::Loopback, pairs) }
}

/// Sends updates for this many pages.
fn update_pages(driver: &mut Driver, first: u64, pages: u64) {
    for page in first..first + pages {
        driver.update(IOVA + page * PAGE, Access::ReadWrite);
    }
}

/// Sends updates for all rings.
fn update_rings(driver: &mut Driver, rings: u64) {
    update_pages(driver, 0, 2 * rings);
}

/// Sends updates for all that `pairs` pairs need with buffers of 2048 bytes, except what is sent
/// beyond the first page: with a short time-out, nothing else may miss.
fn update_all(driver: &mut Driver, pairs: u64) {
    update_rings(driver, 2 * pairs);
    update_pages(driver, SENT_AT / PAGE, 1);
    (0..pairs).for_each(|pair| update_pages(driver, BUFFERS_AT / PAGE + pair * 128, 32));
}

#[test]
fn a_ring_whose_translation_is_missing_causes_a_miss_and_is_found() {
    // rule D22
    let net = device(options(Link::Loopback, 1), 1, Notify::Adaptive);
    let mut driver = Driver::running(&net, 0, Setup::new(true));
    driver.offer_all(0, 2048);
    driver.send(0, &packet(1, 100));
    without_updates("misses of the ring", &mut driver, |driver| {
        driver.listen();
        !driver.unresolved.is_empty()
    });
    assert!(
        driver.unresolved.iter().all(|&(iova, _)| iova < IOVA + 4 * PAGE),
        "{:x?}",
        driver.unresolved
    );
    until("the packet", &mut [&mut driver], |drivers| {
        drivers[0].receive(0).is_some_and(|(_, bytes)| bytes == packet(1, 100))
    });
}

#[test]
fn a_burst_sends_all_its_misses_at_once_and_none_twice() {
    // rules D16, D17
    let made = IotlbConfig { again: Duration::from_secs(60), ..options(Link::Loopback, 1).iotlb };
    let made = NetOptions { iotlb: made, ..options(Link::Loopback, 1) };
    let workers: Arc<[Worker]> = [Worker::spawn("net", Notify::Adaptive).unwrap()].into();
    let net = Net::new(made, Arc::clone(&workers)).unwrap();
    let mut driver = Driver::running(&net, 0, Setup::new(true));
    update_rings(&mut driver, 2);
    driver.listen();
    let already = driver.misses;
    // Published together: 16 pages that are read, and 16 that are written.
    driver.offer_all(0, PAGE as u32);
    let at = driver.addr(64 * PAGE);
    for page in 0..16 {
        let desc = ringfence_virtq::Desc::readable(at + page * PAGE, 100);
        driver.queue(1).add(&[desc], 0).unwrap();
    }
    driver.publish(1);
    without_updates("all misses", &mut driver, |driver| {
        driver.listen();
        let read = driver.unresolved.iter().filter(|(_, access)| *access == Access::Read).count();
        read >= 16 && driver.unresolved.len() >= 32
    });
    // The worker looks again after 5 ms, and has done so when it has taken what it is called for.
    std::thread::sleep(Duration::from_millis(20));
    (0..3).for_each(|_| assert!(workers[0].call(|_| ()).is_some()));
    driver.listen();
    let mut pages: Vec<_> = driver
        .unresolved
        .iter()
        .skip(already)
        .map(|&(iova, access)| (iova / PAGE, access as u8))
        .collect();
    let count = pages.len();
    pages.sort_unstable();
    pages.dedup();
    assert_eq!(pages.len(), count, "a miss was sent twice");
    // No more than what the packets need.
    assert!(count <= 16 + usize::from(SIZE), "{count}");
    until("all packets", &mut [&mut driver], {
        let mut got = 0;
        move |drivers| {
            got += std::iter::from_fn(|| drivers[0].receive(0)).count();
            got == 16
        }
    });
}

#[test]
fn a_translation_that_never_comes_costs_the_packets_that_need_it() {
    let net = device(timing_out_after(2, Duration::from_millis(200)), 1, Notify::Adaptive);
    let mut driver = Driver::running(&net, 0, Setup { pairs: 2, ..Setup::new(true) });
    update_all(&mut driver, 2);
    driver.offer_all(0, 2048);
    driver.offer_all(1, 2048);
    // An unknown address: no update ever arrives.
    let nowhere = IOVA + (1 << 40);
    driver.queue(1).add(&[ringfence_virtq::Desc::readable(nowhere, 100)], 0).unwrap();
    driver.publish(1);
    driver.send(0, &packet(1, 100));
    // Others go on meanwhile.
    driver.send(1, &packet(2, 100));
    until("the other pair's packet", &mut [&mut driver], |drivers| {
        drivers[0].receive(1).is_some_and(|(_, bytes)| bytes == packet(2, 100))
    });
    until("the packet behind it", &mut [&mut driver], |drivers| {
        drivers[0].receive(0).is_some_and(|(_, bytes)| bytes == packet(1, 100))
    });
    let counters = &net.counters(0)[1];
    let lost = [Lost::TimedOut, Lost::Unreachable].map(|why| counters.lost(why));
    assert_eq!(lost.iter().sum::<u64>(), 1);
}

#[test]
fn silence_is_given_up_on_after_a_while() {
    let net = device(timing_out_after(1, Duration::from_millis(100)), 1, Notify::Adaptive);
    let mut driver = Driver::running(&net, 0, Setup::new(true));
    update_rings(&mut driver, 2);
    update_pages(&mut driver, BUFFERS_AT / PAGE, 32);
    driver.offer_all(0, 2048);
    // Three packets that wait together time out together. No thread reads the misses.
    (0..3).for_each(|n| driver.send(0, &packet(n, 100)));
    let mut back = 0;
    without_updates("packets given up", &mut driver, |driver| {
        back += driver.reclaim(0);
        back == 3
    });
    assert_eq!(net.counters(0)[1].lost(Lost::TimedOut), 3);
    assert_eq!(net.iotlb(0).timeouts, 3);
    // With an update a packet goes through: the first, unless a busy machine sends it too late.
    driver.unresolved.clear();
    driver.send(0, &packet(9, 100));
    until("the packet", &mut [&mut driver], |drivers| {
        if drivers[0].reclaim(0) == 1 && net.counters(0)[0].packets() == 0 {
            drivers[0].send(0, &packet(9, 100));
        }
        drivers[0].receive(0).is_some_and(|(_, bytes)| bytes == packet(9, 100))
    });
}

#[test]
fn a_refusal_is_not_waited_for() {
    // rule D9: when the miss is sent again, the front end refuses it.
    let net = device(options(Link::Loopback, 1), 1, Notify::Adaptive);
    let mut driver = Driver::running(&net, 0, Setup::new(true));
    driver.offer_all(0, 2048);
    let nowhere = IOVA + (1 << 40);
    driver.queue(1).add(&[ringfence_virtq::Desc::readable(nowhere, 100)], 0).unwrap();
    driver.publish(1);
    driver.send(0, &packet(1, 100));
    until("the packet behind it", &mut [&mut driver], |drivers| {
        refuse_unknown(drivers[0]);
        drivers[0].receive(0).is_some_and(|(_, bytes)| bytes == packet(1, 100))
    });
    assert_eq!(net.counters(0)[1].lost(Lost::Unreachable), 1);
}

/// How a front end that can do so refuses a miss: by an update without any permission.
fn refuse_unknown(driver: &mut Driver) {
    driver.listen();
    for (iova, _) in std::mem::take(&mut driver.unresolved) {
        if iova >= IOVA + (1 << 30) {
            let first = iova & !(PAGE - 1);
            let update = ringfence_vhost_user::Iotlb::Update {
                first,
                last: first + PAGE - 1,
                user_addr: driver.ram.user_addr(),
                access: None,
            };
            driver.front.iotlb(&update).unwrap();
        } else {
            driver.update(iova, Access::ReadWrite);
        }
    }
}

#[test]
fn a_buffer_that_cannot_be_reached_costs_no_packet() {
    let net = device(timing_out_after(1, Duration::from_millis(200)), 1, Notify::Adaptive);
    let mut driver = Driver::running(&net, 0, Setup::new(true));
    update_all(&mut driver, 1);
    driver.offer(0, 1 << 30, 2048);
    driver.offer(0, BUFFERS_AT, 2048);
    driver.send(0, &packet(1, 100));
    // The bad buffer comes back empty, the good one with the packet.
    let mut lens = Vec::new();
    until("both buffers", &mut [&mut driver], |drivers| {
        while let Some(used) = drivers[0].queue(0).pop().unwrap() {
            lens.push((used.token >> 32, used.len));
        }
        lens.len() == 2
    });
    lens.sort_unstable();
    assert_eq!(lens, [(BUFFERS_AT, 112), (1 << 30, 0)]);
    let counters = &net.counters(0)[0];
    assert_eq!(counters.lost(Lost::TimedOut) + counters.lost(Lost::Unreachable), 1);
}

#[test]
fn after_an_invalidation_is_completed_nothing_is_written_there() {
    // rule D15
    for packed in [false, true] {
        let net = device(options(Link::Loopback, 1), 1, Notify::Adaptive);
        let mut driver = Driver::running(&net, 0, Setup { packed, ..Setup::new(true) });
        driver.offer_all(0, PAGE as u32);
        let (mut sent, mut got) = (0, 0);
        for round in 0..40u64 {
            // Traffic, all the time.
            until("traffic", &mut [&mut driver], |drivers| {
                drivers[0].reclaim(0);
                while drivers[0].queue(1).free_descs() > 0 {
                    drivers[0].send(0, &packet(sent, 1000));
                    sent += 1;
                }
                while let Some((_, bytes)) = drivers[0].receive(0) {
                    assert_eq!(bytes, packet(got, 1000));
                    got += 1;
                }
                got as u64 >= 60 * (round + 1)
            });
            // A page that is written in turn with others.
            let page = BUFFERS_AT + round % u64::from(SIZE) * PAGE;
            let iova = driver.addr(page);
            driver.invalidate(iova, iova + PAGE - 1);
            // What was received before is read before it is written over.
            while let Some((_, bytes)) = driver.receive(0) {
                assert_eq!(bytes, packet(got, 1000));
                got += 1;
            }
            let mark = vec![0xa5; PAGE as usize];
            driver.put(page, &mark);
            // The device works on until it sends a miss for the page, which is among those offered.
            without_updates("a miss", &mut driver, |driver| {
                driver.reclaim(0);
                if driver.queue(1).free_descs() > 0 {
                    driver.send(0, &packet(sent, 1000));
                    sent += 1;
                }
                driver.listen();
                for (missed, access) in std::mem::take(&mut driver.unresolved) {
                    if missed / PAGE == iova / PAGE {
                        driver.unresolved.push_back((missed, access));
                    } else {
                        driver.update(missed, access);
                    }
                }
                !driver.unresolved.is_empty()
            });
            assert!(driver.get(page, PAGE as usize) == mark, "written after the acknowledgement");
        }
    }
}

#[test]
fn no_packet_is_lost_when_all_translations_go() {
    // rules D21, D22: the ring's too.
    for packed in [false, true] {
        for notify in [Notify::Adaptive, Notify::Sleep] {
            let net = device(options(Link::Loopback, 1), 1, notify);
            let setup = Setup { packed, event_idx: true, ..Setup::new(true) };
            let mut driver = Driver::running(&net, 0, setup);
            driver.offer_all(0, 2048);
            let (mut sent, mut got) = (0, 0);
            for round in 1..=30 {
                until("traffic", &mut [&mut driver], |drivers| {
                    drivers[0].reclaim(0);
                    if sent - got < 20 {
                        drivers[0].send(0, &packet(sent, 700));
                        sent += 1;
                    }
                    while let Some((_, bytes)) = drivers[0].receive(0) {
                        assert_eq!(bytes, packet(got, 700));
                        got += 1;
                    }
                    got >= 20 * round
                });
                // As QEMU flushes: all but the interrupts' window.
                driver.invalidate(0, 0xfedf_ffff);
                driver.invalidate(0xfef0_0000, u64::MAX);
            }
            let lost = Lost::ALL.iter().map(|&why| net.counters(0)[1].lost(why)).sum::<u64>();
            assert_eq!(lost, 0);
        }
    }
}

#[test]
fn misses_of_a_sender_and_of_a_receiver_are_distinguished() {
    // The receiver's misses are for writing, the sender's for reading.
    let net = device(options(Link::Peer, 1), 1, Notify::Adaptive);
    let mut sender = Driver::running(&net, 0, Setup::new(true));
    let mut receiver = Driver::running(&net, 1, Setup::new(true));
    update_rings(&mut sender, 2);
    update_rings(&mut receiver, 2);
    receiver.offer_all(0, PAGE as u32);
    sender.send(0, &packet(1, 100));
    for driver in [&mut sender, &mut receiver] {
        without_updates("misses", driver, |driver| {
            driver.listen();
            !driver.unresolved.is_empty()
        });
    }
    let data = |driver: &Driver| {
        let missed = driver.unresolved.iter().filter(|&&(iova, _)| iova >= IOVA + 64 * PAGE);
        missed.map(|&(_, access)| access).collect::<Vec<_>>()
    };
    assert!(data(&sender).iter().all(|&access| access == Access::Read));
    assert!(data(&receiver).iter().all(|&access| access == Access::Write));
    until("the packet", &mut [&mut sender, &mut receiver], |drivers| {
        drivers[1].receive(0).is_some_and(|(_, bytes)| bytes == packet(1, 100))
    });
}

#[test]
fn a_receiver_that_is_silent_holds_up_the_sender_for_a_moment_only() {
    let net = device(options(Link::Peer, 1), 1, Notify::Adaptive);
    let mut sender = Driver::running(&net, 0, Setup::new(false));
    let mut receiver = Driver::running(&net, 1, Setup::new(true));
    receiver.offer_all(0, 2048);
    let lost = || net.counters(0)[1].lost(Lost::TimedOut);
    // First its ring is missing, then a buffer.
    for round in 1..=2 {
        (0..8).for_each(|n| sender.send(0, &packet(n, 100)));
        let mut back = 0;
        without_updates("dropped", &mut sender, |sender| {
            back += sender.reclaim(0);
            back == 8
        });
        // The receiver's own time-out is not over.
        assert_eq!((lost(), net.iotlb(1).timeouts), (8 * round, 0));
        update_rings(&mut receiver, 1);
    }
    sender.send(0, &packet(9, 100));
    until("a packet", &mut [&mut sender, &mut receiver], |drivers| {
        if drivers[0].reclaim(0) > 0 {
            drivers[0].send(0, &packet(9, 100));
        }
        drivers[1].receive(0).is_some_and(|(_, bytes)| bytes == packet(9, 100))
    });
}

#[test]
fn an_invalidation_is_not_completed_while_a_worker_may_be_using_it() {
    // rule D15
    let workers: Arc<[Worker]> = [Worker::spawn("net", Notify::Poll).unwrap()].into();
    let net = Net::new(options(Link::Loopback, 1), Arc::clone(&workers)).unwrap();
    let mut driver = Driver::running(&net, 0, Setup::new(true));
    driver.offer_all(0, 2048);
    driver.send(0, &packet(1, 100));
    until("the packet", &mut [&mut driver], |drivers| drivers[0].receive(0).is_some());
    let (begun, has_begun) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let acknowledged = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // As if it were in the middle of a burst.
        scope.spawn(|| {
            workers[0].call(move |_| {
                begun.send(()).unwrap();
                let _ = released.recv();
            })
        });
        has_begun.recv().unwrap();
        scope.spawn(|| {
            driver.invalidate(IOVA, IOVA + PAGE - 1);
            acknowledged.store(true, Ordering::Release);
        });
        until("the invalidation", &mut [], |_| net.iotlb(0).invalidations > 0);
        // It waits: otherwise it would have returned by then.
        std::thread::sleep(Duration::from_millis(50));
        let early = acknowledged.load(Ordering::Acquire);
        release.send(()).unwrap();
        assert!(!early, "acknowledged before the worker passed a quiet point");
    });
    assert!(acknowledged.load(Ordering::Acquire));
}
