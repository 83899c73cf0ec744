//! One way that packets go: from a transmit ring, or from elsewhere, to a receive ring, or elsewhere.
//!
//! Nothing here waits. A packet that cannot go on now stays at the head of its ring, so that order
//! is kept, and the lane says what it waits for: a translation (then all that the packets behind it
//! lack is asked for too), or a buffer of the receiver.

use ringfence_mem::{Access, AccessError, HostSlice};
use ringfence_virtq::{Desc, RingError, cut};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    pieces::{Lasting, Writer, copy, gather, recycle, soon},
    ring::{NetRing, Ready},
    stats::Lost,
    wire::{HEADER, Header, LEGACY_HEADER, MAX_PACKET, feature},
};

/// How many packets are moved before others have their turn.
pub(super) const BURST: usize = 64;
/// How many are looked up before the first is copied.
const CHUNK: usize = 32;
/// How many are asked for together once a translation is missing.
const AHEAD: usize = 128;
/// For how many packets after a translation was missing they are asked for before they are needed.
const WARY: u64 = 1024;
/// Who goes on by fewer packets than this from one missing translation to the next has lost those that
/// it had asked for, as when a driver's IOMMU is flushed: all are asked for anew.
const FEW: u64 = 8;
/// How long, in ns, the receiver may be without buffers before packets are dropped.
const GRACE_NS: u64 = 10_000_000;
/// After how long, in ns, what is missing is looked for again without an answer.
const RETRY_NS: u64 = 5_000_000;

/// What a driver settled on, as far as its packets look different.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Terms {
    pub(super) features: u64,
}

impl Terms {
    /// Bytes of the header before each packet.
    #[inline]
    pub(super) fn header(self) -> usize {
        let new = feature::MRG_RXBUF | 1 << ringfence_virtq::F_VERSION_1;
        if self.features & new == 0 { LEGACY_HEADER } else { HEADER }
    }

    #[inline]
    fn mergeable(self) -> bool {
        self.features & feature::MRG_RXBUF != 0
    }
}

/// A ring, and the memory that its addresses mean.
pub(super) struct Place<'a, B> {
    pub(super) ring: &'a mut NetRing,
    pub(super) bus: &'a B,
    pub(super) terms: Terms,
}

/// Something that is waited for.
#[derive(Clone, Copy)]
struct Stall {
    since_ns: u64,
    retry_at: u64,
    answers: (u64, u64),
}

/// What became of a packet.
pub(super) enum Step {
    Moved {
        bytes: u64,
    },
    Lost(Lost),
    /// A translation is missing.
    Missing,
    /// The receiver has too few buffers now.
    Full,
}

/// What a lane remembers between two rounds.
#[derive(Default)]
pub(super) struct Lane {
    stall: Option<Stall>,
    /// Translations are asked for in advance until so many packets have passed.
    wary: u64,
    /// How many have passed since a translation was missing.
    passed: u64,
    /// Since when the receiver has had no buffers.
    starved_ns: Option<u64>,
    /// For so long that packets are dropped.
    hopeless: bool,
    pub(super) source: Vec<HostSlice<'static>>,
    pub(super) target: Vec<HostSlice<'static>>,
}

/// What was moved in a round.
#[derive(Default)]
pub(super) struct Moved {
    pub(super) packets: u64,
    pub(super) bytes: u64,
    /// Also buffers.
    pub(super) lost: u64,
}

impl Lane {
    /// When there is something to do though nobody says so.
    pub(super) fn next_due(&self) -> Option<u64> {
        let starved = self.starved_ns.map(|since| since.saturating_add(GRACE_NS));
        let starved = starved.filter(|_| !self.hopeless);
        self.stall.map(|stall| stall.retry_at).into_iter().chain(starved).min()
    }

    /// When it looks again for the translation that it waits for.
    pub(super) fn next_retry(&self) -> Option<u64> {
        self.stall.map(|stall| stall.retry_at)
    }

    /// Whether it waits for buffers of the receiver.
    pub(super) fn is_starved(&self) -> bool {
        self.starved_ns.is_some()
    }

    /// Whether it waits for a translation.
    pub(super) fn is_stalled(&self) -> bool {
        self.stall.is_some()
    }

    /// Whether an answer has come since it began to wait.
    pub(super) fn may_go_on(&self, answers: (u64, u64)) -> bool {
        self.stall.is_some_and(|stall| stall.answers != answers)
    }

    /// Whether nothing has changed for what it waits for.
    #[inline]
    pub(super) fn sleeps(&self, answers: (u64, u64), now_ns: u64) -> bool {
        self.stall.is_some_and(|stall| stall.answers == answers && now_ns < stall.retry_at)
    }

    pub(super) fn wait(&mut self, answers: (u64, u64), now_ns: u64) {
        let since_ns = self.stall.map_or(now_ns, |stall| stall.since_ns);
        let retry_at = now_ns.saturating_add(RETRY_NS);
        self.stall = Some(Stall { since_ns, retry_at, answers });
    }

    pub(super) fn is_over(&self, now_ns: u64, patience_ns: u64) -> bool {
        self.stall.is_some_and(|stall| now_ns.saturating_sub(stall.since_ns) >= patience_ns)
    }

    /// Asks for what packets lack that are not looked at yet, while translations were missing lately:
    /// the answers come while others are moved.
    #[inline]
    pub(super) fn look_ahead(&mut self, look: impl FnOnce() -> bool) {
        if self.wary > 0 && !look() {
            self.wary = WARY;
        }
    }

    /// A translation is missing; whether all are to be asked for anew.
    pub(super) fn lacks(&mut self) -> bool {
        self.wary = WARY;
        std::mem::take(&mut self.passed) < FEW
    }

    /// So many packets have passed.
    #[inline]
    pub(super) fn pass(&mut self, packets: u64) {
        self.wary = self.wary.saturating_sub(packets);
        self.passed += packets;
    }

    /// It need not wait for a translation any more.
    #[inline]
    pub(super) fn go_on(&mut self) {
        self.stall = None;
    }

    /// The receiver has no buffers.
    pub(super) fn starve(&mut self, now_ns: u64) {
        self.starved_ns.get_or_insert(now_ns);
    }

    /// The receiver has buffers again.
    #[inline]
    pub(super) fn fed(&mut self) {
        self.starved_ns = None;
    }

    /// Whether packets are dropped, as the receiver has been without buffers for too long.
    pub(super) fn is_hopeless(&self) -> bool {
        self.hopeless
    }

    fn loses_hope(&mut self, now_ns: u64) -> bool {
        let since = *self.starved_ns.get_or_insert(now_ns);
        self.hopeless |= now_ns.saturating_sub(since) >= GRACE_NS;
        self.hopeless
    }
}

/// Moves packets from one ring to another. True if it did anything.
pub(super) fn forward<S: Lasting, D: Lasting>(
    lane: &mut Lane,
    src: &mut Place<'_, S>,
    dst: &mut Place<'_, D>,
    now_ns: u64,
    patience_ns: u64,
) -> bool {
    // Read first: an answer that comes while we look makes us look again.
    let answers = (src.bus.answers(), dst.bus.answers());
    if lane.sleeps(answers, now_ns) {
        return false;
    }
    match src.ring.ready(src.bus, now_ns) {
        Ready::Yes => {}
        Ready::No => return false,
        Ready::Soon => {
            lane.wait(answers, now_ns);
            return false;
        }
    }
    let over = lane.is_over(now_ns, patience_ns);
    match dst.ring.ready(dst.bus, now_ns) {
        Ready::Yes => {}
        Ready::Soon if !over => {
            lane.wait(answers, now_ns);
            return false;
        }
        _ => {
            lane.go_on();
            return discard(src.ring, src.bus, Lost::NoReceiver, now_ns);
        }
    }
    let mut moved = Moved::default();
    if over {
        moved.lost += give_up(src) + give_up(dst);
        lane.go_on();
    }
    let waits = match run(lane, src, dst, now_ns, &mut moved) {
        Ok(waits) => waits,
        Err((Side::Source, error)) => {
            src.ring.fail(error);
            false
        }
        Err((Side::Target, error)) => {
            dst.ring.fail(error);
            false
        }
    };
    if moved.packets > 0 || !waits {
        lane.go_on();
    }
    lane.pass(moved.packets + moved.lost);
    if waits {
        // All that is knowable is asked for at once.
        ask_ahead(src, dst, lane.lacks());
        lane.wait(answers, now_ns);
    } else {
        lane.look_ahead(|| ask_ahead(src, dst, false));
    }
    let did = moved.packets + moved.lost > 0;
    if did {
        src.ring.counters.passed(moved.packets, moved.bytes);
        dst.ring.counters.passed(moved.packets, moved.bytes);
        dst.ring.publish(dst.bus);
        src.ring.publish(src.bus);
    }
    did
}

enum Side {
    Source,
    Target,
}

/// Moves a burst; true if it ended because a translation is missing.
#[inline]
fn run<S: Lasting, D: Lasting>(
    lane: &mut Lane,
    src: &mut Place<'_, S>,
    dst: &mut Place<'_, D>,
    now_ns: u64,
    moved: &mut Moved,
) -> Result<bool, (Side, RingError)> {
    let whole = src.ring.take(src.bus, BURST).map_err(|error| (Side::Source, error))?;
    if src.ring.held() == 0 {
        return Ok(!whole);
    }
    let whole = dst.ring.take(dst.bus, BURST).map_err(|error| (Side::Target, error))?;
    while src.ring.held() > 0 && moved.packets + moved.lost < BURST as u64 {
        if quick(src, dst, moved) > 0 {
            lane.fed();
            continue;
        }
        match single(lane, src, dst, moved).map_err(|error| (Side::Target, error))? {
            Step::Moved { bytes } => {
                lane.fed();
                moved.packets += 1;
                moved.bytes += bytes;
            }
            Step::Missing => return Ok(true),
            Step::Full if !whole => return Ok(true),
            Step::Full if lane.loses_hope(now_ns) => {
                src.ring.lose(Lost::NoRoom);
                moved.lost += 1;
            }
            Step::Full => return Ok(false),
            Step::Lost(why) => {
                src.ring.lose(why);
                moved.lost += 1;
            }
        }
    }
    Ok(false)
}

/// The packets at the head that lie in one piece and go to one piece, as almost all do. Returns how
/// many were moved.
#[inline]
fn quick<S: Lasting, D: Lasting>(
    src: &mut Place<'_, S>,
    dst: &mut Place<'_, D>,
    moved: &mut Moved,
) -> usize {
    let count = src.ring.held().min(dst.ring.held()).min(CHUNK);
    if src.terms.header() != HEADER || dst.terms.header() != HEADER {
        return 0;
    }
    let mut plan: [Option<(HostSlice<'_>, HostSlice<'_>)>; CHUNK] = [None; CHUNK];
    let (from, to) = (src.bus, dst.bus);
    let mut found = 0;
    while found < count {
        let ([packet], [buffer]) = (src.ring.chain(found).descs(), dst.ring.chain(found).descs())
        else {
            break;
        };
        let len = packet.len;
        let fits = (HEADER..=MAX_PACKET).contains(&(len as usize)) && len <= buffer.len;
        if packet.write || !buffer.write || !fits {
            break;
        }
        // Whatever is wrong is found, and told, when the packet's turn has come.
        let Some(source) = from.piece(packet.addr, len.into(), Access::Read) else { break };
        let Some(target) = to.piece(buffer.addr, len.into(), Access::Write) else { break };
        soon(source);
        soon(target);
        plan[found] = Some((source, target));
        found += 1;
    }
    let mut done = 0;
    for (source, target) in plan[..found].iter().flatten() {
        // Copied once, and then believed.
        let mut header = Header::new_zeroed();
        source.copy_to(header.as_mut_bytes());
        let Some(header) = header.received(dst.terms.features, 1) else { break };
        target.copy_from(header.as_bytes());
        copy(source.part(HEADER, usize::MAX), target.part(HEADER, usize::MAX));
        moved.bytes += (source.len() - HEADER) as u64;
        done += 1;
    }
    let lens = plan[..done].iter().map(|pair| pair.map_or(0, |(source, _)| source.len() as u32));
    dst.ring.give_back_all(lens);
    src.ring.give_back_all(std::iter::repeat_n(0, done));
    moved.packets += done as u64;
    done
}

/// The packet at the head, whatever it looks like.
#[cold]
fn single<S: Lasting, D: Lasting>(
    lane: &mut Lane,
    src: &mut Place<'_, S>,
    dst: &mut Place<'_, D>,
    moved: &mut Moved,
) -> Result<Step, RingError> {
    let mut source = recycle(std::mem::take(&mut lane.source));
    let step = match read(src, &mut source) {
        Ok(header) => {
            let bytes = source.iter().map(HostSlice::len).sum();
            let step = receive(&mut lane.target, dst, header, bytes, moved, |writer| {
                source.iter().for_each(|&piece| writer.put(piece));
            });
            if let Ok(Step::Moved { .. }) = step {
                src.ring.give_back(0);
            }
            step
        }
        Err(step) => Ok(step),
    };
    lane.source = recycle(source);
    step
}

/// The packet at the head of a transmit ring: its header, and the pieces of what follows.
pub(super) fn read<'b, S: Lasting>(
    src: &Place<'b, S>,
    pieces: &mut Vec<HostSlice<'b>>,
) -> Result<Header, Step> {
    let chain = src.ring.chain(0);
    let (len, head) = (chain.readable_len(), src.terms.header());
    if !chain.writable().is_empty() || len < head as u64 || len > MAX_PACKET as u64 {
        return Err(Step::Lost(Lost::Malformed));
    }
    let mut header = Header::new_zeroed();
    let bus = src.bus;
    let mut rest = &mut header.as_mut_bytes()[..head];
    let mut found = Ok(());
    for Desc { addr, len, .. } in cut(chain.readable(), 0, head as u64) {
        let (part, more) = rest.split_at_mut(len as usize);
        found = found.and_then(|()| bus.read(addr, part));
        rest = more;
    }
    let found = found.and_then(|()| {
        cut(chain.readable(), head as u64, len)
            .try_for_each(|desc| gather(bus, desc, Access::Read, pieces))
    });
    found.map(|()| header).map_err(unreachable)
}

fn unreachable(error: AccessError) -> Step {
    match error {
        AccessError::Missing { .. } => Step::Missing,
        _ => Step::Lost(Lost::Unreachable),
    }
}

/// Puts a packet of `bytes` bytes, which `fill` writes, into as many receive buffers as it takes,
/// behind its header.
///
/// # Errors
/// The receiver broke the rules.
pub(super) fn receive<D: Lasting>(
    store: &mut Vec<HostSlice<'static>>,
    dst: &mut Place<'_, D>,
    header: Header,
    bytes: usize,
    moved: &mut Moved,
    fill: impl FnOnce(&mut Writer<'_, '_>),
) -> Result<Step, RingError> {
    let wanted = dst.terms.header() + bytes;
    let (bus, header_len) = (dst.bus, dst.terms.header());
    let mut target = recycle(std::mem::take(store));
    let found = loop {
        target.clear();
        let count = match find_room(dst, wanted)? {
            Room::Found(count) => count,
            Room::Spoilt(at) => {
                dst.ring.reject(at, Lost::Malformed);
                moved.lost += 1;
                continue;
            }
            Room::Full => break Err(Step::Full),
            Room::Missing => break Err(Step::Missing),
            Room::TooSmall => break Err(Step::Lost(Lost::TooLong)),
        };
        let Some(header) = header.received(dst.terms.features, count as u16) else {
            break Err(Step::Lost(Lost::Offload));
        };
        match reach(bus, dst.ring, count, wanted as u64, &mut target) {
            Ok(()) => break Ok((count, header)),
            Err((_, AccessError::Missing { .. })) => break Err(Step::Missing),
            // It goes into the buffers after this one.
            Err((at, _)) => {
                dst.ring.reject(at, Lost::Unreachable);
                moved.lost += 1;
            }
        }
    };
    let (count, header) = match found {
        Ok(found) => found,
        Err(step) => {
            *store = recycle(target);
            return Ok(step);
        }
    };
    if let Some(mut writer) = Writer::new(&target) {
        writer.put_bytes(&header.as_bytes()[..header_len]);
        fill(&mut writer);
    }
    *store = recycle(target);
    let mut left = wanted as u64;
    for _ in 0..count {
        let part = left.min(dst.ring.chain(0).writable_len());
        dst.ring.give_back(part as u32);
        left -= part;
    }
    Ok(Step::Moved { bytes: bytes as u64 })
}

/// The pieces of the first `wanted` bytes of the first `count` buffers. Of an error, also which
/// buffer's it is.
fn reach<'b, D: Lasting>(
    bus: &'b D,
    ring: &NetRing,
    count: usize,
    wanted: u64,
    target: &mut Vec<HostSlice<'b>>,
) -> Result<(), (usize, AccessError)> {
    let mut left = wanted;
    for at in 0..count {
        let chain = ring.chain(at);
        cut(chain.writable(), 0, left)
            .try_for_each(|desc| gather(bus, desc, Access::Write, target))
            .map_err(|error| (at, error))?;
        left = left.saturating_sub(chain.writable_len());
    }
    Ok(())
}

enum Room {
    /// In so many buffers.
    Found(usize),
    /// This one is none.
    Spoilt(usize),
    /// Not now.
    Full,
    /// Not before a translation has come.
    Missing,
    /// Never.
    TooSmall,
}

/// How many of the receiver's buffers hold `wanted` bytes.
fn find_room<D: Lasting>(dst: &mut Place<'_, D>, wanted: usize) -> Result<Room, RingError> {
    let (mut room, mut count) = (0, 0);
    loop {
        if count == dst.ring.held() {
            if dst.ring.is_full() {
                return Ok(Room::TooSmall);
            }
            if !dst.ring.take(dst.bus, count + CHUNK)? {
                return Ok(Room::Missing);
            }
            if count == dst.ring.held() {
                return Ok(Room::Full);
            }
        }
        let chain = dst.ring.chain(count);
        // The header lies in the first buffer.
        let least = if count == 0 { dst.terms.header() as u64 } else { 1 };
        if !chain.readable().is_empty() || chain.writable_len() < least {
            return Ok(Room::Spoilt(count));
        }
        room += chain.writable_len();
        count += 1;
        if room >= wanted as u64 {
            return Ok(Room::Found(count));
        }
        if !dst.terms.mergeable() {
            return Ok(Room::TooSmall);
        }
    }
}

/// Asks for the translations of packets, and of the buffers that they will go to, as far as they can
/// be seen; those that were asked for before only if `again`. Returns whether none is missing.
#[cold]
fn ask_ahead<S: Lasting, D: Lasting>(
    src: &mut Place<'_, S>,
    dst: &mut Place<'_, D>,
    again: bool,
) -> bool {
    // A ring that is broken is found out, and told, when its turn comes.
    let _ = src.ring.take(src.bus, AHEAD);
    let _ = dst.ring.take(dst.bus, AHEAD);
    let packets = src.ring.held();
    let mut bytes = 0;
    for at in 0..packets {
        bytes += src.ring.chain(at).readable_len().min(MAX_PACKET as u64);
    }
    let mut buffers = 0;
    while buffers < dst.ring.held() && (buffers < packets || bytes > 0) {
        bytes = bytes.saturating_sub(dst.ring.chain(buffers).writable_len());
        buffers += 1;
    }
    let ready = src.ring.look_up(src.bus, packets, again);
    dst.ring.look_up(dst.bus, buffers, again) & ready
}

/// Gives up on all that has waited for its translation in vain. Returns how many.
#[cold]
pub(super) fn give_up<B: Lasting>(place: &mut Place<'_, B>) -> u64 {
    let mut count = 0;
    for at in (0..place.ring.held()).rev() {
        if !place.ring.prefetch(place.bus, at) {
            place.bus.gave_up();
            place.ring.reject(at, Lost::Unanswered);
            count += 1;
        }
    }
    count
}

/// Takes all packets and drops them. True if there were any.
#[cold]
pub(super) fn discard<S: Lasting>(ring: &mut NetRing, bus: &S, why: Lost, now_ns: u64) -> bool {
    if ring.ready(bus, now_ns) != Ready::Yes {
        return false;
    }
    if let Err(error) = ring.take(bus, BURST) {
        ring.fail(error);
        return true;
    }
    let any = ring.held() > 0;
    while ring.held() > 0 {
        ring.lose(why);
    }
    if any {
        ring.publish(bus);
    }
    any
}
