//! What a reader does, step by step.

use super::{rules::Rule, scenes::Scene, state::*};

/// A step of a reader, named after the function that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Act {
    /// `View::find`: the cache has it, or the table (then `View::walk`, at once).
    Find(u8),
    /// `View::walk`: the reader is inside the table's page.
    Walk(u8),
    /// `Table::lookup_run` returns.
    Found,
    /// `View::lease`, and the I/O is submitted.
    Submit,
    /// Without a rule: the lease is entered only now.
    LateLease,
    /// Without a rule: `Lease::rest` while the I/O is under way.
    EarlyRest,
    /// Without a rule: the I/O waits for a translation, and keeps its lease.
    Park,
    /// `FileStore::reap`: the I/O has ended, and `Leases::give_back`.
    Reap,
    /// `View::quiet` begins: nothing is held from here on.
    Quiet,
    /// `View::rebind`: everything found is dropped, and the binding is read.
    Rebind,
    /// `Scopes::enter`.
    Enter,
    /// `Reader::quiescent_with` loads the epoch.
    Load,
    /// `Log::replay`, or a word of it.
    Replay,
    /// `Reader::quiescent_with` stores the slot.
    Announce,
    /// `View::offline`, and the thread sleeps.
    Sleep,
    /// The thread is woken.
    Wake,
    /// `qsbr::Reader::online` loads the epoch.
    LoadOnline,
    /// `qsbr::Reader::online` stores the slot; the fence.
    StoreOnline,
}

impl Act {
    /// Whether the thread does it sooner or later by itself: it depends on no new request and on no
    /// other thread that wakes it.
    pub(crate) fn is_certain(self) -> bool {
        !matches!(
            self,
            Act::Find(_)
                | Act::Walk(_)
                | Act::Submit
                | Act::LateLease
                | Act::EarlyRest
                | Act::Park
                | Act::Sleep
                | Act::Wake
        )
    }
}

/// Every step of the reader that is possible, and the state after it.
pub(crate) fn acts(scene: &Scene, state: &State, index: usize, mut each: impl FnMut(Act)) {
    let reader = &state.readers[index];
    let at_work = reader.step == Step::Working && reader.walk.is_none();
    let looks = index + scene.idle < state.readers.len();
    let astray = matches!(reader.step, Step::Entering { .. })
        && (scene.lacks(Rule::EnterBeforeLookUp) || scene.lacks(Rule::EmptyBeforeEnter));
    let dozing = reader.step == Step::Asleep && scene.lacks(Rule::EmptyWhileAsleep);
    for page in 0..2 {
        let (domain, at) = (reader.bound as usize, page as usize);
        let wanted = looks && reader.held != Some((reader.bound, page));
        let hit = reader.cache[at];
        if (at_work || astray) && wanted {
            if hit || !scene.pages && state.table[domain][at] {
                each(Act::Find(page));
            } else if scene.pages && state.pages[domain] == Page::Linked {
                each(Act::Walk(page));
            }
        } else if dozing && wanted && hit {
            each(Act::Find(page));
        }
    }
    if reader.walk.is_some() {
        each(Act::Found);
    }
    match reader.lease {
        None if index < scene.io && at_work && reader.held.is_some() => each(Act::Submit),
        None => {}
        Some(lease) => {
            let open =
                state.writers.iter().any(|w| !matches!(w.step, Writing::Idle | Writing::Done));
            if !(lease.parked && open) {
                each(Act::Reap);
            }
            if scene.lacks(Rule::LeaseBeforeQuiet) && lease.mark == 0 {
                each(Act::LateLease);
            }
            if scene.lacks(Rule::LeaseUntilEnd) && lease.mark != 0 {
                each(Act::EarlyRest);
            }
            if scene.lacks(Rule::NoLeaseWhileWaiting) && !lease.parked {
                each(Act::Park);
            }
        }
    }
    match reader.step {
        Step::Working if at_work => {
            let changed = index == 0 && state.changes != reader.changes;
            if changed || state.epoch != reader.last || reader.held.is_some() {
                each(Act::Quiet);
            }
            if index < scene.sleep {
                each(Act::Sleep);
            }
        }
        Step::Working => {}
        Step::Quiet => each(Act::Load),
        Step::Rebinding { .. } => each(Act::Rebind),
        Step::Entering { .. } => each(Act::Enter),
        Step::Loaded { .. } | Step::Reading { .. } => each(Act::Replay),
        Step::Replayed { .. } => each(Act::Announce),
        Step::Asleep => each(Act::Wake),
        Step::Waking => each(Act::LoadOnline),
        Step::WakingAt { .. } => each(Act::StoreOnline),
    }
}

/// The state after a step.
pub(crate) fn act(scene: &Scene, state: &mut State, index: usize, act: Act) {
    let (bound, changes) = match index {
        0 => (state.bound, state.changes),
        _ => (state.readers[index].bound, 0),
    };
    let count = state.readers.len();
    let State { table, readers, log, claimed, written, epoch: now, .. } = state;
    let (claimed, written, now) = (*claimed, *written, *now);
    let reader = &mut readers[index];
    match act {
        Act::Find(page) => {
            reader.cache[page as usize] = true;
            reader.held = Some((reader.bound, page));
        }
        Act::Walk(page) => reader.walk = Some((reader.bound, page)),
        Act::Found => {
            let (domain, page) = reader.walk.take().expect("it walks");
            if table[domain as usize][page as usize] {
                reader.cache[page as usize] = true;
                reader.held = Some((domain, page));
            }
        }
        Act::Submit => {
            let on = reader.held.expect("a translation");
            let mark = if scene.lacks(Rule::LeaseBeforeQuiet) { 0 } else { reader.last };
            reader.lease = Some(Lease { on, mark, scope: reader.scope, parked: false });
        }
        Act::LateLease => {
            let (mark, scope) = (reader.last, reader.scope);
            let lease = reader.lease.as_mut().expect("a lease");
            (lease.mark, lease.scope) = (mark, scope);
        }
        Act::EarlyRest => reader.lease.as_mut().expect("a lease").mark = 0,
        Act::Park => reader.lease.as_mut().expect("a lease").parked = true,
        Act::Reap => reader.lease = None,
        // A reader that looks nothing up: only its slot is seen by others.
        Act::Quiet if index + scene.idle >= count => (reader.seen, reader.last) = (now, now),
        Act::Quiet => {
            if !scene.lacks(Rule::NothingHeldAtQuiet) {
                reader.held = None;
            }
            let rebind = changes != reader.changes && !scene.lacks(Rule::RebindAtQuiet);
            reader.step = if rebind { Step::Rebinding { then: Then::Load } } else { Step::Quiet };
        }
        Act::Rebind | Act::Enter => {
            let late = scene.lacks(Rule::EmptyBeforeEnter);
            if (act == Act::Rebind) != late {
                (reader.cache, reader.held) = ([false; 2], None);
                (reader.bound, reader.changes) = (bound, changes);
            }
            if (act == Act::Enter) != late && reader.scope != ALL {
                reader.scope = bound + 1;
            }
            reader.step = match reader.step {
                Step::Rebinding { then } => Step::Entering { then },
                Step::Entering { then: Then::Load } => Step::Quiet,
                _ => Step::Working,
            };
        }
        Act::Load if now == reader.last => reader.step = Step::Working,
        Act::Load => {
            if scene.lacks(Rule::ReplayBeforeAnnounce) {
                (reader.seen, reader.last) = (now, now);
            }
            reader.step = match scene.lacks(Rule::ReplayAtQuiet) {
                true => Step::Replayed { epoch: now, all: false },
                false => Step::Loaded { epoch: now, waking: false },
            };
        }
        Act::Replay => {
            let (epoch, waking, mut from, end, mut word) = match reader.step {
                Step::Loaded { epoch, waking } => (epoch, waking, reader.replayed, written, None),
                Step::Reading { epoch, waking, from, end, word } => {
                    (epoch, waking, from, end, word)
                }
                _ => unreachable!("it replays"),
            };
            let mut all = false;
            while from < end {
                let Some(range) = word.take() else {
                    word = Some(log[from as usize % log.len()]);
                    if scene.words {
                        break;
                    }
                    continue;
                };
                let lapped = claimed - from > log.len() as u8;
                if lapped && !scene.lacks(Rule::LapDropsAll) || range == EVERY {
                    (reader.cache, all, from) = ([false; 2], true, end);
                    break;
                }
                if !lapped {
                    (0..2).for_each(|page| reader.cache[page] &= range & 1 << page == 0);
                }
                from += 1;
            }
            if from < end {
                reader.step = Step::Reading { epoch, waking, from, end, word };
                return;
            }
            reader.replayed = end;
            reader.step = match (waking, scene.lacks(Rule::OnlineBeforeReplay)) {
                (false, _) => Step::Replayed { epoch, all },
                (true, true) => Step::WakingAt { epoch: now },
                (true, false) => woken(scene, reader, changes),
            };
        }
        Act::Announce => {
            if let Step::Replayed { epoch, all } = reader.step {
                let late = scene.lacks(Rule::EpochBeforeReplay);
                let epoch = if late { now } else { epoch };
                if !scene.lacks(Rule::ReplayBeforeAnnounce) {
                    (reader.seen, reader.last) = (epoch, epoch);
                }
                let looks = all && !scene.lacks(Rule::RebindAfterAll);
                let rebind = looks && changes != reader.changes;
                reader.step =
                    if rebind { Step::Rebinding { then: Then::Work } } else { Step::Working };
            }
        }
        Act::Sleep => {
            reader.held = None;
            if !scene.lacks(Rule::OfflineBeforeSleep) {
                reader.seen = 0;
            }
            reader.step = Step::Asleep;
        }
        Act::Wake => {
            reader.held = None;
            reader.step = match reader.seen {
                0 if scene.lacks(Rule::OnlineBeforeReplay) => {
                    Step::Loaded { epoch: 0, waking: true }
                }
                0 => Step::Waking,
                _ => Step::Working,
            };
        }
        Act::LoadOnline => reader.step = Step::WakingAt { epoch: now },
        Act::StoreOnline => {
            let Step::WakingAt { epoch } = reader.step else { unreachable!("it wakes") };
            (reader.seen, reader.last) = (epoch, epoch);
            let replay =
                !scene.lacks(Rule::ReplayOnWaking) && !scene.lacks(Rule::OnlineBeforeReplay);
            reader.step = match replay {
                true => Step::Loaded { epoch, waking: true },
                false => woken(scene, reader, changes),
            };
        }
    }
}

/// `View::online` ends with `View::rebind`.
fn woken(scene: &Scene, reader: &Reader, changes: u8) -> Step {
    match changes != reader.changes && !scene.lacks(Rule::RebindOnWaking) {
        true => Step::Rebinding { then: Then::Work },
        false => Step::Working,
    }
}
