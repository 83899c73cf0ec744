//! What a service gives up once all that it needs is open, so that a fault in what reads foreign bytes is worth little
//! to who finds it.
//!
//! ```no_run
//! use ringfence_sandbox::{Role, Sandbox};
//!
//! // Images, taps and sockets are open, and there is one thread.
//! for lack in Sandbox::default().enter()? {
//!     eprintln!("warning: {lack}");
//! }
//! std::thread::spawn(|| {
//!     ringfence_sandbox::confine(Role::Worker);
//!     // Moves data.
//! });
//! # Ok::<(), ringfence_sandbox::SandboxError>(())
//! ```
//!
//! [`Sandbox::enter`] is called once, by the only thread, and in this order changes the user, drops all
//! capabilities, sets `no_new_privs`, has Landlock refuse all files, TCP ports, abstract sockets and signals to others, and
//! installs a seccomp filter with the system calls that a service makes. Threads that are started later have all of it
//! from their first instruction on; those with a [`Role`] [`confine`] themselves to what that takes.
//!
//! What is open stays open: a taken-over service reads and writes what it was given, the guest's memory above all. What
//! it cannot do is to open, connect, execute, trace, or make an io_uring that would do so for it.
//!
//! A system call on no list fails with `EPERM`, is counted ([`refusals`]) and can be waited for ([`Refusals`]); in a
//! build with debug assertions it ends the process, so that a call which a change adds fails a test.
//!
//! The lists of roles are a second line: threads share their memory, so that who has taken one over for long enough has
//! what the process may call. The process's own list is the wall.
#![deny(unsafe_code)]

mod calls;
#[allow(unsafe_code)]
mod files;
#[allow(unsafe_code)]
mod filter;
#[allow(unsafe_code)]
mod refused;
mod rights;
#[allow(unsafe_code)]
mod settle;

use std::{
    fs, io,
    os::fd::BorrowedFd,
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::fs::{Gid, Uid};

pub use self::{
    calls::Role,
    refused::{Refusal, Refusals, go_on_when_refused, refusals},
};

/// What a process is to give up.
#[derive(Debug, Default)]
pub struct Sandbox<'a> {
    /// Whom the process runs as from then on; as before if there is none. It takes the right to change that.
    pub user: Option<Uid>,
    /// The group that it runs as, with no others; as before if there is none.
    pub group: Option<Gid>,
    /// Folders in which, and below which, it may remove files, such as its sockets in the end.
    pub removes: Vec<BorrowedFd<'a>>,
}

/// Something that this kernel does not have: the rest holds.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Lack {
    /// Files are guarded by the filter of system calls and the user's rights alone.
    #[error(
        "this kernel has no Landlock (5.13, in the list of lsm=): files are refused by system call alone"
    )]
    Landlock,
    /// It has an older Landlock.
    #[error(
        "this kernel's Landlock does not know all (6.12): the rest is refused by system call alone"
    )]
    LandlockPartly,
    /// There is no filter of system calls.
    #[error(
        "this kernel has no seccomp filters (CONFIG_SECCOMP_FILTER): any system call is possible"
    )]
    Seccomp,
    /// There is no list of calls for this architecture.
    #[error("there is no list of system calls for {0}: any system call is possible")]
    Architecture(&'static str),
}

/// Why a process cannot be confined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SandboxError {
    /// Other threads would stay as they are.
    #[error("{0} threads run already, which would stay outside of the sandbox")]
    Threads(usize),
    /// It was called before.
    #[error("the process is in its sandbox already")]
    Twice,
    /// The system refused a step.
    #[error("{step}: {source}")]
    Step {
        /// What was to be done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl SandboxError {
    /// That `step` failed.
    fn of(step: &'static str) -> impl Fn(io::Error) -> SandboxError {
        move |source| SandboxError::Step { step, source }
    }
}

impl Sandbox<'_> {
    /// Gives all of it up, for good. What this kernel lacks is returned, to be said.
    ///
    /// # Errors
    /// [`SandboxError`]; the process may then have given up a part, and is to end.
    pub fn enter(self) -> Result<Vec<Lack>, SandboxError> {
        let mut lacks = self.enter_but_calls()?;
        lacks.extend(filter::enter()?);
        Ok(lacks)
    }

    /// The same, but for system calls: for a process that makes others than a service does.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn enter_but_calls(self) -> Result<Vec<Lack>, SandboxError> {
        static ENTERED: AtomicBool = AtomicBool::new(false);
        if ENTERED.load(Ordering::Relaxed) {
            return Err(SandboxError::Twice);
        }
        // Where there is no /proc it is not known.
        let threads = fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
        if threads > 1 {
            return Err(SandboxError::Threads(threads));
        }
        ENTERED.store(true, Ordering::Relaxed);
        settle::settle();
        // Those that it will have no right to drop as another user.
        rights::bound_capabilities()?;
        rights::change_user(self.user, self.group)?;
        rights::drop_capabilities()?;
        rights::no_new_privileges()?;
        Ok(files::refuse(&self.removes)?.into_iter().collect())
    }
}

/// What this kernel lacks for a sandbox, found without entering one.
pub fn lacks() -> Vec<Lack> {
    files::lack().into_iter().chain(filter::lack()).collect()
}

/// Confines the calling thread to what its role takes, for good. Without an [entered](Sandbox::enter) sandbox this
/// does nothing.
pub fn confine(role: Role) {
    if let Err(error) = filter::confine(role) {
        // It keeps the process's list.
        tracing::warn!("a thread cannot be confined to less than the process: {error}");
    }
}
