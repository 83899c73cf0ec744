//! How much memory this process has locked, and its limit.

use std::fs;

use crate::privilege::ignores_memlock;

/// Locked memory of a process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locked {
    /// How much is locked.
    pub used: u64,
    /// The limit (`ulimit -l`).
    pub limit: u64,
}

/// Which count of the process a kernel interface charges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Charged {
    /// `VmLck`: together with what mlock has locked.
    Type1,
    /// `VmPin`.
    Iommufd,
}

/// What this process has locked; `None` if no limit applies to it, or the count is not available.
pub(super) fn of_this_process(charged: Charged) -> Option<Locked> {
    if ignores_memlock() {
        return None;
    }
    let used = used(&fs::read_to_string("/proc/self/status").ok()?, charged)?;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current?;
    Some(Locked { used, limit })
}

fn used(status: &str, charged: Charged) -> Option<u64> {
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let name = if charged == Charged::Type1 { "VmLck:" } else { "VmPin:" };
    field(name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_locked_is_read_from_the_status() {
        let status = "Name:\tx\nVmLck:\t     64 kB\nVmPin:\t 8 kB\n";
        assert_eq!(used(status, Charged::Type1), Some(64 << 10));
        assert_eq!(used(status, Charged::Iommufd), Some(8 << 10));
        assert_eq!(used("", Charged::Type1), None);
    }
}
