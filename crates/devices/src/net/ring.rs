//! One ring of a network device, and the chains that were taken from it and not given back.

use std::sync::Arc;

use ringfence_mem::{Access, AccessError, Translate};
use ringfence_run::{notifier::Notifier, worker::Kick};
use ringfence_vhost_user::RingAddresses;
use ringfence_vhost_user_backend::{Events, RingLog};
use ringfence_virtq::{
    ChainFault, RingError, cut,
    device::{self, Burst, Taken},
};

use tracing::error;

use super::{
    pieces::Lasting,
    stats::{Lost, QueueCounters},
    wire::MAX_PACKET,
};

/// The most chains that are held, and so the most for which misses are sent at once.
pub(super) const DEPTH: usize = 256;

/// How often, in ns, the address of an unmapped ring is looked up again.
const AWAY_NS: u64 = 1_000_000;

/// Whether a ring can be worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ready {
    /// It can.
    Yes,
    /// Its own translation is on its way.
    Soon,
    /// It cannot.
    No,
}

/// The next multiple of `period_ns`: everything that is due is then looked up together, and a
/// worker wakes once for all.
pub(super) fn next_tick(now_ns: u64, period_ns: u64) -> u64 {
    (now_ns - now_ns % period_ns).saturating_add(period_ns)
}

/// One ring that was started.
pub(super) struct NetRing {
    index: u16,
    pub(super) queue: device::Queue,
    /// Chains that were taken and not given back, in the order of the ring.
    taken: Burst,
    /// For how many of them, the oldest, misses were looked up.
    looked_up: usize,
    kick: Option<Kick>,
    pub(super) call: Option<Arc<Notifier>>,
    pub(super) err: Option<Arc<Notifier>>,
    pub(super) enabled: bool,
    /// It broke the rules, and does nothing any more.
    pub(super) failed: bool,
    /// Whether it lies in no region of the front end's memory now.
    gone: bool,
    /// When the address of the ring, which is unmapped, is looked up again.
    away_until: Option<u64>,
    /// Whether a fault was reported since it was mapped last.
    fault_reported: bool,
    /// The count of binding changes of the endpoint when it was found last.
    found: Option<u64>,
    pub(super) counters: Arc<QueueCounters>,
    name: Arc<str>,
    /// Where what is written into the ring is marked.
    pub(super) log: RingLog,
}

impl NetRing {
    pub(super) fn new(
        index: u16,
        queue: device::Queue,
        events: Events,
        counters: Arc<QueueCounters>,
        name: Arc<str>,
        log: RingLog,
    ) -> NetRing {
        let Events { kick, call, err, .. } = events;
        let mut ring = NetRing {
            index,
            queue,
            taken: Burst::new(),
            looked_up: 0,
            kick,
            call,
            err,
            enabled: false,
            failed: false,
            gone: false,
            away_until: None,
            fault_reported: false,
            found: None,
            counters,
            name,
            log,
        };
        ring.disarm();
        ring
    }

    /// Whether it takes part: a ring that has failed does not.
    pub(super) fn works(&self) -> bool {
        self.enabled && !self.failed
    }

    /// How many chains are held.
    #[inline]
    pub(super) fn held(&self) -> usize {
        self.taken.len()
    }

    /// A chain that is held, counted from the oldest.
    ///
    /// # Panics
    /// If fewer are held.
    #[inline]
    pub(super) fn chain(&self, at: usize) -> Taken<'_> {
        self.taken.get(at).expect("a chain that is held")
    }

    /// All chains that are held, the oldest first.
    #[inline]
    pub(super) fn chains(&self) -> impl Iterator<Item = Taken<'_>> {
        self.taken.iter()
    }

    /// Whether no more can be held than there is.
    pub(super) fn is_full(&self) -> bool {
        self.held() >= DEPTH.min(self.queue.config().size.into())
    }

    /// Stops this ring; everything else goes on.
    #[cold]
    pub(super) fn fail(&mut self, why: impl std::fmt::Display) {
        if !std::mem::replace(&mut self.failed, true) {
            error!(source = %self.name, "queue {} stopped: {why}", self.index);
            self.counters.stopped();
            if let Some(err) = &self.err {
                err.notify();
            }
        }
    }

    /// Checks whether the ring is where it was, and looks it up if not (rules D21, D22).
    #[inline]
    pub(super) fn ready<B: Lasting>(&mut self, bus: &B, now_ns: u64) -> Ready {
        if self.failed || self.gone {
            return Ready::No;
        }
        if self.queue.is_valid() { Ready::Yes } else { self.look_for(bus, now_ns) }
    }

    #[cold]
    fn look_for<B: Lasting>(&mut self, bus: &B, now_ns: u64) -> Ready {
        if self.away_until.is_some_and(|until| now_ns < until) {
            return Ready::No;
        }
        // A ring that was found under an earlier binding of the endpoint is looked up without
        // reporting faults: firmware has left it, and the driver did not cause the access.
        let quietly = self.fault_reported || self.found.is_some_and(|at| at != bus.bindings());
        let queue = &mut self.queue;
        let found = match quietly {
            true => bus.silently(|| queue.revalidate(bus)),
            false => queue.revalidate(bus),
        };
        match found {
            Ok(()) => {
                (self.away_until, self.fault_reported) = (None, false);
                self.found = Some(bus.bindings());
                // Kicks could not be suppressed while it was not there, and the polling worker is
                // awake.
                self.disarm();
                Ready::Yes
            }
            Err(RingError::Unreachable { error: AccessError::Again { .. }, .. }) => {
                // The other areas are needed next, to their last page: their misses are sent
                // together.
                for (addr, len, access) in self.queue.config().areas() {
                    bus.prefetch(addr, len as u64, access);
                }
                Ready::Soon
            }
            Err(RingError::Unreachable { .. }) => {
                self.fault_reported = true;
                self.away_until = Some(next_tick(now_ns, AWAY_NS));
                Ready::No
            }
            Err(error) => {
                self.fail(error);
                Ready::No
            }
        }
    }

    /// When an unmapped ring is looked up again, if at all.
    pub(super) fn next_look(&self) -> Option<u64> {
        self.away_until.filter(|_| !self.failed)
    }

    /// Takes chains until `many` are held, or there are no more. False if an indirect table's
    /// translation is missing.
    ///
    /// # Errors
    /// The driver broke the rules.
    #[inline]
    pub(super) fn take<B: Translate>(&mut self, bus: &B, many: usize) -> Result<bool, RingError> {
        let Some(most) = many.min(DEPTH).checked_sub(self.held()).filter(|&most| most > 0) else {
            return Ok(true);
        };
        match self.queue.pop_more(bus, most, &mut self.taken) {
            Ok(count) => {
                if let Some(kick) = &self.kick {
                    kick.found(count);
                }
                Ok(true)
            }
            Err(error) => missing_table(error),
        }
    }

    /// Returns the oldest held chain to the driver, with `len` bytes of it written.
    #[inline]
    pub(super) fn give_back(&mut self, len: u32) {
        self.give_back_all(std::iter::once(len));
    }

    /// Gives the oldest chains back, with the bytes written to each.
    #[inline]
    pub(super) fn give_back_all(&mut self, lens: impl ExactSizeIterator<Item = u32>) {
        let count = lens.len();
        debug_assert!(count <= self.held());
        self.queue.push_used_burst(self.taken.heads().zip(lens));
        self.taken.forget(count);
        self.looked_up = self.looked_up.saturating_sub(count);
    }

    /// Gives a chain back unused that need not be the oldest.
    #[cold]
    pub(super) fn reject(&mut self, at: usize, why: Lost) {
        self.counters.lose(why, 1);
        self.queue.push_used(self.chain(at).head(), 0);
        self.taken.remove(at);
        self.looked_up -= usize::from(at < self.looked_up);
    }

    /// Drops the oldest packet that is held.
    #[cold]
    pub(super) fn lose(&mut self, why: Lost) {
        self.counters.lose(why, 1);
        self.give_back(0);
    }

    /// Looks up all translations that a held chain can need, and notes misses. True if none is
    /// missing.
    pub(super) fn prefetch<B: Lasting>(&self, bus: &B, at: usize) -> bool {
        // No packet reaches further, whatever the driver says of its buffers' lengths.
        cut(self.chain(at).descs(), 0, MAX_PACKET as u64).fold(true, |ready, desc| {
            let access = if desc.write { Access::Write } else { Access::Read };
            bus.prefetch(desc.addr, desc.len.into(), access) & ready
        })
    }

    /// Looks up the translations of those of the first `many` held chains that were not looked up
    /// yet, or of all of them if `again`. Returns whether none was missing.
    pub(super) fn look_up<B: Lasting>(&mut self, bus: &B, many: usize, again: bool) -> bool {
        let many = many.min(self.held());
        let from = if again { 0 } else { self.looked_up };
        self.looked_up = self.looked_up.max(many);
        (from..many).fold(true, |ready, at| self.prefetch(bus, at) & ready)
    }

    /// Publishes the used chains, and notifies the driver if it wants that. `memory`: whether
    /// what it has was intact.
    #[inline]
    pub(super) fn publish(&mut self, memory: Result<(), AccessError>) {
        // Nothing is published that may have been read from lost memory.
        if let Err(error) = memory {
            return self.fail(error);
        }
        let wanted = self.queue.publish_used();
        self.log.mark(&mut self.queue);
        if wanted && let Some(call) = &self.call {
            call.notify();
        }
    }

    /// Enables kicks; true if there is something to do already.
    pub(super) fn arm(&mut self) -> bool {
        if self.failed || self.gone || !self.queue.is_valid() {
            return false;
        }
        let more = self.queue.enable_kicks();
        self.log.mark(&mut self.queue);
        more
    }

    /// Suppresses kicks.
    pub(super) fn disarm(&mut self) {
        if !self.failed && !self.gone && self.queue.is_valid() {
            self.queue.suppress_kicks();
            self.log.mark(&mut self.queue);
        }
    }

    /// What the driver kicks with.
    pub(super) fn kick(&self) -> Option<&Kick> {
        self.kick.as_ref().filter(|_| !self.failed)
    }

    /// Moves the ring to these addresses, where it is looked up next.
    pub(super) fn relocate(&mut self, addresses: RingAddresses) {
        let RingAddresses { desc, avail, used, log } = addresses;
        self.log.set_at(&mut self.queue, log);
        self.queue.relocate(desc, avail, used);
        (self.away_until, self.fault_reported, self.found) = (None, false, None);
    }

    /// Translates the ring's addresses anew.
    pub(super) fn move_to(&mut self, mem: &impl Translate) {
        if self.failed {
            return;
        }
        let found = self.queue.revalidate(mem);
        // A region that changes is first removed and then added again.
        let was_gone = self.gone;
        self.gone = matches!(found, Err(RingError::Unreachable { .. }));
        match found {
            Err(error) if !self.gone => self.fail(error),
            Ok(()) if was_gone => self.disarm(),
            _ => {}
        }
    }

    /// Puts back what is held, so that it is taken again when the ring goes on; returns that index,
    /// unless it is unknown, and the kick descriptor, to be dropped elsewhere.
    pub(super) fn stop(mut self, bus: &impl Translate) -> (Option<u32>, Option<Kick>) {
        // The newest first. A chain that cannot be put back, because a later one was given up, is
        // lost.
        while let Some(last) = self.held().checked_sub(1) {
            if !self.queue.untake(self.chain(last).head()) {
                break;
            }
            self.taken.truncate(last);
        }
        if self.held() > 0 && !self.failed && !self.gone && self.queue.is_valid() {
            while self.held() > 0 {
                self.lose(Lost::NoReceiver);
            }
            self.publish(bus.check());
        }
        ((!self.queue.is_lost()).then(|| self.queue.next_avail()), self.kick)
    }
}

#[cold]
fn missing_table(error: RingError) -> Result<bool, RingError> {
    match error {
        RingError::Chain {
            fault: ChainFault::IndirectUnreachable { error: AccessError::Again { .. }, .. },
            ..
        } => Ok(false),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use ringfence_mem::{GuestRam, Memory, Physical};
    use ringfence_virtq::driver::{Queue, QueueConfig, Rings};

    use super::*;
    use crate::net::round::{BusRing, Lane, Now, Round, Side, Terms, Want};

    /// A ring of 8 descriptors that was not looked up yet.
    fn postponed(packed: bool, [desc, avail, used]: [u64; 3]) -> NetRing {
        let base = device::RingConfig::start(packed);
        let (event_idx, indirect) = (false, false);
        let config =
            device::RingConfig { size: 8, desc, avail, used, event_idx, indirect, packed, base };
        let queue = device::Queue::postponed(config).unwrap();
        let events = Events::default();
        NetRing::new(0, queue, events, Arc::default(), "test".into(), RingLog::default())
    }

    /// The driver's end of a ring at the beginning of its memory, and the device's.
    fn both_ends(ram: &Arc<GuestRam>, packed: bool) -> (Queue, NetRing, [u64; 3]) {
        let config = QueueConfig { size: 8, event_idx: false, packed };
        let offsets = config.offsets();
        let window = ram.window(0, offsets.len).unwrap();
        let rings = Rings::placed(&window, &config).unwrap();
        let at = [offsets.desc, offsets.avail, offsets.used].map(|offset| offset as u64);
        (Queue::with_config(config, rings).unwrap(), postponed(packed, at), at)
    }

    #[test]
    fn a_ring_that_is_away_is_looked_for_together_with_others() {
        let bus = Physical::new(Memory::of_ram(&GuestRam::new(4096, 0).unwrap()).unwrap());
        let mut ring = postponed(false, [1 << 40; 3]);
        assert_eq!(ring.ready(&bus, 0), Ready::No);
        assert_eq!(ring.next_look(), Some(AWAY_NS));
        assert_eq!(ring.ready(&bus, AWAY_NS + 7), Ready::No);
        assert_eq!(ring.next_look(), Some(2 * AWAY_NS), "together with others");
    }

    #[test]
    fn what_comes_during_a_prefetch_is_not_slept_over() {
        let ram = GuestRam::new(16 * 4096, 0).unwrap();
        let bus = Physical::new(Memory::of_ram(&ram).unwrap());
        let (mut driver, mut ring, _) = both_ends(&ram, false);
        assert_eq!(ring.ready(&bus, 0), Ready::Yes);
        let (mut lane, mut place) =
            (Lane::default(), BusRing::source(&mut ring, &bus, Terms::default()));
        let mut round = Round::new(Now::default());
        // A translation was missing not long ago.
        round.wants = Some(Want::Translation(Side::Source));
        assert!(!round.end(&mut lane, &mut place));
        // The ring was found to be empty, and then this came: without a kick, as the worker is awake.
        driver.add(&[ringfence_virtq::Desc::readable(0, 1)], 0).unwrap();
        driver.publish();
        assert!(!driver.needs_kick());
        assert!(
            Round::new(Now { updates: (0, 0), ns: 1 }).end(&mut lane, &mut place),
            "it looks again"
        );
        assert!(!ring.arm() && ring.held() == 1, "no kick would report it");
    }

    // rule D22
    #[test]
    fn a_ring_that_is_found_late_or_elsewhere_enables_kicks_only_before_a_sleep() {
        for packed in [false, true] {
            let ram = GuestRam::new(16 * 4096, 0).unwrap();
            let bus = Physical::new(Memory::of_ram(&ram).unwrap());
            let (mut driver, mut ring, [desc, avail, used]) = both_ends(&ram, packed);
            let mut kicked = || {
                driver.add(&[ringfence_virtq::Desc::readable(0, 1)], 0).unwrap();
                driver.publish();
                driver.needs_kick()
            };
            assert!(kicked(), "nothing is known of the ring");
            assert_eq!(ring.ready(&bus, 0), Ready::Yes);
            assert!(!kicked());
            assert!(ring.arm(), "two packets are there");
            assert!(kicked());
            ring.disarm();
            assert!(!kicked());
            ring.relocate(RingAddresses { desc, avail, used, log: None });
            ring.arm();
            assert_eq!(ring.ready(&bus, 0), Ready::Yes);
            assert!(!kicked());
        }
    }
}
