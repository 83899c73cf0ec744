//! Packed rings, with and without a record of what is under way.

use ringfence_mem::Window;
use ringfence_run::event;
use ringfence_vhost_user::RingAddresses;
use ringfence_virtq::{Desc, F_RING_PACKED, blk::Kind, device, driver};

use super::*;

/// No power of two: packed rings may have any size.
const SIZE: u16 = 13;

struct Packed {
    behind: Behind,
    ring: driver::Queue,
    at: u64,
    offsets: [u64; 3],
    kick: std::os::fd::OwnedFd,
}

impl Packed {
    fn new(recorded: bool) -> Packed {
        Packed::at(recorded, device::RingConfig::start(true))
    }

    fn at(recorded: bool, base: u32) -> Packed {
        Packed::with(recorded, SIZE, base)
    }

    /// With a record for rings of up to `most` descriptors.
    fn with(recorded: bool, most: u16, base: u32) -> Packed {
        let workers: Arc<[Worker]> = Arc::new([Worker::spawn("worker", Notify::Adaptive).unwrap()]);
        let options = BlkOptions {
            iotlb: Some(config()),
            unit: BLK_UNIT,
            ..BlkOptions::new(ram_disk(1 << 20), ID, 4)
        };
        let mut behind = Behind::connect_with(workers, options, F_RING_PACKED);
        if recorded {
            let region = behind.main().inflight(4, most).unwrap().unwrap();
            behind
                .main()
                .request(
                    ringfence_vhost_user::msg::Request::SetInflight(region.0),
                    &[region.1.as_fd()],
                )
                .unwrap();
        }
        let (page, window) = behind.mapped();
        let config = driver::QueueConfig { size: SIZE, event_idx: false, packed: true };
        let rings = driver::Rings::placed(&window, &config).unwrap();
        let ring = driver::Queue::with_config(config, rings).unwrap();
        let at = config.offsets();
        let offsets = [at.desc, at.avail, at.used].map(|offset| offset as u64);
        let kick = event::new().unwrap();
        let packed = Packed { behind, ring, at: iova(page), offsets, kick };
        packed.start(base);
        packed
    }

    fn start(&self, base: u32) {
        let [desc, avail, used] = self.offsets.map(|offset| self.at + offset);
        let mut main = self.behind.main();
        main.set_vring_num(0, SIZE).unwrap();
        main.set_vring_base(0, base).unwrap();
        main.set_vring_addr(0, &RingAddresses { desc, avail, used, log: None }).unwrap();
        main.set_vring_kick(0, Some(self.kick.as_fd())).unwrap();
        main.set_vring_enable(0, true).unwrap();
        event::signal(&self.kick);
    }

    /// Submits a request for a page of data, full of `byte`, on fresh pages; returns the pages, and
    /// the data.
    fn submit(&mut self, kind: Kind, sector: u64, table: bool, byte: u8) -> (Vec<usize>, Window) {
        let [header, data, status] = [(); 3].map(|()| self.behind.mapped());
        let bytes = [u64::from(kind.code()), sector].map(u64::to_le_bytes).concat();
        header.1.write(0, &bytes);
        status.1.write(0, &[0xee]);
        fill(&data.1, byte);
        let write = kind == Kind::In;
        let descs = [
            Desc::readable(iova(header.0), 16),
            Desc { addr: iova(data.0), len: PAGE as u32, write },
            Desc::writable(iova(status.0), 1),
        ];
        match table {
            false => self.ring.add(&descs, sector).unwrap(),
            true => {
                let (page, window) = self.behind.mapped();
                self.ring.add_indirect(iova(page), &window, &descs, sector).unwrap();
            }
        }
        self.ring.publish();
        event::signal(&self.kick);
        (vec![header.0, data.0, status.0], data.1)
    }

    fn wait(&mut self) -> driver::Used {
        let mut found = None;
        until("a completion in the ring", || {
            found = self.ring.pop().unwrap();
            found.is_some()
        });
        found.unwrap()
    }
}

#[test]
fn packed_rings_carry_the_same_requests() {
    for recorded in [false, true] {
        let mut packed = Packed::new(recorded);
        for round in 0..60u8 {
            let sector = u64::from(round % 32) * 8;
            packed.submit(Kind::Out, sector, round % 2 == 0, round);
            assert_eq!(packed.wait().len, 1);
            let (_, back) = packed.submit(Kind::In, sector, round % 5 == 0, 0xff);
            let used = packed.wait();
            assert_eq!((used.token, used.len), (sector, PAGE as u32 + 1));
            assert!(holds(&back, round), "round {round}");
            if round % 7 == 0 {
                packed.behind.invalidate_all();
            }
        }
        assert_eq!(packed.behind.options.figures.sum().failed, 0);
    }
}

/// At the beginning of every second lap the position of a ring that is all in flight is one that front ends
/// send for an empty one.
#[test]
fn a_packed_ring_that_is_all_in_flight_goes_on_where_it_was() {
    for laps in 0..3 {
        let mut packed = Packed::new(true);
        for _ in 0..laps * SIZE {
            packed.submit(Kind::In, 0, true, 0);
            packed.wait();
        }
        // The ring itself.
        packed.behind.push(0);
        packed.behind.updates(Updates::Held);
        for _ in 0..SIZE {
            let (pages, _) = packed.submit(Kind::In, 8, true, 7);
            // Its table.
            packed.behind.push(pages[2] + 1);
            packed.behind.wait_missed(pages[1]);
        }
        let base = packed.behind.main().get_vring_base(0).unwrap();
        packed.behind.updates(Updates::Now);
        packed.behind.release(|_| ());
        packed.start(base);
        for _ in 0..SIZE {
            assert_eq!(packed.wait().len, PAGE as u32 + 1, "after {laps} laps");
        }
        assert_eq!(packed.behind.options.figures.sum().failed, 0);
    }
}

/// Front ends that know no packed rings send 0, others the available position alone.
#[test]
fn a_record_begins_where_its_ring_does() {
    for base in [0, 1 << 15] {
        let mut packed = Packed::at(true, base);
        for round in 0..3 {
            for _ in 0..5 {
                packed.submit(Kind::In, 0, round == 1, 0);
                packed.wait();
            }
            let base = packed.behind.main().get_vring_base(0).unwrap();
            packed.start(base);
        }
        assert_eq!(packed.behind.options.figures.sum().failed, 0);
    }
}

/// A record may be for larger rings than the driver's.
#[test]
fn a_record_for_larger_rings_counts_the_places_of_its_ring() {
    let mut packed = Packed::with(true, 32, device::RingConfig::start(true));
    for _ in 0..9 {
        for _ in 0..5 {
            packed.submit(Kind::In, 0, true, 0);
            packed.wait();
        }
        let base = packed.behind.main().get_vring_base(0).unwrap();
        packed.start(base);
    }
    assert_eq!(packed.behind.options.figures.sum().failed, 0);
}

#[test]
fn a_packed_ring_that_is_stopped_goes_on_with_what_waits() {
    for (recorded, table) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut packed = Packed::new(recorded);
        for round in 0..8 {
            packed.submit(Kind::In, 0, true, 0);
            packed.wait();
            packed.behind.updates(Updates::Held);
            let (pages, data) = packed.submit(Kind::In, 8, table, 7);
            if table {
                // Its table first, then what the table contains.
                until("a miss", || !packed.behind.front.held.lock().unwrap().is_empty());
                packed.behind.release(|_| ());
            }
            pages.iter().for_each(|&page| packed.behind.wait_missed(page));
            let base = packed.behind.main().get_vring_base(0).unwrap();
            assert_eq!(packed.ring.pop().unwrap().map(|used| used.token), None);
            packed.behind.updates(Updates::Now);
            packed.behind.release(|_| ());
            packed.start(base);
            let used = packed.wait();
            assert_eq!((used.token, used.len), (8, PAGE as u32 + 1), "round {round}");
            assert!(holds(&data, 0));
        }
        assert_eq!(packed.behind.options.figures.sum().failed, 0);
    }
}
