//! A driver of a disk with several requests under way, whose data say which write they are of.

use std::{os::fd::AsFd as _, rc::Rc};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::{
    guest::{Desc, NEXT, RING, Ring, Session, WRITE},
    wire::{in_flight, request::SET_INFLIGHT_FD},
};

pub(crate) const SECTOR: usize = 512;
/// The longest request, in sectors.
pub(crate) const LONGEST: u64 = 8;
/// How many requests may be under way.
pub(crate) const SLOTS: usize = 16;
/// Where a slot keeps its status and its data.
const STATUS: u64 = 64;
const BYTES: u64 = 4096;

pub(crate) const FLUSH: u64 = 1 << 9;
pub(crate) const CONFIG_WCE: u64 = 1 << 11;
pub(crate) const WRITE_ZEROES: u64 = 1 << 14;

/// Statuses of requests.
pub(crate) const OK: u8 = 0;
pub(crate) const ERROR: u8 = 1;
pub(crate) const UNSUPPORTED: u8 = 2;

/// Request types, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Kind {
    Read = 0,
    Write = 1,
    Flush = 4,
    Zero = 13,
}

/// A request of `count` sectors from `sector` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) kind: Kind,
    pub(crate) sector: u64,
    pub(crate) count: u64,
    /// The number of a write.
    pub(crate) number: u64,
}

impl Request {
    pub(crate) const FLUSH: Request = Request { kind: Kind::Flush, sector: 0, count: 0, number: 0 };

    pub(crate) fn sectors(&self) -> std::ops::Range<u64> {
        self.sector..self.sector + self.count
    }

    fn touches(&self, other: &Request) -> bool {
        self.sector < other.sector + other.count && other.sector < self.sector + self.count
    }
}

/// What fills a sector that is written.
pub(crate) fn word(sector: u64, number: u64) -> u64 {
    sector << 32 | number
}

/// The word that fills a sector; one that is filled by several is torn.
pub(crate) fn word_of(sector: &[u8]) -> u64 {
    let mut words = sector.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    let first = words.next().unwrap();
    assert!(words.all(|word| word == first), "a sector is torn: {sector:x?}");
    first
}

/// Numbers that are the same each time (`SplitMix64`).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % bound
    }
}

pub(crate) struct Writer {
    pub(crate) session: Rc<Session>,
    ring: Ring,
    under_way: [Option<Request>; SLOTS],
    /// What the sectors held that were read last.
    pub(crate) words: Vec<u64>,
}

impl Writer {
    pub(crate) fn start(session: Session) -> Writer {
        Writer::of(&Rc::new(session), 0)
    }

    /// One for each ring.
    pub(crate) fn of(session: &Rc<Session>, index: u32) -> Writer {
        let (session, ring) = (Rc::clone(session), session.ring(index));
        Writer { session, ring, under_way: [None; SLOTS], words: Vec::new() }
    }

    /// With a record of the requests in flight, so that another process can resume them.
    pub(crate) fn start_recorded(session: Session) -> Writer {
        const BYTES: u64 = 8192;
        let record = memfd_create("in flight", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&record, BYTES).unwrap();
        let place = in_flight(BYTES, 0, 1, RING);
        assert!(session.client.set(SET_INFLIGHT_FD, &place, &[record.as_fd()]));
        Writer::start(session)
    }

    fn at(&self, slot: usize) -> u64 {
        // Rings do not share slots.
        let number = self.ring.index as usize * SLOTS + slot;
        self.session.ram.data() + number as u64 * 2 * BYTES
    }

    /// Whether there is room for a request, and none is under way for the same sectors.
    pub(crate) fn admits(&self, request: &Request) -> bool {
        let touches = self.under_way.iter().flatten().any(|other| other.touches(request));
        !touches && self.under_way.contains(&None)
    }

    /// How many requests are under way.
    pub(crate) fn busy(&self) -> usize {
        self.under_way.iter().flatten().count()
    }

    pub(crate) fn submit(&mut self, request: Request) {
        let slot = self.under_way.iter().position(Option::is_none).expect("room");
        self.under_way[slot] = Some(request);
        let Request { kind, sector, count, number } = request;
        let (at, ram) = (self.at(slot), &self.session.ram);
        let mut header = [0; 16];
        header[..4].copy_from_slice(&(kind as u32).to_le_bytes());
        if matches!(kind, Kind::Read | Kind::Write) {
            header[8..].copy_from_slice(&sector.to_le_bytes());
        }
        ram.put(at, &header);
        ram.put(at + STATUS, &[0xff]);
        let data = match kind {
            Kind::Flush => Vec::new(),
            Kind::Read => vec![0xff; count as usize * SECTOR],
            Kind::Write => {
                let word = |sector| word(sector, number).to_le_bytes().repeat(SECTOR / 8);
                request.sectors().flat_map(word).collect()
            }
            // A range, without flags.
            Kind::Zero => [sector.to_le_bytes(), count.to_le_bytes()].concat(),
        };
        ram.put(at + BYTES, &data);
        let first = 3 * slot as u16;
        let flags = if kind == Kind::Read { NEXT | WRITE } else { NEXT };
        let mut chain = vec![Desc(at, 16, NEXT, first + 1)];
        if !data.is_empty() {
            chain.push(Desc(at + BYTES, data.len() as u32, flags, first + 2));
        }
        chain.push(Desc(at + STATUS, 1, WRITE, 0));
        self.ring.place(ram, first, &chain);
        self.ring.offer(ram, first);
    }

    /// A request that is completed, with its status.
    pub(crate) fn take(&mut self) -> Option<(Request, u8)> {
        let (head, _) = self.ring.take(&self.session.ram)?;
        Some(self.taken(head))
    }

    /// Waits for one.
    pub(crate) fn wait(&mut self) -> (Request, u8) {
        let (head, _) = self.ring.wait(&self.session.ram);
        self.taken(head)
    }

    fn taken(&mut self, head: u32) -> (Request, u8) {
        let slot = head as usize / 3;
        let request = self.under_way[slot].take();
        let request = request.unwrap_or_else(|| panic!("slot {slot} is completed twice"));
        let (at, ram) = (self.at(slot), &self.session.ram);
        let [status] = ram.get(at + STATUS);
        if request.kind == Kind::Read && status == OK {
            let word = |n| word_of(&ram.get::<SECTOR>(at + BYTES + n * SECTOR as u64));
            self.words = (0..request.count).map(word).collect();
        }
        (request, status)
    }

    /// Makes a request that completes next; returns its status.
    pub(crate) fn one(&mut self, kind: Kind, sector: u64, count: u64, number: u64) -> u8 {
        self.submit(Request { kind, sector, count, number });
        self.wait().1
    }
}
