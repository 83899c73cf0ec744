//! The system call filters, as the kernel runs them. SIGSYS makes calls on no list fail, and counts
//! them. They do not end the process (without debug assertions): a call that a list lacks must not take a guest down.

use std::{
    cell::Cell,
    env::consts::ARCH,
    io, mem,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
};

use rustix::event::{EventfdFlags, eventfd};
use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use crate::{
    SandboxError, Unsupported,
    calls::{self, Role},
};

/// What each role may call; set once the process has entered its sandbox.
static FILTERS: OnceLock<Vec<(Role, BpfProgram)>> = OnceLock::new();

/// The architecture to filter for; `None`: there are no lists for it.
fn architecture() -> Option<TargetArch> {
    let is_listed = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));
    ARCH.try_into().ok().filter(|_| is_listed)
}

/// Confines the calling thread, and all that it starts, to the calls of a service. Returns what the
/// kernel does not support. `connects`: one of them may connect to other services.
pub(super) fn enter(connects: bool) -> Result<Option<Unsupported>, SandboxError> {
    let Some(target) = architecture() else {
        return Ok(Some(Unsupported::Architecture(ARCH)));
    };
    let compiled =
        |error| SandboxError::of("compiling the filter of system calls")(io::Error::other(error));
    let missing = not_there(target).map_err(compiled)?;
    let filters = Role::ALL.into_iter().map(|role| Ok((role, list(role, connects, target)?)));
    let filters = filters.collect::<Result<Vec<_>, _>>().map_err(compiled)?;
    catch_sigsys().map_err(SandboxError::of("preparing for SIGSYS"))?;
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
        ROLE.set(role);
        install(filter)?;
    }
    Ok(())
}

/// Admits the calls on the list; any other raises SIGSYS.
fn list(role: Role, connects: bool, target: TargetArch) -> Result<BpfProgram, BackendError> {
    let rules = calls::allowed(role, connects)?;
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

/// Makes libraries do now what they would do later, or not at all.
///
/// All threads share one heap. With several heaps glibc opens /sys to count the CPUs when it makes
/// another, and /proc to read the overcommit mode when one returns memory. The data path allocates
/// nothing, and small pieces come from a per-thread cache.
///
/// rustix looks up the clock once, in what the kernel has passed to the process.
pub(super) fn settle() {
    let _ = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // If inherited, this flag would make all readable memory executable.
    // SAFETY: it sets flags of this process, and there is no other thread.
    unsafe {
        let persona = libc::personality(0xffff_ffff);
        if persona >= 0 && persona & libc::READ_IMPLIES_EXEC != 0 {
            libc::personality((persona & !libc::READ_IMPLIES_EXEC) as libc::c_ulong);
        }
    }
    #[cfg(target_env = "gnu")]
    // SAFETY: it sets a number of the allocator's, and there is no other thread.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// How many were refused.
static COUNT: AtomicU64 = AtomicU64::new(0);
/// The last one's number, and its thread's role.
static LAST: AtomicI64 = AtomicI64::new(-1);
/// The handler writes to it.
static EVENT: OnceLock<OwnedFd> = OnceLock::new();

/// `SYS_SECCOMP`: a filter raised the signal.
const BY_FILTER: libc::c_int = 1;

thread_local! {
    static ROLE: Cell<Role> = const { Cell::new(Role::Main) };
}

/// Whether a refusal ends the process.
static ENDS: AtomicBool = AtomicBool::new(cfg!(debug_assertions));

/// Lets the process continue when a system call is refused, in a build with debug assertions too:
/// for tests of that.
pub fn go_on_when_refused() {
    ENDS.store(false, Ordering::Relaxed);
}

/// How many system calls of this process were refused by its sandbox.
pub fn refusals() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// The last system call that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// Its number on this architecture.
    pub call: i64,
    /// The role of its thread; [`Role::Main`] until the thread has [confined](crate::confine)
    /// itself.
    pub role: Role,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Refusal { call, role } = self;
        write!(f, "system call {call} of {} in a thread of role {role:?}", ARCH)
    }
}

/// Becomes readable with a refusal.
#[derive(Debug, Default)]
pub struct Refusals;

impl Refusals {
    /// Poll this for reading; `None` if [`Sandbox::enter`](crate::Sandbox::enter) was not called,
    /// or has no list of calls for this architecture.
    pub fn fd(&self) -> Option<BorrowedFd<'static>> {
        EVENT.get().map(OwnedFd::as_fd)
    }

    /// Takes what is new: how many refusals since the last call, and the last of them; `None` if
    /// there were none.
    pub fn take(&self) -> Option<(u64, Refusal)> {
        let mut count = [0; 8];
        rustix::io::read(EVENT.get()?, &mut count).ok()?;
        // Ordering: the event's counter orders it: it is read after it was written.
        let last = LAST.load(Ordering::Acquire);
        let role = Role::ALL.get((last & 0xff) as usize).copied().unwrap_or(Role::Main);
        Some((u64::from_ne_bytes(count), Refusal { call: last >> 8, role }))
    }
}

/// Installs the handler, for the process.
fn catch_sigsys() -> io::Result<()> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let _ = EVENT.set(event);
    // SAFETY: plain calls with valid pointers; the handler has the type that SA_SIGINFO requires,
    // and is async-signal-safe. SIGSYS is blocked meanwhile: if a call of the handler itself were
    // refused, the kernel would end the process.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = on_sigsys as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        if libc::sigaction(libc::SIGSYS, &action, ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

extern "C" fn on_sigsys(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a valid `siginfo_t` and `ucontext_t` to a handler with SA_SIGINFO;
    // nothing else uses them while it runs. Before the signal the kernel has restored the registers
    // as they were before the call, so that the call returns the value that the handler puts into
    // the result register.
    let call = unsafe {
        // Sent by a process, not raised by a refused call.
        if (*info).si_code != BY_FILTER {
            return;
        }
        refuse(&mut *context.cast::<libc::ucontext_t>())
    };
    let role = ROLE.get();
    let number = Role::ALL.iter().position(|&of| of == role).unwrap_or(0);
    // Ordering: see `take`.
    LAST.store(call << 8 | number as i64, Ordering::Release);
    COUNT.fetch_add(1, Ordering::Relaxed);
    if let Some(event) = EVENT.get() {
        let one = 1u64.to_ne_bytes();
        // SAFETY: `write` is async-signal-safe, and reads eight bytes. The context holds the result
        // of the call that was refused, so its caller does not read `errno` as left here.
        unsafe {
            let errno = libc::__errno_location();
            let saved = *errno;
            libc::write(std::os::fd::AsRawFd::as_raw_fd(event), one.as_ptr().cast(), one.len());
            *errno = saved;
        }
    }
    if ENDS.load(Ordering::Relaxed) {
        end(call, role);
    }
}

/// Makes the call fail with EPERM; returns its number.
#[cfg(target_arch = "x86_64")]
fn refuse(context: &mut libc::ucontext_t) -> i64 {
    let register = &mut context.uc_mcontext.gregs[libc::REG_RAX as usize];
    mem::replace(register, -i64::from(libc::EPERM))
}

/// Makes the call fail with EPERM; returns its number.
#[cfg(target_arch = "aarch64")]
fn refuse(context: &mut libc::ucontext_t) -> i64 {
    context.uc_mcontext.regs[0] = (-i64::from(libc::EPERM)) as u64;
    context.uc_mcontext.regs[8] as i64
}

/// There are no filters on other architectures.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn refuse(_: &mut libc::ucontext_t) -> i64 {
    -1
}

/// Ends the process with a line on standard error. Async-signal-safe: nothing is allocated.
fn end(call: i64, role: Role) -> ! {
    use std::io::Write as _;
    let mut line = [0; 160];
    let mut left = &mut line[..];
    let _ = writeln!(left, "error: the sandbox refused {}", Refusal { call, role });
    let unused = left.len();
    // SAFETY: `write` and `abort` are async-signal-safe; the bytes are of `line`.
    unsafe {
        libc::write(2, line.as_ptr().cast(), line.len() - unused);
        libc::abort();
    }
}
