//! This crate's device, behind rings, as the kit sees it.

use std::{collections::HashMap, sync::Arc};

use ringfence_iommu::{Fault, FaultReason, FaultSink, Iova, Prot, table::Limits};
use ringfence_mem::Translate;
use ringfence_virtio_iommu::{
    device::{DeviceConfig, EventQueue, FaultQueue, RequestQueue},
    kit::{Event, Failed, Refused, Subject},
};
use ringfence_virtq::{
    Desc, driver,
    testing::{Ram, pair},
};

use crate::common::{Bench, Endpoints, range};

const BASE: u64 = 0x10_0000;
/// What the kit has of the memory.
const KIT: u64 = 32 << 12;
const REQUESTS: u64 = BASE + KIT;
const EVENTS: u64 = REQUESTS + 0x2000;
const BYTES: u64 = EVENTS + 0x2000;
const REPLY: u64 = BYTES + 0x1000;
const EVENT_BYTES: u64 = REPLY + 0x5000;
const END: u64 = EVENT_BYTES + 0x4000;
const SIZE: u16 = 128;

fn failed(error: impl std::fmt::Display) -> Failed {
    Failed::Broken(error.to_string().into())
}

/// The device with two endpoints, of which one has reserved regions.
pub(crate) struct Ours {
    bench: Bench,
    faults: Arc<FaultQueue>,
    ram: Ram,
    driver: driver::Queue,
    requests: RequestQueue<Endpoints>,
    event_driver: driver::Queue,
    events: EventQueue,
    posted: HashMap<u64, usize>,
}

impl Ours {
    pub(crate) fn new() -> Ours {
        let input_range = range(0x1000, (1 << 40) - 1);
        let options =
            DeviceConfig { input_range, domain_range: (1, 64), ..DeviceConfig::default() };
        let bench = Bench::with(options, Limits::NONE);
        let ram = Ram::new(BASE, (END - BASE) as usize);
        let faults = FaultQueue::new(8);
        let (driver, queue) = pair(&ram, REQUESTS, SIZE, true);
        let requests = RequestQueue::new(Arc::clone(&bench.device), queue);
        let (event_driver, queue) = pair(&ram, EVENTS, SIZE, true);
        let events = EventQueue::new(Arc::clone(&faults), queue);
        let posted = HashMap::new();
        Ours { bench, faults, ram, driver, requests, event_driver, events, posted }
    }
}

impl Subject for Ours {
    fn offered(&self) -> u64 {
        self.bench.device.features().bits()
    }

    fn start(&mut self, features: u64) -> Result<(), Failed> {
        self.bench.device.reset().map_err(failed)?;
        self.bench.device.set_features(features | 1 << 32);
        self.faults.clear();
        self.posted.clear();
        let (driver, queue) = pair(&self.ram, REQUESTS, SIZE, true);
        self.driver = driver;
        self.requests = RequestQueue::new(Arc::clone(&self.bench.device), queue);
        let (driver, queue) = pair(&self.ram, EVENTS, SIZE, true);
        self.event_driver = driver;
        self.events = EventQueue::new(Arc::clone(&self.faults), queue);
        Ok(())
    }

    fn read_config(&mut self, offset: usize, out: &mut [u8]) -> Result<(), Failed> {
        self.bench.device.read_config(offset, out);
        Ok(())
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) -> Result<(), Failed> {
        self.bench.device.write_config(offset, data).map_err(failed)
    }

    fn request(
        &mut self,
        piece: usize,
        readable: &[u8],
        writable: &mut [u8],
    ) -> Result<u32, Failed> {
        self.ram.write(BYTES, readable).map_err(failed)?;
        self.ram.write(REPLY, writable).map_err(failed)?;
        let pieces = |from: u64, len: usize, write: bool| {
            (0..len).step_by(piece).map(move |at| {
                let len = piece.min(len - at) as u32;
                Desc { addr: from + at as u64, len, write }
            })
        };
        let readable = pieces(BYTES, readable.len(), false);
        let descs: Vec<Desc> = readable.chain(pieces(REPLY, writable.len(), true)).collect();
        self.driver.add(&descs, 1).map_err(failed)?;
        self.driver.publish();
        for _ in 0..1000 {
            self.requests.poll(&self.ram).map_err(failed)?;
            if let Some(used) = self.driver.pop().map_err(failed)? {
                self.ram.read(REPLY, writable).map_err(failed)?;
                return Ok(used.len);
            }
        }
        Err(Failed::Timeout)
    }

    fn endpoints(&self) -> Vec<u32> {
        vec![1, 8]
    }

    fn absent_endpoint(&self) -> u32 {
        77
    }

    fn memory(&self) -> (u64, u64) {
        (BASE, BASE + KIT - 1)
    }

    fn peek(&mut self, address: u64, out: &mut [u8]) {
        self.ram.read(address, out).unwrap();
    }

    fn poke(&mut self, address: u64, bytes: &[u8]) {
        self.ram.write(address, bytes).unwrap();
    }

    fn access(
        &mut self,
        endpoint: u32,
        iova: u64,
        write: bool,
        bytes: &mut [u8],
    ) -> Option<Result<(), Refused>> {
        let access = if write { Prot::WRITE } else { Prot::READ };
        Some(match self.bench.endpoints.access(endpoint, iova, access) {
            None => {
                let (reason, iova) = (FaultReason::Mapping, Iova(iova));
                self.faults.report(Fault { reason, endpoint, iova, access });
                Err(Refused)
            }
            Some(gpa) => match write {
                true => self.ram.write(gpa, bytes).map_err(|_| Refused),
                false => self.ram.read(gpa, bytes).map_err(|_| Refused),
            },
        })
    }

    fn post_event_buffer(&mut self, len: usize) -> Option<Result<(), Failed>> {
        let token = self.posted.len() as u64;
        self.posted.insert(token, len);
        let desc = Desc::writable(EVENT_BYTES + token * 64, len as u32);
        let added = self.event_driver.add(&[desc], token).map_err(failed);
        self.event_driver.publish();
        Some(added)
    }

    fn next_event(&mut self) -> Result<Option<Event>, Failed> {
        self.events.poll(&self.ram).map_err(failed)?;
        let Some(used) = self.event_driver.pop().map_err(failed)? else { return Ok(None) };
        let mut bytes = vec![0; self.posted[&used.token]];
        self.ram.read(EVENT_BYTES + used.token * 64, &mut bytes).map_err(failed)?;
        Ok(Some(Event { used: used.len, bytes }))
    }

    fn system_reset(&mut self) -> Option<Result<(), Failed>> {
        Some(self.bench.device.system_reset().map_err(failed))
    }
}
