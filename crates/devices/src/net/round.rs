//! A round of work on a ring: what it waits for, how it begins and how it ends.
//!
//! Nothing here waits. A packet that cannot go on now stays at the head of its ring, so that order
//! is kept, and the lane records what it waits for: a translation (then the misses of the packets
//! behind it are sent too), or a buffer of the receiver.

use std::time::Duration;

use ringfence_mem::{Access, HostSlice};

use super::{
    pieces::{Lasting, Runs},
    ring::{NetRing, Ready, next_tick},
    stats::Lost,
    wire::{HEADER, LEGACY_HEADER, feature},
};

/// How many packets are moved before others have their turn.
pub(super) const BURST: usize = 64;
/// For how many packets misses are sent together once a translation is missing.
pub(super) const AHEAD: usize = 128;
/// For how many packets after a miss translations are prefetched.
const PREFETCH_FOR: u64 = 1024;
/// Fewer packets than this between two misses mean that prefetched translations are gone, as when a
/// driver's IOMMU is flushed: all are requested again.
const FEW: u64 = 8;
/// How long the receiver may be without buffers before packets are dropped, unless
/// [`NetOptions`](super::NetOptions) has another value. They are dropped until it has some, or no
/// packet has come for a second; and for a second after it was last too late it is not waited for
/// again.
pub const GRACE: Duration = Duration::from_millis(10);
/// The fraction of the time-out for another driver's translations: the sender does not cause that
/// front end's silence.
const ANOTHERS_PART: u64 = 50;
/// The least of that time-out, ns.
const ANOTHERS_LEAST: u64 = 10_000_000;
/// For how long, in ns, a receiver that timed out is not waited for again: a receiver that is late
/// repeatedly holds up the others for a small part of the time only.
const DISTRUST_NS: u64 = 1_000_000_000;
/// How often, in ns, a missing translation is looked up again without an update.
const RETRY_NS: u64 = 5_000_000;

/// What was settled on with a driver, as far as it affects packets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Terms {
    /// The negotiated features.
    pub(super) features: u64,
    /// How long, in ns, a packet waits for a translation.
    pub(super) timeout_ns: u64,
}

impl Terms {
    /// Bytes of the header before each packet.
    #[inline]
    pub(super) fn header(self) -> usize {
        let new = feature::MRG_RXBUF | ringfence_virtq::F_VERSION_1;
        if self.features & new == 0 { LEGACY_HEADER } else { HEADER }
    }

    #[inline]
    pub(super) fn mergeable(self) -> bool {
        self.features & feature::MRG_RXBUF != 0
    }

    /// How long, in ns, packets wait for a translation of another driver before they are dropped;
    /// its access does not fail yet.
    pub(super) fn anothers_ns(self) -> u64 {
        (self.timeout_ns / ANOTHERS_PART).max(ANOTHERS_LEAST)
    }
}

/// A ring, and the memory that its addresses mean, for one round.
pub(super) struct BusRing<'a, B> {
    pub(super) ring: &'a mut NetRing,
    pub(super) bus: &'a B,
    pub(super) terms: Terms,
    /// Where its packets lie, those that lie in one piece.
    pub(super) runs: Runs<'a, B>,
}

impl<'a, B: Lasting> BusRing<'a, B> {
    /// The ring that packets are read from.
    pub(super) fn source(ring: &'a mut NetRing, bus: &'a B, terms: Terms) -> BusRing<'a, B> {
        BusRing { ring, bus, terms, runs: Runs::new(bus, Access::Read) }
    }

    /// The ring with the buffers to write.
    pub(super) fn target(ring: &'a mut NetRing, bus: &'a B, terms: Terms) -> BusRing<'a, B> {
        BusRing { ring, bus, terms, runs: Runs::new(bus, Access::Write) }
    }
}

/// The beginning of a round.
#[derive(Clone, Copy, Default)]
pub(super) struct Now {
    /// The sender's and the receiver's counts of updates. They are read before anything is looked
    /// up, so that a later update causes another look.
    pub(super) updates: (u64, u64),
    pub(super) ns: u64,
}

/// Which side a ring is on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Source,
    Target,
}

/// What was missing when a round ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    /// A translation of this side's.
    Translation(Side),
    /// Buffers of the receiver's: there are none left to try.
    Buffers,
}

/// A translation that is waited for.
#[derive(Clone, Copy)]
struct Stall {
    side: Side,
    since_ns: u64,
    retry_at: u64,
    updates: (u64, u64),
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

/// Something of the receiver's for which packets wait: for a while, after which they are dropped
/// until it comes. A receiver that has been too late is not waited for again at once.
#[derive(Default)]
struct Late {
    since_ns: Option<u64>,
    /// The sum of the waits that ended before it came.
    waited_ns: u64,
    /// When it was last found to be too late.
    late_at_ns: Option<u64>,
}

impl Late {
    /// It has not come; returns whether packets are dropped, because `most_ns` are over.
    fn is_too_late(&mut self, now_ns: u64, most_ns: u64) -> bool {
        if self.since_ns.is_none()
            && self.late_at_ns.take_if(|at| now_ns.saturating_sub(*at) >= DISTRUST_NS).is_some()
        {
            self.waited_ns = 0;
        }
        let since = *self.since_ns.get_or_insert(now_ns);
        if self.waited_ns.saturating_add(now_ns.saturating_sub(since)) >= most_ns {
            self.late_at_ns = Some(now_ns);
        }
        self.late_at_ns.is_some()
    }

    /// It has come.
    #[inline]
    fn come(&mut self) {
        (self.since_ns, self.waited_ns) = (None, 0);
    }

    /// It is not waited for any more, though it has not come.
    fn pause(&mut self, now_ns: u64) {
        if let Some(since) = self.since_ns.take() {
            self.waited_ns = self.waited_ns.saturating_add(now_ns.saturating_sub(since));
        }
    }

    /// Whether packets wait.
    fn holds(&self) -> bool {
        self.since_ns.is_some() && self.late_at_ns.is_none()
    }
}

/// The state of a lane between two rounds.
pub(super) struct Lane {
    stall: Option<Stall>,
    /// For how many more packets translations are prefetched.
    prefetch_for: u64,
    /// How many packets have passed since a translation was missing.
    passed: u64,
    /// How long the receiver may be without buffers.
    grace: Duration,
    /// How many buffers of the receiver's were held and too few.
    pub(super) too_few: usize,
    /// Its buffers, and its translations.
    buffers: Late,
    translations: Late,
    pub(super) source: Vec<HostSlice<'static>>,
    pub(super) target: Vec<HostSlice<'static>>,
}

impl Default for Lane {
    fn default() -> Lane {
        Lane::new(GRACE)
    }
}

impl Lane {
    /// A lane with a receiver that may be without buffers for `grace`.
    pub(super) fn new(grace: Duration) -> Lane {
        Lane {
            stall: None,
            prefetch_for: 0,
            passed: 0,
            grace,
            too_few: 0,
            buffers: Late::default(),
            translations: Late::default(),
            source: Vec::new(),
            target: Vec::new(),
        }
    }

    fn grace_ns(&self) -> u64 {
        u64::try_from(self.grace.as_nanos()).unwrap_or(u64::MAX)
    }

    /// When there is something to do without a notification.
    pub(super) fn next_due(&self) -> Option<u64> {
        let starved = self.buffers.since_ns.filter(|_| self.buffers.holds());
        let left = self.grace_ns().saturating_sub(self.buffers.waited_ns);
        let starved = starved.map(|since| since.saturating_add(left));
        self.stall.map(|stall| stall.retry_at).or(starved)
    }

    /// Whether packets that come have to wait.
    pub(super) fn holds_packets(&self) -> bool {
        let stalled = self.stall.is_some_and(|stall| match stall.side {
            Side::Source => true,
            Side::Target => self.translations.holds(),
        });
        stalled || self.buffers.holds()
    }

    /// Whether packets wait for its buffers.
    pub(super) fn waits_for_buffers(&self) -> bool {
        self.buffers.holds()
    }

    /// Whether it waits for a translation.
    pub(super) fn is_stalled(&self) -> bool {
        self.stall.is_some()
    }

    /// Whether an update or a refusal has arrived since it began to wait.
    pub(super) fn may_go_on(&self, updates: (u64, u64)) -> bool {
        self.stall.is_some_and(|stall| stall.updates != updates)
    }

    /// Whether nothing has changed for what it waits for.
    #[inline]
    pub(super) fn sleeps(&self, now: Now) -> bool {
        self.stall.is_some_and(|stall| stall.updates == now.updates && now.ns < stall.retry_at)
    }

    /// It waits for a translation of this side's, and for nothing else.
    pub(super) fn wait(&mut self, side: Side, Now { updates, ns }: Now) {
        self.buffers.pause(ns);
        if side == Side::Source {
            self.translations.pause(ns);
        }
        let before = self.stall.filter(|stall| stall.side == side);
        let since_ns = before.map_or(ns, |stall| stall.since_ns);
        let retry_at = next_tick(ns, RETRY_NS);
        self.stall = Some(Stall { side, since_ns, retry_at, updates });
    }

    /// Whether it waits for a translation of the receiver's.
    pub(super) fn waits_for_receiver(&self) -> bool {
        self.stall.is_some_and(|stall| stall.side == Side::Target)
    }

    /// A packet misses a translation of the receiver's; returns whether it is dropped, because that
    /// is too late.
    pub(super) fn translations_too_late(&mut self, now_ns: u64, most_ns: u64) -> bool {
        self.translations.is_too_late(now_ns, most_ns)
    }

    /// No packet waits for the receiver any more: there is no packet, or the receiver is gone, or a
    /// ring is at rest.
    pub(super) fn pause(&mut self, now_ns: u64) {
        self.stall.take_if(|stall| stall.side == Side::Target);
        self.translations.pause(now_ns);
        self.buffers.pause(now_ns);
    }

    /// No packet waits for a translation of the receiver's, which may come all the same.
    pub(super) fn rests(&mut self, now_ns: u64) {
        self.translations.pause(now_ns);
    }

    /// The ring of the packets is not there.
    pub(super) fn end(&mut self, now_ns: u64) {
        self.go_on();
        self.pause(now_ns);
    }

    /// Takes chains of the packets' ring; returns whether there are any. If a table's translation
    /// is missing, the lane waits for it.
    pub(super) fn takes<B: Lasting>(
        &mut self,
        place: &mut BusRing<'_, B>,
        many: usize,
        now: Now,
    ) -> bool {
        match place.ring.take(place.bus, many) {
            Ok(whole) if whole || place.ring.held() > 0 => {
                self.stall.take_if(|stall| stall.side == Side::Source);
            }
            Ok(_) => self.wait(Side::Source, now),
            Err(error) => {
                place.ring.fail(error);
                return false;
            }
        }
        place.ring.held() > 0
    }

    /// Whether it has waited for too long, by the terms of the sender.
    pub(super) fn is_over(&self, now_ns: u64, Terms { timeout_ns, .. }: Terms) -> bool {
        self.stall.is_some_and(|stall| now_ns.saturating_sub(stall.since_ns) >= timeout_ns)
    }

    /// Sends the misses of later packets, while translations were missing lately: the updates
    /// arrive while other packets are moved.
    #[inline]
    fn look_ahead(&mut self, look: impl FnOnce() -> bool) {
        if self.prefetch_for > 0 && !look() {
            self.prefetch_for = PREFETCH_FOR;
        }
    }

    /// A translation is missing; returns whether all are to be requested again.
    fn miss(&mut self) -> bool {
        self.prefetch_for = PREFETCH_FOR;
        std::mem::take(&mut self.passed) < FEW
    }

    /// Counts packets that have passed.
    #[inline]
    fn pass(&mut self, packets: u64) {
        self.prefetch_for = self.prefetch_for.saturating_sub(packets);
        self.passed += packets;
    }

    /// It need not wait for a translation any more.
    #[inline]
    pub(super) fn go_on(&mut self) {
        self.stall = None;
    }

    /// The receiver has taken a packet.
    #[inline]
    pub(super) fn fed(&mut self) {
        self.buffers.come();
        self.translations.come();
    }

    /// The receiver has no buffers; returns whether packets are dropped, because it has had none
    /// for too long.
    pub(super) fn buffers_too_late(&mut self, now_ns: u64) -> bool {
        self.buffers.is_too_late(now_ns, self.grace_ns())
    }

    /// Whether the ring is there; if its own translation is on its way, the lane waits for that.
    #[inline]
    pub(super) fn finds<B: Lasting>(&mut self, place: &mut BusRing<'_, B>, now: Now) -> bool {
        let ready = place.ring.ready(place.bus, now.ns);
        match ready {
            Ready::Yes => {}
            Ready::No => self.end(now.ns),
            Ready::Soon => self.wait(Side::Source, now),
        }
        ready == Ready::Yes
    }
}

/// One round, and what was moved in it.
pub(super) struct Round {
    pub(super) packets: u64,
    pub(super) bytes: u64,
    /// Also buffers.
    pub(super) lost: u64,
    /// What was missing when it ended, other than packets or time.
    pub(super) wants: Option<Want>,
    pub(super) now: Now,
}

impl Round {
    /// A round with nothing done yet.
    #[inline]
    pub(super) fn new(now: Now) -> Round {
        Round { packets: 0, bytes: 0, lost: 0, wants: None, now }
    }

    /// Begins a round of a single ring; `None` if that is not there, or still waits for a
    /// translation. What waited for too long is given up.
    #[inline]
    pub(super) fn begin<B: Lasting>(
        lane: &mut Lane,
        place: &mut BusRing<'_, B>,
        ns: u64,
    ) -> Option<Round> {
        let now = Now { updates: (place.bus.updates(), place.bus.updates()), ns };
        if lane.sleeps(now) || !lane.finds(place, now) {
            return None;
        }
        let mut round = Round::new(now);
        if lane.is_over(ns, place.terms) {
            round.lost += give_up(place);
            lane.go_on();
        }
        Some(round)
    }

    /// Takes a burst; false if the driver broke the rules.
    #[inline]
    pub(super) fn take<B: Lasting>(&mut self, place: &mut BusRing<'_, B>) -> bool {
        match place.ring.take(place.bus, BURST) {
            Ok(whole) => {
                let missing = !whole && place.ring.held() == 0;
                self.wants = missing.then_some(Want::Translation(Side::Source));
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

    /// Returns whether anything was done. If the lane waits, `send` sends all misses that can be
    /// found: also those sent before, if called with true. It returns whether nothing is missing.
    #[inline]
    pub(super) fn settle(&self, lane: &mut Lane, send: impl FnOnce(bool) -> bool) -> bool {
        lane.pass(self.packets + self.lost);
        if let Some(Want::Translation(side)) = self.wants {
            if self.packets > 0 {
                lane.go_on();
            }
            send(lane.miss());
            lane.wait(side, self.now);
        } else {
            lane.go_on();
            match self.wants {
                Some(_) => lane.rests(self.now.ns),
                None => lane.pause(self.now.ns),
            }
            lane.look_ahead(|| send(false));
        }
        self.packets + self.lost > 0
    }

    /// Counts what was done, and shows it to the driver.
    #[inline]
    pub(super) fn publish<B: Lasting>(&self, place: &mut BusRing<'_, B>) {
        place.ring.counters.passed(self.packets, self.bytes);
        place.ring.publish(place.bus.intact());
    }

    /// Ends a round of a single ring; true if anything was done.
    #[inline]
    pub(super) fn end<B: Lasting>(self, lane: &mut Lane, place: &mut BusRing<'_, B>) -> bool {
        let held = place.ring.held();
        let did = self.settle(lane, |again| miss_ahead(place, again));
        // Chains that `miss_ahead` found arrived after the ring was seen empty, and cause no
        // wake-up.
        let found = place.ring.held() > held;
        if did {
            self.publish(place);
        }
        did || found
    }
}

/// Sends all misses that can be found, those sent before only if `again`. Returns whether nothing
/// is missing.
#[cold]
fn miss_ahead<B: Lasting>(place: &mut BusRing<'_, B>, again: bool) -> bool {
    // A broken ring is detected, and reported, when its turn comes.
    let _ = place.ring.take(place.bus, AHEAD);
    place.ring.look_up(place.bus, AHEAD, again)
}

/// Drops all packets whose translation timed out. Returns how many.
#[cold]
pub(super) fn give_up<B: Lasting>(place: &mut BusRing<'_, B>) -> u64 {
    let mut count = 0;
    for at in (0..place.ring.held()).rev() {
        if !place.ring.prefetch(place.bus, at) {
            place.bus.gave_up();
            place.ring.reject(at, Lost::TimedOut);
            count += 1;
        }
    }
    count
}

/// Takes all packets and drops them. True if there were any.
#[cold]
pub(super) fn discard<S: Lasting>(
    lane: &mut Lane,
    place: &mut BusRing<'_, S>,
    why: Lost,
    now: Now,
) -> bool {
    if !lane.finds(place, now) || !lane.takes(place, BURST, now) {
        return false;
    }
    while place.ring.held() > 0 {
        place.ring.lose(why);
    }
    place.ring.publish(place.bus.intact());
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ns: u64) -> Now {
        Now { updates: (0, 0), ns }
    }

    #[test]
    fn a_receiver_that_was_too_late_is_not_waited_for_again_at_once() {
        let mut late = Late::default();
        assert!(!late.is_too_late(1, 100) && late.holds());
        assert!(!late.is_too_late(100, 100) && late.holds());
        assert!(late.is_too_late(101, 100) && !late.holds());
        // It comes now and then.
        late.come();
        assert!(late.is_too_late(100 + DISTRUST_NS, 100) && !late.holds());
        late.come();
        assert!(!late.is_too_late(101 + DISTRUST_NS, 100) && late.holds());
        // Time that it was not waited for does not count.
        late.come();
        assert!(!late.is_too_late(5 * DISTRUST_NS, 100) && late.holds());
        late.pause(5 * DISTRUST_NS + 60);
        assert!(!late.holds() && !late.is_too_late(7 * DISTRUST_NS, 100) && late.holds());
        assert!(late.is_too_late(7 * DISTRUST_NS + 40, 100));
        // The distrust ends.
        late.pause(7 * DISTRUST_NS + 50);
        assert!(!late.is_too_late(9 * DISTRUST_NS, 100));
    }

    #[test]
    fn buffers_and_translations_are_late_by_themselves() {
        let mut lane = Lane::default();
        assert!(!lane.buffers_too_late(0) && lane.buffers_too_late(lane.grace_ns()));
        lane.wait(Side::Target, at(5));
        assert!(!lane.translations_too_late(5, 100) && lane.holds_packets());
        assert!(lane.translations_too_late(105, 100) && !lane.holds_packets());
        // The lane waits for translations of the sender.
        lane.wait(Side::Source, at(106));
        assert!(lane.holds_packets());
        lane.pause(107);
        assert!(lane.holds_packets() && !lane.waits_for_buffers() && lane.next_due().is_some());
        lane.end(108);
        assert!(!lane.holds_packets() && lane.next_due().is_none());
    }

    #[test]
    fn a_lane_that_waits_for_a_translation_does_not_wait_for_buffers() {
        for side in [Side::Source, Side::Target] {
            let mut lane = Lane::default();
            assert!(!lane.buffers_too_late(7) && lane.waits_for_buffers());
            assert_eq!(lane.next_due(), Some(7 + lane.grace_ns()));
            lane.wait(side, at(lane.grace_ns()));
            assert!(!lane.waits_for_buffers());
            assert_eq!(lane.next_due(), Some(lane.grace_ns() + RETRY_NS));
            // The time before counts, unless a packet passes.
            lane.go_on();
            assert!(!lane.buffers_too_late(RETRY_NS + lane.grace_ns()));
            assert!(lane.buffers_too_late(RETRY_NS + lane.grace_ns() + 7));
        }
        let mut lane = Lane::default();
        assert!(!lane.buffers_too_late(7));
        lane.wait(Side::Target, at(lane.grace_ns()));
        lane.fed();
        assert!(
            !lane.buffers_too_late(lane.grace_ns())
                && !lane.buffers_too_late(2 * lane.grace_ns() - 1)
        );
    }

    #[test]
    fn a_round_that_ends_for_want_of_nothing_leaves_nothing_to_wait_for() {
        let mut lane = Lane::default();
        assert!(!lane.buffers_too_late(7) && !lane.translations_too_late(7, 100));
        // The packet that waited was dropped.
        let mut round = Round::new(at(9));
        round.lost = 1;
        assert!(round.settle(&mut lane, |_| true));
        assert!(lane.next_due().is_none() && !lane.holds_packets());
        // Another finds none.
        assert!(!lane.buffers_too_late(20));
        round.wants = Some(Want::Buffers);
        round.settle(&mut lane, |_| true);
        assert!(lane.waits_for_buffers() && lane.next_due().is_some());
    }
}
