//! The system call filters, as the kernel runs them.

use std::{io, sync::OnceLock};

use libc::{sock_filter, sock_fprog};
use seccompiler::{BackendError, SeccompAction, SeccompFilter, TargetArch};

use crate::{
    Lack, SandboxError,
    calls::{self, Role},
    refused,
};

/// What each role may call; set once the process has entered its sandbox.
static FILTERS: OnceLock<Vec<(Role, Vec<sock_filter>)>> = OnceLock::new();

/// The architecture to filter for, in the kernel's terms; `None`: there are no lists for it.
const ARCHITECTURE: Option<TargetArch> = if cfg!(target_arch = "x86_64") {
    Some(TargetArch::x86_64)
} else if cfg!(target_arch = "aarch64") {
    Some(TargetArch::aarch64)
} else {
    None
};

/// Confines the calling thread, and all that it starts, to the calls of a service. Returns what the
/// kernel lacks.
pub(super) fn enter() -> Result<Option<Lack>, SandboxError> {
    let Some(target) = ARCHITECTURE else {
        return Ok(Some(Lack::Architecture(std::env::consts::ARCH)));
    };
    let compiled = SandboxError::of("compiling the filter of system calls");
    let compiled = |error| compiled(io::Error::other(error));
    let missing = not_there(target).map_err(compiled)?;
    let filters = Role::ALL.into_iter().map(|role| Ok((role, list(role, target)?)));
    let filters = filters.collect::<Result<Vec<_>, _>>().map_err(compiled)?;
    refused::install().map_err(SandboxError::of("preparing for SIGSYS"))?;
    let installed = SandboxError::of("installing the filter of system calls");
    match install(&missing) {
        Ok(()) => {}
        // No such call, or no such mode.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL)) => {
            return Ok(Some(Lack::Seccomp));
        }
        Err(error) => return Err(installed(error)),
    }
    let _ = FILTERS.set(filters);
    confine(Role::Main).map_err(installed)?;
    Ok(None)
}

/// What the kernel lacks.
pub(super) fn lack() -> Option<Lack> {
    if ARCHITECTURE.is_none() {
        return Some(Lack::Architecture(std::env::consts::ARCH));
    }
    let action = libc::SECCOMP_RET_TRAP;
    // SAFETY: the kernel reads the action and checks whether it knows it.
    let known = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action)
    };
    (known != 0).then_some(Lack::Seccomp)
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
fn list(role: Role, target: TargetArch) -> Result<Vec<sock_filter>, BackendError> {
    let rules = calls::allowed(role)?;
    compile(SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, target)?)
}

/// Makes some calls fail as if the kernel did not have them, whatever another filter says: the C
/// library then uses older calls, whose arguments a filter can see.
fn not_there(target: TargetArch) -> Result<Vec<sock_filter>, BackendError> {
    let rules = calls::NOT_THERE.iter().map(|&call| (call, Vec::new())).collect();
    let refuse = SeccompAction::Errno(libc::ENOSYS as u32);
    compile(SeccompFilter::new(rules, SeccompAction::Allow, refuse, target)?)
}

fn compile(filter: SeccompFilter) -> Result<Vec<sock_filter>, BackendError> {
    let program: seccompiler::BpfProgram = filter.try_into()?;
    let line =
        |l: seccompiler::sock_filter| sock_filter { code: l.code, jt: l.jt, jf: l.jf, k: l.k };
    Ok(program.into_iter().map(line).collect())
}

/// Adds a filter to those of the calling thread.
fn install(filter: &[sock_filter]) -> io::Result<()> {
    let len = filter.len().try_into().map_err(io::Error::other)?;
    let program = sock_fprog { len, filter: filter.as_ptr().cast_mut() };
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
