//! A sync under way.

use alloc::vec::Vec;

use crate::{Domain, Error, Gather, Range, Result, SyncToken, Synced, Work};

/// A sync that was begun. It owns the list of its ranges and, once it is over, its result, which
/// never changes after that.
///
/// If it is dropped before it is over, its ranges may still be reachable: they must not be used
/// again.
#[derive(Debug)]
#[must_use = "what it is for may be reachable until it is over"]
pub struct Pending {
    kind: Kind,
    ranges: Vec<Range>,
    state: State,
    /// Allocates only if something fails.
    failed: Vec<(Range, Error)>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Map,
    Unmap { exact: bool },
    All,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Begun(SyncToken),
    Over(Synced),
    /// It never began.
    Refused(Error),
}

impl Pending {
    /// Begins to make usable what was mapped in `ranges`. If the sync cannot begin, it has failed.
    pub fn map<D: Domain + ?Sized>(domain: &D, ranges: Vec<Range>) -> Pending {
        let begun = match ranges.is_empty() {
            true => Ok(SyncToken::DONE),
            false => domain.sync_begin(Work::Map(&ranges)),
        };
        Pending::new(Kind::Map, ranges, begun)
    }

    /// Begins to invalidate what was unmapped into `gather`, which is emptied. `ranges` are those
    /// that the caller unmapped into it: failures are reported for these. A queued gather
    /// invalidates everything.
    pub fn unmap<D: Domain + ?Sized>(
        domain: &D,
        ranges: Vec<Range>,
        gather: &mut Gather,
    ) -> Pending {
        let nothing = ranges.is_empty() && gather.is_empty() && !gather.is_queued();
        gather.release_pages();
        let begun = match nothing {
            true => Ok(SyncToken::DONE),
            false => domain.sync_begin(gather.work()),
        };
        let kind = if gather.is_queued() { Kind::All } else { Kind::Unmap { exact: true } };
        gather.clear_ranges();
        Pending::new(kind, ranges, begun)
    }

    /// As [`unmap`](Self::unmap), for a caller that has no list of what it unmapped besides the
    /// gather. Uses the memory of `list`.
    pub fn gathered<D: Domain + ?Sized>(
        domain: &D,
        mut list: Vec<Range>,
        gather: &mut Gather,
    ) -> Pending {
        list.clear();
        list.extend_from_slice(gather.ranges());
        let exact = gather.is_exact();
        let mut sync = Pending::unmap(domain, list, gather);
        if let Kind::Unmap { exact: all } = &mut sync.kind {
            *all = exact;
        }
        sync
    }

    fn new(kind: Kind, ranges: Vec<Range>, begun: Result<SyncToken>) -> Pending {
        let state = match begun {
            Ok(SyncToken::DONE) => State::Over(Synced::PROOF),
            Ok(token) => State::Begun(token),
            Err(error) => State::Refused(error),
        };
        Pending { kind, ranges, state, failed: Vec::new() }
    }

    /// Whether it is over, without waiting; `domain` is the domain it was begun on.
    #[inline]
    pub fn poll<D: Domain + ?Sized>(&mut self, domain: &D) -> bool {
        let State::Begun(token) = self.state else { return true };
        let Pending { ranges, failed, .. } = self;
        let work = match self.kind {
            Kind::Map => Work::Map(ranges),
            Kind::Unmap { exact } => Work::Unmap { ranges, exact },
            Kind::All => Work::All,
        };
        let over = domain.sync_poll(token, work, &mut |range, error| failed.push((range, error)));
        if over {
            self.state = State::Over(Synced::PROOF);
        }
        over
    }

    /// Whether it is known to be over, without a poll: a poll has found it over, or it was over, or
    /// failed, as it began.
    #[inline]
    pub fn is_over(&self) -> bool {
        !matches!(self.state, State::Begun(_))
    }

    /// Waits until it is over.
    pub fn wait<D: Domain + ?Sized>(&mut self, domain: &D) {
        while let State::Begun(token) = self.state {
            domain.sync_wait(token);
            self.poll(domain);
        }
    }

    /// The result for `range`; `None` until the sync is [known to be over](Self::is_over).
    ///
    /// # Errors
    /// As the domain reported: what was mapped there is not mapped, what was unmapped there may
    /// still be reachable.
    #[inline]
    pub fn outcome(&self, range: Range) -> Option<Result<Synced>> {
        match self.state {
            State::Begun(_) => None,
            State::Refused(error) => Some(Err(error)),
            State::Over(synced) => {
                let failed = self.failed.iter().find(|(failed, _)| failed.overlaps(range));
                Some(failed.map_or(Ok(synced), |&(_, error)| Err(error)))
            }
        }
    }

    /// Adds its ranges to `gather` again, so that another sync can do what this one failed to.
    pub fn gather_again(&self, gather: &mut Gather) {
        gather.add_all(&self.ranges, !matches!(self.kind, Kind::Unmap { exact: false }));
    }

    /// Its list of ranges.
    pub fn into_ranges(self) -> Vec<Range> {
        self.ranges
    }
}
