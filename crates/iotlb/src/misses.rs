//! Open misses: translations that were requested and have not arrived yet.

use std::{collections::HashMap, sync::Arc};

use ringfence_iommu::{Iova, Prot, Range};
use ringfence_sync::{
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
    lock::Mutex,
    mix::Mix,
};
use smallvec::SmallVec;

/// Of a page one miss is sent at a time (rule D17): nearly always its update is for the whole page.
pub(crate) const PAGE: u64 = 4096;

/// The smallest pages that a front end may have: a miss asks for one address, and a refusal of it says
/// nothing about addresses outside of its granule.
const GRANULE: u64 = 512;

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
    fn page(&self) -> u64 {
        self.iova.0 / PAGE
    }

    /// Whether one miss does for both: they need the same access to the same granule.
    pub(crate) fn is_as(&self, iova: Iova, access: Prot) -> bool {
        self.iova.0 / GRANULE == iova.0 / GRANULE && self.access == access
    }
}

/// How many pages the list has room for when it is empty: where it was longer, its memory is given back.
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

/// Mostly one.
type Waiters = SmallVec<[Arc<Waiter>; 1]>;

/// Waiters to wake once the list is unlocked, because waking is a system call. Each is woken once,
/// however many of its misses are resolved.
#[derive(Default)]
struct Woken(Waiters);

impl Woken {
    fn add(&mut self, waiters: &[Arc<Waiter>]) {
        waiters.iter().for_each(|waiter| add(&mut self.0, waiter));
    }

    fn wake(self) {
        self.0.iter().for_each(|waiter| waiter.wake());
    }
}

/// Adds a waiter that is not there yet.
fn add(waiters: &mut Waiters, waiter: &Arc<Waiter>) {
    if !waiters.iter().any(|other| Arc::ptr_eq(other, waiter)) {
        waiters.push(Arc::clone(waiter));
    }
}

#[derive(Clone, Copy)]
enum State {
    /// Another miss of its page and access is on its way, whose update may be for it too; or it could not
    /// be sent. The next lookup sends it, if there is no such miss any more or a while after this time.
    Held { since_ns: u64 },
    /// Sent at this time.
    Sent { at_ns: u64 },
    /// There is no such translation: lookups by its waiters fail until then.
    Refused { until_ns: u64 },
}

/// A translation that is missing, for all accesses to its granule.
struct Pending {
    /// The address that is sent: of the first lookup that needed it.
    iova: Iova,
    access: Prot,
    /// Whether the front end has acknowledged the miss.
    acknowledged: bool,
    state: State,
    /// When it was last looked up.
    noted_ns: u64,
    waiters: Waiters,
    /// The number of the miss when it was listed.
    number: u64,
    /// The number of the miss that was refused last, 0 if none was.
    refused: u64,
}

impl Pending {
    fn new(miss: &Miss, now_ns: u64, number: u64) -> Pending {
        Pending {
            iova: miss.iova,
            access: miss.access,
            acknowledged: false,
            state: State::Held { since_ns: now_ns },
            noted_ns: now_ns,
            waiters: Waiters::new(),
            number,
            refused: 0,
        }
    }

    fn is_sent(&self) -> bool {
        matches!(self.state, State::Sent { .. })
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

/// What is missing in a page.
type Page = SmallVec<[Pending; 1]>;

struct List {
    pages: HashMap<u64, Page, Mix>,
    /// How many there are in all pages.
    pending: usize,
    /// Waiters that found the list full, to be woken when it has room.
    blocked: Waiters,
}

/// So few pages are looked up in any case.
const LOOKED_UP: u64 = 16;

impl List {
    fn new(seed: u64) -> List {
        List { pages: HashMap::with_hasher(Mix::new(seed)), pending: 0, blocked: Waiters::new() }
    }

    fn get(&self, iova: Iova, access: Prot) -> Option<&Pending> {
        let miss = Miss { iova, access, again: None };
        self.pages.get(&miss.page())?.iter().find(|it| miss.is_as(it.iova, it.access))
    }

    /// Removes the entries for which `gone` returns true, in no order, and which all are in the pages of
    /// `range`. Their waiters, added to `woken`, look again, and so do those of entries that were held back
    /// for them.
    fn drop_if(
        &mut self,
        range: Range,
        woken: &mut Woken,
        mut gone: impl FnMut(&mut Pending, &mut Woken) -> bool,
    ) {
        let before = self.pending;
        let sent = |page: &Page| page.iter().filter(|it| it.is_sent()).count();
        let mut sweep = |page: &mut Page| {
            let (len, on_their_way) = (page.len(), sent(page));
            page.retain(|pending| {
                let over = gone(pending, woken);
                if over {
                    woken.add(&pending.waiters);
                }
                !over
            });
            if sent(page) < on_their_way {
                let held = page.iter().filter(|it| matches!(it.state, State::Held { .. }));
                held.for_each(|it| woken.add(&it.waiters));
            }
            self.pending -= len - page.len();
            page.is_empty()
        };
        // Whichever is less work: to look each page up, or to look at the whole list.
        let pages = range.first().0 / PAGE..=range.last().0 / PAGE;
        if pages.end() - pages.start() < LOOKED_UP.max(self.pages.len() as u64 / 4) {
            for number in pages {
                if self.pages.get_mut(&number).is_some_and(&mut sweep) {
                    self.pages.remove(&number);
                }
            }
        } else {
            self.pages.retain(|_, page| !sweep(page));
        }
        if self.pending < before {
            woken.add(&self.blocked);
            self.blocked.clear();
        }
    }

    /// Removes what is no longer needed: old refusals, and misses whose waiters have given up.
    fn tidy(&mut self, times: Times, now_ns: u64, woken: &mut Woken) {
        self.drop_if(Range::ALL, woken, |pending, _| match pending.state {
            State::Refused { until_ns } if now_ns < until_ns => false,
            _ => now_ns >= pending.noted_ns.saturating_add(times.again_ns),
        });
    }
}

/// The pending list: one miss on its way for each page and access, unless it gets no answer for a while
/// (rule D17), and a bounded number in total.
///
/// # Why a page has several entries
/// A front end's pages may be smaller than ours, so that part of a page is mapped and part is not: each
/// granule has its own entry, and a refusal is for one of them. While a miss of another granule of the
/// page is on its way, an entry is held back, because the update for that nearly always is for the page.
///
/// # Why no update is lost
/// An update changes the table first and searches the list then; a view that finds a translation
/// missing enters the list first and looks at the table again then. Each has a fence between, so one of
/// them sees what the other did. Most updates are for no miss: they find the list empty without its lock.
///
/// # Which waiters a refusal concerns
/// Those that waited before the miss was listed, or sent again, however late they look: what they wait
/// for had to be mapped by then. One that came later sends a new miss, because there may be a
/// translation by now. Misses are numbered as they are listed, and a view that begins to wait notes how
/// many there were; to one that does not, a refusal applies only if it was on the list, and only for a
/// moment. The reply to a miss that was sent again carries its number: if the page was updated, unmapped
/// and missed again meanwhile, the reply is older than the open miss and does not concern it. A refusal
/// without a number is taken for the answer to what is open when it comes
/// ([`Iotlb::refuse`](crate::Iotlb::refuse) demands that it is).
pub(crate) struct Misses {
    /// Searched and extended under the lock, so threads that contend for it sleep.
    list: Mutex<List>,
    /// How many places of the list are taken. Written under its lock.
    taken: AtomicUsize,
    /// Whether anything was refused since the list was last empty. If not, no lookup that waits needs the
    /// lock. Written under it.
    refusing: AtomicBool,
    /// How many misses were listed, or sent again.
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

    /// How many misses were listed so far, or sent again.
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
        self.list.lock().pages.values().flatten().filter(|pending| pending.is_sent()).count()
    }

    /// How many places of the list are taken.
    #[cfg(test)]
    pub(crate) fn listed(&self) -> usize {
        self.list.lock().pending
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
        let list = self.list.lock();
        list.get(iova, access).is_some_and(|pending| match (since, pending.state) {
            (Some(since), _) => since < pending.refused,
            (None, State::Refused { until_ns }) => {
                now_ns() < until_ns && pending.waiters.iter().any(|it| Arc::ptr_eq(it, waiter))
            }
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
        let mut woken = Woken::default();
        let noted = wanted.clone();
        {
            let mut list = self.list.lock();
            if list.pending.saturating_add(wanted.len()) > self.most {
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
            wanted.retain(|other| !other.is_as(miss.iova, miss.access));
        }
    }

    /// Enters `miss`; returns whether it is to be sent.
    fn enter(&self, list: &mut List, miss: &mut Miss, waiter: &Arc<Waiter>, now_ns: u64) -> bool {
        if list.pending >= self.most && list.get(miss.iova, miss.access).is_none() {
            add(&mut list.blocked, waiter);
            return false;
        }
        let late = |at_ns: u64| now_ns >= at_ns.saturating_add(self.times.again_ns);
        let page = list.pages.entry(miss.page()).or_default();
        let awaited = page.iter().any(|it| {
            let sent = matches!(it.state, State::Sent { at_ns } if !late(at_ns));
            sent && it.access == miss.access
        });
        let known = page.iter().position(|it| miss.is_as(it.iova, it.access));
        let at = known.unwrap_or(page.len());
        if known.is_none() {
            page.push(Pending::new(miss, now_ns, self.number()));
            list.pending += 1;
        }
        let found = &mut page[at];
        let send = match found.state {
            State::Held { since_ns } => !awaited || late(since_ns),
            State::Sent { at_ns } => {
                miss.again = late(at_ns).then(|| self.number());
                late(at_ns)
            }
            State::Refused { .. } => {
                // A new miss. Waiters that have not seen the refusal yet still will, in `refused`.
                let refused = found.refused;
                *found = Pending { refused, ..Pending::new(miss, now_ns, self.number()) };
                !awaited
            }
        };
        if send {
            // The address that was sent first, so that an update matches the entry.
            miss.iova = found.iova;
            found.state = State::Sent { at_ns: now_ns };
        }
        found.noted_ns = now_ns;
        add(&mut found.waiters, waiter);
        send
    }

    /// `misses` could not be sent: the next lookup sends them.
    pub(crate) fn unsent(&self, misses: &[Miss]) {
        let mut list = self.list.lock();
        for miss in misses {
            for found in list.pages.get_mut(&miss.page()).into_iter().flatten() {
                if let State::Sent { at_ns } = found.state
                    && miss.is_as(found.iova, found.access)
                {
                    found.state = match miss.again {
                        None => State::Held { since_ns: at_ns },
                        // It was sent before, which may yet be answered.
                        Some(_) => State::Sent { at_ns: at_ns.saturating_sub(self.times.again_ns) },
                    };
                }
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
        let granule = |iova: Iova| iova.0 / GRANULE;
        let granules = granule(range.first())..=granule(range.last());
        // If it is for part of a granule, it may satisfy some of the waiters only: the others miss again.
        self.change(range, |pending, _| {
            prot.allows(pending.access) && granules.contains(&granule(pending.iova))
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
        self.change(range, |pending, woken| {
            let open = !matches!(pending.state, State::Refused { .. });
            // A translation came after that miss and is gone again: the open miss is a later one. One that
            // is held may have been mapped since the front end looked.
            let held = matches!(pending.state, State::Held { .. });
            let stale = number.map_or(held, |number| number < pending.number);
            // An access that needs less may still be allowed.
            if !open || stale || !range.contains(pending.iova) || !pending.access.contains(access) {
                return false;
            }
            refused.push(Miss { iova: pending.iova, access: pending.access, again: None });
            let until_ns = now_ns.saturating_add(self.times.refused_ns);
            self.refusing.store(true, Ordering::Relaxed);
            pending.state = State::Refused { until_ns };
            pending.refused = number.unwrap_or(pending.number);
            woken.add(&pending.waiters);
            false
        });
        refused
    }

    /// The front end has acknowledged the miss `number`. Returns whether it had done so before
    /// and the miss is still open.
    pub(crate) fn acknowledge(&self, iova: Iova, access: Prot, number: u64) -> bool {
        let mut again = false;
        self.change(point(iova), |pending, _| {
            let open = !matches!(pending.state, State::Refused { .. });
            if open && (pending.iova, pending.access) == (iova, access) && pending.number <= number
            {
                again = pending.acknowledged;
                pending.acknowledged = true;
            }
            false
        });
        again
    }

    /// Removes all misses: every waiter looks again.
    pub(crate) fn clear(&self) {
        self.change(Range::ALL, |_, _| true);
    }

    /// Shows what needs no lock to be read.
    fn show(&self, list: &mut List) {
        debug_assert_eq!(list.pending == 0, list.pages.is_empty());
        self.taken.store(list.pending, Ordering::Relaxed);
        if list.pending == 0 {
            self.refusing.store(false, Ordering::Relaxed);
            if list.pages.capacity() > 2 * KEPT {
                list.pages.shrink_to(KEPT);
            }
        }
    }

    fn change(&self, range: Range, gone: impl FnMut(&mut Pending, &mut Woken) -> bool) {
        let mut woken = Woken::default();
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
mod oracle;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod model;
