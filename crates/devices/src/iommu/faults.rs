//! Faults on their way to the event queue: counted, and logged at a limited rate.

use std::{collections::BTreeMap, io, os::fd::OwnedFd, sync::Arc};

use parking_lot::Mutex;
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
    endpoints: Mutex<BTreeMap<u32, Account>>,
}

#[derive(Default)]
struct Account {
    faults: u64,
    /// When a fault was logged last, and how many there were then.
    logged_ns: u64,
    logged: u64,
}

impl Reported {
    /// From now on, those of these endpoints, and of such as are added later.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(super) fn of(endpoints: &Endpoints) -> io::Result<Arc<Reported>> {
        let known = endpoints.endpoints().into_iter().map(|id| (id, Account::default())).collect();
        let (faults, wake) = (FaultQueue::new(WAITING_FAULTS), event::new()?);
        let reported = Arc::new(Reported { faults, wake, endpoints: Mutex::new(known) });
        endpoints.report_to(Arc::clone(&reported) as _);
        Ok(reported)
    }

    /// How many faults each endpoint has had; one that was added later is there from its first on.
    pub(super) fn by_endpoint(&self) -> Vec<(u32, u64)> {
        self.endpoints.lock().iter().map(|(&id, account)| (id, account.faults)).collect()
    }
}

impl FaultSink for Reported {
    fn report(&self, fault: Fault) {
        self.faults.report(fault);
        event::signal(&self.wake);
        let now_ns = MonotonicClock.now_ns();
        let due = self.endpoints.lock().entry(fault.endpoint).or_default().note(now_ns);
        let Some(more) = due else { return };
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

impl Account {
    /// Counts a fault; if it is to be logged, returns how many were not since the last that was.
    fn note(&mut self, now_ns: u64) -> Option<u64> {
        self.faults += 1;
        if self.logged > 0 && now_ns.saturating_sub(self.logged_ns) < LOG_EVERY_NS {
            return None;
        }
        self.logged_ns = now_ns;
        Some(self.faults - std::mem::replace(&mut self.logged, self.faults) - 1)
    }
}

#[cfg(test)]
mod tests {
    use ringfence_iommu::{Geometry, Iova, PageSizes, Range, shootdown::Shootdown, table::Limits};

    use super::*;

    #[test]
    fn every_fault_is_counted_and_one_a_second_is_logged() {
        let mut account = Account::default();
        assert_eq!(account.note(5), Some(0));
        assert_eq!(account.note(6), None);
        assert_eq!(account.note(4 + LOG_EVERY_NS), None);
        assert_eq!(account.note(5 + LOG_EVERY_NS), Some(2));
        assert_eq!(account.faults, 4);
    }

    #[test]
    fn the_faults_of_an_endpoint_that_was_added_later_are_counted() {
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        let endpoints = Endpoints::new([], Shootdown::new(0), geometry, Limits::NONE);
        let reported = Reported::of(&endpoints).unwrap();
        let (reason, access) = (FaultReason::Mapping, Prot::READ);
        reported.report(Fault { reason, endpoint: 8, iova: Iova(0x1000), access });
        assert_eq!(reported.by_endpoint(), [(8, 1)]);
    }
}
