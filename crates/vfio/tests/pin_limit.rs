//! The limit of locked memory that the process has.

use std::sync::Arc;

use ringfence_iommu::{HostAddr, Iova, Prot, Range};
use ringfence_vfio::Account;
use ringfence_vfio::pin::{PinError, Pinner, Uring};
use ringfence_vfio_testing::backing::Fake;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

// rule L53
#[test]
fn the_limit_of_locked_memory_binds_windows_added_without_the_capability() {
    let old = getrlimit(Resource::Memlock);
    let mut low = getrlimit(Resource::Memlock);
    low.current = Some(1 << 20);
    setrlimit(Resource::Memlock, low).unwrap();

    let account = Arc::new(Account::new("vm0"));
    assert_eq!(account.limit(), 1 << 20);
    let mut pinner = Pinner::new(Fake::with_slots(64), account.clone());
    let window = |n: u64| Range::from_len(Iova(n << 30), 2 << 20).unwrap();
    let held = account.may_exceed();
    pinner.add_window(window(0), HostAddr(1 << 32), Prot::RW).unwrap();
    // Drops the capability of this thread only.
    let mut without = capabilities(None).unwrap();
    without.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, without).unwrap();
    assert!(!account.may_exceed());
    pinner.add_window(window(1), HostAddr(1 << 33), Prot::RW).unwrap();

    pinner.pin_range(window(1).first(), 1 << 20, Prot::RW).unwrap();
    let more = Iova(window(1).first().0 + (1 << 20));
    let error = pinner.pin(&[more], Prot::RW).unwrap_err();
    let PinError::Limit(why) = &error else { panic!("{error}") };
    assert_eq!((why.limit, why.used, why.requested, why.memlock), (1 << 20, 1 << 20, 4096, true));
    assert!(error.to_string().contains("ulimit -l"), "{error}");
    // The other window was added while the capability was held, if it was.
    let exceeded = pinner.pin(&[window(0).first()], Prot::RW);
    assert_eq!(exceeded.is_ok(), held, "{exceeded:?}");
    // Within one list, each page has the right of its own window.
    let next = Iova(window(0).first().0 + 4096);
    assert!(pinner.pin(&[next, more], Prot::RW).is_err());
    assert!(pinner.pin(&[more, next], Prot::RW).is_err());
    assert_eq!(pinner.count(next), 0);

    // A raised limit no longer binds.
    low.current = Some(4 << 20);
    if old.maximum.is_none_or(|most| most >= 4 << 20) {
        setrlimit(Resource::Memlock, low).unwrap();
        pinner.pin(&[more], Prot::RW).unwrap();
        assert_eq!(account.limit(), 4 << 20);
    }
    the_kernel_has_an_account_of_its_own();
}

/// Without the capability io_uring charges the user, whatever our account says.
fn the_kernel_has_an_account_of_its_own() {
    let memory = vec![0_u8; 8 << 20];
    let addr = HostAddr((memory.as_ptr().expose_provenance() as u64).next_multiple_of(4096));
    let account = Arc::new(Account::with_limit("vm0", u64::MAX));
    let mut pinner = Pinner::new(Uring::new().unwrap(), account.clone());
    let len = (8 << 20) - 4096;
    let window = Range::from_len(Iova(0), len).unwrap();
    pinner.add_window(window, addr, Prot::RW).unwrap();
    let error = pinner.pin_range(Iova(0), len, Prot::RW).unwrap_err();
    assert!(matches!(error, PinError::Hold { errno: Errno::NOMEM, .. }), "{error}");
    assert!(error.to_string().contains("RLIMIT_MEMLOCK"), "{error}");
    assert_eq!((account.used(), pinner.held()), (0, 0));
}
