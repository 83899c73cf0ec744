//! The machine's virtio-iommu with the `edu` devices behind it, as the kit wants a device.

use std::{
    cell::Cell,
    collections::{HashMap, VecDeque},
    rc::Rc,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ringfence_virtio_iommu::{
    kit::{Event, Failed, Refused, Subject},
    wire::{EVENT_QUEUE, MAX_REQUEST_LEN, REQUEST_QUEUE, Request, TAIL_LEN},
};
use ringfence_virtq::{Desc, driver::Queue};

use crate::{
    access::{self, KEPT},
    edu::Edu,
    memory::Memory,
    pci::Function,
    virtio::{Device, QUEUE_SIZE},
};

const VERSION_1: u64 = 1 << 32;
/// QEMU completes requests before its kick returns. What is not completed in this time never is.
const TIMEOUT: Duration = Duration::from_secs(2);
/// An event that is on its way is there by then.
const MOMENT: Duration = Duration::from_millis(50);

/// Where things lie in the memory that the device is given: rings, the two parts of a request, and
/// the buffers of events. The last 64 KiB are [`access`]'s.
const REQUEST_RING: usize = 0;
const EVENT_RING: usize = 0x8000;
const READABLE: usize = 0x1_0000;
const WRITABLE: usize = 0x4_0000;
const EVENTS: usize = 0x10_0000;
const EVENT_ROOM: usize = 0x1000;

/// The device and what belongs to it.
pub(crate) struct Viommu {
    device: Device,
    memory: Memory,
    /// The kit's.
    pub(crate) target: Memory,
    pub(crate) edus: Vec<Edu>,
    queues: Option<Queues>,
    /// In which domain an endpoint is, as far as completed requests show.
    domains: HashMap<u32, u32>,
    /// The same from before a reset, after which no endpoint is in any.
    before_reset: HashMap<u32, u32>,
    /// No endpoint has this number.
    absent: u32,
    /// Whether what a reset leaves behind is taken away after it.
    tidy: Rc<Cell<bool>>,
    /// Makes what is written differ each time.
    pub(crate) writes: u64,
}

struct Queues {
    requests: Queue,
    events: Queue,
    /// The lengths of the event buffers that the device has.
    posted: VecDeque<(u64, usize)>,
    next_event: u64,
}

impl Viommu {
    /// Finds and takes it.
    ///
    /// # Errors
    /// It or an `edu` is not there, or what the kernel says.
    pub(crate) fn find(absent: u32, tidy: Rc<Cell<bool>>) -> Result<Viommu> {
        let functions = Function::all(0x1af4, 0x1057)?;
        let function = functions.first().context("this machine has no virtio-iommu")?;
        let edus = Edu::all()?;
        ensure!(!edus.is_empty(), "this machine has no edu device");
        let mut viommu = Viommu {
            device: Device::find(function)?,
            memory: Memory::new()?,
            target: Memory::new()?,
            edus,
            queues: None,
            domains: HashMap::new(),
            before_reset: HashMap::new(),
            absent,
            tidy,
            writes: 0,
        };
        viommu.begin(0)?;
        Ok(viommu)
    }

    fn begin(&mut self, features: u64) -> Result<()> {
        self.queues = None;
        self.before_reset.extend(self.domains.drain());
        self.device.reset()?;
        self.device.negotiate(features | VERSION_1)?;
        let requests = self.device.queue(REQUEST_QUEUE, &self.memory.from(REQUEST_RING)?)?;
        let events = self.device.queue(EVENT_QUEUE, &self.memory.from(EVENT_RING)?)?;
        self.queues = Some(Queues { requests, events, posted: VecDeque::new(), next_event: 0 });
        self.device.go();
        if self.tidy.get() {
            // A device whose reset is one refuses them all.
            for (endpoint, domain) in std::mem::take(&mut self.before_reset) {
                self.own_request(&Request::Detach { domain, endpoint })?;
            }
        }
        Ok(())
    }

    /// The domain that an endpoint is in, or was before a reset.
    pub(crate) fn domain_of(&self, endpoint: u32) -> Option<u32> {
        self.domains.get(&endpoint).or_else(|| self.before_reset.get(&endpoint)).copied()
    }

    /// Sends a request that is the subject's, not the kit's; its status.
    ///
    /// # Errors
    /// It is not completed.
    pub(crate) fn own_request(&mut self, request: &Request) -> Result<u8> {
        let (mut readable, mut tail) = ([0; MAX_REQUEST_LEN], [0xff; TAIL_LEN]);
        let len = request.emit(&mut readable);
        let used = self.request(usize::MAX, &readable[..len], &mut tail)?;
        ensure!(used as usize >= TAIL_LEN, "{request:?} was returned without a status");
        Ok(tail[0])
    }

    /// Whether the device completes nothing any more, and says so.
    pub(crate) fn has_given_up(&self) -> bool {
        self.device.needs_reset()
    }

    /// What a subject's own access needs besides the endpoint.
    pub(crate) fn own_memory(&self) -> &Memory {
        &self.memory
    }

    /// One request, as pieces of at most `piece` bytes.
    fn exchange(
        &mut self,
        piece: usize,
        readable: &[u8],
        writable: &mut [u8],
    ) -> Result<u32, Failed> {
        let (window, addr) = (self.memory.window(), self.memory.addr());
        if readable.len() > WRITABLE - READABLE || writable.len() > EVENTS - WRITABLE {
            return Err(Failed::Broken("a request for which there is no room".into()));
        }
        window.write(READABLE, readable);
        window.write(WRITABLE, writable);
        let pieces = |at: usize, len: usize| {
            let starts = (0..len).step_by(piece);
            starts.map(move |from| (addr + (at + from) as u64, (len - from).min(piece) as u32))
        };
        let read = pieces(READABLE, readable.len()).map(|(at, len)| Desc::readable(at, len));
        let write = pieces(WRITABLE, writable.len()).map(|(at, len)| Desc::writable(at, len));
        let descs: Vec<Desc> = read.chain(write).collect();

        let queue = &mut self.queues.as_mut().ok_or_else(not_started)?.requests;
        queue.add(&descs, 0).map_err(broken)?;
        queue.publish();
        self.device.kick(REQUEST_QUEUE);
        let begun = Instant::now();
        loop {
            // Read first: a completion that is there by then counts.
            let (given_up, over) = (self.device.needs_reset(), begun.elapsed() > TIMEOUT);
            if let Some(used) = queue.pop().map_err(broken)? {
                self.memory.window().read(WRITABLE, writable);
                return Ok(used.len);
            }
            if given_up {
                return Err(gave_up());
            }
            if over {
                return Err(Failed::Timeout);
            }
            sleep(Duration::from_millis(1));
        }
    }

    /// Notes where endpoints are.
    fn note(&mut self, readable: &[u8], tail: &[u8], used: u32) {
        if (used as usize) < TAIL_LEN || tail.first() != Some(&0) {
            return;
        }
        match Request::parse(readable) {
            Ok(Request::Attach { domain, endpoint, .. }) => {
                self.before_reset.remove(&endpoint);
                self.domains.insert(endpoint, domain);
            }
            Ok(Request::Detach { endpoint, .. }) => {
                self.before_reset.remove(&endpoint);
                self.domains.remove(&endpoint);
            }
            _ => {}
        }
    }
}

impl Subject for Viommu {
    fn offered(&self) -> u64 {
        self.device.offered()
    }

    fn start(&mut self, features: u64) -> Result<(), Failed> {
        self.begin(features).map_err(broken)
    }

    fn read_config(&mut self, offset: usize, out: &mut [u8]) -> Result<(), Failed> {
        self.device.read_own(offset, out).map_err(broken)
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) -> Result<(), Failed> {
        self.device.write_own(offset, data).map_err(broken)
    }

    fn request(
        &mut self,
        piece: usize,
        readable: &[u8],
        writable: &mut [u8],
    ) -> Result<u32, Failed> {
        let used = self.exchange(piece, readable, writable)?;
        self.note(readable, writable, used);
        Ok(used)
    }

    fn endpoints(&self) -> Vec<u32> {
        self.edus.iter().map(Edu::endpoint).collect()
    }

    fn absent_endpoint(&self) -> u32 {
        self.absent
    }

    fn memory(&self) -> (u64, u64) {
        (self.target.addr(), self.target.addr() + access::TARGET as u64 - 1)
    }

    fn kept(&self) -> Option<(u64, u64)> {
        Some(KEPT)
    }

    fn peek(&mut self, address: u64, out: &mut [u8]) {
        self.target.window().read((address - self.target.addr()) as usize, out);
    }

    fn poke(&mut self, address: u64, bytes: &[u8]) {
        self.target.window().write((address - self.target.addr()) as usize, bytes);
    }

    fn access(
        &mut self,
        endpoint: u32,
        iova: u64,
        write: bool,
        bytes: &mut [u8],
    ) -> Option<Result<(), Refused>> {
        let tried = access::access(self, endpoint, iova, write, bytes);
        tried.inspect_err(|error| eprintln!("an access could not be tried: {error:#}")).ok()
    }

    fn post_event_buffer(&mut self, len: usize) -> Option<Result<(), Failed>> {
        Some(self.post(len))
    }

    fn next_event(&mut self) -> Result<Option<Event>, Failed> {
        let queues = self.queues.as_mut().ok_or_else(not_started)?;
        let begun = Instant::now();
        loop {
            let (given_up, over) = (self.device.needs_reset(), begun.elapsed() > MOMENT);
            if let Some(used) = queues.events.pop().map_err(broken)? {
                let at = queues.posted.iter().position(|&(token, _)| token == used.token);
                let (token, len) = at.and_then(|at| queues.posted.remove(at)).ok_or_else(|| {
                    Failed::Broken("a buffer came back that the device did not have".into())
                })?;
                let mut bytes = vec![0; len];
                self.memory.window().read(event_at(token), &mut bytes);
                return Ok(Some(Event { used: used.len, bytes }));
            }
            if given_up {
                return Err(gave_up());
            }
            if over {
                return Ok(None);
            }
            sleep(Duration::from_millis(1));
        }
    }
}

impl Viommu {
    fn post(&mut self, len: usize) -> Result<(), Failed> {
        let queues = self.queues.as_mut().ok_or_else(not_started)?;
        if len > EVENT_ROOM {
            return Err(Failed::Broken("an event buffer for which there is no room".into()));
        }
        let token = queues.next_event;
        self.memory.window().write(event_at(token), &vec![0; len]);
        let desc = Desc::writable(self.memory.addr() + event_at(token) as u64, len as u32);
        queues.events.add(&[desc], token).map_err(broken)?;
        queues.events.publish();
        queues.posted.push_back((token, len));
        queues.next_event += 1;
        self.device.kick(EVENT_QUEUE);
        Ok(())
    }
}

/// Where the buffer of an event lies; as many as the queue has descriptors are in use at a time, in
/// the order in which they were given.
fn event_at(token: u64) -> usize {
    EVENTS + (token % u64::from(QUEUE_SIZE)) as usize * EVENT_ROOM
}

fn gave_up() -> Failed {
    Failed::Broken("the device gave up and asks for a reset (DEVICE_NEEDS_RESET)".into())
}

fn not_started() -> Failed {
    Failed::Broken("the device is not started".into())
}

fn broken(error: impl std::fmt::Display) -> Failed {
    Failed::Broken(format!("{error:#}").into())
}
