//! Whether the limit on locked memory applies.

use std::fs;

use rustix::thread::{CapabilitySet, capabilities};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_namespace_maps_every_user_to_itself() {
        assert!(is_first("         0          0 4294967295\n"));
        assert!(!is_first("0 1000 1\n"));
        assert!(!is_first("0 100000 65536\n1000 1000 1\n"));
        assert!(!is_first(""));
    }
}
