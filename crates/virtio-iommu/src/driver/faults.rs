//! Faults on their way to whoever owns the endpoint.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::{Mutex, RwLock};
use ringfence_iommu::{Error, Result};

use crate::wire::FaultRecord;

/// Who is told of the faults of an endpoint: a function, or a [`FaultInbox`].
pub trait FaultOwner: Send + Sync {
    /// Takes note of a fault. Called by the thread that reads the event queue, with no lock held; it
    /// should not block.
    fn fault(&self, record: FaultRecord);
}

impl<F: Fn(FaultRecord) + Send + Sync> FaultOwner for F {
    fn fault(&self, record: FaultRecord) {
        self(record);
    }
}

/// Tells each endpoint's owner of its faults: what an
/// [`EventReceiver`](super::EventReceiver) reads is [routed](Self::route) here. Keeps no record
/// itself.
pub struct FaultRouter {
    owners: RwLock<HashMap<u32, Arc<dyn FaultOwner>>>,
    others: Arc<dyn FaultOwner>,
    strays: AtomicU64,
}

impl fmt::Debug for FaultRouter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultRouter").field("strays", &self.strays).finish_non_exhaustive()
    }
}

impl FaultRouter {
    /// A router that tells `others` of faults that are nobody's.
    pub fn new(others: Arc<dyn FaultOwner>) -> Arc<FaultRouter> {
        let (owners, strays) = (RwLock::default(), AtomicU64::new(0));
        Arc::new(FaultRouter { owners, others, strays })
    }

    /// Has `owner` told of the faults of `endpoint`, until what is returned is dropped; one that is
    /// being routed just then may still come after.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: the endpoint has an owner.
    pub fn register(
        self: &Arc<Self>,
        endpoint: u32,
        owner: Arc<dyn FaultOwner>,
    ) -> Result<FaultRegistration> {
        let mut owners = self.owners.write();
        if owners.contains_key(&endpoint) {
            return Err(Error::Unsupported("another owner is told of the endpoint's faults"));
        }
        owners.insert(endpoint, owner);
        Ok(FaultRegistration { router: Arc::clone(self), endpoint })
    }

    /// Tells the owner of the record's endpoint. A number that the device made up, or an endpoint
    /// that nobody owns, goes to the others and is counted.
    pub fn route(&self, record: FaultRecord) {
        let owner = self.owners.read().get(&record.endpoint).cloned();
        match owner {
            Some(owner) => owner.fault(record),
            None => {
                self.strays.fetch_add(1, Ordering::Relaxed);
                self.others.fault(record);
            }
        }
    }

    /// How many faults were nobody's.
    pub fn strays(&self) -> u64 {
        self.strays.load(Ordering::Relaxed)
    }
}

/// Ends, when dropped, that an owner is told of an endpoint's faults.
#[must_use = "the owner is told until this is dropped"]
#[derive(Debug)]
pub struct FaultRegistration {
    router: Arc<FaultRouter>,
    endpoint: u32,
}

impl Drop for FaultRegistration {
    fn drop(&mut self) {
        // Let go of after the lock is: an owner may be anything.
        let _owner = self.router.owners.write().remove(&self.endpoint);
    }
}

/// Keeps faults until its owner looks: so many, those that come after are dropped and counted. The
/// first ones tell more of a cause than the last ones.
#[derive(Debug)]
pub struct FaultInbox {
    capacity: usize,
    kept: Mutex<VecDeque<FaultRecord>>,
    dropped: AtomicU64,
}

impl FaultInbox {
    /// An inbox for `capacity` faults.
    pub fn new(capacity: usize) -> Arc<FaultInbox> {
        let (kept, dropped) = (Mutex::default(), AtomicU64::new(0));
        Arc::new(FaultInbox { capacity, kept, dropped })
    }

    /// Takes the oldest fault out.
    pub fn take(&self) -> Option<FaultRecord> {
        self.kept.lock().pop_front()
    }

    /// How many found no room.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

impl FaultOwner for FaultInbox {
    fn fault(&self, record: FaultRecord) {
        let mut kept = self.kept.lock();
        if kept.len() < self.capacity {
            kept.push_back(record);
        } else {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use ringfence_iommu::{FaultReason, Iova, Prot};

    use super::*;

    fn record(endpoint: u32, address: u64) -> FaultRecord {
        let (reason, access) = (FaultReason::Mapping, Prot::READ);
        FaultRecord { reason, endpoint, access, address: Some(Iova(address)) }
    }

    #[test]
    fn each_owner_is_told_of_its_endpoints_faults_and_of_no_others() {
        let others = FaultInbox::new(2);
        let router = FaultRouter::new(Arc::<FaultInbox>::clone(&others));
        let (one, two) = (FaultInbox::new(8), Arc::new(Mutex::new(Vec::new())));
        let first = router.register(1, Arc::<FaultInbox>::clone(&one)).unwrap();
        let told = Arc::clone(&two);
        let _second = router.register(2, Arc::new(move |record| told.lock().push(record))).unwrap();
        assert!(matches!(router.register(1, FaultInbox::new(1)), Err(Error::Unsupported(_))));
        (0..6).for_each(|n| router.route(record(n % 3, n.into())));
        assert_eq!([one.take(), one.take()], [Some(record(1, 1)), Some(record(1, 4))]);
        assert_eq!(*two.lock(), [record(2, 2), record(2, 5)]);
        assert_eq!((router.strays(), one.take()), (2, None));
        drop(first);
        router.route(record(1, 9));
        assert_eq!((one.take(), one.dropped()), (None, 0));
        // It came last, and there was room for two.
        assert_eq!((router.strays(), others.dropped()), (3, 1));
        assert_eq!([others.take(), others.take()], [Some(record(0, 0)), Some(record(0, 3))]);
        let again = router.register(1, Arc::<FaultInbox>::clone(&one)).unwrap();
        router.route(record(1, 10));
        assert_eq!(one.take(), Some(record(1, 10)));
        drop(again);
    }

    #[test]
    fn an_owner_may_leave_while_it_is_told() {
        let router = FaultRouter::new(FaultInbox::new(1));
        let held: Arc<Mutex<Option<FaultRegistration>>> = Arc::default();
        let mine = Arc::clone(&held);
        let leave = move |_| drop(mine.lock().take());
        *held.lock() = Some(router.register(1, Arc::new(leave)).unwrap());
        router.route(record(1, 0));
        assert!(held.lock().is_none());
        router.route(record(1, 1));
        assert_eq!(router.strays(), 1);
    }
}
