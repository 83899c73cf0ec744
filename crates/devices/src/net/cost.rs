//! What a packet costs on its way from ring to ring, printed: nothing is decided by it.
//!
//! `cargo test --release -p ringfence-devices --lib -- --ignored --nocapture what_a_packet_costs`

use std::{sync::Arc, time::Instant};

use ringfence_iommu::{GuestPhys, Iova, Prot, Range, shootdown::Shootdown};
use ringfence_iotlb::{Binding, Endpoint, Iotlb, IotlbConfig, View};
use ringfence_mem::{GuestRam, Memory, PAGE_SIZE, Physical};
use ringfence_vhost_user_backend::{Events, RingLog};
use ringfence_virtq::{
    Desc, device,
    driver::{Queue, QueueConfig, Rings, Used},
};

use super::{
    lane::forward,
    pieces::Lasting,
    ring::NetRing,
    round::{BusRing, Lane, Now, Terms},
    wire::feature,
};

const SIZE: u16 = 256;
const BURST: usize = 64;
const BUFFERS: u64 = 1024;
const PAGE: u64 = PAGE_SIZE as u64;

fn ring(ram: &Arc<GuestRam>, bus: &impl Lasting, at: u64, packed: bool) -> (Queue, NetRing) {
    let config = QueueConfig { size: SIZE, event_idx: true, packed };
    let window = ram.window(at as usize, config.offsets().len).unwrap();
    let mut queue = Queue::with_config(config, Rings::placed(&window, &config).unwrap()).unwrap();
    queue.suppress_notifications();
    let offsets = config.offsets();
    let config = device::RingConfig {
        size: SIZE,
        desc: at + offsets.desc as u64,
        avail: at + offsets.avail as u64,
        used: at + offsets.used as u64,
        event_idx: true,
        indirect: true,
        packed,
        base: device::RingConfig::start(packed),
    };
    let events = Events::default();
    let ring = device::Queue::new(config, bus).unwrap();
    let log = RingLog::default();
    (queue, NetRing::new(0, ring, events, Arc::default(), "cost".into(), log))
}

/// Nanoseconds per packet: the median of bursts.
fn measure<B: Lasting>(
    ram: &Arc<GuestRam>,
    bus: &mut B,
    quiet: impl Fn(&mut B),
    packed: bool,
    place: impl Fn(u64) -> u64,
) -> f64 {
    let terms = Terms { features: feature::MRG_RXBUF, timeout_ns: 0 };
    let (mut sender, mut transmit) = ring(ram, &*bus, 0, packed);
    let (mut receiver, mut receive) = ring(ram, &*bus, 16 * PAGE, packed);
    let mut lane = Lane::default();
    let mut used = [Used::default(); BURST];
    let mut bursts = Vec::new();
    for burst in 0..20_000u64 {
        let at = |n: u64| (burst * BURST as u64 + n) % BUFFERS;
        let sent = (0..BURST as u64).map(|n| (Desc::readable(place(32 + at(n)), 76), 0));
        sender.add_burst(sent).unwrap();
        let room =
            (0..BURST as u64).map(|n| (Desc::writable(place(32 + BUFFERS + at(n)), 2048), 0));
        receiver.add_burst(room).unwrap();
        sender.publish();
        receiver.publish();
        let start = Instant::now();
        quiet(bus);
        let bus = &*bus;
        let mut src = BusRing::source(&mut transmit, bus, terms);
        let mut dst = BusRing::target(&mut receive, bus, terms);
        assert!(forward(&mut lane, &mut src, &mut dst, Now::default(), u64::MAX));
        bursts.push(start.elapsed().as_nanos() as f64);
        assert_eq!(sender.pop_burst(&mut used).unwrap(), BURST);
        assert_eq!(receiver.pop_burst(&mut used).unwrap(), BURST);
    }
    bursts.sort_by(f64::total_cmp);
    bursts[bursts.len() / 2] / BURST as f64
}

#[test]
#[ignore = "a measurement"]
fn what_a_packet_costs() {
    let ram = GuestRam::new(((32 + 2 * BUFFERS) * PAGE) as usize, 0).unwrap();
    let memory = Memory::of_ram(&ram).unwrap();
    let mut physical = Physical::new(Arc::clone(&memory));
    // Neighbours in IOVA space are none in memory, behind the rings.
    let far = |page: u64| if page < 32 { page } else { 32 + (page - 32) * 389 % (2 * BUFFERS) };
    for packed in [false, true] {
        for dense in [false, true] {
            // One buffer per page, or two: 64 bytes of many pages, or of half as many.
            let place = |n: u64| if dense { 32 * PAGE + (n - 32) * 2048 } else { n * PAGE };
            println!(
                "packed {packed}, dense {dense}: off {:.1} ns",
                measure(&ram, &mut physical, |_| (), packed, place)
            );
            for (name, granule, shuffled) in
                [("2M", 512, false), ("4K mergeable", 1, false), ("4K unmergeable", 1, true)]
            {
                let shootdown = Shootdown::new(1);
                let iotlb = Iotlb::new(IotlbConfig::default(), Arc::clone(&shootdown));
                let mut page = 0;
                while page < 32 + 2 * BUFFERS {
                    let count = granule.min(32 + 2 * BUFFERS - page);
                    let range = Range::from_len(Iova(page * PAGE), count * PAGE).unwrap();
                    let target = if shuffled { far(page) } else { page };
                    iotlb.update(range, GuestPhys(target * PAGE), Prot::RW).unwrap();
                    page += count;
                }
                let endpoint = Endpoint::new(0, shootdown, Binding::Iotlb(iotlb));
                let mut view = View::new(endpoint, Arc::clone(&memory)).unwrap();
                println!(
                    "    {name}: {:.1} ns",
                    measure(&ram, &mut view, View::quiet, packed, place)
                );
            }
        }
    }
}
