//! A virtio-blk device behind the IOMMU: its DMA makes the accesses.

use std::{os::unix::net::UnixStream, path::PathBuf, sync::Arc, time::Duration};

use ringfence_mem::{GuestRam, Window};
use ringfence_vhost_user::{F_ACCESS_PLATFORM, Frontend, ProtocolFeatures};
use ringfence_virtio_iommu::kit::{ACCESS, Failed, Refused};
use ringfence_virtq::{
    Desc, F_VERSION_1,
    blk::{HEADER_BYTES, Kind, Status},
};

use super::{REPLY_TIMEOUT, at_step, broken, ring::Ring};

/// Descriptors in its ring.
const SIZE: u16 = 16;
/// The layout of the disk's own memory.
const HEADER: usize = 4096;
const STATUS: usize = HEADER + 64;
const STAGING: usize = HEADER + 1024;
/// Its size in bytes.
pub(super) const BYTES: usize = 8192;

/// A disk whose first sector is used.
pub(super) struct Disk {
    pub(super) endpoint: u32,
    socket: PathBuf,
    /// Of an access.
    timeout: Duration,
    front: Option<Frontend>,
    ring: Option<Ring>,
    ram: Arc<GuestRam>,
    /// Its own memory, and the guest-physical address of that.
    own: Window,
    gpa: u64,
    /// What was last written to the first sector, or read from it.
    sector: [u8; ACCESS],
}

impl Disk {
    /// Its own memory begins at `offset` in `ram`.
    pub(super) fn new(
        endpoint: u32,
        socket: PathBuf,
        ram: &Arc<GuestRam>,
        offset: usize,
    ) -> Result<Disk, Failed> {
        Ok(Disk {
            endpoint,
            socket,
            timeout: Duration::ZERO,
            front: None,
            ring: None,
            ram: Arc::clone(ram),
            own: ram.window(offset, BYTES).map_err(broken)?,
            gpa: ram.gpa() + offset as u64,
            sector: [0; ACCESS],
        })
    }

    /// Connects, unless it is connected.
    pub(super) fn connect(&mut self) -> Result<(), Failed> {
        if self.front.is_some() {
            return Ok(());
        }
        let at = self.socket.display();
        let stream = UnixStream::connect(&self.socket)
            .map_err(at_step(format!("connecting to the disk at {at}")))?;
        let mut front = Frontend::new(stream, REPLY_TIMEOUT);
        let features = F_VERSION_1 | F_ACCESS_PLATFORM;
        let offered = front.negotiate(features, ProtocolFeatures::REPLY_ACK).map_err(broken)?;
        if offered & F_ACCESS_PLATFORM == 0 {
            return Err(broken(format!(
                "the disk at {at} offers no ACCESS_PLATFORM: it is behind no IOMMU"
            )));
        }
        if offered & F_VERSION_1 == 0 {
            return Err(broken(format!("the disk at {at} does not offer VERSION_1")));
        }
        front.set_mem_table(&[(self.ram.region(), self.ram.fd())]).map_err(broken)?;
        self.front = Some(front);
        Ok(())
    }

    /// One access. The disk's own memory must be mapped at its guest-physical addresses. A disk that fails by
    /// itself counts as refused, too: from here it cannot be distinguished.
    pub(super) fn access(
        &mut self,
        iova: u64,
        write: bool,
        bytes: &mut [u8],
        timeout: Duration,
    ) -> Result<(), Refused> {
        self.timeout = timeout;
        let result = self.start().map_err(|_| Refused).and_then(|()| match write {
            true => self.write(iova, bytes),
            false => self.read(iova, bytes),
        });
        self.stop();
        result
    }

    fn start(&mut self) -> Result<(), Failed> {
        self.connect()?;
        let Some(front) = &mut self.front else { return Err(Failed::Timeout) };
        self.ring = Some(Ring::start(front, &self.own, (0, SIZE), self.gpa)?);
        Ok(())
    }

    /// Stops the ring, if it runs: the back end then uses none of the disk's memory.
    fn stop(&mut self) {
        self.ring = None;
        if self.front.as_mut().is_some_and(|front| front.get_vring_base(0).is_err()) {
            self.front = None;
        }
    }

    /// The endpoint writes: what the disk holds goes to memory.
    fn write(&mut self, iova: u64, bytes: &mut [u8]) -> Result<(), Refused> {
        // If the disk fails this with a status, it writes the sector's old content.
        self.own.write(STAGING, bytes);
        if self.transfer(Kind::Out, self.at(STAGING)).is_ok() {
            self.sector.copy_from_slice(bytes);
        }
        bytes.copy_from_slice(&self.sector);
        self.transfer(Kind::In, iova)
    }

    /// The endpoint reads: memory goes to the disk, and from there to us.
    fn read(&mut self, iova: u64, bytes: &mut [u8]) -> Result<(), Refused> {
        self.transfer(Kind::Out, iova)?;
        self.transfer(Kind::In, self.at(STAGING))?;
        self.own.read(STAGING, bytes);
        self.sector.copy_from_slice(bytes);
        Ok(())
    }

    /// The guest-physical address of its own memory's byte `at`.
    fn at(&self, at: usize) -> u64 {
        self.gpa + at as u64
    }

    /// Moves the first sector from or to `iova`.
    fn transfer(&mut self, kind: Kind, iova: u64) -> Result<(), Refused> {
        let mut header = [0; HEADER_BYTES];
        header[0] = kind.code() as u8;
        self.own.write(HEADER, &header);
        self.own.write(STATUS, &[0xff]);
        let data = Desc { addr: iova, len: ACCESS as u32, write: kind == Kind::In };
        let descs = [
            Desc::readable(self.at(HEADER), HEADER_BYTES as u32),
            data,
            Desc::writable(self.at(STATUS), 1),
        ];
        let Some(ring) = &mut self.ring else { return Err(Refused) };
        ring.submit(&descs, 0).map_err(|_| Refused)?;
        match ring.wait(self.timeout) {
            Ok(Some(_)) => {}
            // The device cannot reach its ring, or does not complete a failed access. Nor will it
            // complete later requests in this ring.
            _ => {
                self.ring = None;
                return Err(Refused);
            }
        }
        let mut status = [0xff];
        self.own.read(STATUS, &mut status);
        if status == [Status::Ok.code()] { Ok(()) } else { Err(Refused) }
    }
}
