//! A back end that follows a script: honest, or not at all.

use std::{
    collections::VecDeque,
    io::{Read, Write},
    net::Shutdown as Shut,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use parking_lot::Mutex;
use ringfence_mem::{Access, Memory, Translate, UserAddresses};
use ringfence_run::{PeerFd, event, notifier::Notifier};
use ringfence_vhost_user::{
    Handler, HandlerError, Offer, ProtocolFeatures, RingAddresses, RingSetup, Server, Shutdown,
    msg::{Header, code},
};
use ringfence_virtq::{
    Chain,
    device::{Queue, RingConfig},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{F_EVENT_IDX, F_INDIRECT, F_PACKED, F_VERSION_1};

/// What it does with the chains that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    /// Uses them, the last first.
    Honest,
    /// Uses them, each with all its bytes written, and reports none.
    Untold,
    /// Uses none.
    Silent,
    /// Uses the last one, and then none.
    Newest,
    /// Reports more bytes than there is room for.
    TooLong,
    /// Uses a chain that it has not.
    NotThere,
    /// Uses a chain that no ring can have.
    OutOfRange,
    /// Uses a chain twice.
    Twice,
    /// Moves the used index by more than there is.
    Jump,
    /// Writes to every byte of its memory, and uses all chains.
    WriteAll,
    /// Hangs up.
    HangUp,
    /// Loses kicks, as back ends of rust-vmm's do while a ring is disabled. Once it is enabled, `Kicked`.
    Deaf,
    /// Looks at its ring only when it is kicked, and is honest.
    Kicked,
}

/// What it sends instead of its first reply, which is to GET_FEATURES.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Nonsense {
    /// A reply to another message.
    Code,
    /// No reply: a request.
    Request,
    /// A reply that is longer than it can be.
    Size,
    /// A part of one, and the end.
    Half,
    /// Replies ahead of their requests, each to another message.
    Ahead,
    /// A feature that no back end lacks is missing.
    Old,
}

/// The bytes of a message with these features.
fn message(Header { request, flags, size }: Header, features: u64) -> Vec<u8> {
    let header = [request, flags, size].into_iter().flat_map(u32::to_ne_bytes);
    header.chain(features.to_ne_bytes()).collect()
}

impl Nonsense {
    /// Replies to one front end, until it hangs up.
    fn reply(self, mut stream: UnixStream) {
        let (honest, all) = (Header::reply(code::GET_FEATURES, 8), u64::MAX);
        let said = match self {
            Nonsense::Code => message(Header::reply(code::GET_VRING_BASE, 8), all),
            Nonsense::Request => message(Header::request(code::GET_FEATURES, false, 8), all),
            Nonsense::Size => message(Header { size: u32::MAX, ..honest }, all),
            Nonsense::Half => message(honest, all)[..15].to_vec(),
            Nonsense::Ahead => {
                let next = Header::reply(code::SET_FEATURES, 8);
                [message(honest, all), message(next, all)].concat()
            }
            Nonsense::Old => message(honest, all & !F_VERSION_1),
        };
        // SET_OWNER, which has no reply, comes before it.
        let mut requests = [0; 2 * Header::LEN];
        if stream.read_exact(&mut requests).is_ok() && stream.write_all(&said).is_ok() {
            let _ = stream.shutdown(Shut::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    }
}

/// What it shows of itself.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) memory: Mutex<Option<Arc<Memory>>>,
    /// How many chains it has.
    pub(crate) has: Mutex<usize>,
    pub(crate) script: Mutex<Option<Script>>,
    /// How many kicks it has lost, once it is deaf.
    pub(crate) lost: Mutex<Option<usize>>,
    connection: Mutex<Option<Shutdown>>,
    /// No connection is to be served any more.
    pub(crate) over: AtomicBool,
}

impl Seen {
    /// Ends the connection.
    pub(crate) fn hang_up(&self) {
        self.connection.lock().iter().for_each(Shutdown::shutdown);
    }

    /// All bytes of its memory.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let memory = self.memory.lock().clone().expect("it has memory");
        let mut all = Vec::new();
        for region in memory.regions() {
            let memory = UserAddresses::new(Arc::clone(&memory));
            memory
                .slices(region.user_addr, region.size, Access::Read, |piece| {
                    all.extend(piece.to_vec());
                })
                .unwrap();
        }
        all
    }
}

/// The first bytes that it writes to a chain with these readable bytes.
pub(crate) fn reply(readable: &[u8], len: usize) -> Vec<u8> {
    let sum = readable.iter().fold(17u8, |sum, byte| sum.wrapping_mul(31).wrapping_add(*byte));
    (0..len).map(|at| sum.wrapping_add((at as u8).wrapping_mul(7))).collect()
}

struct Ring {
    over: Arc<AtomicBool>,
    thread: JoinHandle<u32>,
}

struct Scripted {
    features: u64,
    seen: Arc<Seen>,
    ring: Option<Ring>,
    call: Arc<Mutex<Option<Notifier>>>,
}

/// Listens at `path`, and serves one front end after the other, the first ones with nonsense.
pub(crate) fn listen(path: &Path, features: u64, seen: &Arc<Seen>, first: &'static [Nonsense]) {
    let listener = UnixListener::bind(path).unwrap();
    let seen = Arc::clone(seen);
    thread::spawn(move || {
        let mut streams = listener.incoming();
        for nonsense in first {
            nonsense.reply(streams.next().unwrap().unwrap());
        }
        for stream in streams {
            if seen.over.load(Ordering::Acquire) {
                return;
            }
            let handler = Scripted {
                features: features | F_VERSION_1,
                seen: Arc::clone(&seen),
                ring: None,
                call: Arc::default(),
            };
            let mut server = Server::new(stream.unwrap(), handler);
            let _ = server.serve();
        }
    });
}

impl Handler for Scripted {
    fn connected(&mut self, connection: Shutdown) {
        *self.seen.connection.lock() = Some(connection);
    }

    fn offer(&self) -> Offer {
        use ProtocolFeatures as P;
        Offer { protocol: P::REPLY_ACK | P::MQ | P::CONFIG, ..Offer::new(self.features, 1) }
    }

    fn config(&mut self, _: u32, _: &mut [u8]) -> Result<(), HandlerError> {
        Err(HandlerError::new("not now"))
    }

    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        self.features = features;
        Ok(())
    }

    fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError> {
        *self.seen.memory.lock() = Some(memory);
        Ok(())
    }

    fn start_ring(&mut self, _: u16, setup: RingSetup) -> Result<(), HandlerError> {
        let has = |feature: u64| self.features & feature != 0;
        let RingSetup { size, addresses: RingAddresses { desc, avail, used, .. }, base, .. } =
            setup;
        let config = RingConfig {
            size,
            desc,
            avail,
            used,
            event_idx: has(F_EVENT_IDX),
            indirect: has(F_INDIRECT),
            packed: has(F_PACKED),
            base: base.unwrap_or(0),
        };
        let memory = self.seen.memory.lock().clone().unwrap();
        let queue = Queue::new(config, &UserAddresses::new(Arc::clone(&memory)))?;
        let over = Arc::new(AtomicBool::new(false));
        let work = Work {
            queue,
            memory,
            seen: Arc::clone(&self.seen),
            call: Arc::clone(&self.call),
            kick: setup.kick,
            waiting: VecDeque::new(),
        };
        let until = Arc::clone(&over);
        let thread = thread::spawn(move || work.run(&until));
        self.ring = Some(Ring { over, thread });
        Ok(())
    }

    fn stop_ring(&mut self, _: u16) -> Result<u32, HandlerError> {
        let Some(Ring { over, thread }) = self.ring.take() else { return Ok(0) };
        over.store(true, Ordering::Release);
        Ok(thread.join().unwrap())
    }

    fn enable_ring(&mut self, _: u16, enabled: bool) -> Result<(), HandlerError> {
        let mut script = self.seen.script.lock();
        if enabled && *script == Some(Script::Deaf) {
            *script = Some(Script::Kicked);
        }
        Ok(())
    }

    fn set_call(&mut self, _: u16, call: Option<PeerFd>) -> Result<(), HandlerError> {
        *self.call.lock() = call.map(Notifier::new).transpose()?;
        Ok(())
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        let _ = self.stop_ring(0);
    }
}

/// A ring's thread.
struct Work {
    queue: Queue,
    memory: Arc<Memory>,
    seen: Arc<Seen>,
    call: Arc<Mutex<Option<Notifier>>>,
    kick: Option<PeerFd>,
    waiting: VecDeque<Chain>,
}

impl Work {
    fn run(mut self, over: &AtomicBool) -> u32 {
        let bus = UserAddresses::new(Arc::clone(&self.memory));
        while !over.load(Ordering::Acquire) {
            if !self.looks() {
                thread::sleep(std::time::Duration::from_micros(100));
                continue;
            }
            // Before the look: a kick that comes later is for the next one.
            self.kick.iter().for_each(event::drain);
            // Its script may have destroyed the ring.
            let mut chain = Chain::new();
            while let Ok(true) = self.queue.pop(&bus, &mut chain) {
                self.waiting.push_back(std::mem::take(&mut chain));
            }
            *self.seen.has.lock() = self.waiting.len();
            let script = self.seen.script.lock().unwrap_or(Script::Honest);
            if script != Script::Silent && !self.waiting.is_empty() {
                self.act(script, &bus);
                if let Some(call) = &*self.call.lock() {
                    call.notify();
                }
            }
            thread::sleep(std::time::Duration::from_micros(100));
        }
        self.queue.next_avail() - self.waiting.len() as u32
    }

    /// Whether its script lets it look at its ring now.
    fn looks(&mut self) -> bool {
        // Held, so that a kick after it is enabled is not taken for one from before.
        let script = self.seen.script.lock();
        if !matches!(*script, Some(Script::Deaf | Script::Kicked)) {
            return true;
        }
        // Before the look, as it may sleep after that.
        let _ = self.queue.enable_kicks();
        let kick = self.kick.as_ref().expect("a kick");
        let mut ready = [PollFd::new(kick, PollFlags::IN)];
        let kicked = poll(&mut ready, Some(&Timespec::default())).unwrap() > 0;
        event::drain(kick);
        if *script == Some(Script::Deaf) {
            // From now on: what came before its first look as such is no loss.
            let mut lost = self.seen.lost.lock();
            *lost = Some(lost.map_or(0, |lost| lost + usize::from(kicked)));
            return false;
        }
        kicked
    }

    fn act(&mut self, script: Script, bus: &UserAddresses) {
        if script == Script::HangUp {
            self.seen.hang_up();
            return;
        }
        if script == Script::WriteAll {
            for region in self.memory.regions() {
                bus.slices(region.user_addr, region.size, Access::Write, |piece| piece.fill(0xee))
                    .unwrap();
            }
        }
        let mut last = None;
        while let Some(chain) = self.waiting.pop_back() {
            // Before the guest can know.
            *self.seen.has.lock() = self.waiting.len();
            let used = self.serve(&chain, bus, script == Script::Untold);
            let (head, used) = match script {
                Script::Untold => (chain.head(), 0),
                Script::TooLong => (chain.head(), chain.writable_len() as u32 + 1),
                Script::NotThere => (chain.head() ^ 1, used),
                Script::OutOfRange => (0x7fff, used),
                _ => (chain.head(), used),
            };
            self.push(script, head, used, bus);
            last = Some((head, used));
            if script == Script::Newest {
                *self.seen.script.lock() = Some(Script::Silent);
                return;
            }
        }
        if let (Script::Twice, Some((head, used))) = (script, last) {
            self.push(script, head, used, bus);
        }
    }

    /// Reads a chain's buffers and writes them, `all` or some; returns how many bytes it has written.
    fn serve(&self, chain: &Chain, bus: &UserAddresses, all: bool) -> u32 {
        let mut readable = vec![0; chain.readable_len() as usize];
        if chain.read_at(bus, 0, &mut readable).is_err() {
            return 0;
        }
        // Not always all that there is room for.
        let room = chain.writable_len() as usize;
        let most = room - room / 3 * usize::from(readable.len() % 2 == 1 && !all);
        let _ = chain.write_at(bus, 0, &reply(&readable, most));
        most as u32
    }

    /// Adds an entry to the used ring, past all checks of the queue.
    fn push(&mut self, script: Script, head: u16, used: u32, bus: &UserAddresses) {
        let config = *self.queue.config();
        if matches!(
            script,
            Script::Honest
                | Script::Untold
                | Script::WriteAll
                | Script::Newest
                | Script::Deaf
                | Script::Kicked
        ) {
            self.queue.push_used(head, used);
            let _ = self.queue.publish_used();
            return;
        }
        let size = usize::from(config.size);
        if config.packed {
            let Ok(ring) = bus.window(config.desc, 16 * size as u64, Access::ReadWrite) else {
                return;
            };
            ring.write(8, &used.to_le_bytes());
            ring.write(12, &head.to_le_bytes());
            // Available and used, as in the first lap, and written to.
            let flags = 1 << 15 | 1 << 7 | 1 << 1;
            ring.u16_at(14).store(flags, Ordering::Release);
            return;
        }
        let len = 6 + 8 * size as u64;
        let Ok(ring) = bus.window(config.used, len, Access::ReadWrite) else { return };
        let index = ring.u16_at(2).load(Ordering::Relaxed);
        let at = 4 + 8 * (usize::from(index) % size);
        ring.write(at, &u32::from(head).to_le_bytes());
        ring.write(at + 4, &used.to_le_bytes());
        let by = if script == Script::Jump { config.size + 3 } else { 1 };
        ring.u16_at(2).store(index.wrapping_add(by), Ordering::Release);
    }
}
