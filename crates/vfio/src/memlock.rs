//! How much memory this process has locked, and its limit.

use std::fs;

use rustix::{
    process::{Resource, getrlimit},
    thread::{CapabilitySet, capabilities},
};

/// Locked memory of a process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locked {
    /// How much is locked.
    pub used: u64,
    /// The limit (`ulimit -l`).
    pub limit: u64,
}

/// What this process has locked, by the field of its status that the kernel's interface counts in;
/// `None` if no limit applies to it, or the count is not available.
pub(crate) fn of_this_process(field: &str) -> Option<Locked> {
    if ignores_memlock() {
        return None;
    }
    let used = used(&fs::read_to_string("/proc/self/status").ok()?, field)?;
    Some(limit()).filter(|&limit| limit != u64::MAX).map(|limit| Locked { used, limit })
}

/// RLIMIT_MEMLOCK in bytes; `u64::MAX`: no limit.
pub(crate) fn limit() -> u64 {
    getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX)
}

/// Whether this thread may lock any amount of memory: it has CAP_IPC_LOCK (rule L53). The kernel
/// ignores the capability in any user namespace but the initial one.
pub(crate) fn ignores_memlock() -> bool {
    let has = capabilities(None).is_ok_and(|held| held.effective.contains(CapabilitySet::IPC_LOCK));
    has && fs::read_to_string("/proc/self/uid_map").map_or(true, |map| is_first(&map))
}

/// Whether this is the map of the initial user namespace, where every user maps to itself.
fn is_first(uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

fn used(status: &str, field: &str) -> Option<u64> {
    let kib =
        status.lines().find_map(|line| line.strip_prefix(field))?.trim().strip_suffix("kB")?;
    kib.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_locked_is_read_from_the_status() {
        let status = "Name:\tx\nVmLck:\t     64 kB\nVmPin:\t 8 kB\n";
        assert_eq!(used(status, "VmLck:"), Some(64 << 10));
        assert_eq!(used(status, "VmPin:"), Some(8 << 10));
        assert_eq!(used("", "VmLck:"), None);
    }

    #[test]
    fn the_first_namespace_maps_every_user_to_itself() {
        assert!(is_first("         0          0 4294967295\n"));
        assert!(!is_first("0 1000 1\n"));
        assert!(!is_first("0 100000 65536\n1000 1000 1\n"));
        assert!(!is_first(""));
    }
}
