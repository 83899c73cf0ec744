//! One ring of the guest's, shadowed in memory that the back end sees.
//!
//! A chain is copied into a slot and added to the shadow ring; when the back end has used it, what
//! it wrote is copied back, by the used length at most, and the slot is zeroed. Chains go back in
//! the order in which the back end has used them, and what it has published together is published
//! together: a packet may take several chains. At the end of a ring those that wait for a
//! translation hold up no others.

use std::{collections::VecDeque, convert::Infallible, io, sync::Arc};

use ringfence_mem::{Access, AccessError, Translate};
use ringfence_run::{notifier::Notifier, worker::Kick};
use ringfence_vhost_user_backend::{
    Bus, RingLog,
    requests::{Advance, Missing, Next, Serve, Slot as Taken},
};
use ringfence_virtq::{Chain, Desc, RingError, driver};

use super::{
    back_end::Shadowed,
    slots::{Layout, Slot, Slots},
};

/// How many used chains are taken at a time.
const BURST: usize = 64;

/// How many bytes a round copies before other queues have their turn, besides the rest of the chain
/// that exceeds it.
const ROUND_BYTES: u64 = 1 << 20;

/// How much of what a back end may have written is copied to the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyBack {
    /// As many bytes as the back end reports.
    #[default]
    Used,
    /// All writable bytes, for back ends that report too few.
    All,
}

/// A chain in its slot. It is written and read in its place, field by field: what moves is stored in words and loaded
/// in larger parts, which a processor cannot forward from its stores.
#[derive(Debug, Default)]
pub struct Shadow {
    stage: Stage,
    /// The chain's number; as what follows, only while it is not [new](Stage::New).
    at: u16,
    /// How many bytes the back end reports, once it has used the chain.
    used: u32,
    slot: Slot,
}

/// How far a chain is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// It has not been copied, and has no slot.
    #[default]
    New,
    /// It has been copied.
    Sent,
    /// The back end has used it.
    Used,
}

/// Why a chain was not sent.
enum Stop {
    /// There is no room for it now.
    Later,
    /// An address cannot be reached.
    Memory(AccessError),
    /// It can never be sent.
    Never(io::Error),
}

impl From<AccessError> for Stop {
    fn from(error: AccessError) -> Stop {
        Stop::Memory(error)
    }
}

/// Serves a ring by a back end.
pub struct ProxyQueue {
    shadow: driver::Queue,
    indirect: bool,
    slots: Slots,
    copy_back: CopyBack,
    pub(super) kick: Notifier,
    call: Kick,
    /// Whether chains were added since the last kick.
    added: bool,
    /// How many chains the back end has.
    sent: u32,
    /// Chains that the back end has used.
    used: VecDeque<u16>,
    /// Bytes that were copied in this round.
    round: u64,
    /// The chain whose copy back waits for a translation: those behind it wait, too.
    waits: Option<u16>,
    /// The back end has stopped the ring: what it has used until now is taken once more.
    ends: bool,
    /// The back end no longer uses the ring.
    stopped: bool,
    /// What broke the ring.
    broken: Option<Arc<io::Error>>,
    bytes: u64,
    burst: Vec<driver::Used>,
    shadowed: Vec<Desc>,
}

impl ProxyQueue {
    /// A queue that the back end serves. `indirect`: chains may have tables.
    pub(super) fn new(shadowed: Shadowed, indirect: bool, copy_back: CopyBack) -> ProxyQueue {
        let Shadowed { ring: shadow, slots, kick, call } = shadowed;
        ProxyQueue {
            shadow,
            indirect,
            slots,
            copy_back,
            kick,
            call,
            added: false,
            sent: 0,
            used: VecDeque::new(),
            round: 0,
            waits: None,
            ends: false,
            stopped: false,
            broken: None,
            bytes: 0,
            burst: vec![driver::Used::default(); BURST],
            shadowed: Vec::new(),
        }
    }

    /// The back end has stopped the ring: takes what it has used, and no more. What it has not used
    /// is the guest's again.
    pub(super) fn stop(&mut self) {
        self.ends = true;
    }

    /// Copies a chain and adds it to the shadow ring.
    fn send(&mut self, request: &mut Shadow, with: Advance<'_>) -> Result<(), Stop> {
        let Advance { at, chain, bus, .. } = with;
        let descs = chain.descs();
        let by_table = self.by_table(chain);
        let layout = Layout::of(chain, by_table);
        if layout.len > self.slots.most() {
            return Err(self.too_long(layout));
        }
        let needed = if by_table { 1 } else { descs.len() };
        if needed > usize::from(self.shadow.size()) {
            let text = format!("a chain of {needed} buffers, and the back end takes no tables");
            return Err(Stop::Never(io::Error::other(text)));
        }
        if self.ends || usize::from(self.shadow.free_descs()) < needed {
            return Err(Stop::Later);
        }
        // Behind an IOTLB a chain that misses a translation begins anew: before anything is copied. And
        // what is written, too, though it may be gone when the chain comes back: a ring that stops then
        // gets no translations any more.
        for &Desc { addr, len, write } in descs {
            let access = if write { Access::Write } else { Access::Read };
            if write || matches!(bus, Bus::Iommu(_)) {
                bus.slices(addr, len.into(), access, |_| {})?;
            }
        }
        let Some(slot) = self.slots.take(at, layout) else {
            return Err(if self.slots.is_unused() { self.too_long(layout) } else { Stop::Later });
        };
        (request.slot, request.at) = (slot, at);
        if let Err(stop) = self.fill(with, &request.slot, by_table) {
            self.release(request);
            return Err(stop);
        }
        request.stage = Stage::Sent;
        self.added = true;
        self.sent += 1;
        self.round += chain.readable_len();
        Ok(())
    }

    /// Whether a chain takes one descriptor of the shadow ring, and a table in its slot.
    fn by_table(&self, chain: &Chain) -> bool {
        self.indirect && chain.descs().len() > 1
    }

    #[cold]
    fn too_long(&self, Layout { len, .. }: Layout) -> Stop {
        let most = self.slots.most();
        let text =
            format!("a chain takes {len} bytes of {most} of the queue's pool: raise --pool-size");
        Stop::Never(io::Error::other(text))
    }

    fn fill(&mut self, with: Advance<'_>, slot: &Slot, by_table: bool) -> Result<(), Stop> {
        let Advance { at, chain, bus, .. } = with;
        let not_added = |error| Stop::Never(io::Error::other(error));
        // Most frames of a network are one buffer.
        if let [only] = chain.descs() {
            self.copy_in(*only, bus, slot, 0)?;
            let shadowed = Desc { addr: slot.addr(0), ..*only };
            return self.shadow.add(&[shadowed], at.into()).map_err(not_added);
        }
        slot.each(chain, |desc, place| self.copy_in(desc, bus, slot, place))?;
        self.shadowed.clear();
        let _ = slot.each(chain, |desc, place| {
            self.shadowed.push(Desc { addr: slot.addr(place), ..desc });
            Ok::<_, Infallible>(())
        });
        if by_table {
            let table = slot.table(chain.descs().len());
            let window = self.slots.window(slot, table);
            self.shadow
                .add_indirect(slot.addr(table), &window, &self.shadowed, at.into())
                .map_err(not_added)
        } else {
            self.shadow.add(&self.shadowed, at.into()).map_err(not_added)
        }
    }

    /// Copies a buffer to its place in the slot, if the device reads it.
    #[inline]
    fn copy_in(&self, desc: Desc, bus: &Bus, slot: &Slot, place: u64) -> Result<(), AccessError> {
        let Desc { addr, len, write } = desc;
        if write {
            return Ok(());
        }
        let mut done = 0;
        bus.slices(addr, len.into(), Access::Read, |piece| {
            let to = self.slots.piece(slot, place + done, piece.len() as u64);
            done += to.copy_from_piece(piece.into()) as u64;
        })
    }

    /// Copies to the guest the first `written` bytes that the back end has written.
    fn copy_back(
        &self,
        chain: &Chain,
        bus: &Bus,
        slot: &Slot,
        written: u64,
    ) -> Result<(), AccessError> {
        let mut left = written;
        slot.each(chain, |Desc { addr, len, write }, place| {
            let part = if write { left.min(len.into()) } else { 0 };
            if part == 0 {
                return Ok(());
            }
            left -= part;
            let mut done = 0;
            bus.slices(addr, part, Access::Write, |piece| {
                let from = self.slots.piece(slot, place + done, piece.len() as u64);
                done += piece.copy_from_piece(from.into()) as u64;
                bus.mark(piece);
            })
        })
    }

    /// Copies back a chain that the back end has used.
    fn receive(
        &mut self,
        request: &mut Shadow,
        Advance { at, chain, bus, .. }: Advance<'_>,
    ) -> Next {
        let used = request.used;
        let written = self.written(chain, used);
        let copied = match written {
            0 => Ok(()),
            _ => self.copy_back(chain, bus, &request.slot, written),
        };
        let next = match copied {
            Ok(()) => {
                self.bytes += chain.readable_len() + written;
                self.round += written;
                Next::Done { ok: true, used }
            }
            Err(error) => match Missing::of(error) {
                Some(missing) => {
                    self.waits = Some(at);
                    return Next::Missing(missing);
                }
                None => self.unreachable(error),
            },
        };
        self.waits.take_if(|waits| *waits == at);
        self.scrub(chain, request, written);
        next
    }

    /// How many bytes the back end has written, as far as it is believed.
    fn written(&self, chain: &Chain, used: u32) -> u64 {
        match self.copy_back {
            CopyBack::Used => u64::from(used).min(chain.writable_len()),
            CopyBack::All => chain.writable_len(),
        }
    }

    /// Gives back the slot of a chain that is over, of which `written` bytes are the back end's and reported, without
    /// what is the guest's in it, or would be the next chain's. (What the back end has written and not reported may
    /// stay: it is the back end's own.)
    fn scrub(&self, chain: &Chain, request: &mut Shadow, written: u64) {
        if chain.writable_len() == 0 {
            // In one piece, with what lies between the buffers, and the table.
            return self.release(request);
        }
        let (slot, mut left) = (&request.slot, written);
        let _ = slot.each(chain, |Desc { len, write, .. }, place| {
            let part = if write { left.min(len.into()) } else { len.into() };
            left -= if write { part } else { 0 };
            self.slots.piece(slot, place, part).fill_zero();
            Ok::<_, Infallible>(())
        });
        if self.by_table(chain) {
            self.slots.rest(slot, slot.table(chain.descs().len())).fill_zero();
        }
        self.give_back(request);
    }

    /// Zeroes all of a chain's slot, and gives it back.
    fn release(&self, request: &mut Shadow) {
        self.slots.rest(&request.slot, 0).fill_zero();
        self.give_back(request);
    }

    /// The chain has no slot any more.
    #[inline]
    fn give_back(&self, request: &mut Shadow) {
        request.stage = Stage::New;
        self.slots.give_back(&request.slot);
    }

    /// The driver names memory that it does not have. No generic completion says so.
    #[cold]
    fn unreachable(&mut self, error: AccessError) -> Next {
        self.end_ring(io::Error::other(Broken::Buffer(error)))
    }

    /// The ring is given up in this round, and publishes nothing more.
    #[cold]
    fn end_ring(&mut self, why: io::Error) -> Next {
        self.broken.get_or_insert_with(|| Arc::new(why));
        Next::Busy
    }

    /// Takes what the back end has used; true if there was anything.
    fn take_used(&mut self, slots: &mut [Taken<Shadow>]) -> bool {
        let mut any = false;
        while !self.stopped && self.broken.is_none() {
            match self.shadow.pop_burst(&mut self.burst) {
                Ok(0) => break,
                Ok(count) => {
                    any = true;
                    self.sent -= count as u32;
                    self.call.found(count);
                    for &driver::Used { token, len } in &self.burst[..count] {
                        let request = &mut slots[token as usize].request;
                        if request.stage == Stage::Sent {
                            (request.stage, request.used) = (Stage::Used, len);
                            self.used.push_back(token as u16);
                        }
                    }
                }
                Err(error) => {
                    self.broken = Some(Arc::new(io::Error::other(Broken::Ring(error))));
                }
            }
        }
        self.stopped = self.ends;
        any
    }
}

#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("a buffer of the driver's: {0}")]
    Buffer(#[source] AccessError),
    #[error("the back end broke the rules of its ring: {0}")]
    Ring(#[source] RingError),
}

impl Serve for ProxyQueue {
    type Request = Shadow;
    const NAME: &'static str = "the back end";
    const KEEPS: bool = false;
    const FAILS: bool = false;

    fn begin_round(&mut self) {
        self.round = 0;
    }

    fn is_spent(&self) -> bool {
        self.round >= ROUND_BYTES
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn advance(&mut self, request: &mut Shadow, with: Advance<'_>) -> Next {
        match request.stage {
            Stage::New => match self.send(request, with) {
                Ok(()) => Next::Busy,
                Err(Stop::Later) => Next::Later,
                Err(Stop::Memory(error)) => match Missing::of(error) {
                    Some(missing) => Next::Missing(missing),
                    None => self.unreachable(error),
                },
                Err(Stop::Never(why)) => self.end_ring(why),
            },
            Stage::Sent => Next::Busy,
            Stage::Used => self.receive(request, with),
        }
    }

    fn completed(&mut self, now_ns: u64, _: bool) -> Option<(u16, bool)> {
        // At the end of a ring everything is that can be.
        if now_ns != u64::MAX && (self.waits.is_some() || self.is_spent()) {
            return None;
        }
        self.used.pop_front().map(|at| (at, true))
    }

    /// No generic completion says that a request has failed: the ring stops instead, unless it does
    /// already.
    fn fail(&mut self, request: &mut Shadow, _: &Chain, _: &Bus) -> (bool, u32) {
        if request.stage == Stage::Used {
            self.waits.take_if(|waits| *waits == request.at);
        }
        if !self.stopped {
            let late = || Arc::new(io::Error::other("a buffer was not mapped in time"));
            self.broken.get_or_insert_with(late);
        }
        (false, 0)
    }

    fn end(&mut self, request: &mut Shadow) {
        if request.stage == Stage::New {
            return;
        }
        self.waits.take_if(|waits| *waits == request.at);
        self.release(request);
    }

    fn is_begun(&self, request: &Shadow) -> bool {
        request.stage != Stage::New && !self.is_left(request)
    }

    fn is_left(&self, request: &Shadow) -> bool {
        self.stopped && request.stage != Stage::Used
    }

    fn is_whole(&self) -> bool {
        self.used.is_empty() && self.waits.is_none()
    }

    fn reap(&mut self, slots: &mut [Taken<Shadow>], _: &RingLog) -> bool {
        self.take_used(slots)
    }

    fn kick(&mut self) -> io::Result<()> {
        if let Some(why) = &self.broken {
            return Err(io::Error::new(why.kind(), Arc::clone(why)));
        }
        if std::mem::take(&mut self.added) {
            self.shadow.publish();
            if self.shadow.needs_kick() {
                self.kick.notify();
            }
        }
        Ok(())
    }

    fn in_kernel(&self) -> u32 {
        if self.stopped { 0 } else { self.sent }
    }

    fn arm(&mut self) -> bool {
        !self.stopped && self.broken.is_none() && self.shadow.enable_notifications()
    }

    fn disarm(&mut self) {
        self.shadow.suppress_notifications();
    }

    fn kick_back(&self) -> Option<&Kick> {
        Some(&self.call)
    }
}
