//! What a MAP and an UNMAP cost on both sides: the driver and the device take turns in one thread,
//! so that no time is spent waiting. Build it with `--release`.

use std::{
    hint::black_box,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use ringfence_iommu::{shootdown::Shootdown, table::Limits, *};
use ringfence_mem::{Access, GuestRam, Memory, Physical, Translate};
use ringfence_virtio_iommu::{device::*, driver, driver::*, wire::Config};
use ringfence_virtq::{device as virtq, driver::Queue, driver::Rings, layout};

/// How many mappings come and go together.
const BATCH: usize = 16;
/// How many batches are timed: enough for the code to run where it was not optimised.
const BATCHES: usize = if cfg!(debug_assertions) { 50 } else { 20_000 };
/// Descriptors of the request queue.
const SIZE: u16 = 256;

/// One endpoint, number 1.
struct OneEndpoint(Arc<Shootdown>);

impl Backing for OneEndpoint {
    type Domain = SoftDomain<GuestPhys>;
    fn endpoint(&self, id: u32) -> Option<EndpointInfo> {
        (id == 1).then(EndpointInfo::default)
    }
    fn endpoints(&self) -> Vec<u32> {
        vec![1]
    }
    fn create_domain(&self) -> Result<Arc<Self::Domain>> {
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        Ok(SoftDomain::new(geometry, Limits::NONE, Arc::clone(&self.0)))
    }
    fn set_domain(&self, _endpoint: u32, _to: Binding<Self::Domain>) -> Result<()> {
        Ok(())
    }
}

/// The device works when the driver waits, and when it is told to.
#[derive(Clone)]
struct Turns(Arc<Mutex<(RequestQueue<OneEndpoint>, Physical)>>);

impl Turns {
    fn poll(&self) -> Result<()> {
        let (requests, memory) = &mut *self.0.lock().expect("nobody panicked");
        requests.poll(memory).expect("a driver that keeps to the rules");
        Ok(())
    }
}

impl Transport for Turns {
    fn kick(&self, _queue: u16) {}
    fn wait(&self, _queue: u16, _timeout: Duration) {
        let _ = self.poll();
    }
}

fn main() -> Result<()> {
    let device = Device::new(OneEndpoint(Shootdown::new(1)), Default::default());
    let config = Config::parse(&device.config()).expect("a legal configuration");
    let features = negotiate(device.features().bits());
    device.set_features(features.bits());
    let ram = GuestRam::new(1 << 18, 0).expect("memory");
    let memory = Physical::new(Memory::of_ram(&ram).expect("memory"));
    let window = |at, len| memory.window(at, len, Access::ReadWrite).expect("memory for requests");
    let areas = layout::offsets(SIZE);
    let rings = Rings::in_window(&window(0, 1 << 16), SIZE).expect("there is room");
    let front = Queue::new(SIZE, rings, true).expect("a legal queue");
    let [desc, avail, used] = [areas.desc, areas.avail, areas.used].map(|offset| offset as u64);
    let at = virtq::Config {
        size: SIZE,
        desc,
        avail,
        used,
        event_idx: true,
        indirect: false,
        packed: false,
        base: 0,
    };
    let back = virtq::Queue::new(at, &memory).expect("a legal queue");
    let window = window(1 << 16, Driver::buffer_bytes(SIZE, &config) as u64);
    let requests = RequestQueue::new(Arc::new(device), back);
    let turns = Turns(Arc::new(Mutex::new((requests, memory))));
    let buffers = Buffers { window, addr: 1 << 16 };
    let options = driver::Options { notify: Notify::Sleep, ..Default::default() };
    let transport = Arc::new(turns.clone());
    let driver = Driver::new(transport, front, buffers, config, features, options)?;
    println!("ns a request, medians; batches of {BATCH}      driver             device");
    println!("    live order       unmap as      map unmap  sync      map unmap");
    for live in [128, 65_536] {
        for (order, random) in [("contiguous", false), ("random", true)] {
            for (how, hull) in [("16", false), ("1 hull", true)] {
                let domain = driver.domain()?;
                domain.attach(1)?;
                let ns = measure(&domain, &turns, live, random, hull)?;
                print!("{live:>8} {order:<11} {how:<10}");
                ns.chunks(3).for_each(|side| {
                    print!("   ");
                    side.iter().for_each(|ns| print!(" {ns:>5.1}"));
                });
                println!();
                domain.detach(1)?;
            }
        }
    }
    Ok(())
}

/// Medians of: MAP, UNMAP, sync (of both) at the driver; MAP, UNMAP at the device.
fn measure(
    domain: &ViommuDomain,
    turns: &Turns,
    live: usize,
    random: bool,
    hull: bool,
) -> Result<[f64; 5]> {
    // Above the window for MSIs.
    let iova = |at: usize| 1 << 32 | (at as u64) << 12;
    let pages = |at, n: u64| Range::from_len(Iova(iova(at)), n << 12).expect("far below the end");
    // Places come in batches that lie side by side where one UNMAP is to remove them.
    let run = if hull { BATCH } else { 1 };
    let mut places: Vec<usize> = (0..2 * live / run).map(|n| n * run).collect();
    let mut seed = 1_u64;
    let mut any = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) as usize % below
    };
    if random {
        (1..places.len()).for_each(|n| places.swap(n, any(n + 1)));
    }
    let place = |n: usize| places[n / run % places.len()] + n % run;
    let map = |n: usize| {
        let at = place(n);
        domain.map_pages(pages(at, 1), GuestPhys(at as u64 * 0x3000), Prot::RW)
    };
    let mut times = [const { Vec::new() }; 5];
    let mut time = |what: usize, f: &mut dyn FnMut() -> Result<()>| {
        let start = Instant::now();
        let result = black_box(f());
        times[what].push(start.elapsed().as_nanos() as f64 / BATCH as f64);
        result
    };
    for n in (0..live).step_by(BATCH) {
        (n..n + BATCH).try_for_each(map)?;
        domain.iotlb_sync_map(Range::ALL)?;
    }
    for n in (0..BATCH * BATCHES).step_by(BATCH) {
        let batch = n..n + BATCH;
        let mut gather = Gather::new();
        time(1, &mut || match hull {
            true => domain.unmap_pages(pages(place(n), 16), &mut gather).map(drop),
            false => batch
                .clone()
                .try_for_each(|n| domain.unmap_pages(pages(place(n), 1), &mut gather).map(drop)),
        })?;
        time(4, &mut || turns.poll())?;
        time(2, &mut || domain.iotlb_sync(&mut gather))?;
        time(0, &mut || batch.clone().map(|n| n + live).try_for_each(map))?;
        time(3, &mut || turns.poll())?;
        domain.iotlb_sync_map(Range::ALL)?;
    }
    Ok(times.map(|mut ns| {
        ns.sort_by(f64::total_cmp);
        ns[ns.len() / 2]
    }))
}
