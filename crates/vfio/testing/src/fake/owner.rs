//! How much memory a process has locked, and how much it may lock.

use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::Errno;

use super::PAGE;
use ringfence_vfio::kernel::{KernelResult, Locked};

/// A process, as far as a kernel counts its locked pages: the limit (`RLIMIT_MEMLOCK`), the count,
/// and whether it holds `CAP_IPC_LOCK`. Clones are the same process.
///
/// All numbers are of pages of 4 KiB.
#[derive(Clone, Debug)]
pub struct Owner(Arc<Mutex<Account>>);

#[derive(Debug)]
struct Account {
    limit: u64,
    used: u64,
    peak: u64,
    capable: bool,
}

impl Owner {
    /// A process that may lock `limit` pages, without the capability.
    pub fn new(limit: u64) -> Owner {
        Owner(Arc::new(Mutex::new(Account { limit, used: 0, peak: 0, capable: false })))
    }

    /// How many pages are charged now.
    pub fn used(&self) -> u64 {
        self.0.lock().used
    }

    /// The highest number of pages that were charged at any moment.
    pub fn peak(&self) -> u64 {
        self.0.lock().peak
    }

    /// How many pages may be charged.
    pub fn limit(&self) -> u64 {
        self.0.lock().limit
    }

    /// Changes the limit; pages charged above it stay charged.
    pub fn set_limit(&self, limit: u64) {
        self.0.lock().limit = limit;
    }

    /// Grants or revokes `CAP_IPC_LOCK`. Existing mappings keep the state at the time of their map
    /// (rule [L53]).
    ///
    /// [L53]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l53
    pub fn set_capable(&self, capable: bool) {
        self.0.lock().capable = capable;
    }

    /// As the process itself sees it: in bytes, and `None` while no limit applies.
    pub(super) fn locked(&self) -> Option<Locked> {
        let account = self.0.lock();
        let bytes = |pages: u64| pages.saturating_mul(PAGE);
        (!account.capable)
            .then(|| Locked { used: bytes(account.used), limit: bytes(account.limit) })
    }

    /// Whether it holds `CAP_IPC_LOCK` now.
    pub fn is_capable(&self) -> bool {
        self.0.lock().capable
    }

    /// Whether `pages` more would be allowed.
    pub(super) fn has_room(&self, pages: u64) -> bool {
        let account = self.0.lock();
        account.used.checked_add(pages).is_some_and(|sum| sum <= account.limit)
    }

    /// Charges all of `pages` or nothing.
    pub(super) fn charge(&self, pages: u64, capable: bool) -> KernelResult<()> {
        let mut account = self.0.lock();
        let sum = account.used.checked_add(pages).ok_or(Errno::NOMEM)?;
        if pages > 0 && !capable && sum > account.limit {
            return Err(Errno::NOMEM);
        }
        account.used = sum;
        account.peak = account.peak.max(sum);
        Ok(())
    }

    /// Uncharges `pages`.
    pub(super) fn release(&self, pages: u64) {
        let mut account = self.0.lock();
        debug_assert!(account.used >= pages, "more is released than was charged");
        account.used = account.used.saturating_sub(pages);
    }

    /// Whether the two are one process.
    pub(super) fn is(&self, other: &Owner) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Default for Owner {
    /// A process without limit.
    fn default() -> Owner {
        Owner::new(u64::MAX)
    }
}
