//! What a server keeps of a connection for whoever goes on with it.

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use ringfence_mem::Region;
use ringfence_run::PeerFd;
use rustix::event::{EventfdFlags, eventfd};

use super::{Failure, Ring, Server};
use crate::{
    ConnectionState, Handler, HandlerError, Keeper, SavedConnection,
    msg::{self, Inflight, Request},
};

/// For whoever goes on.
pub(super) struct Kept {
    pub(super) keeper: Box<dyn Keeper>,
    /// Readable once the connection is to be left to another process.
    pub(super) leave: Arc<OwnedFd>,
    held: KeptFds,
    /// Whether something else holds than was kept last.
    changed: bool,
}

/// What the state of the server does not tell: descriptors, each a duplicate of what the device has.
#[derive(Default)]
struct KeptFds {
    regions: Vec<(Region, PeerFd)>,
    log: Option<(u64, u64, PeerFd)>,
    log_event: Option<PeerFd>,
    inflight: Option<(Inflight, PeerFd)>,
    channel: Option<PeerFd>,
    mtu: Option<u16>,
    rings: Vec<RingFds>,
}

/// The descriptors of a ring.
#[derive(Default)]
struct RingFds {
    kick: Option<PeerFd>,
    call: Option<PeerFd>,
    err: Option<PeerFd>,
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept").field("changed", &self.changed).finish_non_exhaustive()
    }
}

impl Kept {
    pub(super) fn new(keeper: Box<dyn Keeper>, rings: usize) -> io::Result<Kept> {
        Ok(Kept {
            keeper,
            leave: Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
            held: KeptFds {
                rings: (0..rings).map(|_| RingFds::default()).collect(),
                ..KeptFds::default()
            },
            changed: true,
        })
    }

    fn note(&mut self, request: Request, fds: Vec<PeerFd>) {
        self.changed |= self.held.note(request, fds);
    }
}

impl KeptFds {
    /// A request was carried out; `fds` are duplicates of what came with it. Whether that changes what holds.
    fn note(&mut self, request: Request, mut fds: Vec<PeerFd>) -> bool {
        match request {
            Request::SetMemTable(regions) => {
                self.regions = regions.into_iter().zip(fds).collect();
            }
            Request::AddMemReg(region) => {
                if let Some(fd) = fds.pop()
                    && self.regions.iter().all(|(known, _)| *known != region)
                {
                    self.regions.push((region, fd));
                }
            }
            Request::RemMemReg(gone) => {
                let place = |region: &Region| (region.gpa, region.user_addr, region.size);
                self.regions.retain(|(region, _)| place(region) != place(&gone));
            }
            Request::SetLogBase { len, offset } => self.log = fds.pop().map(|fd| (len, offset, fd)),
            Request::SetLogFd => self.log_event = fds.pop(),
            Request::SetInflight(place) => self.inflight = fds.pop().map(|fd| (place, fd)),
            Request::SetBackendReqFd => self.channel = fds.pop(),
            Request::NetSetMtu(mtu) => self.mtu = Some(mtu),
            Request::SetVringKick { ring, .. } => {
                self.rings[usize::from(ring)].kick = fds.pop();
            }
            Request::SetVringCall { ring, .. } => {
                self.rings[usize::from(ring)].call = fds.pop();
            }
            Request::SetVringErr { ring, .. } => {
                self.rings[usize::from(ring)].err = fds.pop();
            }
            // Of these nothing is left to hold.
            Request::GetFeatures
            | Request::GetProtocolFeatures
            | Request::GetQueueNum
            | Request::GetMaxMemSlots
            | Request::GetConfig { .. }
            | Request::GetStatus
            | Request::SendRarp(_)
            | Request::Iotlb(_) => return false,
            // Nor after these.
            Request::ResetOwner | Request::ResetDevice | Request::SetStatus(0) => {
                (self.inflight, self.mtu) = (None, None);
            }
            // The server has them.
            _ => {}
        }
        true
    }
}

impl<H: Handler> Server<H> {
    /// Has `keeper` told, from now on, what another process needs to go on with this connection. To be called before
    /// it is served.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn set_keeper(&mut self, keeper: Box<dyn Keeper>) -> io::Result<()> {
        self.kept = Some(Kept::new(keeper, self.rings.len())?);
        Ok(())
    }

    /// Goes on with a connection that another server has [left](crate::Shutdown::leave), or that was served by a
    /// process that is dead, from what was [kept](Keeper) of it. [`serve`](Self::serve) does all of it again before it
    /// looks for requests: the memory is mapped, and rings that ran run.
    pub fn resume(&mut self, saved: SavedConnection) {
        self.saved = Some(saved);
    }

    /// Does again what the front end had said.
    pub(super) fn do_again(&mut self) -> Result<(), Failure> {
        let Some(saved) = self.saved.take() else { return Ok(()) };
        if let Some(kept) = &mut self.kept {
            // Rings that run move on: where they stood is not said any more.
            kept.keeper.keep(Some(&saved.astray()));
        }
        self.rings.iter_mut().for_each(|ring| ring.lost = true);
        (self.resuming, self.to_come) = (true, saved.to_come);
        for (request, fds) in saved.requests {
            if let Request::SetVringBase { ring, .. } = request {
                let ring = self.ring(request.code(), ring)?;
                self.rings[ring].lost = false;
            }
            self.carry_out_kept(request, fds)?;
        }
        self.resuming = false;
        self.rings.iter_mut().for_each(|ring| ring.lost &= ring.running);
        Ok(())
    }

    /// Carries out a request and keeps what holds of it.
    pub(super) fn carry_out_kept(
        &mut self,
        request: Request,
        fds: Vec<PeerFd>,
    ) -> Result<super::Outcome, Failure> {
        if self.kept.is_none() {
            return self.carry_out(request, fds);
        }
        let again = |fd: &PeerFd| {
            let again = fd.as_fd().try_clone_to_owned();
            again.map(|again| PeerFd::new(again, fd.closer())).map_err(HandlerError::from)
        };
        let duplicates = fds.iter().map(again).collect::<Result<_, _>>()?;
        let outcome = self.carry_out(request.clone(), fds);
        if let Some(kept) = &mut self.kept {
            match outcome {
                Ok(_) => kept.note(request, duplicates),
                // It may have stopped a ring.
                Err(_) => kept.changed = true,
            }
        }
        outcome
    }

    /// The back end's channel is no more.
    pub(super) fn lose_channel(&mut self) {
        self.backend = None;
        if let Some(kept) = &mut self.kept {
            kept.held.channel = None;
            kept.changed = true;
        }
    }

    /// Nothing is under way: what holds is kept, if that is something else than before.
    pub(super) fn settle(&mut self) {
        let Some(mut kept) = self.kept.take() else { return };
        if std::mem::take(&mut kept.changed) {
            let held = &kept.held;
            let state =
                self.handler.can_be_resumed().then(|| self.state(held, |ring| ring.running, None));
            kept.keeper.keep(state.as_ref());
        }
        kept.keeper.settled();
        self.kept = Some(kept);
    }

    /// All rings are stopped, of which those in `ran` are to run again elsewhere; so many answers are `to_come` on the
    /// back end's channel.
    pub(super) fn keep_stopped(&mut self, ran: &[bool], to_come: Option<u32>) {
        let Some(mut kept) = self.kept.take() else { return };
        for (ring, &ran) in self.rings.iter_mut().zip(ran) {
            ring.running = ran;
        }
        kept.keeper.keep(Some(&self.state(&kept.held, |_| false, to_come)));
        self.rings.iter_mut().for_each(|ring| ring.running = false);
        self.kept = Some(kept);
    }

    /// What holds, as requests. Of rings that are `astray` it is not said where they stand.
    fn state<'k>(
        &self,
        kept: &'k KeptFds,
        astray: impl Fn(&Ring) -> bool,
        to_come: Option<u32>,
    ) -> ConnectionState<'k> {
        let mut requests: Vec<(Request, Vec<BorrowedFd<'k>>)> = Vec::new();
        let mut say = |request, fd: Option<&'k PeerFd>| {
            requests.push((request, fd.map(|fd| fd.as_fd()).into_iter().collect()));
        };
        if let Some(protocol) = self.protocol {
            say(Request::SetProtocolFeatures(protocol), None);
        }
        // Before the driver has settled there is nothing to say, and devices refuse to settle on nothing.
        if self.features != 0 {
            say(Request::SetFeatures(self.features & !msg::F_LOG_ALL), None);
        }
        for (region, fd) in &kept.regions {
            say(Request::AddMemReg(*region), Some(fd));
        }
        if let Some((len, offset, fd)) = &kept.log {
            say(Request::SetLogBase { len: *len, offset: *offset }, Some(fd));
        }
        if self.features & msg::F_LOG_ALL != 0 {
            say(Request::SetFeatures(self.features), None);
        }
        if let Some(fd) = &kept.log_event {
            say(Request::SetLogFd, Some(fd));
        }
        if let Some((place, fd)) = &kept.inflight {
            say(Request::SetInflight(*place), Some(fd));
        }
        if let Some(fd) = &kept.channel {
            say(Request::SetBackendReqFd, Some(fd));
        }
        if self.status != 0 {
            say(Request::SetStatus(self.status), None);
        }
        if let Some(mtu) = kept.mtu {
            say(Request::NetSetMtu(mtu), None);
        }
        for (number, (ring, fds)) in (0..).zip(self.rings.iter().zip(&kept.rings)) {
            let Ok(short) = u8::try_from(number) else { break };
            if let Some(size) = ring.size {
                say(Request::SetVringNum { ring: number, num: size.into() }, None);
            }
            if let Some(addresses) = ring.addresses {
                say(Request::SetVringAddr { ring: number, addresses }, None);
            }
            if !astray(ring) && !ring.lost {
                say(Request::SetVringBase { ring: number, base: ring.base }, None);
            }
            say(Request::SetVringEnable { ring: number, enabled: ring.enabled }, None);
            if let Some(err) = &fds.err {
                say(Request::SetVringErr { ring: short, fd: true }, Some(err));
            }
            if let Some(call) = &fds.call {
                say(Request::SetVringCall { ring: short, fd: true }, Some(call));
            }
            if ring.running {
                let fd = fds.kick.is_some();
                say(Request::SetVringKick { ring: short, fd }, fds.kick.as_ref());
            }
        }
        ConnectionState { to_come, requests }
    }
}
