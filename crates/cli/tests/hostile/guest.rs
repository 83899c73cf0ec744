//! A guest's memory, and rings in it, written byte by byte.

use std::{
    fs::File,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{fs::FileExt as _, net::UnixStream},
    },
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, memfd_create},
};

use crate::{
    common::LIMIT,
    pending::Pending,
    wire::{Client, addresses, request, state, words},
};

/// The address of an attacker's memory in the guest and also, so that there is only one kind of
/// address, in its front end.
pub(crate) const BASE: u64 = 2 << 20;
/// The address of other machines' memory: memories of one service must not contradict each other.
pub(crate) const OTHER: u64 = 32 << 20;
pub(crate) const IOMMU: u64 = 64 << 20;
pub(crate) const SIZE: u64 = 1 << 20;
/// Descriptors of a ring.
pub(crate) const RING: u16 = 64;
/// The address of data: below it there are 16 KiB for each ring.
pub(crate) const DATA: u64 = BASE + (256 << 10);

pub(crate) const INDIRECT_DESC: u64 = 1 << 28;
pub(crate) const LOG_ALL: u64 = 1 << 26;
pub(crate) const PROTOCOL: u64 = 1 << 30;
pub(crate) const VERSION_1: u64 = 1 << 32;
pub(crate) const PLATFORM: u64 = 1 << 33;
pub(crate) const PACKED: u64 = 1 << 34;

/// Flags of a descriptor.
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

pub(crate) struct Ram {
    pub(crate) file: File,
    base: u64,
}

impl Ram {
    pub(crate) fn new() -> Ram {
        Ram::at(BASE)
    }

    fn at(base: u64) -> Ram {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(SIZE).unwrap();
        Ram { file, base }
    }

    pub(crate) fn put(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at - self.base).unwrap();
    }

    pub(crate) fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, at - self.base).unwrap();
        bytes
    }

    /// `struct vhost_memory` with only this memory.
    pub(crate) fn table(&self) -> Vec<u8> {
        words(&[1, self.base, SIZE, self.base, 0])
    }

    /// The address of data.
    pub(crate) fn data(&self) -> u64 {
        self.base + (DATA - BASE)
    }
}

/// A descriptor of a split ring: address, length, flags, next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Desc(pub(crate) u64, pub(crate) u32, pub(crate) u16, pub(crate) u16);

impl Desc {
    pub(crate) fn bytes(self) -> Vec<u8> {
        let Desc(addr, len, flags, next) = self;
        let addr = addr.to_le_bytes();
        [&addr[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    }
}

/// A split ring.
pub(crate) struct Ring {
    pub(crate) index: u32,
    base: u64,
    pub(crate) kick: OwnedFd,
    pub(crate) available: u16,
    taken: u16,
    /// The process of which is measured for how long it holds up a request, and the longest time.
    pub(crate) service: Option<u32>,
    pub(crate) held_up: Duration,
}

impl Ring {
    pub(crate) fn new(index: u32) -> Ring {
        Ring::at(BASE, index)
    }

    fn at(base: u64, index: u32) -> Ring {
        let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (service, held_up) = (None, Duration::ZERO);
        Ring { index, base, kick, available: 0, taken: 0, service, held_up }
    }

    pub(crate) fn descs(&self) -> u64 {
        self.base + (u64::from(self.index) << 14)
    }

    pub(crate) fn avail(&self) -> u64 {
        self.descs() + 0x1000
    }

    pub(crate) fn used(&self) -> u64 {
        self.descs() + 0x2000
    }

    pub(crate) fn addresses(&self) -> Vec<u8> {
        addresses(self.index, 0, [self.descs(), self.used(), self.avail(), 0])
    }

    /// Puts descriptors into the table.
    pub(crate) fn place(&self, ram: &Ram, at: u16, descs: &[Desc]) {
        let bytes: Vec<u8> = descs.iter().flat_map(|desc| desc.bytes()).collect();
        ram.put(self.descs() + 16 * u64::from(at), &bytes);
    }

    /// Makes it continue where another ring is said to have stopped.
    pub(crate) fn goes_on_at(&mut self, ram: &Ram, base: u16) {
        ram.put(self.avail() + 2, &base.to_le_bytes());
        ram.put(self.used() + 2, &base.to_le_bytes());
        (self.available, self.taken) = (base, base);
    }

    /// Makes a chain available in a packed ring, at a position with its wrap counter in the highest
    /// bit.
    pub(crate) fn offer_packed(&self, ram: &Ram, place: u16, chain: &[Desc]) {
        let (first, lap) = (place & 0x7fff, place >> 15);
        // The head last: the device looks at it first.
        for (from_head, &Desc(addr, len, flags, _)) in chain.iter().enumerate().rev() {
            let at = first.wrapping_add(from_head as u16);
            let lap = lap ^ u16::from(at >= RING);
            let available = if lap == 1 { 1 << 7 } else { 1 << 15 };
            self.place(ram, at % RING, &[Desc(addr, len, 0, flags | available)]);
        }
        self.kick();
    }

    /// Makes a chain available.
    pub(crate) fn offer(&mut self, ram: &Ram, head: u16) {
        let slot = u64::from(self.available % RING);
        ram.put(self.avail() + 4 + 2 * slot, &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        ram.put(self.avail() + 2, &self.available.to_le_bytes());
        self.kick();
    }

    pub(crate) fn kick(&self) {
        // It may be full: then no write is needed.
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
    }

    /// The next completed chain, and how many bytes were written.
    pub(crate) fn take(&mut self, ram: &Ram) -> Option<(u32, u32)> {
        if u16::from_le_bytes(ram.get(self.used() + 2)) == self.taken {
            return None;
        }
        let at = self.used() + 4 + 8 * u64::from(self.taken % RING);
        self.taken = self.taken.wrapping_add(1);
        Some((u32::from_le_bytes(ram.get(at)), u32::from_le_bytes(ram.get(at + 4))))
    }

    /// Gives the device time to look at what was offered: it may also refuse it, and stop.
    pub(crate) fn settle(&mut self, ram: &Ram) {
        for _ in 0..20 {
            // In a packed ring these bytes are not an index: any value may be there.
            (0..RING).map_while(|_| self.take(ram)).for_each(drop);
            if self.taken == self.available {
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Waits for the next completed chain.
    pub(crate) fn wait(&mut self, ram: &Ram) -> (u32, u32) {
        let (begun, mut pending) = (Instant::now(), Pending::default());
        loop {
            if let Some(taken) = self.take(ram) {
                let held_up = self.service.map(|service| pending.held_up(service));
                self.held_up = self.held_up.max(held_up.unwrap_or_default());
                return taken;
            }
            assert!(begun.elapsed() < LIMIT, "a request is not completed");
            pending.pause(self.service);
        }
    }
}

/// A connection with features and memory set.
pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) ram: Ram,
    pub(crate) features: u64,
}

impl Session {
    /// With all features of `wanted` that the device has, and every protocol feature.
    pub(crate) fn open(path: &Path, wanted: u64) -> Session {
        Session::open_at(BASE, path, wanted)
    }

    /// The same, with memory at another address.
    pub(crate) fn open_at(base: u64, path: &Path, wanted: u64) -> Session {
        Session::try_open(base, path, wanted).expect("the device serves the next front end")
    }

    fn try_open(base: u64, path: &Path, wanted: u64) -> Option<Session> {
        let client = Client::connect(path);
        let features = client.number(request::GET_FEATURES)? & (wanted | VERSION_1 | PROTOCOL);
        let protocol = client.number(request::GET_PROTOCOL_FEATURES)?;
        client.send(request::SET_PROTOCOL_FEATURES, &words(&[protocol]), &[]);
        assert!(client.set(request::SET_OWNER, &[], &[]));
        assert!(client.set(request::SET_FEATURES, &words(&[features]), &[]));
        let ram = Ram::at(base);
        assert!(client.set(request::SET_MEM_TABLE, &ram.table(), &[ram.file.as_fd()]));
        Some(Session { client, ram, features })
    }

    /// Gives the back end a channel; returns the front end's end.
    pub(crate) fn give_channel(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(self.client.set(request::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]));
        ours
    }

    /// A running ring, unless the device has ended the connection.
    pub(crate) fn ring(&self, index: u32) -> Ring {
        let ring = Ring::at(self.ram.base, index);
        self.start(&ring, 0);
        ring
    }

    pub(crate) fn start(&self, ring: &Ring, base: u32) -> bool {
        self.place(ring, base, RING.into()) && self.run(ring)
    }

    /// Sets a ring's addresses, base and length.
    pub(crate) fn place(&self, ring: &Ring, base: u32, len: u32) -> bool {
        let set = |request, payload: &[u8]| self.client.set(request, payload, &[]);
        set(request::SET_VRING_NUM, &state(ring.index, len))
            && set(request::SET_VRING_BASE, &state(ring.index, base))
            && set(request::SET_VRING_ADDR, &ring.addresses())
    }

    /// Starts a ring that has its addresses.
    pub(crate) fn run(&self, ring: &Ring) -> bool {
        let Ring { index, kick, .. } = ring;
        let (kick, number) = ([kick.as_fd()], words(&[(*index).into()]));
        self.client.set(request::SET_VRING_KICK, &number, &kick)
            && self.client.set(request::SET_VRING_ENABLE, &state(*index, 1), &[])
    }

    /// Stops a ring; returns its position.
    pub(crate) fn stop(&self, index: u32) -> Option<u32> {
        let reply = self.client.call(request::GET_VRING_BASE, &state(index, 0))?;
        Some(u32::from_ne_bytes(reply.get(4..8)?.try_into().unwrap()))
    }
}
