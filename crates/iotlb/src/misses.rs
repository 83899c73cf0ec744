//! What was asked for and not answered yet.

use std::{collections::BTreeMap, sync::Arc};

use ringfence_iommu::{Iova, Prot, Range};
use ringfence_sync::{
    atomic::{AtomicU64, Ordering},
    lock::Mutex,
};

/// Misses are told apart by page.
pub(crate) const PAGE: u64 = 4096;

/// A translation that is lacking (rule D16).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Miss {
    /// The address.
    pub iova: Iova,
    /// What it is wanted for.
    pub access: Prot,
    /// The number of this miss, if it is sent again: the first one got no update for a while, so this
    /// one wants a reply in any case, which goes to [`Iotlb::reply`](crate::Iotlb::reply) with the number.
    pub again: Option<u64>,
}

impl Miss {
    /// What it is found by: the page, and what it is wanted for (rule D17).
    pub(crate) fn key(&self) -> Key {
        (self.iova.0 / PAGE, self.access.bits())
    }
}

type Key = (u64, u32);

/// Where misses go: to a front end, say, who answers with updates.
///
/// Called by workers between two accesses, and by whoever tells the IOTLB of refusals, with no lock
/// held (rule D20). It must not block.
pub trait MissSink: Send + Sync {
    /// Asks for translations; returns how many of them were sent, from the first on. The rest is
    /// asked for again later.
    fn ask(&self, misses: &[Miss]) -> usize;

    /// There is a translation, but not for this access, and there will be none (rule D16). Told once
    /// for each refusal, so no more often than it was asked; what cannot be sent is lost.
    fn fail(&self, misses: &[Miss]) {
        let _ = misses;
    }
}

/// Who waits for answers: a view, as far as the IOTLB knows it.
pub(crate) struct Waiter {
    /// Counts the answers that concern it.
    answers: AtomicU64,
    /// Called with each of them; for a worker that may be asleep.
    wake: Box<dyn Fn() + Send + Sync>,
}

impl Waiter {
    pub(crate) fn new(wake: Box<dyn Fn() + Send + Sync>) -> Arc<Waiter> {
        Arc::new(Waiter { answers: AtomicU64::new(0), wake })
    }

    pub(crate) fn answers(&self) -> u64 {
        self.answers.load(Ordering::Acquire)
    }

    fn answered(&self) {
        // Release: whoever sees the count finds the translation in the table.
        self.answers.fetch_add(1, Ordering::Release);
        (self.wake)();
    }
}

/// A list of mostly one, for which no memory is allocated.
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

/// Waiters to be woken once the list is unlocked: waking is a system call. Each once, however many
/// of its questions were answered.
struct Woken(Few<Arc<Waiter>>);

impl Woken {
    const NOBODY: Woken = Woken(Few::NONE);

    fn add(&mut self, waiter: &Arc<Waiter>) {
        if !self.0.iter().any(|other| Arc::ptr_eq(other, waiter)) {
            self.0.push(Arc::clone(waiter));
        }
    }

    fn wake(self) {
        self.0.iter().for_each(|waiter| waiter.answered());
    }
}

#[derive(Clone, Copy)]
enum State {
    /// To be asked for by who looks next: it could not be sent.
    Unsent,
    /// Asked for at this time.
    Asked { at_ns: u64 },
    /// There is no such translation, and until then those who waited are told so.
    Refused { until_ns: u64 },
}

/// A view that waits for something in a page, and in which part of it.
struct Waiting {
    waiter: Arc<Waiter>,
    first: Iova,
    last: Iova,
}

struct Pending {
    /// The address that was asked for.
    iova: Iova,
    state: State,
    /// When somebody last wanted it.
    noted_ns: u64,
    /// How often the one who knows said that it had answered.
    acknowledged: u32,
    waiters: Few<Waiting>,
    /// The number of the first question.
    question: u64,
    /// The number of the question that was refused last.
    refused: Option<u64>,
}

impl Pending {
    fn new(iova: Iova, now_ns: u64, question: u64) -> Pending {
        Pending {
            iova,
            state: State::Asked { at_ns: now_ns },
            noted_ns: now_ns,
            acknowledged: 0,
            waiters: Few::NONE,
            question,
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

/// What came of a lookup of something that is not in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lack {
    /// It may come.
    Pending,
    /// It was refused.
    Refused,
}

/// How long things take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// After how long without an answer it is asked again. Who still waits has looked again within
    /// this time.
    pub(crate) again_ns: u64,
    /// For how long those who waited are told of a refusal, if they do not say since when they do.
    pub(crate) refused_ns: u64,
}

#[derive(Default)]
struct List {
    pending: BTreeMap<Key, Pending>,
    /// Who found the list full, to be woken when it is not.
    crowd: Vec<Arc<Waiter>>,
}

impl List {
    /// Forgets those that `gone` picks of the pages of `range`; who waited for them looks again.
    fn drop_if(
        &mut self,
        range: Range,
        woken: &mut Woken,
        mut gone: impl FnMut(&mut Pending, Prot, &mut Woken) -> bool,
    ) {
        let keys = (range.first().0 / PAGE, 0)..=(range.last().0 / PAGE, u32::MAX);
        let mut over = Few::NONE;
        for (&key, pending) in self.pending.range_mut(keys) {
            if gone(pending, Prot::from_bits_truncate(key.1), woken) {
                pending.waiters.iter().for_each(|waiting| woken.add(&waiting.waiter));
                over.push(key);
            }
        }
        over.iter().for_each(|key| _ = self.pending.remove(key));
        if over.one.is_some() {
            self.crowd.drain(..).for_each(|waiter| woken.add(&waiter));
        }
    }

    /// Forgets what nobody wants any more: what was refused a while ago, and questions whose askers
    /// have given up.
    fn tidy(&mut self, times: Times, now_ns: u64, woken: &mut Woken) {
        self.drop_if(Range::ALL, woken, |pending, _, _| match pending.state {
            State::Refused { until_ns } if now_ns < until_ns => false,
            _ => now_ns >= pending.noted_ns.saturating_add(times.again_ns),
        });
    }
}

/// The pending list: at most one question for each page and access (rule D17), and a bounded number
/// of them in all.
///
/// # Why no answer is lost
/// Who answers changes the table first and looks at the list then; who lacks something enters
/// the list first and looks at the table once more then. Both look at the list under its lock: one of
/// them sees what the other did.
///
/// # Whom a refusal concerns
/// Those who waited before the question was asked, however late they look: what they wait for was
/// wanted, and so had to be there, when it was asked. Who came later asks anew: there may be a
/// translation by now. Questions are numbered, and who begins to wait notes how many there were; for
/// who does not, those are told who were on the list, and for a moment only. An answer to a question that
/// was asked again comes with its number: where the page was answered, unmapped and wanted again
/// meanwhile, it is older than the question that is open now, and does not concern that.
pub(crate) struct Misses {
    /// Searched and added to under the lock, which therefore is one to sleep for.
    list: Mutex<List>,
    /// How many questions there were.
    questions: AtomicU64,
    most: usize,
    times: Times,
}

impl Misses {
    pub(crate) fn new(most: usize, times: Times) -> Misses {
        let (list, questions) = (Mutex::new(List::default()), AtomicU64::new(0));
        Misses { list, questions, most, times }
    }

    /// How many questions there were so far.
    pub(crate) fn questions(&self) -> u64 {
        // Whoever notes it enters the list, under its lock, after it.
        self.questions.load(Ordering::Relaxed)
    }

    /// The number of the next question.
    fn number(&self) -> u64 {
        self.questions.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// How many questions there are, those that were refused a moment ago included.
    pub(crate) fn open(&self) -> usize {
        self.list.lock().pending.len()
    }

    /// Whether what is lacking was refused to one who has waited `since` there were so many
    /// questions; `None`: to `waiter`, a moment ago.
    pub(crate) fn lack(
        &self,
        (iova, access): (Iova, Prot),
        since: Option<u64>,
        waiter: &Arc<Waiter>,
        now_ns: u64,
    ) -> Lack {
        let key = Miss { iova, access, again: None }.key();
        let list = self.list.lock();
        let refused = list.pending.get(&key).is_some_and(|pending| match (since, pending.state) {
            (Some(since), _) => pending.refused.is_some_and(|question| since < question),
            (None, State::Refused { until_ns }) => now_ns < until_ns && pending.waits(waiter),
            (None, _) => false,
        });
        if refused { Lack::Refused } else { Lack::Pending }
    }

    /// Notes that `waiter` waits for `wanted` (`None`: nobody does, it is asked for in advance);
    /// leaves in it what is to be asked for now. `there` says what has come meanwhile.
    pub(crate) fn note(
        &self,
        wanted: &mut Vec<Miss>,
        waiter: Option<&Arc<Waiter>>,
        now_ns: u64,
        there: impl Fn(&Miss) -> bool,
    ) {
        let mut woken = Woken::NOBODY;
        let noted = wanted.clone();
        {
            let mut list = self.list.lock();
            if list.pending.len().saturating_add(wanted.len()) > self.most {
                list.tidy(self.times, now_ns, &mut woken);
            }
            wanted.retain_mut(|miss| self.enter(&mut list, miss, waiter, now_ns));
        }
        woken.wake();
        // Only now: see above.
        for miss in noted.into_iter().filter(|miss| there(miss)) {
            self.answer(point(miss.iova), miss.access);
            wanted.retain(|other| other.key() != miss.key());
        }
    }

    /// Whether it is to be asked for.
    fn enter(
        &self,
        list: &mut List,
        miss: &mut Miss,
        waiter: Option<&Arc<Waiter>>,
        now_ns: u64,
    ) -> bool {
        let (full, iova) = (list.pending.len() >= self.most, miss.iova);
        let Some(found) = list.pending.get_mut(&miss.key()) else {
            if full {
                let crowd = &mut list.crowd;
                if let Some(waiter) = waiter
                    && !crowd.iter().any(|other| Arc::ptr_eq(other, waiter))
                {
                    crowd.push(Arc::clone(waiter));
                }
                return false;
            }
            let mut pending = Pending::new(miss.iova, now_ns, self.number());
            waiter.inspect(|waiter| pending.add(waiter, iova));
            list.pending.insert(miss.key(), pending);
            return true;
        };
        found.noted_ns = now_ns;
        let asks = match found.state {
            State::Unsent => true,
            State::Asked { at_ns } => {
                let late = now_ns >= at_ns.saturating_add(self.times.again_ns);
                miss.again = late.then(|| self.number());
                late
            }
            State::Refused { .. } => {
                // Another question than the one that was refused. Who has not seen that yet still
                // will.
                let refused = found.refused;
                *found = Pending { refused, ..Pending::new(iova, now_ns, self.number()) };
                true
            }
        };
        if asks {
            // What was asked for first, so that the answer finds it.
            miss.iova = found.iova;
            found.state = State::Asked { at_ns: now_ns };
        }
        waiter.inspect(|waiter| found.add(waiter, iova));
        asks
    }

    /// `misses` could not be sent: who looks next asks.
    pub(crate) fn unsent(&self, misses: &[Miss]) {
        let mut list = self.list.lock();
        for miss in misses {
            if let Some(found) = list.pending.get_mut(&miss.key())
                && matches!(found.state, State::Asked { .. })
            {
                found.state = State::Unsent;
            }
        }
    }

    /// A translation of `range` with `prot` is there: wakes those whom it satisfies, in address
    /// *and* permission (rule D18).
    pub(crate) fn answer(&self, range: Range, prot: Prot) {
        self.change(range, |pending, access, woken| {
            if !prot.allows(access) {
                return false;
            }
            // Pages of a front end are no smaller than ours, as a rule. Else some of those who wait
            // may have been answered, and the question stays.
            for waiting in pending.waiters.iter() {
                if waiting.first <= range.last() && range.first() <= waiting.last {
                    woken.add(&waiting.waiter);
                }
            }
            range.contains(pending.iova)
        });
    }

    /// There is no translation of `range` for `access`: the answer to the question of that number, or
    /// `None`: to none in particular. Returns what was refused by that.
    pub(crate) fn refuse(
        &self,
        range: Range,
        access: Prot,
        question: Option<u64>,
        now_ns: u64,
    ) -> Vec<Miss> {
        let mut refused = Vec::new();
        self.change(range, |pending, wanted, woken| {
            let open = !matches!(pending.state, State::Refused { .. });
            // A translation came after the question, and has gone again: what is wanted now was asked
            // for later.
            let stale = question.is_some_and(|question| question < pending.question);
            // Who wants less may get it.
            if !open || stale || !range.contains(pending.iova) || !wanted.contains(access) {
                return false;
            }
            refused.push(Miss { iova: pending.iova, access: wanted, again: None });
            let until_ns = now_ns.saturating_add(self.times.refused_ns);
            pending.state = State::Refused { until_ns };
            pending.refused = Some(question.unwrap_or(pending.question));
            pending.waiters.iter().for_each(|waiting| woken.add(&waiting.waiter));
            pending.waiters.one.is_none()
        });
        refused
    }

    /// The one who knows says that it has answered the question of that number. Returns whether it had
    /// said so before, and the question is open all the same.
    pub(crate) fn acknowledge(&self, iova: Iova, access: Prot, question: u64) -> bool {
        let mut again = false;
        self.change(point(iova), |pending, wanted, _| {
            let open = !matches!(pending.state, State::Refused { .. });
            if open && wanted == access && pending.question <= question {
                again = pending.acknowledged > 0;
                pending.acknowledged = 1;
            }
            false
        });
        again
    }

    /// Nobody will answer any more: all who wait are to look again.
    pub(crate) fn clear(&self) {
        self.change(Range::ALL, |_, _, _| true);
    }

    fn change(&self, range: Range, gone: impl FnMut(&mut Pending, Prot, &mut Woken) -> bool) {
        let mut woken = Woken::NOBODY;
        self.list.lock().drop_if(range, &mut woken, gone);
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
