//! How much memory an owner has pinned, and how much it may.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::memlock::{ignores_memlock, limit};

/// What an owner of pinned memory has pinned, in bytes, and its limit (rules [L53], [L54]).
///
/// One for each owner, shared by its pinners. Memory is charged before it is pinned, and the sum
/// never exceeds the limit, not even for a moment while other threads charge.
///
/// The kernel has accounts of its own, each with RLIMIT_MEMLOCK as its limit: VFIO and mlock charge
/// the process; io_uring, unless CAP_IPC_LOCK was held when the ring was made, charges the *user*,
/// all processes together, and a whole huge page as soon as one page of it is pinned. So a charge
/// that succeeds here can fail there. This account says how much each owner has pinned.
///
/// [L53]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l53
/// [L54]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l54
#[derive(Debug)]
pub struct Account {
    owner: String,
    used: AtomicU64,
    limit: AtomicU64,
    /// The limit is RLIMIT_MEMLOCK, and is read again before a charge is refused.
    follows: bool,
}

impl Account {
    /// An account whose limit is RLIMIT_MEMLOCK of this process. If the limit is raised later, the
    /// account notices it at the next charge that it would refuse.
    pub fn new(owner: impl Into<String>) -> Account {
        Account { follows: true, ..Account::with_limit(owner, limit()) }
    }

    /// An account with a given limit, in bytes.
    pub fn with_limit(owner: impl Into<String>, limit: u64) -> Account {
        Account {
            owner: owner.into(),
            used: AtomicU64::new(0),
            limit: AtomicU64::new(limit),
            follows: false,
        }
    }

    /// Bytes charged now.
    pub fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Most bytes; `u64::MAX`: no limit.
    pub fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    /// Whether CAP_IPC_LOCK is held now, and counts: with it the owner may exceed RLIMIT_MEMLOCK. A
    /// limit that was given to [`with_limit`](Self::with_limit) binds in any case.
    pub fn may_exceed(&self) -> bool {
        self.follows && ignores_memlock()
    }

    /// Charges `bytes`. With `exceed` the limit does not bind: pass the result of
    /// [`may_exceed`](Self::may_exceed) from the time at which the rule decides it (rule [L53]).
    ///
    /// # Errors
    /// The sum would exceed the limit, or 64 bits; nothing is charged then.
    ///
    /// [L53]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l53
    #[inline]
    pub fn charge(&self, bytes: u64, exceed: bool) -> Result<(), LimitError> {
        loop {
            let most = self.limit();
            // A sum that wraps is above every limit.
            let more = |used: u64| used.checked_add(bytes).filter(|sum| exceed || *sum <= most);
            match self.used.fetch_update(Relaxed, Relaxed, more) {
                Ok(_) => return Ok(()),
                Err(_) if self.is_raised(most) => {}
                Err(used) => return Err(self.refuse(used, bytes)),
            }
        }
    }

    /// Gives back `bytes` that were charged.
    #[inline]
    pub fn uncharge(&self, bytes: u64) {
        let before = self.used.fetch_sub(bytes, Relaxed);
        debug_assert!(before >= bytes, "{bytes} of {before} bytes given back");
    }

    /// Whether RLIMIT_MEMLOCK was raised above `from`, be it that another thread noticed it first.
    #[cold]
    fn is_raised(&self, from: u64) -> bool {
        self.follows && {
            let now = limit();
            self.limit.store(now, Relaxed);
            from < now
        }
    }

    #[cold]
    fn refuse(&self, used: u64, requested: u64) -> LimitError {
        LimitError {
            owner: self.owner.clone(),
            limit: self.limit(),
            used,
            requested,
            memlock: self.follows,
        }
    }
}

/// An owner would pin more than its limit allows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{owner} may pin {} KiB ({}), has {} and asks for {} more{}",
    .limit.div_ceil(1024),
    if *.memlock { "RLIMIT_MEMLOCK" } else { "its own limit" },
    .used.div_ceil(1024),
    .requested.div_ceil(1024),
    if *.memlock { REMEDY } else { "" },
)]
#[non_exhaustive]
pub struct LimitError {
    /// The name of the account's owner.
    pub owner: String,
    /// Most bytes.
    pub limit: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes that the charge requested.
    pub requested: u64,
    /// Whether the limit is RLIMIT_MEMLOCK.
    pub memlock: bool,
}

const REMEDY: &str = "; raise it with `ulimit -l`, LimitMEMLOCK= of a systemd unit or docker's \
                      `--ulimit memlock=`, or grant CAP_IPC_LOCK";

#[cfg(test)]
mod tests {
    use super::*;

    // rule L53
    #[test]
    fn the_limit_binds_and_says_so() {
        let account = Account::with_limit("vm0", 8192);
        account.charge(4096, false).unwrap();
        account.charge(4096, false).unwrap();
        let error = account.charge(4096, false).unwrap_err();
        assert_eq!((error.limit, error.used, error.requested), (8192, 8192, 4096));
        assert_eq!(
            error.to_string(),
            "vm0 may pin 8 KiB (its own limit), has 8 and asks for 4 more"
        );
        assert!(account.charge(u64::MAX, false).is_err(), "a sum that wraps");
        assert!(account.charge(u64::MAX, true).is_err(), "a sum that wraps");
        account.charge(4096, true).unwrap();
        account.uncharge(12288);
        assert_eq!(account.used(), 0);
        let error = LimitError { memlock: true, ..error }.to_string();
        for remedy in ["RLIMIT_MEMLOCK", "ulimit -l", "LimitMEMLOCK=", "--ulimit", "CAP_IPC_LOCK"] {
            assert!(error.contains(remedy), "{error}");
        }
    }

    // rule L53
    #[test]
    fn each_thread_that_saw_the_old_limit_notices_that_it_was_raised() {
        let account = Account { limit: AtomicU64::new(0), ..Account::new("vm0") };
        assert_eq!([(); 2].map(|()| account.is_raised(0)), [limit() > 0; 2]);
    }

    // rule L53
    #[test]
    fn concurrent_charges_never_exceed_the_limit() {
        let account = Account::with_limit("all", 64);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for n in 0..20_000 {
                        let bytes = n % 40;
                        let charged = account.charge(bytes, false).is_ok();
                        assert!(account.used() <= 64);
                        if charged {
                            account.uncharge(bytes);
                        }
                    }
                });
            }
        });
        assert_eq!(account.used(), 0);
    }
}
