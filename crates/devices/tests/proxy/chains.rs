//! A guest whose chains are written by hand, in memory apart from its ring's.

use std::{
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use ringfence_devices::proxy::{Proxy, ProxyOptions};
use ringfence_iotlb::IotlbConfig;
use ringfence_mem::{Access, GuestRam};
use ringfence_run::event;
use ringfence_vhost_user::{
    BackendMessage, Frontend, FrontendChannel, Iotlb, ProtocolFeatures, RingAddresses,
};
use ringfence_virtq::{
    Desc, F_ACCESS_PLATFORM,
    driver::{Queue, QueueConfig, Rings},
};

use crate::{F_VERSION_1, Far, Script, guest::LONG, guest::workers, serving::Serving};

const RING_BYTES: usize = 64 << 10;
const RING_AT: u64 = 1 << 32;
const DATA_AT: u64 = 1 << 33;
const MIB: u64 = 1 << 20;
const SIZE: u16 = 32;

struct Guest {
    /// The ring's memory, and the buffers'.
    ring: Arc<GuestRam>,
    data: Arc<GuestRam>,
    main: Frontend,
    channel: FrontendChannel,
    queue: Queue,
    kick: OwnedFd,
    err: OwnedFd,
    back: usize,
    _serving: Serving,
}

impl Guest {
    /// With 8 MiB for buffers, whose proxy has 4 MiB of slots; with an IOTLB, or not.
    fn new(far: &Far, iotlb: bool) -> Guest {
        let config = IotlbConfig { timeout: LONG, again: LONG, ..IotlbConfig::default() };
        let options = ProxyOptions {
            pool_size: 4 * MIB,
            iotlb: iotlb.then_some(config),
            ..ProxyOptions::new("proxy", 4)
        };
        let proxy = Proxy::connect(options, &far.connector(), workers()).unwrap();
        let (serving, ours) = Serving::start(proxy);
        let mut main = Frontend::new(ours, LONG);
        let features = F_VERSION_1 | (u64::from(iotlb) * F_ACCESS_PLATFORM);
        let protocol = ProtocolFeatures::REPLY_ACK | ProtocolFeatures::BACKEND_REQ;
        assert_eq!(main.negotiate(features, protocol).unwrap(), features);
        let (ours, theirs) = UnixStream::pair().unwrap();
        main.set_backend_channel(theirs.as_fd()).unwrap();
        let channel = FrontendChannel::new(ours, LONG);
        let ring = GuestRam::new(RING_BYTES, RING_AT).unwrap();
        let data = GuestRam::new(8 << 20, DATA_AT).unwrap();
        main.set_mem_table(&[(ring.region(), ring.fd()), (data.region(), data.fd())]).unwrap();
        let config = QueueConfig { size: SIZE, event_idx: false, packed: false };
        let window = ring.window(0, RING_BYTES).unwrap();
        let queue = Queue::with_config(config, Rings::placed(&window, &config).unwrap()).unwrap();
        let [kick, call, err] = [(); 3].map(|()| event::new().unwrap());
        let (at, first) = (config.offsets(), if iotlb { RING_AT } else { ring.user_addr() });
        let [desc, avail, used] = [at.desc, at.avail, at.used].map(|at| first + at as u64);
        let (back, _serving) = (0, serving);
        let mut guest = Guest { ring, data, main, channel, queue, kick, err, back, _serving };
        if iotlb {
            guest.update(&[(RING_AT, RING_BYTES as u64)]);
        }
        let main = &mut guest.main;
        main.set_vring_num(0, SIZE).unwrap();
        main.set_vring_base(0, 0).unwrap();
        main.set_vring_addr(0, &RingAddresses { desc, avail, used, log: None }).unwrap();
        main.set_vring_call(0, Some(call.as_fd())).unwrap();
        main.request(
            ringfence_vhost_user::msg::Request::SetVringErr { ring: 0, fd: true },
            &[guest.err.as_fd()],
        )
        .unwrap();
        main.set_vring_kick(0, Some(guest.kick.as_fd())).unwrap();
        main.set_vring_enable(0, true).unwrap();
        guest
    }

    /// Maps these addresses to themselves, all with one wake-up of the worker.
    fn update(&mut self, ranges: &[(u64, u64)]) {
        let to = |at: u64| match at.checked_sub(DATA_AT) {
            Some(offset) => self.data.user_addr() + offset,
            None => self.ring.user_addr() + (at - RING_AT),
        };
        let update = |&(first, len): &(u64, u64)| Iotlb::Update {
            first,
            last: first + (len - 1),
            user_addr: to(first),
            access: Some(Access::ReadWrite),
        };
        let handle = self.main.iotlb_handle();
        handle.post(&ranges.iter().map(update).collect::<Vec<_>>()).unwrap();
        handle.settle().unwrap();
    }

    /// Waits until the device lacks a translation within these addresses.
    fn wait_for_miss(&mut self, (first, len): (u64, u64)) {
        loop {
            let request = self.channel.recv().unwrap().expect("the device is there");
            if let BackendMessage::Iotlb(Iotlb::Miss { iova, .. }) = request.message
                && iova >= first
                && iova - first < len
            {
                return;
            }
        }
    }

    /// Submits a chain of one buffer.
    fn submit(&mut self, (addr, len): (u64, u64), write: bool) {
        self.queue.add(&[Desc { addr, len: len as u32, write }], addr).unwrap();
        self.queue.publish();
        event::signal(&self.kick);
    }

    /// Waits until that many chains have come back since the beginning.
    fn wait_for(&mut self, count: usize) {
        let begun = Instant::now();
        while self.back < count {
            assert!(begun.elapsed() < LONG, "{} of {count} chains have come back", self.back);
            self.back += usize::from(self.queue.pop().unwrap().is_some());
            thread::sleep(Duration::from_micros(100));
        }
    }
}

/// A round that has copied enough leaves those that wait for room behind the one that has it.
#[test]
fn a_chain_that_waits_to_be_copied_back_holds_up_none_that_waits_for_its_room() {
    let far = Far::new(0);
    let mut guest = Guest::new(&far, true);
    let full = (DATA_AT, 2 * MIB);
    let late = (DATA_AT + 2 * MIB, 4096);
    let fits = (DATA_AT + 3 * MIB, MIB);
    let does_not = (DATA_AT + 5 * MIB, 3 * MIB / 2);
    guest.update(&[full, late]);
    far.obeys(Script::Silent);
    guest.submit(full, true);
    guest.submit(late, true);
    far.wait_for(2);
    let (first, last) = (late.0, late.0 + (late.1 - 1));
    guest.main.iotlb(&Iotlb::Invalidate { first, last }).unwrap();
    guest.submit(fits, false);
    guest.submit(does_not, false);
    guest.wait_for_miss(fits);
    guest.wait_for_miss(does_not);
    // The last first.
    far.obeys(Script::Honest);
    guest.wait_for_miss(late);
    guest.update(&[fits, does_not, late]);
    guest.wait_for(4);
}

/// What is missing comes first: of a chain that may wait nothing is copied, however often it is looked at.
#[test]
fn a_chain_of_one_buffer_misses_its_translations_before_it_asks_for_room() {
    let far = Far::new(0);
    let mut guest = Guest::new(&far, true);
    let full = (DATA_AT, 3 * MIB);
    let other = (DATA_AT + 3 * MIB, 2 * MIB);
    guest.update(&[full]);
    far.obeys(Script::Silent);
    guest.submit(full, true);
    far.wait_for(1);
    guest.submit(other, false);
    guest.wait_for_miss(other);
    guest.update(&[other]);
    far.obeys(Script::Honest);
    guest.wait_for(2);
}

#[test]
fn a_ring_that_breaks_while_it_stops_stops_at_once() {
    let far = Far::new(0);
    let mut guest = Guest::new(&far, false);
    far.obeys(Script::Silent);
    guest.submit((DATA_AT, 4096), true);
    far.wait_for(1);
    guest.main.set_vring_enable(0, false).unwrap();
    let ring = (guest.ring.region(), guest.ring.fd());
    guest.main.set_mem_table(&[ring]).unwrap();
    far.obeys(Script::Honest);
    far.wait_for_none();
    guest.main.get_vring_base(0).unwrap();
    assert!(rustix::io::read(&guest.err, &mut [0; 8]).is_ok(), "the ring has failed");
}
