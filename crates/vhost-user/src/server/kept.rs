//! What a server keeps of a connection for the process that takes over.

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

/// The state kept for a successor.
pub(super) struct Kept {
    pub(super) keeper: Box<dyn Keeper>,
    /// Readable once the connection is to be left to another process.
    pub(super) leave: Arc<OwnedFd>,
    held: KeptFds,
    /// Whether the state has changed since it was last kept.
    changed: bool,
}

/// State that the server does not have itself: descriptors, each a duplicate of the device's, and
/// the MTU.
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
    /// Records a request that was carried out; `fds` are duplicates of its descriptors. Returns
    /// whether the state has changed.
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
            // These leave no state.
            Request::GetFeatures
            | Request::GetProtocolFeatures
            | Request::GetQueueNum
            | Request::GetMaxMemSlots
            | Request::GetConfig { .. }
            | Request::GetStatus
            | Request::SendRarp(_)
            | Request::Iotlb(_) => return false,
            // These remove state.
            Request::ResetOwner | Request::ResetDevice | Request::SetStatus(0) => {
                (self.inflight, self.mtu) = (None, None);
            }
            // The server has their state.
            _ => {}
        }
        true
    }
}

impl<H: Handler> Server<H> {
    /// From now on `keeper` gets what another process needs to take over this connection. To be
    /// called before the connection is served.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn set_keeper(&mut self, keeper: Box<dyn Keeper>) -> io::Result<()> {
        self.kept = Some(Kept::new(keeper, self.rings.len())?);
        Ok(())
    }

    /// Takes over a connection that another server has [left](crate::Shutdown::leave), or that a
    /// dead process served, from its [kept](Keeper) state. [`serve`](Self::serve) restores it
    /// before it looks for requests: the memory is mapped, and rings that ran run.
    pub fn resume(&mut self, saved: SavedConnection) {
        self.saved = Some(saved);
    }

    /// Restores the saved state.
    pub(super) fn do_again(&mut self) -> Result<(), Failure> {
        let Some(saved) = self.saved.take() else { return Ok(()) };
        if let Some(kept) = &mut self.kept {
            // Running rings move on: their positions are no longer kept.
            kept.keeper.keep(Some(&saved.without_bases()));
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

    /// Carries out a request and records its effect on the state.
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

    /// Drops the back end's channel.
    pub(super) fn lose_channel(&mut self) {
        self.backend = None;
        if let Some(kept) = &mut self.kept {
            kept.held.channel = None;
            kept.changed = true;
        }
    }

    /// No request is in progress: keeps the state, if it has changed.
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

    /// All rings are stopped; those in `ran` are to run again in the successor. `to_come` is the
    /// number of answers that are still to come on the back end's channel.
    pub(super) fn keep_stopped(&mut self, ran: &[bool], to_come: Option<u32>) {
        let Some(mut kept) = self.kept.take() else { return };
        for (ring, &ran) in self.rings.iter_mut().zip(ran) {
            ring.running = ran;
        }
        kept.keeper.keep(Some(&self.state(&kept.held, |_| false, to_come)));
        self.rings.iter_mut().for_each(|ring| ring.running = false);
        self.kept = Some(kept);
    }

    /// The state, as requests. Rings for which `without_base` holds get no base.
    fn state<'k>(
        &self,
        kept: &'k KeptFds,
        without_base: impl Fn(&Ring) -> bool,
        to_come: Option<u32>,
    ) -> ConnectionState<'k> {
        let mut requests: Vec<(Request, Vec<BorrowedFd<'k>>)> = Vec::new();
        let mut add = |request, fd: Option<&'k PeerFd>| {
            requests.push((request, fd.map(|fd| fd.as_fd()).into_iter().collect()));
        };
        if let Some(protocol) = self.protocol {
            add(Request::SetProtocolFeatures(protocol), None);
        }
        // Before feature negotiation there is nothing to restore, and devices refuse an empty set.
        if self.features != 0 {
            add(Request::SetFeatures(self.features & !msg::F_LOG_ALL), None);
        }
        for (region, fd) in &kept.regions {
            add(Request::AddMemReg(*region), Some(fd));
        }
        if let Some((len, offset, fd)) = &kept.log {
            add(Request::SetLogBase { len: *len, offset: *offset }, Some(fd));
        }
        if self.features & msg::F_LOG_ALL != 0 {
            add(Request::SetFeatures(self.features), None);
        }
        if let Some(fd) = &kept.log_event {
            add(Request::SetLogFd, Some(fd));
        }
        if let Some((place, fd)) = &kept.inflight {
            add(Request::SetInflight(*place), Some(fd));
        }
        if let Some(fd) = &kept.channel {
            add(Request::SetBackendReqFd, Some(fd));
        }
        if self.status != 0 {
            add(Request::SetStatus(self.status), None);
        }
        if let Some(mtu) = kept.mtu {
            add(Request::NetSetMtu(mtu), None);
        }
        for (number, (ring, fds)) in (0..).zip(self.rings.iter().zip(&kept.rings)) {
            let Ok(short) = u8::try_from(number) else { break };
            if let Some(size) = ring.size {
                add(Request::SetVringNum { ring: number, num: size.into() }, None);
            }
            if let Some(addresses) = ring.addresses {
                add(Request::SetVringAddr { ring: number, addresses }, None);
            }
            if !without_base(ring) && !ring.lost {
                add(Request::SetVringBase { ring: number, base: ring.base }, None);
            }
            add(Request::SetVringEnable { ring: number, enabled: ring.enabled }, None);
            if let Some(err) = &fds.err {
                add(Request::SetVringErr { ring: short, fd: true }, Some(err));
            }
            if let Some(call) = &fds.call {
                add(Request::SetVringCall { ring: short, fd: true }, Some(call));
            }
            if ring.running {
                let fd = fds.kick.is_some();
                add(Request::SetVringKick { ring: short, fd }, fds.kick.as_ref());
            }
        }
        ConnectionState { to_come, requests }
    }
}
