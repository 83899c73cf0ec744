//! Whether the limit on locked memory holds.

use std::fs;

use rustix::thread::{CapabilitySet, capabilities};

/// Whether this thread may lock as much memory as it likes: it has CAP_IPC_LOCK (rule L53). That of a
/// user namespace other than the first does not count with the kernel.
pub(crate) fn ignores_memlock() -> bool {
    let has = capabilities(None).is_ok_and(|held| held.effective.contains(CapabilitySet::IPC_LOCK));
    has && fs::read_to_string("/proc/self/uid_map").map_or(true, |map| is_first(&map))
}

/// Whether this is what users are mapped to in the first user namespace: all to themselves.
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
