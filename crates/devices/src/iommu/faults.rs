//! Faults on their way to the event queue: counted, and logged at a limited rate.

use std::{
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use ringfence_iommu::{Fault, FaultReason, FaultSink, Prot};
use ringfence_run::event;
use ringfence_sync::clock::{Clock, MonotonicClock};
use ringfence_virtio_iommu::device::{Backing, FaultQueue};

use super::Endpoints;

/// How many faults wait for the driver before more are dropped and counted.
const WAITING_FAULTS: usize = 256;

/// An endpoint's faults are logged once in this time: a driver can cause any number.
const LOG_EVERY_NS: u64 = 1_000_000_000;

/// Keeps faults for the event queue, wakes the worker that serves it, and counts by endpoint.
pub(super) struct Reported {
    pub(super) faults: Arc<FaultQueue>,
    /// Written when a fault was reported.
    pub(super) wake: OwnedFd,
    endpoints: BTreeMap<u32, Account>,
}

#[derive(Default)]
struct Account {
    faults: AtomicU64,
    /// When a fault was logged last, and how many there were then.
    logged_ns: AtomicU64,
    logged: AtomicU64,
}

impl Reported {
    /// From now on, those of these endpoints.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(super) fn of(endpoints: &Endpoints) -> io::Result<Arc<Reported>> {
        let known = endpoints.endpoints().into_iter().map(|id| (id, Account::default())).collect();
        let (faults, wake) = (FaultQueue::new(WAITING_FAULTS), event::new()?);
        let reported = Arc::new(Reported { faults, wake, endpoints: known });
        endpoints.report_to(Arc::clone(&reported) as _);
        Ok(reported)
    }

    /// How many faults each endpoint has had.
    pub(super) fn by_endpoint(&self) -> Vec<(u32, u64)> {
        let read = |account: &Account| account.faults.load(Ordering::Relaxed);
        self.endpoints.iter().map(|(&id, account)| (id, read(account))).collect()
    }
}

impl FaultSink for Reported {
    fn report(&self, fault: Fault) {
        self.faults.report(fault);
        event::signal(&self.wake);
        if let Some(account) = self.endpoints.get(&fault.endpoint) {
            account.note(fault, MonotonicClock.now_ns());
        }
    }
}

impl Account {
    fn note(&self, fault: Fault, now_ns: u64) {
        let faults = self.faults.fetch_add(1, Ordering::Relaxed) + 1;
        let before = self.logged_ns.load(Ordering::Relaxed);
        let due = before == 0 || now_ns.saturating_sub(before) >= LOG_EVERY_NS;
        let order = Ordering::Relaxed;
        let mine = || self.logged_ns.compare_exchange(before, now_ns.max(1), order, order).is_ok();
        if !due || !mine() {
            return;
        }
        let more = faults.saturating_sub(self.logged.swap(faults, Ordering::Relaxed) + 1);
        let (endpoint, iova) = (fault.endpoint, fault.iova.0);
        let what = if fault.access.contains(Prot::WRITE) { "a write to" } else { "a read of" };
        let why = match fault.reason {
            FaultReason::NoDomain => "it is in no domain",
            _ => "it is not mapped for that",
        };
        tracing::info!(
            source = %"iommu",
            "endpoint {endpoint:#x} was refused {what} {iova:#x}: {why}; {more} more since \
             the last report"
        );
    }
}

#[cfg(test)]
mod tests {
    use ringfence_iommu::Iova;

    use super::*;

    #[test]
    fn every_fault_is_counted_and_one_a_second_is_logged() {
        let account = Account::default();
        let fault = Fault {
            reason: FaultReason::Mapping,
            endpoint: 8,
            iova: Iova(0x1000),
            access: Prot::READ,
        };
        let logged = |at_ns| {
            account.note(fault, at_ns);
            account.logged.load(Ordering::Relaxed)
        };
        assert_eq!(logged(5), 1);
        assert_eq!(logged(6), 1);
        assert_eq!(logged(4 + LOG_EVERY_NS), 1);
        assert_eq!(logged(5 + LOG_EVERY_NS), 4);
        assert_eq!(account.faults.load(Ordering::Relaxed), 4);
    }
}
