//! Which system calls a service makes, by thread role.
//!
//! A filter sees a call's number and its arguments as numbers, but not the memory that they point
//! to. So a call is listed with conditions where its arguments decide what it can do, and left out
//! where the memory behind a pointer would decide (`openat2`, `clone3`).

use std::collections::BTreeMap;

use libc::{c_int, c_long};
use rustix::io_uring::IoringRegisterOp;
use seccompiler::{
    BackendError, SeccompCmpArgLen::Dword, SeccompCmpArgLen::Qword, SeccompCmpOp, SeccompCondition,
    SeccompRule,
};

/// What a thread of a service does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// The process's first thread, which starts and ends the others: all calls that any thread
    /// makes.
    Main,
    /// Accepts the front ends of a socket and replies to their messages.
    Front,
    /// Serves metrics.
    Figures,
    /// Moves data.
    Worker,
    /// Submits requests to the kernel for a disk that may not complete them.
    Disk,
    /// Connects to the back end of a proxy.
    Connector,
    /// Writes the log.
    Log,
}

impl Role {
    /// All roles.
    pub(super) const ALL: [Role; 7] = [
        Role::Main,
        Role::Front,
        Role::Figures,
        Role::Worker,
        Role::Disk,
        Role::Connector,
        Role::Log,
    ];
}

/// Which arguments a call may have: any if its list of rules is empty, else those that one of the
/// rules admits.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Calls that a separate filter makes fail with ENOSYS: the C library then uses `clone`. A filter
/// can see the flags of `clone`, but those of `clone3` lie in memory. The lists of roles admit
/// them, since the kernel would prefer a trap to ENOSYS.
pub(super) const NOT_THERE: [c_long; 1] = [libc::SYS_clone3];

/// What every thread needs: memory, time, locks, starting and ending a thread, and writing to a
/// descriptor (a thread that panics does).
const BASE: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    // A waiting loop checks whether its CPU was taken away.
    libc::SYS_getrusage,
    libc::SYS_madvise,
    // musl registers for membarrier with the first thread.
    #[cfg(target_env = "musl")]
    libc::SYS_membarrier,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

/// For moving bytes.
const DESCRIPTORS: &[c_long] = &[libc::SYS_read, libc::SYS_readv, libc::SYS_writev];

/// Rings in memory, disks, taps, and recovery from truncated guest memory.
const WORKER: &[c_long] = &[
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_eventfd2,
    libc::SYS_fallocate,
    libc::SYS_getcpu,
    libc::SYS_io_submit,
    libc::SYS_io_uring_enter,
    libc::SYS_preadv2,
    // Shuts down a channel that takes no more misses.
    libc::SYS_shutdown,
    libc::SYS_statx,
];

/// Connections, the memory that front ends share over them, and images that are handed over.
const FRONT: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_ftruncate,
    libc::SYS_getsockopt,
    libc::SYS_memfd_create,
    // Finds the kind of a descriptor.
    libc::SYS_readlinkat,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    // Messages with descriptors, on connected sockets.
    libc::SYS_sendmsg,
];

/// Connections of scrapers, and how much memory a pool takes.
const FIGURES: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_fstat,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_shutdown,
];

/// An io_uring ring and an eventfd.
const DISK: &[c_long] = &[libc::SYS_io_uring_enter, libc::SYS_read];

/// The connection to a back end, and its messages.
const CONNECTOR: &[c_long] = &[
    libc::SYS_connect,
    libc::SYS_getsockopt,
    libc::SYS_preadv2,
    // Finds the kind of a descriptor.
    libc::SYS_readlinkat,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
];

/// The names of the sockets, and their removal.
const MAIN: &[c_long] = &[libc::SYS_getsockname, libc::SYS_newfstatat, libc::SYS_unlinkat];

/// What threads of a role may call. `connects`: the process has a [`Role::Connector`].
pub(super) fn allowed(role: Role, connects: bool) -> Result<Rules, BackendError> {
    let plain: &[&[c_long]] = match role {
        Role::Main if connects => &[DESCRIPTORS, WORKER, FRONT, FIGURES, DISK, CONNECTOR, MAIN],
        Role::Main => &[DESCRIPTORS, WORKER, FRONT, FIGURES, DISK, MAIN],
        // The threads of a front end start those of disks, too.
        Role::Front => &[DESCRIPTORS, FRONT, WORKER],
        Role::Figures => &[DESCRIPTORS, FIGURES],
        Role::Worker => &[DESCRIPTORS, WORKER],
        Role::Disk => &[DISK],
        Role::Connector if connects => &[DESCRIPTORS, CONNECTOR],
        Role::Connector => &[],
        Role::Log => &[],
    };
    let plain = [BASE, &NOT_THERE].iter().chain(plain).copied().flatten();
    let mut rules: Rules = plain.map(|&call| (call, Vec::new())).collect();

    // No memory becomes executable later.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![masked(2, libc::PROT_EXEC, 0)?]);
    }
    // Threads of this process, in its existing namespaces.
    const NAMESPACES: c_int = libc::CLONE_NEWNS
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET;
    const THREAD: c_int = libc::CLONE_VM | libc::CLONE_THREAD;
    rules.insert(libc::SYS_clone, vec![masked(0, THREAD | NAMESPACES, THREAD)?]);
    // Signals to the process itself, by which it ends.
    let own = std::process::id() as c_int;
    rules.insert(libc::SYS_tgkill, one_of(0, &[own])?);
    if role == Role::Main {
        // Threads that serve requests ask for short time slices, each for itself, before they
        // confine themselves further.
        for call in [libc::SYS_sched_getattr, libc::SYS_sched_setattr] {
            rules.insert(call, one_of(0, &[0])?);
        }
    }
    // Names of threads and of memory areas.
    let options = [libc::PR_SET_NAME, libc::PR_SET_TIMERSLACK, libc::PR_SET_VMA];
    rules.insert(libc::SYS_prctl, one_of(0, &options)?);

    // Only on connected sockets. On every list: the handler of a signal that ends the service
    // passes it on with this call, in whichever thread it runs.
    let none = SeccompCondition::new(4, Qword, SeccompCmpOp::Eq, 0)?;
    rules.insert(libc::SYS_sendto, vec![SeccompRule::new(vec![none])?]);
    // Whether standard error is a terminal, non-blocking sockets, and taps.
    let (terminal, nonblocking) = (libc::TCGETS as c_int, libc::FIONBIO as c_int);
    let taps = [libc::TUNSETVNETHDRSZ, libc::TUNSETOFFLOAD, libc::TUNSETQUEUE];
    let [header, offload, queue] = taps.map(|request| request as c_int);
    let requests = match role {
        Role::Disk | Role::Log => &[terminal][..],
        Role::Figures | Role::Connector => &[terminal, nonblocking],
        Role::Main => &[terminal, nonblocking, header, offload, queue],
        Role::Front | Role::Worker => &[terminal, header, offload, queue],
    };
    rules.insert(libc::SYS_ioctl, one_of(1, requests)?);
    let commands = match role {
        // A build with debug assertions checks that a descriptor is open before it closes it.
        Role::Disk | Role::Log => &[libc::F_GETFD][..],
        _ => &COMMANDS,
    };
    rules.insert(libc::SYS_fcntl, one_of(1, commands)?);
    if connects && matches!(role, Role::Main | Role::Connector) {
        // No other sockets than those of this host's processes.
        for call in [libc::SYS_socket, libc::SYS_socketpair] {
            let unix = equals(0, libc::AF_UNIX)?;
            let stream = SeccompCmpOp::MaskedEq(SOCKET_KIND);
            let stream = SeccompCondition::new(1, Dword, stream, libc::SOCK_STREAM as u64)?;
            rules.insert(call, vec![SeccompRule::new(vec![unix, stream])?]);
        }
    }
    if matches!(role, Role::Main | Role::Front | Role::Connector) {
        // Out-of-band data of a connection.
        let inline = vec![equals(1, libc::SOL_SOCKET)?, equals(2, libc::SO_OOBINLINE)?];
        rules.insert(libc::SYS_setsockopt, vec![SeccompRule::new(inline)?]);
    }
    if matches!(role, Role::Main | Role::Front) {
        // The threads that it starts confine themselves further.
        rules.insert(libc::SYS_seccomp, one_of(0, &[libc::SECCOMP_SET_MODE_FILTER as c_int])?);
    }
    if matches!(role, Role::Main | Role::Front | Role::Worker) {
        // Eventfds that notify a driver, or signal completions of a disk.
        let operations = [IoringRegisterOp::RegisterEventfd, IoringRegisterOp::UnregisterEventfd];
        let operations = operations.map(|operation| operation as c_int);
        rules.insert(libc::SYS_io_uring_register, one_of(1, &operations)?);
    }
    Ok(rules)
}

/// Of `fcntl`: duplicates, seals, and the locks of images.
const COMMANDS: [c_int; 6] = [
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
];

/// The bits of a socket's type without its flags.
const SOCKET_KIND: u64 = 0xf;

/// An argument's bits of `mask` are `value`.
fn masked(argument: u8, mask: c_int, value: c_int) -> Result<SeccompRule, BackendError> {
    let how = SeccompCmpOp::MaskedEq(mask as u32 as u64);
    SeccompRule::new(vec![SeccompCondition::new(argument, Dword, how, value as u32 as u64)?])
}

/// An argument is one of `values`.
fn one_of(argument: u8, values: &[c_int]) -> Result<Vec<SeccompRule>, BackendError> {
    values.iter().map(|&value| SeccompRule::new(vec![equals(argument, value)?])).collect()
}

/// An argument is `value`.
fn equals(argument: u8, value: c_int) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, Dword, SeccompCmpOp::Eq, value as u32 as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_thread_may_all_that_others_may() {
        for (role, connects) in Role::ALL.into_iter().flat_map(|role| [(role, false), (role, true)])
        {
            let main = allowed(Role::Main, connects).unwrap();
            let rules = allowed(role, connects).unwrap();
            assert!(rules.len() > BASE.len());
            for (call, conditions) in rules {
                let of_main =
                    main.get(&call).expect("a call of another role is none of the process");
                assert!(
                    of_main.is_empty() || conditions.iter().all(|rule| of_main.contains(rule)),
                    "call {call} of {role:?}"
                );
            }
        }
    }

    #[test]
    fn only_one_thread_connects_and_only_to_unix_sockets_and_only_where_there_is_a_back_end() {
        let roles = Role::ALL.into_iter().flat_map(|role| [(role, false), (role, true)]);
        let may = roles.filter(|&(role, connects)| {
            let rules = allowed(role, connects).unwrap();
            for call in [libc::SYS_socket, libc::SYS_socketpair] {
                // With rules of its own: not any.
                assert!(rules.get(&call).is_none_or(|kinds| !kinds.is_empty()));
            }
            rules.contains_key(&libc::SYS_connect)
        });
        assert!(may.eq([(Role::Main, true), (Role::Connector, true)]));
    }
}
