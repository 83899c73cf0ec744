//! Requests of a block device, step by step.

use std::{
    io,
    os::fd::AsFd,
    sync::{Arc, atomic::AtomicBool},
};

use ringfence_mem::Memory;
use ringfence_run::event::Doorbell;
use ringfence_vhost_user_backend::{
    Bus, RingLog,
    requests::{Advance, Next, Serve, Slot},
};
use ringfence_virtq::{Chain, blk::Status};

use super::{
    request::{self, Action, Limits, Stop},
    store::{BlkRequest, FileStore, Step, Store},
};
use crate::disk::Disk;

/// The kernel did not take the requests.
#[derive(Debug, thiserror::Error)]
#[error("io_uring: {0}")]
struct NotSubmitted(#[source] io::Error);

/// What serves the requests of one ring of a block device.
pub struct BlkServer {
    pub(super) store: Store,
    limits: Limits,
    id: Arc<str>,
    /// Moved in all.
    bytes: u64,
}

impl BlkServer {
    /// Requests to `disk`, which may be only read, from a ring of `size` descriptors. Writes are
    /// durable when they are completed, while `through` is set.
    ///
    /// # Errors
    /// Of a file: there is no io_uring for it ([`FileIo::new`](crate::disk::FileIo::new)), or no
    /// memory for buffers of the service's own.
    pub fn new(
        (disk, read_only): (&Disk, bool),
        id: &Arc<str>,
        size: u16,
        through: Arc<AtomicBool>,
    ) -> io::Result<BlkServer> {
        let mut store = Store::new(disk, size)?;
        if let Some(file) = store.file_mut() {
            file.through = through;
        }
        let limits = Limits::of(disk, read_only);
        Ok(BlkServer { store, limits, id: Arc::clone(id), bytes: 0 })
    }

    /// Takes the next step of a request. True: another one can follow at once; false: it is
    /// [busy](Step::Busy), or there is no room for it now.
    fn step(&mut self, request: &mut BlkRequest, with: Advance<'_>) -> Result<bool, Stop> {
        let Advance { chain, bus, .. } = with;
        match request.step {
            Step::Parse => {
                request.action = request::parse(chain, bus, &self.limits)?;
                request.step = Step::Start;
                Ok(true)
            }
            Step::Start => self.start(request, with),
            Step::Move => self.move_now(request, chain, bus).map(|()| true),
            Step::Deliver => self.deliver(request, chain, bus).map(|()| true),
            Step::Busy | Step::Complete => unreachable!("it goes on elsewhere"),
        }
    }

    /// Begins a request; false if it is busy then, or there is no room for it.
    fn start(&mut self, request: &mut BlkRequest, with: Advance<'_>) -> Result<bool, Stop> {
        let Advance { at, chain, bus, now_ns } = with;
        match (request.action, &mut self.store) {
            (Action::Identify, _) => {
                let written = request::identify(chain, bus, &self.id)?;
                request.complete(Status::Ok, written);
                return Ok(true);
            }
            (Action::Transfer { .. }, Store::Ram(_)) => {
                request.step = Step::Move;
                return Ok(true);
            }
            (Action::Transfer { len, .. }, Store::Paced { pacer, due, .. }) => {
                // Times never run backwards, whatever else schedules: the queue stays in order.
                due.push_back((pacer.lock().schedule(now_ns, len), at));
            }
            (Action::Zero { offset, len, .. }, Store::Ram(ram) | Store::Paced { ram, .. }) => {
                ram.zero(offset, len);
                request.complete(Status::Ok, 0);
                return Ok(true);
            }
            (Action::Nothing, _) | (Action::Flush, Store::Ram(_) | Store::Paced { .. }) => {
                request.complete(Status::Ok, 0);
                return Ok(true);
            }
            (action, Store::File(file)) => {
                if !file.hand_over((at, chain, &mut request.transfer), action, bus)? {
                    return Ok(false);
                }
            }
        }
        request.step = Step::Busy;
        Ok(false)
    }

    /// Moves the data of a transfer now. The addresses are translated here, at the moment of the
    /// access, so that a mapping that is gone by then is refused however old the request is. A
    /// transfer that meets a missing translation in the middle is done again from its beginning.
    fn move_now(&mut self, request: &mut BlkRequest, chain: &Chain, bus: &Bus) -> Result<(), Stop> {
        let (Store::Ram(ram) | Store::Paced { ram, .. }) = &self.store else {
            unreachable!("only memory is moved by us")
        };
        let Action::Transfer { write, offset, len } = request.action else {
            unreachable!("only transfers are moved")
        };
        request::transfer(chain, bus, ram, write, offset, len)?;
        self.bytes += len;
        request.complete(Status::Ok, if write { 0 } else { len as u32 });
        Ok(())
    }

    /// The disk has read or written data in buffers of the service's own: copies it to the driver,
    /// and starts the rest.
    fn deliver(&mut self, request: &mut BlkRequest, chain: &Chain, bus: &Bus) -> Result<(), Stop> {
        let Action::Transfer { write, len, .. } = request.action else {
            unreachable!("only transfers have data")
        };
        let Store::File(file) = &mut self.store else { unreachable!("only files have buffers") };
        if file.deliver((chain, &mut request.transfer), len, bus)? {
            self.bytes += len;
            file.after(request, if write { 0 } else { len as u32 });
        } else {
            request.step = Step::Start;
        }
        Ok(())
    }
}

impl Serve for BlkServer {
    type Request = BlkRequest;
    const NAME: &'static str = "the disk";
    const KEEPS: bool = true;

    fn begin_round(&mut self) {
        if let Some(file) = self.store.file_mut() {
            file.round = 0;
        }
    }

    fn is_spent(&self) -> bool {
        self.store.file().is_some_and(FileStore::is_spent)
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn advance(&mut self, request: &mut BlkRequest, with: Advance<'_>) -> Next {
        loop {
            if request.step == Step::Complete {
                let (status, written) = request.outcome;
                return match request::complete(with.chain, with.bus, status, written) {
                    Ok(used) => Next::Done { ok: status == Status::Ok, used },
                    Err(missing) => Next::Missing(missing),
                };
            }
            match self.step(request, with) {
                Ok(true) => {}
                Ok(false) if request.step == Step::Busy => return Next::Busy,
                Ok(false) => return Next::Later,
                Err(Stop::Status(status)) => request.complete(status, 0),
                Err(Stop::Missing(missing)) => return Next::Missing(missing),
            }
        }
    }

    fn completed(&mut self, now_ns: u64, enough: bool) -> Option<(u16, bool)> {
        match &mut self.store {
            Store::Ram(_) => None,
            Store::Paced { due, .. } => {
                due.front().filter(|(when, _)| !enough && *when <= now_ns)?;
                due.pop_front().map(|(_, at)| (at, true))
            }
            Store::File(file) => file.completed(),
        }
    }

    /// The disk, or its clock, has finished a request or a part of it: sets the next step.
    fn complete(&mut self, request: &mut BlkRequest, ok: bool) {
        match (&mut self.store, request.step) {
            (_, Step::Complete) => {}
            (Store::Paced { .. }, Step::Busy) => request.step = Step::Move,
            (Store::File(file), Step::Busy) if ok => match request.action {
                Action::Transfer { .. } if file.buffers.is_some() => request.step = Step::Deliver,
                Action::Transfer { write, offset, len } => {
                    if file.part_is_done(&mut request.transfer, offset, len) {
                        self.bytes += len;
                        file.after(request, if write { 0 } else { len as u32 });
                    } else {
                        request.step = Step::Start;
                    }
                }
                _ => file.after(request, 0),
            },
            _ => request.complete(if ok { Status::Ok } else { Status::IoErr }, 0),
        }
    }

    fn fail(&mut self, request: &mut BlkRequest, chain: &Chain, bus: &Bus) -> (bool, u32) {
        let (status, written) = match request.step {
            Step::Complete => request.outcome,
            _ => (Status::IoErr, 0),
        };
        let used = request::complete(chain, bus, status, written).unwrap_or(0);
        (status == Status::Ok, used)
    }

    fn end(&mut self, request: &mut BlkRequest) {
        if let Some(file) = self.store.file_mut() {
            file.end(&mut request.transfer);
        }
        request.step = Step::Parse;
    }

    fn is_begun(&self, request: &BlkRequest) -> bool {
        matches!(request.step, Step::Busy | Step::Deliver | Step::Complete)
    }

    fn reap(&mut self, slots: &mut [Slot<BlkRequest>], log: &RingLog) -> bool {
        self.store.file_mut().is_some_and(|file| file.reap(slots, log))
    }

    fn kick(&mut self) -> io::Result<()> {
        let kicked = self.store.file_mut().map_or(Ok(()), |file| file.io.kick());
        kicked.map_err(|error| io::Error::new(error.kind(), NotSubmitted(error)))
    }

    fn notify(&self, bell: &Arc<Doorbell>) -> io::Result<()> {
        self.store.file().map_or(Ok(()), |file| file.io.notify((**bell).as_fd()))
    }

    fn in_kernel(&self) -> u32 {
        self.store.file().map_or(0, |file| file.io.in_flight())
    }

    /// Reads into buffers of the service's own hold nothing up.
    fn holds(&self, request: &BlkRequest) -> bool {
        let own = self.store.file().is_some_and(|file| file.buffers.is_some());
        let reads = matches!(request.action, Action::Transfer { write: false, .. });
        request.step == Step::Busy && !(own && reads)
    }

    fn keep(&mut self, memory: &Arc<Memory>) {
        if let Some(file) = self.store.file_mut()
            && file.buffers.is_none()
            && file.io.in_flight() > 0
        {
            file.old.push(Arc::clone(memory));
        }
    }

    fn next_due(&self) -> Option<u64> {
        match &self.store {
            Store::Paced { due, .. } => due.front().map(|&(at, _)| at),
            _ => None,
        }
    }
}
