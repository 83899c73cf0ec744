//! What a request queue keeps between requests, and the invalidations at the end of a batch.

use std::{fmt, mem, sync::Arc};

use ringfence_iommu::{Error, Gather, Pending, Range, Result, SyncToken};

use super::{Backing, Device, core::View, lazy::Flight};

/// The number of a domain, the generation of the state in which it was looked up, and what it was then.
type Found<B> = (u32, u64, View<Arc<<B as Backing>::Domain>>);

/// What one request queue keeps between requests of a batch: which domains wait for their
/// invalidation, and the domain that the last request was for.
pub struct Session<B: Backing> {
    pub(super) last: Option<Found<B>>,
    /// Domains with something to invalidate, the first `used`; the others are kept for reuse.
    pub(super) touched: Vec<Touched<B::Domain>>,
    pub(super) used: usize,
    pub(super) rebound: Vec<u32>,
    pub(super) orphans: Vec<Arc<B::Domain>>,
    /// Flushes of lazy domains that this session's sync carries out.
    pub(super) flights: Vec<Flight>,
    /// Syncs of endpoints' bindings.
    pub(super) waits: Vec<SyncToken>,
    pub(super) failed: Option<Error>,
    pub(super) syncs: u64,
}

/// A domain with something to invalidate.
pub(super) struct Touched<D> {
    domain: Option<Arc<D>>,
    gather: Gather,
    /// The sync of what the gather held.
    sync: Option<Pending>,
    /// Memory for the next.
    spare: Vec<Range>,
}

impl<B: Backing> Default for Session<B> {
    fn default() -> Session<B> {
        Session {
            last: None,
            touched: Vec::new(),
            used: 0,
            rebound: Vec::new(),
            orphans: Vec::new(),
            flights: Vec::new(),
            waits: Vec::new(),
            failed: None,
            syncs: 0,
        }
    }
}

impl<B: Backing> fmt::Debug for Session<B> {
    ringfence_sync::shows!(
        Session as it, touched: it.used, rebound: it.rebound, waits: it.waits.len()
    );
}

impl<B: Backing> Session<B> {
    /// A session in which nothing has happened.
    pub fn new() -> Session<B> {
        Session::default()
    }

    /// Whether replies must wait for [`Device::begin_sync`] and [`Device::poll_sync`].
    pub fn needs_sync(&self) -> bool {
        self.used > 0 || !self.rebound.is_empty()
    }
}

impl<D> Touched<D> {
    #[inline]
    fn is_of(&self, domain: &Arc<D>) -> bool {
        self.domain.as_ref().is_some_and(|held| Arc::ptr_eq(held, domain))
    }
}

/// The gather for `domain` among those of a session that are `touched`, the first `used`. Requests
/// come in runs for one domain, so the newest is tried first.
#[inline]
pub(super) fn gather<'s, D>(
    touched: &'s mut Vec<Touched<D>>,
    used: &mut usize,
    domain: &Arc<D>,
) -> &'s mut Gather {
    let newest = used.wrapping_sub(1);
    let at = match touched.get(newest).is_some_and(|newest| newest.is_of(domain)) {
        true => newest,
        false => touch(touched, used, domain),
    };
    &mut touched[at].gather
}

#[cold]
fn touch<D>(touched: &mut Vec<Touched<D>>, used: &mut usize, domain: &Arc<D>) -> usize {
    if let Some(at) = touched[..*used].iter().position(|touched| touched.is_of(domain)) {
        return at;
    }
    if *used == touched.len() {
        let (gather, spare) = (Gather::new(), Vec::new());
        touched.push(Touched { domain: None, gather, sync: None, spare });
    }
    touched[*used].domain = Some(Arc::clone(domain));
    *used += 1;
    *used - 1
}

impl<B: Backing> Device<B> {
    /// Starts the invalidations that `session` has gathered. The failure of one is returned by
    /// [`poll_sync`](Self::poll_sync).
    pub fn begin_sync(&self, session: &mut Session<B>) {
        for Touched { domain, gather, sync, spare } in &mut session.touched[..session.used] {
            if !gather.is_empty()
                && let Some(domain) = domain
            {
                *sync = Some(Pending::gathered(&**domain, mem::take(spare), gather));
                session.syncs += 1;
            }
        }
        for &endpoint in &session.rebound {
            match self.backing.sync_binding_begin(endpoint) {
                Ok(SyncToken::DONE) => {}
                Ok(token) => session.waits.push(token),
                Err(error) => session.failed = Some(error),
            }
        }
    }

    /// Whether the invalidations begun are over. Once they are, the session is as new.
    ///
    /// # Errors
    /// One of them failed: what was unmapped may still be reachable. The session's next sync does
    /// all of them again, so that a request that is sent again waits for the invalidation that its
    /// reply reports.
    pub fn poll_sync(&self, session: &mut Session<B>) -> Result<bool> {
        let Session { waits, failed, touched, used, .. } = session;
        let touched = &mut touched[..*used];
        waits.retain(|&token| match self.backing.sync_binding_poll(token) {
            Ok(over) => !over,
            Err(error) => {
                *failed = Some(error);
                false
            }
        });
        let mut over = waits.is_empty();
        for Touched { domain, sync, .. } in &mut *touched {
            if let (Some(domain), Some(sync)) = (domain, sync) {
                over &= sync.poll(&**domain);
            }
        }
        if !over {
            return Ok(false);
        }
        let failure = |sync: &Pending| sync.outcome(Range::ALL).and_then(Result::err);
        let mut failures =
            touched.iter().filter_map(|touched| touched.sync.as_ref().and_then(failure));
        if let Some(error) = failed.take().or_else(|| failures.next()) {
            for Touched { gather, sync, .. } in &mut *touched {
                sync.take().iter().for_each(|sync| sync.gather_again(gather));
            }
            session.rebound.sort_unstable();
            session.rebound.dedup();
            session.flights.clear();
            return Err(error);
        }
        for touched in &mut session.touched[..session.used] {
            touched.domain = None;
            touched.spare = touched.sync.take().map_or_else(Vec::new, Pending::into_ranges);
            touched.gather.clear_ranges();
            drop(touched.gather.take_pages());
        }
        session.used = 0;
        session.rebound.clear();
        session.orphans.clear();
        session.flights.drain(..).for_each(Flight::land);
        Ok(true)
    }
}
