//! A queue that maps by itself, over the real device and its real worker.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use ringfence_dma::{Device, DmaConfig, Policy};
use ringfence_drivers::{
    blk::{Batching, Completion, DriverQueue, MappedQueue, NotSubmitted, QueueLayout},
    ram::RamPart,
};
use ringfence_iommu::Iova;
use ringfence_iova::{Allocator, Aperture, Slabs};
use ringfence_run::{event, worker::Notify};
use ringfence_sync::cpu::OsCpu;
use ringfence_vhost_user::RingAddresses;
use ringfence_virtio_iommu::driver::ViommuDomain;
use ringfence_virtq::blk::{Kind, Status};

use crate::rig::{LONG, PAGE, Rig, Setup, piece};

type Dma = Device<Arc<ViommuDomain>, Arc<Slabs<OsCpu>>>;
type Queue = MappedQueue<Arc<ViommuDomain>, Arc<Slabs<OsCpu>>, RamPart>;

const IOERR: Option<u8> = Some(Status::IoErr.code());
const RING: u64 = 0x9000_0000;
/// IOVAs of data: few enough to run out of.
const FIRST: u64 = 0x4000_0000;
const PAGES: u64 = 64;

struct Bench {
    queue: Queue,
    dma: Dma,
    allocator: Arc<Slabs<OsCpu>>,
    layout: QueueLayout,
    // Dropped last: the others release the domain, which needs the device.
    rig: Rig,
}

fn bench(policy: Policy, notify: Notify, batching: Batching) -> Bench {
    let mut rig = Rig::new(Setup { notify, event_idx: true, ..Setup::new(true) });
    let layout = QueueLayout::new(64, 2);
    let part = rig.pages(layout.bytes().div_ceil(PAGE));
    rig.map(RING, part.gpa(), part.window().len() as u64, ringfence_iommu::Prot::RW);
    let (kick, call) = (Arc::new(event::new().unwrap()), Arc::new(event::new().unwrap()));
    let (k, c) = (Arc::clone(&kick), Arc::clone(&call));
    let ring = DriverQueue::new(layout, part.window(), RING, k, c, notify).unwrap();
    let addresses = RingAddresses {
        desc: RING,
        avail: RING + layout.avail_at() as u64,
        used: RING + layout.used_at() as u64,
        log: None,
    };
    use std::os::fd::AsFd;
    rig.blk.set_vring_num(0, 64).unwrap();
    rig.blk.set_vring_addr(0, &addresses).unwrap();
    rig.blk.set_vring_call(0, Some(call.as_fd())).unwrap();
    rig.blk.set_vring_kick(0, Some(kick.as_fd())).unwrap();
    rig.blk.set_vring_enable(0, true).unwrap();
    let last = FIRST + PAGES * PAGE as u64 - 1;
    let aperture = Aperture::new(FIRST, last, PAGE as u64).unwrap();
    let allocator = Arc::new(Slabs::new(aperture, OsCpu::new()));
    let config = DmaConfig { limit: Iova(last), ..DmaConfig::new(policy) };
    let dma = Device::builder(Arc::clone(&rig.domain))
        .allocator(Arc::clone(&allocator))
        .config(config)
        .build()
        .unwrap();
    let queue = MappedQueue::new(ring, &dma, batching);
    Bench { queue, dma, allocator, layout, rig }
}

impl Bench {
    /// Waits for `count` completions, by token.
    fn reap(&mut self, count: usize) -> BTreeMap<u64, Completion<RamPart>> {
        let mut all = BTreeMap::new();
        let start = Instant::now();
        while all.len() < count {
            let before = all.len();
            self.queue
                .reap(64, |_, done| panic!("{done:?}"), |done| _ = all.insert(done.token, done))
                .unwrap();
            if all.len() == before {
                self.queue.wait(LONG);
                assert!(start.elapsed() < LONG, "{} of {count} completions", all.len());
            }
        }
        all
    }

    fn assert_no_iova_leaked(&self) {
        let stats = self.allocator.stats();
        assert_eq!((stats.allocs, stats.rejected_frees), (stats.frees, 0));
    }

    fn requests(&self) -> (u64, u64) {
        let stats = self.rig.iommu.driver.stats();
        (stats.maps, stats.unmaps)
    }
}

#[test]
fn neighbours_share_a_mapping_and_every_byte_gets_where_it_belongs() {
    for policy in Policy::ALL.into_iter().filter(|policy| *policy != Policy::Off) {
        for notify in [Notify::Adaptive, Notify::Sleep] {
            let mut bench = bench(policy, notify, Batching { requests: 16, chunk: 4 });
            let before = bench.requests();
            // Carved one after the other: neighbours in memory.
            let parts: Vec<RamPart> = (0..16).map(|_| bench.rig.pages(1)).collect();
            for (n, part) in parts.into_iter().enumerate() {
                part.window().write(0, &[n as u8 + 1; PAGE]);
                bench.queue.submit(Kind::Out, n as u64 * 8, part, n as u64).unwrap();
            }
            bench.queue.publish().unwrap();
            let written = bench.reap(16);
            assert!(written.values().all(|done| done.outcome.is_ok_and(|done| done.ok)));
            let maps = bench.requests().0 - before.0;
            assert_eq!(maps, if policy.batches_maps() { 4 } else { 16 }, "{policy}");
            // Back, in another order of buffers.
            for (n, (_, done)) in written.into_iter().rev().enumerate() {
                done.buffer.window().write(0, &[0xee; PAGE]);
                bench.queue.submit(Kind::In, n as u64 * 8, done.buffer, n as u64).unwrap();
            }
            bench.queue.publish().unwrap();
            for (n, done) in bench.reap(16) {
                assert_eq!(done.outcome.unwrap().written as usize, PAGE + 1);
                let mut bytes = [0; PAGE];
                done.buffer.window().read(0, &mut bytes);
                assert!(bytes.iter().all(|&byte| byte == n as u8 + 1), "{policy}: block {n}");
            }
            assert_eq!(bench.queue.room(), usize::from(bench.layout.size()));
            bench.dma.flush().unwrap();
            bench.assert_no_iova_leaked();
        }
    }
}

#[test]
fn no_more_than_a_quarter_of_many_requests_wait_for_one_another() {
    let mut bench = bench(Policy::StrictMap, Notify::Adaptive, Batching::default());
    let mut parts: Vec<RamPart> = (0..32).map(|_| bench.rig.pages(1)).collect();
    // What cannot be mapped is under way no longer, once it is back.
    let large = bench.rig.pages(PAGES as usize + 1);
    bench.queue.submit(Kind::In, 0, large, 0).unwrap();
    bench.queue.publish().unwrap();
    assert!(bench.reap(1)[&0].outcome.is_err());
    for (count, wanted) in [(32, 32 / 8), (8, 8 / 4), (16, 16 / 4), (1, 1), (32, 32 / 8)] {
        let before = bench.requests().0;
        for (n, part) in parts.drain(..count).enumerate() {
            bench.queue.submit(Kind::In, 0, part, n as u64).unwrap();
        }
        bench.queue.publish().unwrap();
        let returned = bench.reap(count).into_values().map(|done| done.buffer);
        parts.splice(..0, returned);
        assert_eq!(bench.requests().0 - before, wanted as u64, "{count} requests");
    }
}

#[test]
fn a_buffer_that_came_back_is_out_of_the_devices_reach() {
    // rule L17
    let mut bench = bench(Policy::StrictMap, Notify::Adaptive, Batching::default());
    let mut other = bench.rig.queue(1);
    let mut parts: Vec<RamPart> = (0..8).map(|_| bench.rig.pages(1)).collect();
    for round in 0..50 {
        let count = 1 + round % 8;
        for n in 0..count {
            bench.queue.submit(Kind::In, n * 8, parts.pop().unwrap(), n).unwrap();
        }
        bench.queue.publish().unwrap();
        parts.extend(bench.reap(count as usize).into_values().map(|done| done.buffer));
        // Wherever they were: nothing is mapped now.
        for page in 0..PAGES {
            let iova = FIRST + page * PAGE as u64;
            assert_eq!(other.read(0, piece(iova, 512)), IOERR, "round {round}: {iova:#x}");
        }
    }
}

#[test]
fn what_cannot_be_mapped_comes_back_with_the_reason_and_harms_nothing_else() {
    let mut bench = bench(Policy::StrictMap, Notify::Adaptive, Batching { requests: 64, chunk: 1 });
    let good = bench.rig.pages(1);
    let large = bench.rig.pages(PAGES as usize + 1);
    bench.queue.submit(Kind::In, 0, good, 1).unwrap();
    bench.queue.submit(Kind::In, 0, large, 2).unwrap();
    bench.queue.publish().unwrap();
    let all = bench.reap(2);
    assert!(all[&1].outcome.unwrap().ok);
    let refused = all[&2].outcome.unwrap_err();
    assert!(matches!(refused, NotSubmitted::Map(ringfence_dma::Error::NoIova(_))), "{refused:?}");
    assert_eq!(all[&2].buffer.window().len(), (PAGES as usize + 1) * PAGE);
    assert_eq!(bench.queue.room(), usize::from(bench.layout.size()));
    bench.assert_no_iova_leaked();
}
