//! The pages that a device marks while its memory is moved elsewhere.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd, OwnedFd},
    sync::atomic::Ordering,
};

use proptest::prelude::*;
use ringfence_devices::net::Link;
use ringfence_mem::SharedFile;
use ringfence_run::worker::Notify;
use ringfence_vhost_user::{F_LOG_ALL, F_PROTOCOL_FEATURES};

use crate::rig::{
    BUFFERS_AT, Driver, GPA, PAGE, PAGES, SIZE, Setup, device, options, packet, until,
};

/// Where the writes to the used rings are to be marked where the front end may choose: no ring is
/// there.
const RING_MARKS: u64 = GPA + 1000 * PAGE;

/// A front end that moves its driver's memory.
struct Moving {
    driver: Driver,
    log: SharedFile,
    file: OwnedFd,
    written: BTreeSet<u64>,
}

impl Moving {
    fn new(driver: Driver) -> Moving {
        let (log, file) = SharedFile::create(((GPA / PAGE + PAGES) / 8) as usize).unwrap();
        let mut moving = Moving { driver, log, file, written: BTreeSet::new() };
        moving.set_base();
        moving
    }

    /// Sets a new log, though in the same place. When this returns every worker has ended the round
    /// in which it marked something in the old one.
    fn set_base(&mut self) {
        let len = self.log.len() as u64;
        self.driver
            .front
            .request(
                ringfence_vhost_user::msg::Request::SetLogBase { len, offset: 0 },
                &[self.file.as_fd()],
            )
            .unwrap();
    }

    fn set(&mut self, on: bool) {
        let features = self.driver.settled | F_PROTOCOL_FEATURES | if on { F_LOG_ALL } else { 0 };
        self.driver.front.set_features(features).unwrap();
    }

    /// The marks, which are taken away.
    fn take(&self) -> BTreeSet<u64> {
        let (first, mut marks) = (GPA / PAGE, BTreeSet::new());
        for page in 0..first + PAGES {
            let byte = self.log.u8_at((page / 8) as usize);
            if byte.fetch_and(!(1 << (page % 8)), Ordering::SeqCst) & 1 << (page % 8) != 0 {
                marks.insert(page);
            }
        }
        marks
    }

    /// Sends packets of these lengths, and notes where they arrive.
    fn exchange(&mut self, lengths: &[usize]) {
        let written = &mut self.written;
        for (n, &len) in lengths.iter().enumerate() {
            self.driver.send(0, &packet(n, len));
            let mut left = len + 12;
            until("a packet", &mut [&mut self.driver], |drivers| {
                let driver = &mut *drivers[0];
                while let Some(used) = driver.queue(0).pop().unwrap() {
                    let (offset, buffer) = (used.token >> 32, used.token as u32);
                    for byte in offset..offset + u64::from(used.len) {
                        written.insert((GPA + driver.place(byte) as u64) / PAGE);
                    }
                    left -= used.len as usize;
                    driver.offer(0, offset, buffer);
                }
                left == 0 && driver.reclaim(0) > 0
            });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn exactly_the_pages_that_packets_were_written_to_are_marked(
        rounds in prop::collection::vec(
            (any::<bool>(), prop::collection::vec(1..6000usize, 0..6)),
            1..6,
        ),
        translated in any::<bool>(),
        packed in any::<bool>(),
        event_idx in any::<bool>(),
        rings in any::<bool>(),
        buffer in prop_oneof![Just(600u32), Just(2048), Just(4096)],
    ) {
        // rule D26
        let net = device(options(Link::Loopback, 1), 1, Notify::Adaptive);
        let setup = Setup { packed, event_idx, ..Setup::new(translated) };
        let mut driver = Driver::running(&net, 0, setup);
        for at in 0..u64::from(SIZE) {
            // Now and then across a page's end.
            driver.offer(0, BUFFERS_AT + at * (u64::from(buffer) + 100), buffer);
        }
        let mut moving = Moving::new(driver);
        if rings {
            (0..2).for_each(|ring| moving.driver.log_ring(ring, Some(RING_MARKS)));
        }
        for (on, lengths) in rounds {
            moving.set(on);
            if !on {
                moving.take();
            }
            moving.exchange(&lengths);
            moving.set_base();
            let mut expected = std::mem::take(&mut moving.written);
            let marked = moving.take();
            if !on {
                prop_assert!(marked.is_empty(), "{marked:?}");
                continue;
            }
            let ring_pages: BTreeSet<u64> = match (translated || packed, rings) {
                (_, false) => BTreeSet::new(),
                (true, true) => BTreeSet::from([GPA / PAGE, GPA / PAGE + 2]),
                (false, true) => BTreeSet::from([RING_MARKS / PAGE]),
            };
            if !lengths.is_empty() {
                expected.extend(&ring_pages);
                prop_assert_eq!(marked, expected);
            } else {
                // A worker that goes to sleep says so in the ring.
                prop_assert!(marked.is_subset(&ring_pages), "{marked:?}");
            }
        }
    }
}
