//! What was asked for and not answered yet.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use ringfence_iommu::{Iova, Prot, Range};

/// Misses are told apart by page.
pub(crate) const PAGE: u64 = 4096;

/// A translation that is lacking (rule D16).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Miss {
    /// The address.
    pub iova: Iova,
    /// What it is wanted for.
    pub access: Prot,
    /// Whether to be told at once if there is no such translation: the first question went
    /// unanswered for a while.
    pub again: bool,
}

/// Where misses go: to a front end, say, who answers with updates.
///
/// Called by workers, between two accesses; it must not block, and must not call the IOTLB.
pub trait MissSink: Send + Sync {
    /// Asks for translations; returns how many of them were sent, from the first on. The rest is
    /// asked for again later.
    fn ask(&self, misses: &[Miss]) -> usize;
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

enum State {
    /// Asked for at this time.
    Asked { at_ns: u64 },
    /// There is no such translation, and until then nobody asks for it again.
    Refused { until_ns: u64 },
}

struct Pending {
    iova: Iova,
    state: State,
    waiters: Vec<Arc<Waiter>>,
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
    /// After how long without an answer it is asked again.
    pub(crate) again_ns: u64,
    /// For how long what was refused is not asked for again.
    pub(crate) refused_ns: u64,
}

/// The pending list: at most one question for each page and access (rule D17), and a bounded number
/// of them in all.
pub(crate) struct Misses {
    pending: Mutex<HashMap<(u64, Prot), Pending>>,
    most: usize,
    times: Times,
}

impl Misses {
    pub(crate) fn new(most: usize, times: Times) -> Misses {
        Misses { pending: Mutex::default(), most, times }
    }

    /// How many questions are open.
    pub(crate) fn open(&self) -> usize {
        self.pending.lock().len()
    }

    /// Whether what is lacking was refused a moment ago.
    pub(crate) fn lack(&self, iova: Iova, access: Prot, now_ns: u64) -> Lack {
        match self.pending.lock().get(&(iova.0 / PAGE, access)).map(|pending| &pending.state) {
            Some(State::Refused { until_ns }) if now_ns < *until_ns => Lack::Refused,
            _ => Lack::Pending,
        }
    }

    /// Notes that `waiter` waits for `wanted`; leaves in it what is to be asked for now.
    pub(crate) fn note(&self, wanted: &mut Vec<Miss>, waiter: &Arc<Waiter>, now_ns: u64) {
        let mut pending = self.pending.lock();
        wanted.retain_mut(|miss| {
            let key = (miss.iova.0 / PAGE, miss.access);
            let full = pending.len() >= self.most;
            match pending.get_mut(&key) {
                None if full => false,
                None => {
                    let state = State::Asked { at_ns: now_ns };
                    let waiters = vec![Arc::clone(waiter)];
                    pending.insert(key, Pending { iova: miss.iova, state, waiters });
                    true
                }
                Some(found) => {
                    if !found.waiters.iter().any(|other| Arc::ptr_eq(other, waiter)) {
                        found.waiters.push(Arc::clone(waiter));
                    }
                    let due = match found.state {
                        State::Asked { at_ns } => at_ns.saturating_add(self.times.again_ns),
                        State::Refused { until_ns } => until_ns,
                    };
                    let asks = now_ns >= due;
                    if asks {
                        miss.again = matches!(found.state, State::Asked { .. });
                        found.state = State::Asked { at_ns: now_ns };
                    }
                    asks
                }
            }
        });
    }

    /// Forgets that `misses` were asked for: they could not be sent.
    pub(crate) fn forget(&self, misses: &[Miss]) {
        let mut pending = self.pending.lock();
        for miss in misses {
            pending.remove(&(miss.iova.0 / PAGE, miss.access));
        }
    }

    /// A translation of `range` with `prot` is there: wakes those whom it satisfies, in address
    /// *and* permission (rule D18).
    pub(crate) fn answer(&self, range: Range, prot: Prot) {
        self.take(|pending, access| range.contains(pending.iova) && prot.allows(access));
    }

    /// There is no translation of `range` for `access`.
    pub(crate) fn refuse(&self, range: Range, access: Prot, now_ns: u64) {
        let until_ns = now_ns.saturating_add(self.times.refused_ns);
        let mut woken = Vec::new();
        for (&(_, wanted), pending) in self.pending.lock().iter_mut() {
            if range.contains(pending.iova) && wanted.intersects(access) {
                pending.state = State::Refused { until_ns };
                woken.append(&mut pending.waiters);
            }
        }
        woken.iter().for_each(|waiter| waiter.answered());
    }

    /// Nobody will answer any more: all who wait are to look again.
    pub(crate) fn clear(&self) {
        self.take(|_, _| true);
    }

    fn take(&self, which: impl Fn(&Pending, Prot) -> bool) {
        let mut woken = Vec::new();
        self.pending.lock().retain(|&(_, access), pending| {
            let over = which(pending, access);
            if over {
                woken.append(&mut pending.waiters);
            }
            !over
        });
        // Outside of the lock: waking is a system call.
        woken.iter().for_each(|waiter| waiter.answered());
    }
}
