//! Where guards get their translations: the binding of their endpoint, looked up under a reader that
//! is online for the look only.

use std::{
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use ringfence_iommu::{
    Fault, FaultReason, GuestPhys, Iova, Prot, Range, SoftDomain,
    shootdown::{Lease, Reader},
    table::Translation,
};

use super::{Failure, FailureScope};
use crate::{
    Binding, Endpoint, Iotlb, IotlbConfig, Miss,
    misses::{Waiter, point},
};

/// What guards have counted.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct GuardCounters {
    /// Accesses that waited for a translation.
    pub waits: AtomicU64,
    /// How long they waited, in nanoseconds, all together.
    pub waited_ns: AtomicU64,
    /// Of these, those that timed out.
    pub timeouts: AtomicU64,
    /// Guards that failed.
    pub failures: AtomicU64,
}

/// The result of a lookup.
pub(super) enum Found {
    /// It leads there, and the access is allowed.
    There(Translation),
    /// It can be requested by a miss.
    Missing,
    /// There is no such translation.
    Refused,
}

/// Looks translations up; online.
pub(super) struct Looker {
    reader: Reader,
    /// Of a domain only while something is looked up: one that goes meanwhile gives back its
    /// tables, which count against a limit that other domains share.
    binding: Binding,
    /// The domain, if it is one.
    domain: Option<Weak<SoftDomain<GuestPhys>>>,
    waiter: Arc<Waiter>,
    /// The count of changes of the endpoint's binding that `binding` reflects.
    changes: u64,
    /// How many misses there were when the access began to look.
    since: u64,
}

impl Looker {
    pub(super) fn find(&self, iova: Iova, prot: Prot) -> Found {
        let found = match &self.binding {
            Binding::Blocked => None,
            Binding::Bypass => Some(Translation { range: Range::ALL, delta: 0, prot: Prot::RW }),
            Binding::Domain(domain) => domain.translate(&self.reader, iova),
            Binding::Iotlb(iotlb) => {
                let found = iotlb.domain.translate_run(&self.reader, iova, point(iova));
                let there = found.is_some_and(|found| found.prot.allows(prot));
                let missing = (iova, miss_access(prot));
                if !there && !iotlb.is_refused(missing, Some(self.since), &self.waiter) {
                    return Found::Missing;
                }
                found
            }
        };
        found.filter(|found| found.prot.allows(prot)).map_or(Found::Refused, Found::There)
    }

    /// Reads the endpoint's binding if it has changed.
    fn renew(&mut self, endpoint: &Endpoint) {
        let changes = endpoint.changes();
        if changes != self.changes {
            self.changes = changes;
            self.set(endpoint.binding());
        }
    }

    fn set(&mut self, binding: Binding) {
        self.domain = match &binding {
            Binding::Domain(domain) => Some(Arc::downgrade(domain)),
            _ => None,
        };
        self.binding = binding;
    }

    /// Begins to look.
    fn begin(&mut self, endpoint: &Endpoint) {
        self.renew(endpoint);
        match self.domain.as_ref().map(Weak::upgrade) {
            Some(Some(domain)) => self.binding = Binding::Domain(domain),
            // It has gone: the endpoint has another binding, whatever the count was.
            Some(None) => self.set(endpoint.binding()),
            None => {}
        }
    }

    /// Looks no more.
    fn end(&mut self) {
        if self.domain.is_some() {
            self.binding = Binding::Blocked;
        }
    }

    /// Keeps what was found since the look began in use.
    pub(super) fn lease(&self, range: Range) -> Lease {
        self.reader.lease(range)
    }
}

/// A miss without an access cannot be sent.
fn miss_access(prot: Prot) -> Prot {
    if prot.intersects(Prot::RW) { prot & Prot::RW } else { Prot::READ }
}

/// Offline again, whatever happens.
struct Online<'a>(&'a mut Looker);

impl Drop for Online<'_> {
    fn drop(&mut self) {
        self.0.reader.offline();
        self.0.end();
    }
}

/// Wakes threads that wait for an update.
#[derive(Default)]
struct Bell {
    lock: Mutex<()>,
    rung: Condvar,
}

/// What the [`Guard`](super::Guard)s of one endpoint's translations share: they stop together if
/// the scope of failures is the [space](FailureScope::Space), and look up under one lock, so that a
/// device with a thread for each queue makes one `Guards` for each.
pub struct Guards {
    endpoint: Arc<Endpoint>,
    looker: Mutex<Looker>,
    bell: Arc<Bell>,
    waiter: Arc<Waiter>,
    scope: FailureScope,
    stopped: AtomicBool,
    /// Why it is stopped.
    failure: Mutex<Option<Failure>>,
    pub(super) counted: Arc<GuardCounters>,
}

impl Guards {
    /// Guards of `endpoint`; `None` if the process's shootdown has no place for another reader.
    pub fn new(endpoint: Arc<Endpoint>, scope: FailureScope) -> Option<Arc<Guards>> {
        let mut reader = endpoint.shootdown().reader()?;
        reader.offline();
        let bell = Arc::<Bell>::default();
        let ring = Arc::clone(&bell);
        let waiter = Waiter::new(Box::new(move || {
            // Under the lock: a thread that has looked and does not sleep yet holds it.
            let _lock = ring.lock.lock();
            ring.rung.notify_all();
        }));
        let (changes, waits) = (endpoint.changes(), Arc::clone(&waiter));
        let (binding, domain, since) = (Binding::Blocked, None, 0);
        let mut looker = Looker { reader, binding, domain, waiter: waits, changes, since };
        looker.set(endpoint.binding());
        looker.end();
        Some(Arc::new(Guards {
            endpoint,
            looker: Mutex::new(looker),
            bell,
            waiter,
            scope,
            stopped: AtomicBool::new(false),
            failure: Mutex::default(),
            counted: Arc::default(),
        }))
    }

    /// The endpoint that they translate for.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// What is unusable after a translation failed.
    pub fn scope(&self) -> FailureScope {
        self.scope
    }

    /// Runs `job` with a looker. What it finds may be used afterwards under leases taken in it. It
    /// sees refusals of misses that were sent since there were `since` of them.
    pub(super) fn look<R>(&self, since: u64, job: impl FnOnce(&Looker) -> R) -> R {
        let mut looker = self.looker.lock();
        looker.since = since;
        // Nothing is cached that an invalidation would concern.
        looker.reader.online(|_| ());
        let online = Online(&mut looker);
        online.0.begin(&self.endpoint);
        job(online.0)
    }

    /// What `job` finds of the IOTLB that they are bound to, if it is one.
    fn of_iotlb<R>(&self, job: impl FnOnce(&Arc<Iotlb>) -> R) -> Option<R> {
        let mut looker = self.looker.lock();
        looker.renew(&self.endpoint);
        looker.end();
        looker.binding.iotlb().map(job)
    }

    /// How many misses there were so far, those sent again included.
    pub(super) fn misses_sent(&self) -> u64 {
        self.of_iotlb(|iotlb| iotlb.misses_sent()).unwrap_or(0)
    }

    /// How long an access waits. Where nothing is missed any more it looks once more.
    pub(super) fn timeout(&self) -> Duration {
        let timeout = self.of_iotlb(|iotlb| iotlb.config().timeout);
        timeout.unwrap_or_else(|| IotlbConfig::default().timeout)
    }

    /// Counts updates and refusals; to be called before the lookup that finds something missing.
    pub(super) fn updates_seen(&self) -> u64 {
        self.waiter.updates()
    }

    /// Sends misses for `wanted` and waits until the count exceeds `updates`, for a few
    /// milliseconds at most: what could not be sent, or is not resolved, is sent again.
    pub(super) fn send_and_wait(&self, wanted: &mut Vec<Miss>, updates: u64, until: Instant) {
        const ROUND: Duration = Duration::from_millis(5);
        wanted.iter_mut().for_each(|miss| miss.access = miss_access(miss.access));
        let iotlb = self.look(u64::MAX, |looker| {
            let iotlb = looker.binding.iotlb()?;
            iotlb.note_misses(wanted, &self.waiter, &looker.reader);
            Some(Arc::clone(iotlb))
        });
        // With no lock held (rule D20).
        iotlb.inspect(|iotlb| iotlb.send_misses(wanted));
        let until = until.min(Instant::now() + ROUND);
        let mut lock = self.bell.lock.lock();
        while self.waiter.updates() == updates {
            if self.bell.rung.wait_until(&mut lock, until).timed_out() {
                return;
            }
        }
    }

    /// An access gave up.
    pub(super) fn timed_out(&self) {
        self.counted.timeouts.fetch_add(1, Ordering::Relaxed);
        self.of_iotlb(|iotlb| iotlb.stats().timeouts.fetch_add(1, Ordering::Relaxed));
    }

    /// A guard failed.
    pub(super) fn failed(&self, failure: Failure, access: Prot) {
        self.counted.failures.fetch_add(1, Ordering::Relaxed);
        if self.scope == FailureScope::Space {
            self.failure.lock().get_or_insert(failure);
            // Ordering: the failure is behind a lock; the flag only spares the others that.
            self.stopped.store(true, Ordering::Release);
        }
        let (reason, addr) = match failure {
            Failure::Refused { addr } | Failure::TimedOut { addr } => (FaultReason::Mapping, addr),
            Failure::OutsideMemory { addr } => (FaultReason::Unknown, addr),
            _ => return,
        };
        let (endpoint, iova) = (self.endpoint.id(), Iova(addr));
        self.endpoint.report(Fault { reason, endpoint, iova, access });
    }

    /// What they have counted.
    pub fn counters(&self) -> &Arc<GuardCounters> {
        &self.counted
    }

    /// Why none of its guards may be used any more, if so.
    // Ordering: see `failed`.
    #[inline]
    pub fn failure(&self) -> Option<Failure> {
        if self.stopped.load(Ordering::Acquire) { *self.failure.lock() } else { None }
    }

    /// Goes on after a failure, which is returned: the device has finished the request that met it,
    /// or was reset. Guards that failed themselves stay so.
    pub fn recover(&self) -> Option<Failure> {
        let mut failure = self.failure.lock();
        // Ordering: see `failed`.
        self.stopped.store(false, Ordering::Release);
        failure.take()
    }
}

impl fmt::Debug for Guards {
    ringfence_sync::shows!(Guards as it, endpoint: it.endpoint, failure: it.failure());
}
