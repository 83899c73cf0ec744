//! Devices that serve requests.

use std::{
    collections::VecDeque,
    error::Error,
    io,
    os::unix::net::UnixListener,
    ptr::NonNull,
    sync::{Arc, OnceLock},
};

use parking_lot::Mutex;
use ringfence_iommu::shootdown::Lease;
use ringfence_iotlb::IotlbConfig;
use ringfence_mem::{Access, HostSlice, Memory, Translate};
use ringfence_run::{
    event::Doorbell,
    worker::{Notify, Worker},
};
use ringfence_vhost_user::{HandlerError, Offer, ProtocolFeatures, Server, Shutdown};
use ringfence_virtq::{Chain, Desc};

use crate::{
    Addresses, Backend, Bus, Common, RawDevice, RingLog, RingStart, read_config,
    requests::{Advance, Missing, Next, RequestFigures, RequestRings, RequestUnit, Serve, Slot},
};

/// A device that receives requests, one after the other, and completes them at any time, in any
/// order.
///
/// It never sees an address: all buffers of a request are translated and checked before, and stay
/// valid until it is completed, however long that takes: an unmap waits for it. When its connection
/// has ended, a request that is still there has no buffers any more. A missing translation parks
/// the request, not the worker.
///
/// A request may be given to the device again: by another process that takes over after a crash of
/// this one or, when a guest migrates, at the destination.
///
/// [`Requests::backend`] makes it a vhost-user back end.
#[allow(unused_variables, reason = "defaults that do nothing")]
pub trait Device: Send + 'static {
    /// How many queues it has.
    fn queues(&self) -> u16 {
        1
    }
    /// The features that it offers besides those of rings (virtio 1.3, bits 0 to 23 and from 50
    /// on), as a mask.
    fn features(&self) -> u64 {
        0
    }
    /// Its configuration space; empty: none.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }
    /// The most bytes that the buffers of a request may have together: a larger request fails.
    fn most_bytes(&self) -> u64 {
        1 << 20
    }
    /// Serves a request of a queue, or begins to. A worker calls it and does nothing else
    /// meanwhile: slow work goes elsewhere, with the request.
    fn request(&mut self, queue: u16, request: Request);
    /// The driver stops a queue, and waits until all its requests are completed: complete those
    /// that wait for something that may never come.
    fn stop(&mut self, queue: u16) {}
}

/// The largest ring of a [`Device`].
const RING_SIZE: u16 = 256;

/// A piece of a buffer in this process.
struct Piece {
    at: NonNull<u8>,
    len: usize,
}

/// The buffers of a request.
#[derive(Default)]
struct Buffers {
    readable: Vec<Piece>,
    writable: Vec<Piece>,
    /// Keep the translations valid.
    leases: Vec<Lease>,
    /// Keeps the pieces mapped.
    memory: Option<Arc<Memory>>,
}

// SAFETY: the pieces lie in shared memory that `memory` keeps mapped wherever they go, and are only
// ever copied from and to.
unsafe impl Send for Buffers {}

impl Buffers {
    /// Translates all buffers of a chain, or none. Leases come first: an invalidation cannot then
    /// overlook what is translated after them.
    fn translate(chain: &Chain, bus: &Bus) -> Result<Buffers, ringfence_mem::AccessError> {
        let mut buffers = Buffers { memory: Some(Arc::clone(bus.memory())), ..Buffers::default() };
        for &Desc { addr, len, write } in chain.descs() {
            buffers.leases.extend(bus.lease(addr, len.into()));
            let (access, pieces) = match write {
                false => (Access::Read, &mut buffers.readable),
                true => (Access::Write, &mut buffers.writable),
            };
            bus.slices(addr, len.into(), access, |slice| {
                let at = NonNull::new(slice.as_ptr()).expect("mapped memory is not at 0");
                pieces.push(Piece { at, len: slice.len() });
            })?;
        }
        Ok(buffers)
    }
}

/// The parts of `pieces` that hold `len` bytes from `skip` on.
fn parts(pieces: &[Piece], mut skip: usize, mut len: usize) -> impl Iterator<Item = HostSlice<'_>> {
    pieces.iter().filter_map(move |piece| {
        let from = skip.min(piece.len);
        let part = len.min(piece.len - from);
        (skip, len) = (skip - from, len - part);
        // SAFETY: `Buffers` keeps the memory mapped while the pieces are borrowed, and nothing
        // borrows the bytes.
        (part > 0).then(|| unsafe { HostSlice::new(piece.at.add(from), part) })
    })
}

/// The bytes of all `pieces` together.
fn len(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.len).sum()
}

/// A driver's request. Any thread may complete it, in any order; dropping it completes it with what
/// was written.
pub struct Request {
    /// Empty once the ring was given up.
    buffers: Arc<Mutex<Buffers>>,
    at: u16,
    read: usize,
    written: usize,
    ok: bool,
    returns: Arc<Returns>,
}

impl Request {
    /// How many bytes the driver has sent.
    pub fn readable_len(&self) -> usize {
        len(&self.buffers.lock().readable)
    }

    /// How many bytes the driver takes.
    pub fn writable_len(&self) -> usize {
        len(&self.buffers.lock().writable)
    }

    /// Reads the next bytes that the driver has sent; returns how many there were. The driver may
    /// change the buffer at any time: check what was read.
    pub fn read(&mut self, into: &mut [u8]) -> usize {
        let (buffers, mut done) = (self.buffers.lock(), 0);
        for part in parts(&buffers.readable, self.read, into.len()) {
            done += part.copy_to(&mut into[done..]);
        }
        self.read += done;
        done
    }

    /// Writes the next bytes that the driver takes; returns for how many there was room.
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        let (buffers, mut done) = (self.buffers.lock(), 0);
        for part in parts(&buffers.writable, self.written, bytes.len()) {
            done += part.copy_from(&bytes[done..]);
        }
        self.written += done;
        done
    }

    /// Completes the request: the driver learns how many bytes were written.
    pub fn complete(self) {}

    /// Completes the request as failed; `why` is for logs. The driver learns of the failure from
    /// the bytes that were written, if its kind of device has a status.
    pub fn fail(mut self, why: impl Error) {
        tracing::debug!("a request failed: {why}");
        self.ok = false;
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let buffers = std::mem::take(&mut *self.buffers.lock());
        let returned = Returned { at: self.at, ok: self.ok, written: self.written, buffers };
        self.returns.done.lock().push_back(returned);
        if let Some(bell) = self.returns.bell.get() {
            bell.ring();
        }
    }
}

/// A request that was completed.
struct Returned {
    at: u16,
    ok: bool,
    written: usize,
    buffers: Buffers,
}

/// Where a ring's completed requests arrive.
#[derive(Default)]
struct Returns {
    done: Mutex<VecDeque<Returned>>,
    /// The worker's bell.
    bell: OnceLock<Arc<Doorbell>>,
}

/// Serves a ring of a [`Device`].
pub struct DeviceQueue<D> {
    device: Arc<Mutex<D>>,
    ring: u16,
    most_bytes: u64,
    returns: Arc<Returns>,
    /// Completed requests: the number, whether it succeeded, how many bytes were written.
    done: VecDeque<(u16, bool, usize)>,
    /// How many bytes were written of the request that goes on.
    written: usize,
    /// How many requests the device has.
    in_device: u32,
    bytes: u64,
}

/// The buffers of a request that the device has. Dropping it removes them: the device no longer
/// reaches memory through them, and no unmap waits.
pub struct HeldBuffers(Arc<Mutex<Buffers>>);

impl Drop for HeldBuffers {
    fn drop(&mut self) {
        // Not under the lock: dropping the last reference unmaps the memory.
        let buffers = std::mem::take(&mut *self.0.lock());
        drop(buffers);
    }
}

/// The state of a request that the device has, or has had.
#[derive(Default)]
pub enum Kept {
    /// It has not been given to the device.
    #[default]
    New,
    /// The device has it.
    Held(HeldBuffers),
    /// It was completed, with so many bytes.
    Done {
        /// Whether it succeeded.
        ok: bool,
        /// How many bytes were written.
        written: u32,
    },
}

impl<D: Device> Serve for DeviceQueue<D> {
    type Request = Kept;
    const NAME: &'static str = "the device";
    const KEEPS: bool = false;

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn advance(&mut self, request: &mut Kept, Advance { at, chain, bus, .. }: Advance<'_>) -> Next {
        if let Kept::Done { ok, written } = *request {
            return Next::Done { ok, used: written };
        }
        if chain.readable_len() + chain.writable_len() > self.most_bytes {
            return Next::Done { ok: false, used: 0 };
        }
        let buffers = match Buffers::translate(chain, bus) {
            Ok(buffers) => buffers,
            Err(error) => {
                let failed = Next::Done { ok: false, used: 0 };
                return Missing::of(error).map_or(failed, Next::Missing);
            }
        };
        let (buffers, returns) = (Arc::new(Mutex::new(buffers)), Arc::clone(&self.returns));
        *request = Kept::Held(HeldBuffers(Arc::clone(&buffers)));
        self.in_device += 1;
        let taken = Request { buffers, at, read: 0, written: 0, ok: true, returns };
        self.device.lock().request(self.ring, taken);
        Next::Busy
    }

    fn completed(&mut self, _: u64, enough: bool) -> Option<(u16, bool)> {
        if enough {
            return None;
        }
        let (at, ok, written) = self.done.pop_front()?;
        self.written = written;
        Some((at, ok))
    }

    fn complete(&mut self, request: &mut Kept, ok: bool) {
        self.bytes += self.written as u64;
        // The buffers have at least as many bytes, and fewer than `u32::MAX`.
        let written = u32::try_from(self.written).unwrap_or(u32::MAX);
        *request = Kept::Done { ok, written };
    }

    fn fail(&mut self, _: &mut Kept, _: &Chain, _: &Bus) -> (bool, u32) {
        (false, 0)
    }

    fn end(&mut self, request: &mut Kept) {
        *request = Kept::New;
    }

    fn is_begun(&self, request: &Kept) -> bool {
        !matches!(request, Kept::New)
    }

    /// Takes completed requests: from now on no unmap waits for them.
    fn reap(&mut self, _: &mut [Slot<Kept>], log: &RingLog) -> bool {
        let returned = std::mem::take(&mut *self.returns.done.lock());
        let any = !returned.is_empty();
        for Returned { at, ok, written, buffers } in returned {
            parts(&buffers.writable, 0, written)
                .for_each(|part| log.mark_piece(buffers.memory.as_slice(), part));
            self.done.push_back((at, ok, written));
            self.in_device -= 1;
        }
        any
    }

    fn arm(&mut self) -> bool {
        !self.returns.done.lock().is_empty()
    }

    fn notify(&self, bell: &Arc<Doorbell>) -> io::Result<()> {
        let _ = self.returns.bell.set(Arc::clone(bell));
        Ok(())
    }

    fn in_kernel(&self) -> u32 {
        self.in_device
    }

    /// At once, if a round has left completed requests: no other event would wake the worker.
    fn next_due(&self) -> Option<u64> {
        (!self.done.is_empty()).then_some(0)
    }
}

/// A [`Device`] as a [`RawDevice`], for one connection.
pub struct Requests<D: Device> {
    device: Arc<Mutex<D>>,
    rings: RequestRings<DeviceQueue<D>>,
    figures: Arc<RequestFigures<DeviceQueue<D>>>,
}

impl<D: Device> Requests<D> {
    /// A device as a vhost-user back end. `workers` share its queues (queue n is that of worker n
    /// modulo their number), as their unit number `unit`, which no other back end has on these
    /// workers at the same time; `name` appears in messages.
    ///
    /// # Panics
    /// If there is no worker.
    pub fn backend(
        device: D,
        name: &str,
        addresses: Addresses,
        workers: Arc<[Worker]>,
        unit: u32,
    ) -> Backend<Requests<D>> {
        let figures = Arc::new(RequestFigures::new(device.queues()));
        let rings = RequestRings::new(Arc::from(name), workers, unit, Arc::clone(&figures));
        let device = Arc::new(Mutex::new(device));
        Backend::new(Requests { device, rings, figures }, addresses)
    }

    /// The device's figures.
    pub fn figures(&self) -> &Arc<RequestFigures<DeviceQueue<D>>> {
        &self.figures
    }
}

impl<D: Device> RawDevice for Requests<D> {
    type Rings = RequestUnit<DeviceQueue<D>>;

    fn common(&self) -> Common<'_, Self::Rings> {
        self.rings.common()
    }

    fn offer(&self) -> Offer {
        let device = self.device.lock();
        let mut protocol = ProtocolFeatures::INFLIGHT_SHMFD;
        // QEMU warns about a configuration space that it does not use.
        protocol.set(ProtocolFeatures::CONFIG, !device.config().is_empty());
        let offer = Offer::new(device.features(), device.queues());
        Offer { protocol, max_ring_size: RING_SIZE, ..offer }
    }

    fn start(&mut self, ring: u16, start: RingStart) -> Result<(), HandlerError> {
        let device = Arc::clone(&self.device);
        let most_bytes = device.lock().most_bytes();
        let serve = DeviceQueue {
            device,
            ring,
            most_bytes,
            returns: Arc::default(),
            done: VecDeque::new(),
            written: 0,
            in_device: 0,
            bytes: 0,
        };
        self.rings.start(ring, start, |_| Ok(serve))
    }

    /// Waits for the device's requests as long as the front end is there: its memory is the
    /// device's until then.
    fn stop(&mut self, ring: u16, connection: Option<&Shutdown>) -> Result<u32, HandlerError> {
        self.device.lock().stop(ring);
        self.rings.stop(ring, || self.rings.is_given_up(connection).unwrap_or(false))
    }

    fn forget(&mut self) {
        self.rings.forget();
    }

    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        read_config(&self.device.lock().config(), offset, out)
    }

    fn reset(&mut self) {
        self.rings.set_inflight(None);
    }

    fn set_inflight(
        &mut self,
        inflight: Arc<ringfence_vhost_user::InflightRegion>,
    ) -> Result<(), HandlerError> {
        self.rings.set_inflight(Some(inflight));
        Ok(())
    }
}

/// Serves the front ends that connect to `listener`, one after the other, each by a device that
/// `device` makes, behind a device IOTLB. One worker thread serves the queues; `name` stands in
/// messages. A connection that ends in an error is logged (by `tracing`), and the next is accepted.
/// A front end that stays connected keeps all others waiting, even one that sends nothing.
///
/// A service that needs more (several sockets, silent peers, an orderly end, an upgrade under load)
/// makes its own [`Worker`]s and [`Server`]s, from [`Requests::backend`].
///
/// # Errors
/// The worker cannot be started, no connection can be accepted, or `device` failed.
pub fn serve<D: Device>(
    name: &str,
    listener: &UnixListener,
    iotlb: IotlbConfig,
    mut device: impl FnMut() -> io::Result<D>,
) -> io::Result<()> {
    let workers: Arc<[Worker]> = [Worker::spawn(name, Notify::Adaptive)?].into();
    loop {
        let (front_end, _) = listener.accept()?;
        let (device, addresses) = (device()?, Addresses::Iotlb(iotlb));
        let backend = Requests::backend(device, name, addresses, Arc::clone(&workers), 0);
        if let Err(error) = Server::new(front_end, backend).serve() {
            tracing::warn!("{name}: the connection has ended: {error}");
        }
    }
}
