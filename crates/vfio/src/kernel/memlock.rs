//! How much memory this process has locked, and may.

use std::fs;

/// Locked memory of a process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locked {
    /// How much is.
    pub used: u64,
    /// How much may be (`ulimit -l`).
    pub limit: u64,
}

/// Which of the process's counts a kernel interface charges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Charged {
    /// `VmLck`: with what was locked by mlock.
    Type1,
    /// `VmPin`.
    Iommufd,
}

/// `CAP_IPC_LOCK`: no limit holds.
const IPC_LOCK: u32 = 14;

/// What is locked by this process; `None` if no limit holds for it, or nobody knows.
pub(super) fn of_this_process(charged: Charged) -> Option<Locked> {
    let used = used(&fs::read_to_string("/proc/self/status").ok()?, charged)?;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current?;
    Some(Locked { used, limit })
}

fn used(status: &str, charged: Charged) -> Option<u64> {
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let capabilities = u64::from_str_radix(field("CapEff:")?, 16).ok()?;
    if capabilities >> IPC_LOCK & 1 != 0 {
        return None;
    }
    let name = if charged == Charged::Type1 { "VmLck:" } else { "VmPin:" };
    field(name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_locked_is_read_from_the_status() {
        let status =
            |caps| format!("Name:\tx\nVmLck:\t     64 kB\nVmPin:\t 8 kB\nCapEff:\t{caps}\n");
        let plain = status("0000000000000000");
        assert_eq!(used(&plain, Charged::Type1), Some(64 << 10));
        assert_eq!(used(&plain, Charged::Iommufd), Some(8 << 10));
        assert_eq!(used(&status("0000000000004000"), Charged::Type1), None);
        assert_eq!(used("", Charged::Type1), None);
    }
}
