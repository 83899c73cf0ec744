//! Disks of the product behind a probe's IOMMU: a queue of requests over io_uring, on a pipe. A request goes
//! on when the probe writes into the pipe, or makes room in it.

use std::{
    fs::File,
    io::{Read, Write},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;
use ringfence_devices::{
    blk::{BlkQueue, BlkServer},
    disk::{Disk, DiskBuffers, Image},
};
use ringfence_mem::{Access, AccessError, Memory, Physical, Translate};
use ringfence_vhost_user_backend::Bus;
use ringfence_virtq::{
    Desc,
    blk::{HEADER_BYTES, Kind, SECTOR},
    driver, testing,
};
use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::ioctl_fionread,
    pipe::{PipeFlags, fcntl_setpipe_size, pipe_with},
};

use crate::pages::PAGE;

/// How much of a sector comes at once.
const HALF: usize = SECTOR as usize / 2;
/// Bytes of a request: its header, a sector of data, and its status.
pub(crate) const LEN: u64 = HEADER_BYTES as u64 + SECTOR + 1;

/// A request for a sector, and what becomes of it.
#[derive(Clone, Debug)]
pub(crate) struct Io {
    /// Whether the disk writes what it reads from memory.
    pub(crate) out: bool,
    /// Where the data is while the disk has it.
    pub(crate) buffers: DiskBuffers,
    /// What is read from the disk.
    pub(crate) data: [u8; SECTOR as usize],
    /// What was written to the disk.
    pub(crate) written: Arc<Mutex<Option<[u8; SECTOR as usize]>>>,
    /// Set before the pipe lets the request go on to its end.
    pub(crate) ends: Arc<AtomicBool>,
    /// Set when it has ended.
    pub(crate) over: Arc<AtomicBool>,
}

impl Io {
    /// Its header, for the driver to write.
    pub(crate) fn header(&self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        let kind = if self.out { Kind::Out } else { Kind::In };
        header[..4].copy_from_slice(&kind.code().to_le_bytes());
        header
    }
}

/// A disk that has one request at a time, and its driver.
pub(crate) struct Slow {
    // Dropped before the queue, which waits for what the kernel has.
    test: File,
    /// The device's end of the pipe, too.
    device: File,
    driver: driver::Queue,
    queue: BlkQueue,
    /// Its way to memory, if that is not the probe's: without leases.
    physical: Option<Bus>,
    /// The request, and when it is to end, once the disk has it.
    io: Option<(Io, Option<u64>)>,
}

impl Slow {
    /// A disk for requests such as `io`, with leases or without.
    pub(crate) fn new(io: &Io, memory: &Arc<Memory>, leases: bool) -> Slow {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        fcntl_setpipe_size(&write, PAGE as usize).unwrap();
        let (test, device) = if io.out { (read, write) } else { (write, read) };
        fcntl_setfl(&test, fcntl_getfl(&test).unwrap() | OFlags::NONBLOCK).unwrap();
        let image = Image::new(device.try_clone().unwrap(), 1 << 20);
        let own = io.buffers == DiskBuffers::Own;
        let image = if own { image.with_own_buffers() } else { image };
        let (driver, ring) = testing::pair(&testing::Ram::new(0, 1 << 12), 0, 16, false);
        let (disk, id) = (Disk::File(Arc::new(image)), Arc::from("slow"));
        let serve = BlkServer::new((&disk, false), &id, 16, Arc::default()).unwrap();
        let queue = BlkQueue::new(ring, serve, id, None);
        let physical = (!leases).then(|| Bus::Physical(Physical::new(Arc::clone(memory))));
        let (test, device) = (File::from(test), File::from(device));
        let mut slow = Slow { test, device, driver, queue, physical, io: None };
        slow.fill(io);
        slow
    }

    /// Leaves no room in the pipe of a disk that is written.
    fn fill(&mut self, io: &Io) {
        if io.out {
            self.device.write_all(&[0; PAGE as usize]).unwrap();
        }
    }

    /// Begins a request at `addr`, or goes on to: until the disk has it.
    pub(crate) fn begin(
        &mut self,
        io: &Io,
        addr: u64,
        bus: &Bus,
        (now_ns, until_ns): (u64, u64),
    ) -> Result<(), AccessError> {
        if self.io.is_none() {
            let data = addr + HEADER_BYTES as u64;
            self.submit(
                &[
                    Desc::readable(addr, HEADER_BYTES as u32),
                    Desc { addr: data, len: SECTOR as u32, write: !io.out },
                    Desc::writable(data + SECTOR, 1),
                ],
                bus,
            )?;
            self.io = Some((io.clone(), None));
        }
        self.poll(bus, now_ns);
        let access = if io.out { Access::Read } else { Access::Write };
        let Some((_, due)) = &mut self.io else {
            return Err(AccessError::Unmapped { addr, access });
        };
        if self.queue.in_kernel() == 0 {
            return Err(AccessError::Again { addr, access });
        }
        *due = Some(until_ns);
        if !io.out {
            // A part of the data ends nothing.
            self.test.write_all(&io.data[..HALF]).unwrap();
        }
        Ok(())
    }

    fn submit(&mut self, chain: &[Desc], bus: &Bus) -> Result<(), AccessError> {
        let mut descs = Vec::new();
        for &Desc { addr, len, write } in chain {
            if self.physical.is_none() {
                descs.push(Desc { addr, len, write });
                continue;
            }
            let access = if write { Access::Write } else { Access::Read };
            bus.slices(addr, len.into(), access, |piece| {
                let gpas = bus.memory().gpas(piece);
                descs.extend(gpas.map(|(addr, len)| Desc { addr, len: len as u32, write }));
            })?;
        }
        self.driver.add(&descs, 0).unwrap();
        self.driver.publish();
        Ok(())
    }

    /// Goes on with its request; true if it has one that is to end.
    pub(crate) fn poll(&mut self, bus: &Bus, now_ns: u64) -> bool {
        let Some((io, until_ns)) = &self.io else { return false };
        let due = until_ns.is_some_and(|until_ns| until_ns <= now_ns);
        if due && self.queue.in_kernel() > 0 && !io.ends.swap(true, Ordering::SeqCst) {
            match io.out {
                true => self.test.read_exact(&mut [0; PAGE as usize]).unwrap(),
                false => self.test.write_all(&io.data[HALF..]).unwrap(),
            }
        }
        let bus = self.physical.as_ref().unwrap_or(bus);
        // What is refused later is nothing that the program tries.
        bus.silently(|| self.queue.poll(bus, now_ns)).expect("the ring is right");
        if self.driver.pop().expect("the ring is right").is_some()
            && let Some((io, _)) = self.io.take()
        {
            if io.out {
                let mut sector = [0; SECTOR as usize];
                *io.written.lock() = self.test.read_exact(&mut sector).ok().map(|()| sector);
                self.fill(&io);
            } else {
                // Of one that was refused a part of its data, the rest.
                let left = ioctl_fionread(&self.device).unwrap();
                self.device.read_exact(&mut vec![0; left as usize]).unwrap();
            }
            io.over.store(true, Ordering::SeqCst);
        }
        due
    }

    /// When there is something to do for its request.
    pub(crate) fn next_due(&self) -> Option<u64> {
        self.io.as_ref()?.1
    }
}
