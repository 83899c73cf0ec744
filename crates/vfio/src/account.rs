//! How much memory an owner has pinned, and how much it may.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::process::{Resource, getrlimit};

use crate::privilege::ignores_memlock;

/// What an owner of pinned memory has pinned, in bytes, and its limit (rules L53, L54).
///
/// One for each owner, shared by its pinners. Memory is charged before it is pinned, and the sum
/// never exceeds the limit, not even for a moment while other threads charge.
///
/// The kernel has accounts of its own, each with RLIMIT_MEMLOCK as its limit: VFIO and mlock charge
/// the process; io_uring, unless CAP_IPC_LOCK was held when the ring was made, charges the *user*,
/// all processes together, and a whole huge page as soon as one page of it is pinned. So a charge
/// that succeeds here can fail there. This account says how much each owner has pinned.
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
        Account {
            owner: owner.into(),
            used: AtomicU64::new(0),
            limit: AtomicU64::new(memlock()),
            follows: true,
        }
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

    /// The owner's name.
    pub fn owner(&self) -> &str {
        &self.owner
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
    /// [`may_exceed`](Self::may_exceed) from the time at which the rule decides it (rule L53).
    ///
    /// # Errors
    /// The sum would exceed the limit; nothing is charged then.
    #[inline]
    pub fn charge(&self, bytes: u64, exceed: bool) -> Result<(), LimitError> {
        let mut used = self.used.load(Relaxed);
        loop {
            // A sum that wraps is above every limit.
            let sum = used.checked_add(bytes);
            let fits = sum.is_some_and(|sum| exceed || sum <= self.limit.load(Relaxed));
            let (Some(sum), true) = (sum, fits) else {
                if self.is_raised() {
                    continue;
                }
                return Err(self.refuse(used, bytes));
            };
            match self.used.compare_exchange_weak(used, sum, Relaxed, Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => used = now,
            }
        }
    }

    /// Gives back `bytes` that were charged.
    #[inline]
    pub fn uncharge(&self, bytes: u64) {
        let before = self.used.fetch_sub(bytes, Relaxed);
        debug_assert!(before >= bytes, "{bytes} of {before} bytes given back");
    }

    /// Whether RLIMIT_MEMLOCK was raised.
    #[cold]
    fn is_raised(&self) -> bool {
        self.follows && {
            let now = memlock();
            self.limit.swap(now, Relaxed) < now
        }
    }

    #[cold]
    fn refuse(&self, used: u64, asked: u64) -> LimitError {
        LimitError {
            owner: self.owner.clone(),
            limit: self.limit(),
            used,
            asked,
            memlock: self.follows,
        }
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} KiB pinned", self.owner, self.used() >> 10)?;
        match self.limit() {
            u64::MAX => f.write_str(", no limit"),
            limit => write!(f, " of {} KiB", limit >> 10),
        }
    }
}

/// RLIMIT_MEMLOCK in bytes.
fn memlock() -> u64 {
    getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX)
}

/// An owner would pin more than its limit allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitError {
    /// The name of the account's owner.
    pub owner: String,
    /// Most bytes.
    pub limit: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes that the charge asked for.
    pub asked: u64,
    /// Whether the limit is RLIMIT_MEMLOCK.
    pub memlock: bool,
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LimitError { owner, limit, used, asked, memlock } = self;
        let limited = if *memlock { "RLIMIT_MEMLOCK" } else { "its own limit" };
        let [limit, used, asked] = [limit, used, asked].map(|bytes| bytes.div_ceil(1024));
        write!(f, "{owner} may pin {limit} KiB ({limited}), has {used} and asks for {asked} more")?;
        if *memlock {
            f.write_str(
                "; raise it with `ulimit -l`, LimitMEMLOCK= of a systemd unit or docker's \
                 `--ulimit memlock=`, or grant CAP_IPC_LOCK",
            )?;
        }
        Ok(())
    }
}

impl std::error::Error for LimitError {}

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
        assert_eq!((error.limit, error.used, error.asked), (8192, 8192, 4096));
        assert_eq!(
            error.to_string(),
            "vm0 may pin 8 KiB (its own limit), has 8 and asks for 4 more"
        );
        assert!(account.charge(u64::MAX, false).is_err(), "a sum that wraps");
        assert!(account.charge(u64::MAX, true).is_err(), "a sum that wraps");
        account.charge(4096, true).unwrap();
        assert_eq!(account.to_string(), "vm0: 12 KiB pinned of 8 KiB");
        account.uncharge(12288);
        assert_eq!(account.used(), 0);
        let error = LimitError { memlock: true, ..error }.to_string();
        for remedy in ["RLIMIT_MEMLOCK", "ulimit -l", "LimitMEMLOCK=", "--ulimit", "CAP_IPC_LOCK"] {
            assert!(error.contains(remedy), "{error}");
        }
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
