//! A driver that writes arbitrary descriptors into its rings.

use proptest::prelude::*;
use ringfence_devices::net::{GRACE, Link, NetOptions};
use ringfence_mem::Access;
use ringfence_run::worker::Notify;
use ringfence_virtq::Desc;

use crate::rig::{
    BUFFERS_AT, Driver, IOVA, PAGE, Setup, device, options, packet, until, without_updates,
};

/// A page that no update ever covers.
const SECRET: u64 = BUFFERS_AT + 200 * PAGE;

fn any_desc() -> impl Strategy<Value = Desc> {
    let addr = prop_oneof![
        4 => (0..8u64, 0..PAGE).prop_map(|(page, at)| IOVA + BUFFERS_AT + page * PAGE + at),
        1 => (0..PAGE).prop_map(|at| IOVA + SECRET + at),
        1 => Just(u64::MAX - 5),
        1 => any::<u64>(),
    ];
    let len = prop_oneof![4 => 0..200u32, 2 => 0..3000u32, 1 => any::<u32>()];
    (addr, len, any::<bool>()).prop_map(|(addr, len, write)| Desc { addr, len, write })
}

fn any_chain() -> impl Strategy<Value = Vec<Desc>> {
    prop::collection::vec(any_desc(), 1..6).prop_map(|mut chain| {
        chain.sort_by_key(|desc| desc.write);
        chain
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn no_chains_reach_what_was_not_given(
        sent in prop::collection::vec(any_chain(), 0..12),
        offered in prop::collection::vec(any_chain(), 0..12),
        packed: bool,
        mergeable: bool,
    ) {
        let mut made = NetOptions { grace: GRACE, ..options(Link::Loopback, 1) };
        made.iotlb.timeout = std::time::Duration::from_millis(30);
        let net = device(made, 1, Notify::Adaptive);
        let features = if mergeable { Setup::new(true).features } else { 0 };
        let mut driver = Driver::running(&net, 0, Setup { packed, features, ..Setup::new(true) });
        for page in 0..4 {
            driver.update(IOVA + page * PAGE, Access::ReadWrite);
        }
        for page in 0..8 {
            driver.update(IOVA + BUFFERS_AT + page * PAGE, Access::ReadWrite);
        }
        let secret = vec![0x5a; PAGE as usize];
        driver.put(SECRET, &secret);
        let [_, sent] = [(0, &offered), (1, &sent)].map(|(ring, chains)| {
            // The driver's own end refuses to write some of them.
            let added = chains.iter().filter(|chain| driver.queue(ring).add(chain, 0).is_ok()).count();
            driver.publish(ring);
            added
        });
        // No miss gets an update. All packets come back in the end, used or not, unless a queue was
        // stopped.
        let mut back = 0;
        without_updates("all packets, or a stop", &mut driver, |driver| {
            back += driver.reclaim(0);
            back == sent || net.counters(0)[1].stops() > 0
        });
        prop_assert!(driver.get(SECRET, PAGE as usize) == secret);
        // The device lives, and serves the next driver.
        drop(driver);
        let mut next = Driver::running(&net, 0, Setup::new(false));
        next.offer_all(0, 2048);
        next.send(0, &packet(3, 333));
        until("the next driver's packet", &mut [&mut next], |drivers| {
            drivers[0].receive(0).is_some_and(|(_, bytes)| bytes == packet(3, 333))
        });
    }

    #[test]
    fn no_ring_content_ends_more_than_its_queue(
        bytes in prop::collection::vec(any::<u8>(), 2 * PAGE as usize),
        packed: bool,
        translated: bool,
    ) {
        let net = device(options(Link::Loopback, 2), 1, Notify::Adaptive);
        let setup = Setup { packed, pairs: 2, ..Setup::new(translated) };
        let mut driver = Driver::running(&net, 0, setup);
        if translated {
            for page in 0..8 {
                driver.update(IOVA + page * PAGE, Access::ReadWrite);
            }
        }
        // Pair 0: rubbish, over and over, while pair 1 works.
        driver.offer_all(1, 2048);
        for round in 0..4 {
            for ring in 0..2 {
                driver.put(ring * 2 * PAGE, &bytes[round..]);
            }
            driver.send(1, &packet(round, 500));
            until("pair 1's packet", &mut [&mut driver], |drivers| {
                drivers[0].receive(1).is_some_and(|(_, bytes)| bytes == packet(round, 500))
            });
        }
    }
}
