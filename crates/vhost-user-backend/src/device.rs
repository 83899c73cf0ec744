//! Devices that are given requests.

use std::{
    collections::VecDeque,
    error::Error,
    io,
    ptr::NonNull,
    sync::{Arc, OnceLock},
};

use parking_lot::Mutex;
use ringfence_iommu::shootdown::Lease;
use ringfence_mem::{Access, HostSlice, Memory, Translate};
use ringfence_run::{
    event::{Bells, Doorbell},
    worker::Worker,
};
use ringfence_vhost_user::{HandlerError, ProtocolFeatures, Shutdown};
use ringfence_virtq::{Chain, Desc};

use crate::{
    Addresses, Backend, Bus, Connection, IotlbTally, RawDevice, RingLog, RingStart, Shares,
    requests::{Missing, Next, RequestFigures, RequestRings, RequestUnit, Serve, Slot},
};

/// A device that is given requests, one after the other, and completes them when it likes.
///
/// It never sees an address: all buffers of a request are translated and checked before, and stay what they are until it
/// is completed, however long that takes: an unmap waits for it. When its connection has ended, a request that is still
/// there has no buffers any more. A missing translation parks the request, not the worker.
///
/// A request may be given to the device again: by another process that goes on after a crash of this one or, where a
/// guest moves, at the other end.
///
/// [`Requests::backend`] makes it a vhost-user back end.
pub trait Device: Send + 'static {
    /// How many queues it has.
    fn queues(&self) -> u16 {
        1
    }
    /// The features that it offers beside those of rings (virtio 1.3, bits 0 to 23 and from 50 on).
    fn features(&self) -> u64 {
        0
    }
    /// Its configuration space; empty: it has none.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }
    /// The most bytes that the buffers of a request have together: one with more fails.
    fn most_bytes(&self) -> u64 {
        1 << 20
    }
    /// Serves a request of a queue, or begins to. Called by a worker, which does nothing else meanwhile: what takes long
    /// goes elsewhere, with the request.
    fn request(&mut self, queue: u16, request: Request);
    /// The driver takes a queue back, and waits until all requests of it are completed: those that wait for something that
    /// may never come are completed now.
    fn stop(&mut self, queue: u16) {
        let _ = queue;
    }
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
    /// Keep the translations as they are.
    leases: Vec<Lease>,
    /// Keeps the pieces mapped.
    memory: Option<Arc<Memory>>,
}

// SAFETY: the pieces lie in shared memory that `memory` keeps mapped wherever they go, and are only ever copied from and
// to.
unsafe impl Send for Buffers {}

impl Buffers {
    /// Translates all buffers of a chain, or nothing. Leases come first: what is translated after them is not invalidated
    /// unseen.
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

/// The parts of `pieces` that `len` bytes from `skip` on lie in.
fn parts(pieces: &[Piece], mut skip: usize, mut len: usize) -> impl Iterator<Item = HostSlice<'_>> {
    pieces.iter().filter_map(move |piece| {
        let from = skip.min(piece.len);
        let part = len.min(piece.len - from);
        (skip, len) = (skip - from, len - part);
        // SAFETY: `Buffers` keeps the memory mapped while the pieces are borrowed, and nothing borrows the bytes.
        (part > 0).then(|| unsafe { HostSlice::new(piece.at.add(from), part) })
    })
}

/// Bytes of `pieces` in all.
fn len(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.len).sum()
}

/// A request of a driver's. It is completed by any thread, in any order; dropped, it is completed with what was written.
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

    /// Reads what comes next of the bytes that the driver has sent; how many there were. The driver may change them
    /// at any time: what is to be checked is what was read.
    pub fn read(&mut self, into: &mut [u8]) -> usize {
        let (buffers, mut done) = (self.buffers.lock(), 0);
        for part in parts(&buffers.readable, self.read, into.len()) {
            done += part.copy_to(&mut into[done..]);
        }
        self.read += done;
        done
    }

    /// Writes what comes next of the bytes that the driver takes; for how many there was room.
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        let (buffers, mut done) = (self.buffers.lock(), 0);
        for part in parts(&buffers.writable, self.written, bytes.len()) {
            done += part.copy_from(&bytes[done..]);
        }
        self.written += done;
        done
    }

    /// It is done: the driver learns how many bytes were written.
    pub fn complete(self) {}

    /// It is done, and counts as failed; `why` is for logs. What the driver learns of it stands in the bytes that were
    /// written, if its kind of device has a status.
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

/// Where the requests of a ring come back.
#[derive(Default)]
struct Returns {
    done: Mutex<VecDeque<Returned>>,
    /// Rung for the worker.
    bell: OnceLock<Arc<Doorbell>>,
}

/// What serves a ring of a [`Device`].
pub struct Given<D> {
    device: Arc<Mutex<D>>,
    ring: u16,
    most_bytes: u64,
    returns: Arc<Returns>,
    /// What was completed: its number, whether it succeeded, how many bytes were written.
    done: VecDeque<(u16, bool, usize)>,
    /// Of the one that goes on, how many bytes were written.
    written: usize,
    /// How many the device has.
    away: u32,
    bytes: u64,
}

/// The buffers of a request that the device has. Dropped, there are none any more: neither does the device reach memory
/// by them, nor does an unmap wait.
pub struct Away(Arc<Mutex<Buffers>>);

impl Drop for Away {
    fn drop(&mut self) {
        // Not under the lock: the last to let go of memory unmaps it.
        let buffers = std::mem::take(&mut *self.0.lock());
        drop(buffers);
    }
}

/// What is kept of a request that the device has, or has had.
#[derive(Default)]
pub enum Kept {
    /// It has not been given to the device.
    #[default]
    New,
    /// The device has it.
    Away(Away),
    /// It was completed, with so many bytes.
    Done {
        /// Whether it succeeded.
        ok: bool,
        /// How many bytes were written.
        written: u32,
    },
}

impl<D: Device> Serve for Given<D> {
    type Request = Kept;
    const NAME: &'static str = "the device";
    const KEEPS: bool = false;

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn advance(&mut self, at: u16, request: &mut Kept, chain: &Chain, bus: &Bus, _: u64) -> Next {
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
        *request = Kept::Away(Away(Arc::clone(&buffers)));
        self.away += 1;
        let given = Request { buffers, at, read: 0, written: 0, ok: true, returns };
        self.device.lock().request(self.ring, given);
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
        // The buffers have as many at least, and they have fewer than that.
        let written = u32::try_from(self.written).unwrap_or(u32::MAX);
        *request = Kept::Done { ok, written };
    }

    fn fail(&mut self, _: &mut Kept, _: &Chain, _: &Bus) -> (bool, u32) {
        (false, 0)
    }

    fn end(&mut self, request: &mut Kept) {
        *request = Kept::New;
    }

    fn is_begun(request: &Kept) -> bool {
        !matches!(request, Kept::New)
    }

    /// Takes what was completed: from now on no unmap waits for it.
    fn reap(&mut self, _: &mut [Slot<Kept>], log: &RingLog) -> bool {
        let returned = std::mem::take(&mut *self.returns.done.lock());
        let any = !returned.is_empty();
        for Returned { at, ok, written, buffers } in returned {
            parts(&buffers.writable, 0, written)
                .for_each(|part| log.mark_piece(buffers.memory.as_slice(), part));
            self.done.push_back((at, ok, written));
            self.away -= 1;
        }
        any
    }

    fn has_returned(&self) -> bool {
        !self.returns.done.lock().is_empty()
    }

    fn notify(&self, bell: &Arc<Doorbell>) -> io::Result<()> {
        let _ = self.returns.bell.set(Arc::clone(bell));
        Ok(())
    }

    fn in_kernel(&self) -> u32 {
        self.away
    }

    /// What a round has left, which nothing would wake the worker for.
    fn next_due(&self) -> Option<u64> {
        (!self.done.is_empty()).then_some(0)
    }
}

/// A [`Device`] as a [`RawDevice`], for one connection.
pub struct Requests<D: Device> {
    device: Arc<Mutex<D>>,
    name: Arc<str>,
    rings: RequestRings<Given<D>>,
    figures: Arc<RequestFigures<Given<D>>>,
}

impl<D: Device> Requests<D> {
    /// A device as a vhost-user back end, whose queues are served by `workers` in turn, as their unit number `unit`, which
    /// no other back end has on these workers at the same time; `name` stands in messages.
    pub fn backend(
        device: D,
        name: &str,
        addresses: Addresses,
        workers: Arc<[Worker]>,
        unit: u32,
    ) -> Backend<Requests<D>> {
        let (name, figures) = (Arc::from(name), Arc::new(RequestFigures::new(device.queues())));
        let rings = RequestRings::new(Arc::clone(&name), workers, unit, Arc::clone(&figures));
        let device = Arc::new(Mutex::new(device));
        Backend::new(Requests { device, name, rings, figures }, addresses)
    }

    /// What it has done.
    pub fn figures(&self) -> &Arc<RequestFigures<Given<D>>> {
        &self.figures
    }
}

impl<D: Device> RawDevice for Requests<D> {
    type Rings = RequestUnit<Given<D>>;

    fn name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    fn shares(&self) -> &Shares<RequestUnit<Given<D>>> {
        self.rings.shares()
    }

    fn part(&self) {}

    fn tally(&self) -> &IotlbTally {
        &self.figures.iotlb
    }

    fn features(&self) -> u64 {
        self.device.lock().features()
    }

    fn protocol_features(&self) -> ProtocolFeatures {
        // QEMU warns of a configuration space for which it has no use.
        let config = match self.device.lock().config().is_empty() {
            true => ProtocolFeatures::empty(),
            false => ProtocolFeatures::CONFIG,
        };
        config | ProtocolFeatures::INFLIGHT_SHMFD
    }

    fn queues(&self) -> u16 {
        self.device.lock().queues()
    }

    fn max_ring_size(&self) -> u16 {
        RING_SIZE
    }

    fn start(
        &mut self,
        ring: u16,
        start: RingStart,
        on: Connection<'_>,
        _: bool,
    ) -> Result<(), HandlerError> {
        let device = Arc::clone(&self.device);
        let most_bytes = device.lock().most_bytes();
        let serve = Given {
            device,
            ring,
            most_bytes,
            returns: Arc::default(),
            done: VecDeque::new(),
            written: 0,
            away: 0,
            bytes: 0,
        };
        self.rings.start(ring, start, on, |_| Ok(serve))
    }

    /// What the device has is waited for as long as the front end is there: its memory is the device's until then.
    fn stop(&mut self, ring: u16, connection: Option<&Shutdown>) -> Result<u32, HandlerError> {
        self.device.lock().stop(ring);
        self.rings.stop(ring, || self.rings.is_given_up(connection).unwrap_or(false))
    }

    fn forget(&mut self) {
        self.rings.forget();
    }

    fn config(&mut self, _: u32, _: usize) -> Vec<u8> {
        self.device.lock().config()
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

    fn bells(&self) -> Option<&Bells> {
        Some(self.rings.bells())
    }
}
