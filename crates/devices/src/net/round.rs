//! A round of work on a ring: what it waits for, how it begins and how it ends.
//!
//! Nothing here waits. A packet that cannot go on now stays at the head of its ring, so that order
//! is kept, and the lane says what it waits for: a translation (then all that the packets behind it
//! lack is asked for too), or a buffer of the receiver.

use std::time::Duration;

use ringfence_mem::{Access, HostSlice};

use super::{
    pieces::{Lasting, Runs},
    ring::{NetRing, Ready},
    stats::Lost,
    wire::{HEADER, LEGACY_HEADER, feature},
};

/// How many packets are moved before others have their turn.
pub(super) const BURST: usize = 64;
/// How many are asked for together once a translation is missing.
pub(super) const AHEAD: usize = 128;
/// For how many packets after a translation was missing they are asked for before they are needed.
const WARY: u64 = 1024;
/// Who goes on by fewer packets than this from one missing translation to the next has lost those that
/// it had asked for, as when a driver's IOMMU is flushed: all are asked for anew.
const FEW: u64 = 8;
/// How long the receiver may be without buffers before packets are dropped, unless
/// [`NetOptions`](super::NetOptions) says otherwise. They are until it takes some again and a second has passed.
pub const GRACE: Duration = Duration::from_millis(10);
/// The part of the patience for another driver: its front end's silence is not the sender's fault.
const ANOTHERS_PART: u64 = 50;
/// For how long, in ns, a receiver that was waited for in vain is not waited for again: one that takes a packet now
/// and then holds up the others for a small part of the time only.
const DISTRUST_NS: u64 = 1_000_000_000;
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
    pub(super) fn mergeable(self) -> bool {
        self.features & feature::MRG_RXBUF != 0
    }
}

/// A ring, and the memory that its addresses mean, for one round.
pub(super) struct Place<'a, B> {
    pub(super) ring: &'a mut NetRing,
    pub(super) bus: &'a B,
    pub(super) terms: Terms,
    /// Where its packets lie, those that lie in one piece.
    pub(super) runs: Runs<'a, B>,
}

impl<'a, B: Lasting> Place<'a, B> {
    /// A ring whose packets are read.
    pub(super) fn source(ring: &'a mut NetRing, bus: &'a B, terms: Terms) -> Place<'a, B> {
        Place { ring, bus, terms, runs: Runs::new(bus, Access::Read) }
    }

    /// A ring whose buffers are written.
    pub(super) fn target(ring: &'a mut NetRing, bus: &'a B, terms: Terms) -> Place<'a, B> {
        Place { ring, bus, terms, runs: Runs::new(bus, Access::Write) }
    }
}

/// How long translations are waited for, in ns.
#[derive(Clone, Copy)]
pub(super) struct Patience {
    /// Before who lacks one is told so.
    pub(super) whole_ns: u64,
    /// Before packets to a receiver that lacks one are dropped, though it is not told.
    pub(super) receiver_ns: u64,
}

impl Patience {
    /// Of a driver that receives what it sends.
    pub(super) fn with_itself(whole_ns: u64) -> Patience {
        Patience { whole_ns, receiver_ns: u64::MAX }
    }

    /// Of one that sends to another.
    pub(super) fn with_another(whole_ns: u64) -> Patience {
        Patience { whole_ns, receiver_ns: whole_ns / ANOTHERS_PART }
    }
}

/// Whose a ring is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Source,
    Target,
}

/// Something that is waited for.
#[derive(Clone, Copy)]
struct Stall {
    side: Side,
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
    /// A translation of this side's is missing.
    Missing(Side),
    /// The receiver has too few buffers now.
    Full,
}

/// What a lane remembers between two rounds.
pub(super) struct Lane {
    stall: Option<Stall>,
    /// Translations are asked for in advance until so many packets have passed.
    wary: u64,
    /// How many have passed since a translation was missing.
    passed: u64,
    /// How long the receiver may be without buffers.
    grace: Duration,
    /// Since when it has had none.
    starved_ns: Option<u64>,
    /// When it was last found to have been waited for in vain. Packets are dropped at once from then on, until it
    /// takes some again and [`DISTRUST_NS`] have passed.
    in_vain_ns: Option<u64>,
    pub(super) source: Vec<HostSlice<'static>>,
    pub(super) target: Vec<HostSlice<'static>>,
}

impl Default for Lane {
    fn default() -> Lane {
        Lane::new(GRACE)
    }
}

impl Lane {
    /// One whose receiver may be without buffers for so long.
    pub(super) fn new(grace: Duration) -> Lane {
        Lane {
            stall: None,
            wary: 0,
            passed: 0,
            grace,
            starved_ns: None,
            in_vain_ns: None,
            source: Vec::new(),
            target: Vec::new(),
        }
    }

    fn grace_ns(&self) -> u64 {
        u64::try_from(self.grace.as_nanos()).unwrap_or(u64::MAX)
    }

    /// When there is something to do though nobody says so.
    pub(super) fn next_due(&self) -> Option<u64> {
        let starved = self.starved_ns.map(|since| since.saturating_add(self.grace_ns()));
        let starved = starved.filter(|_| self.in_vain_ns.is_none());
        self.stall.map(|stall| stall.retry_at).into_iter().chain(starved).min()
    }

    /// When it looks again for the translation that it waits for.
    pub(super) fn next_retry(&self) -> Option<u64> {
        self.stall.map(|stall| stall.retry_at)
    }

    /// Whether packets that come have to wait.
    pub(super) fn holds_packets(&self) -> bool {
        let patient = self.in_vain_ns.is_none();
        let stalled = self.stall.is_some_and(|stall| stall.side == Side::Source || patient);
        stalled || self.is_starved() && patient
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

    /// It waits for a translation of this side's.
    pub(super) fn wait(&mut self, side: Side, answers: (u64, u64), now_ns: u64) {
        let before = self.stall.filter(|stall| stall.side == side);
        let since_ns = before.map_or(now_ns, |stall| stall.since_ns);
        let retry_at = now_ns.saturating_add(RETRY_NS);
        self.stall = Some(Stall { side, since_ns, retry_at, answers });
    }

    /// Whether packets are dropped, as the receiver's translation has not come for too long.
    #[cold]
    pub(super) fn leaves_receiver(&mut self, now_ns: u64, receiver_ns: u64) -> bool {
        let Some(stall) = self.stall.filter(|stall| stall.side == Side::Target) else {
            return false;
        };
        if now_ns.saturating_sub(stall.since_ns) >= receiver_ns {
            self.in_vain_ns = Some(now_ns);
        }
        self.in_vain_ns.is_some()
    }

    pub(super) fn is_over(&self, now_ns: u64, patience_ns: u64) -> bool {
        self.stall.is_some_and(|stall| now_ns.saturating_sub(stall.since_ns) >= patience_ns)
    }

    /// Asks for what packets lack that are not looked at yet, while translations were missing lately:
    /// the answers come while others are moved.
    #[inline]
    fn look_ahead(&mut self, look: impl FnOnce() -> bool) {
        if self.wary > 0 && !look() {
            self.wary = WARY;
        }
    }

    /// A translation is missing; whether all are to be asked for anew.
    fn lacks(&mut self) -> bool {
        self.wary = WARY;
        std::mem::take(&mut self.passed) < FEW
    }

    /// So many packets have passed.
    #[inline]
    fn pass(&mut self, packets: u64) {
        self.wary = self.wary.saturating_sub(packets);
        self.passed += packets;
    }

    /// It need not wait for a translation any more.
    #[inline]
    pub(super) fn go_on(&mut self) {
        self.stall = None;
    }

    /// The receiver is gone, or its ring is: who waits for it does so in vain.
    pub(super) fn left_by_receiver(&mut self, now_ns: u64) {
        let stalled = self.stall.take().is_some_and(|stall| stall.side == Side::Target);
        if self.starved_ns.take().is_some() || stalled {
            self.in_vain_ns = Some(now_ns);
        }
    }

    /// The receiver has no buffers.
    pub(super) fn starve(&mut self, now_ns: u64) {
        self.starved_ns.get_or_insert(now_ns);
    }

    /// The receiver has buffers again.
    #[inline]
    pub(super) fn fed(&mut self, now_ns: u64) {
        self.starved_ns = None;
        self.in_vain_ns.take_if(|at| now_ns.saturating_sub(*at) >= DISTRUST_NS);
    }

    /// The receiver has no buffers. Whether packets are dropped, as it has had none for too long.
    pub(super) fn loses_hope(&mut self, now_ns: u64) -> bool {
        let since = *self.starved_ns.get_or_insert(now_ns);
        if now_ns.saturating_sub(since) >= self.grace_ns() {
            self.in_vain_ns = Some(now_ns);
        }
        self.in_vain_ns.is_some()
    }

    /// Whether the ring is there; if its own translation is on its way, that is waited for.
    #[inline]
    pub(super) fn finds<B: Lasting>(
        &mut self,
        place: &mut Place<'_, B>,
        answers: (u64, u64),
        now_ns: u64,
    ) -> bool {
        match place.ring.ready(place.bus, now_ns) {
            Ready::Yes => true,
            Ready::No => false,
            Ready::Soon => {
                self.wait(Side::Source, answers, now_ns);
                false
            }
        }
    }
}

/// One round, and what was moved in it.
pub(super) struct Round {
    pub(super) packets: u64,
    pub(super) bytes: u64,
    /// Also buffers.
    pub(super) lost: u64,
    /// It ended because a translation of this side's is missing.
    pub(super) waits: Option<Side>,
    answers: (u64, u64),
    pub(super) now_ns: u64,
}

impl Round {
    /// One with nothing done yet. `answers` were counted before anything was looked up: one that
    /// comes meanwhile makes us look again.
    #[inline]
    pub(super) fn new(answers: (u64, u64), now_ns: u64) -> Round {
        Round { packets: 0, bytes: 0, lost: 0, waits: None, answers, now_ns }
    }

    /// Begins one of a single ring; `None` if that is not there, or waits for what is still missing.
    /// What waited for too long is given up.
    #[inline]
    pub(super) fn begin<B: Lasting>(
        lane: &mut Lane,
        place: &mut Place<'_, B>,
        now_ns: u64,
        patience_ns: u64,
    ) -> Option<Round> {
        let answers = (place.bus.answers(), place.bus.answers());
        if lane.sleeps(answers, now_ns) || !lane.finds(place, answers, now_ns) {
            return None;
        }
        let mut round = Round::new(answers, now_ns);
        if lane.is_over(now_ns, patience_ns) {
            round.lost += give_up(place);
            lane.go_on();
        }
        Some(round)
    }

    /// Takes a burst; false if the driver broke the rules.
    #[inline]
    pub(super) fn take<B: Lasting>(&mut self, place: &mut Place<'_, B>) -> bool {
        match place.ring.take(place.bus, BURST) {
            Ok(whole) => {
                let lacks = !whole && place.ring.held() == 0;
                self.waits = lacks.then_some(Side::Source);
            }
            Err(error) => {
                place.ring.fail(error);
                return false;
            }
        }
        true
    }

    /// Whether others need not have their turn yet.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.packets + self.lost < BURST as u64
    }

    /// A packet was moved.
    #[inline]
    pub(super) fn moved(&mut self, bytes: u64) {
        self.packets += 1;
        self.bytes += bytes;
    }

    /// The packet at the head is dropped.
    #[cold]
    pub(super) fn lose(&mut self, ring: &mut NetRing, why: Lost) {
        ring.lose(why);
        self.lost += 1;
    }

    /// Whether anything was done. If it waits, `ask` asks for all that is knowable: also for what was
    /// asked for before, if it is given true. It returns whether nothing is missing.
    #[inline]
    pub(super) fn settle(&self, lane: &mut Lane, ask: impl FnOnce(bool) -> bool) -> bool {
        if self.packets > 0 || self.waits.is_none() {
            lane.go_on();
        }
        lane.pass(self.packets + self.lost);
        if let Some(side) = self.waits {
            ask(lane.lacks());
            lane.wait(side, self.answers, self.now_ns);
        } else {
            lane.look_ahead(|| ask(false));
        }
        self.packets + self.lost > 0
    }

    /// Counts what was done, and shows it to the driver.
    #[inline]
    pub(super) fn publish<B: Lasting>(&self, place: &mut Place<'_, B>) {
        place.ring.counters.passed(self.packets, self.bytes);
        place.ring.publish(place.bus);
    }

    /// Ends one of a single ring; true if anything was done.
    #[inline]
    pub(super) fn end<B: Lasting>(self, lane: &mut Lane, place: &mut Place<'_, B>) -> bool {
        let did = self.settle(lane, |again| ask_ahead(place, again));
        if did {
            self.publish(place);
        }
        did
    }
}

/// Asks for all that can be seen to be missing; what was asked for before only if `again`. Returns
/// whether nothing is.
#[cold]
fn ask_ahead<B: Lasting>(place: &mut Place<'_, B>, again: bool) -> bool {
    // A ring that is broken is found out, and told, when its turn comes.
    let _ = place.ring.take(place.bus, AHEAD);
    place.ring.look_up(place.bus, AHEAD, again)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_waited_for_in_vain_is_not_waited_for_again_at_once() {
        let (mut lane, grace) = (Lane::default(), GRACE.as_nanos() as u64);
        assert!(!lane.loses_hope(1) && lane.holds_packets());
        assert!(!lane.loses_hope(grace) && lane.holds_packets());
        assert!(lane.loses_hope(1 + grace) && !lane.holds_packets());
        // It takes one now and then.
        let at = 1 + grace;
        lane.fed(at + DISTRUST_NS - 1);
        assert!(lane.loses_hope(at + DISTRUST_NS - 1));
        lane.fed(at + DISTRUST_NS);
        assert!(!lane.loses_hope(at + DISTRUST_NS) && lane.holds_packets());
        // So with its translations; those of the packets' own driver are waited for.
        let answers = (0, 0);
        lane.fed(at + DISTRUST_NS);
        lane.wait(Side::Source, answers, 0);
        assert!(!lane.leaves_receiver(u64::MAX, 100) && lane.holds_packets());
        lane.wait(Side::Target, answers, 50);
        lane.wait(Side::Target, answers, 149);
        assert!(!lane.leaves_receiver(149, 100) && lane.holds_packets());
        assert!(lane.leaves_receiver(150, 100) && !lane.holds_packets());
        lane.go_on();
        lane.wait(Side::Target, answers, 151);
        assert!(lane.leaves_receiver(151, 100) && !lane.holds_packets());
    }

    #[test]
    fn who_goes_while_it_is_waited_for_was_waited_for_in_vain() {
        let mut lane = Lane::default();
        lane.left_by_receiver(5);
        lane.wait(Side::Source, (0, 0), 6);
        lane.left_by_receiver(7);
        lane.wait(Side::Target, (0, 0), 8);
        assert!(!lane.leaves_receiver(9, 100) && lane.holds_packets());
        lane.left_by_receiver(10);
        lane.wait(Side::Target, (0, 0), 11);
        assert!(lane.leaves_receiver(12, 100) && !lane.holds_packets());

        let mut lane = Lane::default();
        assert!(!lane.loses_hope(1));
        lane.left_by_receiver(2);
        assert!(lane.loses_hope(3) && !lane.holds_packets());
    }
}
