//! A network device in this process, and drivers that are their own front ends: they resolve
//! misses, or do not.

#[path = "../common/serving.rs"]
mod serving;

use std::{
    collections::VecDeque,
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    time::{Duration, Instant},
};

use ringfence_devices::net::{Link, Net, NetOptions, wire};
use ringfence_iotlb::IotlbConfig;
use ringfence_mem::{Access, GuestRam};
use ringfence_run::{
    event,
    worker::{Notify, Worker},
};
use ringfence_vhost_user::{Frontend, Iotlb, IotlbWire, ProtocolFeatures, RingAddresses};
use ringfence_virtq::{
    Desc, F_ACCESS_PLATFORM, F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, F_VERSION_1,
    driver::{Queue, QueueConfig, Rings},
};
use zerocopy::{FromBytes, IntoBytes};

use self::serving::Serving;

/// Longer than any reply takes on a busy machine; a test that waits so long has failed.
pub(crate) const LONG: Duration = Duration::from_secs(120);
pub(crate) const PAGE: u64 = 4096;
/// Pages of a driver's memory.
pub(crate) const PAGES: u64 = 1024;
/// Those that lie in memory as they do in IOVA space, for rings.
const STRAIGHT: u64 = 64;
pub(crate) const GPA: u64 = 1 << 32;
/// Where the IOVAs begin.
pub(crate) const IOVA: u64 = 0x4000_0000_0000;
/// Descriptors of a ring.
pub(crate) const SIZE: u16 = 64;
/// Where packets that are sent lie.
pub(crate) const SENT_AT: u64 = STRAIGHT * PAGE;
const SENT_END: u64 = 512 * PAGE;
/// Where buffers lie.
pub(crate) const BUFFERS_AT: u64 = SENT_END;

pub(crate) fn options(link: Link, pairs: u16) -> NetOptions {
    let iotlb = IotlbConfig { timeout: LONG, ..IotlbConfig::default() };
    // A receiver that a busy machine does not let run for a while loses nothing.
    let grace = LONG;
    NetOptions { pairs, grace, iotlb, ..NetOptions::new("test", link) }
}

pub(crate) fn device(options: NetOptions, workers: usize, notify: Notify) -> Arc<Net> {
    let workers = (0..workers).map(|at| Worker::spawn(&format!("net-{at}"), notify).unwrap());
    Net::new(options, workers.collect()).unwrap()
}

/// What a driver settles on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) translated: bool,
    pub(crate) packed: bool,
    pub(crate) event_idx: bool,
    pub(crate) features: u64,
    pub(crate) pairs: u16,
}

impl Setup {
    pub(crate) fn new(translated: bool) -> Setup {
        let features = wire::feature::MRG_RXBUF;
        Setup { translated, packed: false, event_idx: false, features, pairs: 1 }
    }
}

/// A driver and its front end.
pub(crate) struct Driver {
    pub(crate) front: Frontend,
    pub(crate) ram: Arc<GuestRam>,
    setup: Setup,
    /// The features that were settled on.
    pub(crate) settled: u64,
    rings: Vec<Option<Queue>>,
    kicks: Vec<OwnedFd>,
    channel: Option<UnixStream>,
    /// Misses that were read and not resolved.
    pub(crate) unresolved: VecDeque<(u64, Access)>,
    /// How many misses there were.
    pub(crate) misses: usize,
    /// Those of them that required a reply in any case, which they got.
    pub(crate) acked: usize,
    next_sent: u64,
    /// The device's side of the connection, if it is in this process.
    _serving: Option<Serving>,
}

impl Driver {
    pub(crate) fn connect(net: &Arc<Net>, end: usize, setup: Setup) -> Driver {
        let (serving, socket) = Serving::start(net.connect(end));
        Driver { _serving: Some(serving), ..Driver::over(socket, setup) }
    }

    /// A driver of the device at the other end of `stream`.
    pub(crate) fn over(ours: UnixStream, setup: Setup) -> Driver {
        let mut front = Frontend::new(ours, LONG);
        let mut wanted = F_VERSION_1 | F_INDIRECT_DESC | setup.features;
        for (on, feature) in [
            (setup.translated, F_ACCESS_PLATFORM),
            (setup.packed, F_RING_PACKED),
            (setup.event_idx, F_EVENT_IDX),
        ] {
            wanted |= if on { feature } else { 0 };
        }
        assert_eq!(front.negotiate(wanted, ProtocolFeatures::KNOWN).unwrap(), wanted);
        let ram = GuestRam::new((PAGES * PAGE) as usize, GPA).unwrap();
        front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
        let channel = setup.translated.then(|| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            front.set_backend_channel(theirs.as_fd()).unwrap();
            ours.set_nonblocking(true).unwrap();
            ours
        });
        let rings = usize::from(setup.pairs) * 2;
        Driver {
            front,
            ram,
            setup,
            settled: wanted,
            rings: (0..rings).map(|_| None).collect(),
            kicks: (0..rings).map(|_| event::new().unwrap()).collect(),
            channel,
            unresolved: VecDeque::new(),
            misses: 0,
            acked: 0,
            next_sent: SENT_AT,
            _serving: None,
        }
    }

    /// Connects and starts all rings.
    pub(crate) fn running(net: &Arc<Net>, end: usize, setup: Setup) -> Driver {
        Driver::connect(net, end, setup).started()
    }

    /// With all rings started.
    pub(crate) fn started(mut self) -> Driver {
        (0..2 * self.setup.pairs).for_each(|ring| self.start(ring));
        self
    }

    /// Starts a new ring.
    pub(crate) fn start(&mut self, ring: u16) {
        let Setup { packed, event_idx, .. } = self.setup;
        let config = QueueConfig { size: SIZE, event_idx, packed };
        let at = u64::from(ring) * 2 * PAGE;
        let memory = self.ram.window(at as usize, 2 * PAGE as usize).unwrap();
        let rings = Rings::placed(&memory, &config).unwrap();
        let mut queue = Queue::with_config(config, rings).unwrap();
        queue.suppress_notifications();
        self.rings[usize::from(ring)] = Some(queue);
        let base = ringfence_virtq::device::RingConfig::start(packed);
        self.go_on(ring, base);
    }

    /// Where a ring lies, and where its writes are marked.
    fn addresses(&self, ring: u16, log: Option<u64>) -> RingAddresses {
        let Setup { packed, event_idx, translated, .. } = self.setup;
        let offsets = QueueConfig { size: SIZE, event_idx, packed }.offsets();
        let at = u64::from(ring) * 2 * PAGE;
        let origin = if translated { IOVA } else { self.ram.user_addr() } + at;
        RingAddresses {
            desc: origin + offsets.desc as u64,
            avail: origin + offsets.avail as u64,
            used: origin + offsets.used as u64,
            log,
        }
    }

    /// What the device writes into a running ring is marked there.
    pub(crate) fn log_ring(&mut self, ring: u16, log: Option<u64>) {
        let addresses = self.addresses(ring, log);
        self.front.set_vring_addr(ring, &addresses).unwrap();
    }

    /// Makes the device go on with a ring.
    pub(crate) fn go_on(&mut self, ring: u16, base: u32) {
        let addresses = self.addresses(ring, None);
        let front = &mut self.front;
        front.set_vring_num(ring, SIZE).unwrap();
        front.set_vring_addr(ring, &addresses).unwrap();
        front.set_vring_base(ring, base).unwrap();
        front.set_vring_kick(ring, Some(self.kicks[usize::from(ring)].as_fd())).unwrap();
        front.set_vring_enable(ring, true).unwrap();
    }

    /// Where the byte at an offset of the driver's view lies in its memory.
    pub(crate) fn place(&self, offset: u64) -> usize {
        let (page, within) = (offset / PAGE, offset % PAGE);
        let page = match self.setup.translated && page >= STRAIGHT {
            // Neighbours in IOVA space are none in memory.
            true => STRAIGHT + (page - STRAIGHT) * 389 % (PAGES - STRAIGHT),
            false => page,
        };
        (page * PAGE + within) as usize
    }

    /// The device's address of an offset.
    pub(crate) fn addr(&self, offset: u64) -> u64 {
        offset + if self.setup.translated { IOVA } else { GPA }
    }

    pub(crate) fn put(&self, mut offset: u64, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let len = bytes.len().min((PAGE - offset % PAGE) as usize);
            self.ram.slice(self.place(offset), len).unwrap().copy_from(&bytes[..len]);
            (offset, bytes) = (offset + len as u64, &bytes[len..]);
        }
    }

    pub(crate) fn get(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let part = (len - done).min((PAGE - at % PAGE) as usize);
            let slice = self.ram.slice(self.place(at), part).unwrap();
            slice.copy_to(&mut bytes[done..done + part]);
            done += part;
        }
        bytes
    }

    pub(crate) fn queue(&mut self, ring: u16) -> &mut Queue {
        self.rings[usize::from(ring)].as_mut().expect("started")
    }

    /// Publishes, and kicks if that is wanted.
    pub(crate) fn publish(&mut self, ring: u16) {
        let queue = self.queue(ring);
        queue.publish();
        if queue.needs_kick() {
            event::signal(&self.kicks[usize::from(ring)]);
        }
    }

    /// Sends a packet with its header and bytes in pieces of these lengths (and the rest).
    pub(crate) fn send_as(&mut self, pair: u16, header: wire::Header, bytes: &[u8], cuts: &[u32]) {
        let whole = [header.as_bytes(), bytes].concat();
        if self.next_sent + whole.len() as u64 > SENT_END {
            self.next_sent = SENT_AT;
        }
        let offset = self.next_sent;
        self.next_sent += whole.len() as u64;
        self.put(offset, &whole);
        let (mut descs, mut at) = (Vec::new(), 0);
        for &cut in cuts.iter().chain([&u32::MAX]) {
            let len = cut.min(whole.len() as u32 - at);
            descs.push(Desc::readable(self.addr(offset) + u64::from(at), len));
            at += len;
        }
        descs.retain(|desc| desc.len > 0);
        let ring = 2 * pair + 1;
        self.queue(ring).add(&descs, 0).unwrap();
        self.publish(ring);
    }

    pub(crate) fn send(&mut self, pair: u16, bytes: &[u8]) {
        self.send_as(pair, wire::Header::default(), bytes, &[]);
    }

    /// Takes back what was sent; returns how many.
    pub(crate) fn reclaim(&mut self, pair: u16) -> usize {
        let queue = self.queue(2 * pair + 1);
        std::iter::from_fn(|| queue.pop().unwrap()).count()
    }

    /// Offers a buffer.
    pub(crate) fn offer(&mut self, pair: u16, offset: u64, len: u32) {
        let desc = Desc::writable(self.addr(offset), len);
        self.queue(2 * pair).add(&[desc], offset << 32 | u64::from(len)).unwrap();
        self.publish(2 * pair);
    }

    /// Offers many buffers side by side, of all that the ring holds.
    pub(crate) fn offer_all(&mut self, pair: u16, len: u32) {
        let first = BUFFERS_AT + u64::from(pair) * 128 * PAGE;
        for at in 0..u64::from(SIZE) {
            self.offer(pair, first + at * u64::from(len), len);
        }
    }

    /// The next packet, if there is one whole; its buffers are offered again.
    pub(crate) fn receive(&mut self, pair: u16) -> Option<(wire::Header, Vec<u8>)> {
        let mut used = self.queue(2 * pair).pop().unwrap()?;
        let mut bytes = Vec::new();
        let mut left = 1;
        loop {
            let (offset, len) = (used.token >> 32, used.token as u32);
            bytes.extend(self.get(offset, used.len as usize));
            if left == 1 && bytes.len() == used.len as usize {
                left = u16::from_le_bytes(bytes[10..12].try_into().unwrap());
                assert!(left >= 1);
            }
            self.offer(pair, offset, len);
            left -= 1;
            if left == 0 {
                break;
            }
            // All buffers of a packet are shown at once.
            used = self.queue(2 * pair).pop().unwrap().expect("the packet's next buffer");
        }
        let header = wire::Header::read_from_bytes(&bytes[..wire::HEADER]).unwrap();
        Some((header, bytes.split_off(wire::HEADER)))
    }

    /// Reads misses.
    pub(crate) fn listen(&mut self) {
        let Some(mut channel) = self.channel.as_ref() else { return };
        let mut message = [0; 12 + size_of::<IotlbWire>()];
        while let Ok(count) = channel.read(&mut message) {
            if count == 0 {
                break;
            }
            assert_eq!(count, message.len(), "messages are sent whole");
            let wire = IotlbWire::read_from_bytes(&message[12..]).unwrap();
            let Ok(Iotlb::Miss { iova, access }) = wire.parse() else { panic!("{wire:?}") };
            self.misses += 1;
            self.unresolved.push_back((iova, access));
            if message[4] & 8 != 0 {
                // For an unknown address the reply is that there is none now; an update may follow
                // later.
                self.acked += 1;
                let reply: [u32; 5] = [1, 1 | 4, 8, u32::from(!self.knows(iova)), 0];
                channel.write_all(reply.as_bytes()).unwrap();
            }
        }
    }

    fn knows(&self, iova: u64) -> bool {
        iova.checked_sub(IOVA).is_some_and(|offset| offset < PAGES * PAGE)
    }

    /// Sends an update for a page.
    pub(crate) fn update(&mut self, iova: u64, access: Access) {
        let first = iova & !(PAGE - 1);
        let place = self.place(first - IOVA) as u64;
        let (last, user_addr) = (first + PAGE - 1, self.ram.user_addr() + place);
        let update = Iotlb::Update { first, last, user_addr, access: Some(access) };
        self.front.iotlb(&update).unwrap();
    }

    /// Takes the translation of a range away: when it returns the device uses it no more.
    pub(crate) fn invalidate(&mut self, first: u64, last: u64) {
        self.front.iotlb(&Iotlb::Invalidate { first, last }).unwrap();
    }

    /// Sends updates for misses with known addresses.
    pub(crate) fn resolve(&mut self) {
        self.listen();
        while let Some((iova, access)) = self.unresolved.pop_front() {
            if self.knows(iova) {
                // A page of a ring is read and written.
                let ring = iova < IOVA + STRAIGHT * PAGE;
                self.update(iova, if ring { Access::ReadWrite } else { access });
            }
        }
    }
}

/// Waits for something, while the drivers resolve misses.
pub(crate) fn until(
    what: &str,
    drivers: &mut [&mut Driver],
    mut done: impl FnMut(&mut [&mut Driver]) -> bool,
) {
    let start = Instant::now();
    while !done(drivers) {
        drivers.iter_mut().for_each(|driver| driver.resolve());
        let state: Vec<_> =
            drivers.iter().map(|d| (d.misses, d.acked, d.unresolved.len())).collect();
        assert!(start.elapsed() < LONG, "this does not come: {what} (misses: {state:?})");
        std::thread::yield_now();
    }
}

/// Waits for something, while the driver resolves no miss.
pub(crate) fn without_updates(
    what: &str,
    driver: &mut Driver,
    mut done: impl FnMut(&mut Driver) -> bool,
) {
    let start = Instant::now();
    while !done(driver) {
        assert!(start.elapsed() < LONG, "this does not come: {what}");
        std::thread::yield_now();
    }
}

/// The bytes of packet n, of any length.
pub(crate) fn packet(n: usize, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|at| (at * 31 + at / 251 + n * 7) as u8).collect();
    let name = (n as u64).to_le_bytes();
    let count = len.min(name.len());
    bytes[..count].copy_from_slice(&name[..count]);
    bytes
}
