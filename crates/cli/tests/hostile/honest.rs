//! Honest front ends and drivers: the service that they get is checked by its bytes.

use std::{
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::{
    common::LIMIT,
    guest::{BASE, Desc, NEXT, OTHER, PLATFORM, RING, Ring, Session, WRITE},
    wire::{in_flight, request::SET_INFLIGHT_FD},
};

/// The kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// A disk with its own process.
    Disk,
    /// A disk behind `guard`'s IOMMU, which it bypasses: there is no driver.
    Guarded,
    /// A network device with another one as its peer.
    Net,
}

impl Device {
    /// The features by which its driver reaches the guest's memory.
    pub(crate) fn features(self) -> u64 {
        if self == Device::Guarded { PLATFORM } else { 0 }
    }
}

const SECTOR: usize = 512;
/// Bytes of a frame, its header included.
const FRAME: usize = 12 + 64;

/// A driver of a disk.
pub(crate) struct DiskDriver {
    pub(crate) session: Session,
    pub(crate) ring: Ring,
}

impl DiskDriver {
    pub(crate) fn start(base: u64, path: &Path, device: Device) -> DiskDriver {
        let session = Session::open_at(base, path, device.features());
        let ring = session.ring(0);
        DiskDriver { session, ring }
    }

    /// One with a front end that keeps a record of requests in flight, so that another process can
    /// resume.
    fn start_recorded(base: u64, path: &Path, device: Device) -> DiskDriver {
        const BYTES: u64 = 8192;
        let session = Session::open_at(base, path, device.features());
        let record = memfd_create("in flight", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&record, BYTES).unwrap();
        let place = in_flight(BYTES, 0, 1, RING);
        assert!(session.client.set(SET_INFLIGHT_FD, &place, &[record.as_fd()]));
        let ring = session.ring(0);
        DiskDriver { session, ring }
    }

    /// Puts a request of one sector into the ring.
    pub(crate) fn submit(&mut self, kind: u32, sector: u64) {
        let ram = &self.session.ram;
        let at = ram.data();
        ram.put(at, &kind.to_le_bytes());
        ram.put(at + 8, &sector.to_le_bytes());
        ram.put(at + 16, &[0xff]);
        let data = if kind == 0 { NEXT | WRITE } else { NEXT };
        let chain = [
            Desc(at, 16, NEXT, 1),
            Desc(at + 4096, SECTOR as u32, data, 2),
            Desc(at + 16, 1, WRITE, 0),
        ];
        self.ring.place(ram, 0, &chain);
        self.ring.offer(ram, 0);
    }

    /// Waits for it; returns its status.
    pub(crate) fn finish(&mut self) -> u8 {
        assert_eq!(self.ring.wait(&self.session.ram).0, 0);
        self.session.ram.get::<1>(self.session.ram.data() + 16)[0]
    }

    /// Writes a sector of `byte` and reads it back.
    pub(crate) fn writes_and_reads(&mut self, sector: u64, byte: u8) {
        let at = self.session.ram.data() + 4096;
        self.session.ram.put(at, &[byte; SECTOR]);
        self.submit(1, sector);
        assert_eq!(self.finish(), 0);
        self.session.ram.put(at, &[!byte; SECTOR]);
        self.submit(0, sector);
        assert_eq!(self.finish(), 0);
        assert_eq!(self.session.ram.get::<SECTOR>(at), [byte; SECTOR]);
    }
}

/// A driver of a network device: sends frames that name their sender.
pub(crate) struct NetDriver {
    session: Session,
    receive: Ring,
    send: Ring,
    from: u8,
}

/// The address of a frame's buffer.
fn buffer(session: &Session, slot: u16) -> u64 {
    session.ram.data() + 4096 + 2048 * u64::from(slot)
}

impl NetDriver {
    pub(crate) fn start(base: u64, path: &Path, from: u8) -> NetDriver {
        let session = Session::open_at(base, path, 0);
        let (mut receive, send) = (session.ring(0), session.ring(1));
        for slot in 0..8 {
            receive.place(&session.ram, slot, &[Desc(buffer(&session, slot), 2048, WRITE, 0)]);
            receive.offer(&session.ram, slot);
        }
        NetDriver { session, receive, send, from }
    }

    fn frame(from: u8) -> [u8; FRAME] {
        let mut frame = [from; FRAME];
        frame[..12].fill(0);
        frame
    }

    /// Sends a frame, and waits until it is sent.
    pub(crate) fn sends(&mut self) {
        let ram = &self.session.ram;
        ram.put(ram.data(), &NetDriver::frame(self.from));
        self.send.place(ram, 0, &[Desc(ram.data(), FRAME as u32, 0, 0)]);
        self.send.offer(ram, 0);
        assert_eq!(self.send.wait(ram).0, 0);
    }

    /// Takes the received frames, each of which must be one of `from`; returns how many.
    pub(crate) fn receives(&mut self, from: u8) -> u32 {
        let mut count = 0;
        while let Some((slot, len)) = self.receive.take(&self.session.ram) {
            let slot = u16::try_from(slot).unwrap();
            // The header has the number of buffers.
            let mut expected = NetDriver::frame(from);
            expected[10] = 1;
            let found = self.session.ram.get::<FRAME>(buffer(&self.session, slot));
            // Frames that an attacker made the peer send are ignored: only an honest driver's are
            // checked.
            if len as usize == FRAME && found[12] == from {
                assert_eq!(found, expected);
                count += 1;
            }
            self.receive.offer(&self.session.ram, slot);
        }
        count
    }
}

/// The device's next front end, which must be served as if nothing had happened.
pub(crate) fn next_front_end(path: &Path, device: Device, number: u8) {
    match device {
        Device::Disk | Device::Guarded => {
            let mut driver = DiskDriver::start(BASE, path, device);
            for sector in 0..4 {
                driver.writes_and_reads(u64::from(number) * 4 + sector, number);
            }
            assert!(driver.session.stop(0).is_some());
        }
        Device::Net => {
            let mut driver = NetDriver::start(BASE, path, 1);
            let begun = Instant::now();
            let mut got = 0;
            while got < 8 {
                driver.sends();
                got += driver.receives(2);
                assert!(begun.elapsed() < LIMIT, "the neighbour's frames do not arrive");
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }
}

/// The name of a neighbour's thread.
pub(crate) const NEIGHBOUR: &str = "neighbour";

/// A driver of another device of the process, always at work.
pub(crate) struct Neighbour {
    shared: Arc<Shared>,
    working: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    over: AtomicBool,
    done: AtomicU64,
    /// How long each of its requests has taken since the last look, µs.
    took: Mutex<Vec<u64>>,
    /// The longest time, since then, for which the service has held up one, µs.
    held_up: AtomicU64,
}

impl Neighbour {
    pub(crate) fn start(path: PathBuf, device: Device) -> Neighbour {
        Neighbour::of(path, device, None)
    }

    /// One that measures for how long this process holds up its requests.
    pub(crate) fn of(path: PathBuf, device: Device, service: Option<u32>) -> Neighbour {
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        // The name identifies the thread whose placement matters for figures.
        let working = std::thread::Builder::new().name(NEIGHBOUR.into());
        let working = working.spawn(move || Neighbour::work(&own, &path, device, service));
        Neighbour { shared, working: Some(working.unwrap()) }
    }

    fn work(shared: &Shared, path: &Path, device: Device, service: Option<u32>) {
        let mut one: Box<dyn FnMut(u64) -> Duration> = if device == Device::Net {
            let mut driver = NetDriver::start(OTHER, path, 2);
            driver.send.service = service;
            Box::new(move |_| {
                driver.sends();
                driver.receives(1);
                std::mem::take(&mut driver.send.held_up)
            })
        } else {
            let mut driver = DiskDriver::start_recorded(OTHER, path, device);
            driver.ring.service = service;
            Box::new(move |count| {
                driver.writes_and_reads(count % 64, count as u8);
                std::mem::take(&mut driver.ring.held_up)
            })
        };
        while !shared.over.load(Ordering::Relaxed) {
            let begun = Instant::now();
            let held_up = one(shared.done.fetch_add(1, Ordering::Relaxed));
            shared.held_up.fetch_max(held_up.as_micros() as u64, Ordering::Relaxed);
            shared.took.lock().push(begun.elapsed().as_micros() as u64);
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// Waits for two more requests, the second of which began after this call; returns the longest
    /// time for which the service has held up one since the last call.
    pub(crate) fn held_up(&self) -> Duration {
        self.two_more();
        Duration::from_micros(self.shared.held_up.swap(0, Ordering::Relaxed))
    }

    /// How long each request has taken since the last call, µs, in order: at least two more.
    pub(crate) fn two_more(&self) -> Vec<u64> {
        let done = || self.shared.done.load(Ordering::Relaxed);
        let (begun, before) = (Instant::now(), done());
        while done() < before + 3 {
            let working = self.working.as_ref().unwrap();
            assert!(!working.is_finished(), "the neighbour has failed");
            assert!(begun.elapsed() < LIMIT, "the neighbour is not served");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::mem::take(&mut *self.shared.took.lock())
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        let ended = self.working.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}
