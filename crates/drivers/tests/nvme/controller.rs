//! An NVMe controller in software, which may misbehave: registers in memory, and a thread that
//! polls its doorbells and reaches memory through a domain, as a device does.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::Mutex;
use ringfence_drivers::nvme::Registers;
use ringfence_sync::clock::{Clock, MonotonicClock};

use crate::{bus::Bus, rig::LIMIT};

const CAP: u64 = 0x00;
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;
const SIZE: u64 = 0x2000;

/// How many times it looks for commands in vain before it concludes that all were carried out.
const IDLE: u32 = 200;
/// How much time passes, in ns, when it does not obey: longer than any time-out.
const PASSES: u64 = 10 * LIMIT.as_nanos() as u64;

/// Queues besides the admin queue.
pub(crate) const QUEUES: u16 = 4;
/// Entries of a queue at most.
pub(crate) const ENTRIES: u32 = 256;
/// Bytes of a block.
pub(crate) const BLOCK: usize = 512;

/// How it misbehaves with I/O commands, if it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Evil {
    /// Not at all.
    None,
    /// Completes a command that does not exist.
    Stray(u16),
    /// Completes each command twice.
    Twice,
    /// Completes a command, and carries it out, and more, when its memory has another use again.
    Late,
    /// Completes none.
    Silent,
    /// Reports a fatal error.
    Fatal,
    /// Is unplugged.
    Gone,
    /// Writes what looks like completions all over the queue: this word, and any numbers.
    Flood(u32),
    /// Every command fails, with this status.
    Status(u16),
    /// Completes, responds and drops commands by chance.
    Dice(u64),
}

/// What the controller reports about itself, and how it starts and stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Character {
    /// The seed of its Identify data; `None`: valid data.
    pub(crate) identify: Option<u64>,
    /// Whether it ever becomes ready. Where it does not obey, time passes.
    pub(crate) starts: bool,
    /// Whether it stops on command.
    pub(crate) stops: bool,
    /// Whether it deletes queues on command.
    pub(crate) deletes: bool,
    /// The most that it moves at a time: 4096 << this; 0: anything.
    pub(crate) mdts: u8,
    /// The distance of its doorbells: 4 << this.
    pub(crate) stride: u64,
}

impl Character {
    pub(crate) const GOOD: Character =
        Character { identify: None, starts: true, stops: true, deletes: true, mdts: 0, stride: 0 };
}

/// What it has done, for tests to check.
#[derive(Default)]
pub(crate) struct Stats {
    /// Accesses that the IOMMU refused.
    pub(crate) faults: AtomicU64,
    /// I/O commands that were fetched.
    pub(crate) commands: AtomicU64,
    /// Doorbells of I/O submission queues.
    pub(crate) doorbells: AtomicU64,
    /// Flushes.
    pub(crate) flushes: AtomicU64,
    /// Whether it was shut down in order.
    pub(crate) shut_down: AtomicBool,
    /// How many mappings there were when it last stopped, or deleted a queue.
    pub(crate) mapped_at_stop: AtomicU64,
    /// How often it was stopped.
    pub(crate) stops: AtomicU64,
}

struct Shared {
    words: Vec<AtomicU32>,
    gone: AtomicBool,
    /// How far its clock is ahead, in ns.
    ahead: AtomicU64,
    over: AtomicBool,
    evil: Mutex<Evil>,
    stats: Stats,
    disk: Mutex<Vec<u8>>,
}

impl Shared {
    fn word(&self, at: u64) -> &AtomicU32 {
        &self.words[(at / 4) as usize]
    }
    fn get(&self, at: u64) -> u32 {
        self.word(at).load(Ordering::Acquire)
    }
    fn get64(&self, at: u64) -> u64 {
        u64::from(self.get(at)) | u64::from(self.get(at + 4)) << 32
    }
    fn put(&self, at: u64, value: u32) {
        self.word(at).store(value, Ordering::Release);
    }
    fn pass_time(&self) {
        self.ahead.fetch_add(PASSES, Ordering::AcqRel);
    }
}

/// The registers, for a driver.
pub(crate) struct Bar(Arc<Shared>, u64);

impl Registers for Bar {
    fn size(&self) -> u64 {
        SIZE
    }
    fn read32(&self, at: u64) -> u32 {
        if self.0.gone.load(Ordering::Acquire) { u32::MAX } else { self.0.get(at) }
    }
    fn now(&self) -> Duration {
        Duration::from_nanos(MonotonicClock.now_ns() + self.0.ahead.load(Ordering::Acquire))
    }
    fn write32(&self, at: u64, value: u32) {
        if at > DOORBELLS && ((at - DOORBELLS) / self.1).is_multiple_of(2) {
            self.0.stats.doorbells.fetch_add(1, Ordering::Relaxed);
        }
        self.0.put(at, value);
    }
}

/// A controller that runs until it is dropped.
pub(crate) struct Soft {
    shared: Arc<Shared>,
    stride: u64,
    thread: Option<JoinHandle<()>>,
}

impl Soft {
    /// With a disk of so many blocks, on a bus.
    pub(crate) fn new(blocks: usize, bus: impl Bus + 'static, character: Character) -> Soft {
        let stride = 4 << character.stride;
        let shared = Arc::new(Shared {
            words: (0..SIZE / 4).map(|_| AtomicU32::new(0)).collect(),
            gone: AtomicBool::new(false),
            ahead: AtomicU64::new(0),
            over: AtomicBool::new(false),
            evil: Mutex::new(Evil::None),
            stats: Stats::default(),
            disk: Mutex::new(vec![0; blocks * BLOCK]),
        });
        // It reports the longest possible time to start and to stop: 127 s.
        let cap = 1 << 37 | character.stride << 32 | 0xff << 24 | u64::from(ENTRIES - 1);
        shared.put(CAP, cap as u32);
        shared.put(CAP + 4, (cap >> 32) as u32);
        let engine = Engine {
            shared: Arc::clone(&shared),
            character,
            stride,
            bus: Box::new(bus),
            submit: BTreeMap::new(),
            complete: BTreeMap::new(),
            late: Vec::new(),
            dice: 1,
        };
        let thread = Some(thread::spawn(move || engine.run()));
        Soft { shared, stride, thread }
    }

    pub(crate) fn bar(&self) -> Bar {
        Bar(Arc::clone(&self.shared), self.stride)
    }

    pub(crate) fn stats(&self) -> &Stats {
        &self.shared.stats
    }

    pub(crate) fn faults(&self) -> u64 {
        self.shared.stats.faults.load(Ordering::Acquire)
    }

    pub(crate) fn be(&self, evil: Evil) {
        *self.shared.evil.lock() = evil;
    }

    pub(crate) fn disk(&self) -> Vec<u8> {
        self.shared.disk.lock().clone()
    }
}

impl Drop for Soft {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the controller's thread panicked");
        }
    }
}

struct Submit {
    base: u64,
    entries: u32,
    head: u32,
    complete: u16,
}

struct Complete {
    base: u64,
    entries: u32,
    tail: u32,
    phase: bool,
}

type Command = [u32; 16];

struct Engine {
    shared: Arc<Shared>,
    character: Character,
    stride: u64,
    bus: Box<dyn Bus>,
    submit: BTreeMap<u16, Submit>,
    complete: BTreeMap<u16, Complete>,
    /// Commands that were completed and are carried out afterwards.
    late: Vec<Command>,
    dice: u64,
}

impl Engine {
    fn run(mut self) {
        let (mut enabled, mut idle) = (false, 0);
        while !self.shared.over.load(Ordering::Acquire) {
            self.bus.quiet();
            let configuration = self.shared.get(CC);
            match (enabled, configuration & 1 != 0) {
                (false, true) => enabled = self.start(),
                (true, false) => enabled = !self.stop(),
                _ => {}
            }
            if configuration >> 14 & 3 != 0 && self.shared.get(CSTS) >> 2 & 3 == 0 {
                self.shared.stats.shut_down.store(true, Ordering::Release);
                self.shared.put(CSTS, self.shared.get(CSTS) | 2 << 2);
            }
            if enabled && self.serve() {
                idle = 0;
            } else {
                idle += 1;
                if idle == IDLE && matches!(*self.shared.evil.lock(), Evil::Silent | Evil::Dice(_))
                {
                    // The driver's current wait times out. Only once: its next wait, for the end of
                    // the queue, succeeds.
                    let ahead = &self.shared.ahead;
                    let _ = ahead.compare_exchange(0, PASSES, Ordering::AcqRel, Ordering::Acquire);
                }
                self.bus.rest();
                thread::sleep(Duration::from_micros(20));
            }
        }
    }

    fn start(&mut self) -> bool {
        if !self.character.starts {
            self.shared.pass_time();
            return false;
        }
        let sizes = self.shared.get(AQA);
        let (base, entries) = (self.shared.get64(ASQ), (sizes & 0xfff) + 1);
        self.submit.insert(0, Submit { base, entries, head: 0, complete: 0 });
        let (base, entries) = (self.shared.get64(ACQ), (sizes >> 16 & 0xfff) + 1);
        self.complete.insert(0, Complete { base, entries, tail: 0, phase: true });
        self.shared.put(CSTS, 1);
        true
    }

    /// Returns whether it stopped.
    fn stop(&mut self) -> bool {
        if !self.character.stops {
            self.shared.pass_time();
            return false;
        }
        self.submit.clear();
        self.complete.clear();
        for at in (DOORBELLS..SIZE).step_by(4) {
            self.shared.put(at, 0);
        }
        let stats = &self.shared.stats;
        stats.mapped_at_stop.store(self.bus.mapped(), Ordering::Release);
        stats.stops.fetch_add(1, Ordering::Release);
        self.shared.put(CSTS, 0);
        true
    }

    fn doorbell(&self, queue: u16, complete: bool) -> u64 {
        DOORBELLS + (2 * u64::from(queue) + u64::from(complete)) * self.stride
    }

    /// Carries out commands; returns whether there were any.
    fn serve(&mut self) -> bool {
        let mut any = false;
        let evil = *self.shared.evil.lock();
        if let (Evil::Dice(_), false) = (evil, self.late.is_empty()) {
            // By then the driver most likely has its buffer back.
            self.bus.rest();
            thread::sleep(Duration::from_millis(20));
            self.bus.quiet();
        }
        if evil != Evil::Late {
            any = self.try_late();
        }
        for id in self.submit.keys().copied().collect::<Vec<_>>() {
            let tail = self.shared.get(self.doorbell(id, false));
            let mut fetched = Vec::new();
            while let Some(queue) = self.submit.get_mut(&id) {
                if queue.head == tail % queue.entries {
                    break;
                }
                let at = queue.base + u64::from(queue.head) * 64;
                queue.head = (queue.head + 1) % queue.entries;
                let mut bytes = [0; 64];
                if !self.read(at, &mut bytes) {
                    continue;
                }
                let (words, _) = bytes.as_chunks::<4>();
                let mut command = [0; 16];
                command.iter_mut().zip(words).for_each(|(w, b)| *w = u32::from_le_bytes(*b));
                fetched.push(command);
            }
            any |= !fetched.is_empty();
            // In a different order than they came: a driver must not rely on it.
            if id > 0 {
                fetched.reverse();
            }
            for command in fetched {
                match id {
                    0 => self.admin(&command),
                    _ => self.io(id, &command),
                }
            }
        }
        any
    }

    /// Carries out commands that were completed before; returns whether there were any.
    fn try_late(&mut self) -> bool {
        let late = std::mem::take(&mut self.late);
        late.iter().for_each(|command| _ = self.transfer(command));
        !late.is_empty()
    }

    fn read(&mut self, at: u64, bytes: &mut [u8]) -> bool {
        let read = self.bus.read(at, bytes);
        self.note(read)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> bool {
        let written = self.bus.write(at, bytes);
        self.note(written)
    }

    fn note(&self, allowed: bool) -> bool {
        if !allowed {
            self.shared.stats.faults.fetch_add(1, Ordering::Release);
        }
        allowed
    }

    fn finish(&mut self, queue: u16, id: u16, result: u32, status: u16) {
        let Some(complete) = self.complete.get_mut(&queue) else { return };
        let at = complete.base + u64::from(complete.tail) * 16;
        let phase = u32::from(complete.phase);
        complete.tail += 1;
        if complete.tail == complete.entries {
            (complete.tail, complete.phase) = (0, !complete.phase);
        }
        let last = u32::from(id) | phase << 16 | u32::from(status) << 17;
        let mut first = [0; 12];
        first[..4].copy_from_slice(&result.to_le_bytes());
        let _ = self.write(at, &first) && self.write(at + 12, &last.to_le_bytes());
    }

    fn admin(&mut self, command: &Command) {
        const INVALID: u16 = 2;
        let id = (command[0] >> 16) as u16;
        let (queue, last) = (command[10] as u16, command[10] >> 16);
        let data = u64::from(command[6]) | u64::from(command[7]) << 32;
        let mut result = 0;
        let status = match command[0] as u8 {
            5 if queue > 0 && queue <= QUEUES && last < ENTRIES => {
                self.shared.put(self.doorbell(queue, true), 0);
                let made = Complete { base: data, entries: last + 1, tail: 0, phase: true };
                self.complete.insert(queue, made);
                0
            }
            1 if self.complete.contains_key(&((command[11] >> 16) as u16)) => {
                self.shared.put(self.doorbell(queue, false), 0);
                let complete = (command[11] >> 16) as u16;
                let made = Submit { base: data, entries: last + 1, head: 0, complete };
                self.submit.insert(queue, made);
                0
            }
            0 if self.character.deletes && self.submit.remove(&queue).is_some() => {
                let stats = &self.shared.stats;
                stats.mapped_at_stop.store(self.bus.mapped(), Ordering::Release);
                0
            }
            4 if self.complete.remove(&queue).is_some() => 0,
            6 => {
                let page = self.identify(command[10] as u8, command[1]);
                u16::from(!self.write(data, &page)) * 4
            }
            9 => {
                result = u32::from(QUEUES - 1) << 16 | u32::from(QUEUES - 1);
                0
            }
            _ => INVALID,
        };
        self.finish(0, id, result, status);
    }

    fn identify(&mut self, about: u8, _namespace: u32) -> [u8; 4096] {
        let mut page = [0; 4096];
        if let Some(seed) = self.character.identify {
            self.dice = seed.wrapping_add(about.into()) | 1;
            page.fill_with(|| self.roll() as u8);
            return page;
        }
        match about {
            0 => {
                let blocks = (self.shared.disk.lock().len() / BLOCK) as u64;
                page[..8].copy_from_slice(&blocks.to_le_bytes());
                page[128 + 2] = 9;
            }
            1 => {
                page[4..24].copy_from_slice(b"software            ");
                page[24..64].copy_from_slice(b"a disk for tests                        ");
                page[77] = self.character.mdts;
                page[520] = 4;
                page[525] = 1;
            }
            _ => page[0] = 1,
        }
        page
    }

    fn roll(&mut self) -> u64 {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.dice >> 33
    }

    fn io(&mut self, queue: u16, command: &Command) {
        self.shared.stats.commands.fetch_add(1, Ordering::Release);
        let complete = self.submit.get(&queue).map_or(0, |queue| queue.complete);
        let id = (command[0] >> 16) as u16;
        let evil = *self.shared.evil.lock();
        let evil = match evil {
            Evil::None => {
                self.try_late();
                Evil::None
            }
            Evil::Dice(seed) => {
                self.dice ^= seed;
                match self.roll() % 32 {
                    0 => Evil::Stray(self.roll() as u16),
                    1 => Evil::Twice,
                    2 => Evil::Late,
                    3 => Evil::Flood(self.roll() as u32),
                    4 => Evil::Fatal,
                    5..8 => Evil::Status(self.roll() as u16),
                    _ => Evil::None,
                }
            }
            evil => evil,
        };
        match evil {
            Evil::None | Evil::Dice(_) => {
                let status = self.transfer(command);
                self.finish(complete, id, 0, status);
            }
            Evil::Stray(id) => self.finish(complete, id, 0, 0),
            Evil::Twice => {
                let status = self.transfer(command);
                self.finish(complete, id, 0, status);
                self.finish(complete, id, 0, status);
            }
            Evil::Late => {
                self.finish(complete, id, 0, 0);
                self.late.push(*command);
            }
            Evil::Silent => {}
            Evil::Fatal => self.shared.put(CSTS, self.shared.get(CSTS) | 2),
            Evil::Gone => self.shared.gone.store(true, Ordering::Release),
            Evil::Flood(word) => {
                let Some(queue) = self.complete.get(&complete) else { return };
                let (base, entries) = (queue.base, queue.entries);
                let (tail, new) = (queue.tail, queue.phase);
                for n in 0..entries {
                    // New in this lap and in the next.
                    let phase = if n < tail { !new } else { new };
                    let last = word.wrapping_add(n) & !(1 << 16) | u32::from(phase) << 16;
                    let _ = self.write(base + u64::from(n) * 16 + 12, &last.to_le_bytes());
                }
            }
            Evil::Status(status) => self.finish(complete, id, 0, status & 0x7fff),
        }
    }

    /// The pages of a command's data, with the length used in each.
    fn pages(&mut self, command: &Command, len: u64) -> Option<Vec<(u64, usize)>> {
        let long = |at: usize| u64::from(command[at]) | u64::from(command[at + 1]) << 32;
        let (first, second) = (long(6), long(8));
        let in_first = (4096 - first % 4096).min(len);
        let mut pages = vec![(first, in_first as usize)];
        let mut left = len - in_first;
        let more = left.div_ceil(4096);
        let mut list = vec![0; more as usize * 8];
        if more == 1 {
            list.copy_from_slice(&second.to_le_bytes());
        } else if more > 1 && !self.read(second, &mut list) {
            return None;
        }
        let (entries, _) = list.as_chunks::<8>();
        for entry in entries {
            let page = u64::from_le_bytes(*entry);
            if page % 4096 != 0 {
                return None;
            }
            pages.push((page, left.min(4096) as usize));
            left = left.saturating_sub(4096);
        }
        Some(pages)
    }

    /// Carries out a command; returns its status.
    fn transfer(&mut self, command: &Command) -> u16 {
        const RANGE: u16 = 0x80;
        const TRANSFER: u16 = 4;
        let lba = u64::from(command[10]) | u64::from(command[11]) << 32;
        let opcode = command[0] as u8;
        if opcode == 0 {
            self.shared.stats.flushes.fetch_add(1, Ordering::Release);
            return 0;
        }
        if opcode == 9 {
            let data = u64::from(command[6]) | u64::from(command[7]) << 32;
            let mut range = [0; 16];
            if !self.read(data, &mut range) || command[10] != 0 || command[11] != 4 {
                return TRANSFER;
            }
            let blocks = u32::from_le_bytes([range[4], range[5], range[6], range[7]]) as usize;
            let (_, lba) = range.split_at(8);
            let lba = u64::from_le_bytes(lba.try_into().unwrap()) as usize;
            let mut disk = self.shared.disk.lock();
            return match disk.get_mut(lba * BLOCK..(lba + blocks) * BLOCK) {
                Some(part) => {
                    part.fill(0);
                    0
                }
                None => RANGE,
            };
        }
        let len = ((command[12] & 0xffff) as usize + 1) * BLOCK;
        let size = self.shared.disk.lock().len() as u64;
        if lba.checked_mul(BLOCK as u64).is_none_or(|at| at + len as u64 > size) {
            return RANGE;
        }
        let Some(pages) = self.pages(command, len as u64) else { return TRANSFER };
        let mut at = lba as usize * BLOCK;
        for (page, len) in pages {
            if opcode == 2 {
                let bytes = self.shared.disk.lock()[at..at + len].to_vec();
                if !self.write(page, &bytes) {
                    return TRANSFER;
                }
            } else {
                let mut bytes = vec![0; len];
                if !self.read(page, &mut bytes) {
                    return TRANSFER;
                }
                self.shared.disk.lock()[at..at + len].copy_from_slice(&bytes);
            }
            at += len;
        }
        0
    }
}
