//! The system calls that are needed (io_uring, memfd), and the front ends.

use ringfence_sandbox::Unsupported;
use rustix::io::Errno;
use serde::Serialize;

use super::{
    check::{Check, Purpose, State},
    tree::Tree,
    tried::{MOST_BUFFERS, Tried},
};

/// What restricts system calls, and which front ends there are.
#[derive(Debug, Serialize)]
pub(super) struct Calls {
    /// kernel.io_uring_disabled: 0 allows all users, 1 some, 2 none. `None`: an older kernel
    /// without this switch.
    io_uring_disabled: Option<u64>,
    /// A seccomp filter is installed on this process.
    filtered: bool,
    /// The kernel's own network back end.
    vhost_net: bool,
    qemu: Option<String>,
}

impl Calls {
    pub(super) fn read(tree: &Tree, tried: &Tried) -> Calls {
        let status = tree.text("proc/self/status").unwrap_or_default();
        let seccomp = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
        Calls {
            io_uring_disabled: tree.number("proc/sys/kernel/io_uring_disabled"),
            filtered: seccomp.is_some_and(|mode| mode.trim() == "2"),
            vhost_net: tree.has("dev/vhost-net"),
            qemu: tried.qemu.clone().flatten(),
        }
    }
}

/// Whether io_uring works: it pins memory, and reads and writes a disk's file.
pub(super) fn io_uring(calls: &Calls, tried: &Tried) -> Check {
    const FOR: &[Purpose] = &[Purpose::Pin, Purpose::VhostUser];
    let check = |state, found: String| Check::new("io-uring", FOR, state, found);
    let error = match tried.io_uring {
        Some(Ok(true)) => {
            return check(
                State::Ok,
                format!("works; {MOST_BUFFERS} buffers of 1 GiB at most can be pinned by one"),
            );
        }
        Some(Ok(false)) => {
            return check(
                State::Lack,
                "works, and has no sparse table of buffers (Linux 5.19 has)".into(),
            )
            .remedy("A newer kernel:", ["apt-get install linux-image-amd64 && reboot"]);
        }
        Some(Err(error)) => Some(error),
        None => None,
    };
    let because = error.map(|error| format!(": {error}")).unwrap_or_default();
    match (calls.io_uring_disabled, error) {
        (Some(mode @ (1 | 2)), _) if error.is_some() || mode == 2 => {
            let check = check(
                State::Lack,
                format!("forbidden by kernel.io_uring_disabled={mode}{because}"),
            )
            .remedy("For all:", ["sysctl -w kernel.io_uring_disabled=0"]);
            match mode {
                1 => check.remedy(
                    "For a group of users only:",
                    ["sysctl -w kernel.io_uring_group=$(getent group GROUP | cut -d: -f3)"],
                ),
                _ => check,
            }
        }
        (_, None) => check(State::Note, "not tried".into()),
        // A filter may give that, too.
        (_, Some(Errno::NOSYS)) if !calls.filtered => {
            check(State::Lack, "not in this kernel".into())
                .remedy("Another kernel:", ["apt-get install linux-image-amd64 && reboot"])
        }
        (_, Some(Errno::NOMEM)) => check(State::Lack, format!("no memory for one{because}"))
            .remedy(
                "Kernels before 5.12 count its rings as locked memory:",
                ["ulimit -S -l 65536"],
            ),
        (_, Some(error)) => {
            let check = check(State::Lack, format!("{error}"));
            match calls.filtered {
                true => check
                    .remedy(
                        "A filter of system calls may forbid it. For a container, with a profile that allows \
                         io_uring_setup, io_uring_enter and io_uring_register:",
                        ["docker run --security-opt seccomp=PROFILE.json ..."],
                    )
                    .remedy("For a service:", ["systemctl edit SERVICE   # [Service] SystemCallFilter=@aio"]),
                false => check.advice(
                    "A security module (SELinux, AppArmor) may forbid it: see its log.",
                ),
            }
        }
    }
}

/// Whether memory can be shared with a front end.
pub(super) fn memfd(calls: &Calls, tried: &Tried) -> Check {
    let check = |state, found: String| Check::new("memfd", &[Purpose::VhostUser], state, found);
    match tried.memfd {
        None => check(State::Note, "not tried".into()),
        Some(Ok(())) => check(State::Ok, "memory can be shared and sealed".into()),
        Some(Err(error)) => {
            let check = check(State::Lack, format!("memory cannot be shared: {error}"));
            match calls.filtered {
                true => check.remedy(
                    "A filter of system calls may forbid it; for a service:",
                    ["systemctl edit SERVICE   # [Service] SystemCallFilter=memfd_create"],
                ),
                false => check.advice("Linux has it since 3.17; vm.memfd_noexec=2 may forbid it."),
            }
        }
    }
}

/// Whether the kernel has what services confine themselves with. Without it they serve less confined.
pub(super) fn sandbox(tried: &Tried) -> Check {
    let check = |state, found: &str| Check::new("sandbox", &[Purpose::VhostUser], state, found);
    match tried.sandbox.as_deref() {
        None => check(State::Note, "not tried"),
        Some([]) => check(State::Ok, "Landlock and filters of system calls confine services"),
        Some(lacks) => {
            let lacks: Vec<String> = lacks.iter().map(Unsupported::to_string).collect();
            check(State::Warning, &lacks.join("; "))
                .remedy("A newer kernel:", ["apt-get install linux-image-amd64 && reboot"])
                .remedy(
                    "Landlock, where a kernel has it and does not enable it:",
                    ["cat /sys/kernel/security/lsm   # what there is; then boot with lsm=landlock,..."],
                )
        }
    }
}

/// Whether there is a front end on this host. It may as well be elsewhere, in its own container.
pub(super) fn qemu(calls: &Calls, tried: &Tried) -> Check {
    let check = |state, found: &str| Check::new("qemu", &[Purpose::VhostUser], state, found);
    match (&calls.qemu, &tried.qemu) {
        (Some(version), _) => check(State::Ok, version),
        (None, None) => check(State::Note, "not tried"),
        (None, Some(_)) => check(State::Note, "none on this PATH")
            .remedy("If a virtual machine is to run here:", ["apt-get install qemu-system-x86"]),
    }
}

/// The kernel's own back end, which needs none of this.
pub(super) fn vhost_net(calls: &Calls) -> Check {
    let found = match calls.vhost_net {
        true => "/dev/vhost-net is there (the kernel's back end; `ringfence net` does not use it)",
        false => "no /dev/vhost-net (the kernel's back end; `ringfence net` does without)",
    };
    Check::new("vhost-net", &[Purpose::VhostUser], State::Note, found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tree::MadeUp;

    fn state(made: &MadeUp, io_uring: Option<Result<bool, Errno>>) -> Check {
        let tried = Tried { io_uring, ..Tried::default() };
        super::io_uring(&Calls::read(&made.tree(), &tried), &tried)
    }

    #[test]
    fn a_ring_that_works_is_enough_whatever_the_switch_says() {
        let made = MadeUp::new(&[("proc/sys/kernel/io_uring_disabled", "1\n")]);
        assert_eq!(state(&made, Some(Ok(true))).state, State::Ok);
        assert_eq!(state(&made, Some(Ok(false))).state, State::Lack);
    }

    #[test]
    fn the_lack_names_its_cause_and_remedy() {
        let made = MadeUp::new(&[("proc/sys/kernel/io_uring_disabled", "1\n")]);
        let lack = state(&made, Some(Err(Errno::PERM)));
        assert_eq!(lack.state, State::Lack);
        assert_eq!(lack.remedies.len(), 2, "{lack:?}");
        // Nothing was tried: the switch alone shows that no user may, but not which users may.
        assert_eq!(state(&made, None).state, State::Note);
        made.file("proc/sys/kernel/io_uring_disabled", "2\n");
        assert_eq!(state(&made, None).state, State::Lack);

        let made = MadeUp::new(&[("proc/self/status", "Seccomp:\t2\n")]);
        let lack = state(&made, Some(Err(Errno::PERM)));
        assert!(lack.remedies[0].commands[0].contains("seccomp"), "{lack:?}");
        let filtered = state(&made, Some(Err(Errno::NOSYS)));
        assert!(filtered.remedies[0].commands[0].contains("seccomp"), "{filtered:?}");
        let made = MadeUp::new(&[]);
        assert!(state(&made, Some(Err(Errno::NOSYS))).found.contains("not in this kernel"));
    }

    #[test]
    fn a_switch_that_is_garbage_is_none() {
        let made = MadeUp::new(&[("proc/sys/kernel/io_uring_disabled", "perhaps\n")]);
        assert_eq!(state(&made, None).state, State::Note);
    }

    #[test]
    fn memory_that_cannot_be_shared_is_a_lack_but_a_missing_qemu_is_not() {
        let calls = Calls::read(&MadeUp::new(&[]).tree(), &Tried::default());
        let tried = Tried { memfd: Some(Err(Errno::PERM)), qemu: Some(None), ..Tried::default() };
        assert_eq!(memfd(&calls, &tried).state, State::Lack);
        assert_eq!(qemu(&calls, &tried).state, State::Note);
        assert_eq!(memfd(&calls, &Tried::default()).state, State::Note);
    }
}
