//! The system call filters, as the kernel runs them.

use std::{env::consts::ARCH, io, sync::OnceLock};

use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use crate::{
    SandboxError, Unsupported,
    calls::{self, Role},
    refused,
};

/// What each role may call; set once the process has entered its sandbox.
static FILTERS: OnceLock<Vec<(Role, BpfProgram)>> = OnceLock::new();

/// The architecture to filter for; `None`: there are no lists for it.
fn architecture() -> Option<TargetArch> {
    let is_listed = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));
    ARCH.try_into().ok().filter(|_| is_listed)
}

/// Confines the calling thread, and all that it starts, to the calls of a service. Returns what the
/// kernel does not support.
pub(super) fn enter() -> Result<Option<Unsupported>, SandboxError> {
    let Some(target) = architecture() else {
        return Ok(Some(Unsupported::Architecture(ARCH)));
    };
    let compiled =
        |error| SandboxError::of("compiling the filter of system calls")(io::Error::other(error));
    let missing = not_there(target).map_err(compiled)?;
    let filters = Role::ALL.into_iter().map(|role| Ok((role, list(role, target)?)));
    let filters = filters.collect::<Result<Vec<_>, _>>().map_err(compiled)?;
    refused::install().map_err(SandboxError::of("preparing for SIGSYS"))?;
    let installed = SandboxError::of("installing the filter of system calls");
    match install(&missing) {
        Ok(()) => {}
        // No such call, or no such mode.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL)) => {
            return Ok(Some(Unsupported::Seccomp));
        }
        Err(error) => return Err(installed(error)),
    }
    let _ = FILTERS.set(filters);
    confine(Role::Main).map_err(installed)?;
    Ok(None)
}

/// What the kernel does not support.
pub(super) fn unsupported() -> Option<Unsupported> {
    if architecture().is_none() {
        return Some(Unsupported::Architecture(ARCH));
    }
    let action = libc::SECCOMP_RET_TRAP;
    // SAFETY: the kernel reads the action and checks whether it knows it.
    let known = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action)
    };
    (known != 0).then_some(Unsupported::Seccomp)
}

/// Confines the calling thread to the calls of its role, if there are filters.
pub(super) fn confine(role: Role) -> io::Result<()> {
    let filters = FILTERS.get().into_iter().flatten();
    for (_, filter) in filters.filter(|(of, _)| *of == role) {
        refused::acts_as(role);
        install(filter)?;
    }
    Ok(())
}

/// Admits the calls on the list; any other raises SIGSYS.
fn list(role: Role, target: TargetArch) -> Result<BpfProgram, BackendError> {
    let rules = calls::allowed(role)?;
    SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, target)?.try_into()
}

/// Makes some calls fail as if the kernel did not have them, whatever another filter says: the C
/// library then uses older calls, whose arguments a filter can see.
fn not_there(target: TargetArch) -> Result<BpfProgram, BackendError> {
    let rules = calls::NOT_THERE.iter().map(|&call| (call, Vec::new())).collect();
    let refuse = SeccompAction::Errno(libc::ENOSYS as u32);
    SeccompFilter::new(rules, SeccompAction::Allow, refuse, target)?.try_into()
}

/// Adds a filter to those of the calling thread.
fn install(filter: &BpfProgram) -> io::Result<()> {
    let len = filter.len().try_into().map_err(io::Error::other)?;
    // The same structure, for which `libc` has a name of its own.
    let program = libc::sock_fprog { len, filter: filter.as_ptr().cast_mut().cast() };
    // Without the flag, kernels before 5.16 turn off speculative store bypass for the thread, which
    // slows it down by more than the filter does. Turning it off protects against untrusted code in
    // the process, and a service runs none.
    let flags = libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: the kernel reads the program, which outlives the call, and copies it.
    let done = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
