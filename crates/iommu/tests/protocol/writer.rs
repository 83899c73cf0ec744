//! What a writer does, step by step: an unmap, or a change of the binding.

use super::{rules::Rule, scenes::Scene, state::*};

/// A step of a writer, named after the function that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Act {
    /// `Table::unmap`, which unlinks a page that it empties (the product's, that it unmaps whole); or
    /// `Endpoint::bind` up to its grace period.
    Remove,
    /// `Table::take_deferred`.
    TakeDeferred,
    /// `Shootdown::begin_in` locks the list; `Pending::add`.
    Add,
    /// `Log::push` raises `claimed`.
    Claim,
    /// `Log::push` writes the entry.
    Write,
    /// `Log::push` raises `written`.
    Publish,
    /// `Qsbr::start`, and the list is unlocked.
    Start,
    /// `Qsbr::is_over_for` passes the slot of this reader.
    Scan(usize),
    /// `Shootdown::is_over` looks at the leases, and the unmap completes.
    Complete,
    /// Without a rule: the leases are looked at before the quiet points.
    LookEarly,
    /// `SoftDomain::collect` frees the page of this domain.
    Free(usize),
}

impl Writing {
    fn is_started(self) -> bool {
        self == Writing::Waiting
    }
}

/// Whether the writer does not wait for this reader (`Qsbr::is_over_for`).
fn passes(scene: &Scene, reader: &Reader, scope: u8, grace: u8) -> bool {
    let meets = if scene.lacks(Rule::AllMeetsEach) {
        scope == ALL || reader.scope == scope
    } else {
        meet(scope, reader.scope)
    };
    reader.seen == 0 || reader.seen >= grace || !meets || scene.lacks(Rule::WaitForReaders)
}

/// `Scope::meets`.
fn meet(scope: u8, other: u8) -> bool {
    scope == other || scope == ALL || other == ALL
}

/// `Leases::stand_on`.
fn is_leased(scene: &Scene, state: &State, entry: &Entry) -> bool {
    state.readers.iter().any(|reader| {
        reader.lease.is_some_and(|lease| {
            let keeps = !scene.lacks(Rule::LeaseKeepsScope);
            let scope = if keeps { lease.scope } else { reader.scope };
            let counts = lease.mark != 0 && lease.mark < entry.last && meet(scope, entry.scope);
            counts && entry.gone & 1 << lease.on.1 != 0 && !scene.lacks(Rule::WaitForLeases)
        })
    })
}

/// `Shootdown::entry_is_over`.
fn is_over(scene: &Scene, state: &State, entry: &Entry) -> bool {
    let late = scene.lacks(Rule::MergeWaitsForLast);
    let grace = if late { entry.first } else { entry.last };
    let quiet = |reader| passes(scene, reader, entry.scope, grace);
    let entry = &Entry { last: grace, ..entry.clone() };
    // One whose grace period has not begun is not over.
    grace != 0 && state.readers.iter().all(quiet) && !is_leased(scene, state, entry)
}

fn waits_at(state: &State, grace: u8) -> Option<usize> {
    state.pending.iter().position(|entry| entry.first <= grace && grace <= entry.last)
}

/// Every step of the writer that is possible.
pub(crate) fn acts(scene: &Scene, state: &State, index: usize, mut each: impl FnMut(Act)) {
    let (writer, job) = (&state.writers[index], scene.jobs[index]);
    let unmap = matches!(job, Job::Unmap(_));
    let early = scene.lacks(Rule::LogBeforeGrace) && writer.grace == 0;
    let claim_late = scene.lacks(Rule::ClaimBeforeWrite);
    let free = !state.locked || scene.lacks(Rule::OneWriter);
    match writer.step {
        // A removal after the grace period: the list first.
        Writing::Idle if unmap && scene.lacks(Rule::EntryBeforeGrace) => {
            if free {
                each(Act::Add);
            }
        }
        Writing::Idle => each(Act::Remove),
        Writing::Removed if scene.pages && !scene.lacks(Rule::PagesBeforeGrace) => {
            each(Act::TakeDeferred);
        }
        Writing::Removed | Writing::Took if free => each(Act::Add),
        Writing::Removed | Writing::Took => {}
        Writing::Locked if early => each(Act::Start),
        Writing::Locked => each(if claim_late { Act::Write } else { Act::Claim }),
        Writing::Claimed => each(if claim_late { Act::Publish } else { Act::Write }),
        Writing::Wrote => each(if claim_late { Act::Claim } else { Act::Publish }),
        Writing::Logged => each(Act::Start),
        Writing::Waiting if !writer.removed => each(Act::Remove),
        Writing::Waiting => {
            let deferred = scene.pages && scene.lacks(Rule::PagesBeforeGrace);
            if deferred && state.pages.contains(&Page::Deferred) {
                each(Act::TakeDeferred);
            }
            for (at, reader) in state.readers.iter().enumerate() {
                let done = writer.passed & 1 << at != 0;
                if !done && passes(scene, reader, job.scope(), writer.grace) {
                    each(Act::Scan(at));
                }
            }
            let at = waits_at(state, writer.grace);
            let entry = at.map(|at| &state.pending[at]);
            let looks_early = scene.lacks(Rule::LeasesAfterGrace);
            if looks_early && !writer.looked && entry.is_none_or(|e| !is_leased(scene, state, e)) {
                each(Act::LookEarly);
            }
            let all = writer.passed.count_ones() as usize == state.readers.len();
            let over = match looks_early {
                true => writer.looked,
                false => entry.is_none_or(|entry| is_over(scene, state, entry)),
            };
            if all && over && free {
                each(Act::Complete);
            }
        }
        Writing::Done => {}
    }
    // Each domain's pages are freed by its own syncs; it does not matter which writer does it.
    for (domain, page) in state.pages.iter().enumerate().filter(|_| index == 0) {
        if let &Page::Limbo(grace) = page {
            let some = scene.lacks(Rule::PagesWaitForAll);
            let scope = if some { domain as u8 + 1 } else { ALL };
            let quiet = state.readers.iter().all(|reader| passes(scene, reader, scope, grace));
            if quiet || scene.lacks(Rule::PagesAfterGrace) {
                each(Act::Free(domain));
            }
        }
    }
}

/// The state after a step.
pub(crate) fn act(scene: &Scene, state: &mut State, index: usize, act: Act) {
    let job = scene.jobs[index];
    match act {
        Act::Remove => remove(scene, state, index, job),
        Act::TakeDeferred => {
            let writer = &mut state.writers[index];
            let taken = match writer.step.is_started() {
                true => Page::Limbo(writer.grace),
                false => Page::Taken(index as u8),
            };
            if let Job::Unmap((domain, _)) = job
                && state.pages[domain as usize] == Page::Deferred
            {
                state.pages[domain as usize] = taken;
            }
            if !writer.step.is_started() {
                writer.step = Writing::Took;
            }
        }
        Act::Add => {
            state.locked = true;
            if state.pending.len() == scene.pending {
                let now = state.clone();
                state.pending.retain(|entry| !is_over(scene, &now, entry));
            }
            if state.pending.len() == scene.pending {
                merge(scene, &mut state.pending);
            }
            let (scope, gone) = (job.scope(), job.range());
            state.pending.push(Entry { first: 0, last: 0, scope, gone });
            state.writers[index].step = Writing::Locked;
        }
        Act::Claim | Act::Write | Act::Publish => push(scene, state, index, act),
        Act::Start => {
            state.epoch += 1;
            let grace = state.epoch;
            let writer = &mut state.writers[index];
            writer.grace = grace;
            if writer.step == Writing::Logged {
                unlock(scene, state, index);
            }
        }
        Act::Scan(reader) => state.writers[index].passed |= 1 << reader,
        Act::LookEarly => state.writers[index].looked = true,
        Act::Complete => {
            if let Some(at) = waits_at(state, state.writers[index].grace) {
                state.pending.remove(at);
            }
            // Nothing of it matters any more: fewer states.
            let writer = &mut state.writers[index];
            (writer.step, writer.passed, writer.grace, writer.position) = (Writing::Done, 0, 0, 0);
            match job {
                Job::Unmap((domain, page)) => state.gone[domain as usize][page as usize] = true,
                Job::Bind(_) => state.rebound = true,
            }
        }
        Act::Free(domain) => state.pages[domain] = Page::Freed,
    }
}

fn remove(scene: &Scene, state: &mut State, index: usize, job: Job) {
    let writer = &mut state.writers[index];
    let counts_late = scene.lacks(Rule::CountBeforeGrace) && writer.step == Writing::Idle;
    match job {
        Job::Unmap((domain, page)) => {
            let entries = &mut state.table[domain as usize];
            entries[page as usize] = false;
            if scene.pages && *entries == [false; 2] {
                state.pages[domain as usize] = Page::Deferred;
            }
            writer.removed = true;
        }
        Job::Bind(to) => {
            state.bound = to;
            if !counts_late {
                state.changes += 1;
                writer.removed = true;
            }
        }
    }
    if writer.step == Writing::Idle {
        writer.step = Writing::Removed;
    }
}

/// `Pending::add` in a full list: the two oldest become one.
fn merge(scene: &Scene, pending: &mut Vec<Entry>) {
    let oldest = pending.remove(0);
    let merged = &mut pending[0];
    merged.first = oldest.first;
    if !scene.lacks(Rule::MergeKeepsRanges) {
        merged.gone |= oldest.gone;
    }
    if merged.scope != oldest.scope && !scene.lacks(Rule::MergeWidensScope) {
        merged.scope = ALL;
    }
}

/// A step of `Log::push`; all of them at once where the scene has no words.
fn push(scene: &Scene, state: &mut State, index: usize, act: Act) {
    let steps: &[Act] = if scene.words { &[act] } else { &[Act::Claim, Act::Write, Act::Publish] };
    let late = scene.lacks(Rule::ClaimBeforeWrite);
    let first = if late { Act::Write } else { Act::Claim };
    for &step in steps {
        let writer = &mut state.writers[index];
        if step == first {
            writer.position = state.written;
        }
        let position = writer.position;
        writer.step = match step {
            Act::Claim => {
                state.claimed = position + 1;
                Writing::Claimed
            }
            Act::Write => {
                let at = position as usize % state.log.len();
                state.log[at] = scene.jobs[index].range();
                Writing::Wrote
            }
            _ => {
                state.written = position + 1;
                Writing::Logged
            }
        };
    }
    let early = scene.lacks(Rule::LogBeforeGrace);
    if early && state.writers[index].step == Writing::Logged {
        unlock(scene, state, index);
    }
}

fn unlock(scene: &Scene, state: &mut State, index: usize) {
    let writer = &mut state.writers[index];
    let grace = writer.grace;
    writer.step = Writing::Waiting;
    if let Some(entry) = state.pending.iter_mut().find(|entry| entry.last == 0) {
        (entry.first, entry.last) = (grace, grace);
    }
    for page in &mut state.pages {
        if *page == Page::Taken(index as u8) {
            *page = Page::Limbo(grace);
        }
    }
    state.locked = false;
    debug_assert!(scene.jobs.len() >= state.pending.len());
}
