//! Open misses: translations that were requested and have not arrived yet.

use std::{collections::HashMap, sync::Arc};

use ringfence_iommu::{Iova, Prot, Range};
use ringfence_sync::{
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
    lock::Mutex,
    mix::Mix,
};

/// The granularity at which misses are distinguished.
pub(crate) const PAGE: u64 = 4096;

/// A missing translation (rule [D16]).
///
/// [D16]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d16
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Miss {
    /// The address.
    pub iova: Iova,
    /// The access that needs it.
    pub access: Prot,
    /// The number of this miss, if it is sent again because the first one got no update for a
    /// while. It requires a reply in any case, which is passed to
    /// [`Iotlb::reply`](crate::Iotlb::reply) with the number.
    pub again: Option<u64>,
}

impl Miss {
    /// The key in the pending list: the page and the access (rule D17).
    pub(crate) fn key(&self) -> Key {
        Key::new(self.iova.0 / PAGE, self.access)
    }
}

/// A page's number, shifted by [`ACCESS_BITS`], and the access.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key(u64);

/// How many bits of a [`Key`] are the access.
const ACCESS_BITS: u32 = 2;

impl Key {
    fn new(page: u64, access: Prot) -> Key {
        const { assert!(Prot::RW.bits() == (1 << ACCESS_BITS) - 1) };
        debug_assert!(access.intersects(Prot::RW), "a miss of no access");
        Key(page << ACCESS_BITS | u64::from(access.bits() & Prot::RW.bits()))
    }

    fn page(self) -> u64 {
        self.0 >> ACCESS_BITS
    }

    fn access(self) -> Prot {
        Prot::from_bits_truncate(self.0 as u32 & Prot::RW.bits())
    }
}

/// How many entries the list has room for when it is empty: where it was longer, its memory is given back.
const KEPT: usize = 1024;

/// Where misses go, such as a front end, which replies with updates.
///
/// Called with no lock held (rule [D20]), by workers between two accesses and by the threads that
/// pass refusals to the IOTLB. It must not block.
///
/// [D20]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d20
pub trait MissSink: Send + Sync {
    /// Sends misses; returns how many were sent, counted from the first. The rest is sent later.
    fn send(&self, misses: &[Miss]) -> usize;

    /// A translation exists, but does not allow this access and will not (rule [D16]). Called once
    /// for each refusal, so at most once per miss; a failure that cannot be sent is lost.
    ///
    /// [D16]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d16
    fn fail(&self, misses: &[Miss]) {
        let _ = misses;
    }
}

/// What the IOTLB needs of a view, or of guards, that waits for translations.
pub(crate) struct Waiter {
    /// Counts the updates and refusals that concern it.
    updates: AtomicU64,
    /// Called at each of them, to wake a worker that may be asleep.
    wake: Box<dyn Fn() + Send + Sync>,
}

impl Waiter {
    pub(crate) fn new(wake: Box<dyn Fn() + Send + Sync>) -> Arc<Waiter> {
        Arc::new(Waiter { updates: AtomicU64::new(0), wake })
    }

    pub(crate) fn updates(&self) -> u64 {
        self.updates.load(Ordering::Acquire)
    }

    fn wake(&self) {
        // Release: a thread that reads the new count finds the translation in the table, or that something
        // was refused.
        self.updates.fetch_add(1, Ordering::Release);
        (self.wake)();
    }
}

/// A list of mostly one item, which is stored without an allocation.
struct Few<T> {
    one: Option<T>,
    more: Vec<T>,
}

impl<T> Few<T> {
    const NONE: Few<T> = Few { one: None, more: Vec::new() };

    fn push(&mut self, item: T) {
        match &mut self.one {
            Some(_) => self.more.push(item),
            one => *one = Some(item),
        }
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        self.one.iter().chain(&self.more)
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.one.iter_mut().chain(&mut self.more)
    }
}

/// Waiters to wake once the list is unlocked, because waking is a system call. Each is woken once,
/// however many of its misses are resolved.
struct Woken(Few<Arc<Waiter>>);

impl Woken {
    const NONE: Woken = Woken(Few::NONE);

    fn add(&mut self, waiter: &Arc<Waiter>) {
        if !self.0.iter().any(|other| Arc::ptr_eq(other, waiter)) {
            self.0.push(Arc::clone(waiter));
        }
    }

    fn wake(self) {
        self.0.iter().for_each(|waiter| waiter.wake());
    }
}

#[derive(Clone, Copy)]
enum State {
    /// It could not be sent: the next lookup sends it.
    Unsent,
    /// Sent at this time.
    Sent { at_ns: u64 },
    /// There is no such translation: lookups by its waiters fail until then.
    Refused { until_ns: u64 },
}

/// A waiter on a page, and the part of the page that it waits for.
struct Waiting {
    waiter: Arc<Waiter>,
    first: Iova,
    last: Iova,
}

struct Pending {
    /// The address that was sent.
    iova: Iova,
    state: State,
    /// When it was last looked up.
    noted_ns: u64,
    /// 1 once the front end has acknowledged the miss, 0 before.
    acknowledged: u32,
    waiters: Few<Waiting>,
    /// The number of the miss when it was first sent.
    number: u64,
    /// The number of the miss that was refused last.
    refused: Option<u64>,
}

impl Pending {
    fn new(iova: Iova, now_ns: u64, number: u64) -> Pending {
        Pending {
            iova,
            state: State::Sent { at_ns: now_ns },
            noted_ns: now_ns,
            acknowledged: 0,
            waiters: Few::NONE,
            number,
            refused: None,
        }
    }

    fn waits(&self, waiter: &Arc<Waiter>) -> bool {
        self.waiters.iter().any(|waiting| Arc::ptr_eq(&waiting.waiter, waiter))
    }

    fn add(&mut self, waiter: &Arc<Waiter>, iova: Iova) {
        let known = |waiting: &&mut Waiting| Arc::ptr_eq(&waiting.waiter, waiter);
        if let Some(waiting) = self.waiters.iter_mut().find(known) {
            waiting.first = waiting.first.min(iova);
            waiting.last = waiting.last.max(iova);
            return;
        }
        let waiter = Arc::clone(waiter);
        self.waiters.push(Waiting { waiter, first: iova, last: iova });
    }
}

/// Time limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// After this long without an update or a refusal a miss is sent again. A view that still waits
    /// looks again within this time.
    pub(crate) again_ns: u64,
    /// How long a refusal holds for waiters that do not pass `since`.
    pub(crate) refused_ns: u64,
}

struct List {
    pending: HashMap<Key, Pending, Mix>,
    /// Waiters that found the list full, to be woken when it has room.
    blocked: Vec<Arc<Waiter>>,
}

/// So few pages are looked up in any case.
const LOOKED_UP: u64 = 16;

impl List {
    fn new(seed: u64) -> List {
        List { pending: HashMap::with_hasher(Mix::new(seed)), blocked: Vec::new() }
    }

    /// Removes the entries in the pages of `range` for which `gone` returns true, in no order; their waiters,
    /// added to `woken`, look again.
    fn drop_if(
        &mut self,
        range: Range,
        woken: &mut Woken,
        mut gone: impl FnMut(&mut Pending, Prot, &mut Woken) -> bool,
    ) {
        let before = self.pending.len();
        let pages = range.first().0 / PAGE..=range.last().0 / PAGE;
        let mut is_over = |key: Key, pending: &mut Pending| {
            let over = gone(pending, key.access(), woken);
            if over {
                pending.waiters.iter().for_each(|waiting| woken.add(&waiting.waiter));
            }
            over
        };
        // Whichever is less work: to look each page up, or to look at the whole list.
        if pages.end() - pages.start() < LOOKED_UP.max(before as u64 / 4) {
            for page in pages {
                for access in [Prot::READ, Prot::WRITE, Prot::RW] {
                    let key = Key::new(page, access);
                    let found = self.pending.get_mut(&key);
                    if found.is_some_and(|pending| is_over(key, pending)) {
                        self.pending.remove(&key);
                    }
                }
            }
        } else {
            self.pending
                .retain(|&key, pending| !(pages.contains(&key.page()) && is_over(key, pending)));
        }
        if self.pending.len() < before {
            self.blocked.drain(..).for_each(|waiter| woken.add(&waiter));
        }
    }

    /// Removes what is no longer needed: old refusals, and misses whose waiters have given up.
    fn tidy(&mut self, times: Times, now_ns: u64, woken: &mut Woken) {
        self.drop_if(Range::ALL, woken, |pending, _, _| match pending.state {
            State::Refused { until_ns } if now_ns < until_ns => false,
            _ => now_ns >= pending.noted_ns.saturating_add(times.again_ns),
        });
    }
}

/// The pending list: at most one miss for each page and access (rule D17), and a bounded number in
/// total.
///
/// # Why no update is lost
/// An update changes the table first and searches the list then; a view that finds a translation
/// missing enters the list first and looks at the table again then. Each has a fence between, so one of
/// them sees what the other did. Most updates are for no miss: they find the list empty without its lock.
///
/// # Which waiters a refusal concerns
/// Those that waited before the miss was sent, however late they look: what they wait for had to be
/// mapped by then. One that came later sends a new miss, because there may be a translation by now.
/// Misses are numbered, and a view that begins to wait notes how many there were; to one that does
/// not, a refusal applies only if it was on the list, and only for a moment. The reply to a miss
/// that was sent again carries its number: if the page was updated, unmapped and missed again
/// meanwhile, the reply is older than the open miss and does not concern it.
pub(crate) struct Misses {
    /// Searched and extended under the lock, so threads that contend for it sleep.
    list: Mutex<List>,
    /// How many places of the list are taken. Written under its lock.
    taken: AtomicUsize,
    /// Whether anything was refused since the list was last empty. If not, no lookup that waits needs the
    /// lock. Written under it.
    refusing: AtomicBool,
    /// How many misses there were, those sent again included.
    count: AtomicU64,
    most: usize,
    times: Times,
}

impl Misses {
    /// An empty list for `most` misses; the peer whose pages it lists does not know `seed`.
    pub(crate) fn new(most: usize, times: Times, seed: u64) -> Misses {
        let (list, count) = (Mutex::new(List::new(seed)), AtomicU64::new(0));
        let (taken, refusing) = (AtomicUsize::new(0), AtomicBool::new(false));
        Misses { list, taken, refusing, count, most, times }
    }

    /// How many misses there were so far, those sent again included.
    pub(crate) fn count(&self) -> u64 {
        // A caller that notes the count enters the list, under its lock, after this.
        self.count.load(Ordering::Relaxed)
    }

    /// The number of the next miss.
    fn number(&self) -> u64 {
        self.count.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// How many misses were sent and have got neither an update nor a refusal, those that no access
    /// waits for any more included: an update may still come.
    pub(crate) fn open(&self) -> usize {
        let sent = |pending: &&Pending| matches!(pending.state, State::Sent { .. });
        self.list.lock().pending.values().filter(sent).count()
    }

    /// How many places of the list are taken.
    #[cfg(test)]
    pub(crate) fn listed(&self) -> usize {
        self.list.lock().pending.len()
    }

    /// Whether a missing translation was refused, to an access that has waited `since` there were
    /// so many misses, or, with `None`, to `waiter` a moment ago.
    pub(crate) fn is_refused(
        &self,
        (iova, access): (Iova, Prot),
        since: Option<u64>,
        waiter: &Arc<Waiter>,
        now_ns: impl FnOnce() -> u64,
    ) -> bool {
        // A waiter is woken after the store: one that has read the new count of its updates, and looks
        // again because of it, finds true here.
        if !self.refusing.load(Ordering::Relaxed) {
            return false;
        }
        let key = Miss { iova, access, again: None }.key();
        let list = self.list.lock();
        list.pending.get(&key).is_some_and(|pending| match (since, pending.state) {
            (Some(since), _) => pending.refused.is_some_and(|number| since < number),
            (None, State::Refused { until_ns }) => now_ns() < until_ns && pending.waits(waiter),
            (None, _) => false,
        })
    }

    /// Notes that `waiter` waits for `wanted` and leaves in `wanted` what to send now. `there`
    /// returns whether a translation has arrived meanwhile.
    pub(crate) fn note(
        &self,
        wanted: &mut Vec<Miss>,
        waiter: &Arc<Waiter>,
        now_ns: u64,
        there: impl Fn(&Miss) -> bool,
    ) {
        let mut woken = Woken::NONE;
        let noted = wanted.clone();
        {
            let mut list = self.list.lock();
            if list.pending.len().saturating_add(wanted.len()) > self.most {
                list.tidy(self.times, now_ns, &mut woken);
            }
            wanted.retain_mut(|miss| self.enter(&mut list, miss, waiter, now_ns));
            self.show(&mut list);
        }
        woken.wake();
        // After the list was entered: see `Misses`.
        fence(Ordering::SeqCst);
        for miss in noted.into_iter().filter(|miss| there(miss)) {
            self.update(point(miss.iova), miss.access);
            wanted.retain(|other| other.key() != miss.key());
        }
    }

    /// Enters `miss`; returns whether it is to be sent.
    fn enter(&self, list: &mut List, miss: &mut Miss, waiter: &Arc<Waiter>, now_ns: u64) -> bool {
        let (full, iova) = (list.pending.len() >= self.most, miss.iova);
        let Some(found) = list.pending.get_mut(&miss.key()) else {
            if full {
                let blocked = &mut list.blocked;
                if !blocked.iter().any(|other| Arc::ptr_eq(other, waiter)) {
                    blocked.push(Arc::clone(waiter));
                }
                return false;
            }
            let mut pending = Pending::new(miss.iova, now_ns, self.number());
            pending.add(waiter, iova);
            list.pending.insert(miss.key(), pending);
            return true;
        };
        found.noted_ns = now_ns;
        let send = match found.state {
            State::Unsent => true,
            State::Sent { at_ns } => {
                let late = now_ns >= at_ns.saturating_add(self.times.again_ns);
                miss.again = late.then(|| self.number());
                late
            }
            State::Refused { .. } => {
                // A new miss. Waiters that have not seen the refusal yet still will, in `refused`.
                let refused = found.refused;
                *found = Pending { refused, ..Pending::new(iova, now_ns, self.number()) };
                true
            }
        };
        if send {
            // The address that was sent first, so that an update matches the entry.
            miss.iova = found.iova;
            found.state = State::Sent { at_ns: now_ns };
        }
        found.add(waiter, iova);
        send
    }

    /// `misses` could not be sent: the next lookup sends them.
    pub(crate) fn unsent(&self, misses: &[Miss]) {
        let mut list = self.list.lock();
        for miss in misses {
            if let Some(found) = list.pending.get_mut(&miss.key())
                && matches!(found.state, State::Sent { .. })
            {
                found.state = State::Unsent;
            }
        }
    }

    /// A translation of `range` with `prot` is there: wakes the waiters that it satisfies, in
    /// address *and* permission (rule D18).
    pub(crate) fn update(&self, range: Range, prot: Prot) {
        // After the table was changed: see `Misses`.
        fence(Ordering::SeqCst);
        if self.taken.load(Ordering::Relaxed) == 0 {
            return;
        }
        self.change(range, |pending, access, woken| {
            if !prot.allows(access) {
                return false;
            }
            // A front end's pages are usually no smaller than ours. If they are, this may satisfy
            // some of the waiters only, and the miss stays open.
            for waiting in pending.waiters.iter() {
                if waiting.first <= range.last() && range.first() <= waiting.last {
                    woken.add(&waiting.waiter);
                }
            }
            range.contains(pending.iova)
        });
    }

    /// There is no translation of `range` for `access`: the reply to the miss with the number
    /// `number`, or, with `None`, to no miss in particular. Returns the misses that this refuses.
    pub(crate) fn refuse(
        &self,
        range: Range,
        access: Prot,
        number: Option<u64>,
        now_ns: u64,
    ) -> Vec<Miss> {
        let mut refused = Vec::new();
        self.change(range, |pending, wanted, woken| {
            let open = !matches!(pending.state, State::Refused { .. });
            // A translation came after that miss and is gone again: the open miss is a later one.
            let stale = number.is_some_and(|number| number < pending.number);
            // An access that needs less may still be allowed.
            if !open || stale || !range.contains(pending.iova) || !wanted.contains(access) {
                return false;
            }
            refused.push(Miss { iova: pending.iova, access: wanted, again: None });
            let until_ns = now_ns.saturating_add(self.times.refused_ns);
            self.refusing.store(true, Ordering::Relaxed);
            pending.state = State::Refused { until_ns };
            pending.refused = Some(number.unwrap_or(pending.number));
            pending.waiters.iter().for_each(|waiting| woken.add(&waiting.waiter));
            false
        });
        refused
    }

    /// The front end has acknowledged the miss `number`. Returns whether it had done so before
    /// and the miss is still open.
    pub(crate) fn acknowledge(&self, iova: Iova, access: Prot, number: u64) -> bool {
        let mut again = false;
        self.change(point(iova), |pending, wanted, _| {
            let open = !matches!(pending.state, State::Refused { .. });
            if open && wanted == access && pending.number <= number {
                again = pending.acknowledged > 0;
                pending.acknowledged = 1;
            }
            false
        });
        again
    }

    /// Removes all misses: every waiter looks again.
    pub(crate) fn clear(&self) {
        self.change(Range::ALL, |_, _, _| true);
    }

    /// Shows what needs no lock to be read.
    fn show(&self, list: &mut List) {
        self.taken.store(list.pending.len(), Ordering::Relaxed);
        if list.pending.is_empty() {
            self.refusing.store(false, Ordering::Relaxed);
            if list.pending.capacity() > 2 * KEPT {
                list.pending.shrink_to(KEPT);
            }
        }
    }

    fn change(&self, range: Range, gone: impl FnMut(&mut Pending, Prot, &mut Woken) -> bool) {
        let mut woken = Woken::NONE;
        let mut list = self.list.lock();
        list.drop_if(range, &mut woken, gone);
        self.show(&mut list);
        drop(list);
        woken.wake();
    }
}

pub(crate) fn point(iova: Iova) -> Range {
    Range::new(iova, iova).expect("an address is not below itself")
}

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod model;
