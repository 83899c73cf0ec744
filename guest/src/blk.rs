//! The driver of a virtio disk, as far as a test needs one: one queue, polled.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use ringfence_mem::GuestRam;
use ringfence_vfio::kernel::Device;
use ringfence_virtq::{
    Desc, F_ACCESS_PLATFORM, F_VERSION_1,
    driver::{Queue, Rings},
    layout,
};

use crate::pci::{Notifier, Registers};

const SIZE: u16 = 64;
/// A request's header, and the byte after it in which the device says how it ended.
const HEADER: usize = 16;
const SLOT: usize = 32;
const OK: u8 = 0;
const PENDING: u8 = 0xff;
/// Longer than a device takes.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// A request.
#[derive(Clone, Copy)]
pub(crate) struct Io {
    /// To the disk, or from it.
    pub(crate) write: bool,
    /// In units of 512 bytes.
    pub(crate) sector: u64,
    /// Where the data lies for the device.
    pub(crate) addr: u64,
    /// Bytes.
    pub(crate) len: u32,
}

/// A disk that runs.
pub(crate) struct Disk {
    ram: Arc<GuestRam>,
    queue: Queue,
    notifier: Notifier,
    capacity: u64,
    /// Where the headers lie, one for each chain that there can be.
    slots: usize,
}

impl Disk {
    /// Starts the device; rings and headers lie in `ram`, which it can reach.
    pub(crate) fn start(device: &Device, ram: Arc<GuestRam>) -> Result<Disk> {
        let registers = Registers::find(device)?;
        registers.begin(F_VERSION_1 | F_ACCESS_PLATFORM)?;
        let at = layout::offsets(SIZE);
        let base = ram.carve(at.len, 4096)?;
        let mut queue =
            Queue::new(SIZE, Rings::in_window(&ram.window(base, at.len)?, SIZE)?, false)?;
        queue.suppress_notifications();
        let addr = |offset: usize| ram.gpa() + (base + offset) as u64;
        let notifier = registers.queue(SIZE, [addr(at.desc), addr(at.avail), addr(at.used)])?;
        registers.go()?;
        let slots = ram.carve(usize::from(SIZE) * SLOT, SLOT)?;
        Ok(Disk { capacity: registers.own_number()?, ram, queue, notifier, slots })
    }

    /// In units of 512 bytes.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(crate) fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Memory for data; its offset.
    pub(crate) fn carve(&self, len: usize) -> Result<usize> {
        Ok(self.ram.carve(len, 4096)?)
    }

    /// Carries out requests, as many at a time as fit, all of which must succeed.
    pub(crate) fn all(&mut self, requests: impl IntoIterator<Item = Io>) -> Result<()> {
        let mut requests = requests.into_iter().peekable();
        let mut free: Vec<usize> = (0..usize::from(SIZE) / 3).collect();
        let (mut under_way, begun) = (0, Instant::now());
        while under_way > 0 || requests.peek().is_some() {
            while let Some(slot) = free.pop() {
                let Some(io) = requests.next() else {
                    free.push(slot);
                    break;
                };
                self.add(io, slot)?;
                under_way += 1;
            }
            self.submit()?;
            while let Some(used) = self.queue.pop().context("the device broke the ring")? {
                let slot = used.token as usize;
                let status = self.status(slot)?;
                ensure!(status == OK, "a request ended with status {status}");
                free.push(slot);
                under_way -= 1;
            }
            ensure!(begun.elapsed() < LIMIT, "{under_way} requests do not end");
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Carries out one request; whether it succeeded.
    pub(crate) fn one(&mut self, io: Io, limit: Duration) -> Result<bool> {
        self.add(io, 0)?;
        self.submit()?;
        let begun = Instant::now();
        while self.queue.pop().context("the device broke the ring")?.is_none() {
            if begun.elapsed() > limit {
                bail!("a request did not end in {limit:?}");
            }
            std::thread::yield_now();
        }
        Ok(self.status(0)? == OK)
    }

    fn add(&mut self, io: Io, slot: usize) -> Result<()> {
        let at = self.slots + slot * SLOT;
        let mut header = [0; HEADER + 1];
        header[0] = u8::from(io.write);
        header[8..16].copy_from_slice(&io.sector.to_le_bytes());
        header[16] = PENDING;
        self.ram.slice(at, header.len())?.copy_from(&header);
        let addr = self.ram.gpa() + at as u64;
        let chain = [
            Desc { addr, len: HEADER as u32, write: false },
            Desc { addr: io.addr, len: io.len, write: !io.write },
            Desc { addr: addr + HEADER as u64, len: 1, write: true },
        ];
        Ok(self.queue.add(&chain, slot as u64)?)
    }

    fn submit(&mut self) -> Result<()> {
        self.queue.publish();
        if self.queue.needs_kick() { self.notifier.kick() } else { Ok(()) }
    }

    fn status(&self, slot: usize) -> Result<u8> {
        let mut status = [0];
        self.ram.slice(self.slots + slot * SLOT + HEADER, 1)?.copy_to(&mut status);
        Ok(status[0])
    }
}
