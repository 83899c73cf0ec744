//! What the data path costs by itself: a driver and a device in one thread, over a disk in memory.
//!
//! Only the device is timed. It takes requests, reads their headers, moves the data, writes the
//! status and gives them back: the same code each time, compiled for addresses that are never
//! translated (`without`), for those of a device that has an IOTLB which its driver does not use
//! (`off`), and with it. So the difference of the first two is what having an IOTLB costs.

use std::{
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ringfence_devices::{
    blk::request::{self, Action, Limits},
    disk::{Disk, Ram},
};
use ringfence_iommu::{GuestPhys, Iova, Prot, Range, shootdown::Shootdown};
use ringfence_iotlb::{Binding, Endpoint, Iotlb, IotlbConfig, View};
use ringfence_mem::{GuestRam, Memory, Physical, Translate, Window};
use ringfence_vhost_user_backend::Bus;
use ringfence_virtq::{
    Chain, Desc,
    blk::{self, HEADER_BYTES, SECTOR, Status},
    device, driver,
};

use super::case::Kind;
use crate::{
    bench::{
        Benchmark, Row,
        clock::Clock,
        rounds::{Contest, Entrant, Stop},
        row::{object, value},
    },
    load::blk::BLOCK,
    memory,
};

/// Requests that are taken at once, and descriptors of the ring.
const BURST: usize = 32;
const RING: u16 = 64;
/// Requests that take turns, two pages each.
const REQUESTS: u64 = 128;
const PAGE: u64 = 4096;
/// The ring lies before the requests.
const REQUESTS_AT: u64 = 1 << 16;
const RAM: u64 = REQUESTS_AT + 2 * REQUESTS * PAGE;
/// Blocks of the disk.
const BLOCKS: u64 = 1 << 10;
/// Where memory begins for a device, without an IOMMU and with one.
const GPA: u64 = 1 << 32;
const IOVA: u64 = 1 << 40;
/// Where the status and the table of a request stand in their page.
const STATUS_AT: u64 = HEADER_BYTES as u64;
const TABLE_AT: u64 = 32;

/// One way to memory, with a ring over it.
struct Rig<T> {
    way: T,
    /// Called between bursts.
    quiet: fn(&mut T),
    driver: driver::Queue,
    device: device::Queue,
    requests: Vec<Request>,
    next: usize,
    disk: Arc<Ram>,
    limits: Limits,
    chain: Chain,
    done: u64,
    failed: u64,
}

struct Request {
    table_at: u64,
    table: Window,
    descs: [Desc; 3],
}

/// A rig of any way.
trait Timed {
    /// Nanoseconds that the device takes for a request, over about that long.
    fn time(&mut self, clock: &Clock, length: Duration) -> Result<f64>;
}

impl<T: Translate> Rig<T> {
    /// `at`: where the device sees a page of memory; `way`: how it gets there, with what is called between
    /// bursts.
    fn new(
        disk: &Arc<Ram>,
        kind: Kind,
        at: fn(u64) -> u64,
        way: impl FnOnce(&Arc<GuestRam>, Arc<Memory>) -> Result<T>,
        quiet: fn(&mut T),
    ) -> Result<Rig<T>> {
        let ram = GuestRam::new(RAM as usize, GPA)?;
        let way = way(&ram, Memory::of_ram(&ram)?)?;
        let config = driver::QueueConfig { size: RING, event_idx: false, packed: false };
        let window = ram.window(0, REQUESTS_AT as usize)?;
        let driver = driver::Queue::with_config(config, driver::Rings::placed(&window, &config)?)?;
        let (base, offsets) = (at(0), config.offsets());
        let config = device::RingConfig {
            size: RING,
            desc: base + offsets.desc as u64,
            avail: base + offsets.avail as u64,
            used: base + offsets.used as u64,
            event_idx: false,
            indirect: true,
            packed: false,
            base: 0,
        };
        let device = device::Queue::new(config, &way)?;
        let write = kind == Kind::Write;
        let wanted = if write { blk::Kind::Out } else { blk::Kind::In };
        let requests = (0..REQUESTS).map(|n| {
            let page = REQUESTS_AT / PAGE + 2 * n;
            // Not all at the same offset in their page.
            let into = n % 31 * 128;
            let offset = (page + 1) * PAGE + into;
            let request = at(page + 1) + into;
            let sector = n * (BLOCKS / REQUESTS) * (BLOCK as u64 / SECTOR);
            let mut header = [0; HEADER_BYTES];
            header[..4].copy_from_slice(&wanted.code().to_le_bytes());
            header[8..].copy_from_slice(&sector.to_le_bytes());
            ram.window(offset as usize, HEADER_BYTES)?.write(0, &header);
            Ok(Request {
                table_at: request + TABLE_AT,
                table: ram.window((offset + TABLE_AT) as usize, 3 * size_of::<[u64; 2]>())?,
                descs: [
                    Desc::readable(request, HEADER_BYTES as u32),
                    Desc { addr: at(page), len: BLOCK as u32, write: !write },
                    Desc::writable(request + STATUS_AT, 1),
                ],
            })
        });
        Ok(Rig {
            way,
            quiet,
            driver,
            device,
            requests: requests.collect::<Result<_>>()?,
            next: 0,
            disk: Arc::clone(disk),
            limits: Limits::of(&Disk::Ram(Arc::clone(disk)), false),
            chain: Chain::new(),
            done: 0,
            failed: 0,
        })
    }

    fn submit(&mut self) -> Result<()> {
        for _ in 0..BURST {
            let Request { table_at, table, descs } = &self.requests[self.next];
            self.driver.add_indirect(*table_at, table, descs, 0)?;
            self.next = (self.next + 1) % self.requests.len();
        }
        self.driver.publish();
        Ok(())
    }

    /// What a device does with a burst.
    fn serve(&mut self) -> Result<()> {
        let Rig { way, quiet, device, chain, disk, limits, .. } = self;
        quiet(way);
        while device.pop(way, chain)? {
            let served = match request::parse(chain, way, limits) {
                Ok(Action::Transfer { write, offset, len }) => {
                    request::transfer(chain, way, disk, write, offset, len)
                        .map(|()| if write { 0 } else { len as u32 })
                        .map_err(|_| Status::IoErr)
                }
                _ => Err(Status::Unsupported),
            };
            let (status, written) = match served {
                Ok(written) => (Status::Ok, written),
                Err(status) => (status, 0),
            };
            self.failed += u64::from(status != Status::Ok);
            let used = request::complete(chain, way, status, written).unwrap_or(0);
            device.push_used(chain.head(), used);
        }
        let _ = device.publish_used();
        Ok(())
    }
}

impl<T: Translate> Timed for Rig<T> {
    fn time(&mut self, clock: &Clock, length: Duration) -> Result<f64> {
        let (begun, before) = (Instant::now(), self.done);
        let mut ticks = 0;
        while begun.elapsed() < length {
            for _ in 0..8 {
                self.submit()?;
                let from = clock.now();
                self.serve()?;
                ticks += clock.now().wrapping_sub(from);
                let mut used = [driver::Used::default(); BURST];
                let count = self.driver.pop_burst(&mut used)?;
                ensure!(count == BURST && self.failed == 0, "a request was not served");
                self.done += count as u64;
            }
        }
        Ok(clock.ns(ticks) / (self.done - before).max(1) as f64)
    }
}

/// The disk of all rigs.
fn disk() -> Result<Arc<Ram>> {
    let len = BLOCKS * BLOCK as u64;
    let file = memory::file("bench", len)?;
    Ok(Arc::new(Ram::map(file.as_fd(), len).context("a disk in memory")?))
}

/// The page of addresses of a page of requests behind an IOMMU: no two neighbours are contiguous in
/// memory.
fn scattered(page: u64) -> u64 {
    let (first, count) = (REQUESTS_AT / PAGE, 2 * REQUESTS);
    let page = if page < first { page } else { first + (page - first) * 27 % count };
    IOVA + page * PAGE
}

/// A way through an IOTLB that has all of memory.
fn translated(ram: &Arc<GuestRam>, memory: Arc<Memory>) -> Result<Bus> {
    let shootdown = Shootdown::new(1);
    let iotlb = Iotlb::new(IotlbConfig::default(), Arc::clone(&shootdown));
    for page in 0..RAM / PAGE {
        let range = Range::from_len(Iova(scattered(page)), PAGE).context("no page wraps")?;
        iotlb.update(range, GuestPhys(ram.gpa() + page * PAGE), Prot::RW)?;
    }
    let endpoint = Endpoint::new(0, shootdown, Binding::Iotlb(iotlb));
    let view = View::new(endpoint, memory).context("no place for a view")?;
    Ok(Bus::Iommu(Box::new(view)))
}

/// Measures, and adds the rows. `begin` is called with the name of each measurement.
///
/// # Errors
/// There is no memory, or a request was not served.
pub(super) fn measure(
    benchmark: &mut Benchmark,
    kinds: &[Kind],
    (repeat, length): (u32, Duration),
    stop: &Stop,
    mut begin: impl FnMut(&str),
) -> Result<()> {
    let clock = Clock::calibrate();
    for &kind in kinds {
        let disk = disk()?;
        let plain = |page: u64| GPA + page * PAGE;
        let without = Rig::new(&disk, kind, plain, |_, memory| Ok(Physical::new(memory)), |_| ())?;
        let physical = |_: &_, memory| Ok(Bus::Physical(Physical::new(memory)));
        let off = Rig::new(&disk, kind, plain, physical, Bus::quiet)?;
        let on = Rig::new(&disk, kind, scattered, translated, Bus::quiet)?;
        let rigs: [(_, Box<dyn Timed>); 3] = [
            ("without", Box::new(without)),
            ("off", Box::new(off)),
            ("4k/unmergeable", Box::new(on)),
        ];
        let mut contest = Contest(rigs.map(|(name, rig)| Entrant::new(name, Ok(rig))).into());
        let measure = |name: &_, rig: &mut Box<dyn Timed>, _| {
            begin(&format!("path, {kind}, {name}"));
            Ok(vec![("ns", rig.time(&clock, length / 3)?)])
        };
        contest.run(repeat, stop, measure, |name, error| {
            benchmark.errors.push(format!("path, {kind}, {name}: {error:#}"));
        });
        let base = &contest.taken(&"without")["ns"];
        for Entrant { key: name, subject, taken } in &contest.0 {
            let rounds = &taken["ns"];
            benchmark.rows.push(Row {
                name: format!("path/{kind}/{name}"),
                implementation: "ringfence".to_owned(),
                params: object([
                    ("part", "path".into()),
                    ("kind", kind.name().into()),
                    ("iommu", (*name == "4k/unmergeable").into()),
                ]),
                ns_per_op: rounds.interval(),
                ratio_to_ringfence: (!rounds.0.is_empty()).then_some(1.0),
                note: rounds.missing(subject.as_ref().err()),
                figures: object([
                    ("ratio_to_without", value(base.ratio_to(rounds))),
                    ("rounds", rounds.0.len().into()),
                ]),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_pages_lead_on_from_each_other_and_the_ring_is_in_one_piece() {
        let pages = RAM / PAGE;
        let mut all: Vec<u64> = (0..pages).map(scattered).collect();
        let ring = (REQUESTS_AT / PAGE) as usize;
        assert!(all[..ring].windows(2).all(|pair| pair[1] == pair[0] + PAGE));
        assert!(all[ring..].windows(2).all(|pair| pair[1] != pair[0] + PAGE));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len() as u64, pages);
    }

    #[test]
    fn each_way_has_a_row_and_what_it_reads_is_what_is_on_the_disk() {
        let mut benchmark = Benchmark::new("blk", 2);
        let (how, stop) = ((2, Duration::from_micros(300)), Stop::default());
        measure(&mut benchmark, &Kind::ALL, how, &stop, |_| ()).unwrap();
        assert_eq!(benchmark.rows.len(), 6);
        assert!(benchmark.rows.iter().all(|row| row.ns_per_op.median.is_some()));

        let disk = disk().unwrap();
        disk.write(0, (&mut [0x5a; BLOCK][..]).into());
        let mut data = None;
        let way = |ram: &Arc<GuestRam>, memory| {
            data = Some(ram.window(REQUESTS_AT as usize, BLOCK).unwrap());
            translated(ram, memory)
        };
        let mut rig = Rig::new(&disk, Kind::Read, scattered, way, Bus::quiet).unwrap();
        rig.submit().unwrap();
        rig.serve().unwrap();
        let mut found = [0; BLOCK];
        data.unwrap().read(0, &mut found);
        assert_eq!((found, rig.failed), ([0x5a; BLOCK], 0));
    }
}
