//! A queue with bounced buffers: over the real device and its worker, and over a device that lies
//! about what it has written.

use std::{
    collections::BTreeMap,
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

use ringfence_dma::{
    BounceConfig, BounceLimits, BouncePools, Device, Distrust, DmaConfig, Environment, Policy,
    Trust, Written,
};
use ringfence_drivers::{
    blk::{Batching, Completion, DriverQueue, MappedError, MappedQueue, QueueLayout},
    ram::{PagedBuffer, RamMemory},
};
use ringfence_iommu::{GuestPhys, Iova, Prot};
use ringfence_iotlb::View;
use ringfence_iova::{Aperture, Slabs};
use ringfence_mem::Memory;
use ringfence_run::{event, worker::Notify};
use ringfence_sync::cpu::OsCpu;
use ringfence_vhost_user::RingAddresses;
use ringfence_virtio_iommu::driver::ViommuDomain;
use ringfence_virtq::{Chain, blk::Kind, device};

use crate::rig::{ID, LONG, PAGE, Rig, Setup};

type Dma = Device<Arc<ViommuDomain>, Arc<Slabs<OsCpu>>>;
type Queue = MappedQueue<Arc<ViommuDomain>, Arc<Slabs<OsCpu>>, PagedBuffer>;

const RING: u64 = 0x9000_0000;
const FIRST: u64 = 0x4000_0000;
/// What a buffer holds before the device has written to it.
const OWN: u8 = 0x5c;

struct Bench {
    queue: Queue,
    dma: Dma,
    pools: BouncePools<GuestPhys>,
    /// The device in place of the real one, if it lies.
    liar: Option<Liar>,
    rig: Rig,
}

/// What the liar does with a request, and what it reports.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    /// How many bytes it writes to the data, from the beginning.
    writes: usize,
    /// How many it reports as written, the status included.
    reports: u32,
    status: u8,
}

struct Liar {
    view: View,
    ring: device::Queue,
}

impl Liar {
    /// Completes all requests, each with the next of `outcomes`.
    fn serve(&mut self, outcomes: &mut dyn Iterator<Item = Outcome>) {
        self.view.online();
        let mut chain = Chain::new();
        while self.ring.pop(&self.view, &mut chain).unwrap() {
            let Outcome { writes, reports, status } = outcomes.next().expect("an outcome for each");
            chain.write_at(&self.view, 0, &vec![0xd0; writes]).unwrap();
            let last = chain.writable_len() - 1;
            chain.write_at(&self.view, last, &[status]).unwrap();
            self.ring.push_used(chain.head(), reports);
        }
        let _ = self.ring.publish_used();
        self.view.offline();
    }
}

fn bench(config: DmaConfig, lies: bool) -> Bench {
    let mut rig = Rig::new(Setup { event_idx: true, ..Setup::new(true) });
    let layout = QueueLayout::new(64, 2);
    let part = rig.pages(layout.bytes().div_ceil(PAGE));
    rig.map(RING, part.gpa(), part.window().len() as u64, Prot::RW);
    let (kick, call) = (Arc::new(event::new().unwrap()), Arc::new(event::new().unwrap()));
    let (k, c) = (Arc::clone(&kick), Arc::clone(&call));
    let ring = DriverQueue::new(layout, part.window(), RING, k, c, Notify::Poll).unwrap();
    let (desc, avail) = (RING, RING + layout.avail_at() as u64);
    let used = RING + layout.used_at() as u64;
    let liar = lies.then(|| {
        let endpoint = rig.options.endpoint.clone().unwrap();
        let memory = Memory::of_ram(&rig.ram).unwrap();
        let mut view = View::new(endpoint, memory).expect("room for another view");
        let (size, event_idx, indirect, packed, base) = (64, true, true, false, 0);
        let config =
            device::RingConfig { size, desc, avail, used, event_idx, indirect, packed, base };
        let ring = device::Queue::new(config, &view).unwrap();
        view.offline();
        Liar { view, ring }
    });
    if liar.is_none() {
        let addresses = RingAddresses { desc, avail, used, log: None };
        rig.blk.set_vring_num(0, 64).unwrap();
        rig.blk.set_vring_addr(0, &addresses).unwrap();
        rig.blk.set_vring_call(0, Some(call.as_fd())).unwrap();
        rig.blk.set_vring_kick(0, Some(kick.as_fd())).unwrap();
        rig.blk.set_vring_enable(0, true).unwrap();
    }
    let aperture = Aperture::new(FIRST, FIRST + (1 << 24) - 1, PAGE as u64).unwrap();
    let allocator = Arc::new(Slabs::new(aperture, OsCpu::new()));
    let memory = RamMemory::carve(&rig.ram, 256 << 10).unwrap();
    let (domain, addresses) = (Arc::clone(&rig.domain), Arc::clone(&allocator));
    let pools = BouncePools::new(domain, addresses, memory, BounceLimits::default()).unwrap();
    let config = DmaConfig { limit: Iova(FIRST + (1 << 24) - 1), ..config };
    let domain = Arc::clone(&rig.domain);
    let environment = Environment::default();
    let dma = Device::builder(domain)
        .allocator(allocator)
        .config(config)
        .environment(environment)
        .pools(&pools)
        .build()
        .unwrap();
    let queue = MappedQueue::new(ring, &dma, Batching { requests: 16, chunk: 4 });
    Bench { queue, dma, pools, liar, rig }
}

fn config(policy: Policy, written: Written) -> DmaConfig {
    let bounce = BounceConfig { written, ..BounceConfig::default() };
    DmaConfig { bounce, ..DmaConfig::new(policy) }
}

impl Bench {
    /// Buffers of these lengths, full of [`OWN`].
    fn buffers(&self, lens: &[usize]) -> Vec<PagedBuffer> {
        let pages: usize = lens.iter().map(|len| len.div_ceil(PAGE)).sum();
        let first = self.rig.ram.carve(pages * PAGE, PAGE).unwrap() as u64;
        // The last page first: no two follow each other.
        let frames: Vec<u64> = (0..pages as u64).rev().map(|n| first + n * PAGE as u64).collect();
        let view = self.rig.ram.scattered(&frames).unwrap();
        let mut buffers = PagedBuffer::cut(view, lens.iter().copied());
        assert_eq!(buffers.len(), lens.len());
        for buffer in &mut buffers {
            // Its neighbours in its last page too.
            let len = buffer.piece().len();
            buffer.set_len(len.next_multiple_of(PAGE));
            buffer.piece().fill(OWN);
            buffer.set_len(len);
        }
        buffers
    }

    fn reap(&mut self, count: usize) -> BTreeMap<u64, Completion<PagedBuffer>> {
        let (mut all, start) = (BTreeMap::new(), Instant::now());
        while all.len() < count {
            self.queue
                .reap(64, |_, done| panic!("{done:?}"), |done| _ = all.insert(done.token, done))
                .unwrap();
            assert!(start.elapsed() < LONG, "{} of {count} completions", all.len());
            self.queue.wait(Duration::from_millis(1));
        }
        all
    }

    /// One request and its completion.
    fn once(&mut self, kind: Kind, sector: u64, buffer: PagedBuffer) -> Completion<PagedBuffer> {
        self.queue.submit(kind, sector, buffer, 1).unwrap();
        self.queue.publish().unwrap();
        self.reap(1).remove(&1).unwrap()
    }

    fn assert_no_slot_is_lost(self) {
        let Bench { queue, dma, pools, liar, rig } = self;
        drop((queue, liar));
        assert_eq!(pools.stats().slots, 0, "a slot is lost");
        pools.trim();
        assert_eq!(pools.stats().kept_bytes, 0);
        drop((dma, pools, rig));
    }
}

/// All of the page that a buffer's end lies in.
fn whole(mut buffer: PagedBuffer) -> Vec<u8> {
    let len = buffer.piece().len();
    buffer.set_len(len.next_multiple_of(PAGE));
    buffer.piece().to_vec()
}

#[test]
fn data_gets_where_it_belongs() {
    let untrusted = Trust::Untrusted { why: Distrust::Described };
    for (policy, trust) in [
        (Policy::Bounce, Trust::Trusted),
        (Policy::Auto, Trust::Trusted),
        (Policy::StrictMap, untrusted),
        (Policy::Bounce, untrusted),
    ] {
        for written in [Written::Unknown, Written::Reported] {
            let mut bench = bench(DmaConfig { trust, ..config(policy, written) }, false);
            let lens = [512, 4096, 1536, 8192, 512, 12_800];
            for (n, buffer) in bench.buffers(&lens).into_iter().enumerate() {
                buffer.piece().fill(n as u8 + 1);
                bench.queue.submit(Kind::Out, n as u64 * 64, buffer, n as u64).unwrap();
            }
            bench.queue.publish().unwrap();
            let written_back = bench.reap(lens.len());
            for done in written_back.values() {
                assert!(done.outcome.is_ok_and(|done| done.ok), "{policy}: {:?}", done.outcome);
            }
            for (n, buffer) in bench.buffers(&lens).into_iter().enumerate() {
                bench.queue.submit(Kind::In, n as u64 * 64, buffer, n as u64).unwrap();
            }
            bench.queue.publish().unwrap();
            for (n, done) in bench.reap(lens.len()) {
                let len = lens[n as usize];
                let bytes = whole(done.buffer);
                assert!(bytes[..len].iter().all(|&byte| byte == n as u8 + 1), "{policy}: {n}");
                assert!(bytes[len..].iter().all(|&byte| byte == OWN), "{policy}: beside {n}");
            }
            // Which is cheaper here, a copy or a mapping, was measured on this machine, as it is now.
            assert!(bench.dma.stats().bounced > 0 || policy == Policy::Auto, "{policy}");
            bench.assert_no_slot_is_lost();
        }
    }
}

#[test]
fn what_the_device_did_not_write_stays_as_it_was() {
    // rule L49
    for written in [Written::Unknown, Written::Reported] {
        let mut bench = bench(config(Policy::Bounce, written), false);
        // An ID is 20 bytes long, however large the buffer.
        let buffer = bench.buffers(&[1024]).remove(0);
        let done = bench.once(Kind::GetId, 0, buffer);
        let outcome = done.outcome.unwrap();
        let bytes = whole(done.buffer);
        assert!(outcome.ok && bytes.starts_with(ID.as_bytes()), "{written:?}");
        let len = outcome.written as usize - 1;
        assert!(len < 1024 && bytes[len..].iter().all(|&byte| byte == OWN), "{written:?}");
        // Beyond the disk's end.
        let buffer = bench.buffers(&[1024]).remove(0);
        let done = bench.once(Kind::In, 1 << 20, buffer);
        assert!(!done.outcome.unwrap().ok);
        assert_eq!(whole(done.buffer), [OWN; PAGE], "{written:?}");
        assert_eq!(bench.dma.stats().bounced, 2);
        bench.assert_no_slot_is_lost();
    }
}

#[test]
fn a_device_that_reports_wrong_lengths_harms_the_buffer_it_was_given_and_nothing_else() {
    // rule L49
    const LEN: usize = 1536;
    let outcomes = [
        Outcome { writes: LEN, reports: LEN as u32 + 1, status: 0 },
        // Too much: what it never wrote.
        Outcome { writes: 100, reports: LEN as u32 + 1, status: 0 },
        Outcome { writes: 0, reports: LEN as u32 + 1, status: 1 },
        // Too little.
        Outcome { writes: LEN, reports: 101, status: 0 },
        Outcome { writes: LEN, reports: 1, status: 0 },
        Outcome { writes: LEN, reports: 0, status: 0 },
        Outcome { writes: 100, reports: 51, status: 1 },
    ];
    for written in [Written::Unknown, Written::Reported] {
        let mut bench = bench(config(Policy::Bounce, written), true);
        // Another's bytes go through the slots first.
        for buffer in bench.buffers(&[LEN; 7]) {
            buffer.piece().fill(0xaa);
            bench.queue.submit(Kind::In, 0, buffer, 0).unwrap();
        }
        bench.queue.publish().unwrap();
        let honest = outcomes[0];
        bench.liar.as_mut().unwrap().serve(&mut core::iter::repeat(honest));
        let mut left = 7;
        while left > 0 {
            left -= bench.queue.reap(64, |_, _| unreachable!(), |_| ()).unwrap();
        }
        for (n, buffer) in bench.buffers(&[LEN; 7]).into_iter().enumerate() {
            bench.queue.submit(Kind::In, 0, buffer, n as u64).unwrap();
        }
        bench.queue.publish().unwrap();
        bench.liar.as_mut().unwrap().serve(&mut outcomes.iter().copied());
        for (n, done) in bench.reap(7) {
            let Outcome { writes, reports, status } = outcomes[n as usize];
            let outcome = done.outcome.unwrap();
            assert_eq!((outcome.ok, outcome.written), (status == 0 && reports > 0, reports));
            let reported = (reports as usize).saturating_sub(1);
            for (at, byte) in whole(done.buffer).into_iter().enumerate() {
                let wanted = match (at < reported, at < writes) {
                    (false, _) => OWN,
                    (true, true) => 0xd0,
                    // Claimed, and never written: its own bytes, or none at all. Never another's.
                    (true, false) if written == Written::Reported => 0,
                    (true, false) => OWN,
                };
                assert_eq!(byte, wanted, "{written:?}, {:?}: byte {at}", outcomes[n as usize]);
            }
        }
        bench.assert_no_slot_is_lost();
    }
}

#[test]
fn a_length_beyond_the_buffer_breaks_the_ring_and_loses_no_slot() {
    for written in [Written::Unknown, Written::Reported] {
        let mut bench = bench(config(Policy::Bounce, written), true);
        for (n, buffer) in bench.buffers(&[512, 512]).into_iter().enumerate() {
            bench.queue.submit(Kind::In, 0, buffer, n as u64).unwrap();
        }
        bench.queue.publish().unwrap();
        let outcome = |reports| Outcome { writes: 512, reports, status: 0 };
        let mut outcomes = [outcome(514), outcome(513)].into_iter();
        bench.liar.as_mut().unwrap().serve(&mut outcomes);
        let reaped = bench.queue.reap(64, |_, _| unreachable!(), |_| ());
        assert!(matches!(reaped, Err(MappedError::Ring(_))), "{reaped:?}");
        bench.assert_no_slot_is_lost();
    }
}

#[test]
fn what_was_never_submitted_is_left_alone() {
    // rule L49
    for written in [Written::Unknown, Written::Reported] {
        let config = DmaConfig { max_segment: PAGE as u64, ..config(Policy::Bounce, written) };
        let mut bench = bench(config, false);
        // Three segments, and the ring takes two.
        let buffer = bench.buffers(&[3 * PAGE]).remove(0);
        let done = bench.once(Kind::In, 0, buffer);
        assert!(done.outcome.is_err());
        assert_eq!(whole(done.buffer), [OWN; 3 * PAGE], "{written:?}");
        bench.assert_no_slot_is_lost();
    }
}
