//! What a server keeps of a connection for the process that takes over.

use std::{
    collections::BTreeMap,
    fmt, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use ringfence_mem::Region;
use ringfence_run::{PeerFd, event};

use super::{Failure, Ring, Server};
use crate::{
    ConnectionState, Handler, HandlerError, Keeper, SavedConnection,
    msg::{self, Request, code},
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

/// State that the server does not have itself, as the requests that made it, each with a duplicate
/// of its descriptor.
#[derive(Default)]
struct KeptFds {
    regions: Vec<(Region, PeerFd)>,
    /// Of the whole device, by number.
    device: BTreeMap<u32, (Request, Option<PeerFd>)>,
    /// The descriptors of rings, by ring and number.
    rings: BTreeMap<(u8, u32), (Request, Option<PeerFd>)>,
}

impl fmt::Debug for Kept {
    ringfence_sync::shows!(Kept as it, changed: it.changed);
}

impl Kept {
    pub(super) fn new(keeper: Box<dyn Keeper>) -> io::Result<Kept> {
        let leave = Arc::new(event::new()?);
        Ok(Kept { keeper, leave, held: KeptFds::default(), changed: true })
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
            Request::SetLogBase { .. }
            | Request::SetLogFd
            | Request::SetInflight(_)
            | Request::SetBackendReqFd
            | Request::NetSetMtu(_) => {
                self.device.insert(request.code(), (request, fds.pop()));
            }
            Request::SetVringKick { ring, .. }
            | Request::SetVringCall { ring, .. }
            | Request::SetVringErr { ring, .. } => {
                self.rings.insert((ring, request.code()), (request, fds.pop()));
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
                self.device.remove(&code::SET_INFLIGHT_FD);
                self.device.remove(&code::NET_SET_MTU);
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
        self.kept = Some(Kept::new(keeper)?);
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
        self.rings.iter_mut().for_each(|ring| ring.base_unknown = true);
        (self.resuming, self.replies_owed) = (true, saved.replies_owed);
        for (request, fds) in saved.requests {
            if let Request::SetVringBase { ring, .. } = request {
                let ring = self.ring(request.code(), ring)?;
                self.rings[ring].base_unknown = false;
            }
            self.carry_out_kept(request, fds)?;
        }
        self.resuming = false;
        self.rings.iter_mut().for_each(|ring| ring.base_unknown &= ring.running);
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
                Ok(_) => kept.changed |= kept.held.note(request, duplicates),
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
            kept.held.device.remove(&code::SET_BACKEND_REQ_FD);
            kept.changed = true;
        }
    }

    /// No request is in progress: keeps the state, if it has changed.
    pub(super) fn settle(&mut self) {
        self.keep_changes();
        self.kept.iter_mut().for_each(|kept| kept.keeper.settled());
    }

    /// Keeps the state, if it has changed. Called before a reply too: once the front end has it,
    /// only [`Keeper::settled`] is left to do, and a process rarely dies before that.
    pub(super) fn keep_changes(&mut self) {
        let Some(mut kept) = self.kept.take_if(|kept| kept.changed) else { return };
        kept.changed = false;
        let held = &kept.held;
        let state =
            self.handler.can_be_resumed().then(|| self.state(held, |ring| ring.running, None));
        kept.keeper.keep(state.as_ref());
        self.kept = Some(kept);
    }

    /// All rings are stopped; those in `ran` are to run again in the successor. `replies_owed` is
    /// the number of replies that are still to come on the back end's channel.
    pub(super) fn keep_stopped(&mut self, ran: &[bool], replies_owed: Option<u32>) {
        let Some(mut kept) = self.kept.take() else { return };
        for (ring, &ran) in self.rings.iter_mut().zip(ran) {
            ring.running = ran;
        }
        kept.keeper.keep(Some(&self.state(&kept.held, |_| false, replies_owed)));
        self.rings.iter_mut().for_each(|ring| ring.running = false);
        self.kept = Some(kept);
    }

    /// The state, as requests. Rings for which `without_base` holds get no base.
    fn state<'k>(
        &self,
        kept: &'k KeptFds,
        without_base: impl Fn(&Ring) -> bool,
        replies_owed: Option<u32>,
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
        for (request, fd) in kept.device.values() {
            add(request.clone(), fd.as_ref());
        }
        // Writes are logged once there is a log.
        if self.features & msg::F_LOG_ALL != 0 {
            add(Request::SetFeatures(self.features), None);
        }
        if self.status != 0 {
            add(Request::SetStatus(self.status), None);
        }
        for (number, ring) in (0..).zip(&self.rings) {
            let Ok(short) = u8::try_from(number) else { break };
            if let Some(size) = ring.size {
                add(Request::SetVringNum { ring: number, num: size.into() }, None);
            }
            if let Some(addresses) = ring.addresses {
                add(Request::SetVringAddr { ring: number, addresses }, None);
            }
            if !without_base(ring) && !ring.base_unknown {
                add(Request::SetVringBase { ring: number, base: ring.base }, None);
            }
            add(Request::SetVringEnable { ring: number, enabled: ring.enabled }, None);
            // The kick, which starts the ring, is the last.
            let fds = kept.rings.range((short, 0)..=(short, u32::MAX)).rev();
            for ((_, code), (request, fd)) in fds {
                let is_kick = *code == code::SET_VRING_KICK;
                if is_kick && ring.running || !is_kick && fd.is_some() {
                    add(request.clone(), fd.as_ref());
                }
            }
        }
        ConnectionState { replies_owed, requests }
    }
}
