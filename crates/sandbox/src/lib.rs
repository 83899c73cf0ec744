#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod calls;
#[allow(unsafe_code)]
mod files;
#[allow(unsafe_code)]
mod filter;
mod rights;

use std::{
    fs, io,
    os::fd::BorrowedFd,
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::fs::{Gid, Uid};

pub use self::{
    calls::Role,
    filter::{Refusal, Refusals, go_on_when_refused, refusals},
};

/// What a process gives up.
#[derive(Debug, Default)]
pub struct Sandbox<'a> {
    /// The user that the process runs as from then on; `None`: unchanged. Changing it takes the
    /// privilege to do so, and gives up all supplementary groups.
    pub user: Option<Uid>,
    /// The group that it runs as, with no supplementary groups; `None`: unchanged.
    pub group: Option<Gid>,
    /// Folders in which, and below which, it may remove files, such as its sockets at exit.
    pub removes: Vec<BorrowedFd<'a>>,
    /// Whether it has a thread of the role [`Connector`](Role::Connector).
    pub connects: bool,
}

/// A feature that this kernel does not have; the rest is in force.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// No Landlock: only the system call filter and the user's rights guard files.
    #[error(
        "this kernel has no Landlock (5.13, in the list of lsm=): files are refused by system call alone"
    )]
    Landlock,
    /// An older Landlock.
    #[error(
        "this kernel's Landlock does not know all (6.12): the rest is refused by system call alone"
    )]
    LandlockPartly,
    /// No system call filters.
    #[error(
        "this kernel has no seccomp filters (CONFIG_SECCOMP_FILTER): any system call is possible"
    )]
    Seccomp,
    /// No list of calls for this architecture.
    #[error("there is no list of system calls for {0}: any system call is possible")]
    Architecture(&'static str),
}

/// Why a process cannot be confined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SandboxError {
    /// Other threads run already, and would not be confined.
    #[error("{0} threads run, which would stay outside of the sandbox: enter it before they start")]
    Threads(usize),
    /// It was called before.
    #[error("the process is in its sandbox already")]
    Twice,
    /// The system refused a step.
    #[error("{step}: {source}")]
    Step {
        /// The step.
        step: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl SandboxError {
    /// Makes the error of a failed `step`.
    fn of<E: Into<io::Error>>(step: &'static str) -> impl Fn(E) -> SandboxError {
        move |source| SandboxError::Step { step, source: source.into() }
    }
}

impl Sandbox<'_> {
    /// Gives up, for good, the user, all capabilities, files, and the system calls that no service
    /// makes. Returns what this kernel does not support, to be reported.
    ///
    /// # Errors
    /// [`SandboxError`]; the process may have given up a part by then, and should end.
    pub fn enter(self) -> Result<Vec<Unsupported>, SandboxError> {
        let connects = self.connects;
        let mut unsupported = self.enter_but_calls()?;
        unsupported.extend(filter::enter(connects)?);
        Ok(unsupported)
    }

    /// As [`enter`](Self::enter), without the system call filter: for a process that makes other
    /// calls than a service does.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn enter_but_calls(self) -> Result<Vec<Unsupported>, SandboxError> {
        static ENTERED: AtomicBool = AtomicBool::new(false);
        if ENTERED.load(Ordering::Relaxed) {
            return Err(SandboxError::Twice);
        }
        // Without /proc the count is unknown.
        let threads = fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
        if threads > 1 {
            return Err(SandboxError::Threads(threads));
        }
        ENTERED.store(true, Ordering::Relaxed);
        filter::settle();
        rights::give_up(self.user, self.group)?;
        Ok(files::refuse(&self.removes)?.into_iter().collect())
    }
}

/// What this kernel does not support of a sandbox, checked without entering one.
pub fn unsupported() -> Vec<Unsupported> {
    files::unsupported().into_iter().chain(filter::unsupported()).collect()
}

/// Confines the calling thread to the calls of its role, for good. Without an
/// [entered](Sandbox::enter) sandbox this does nothing. If the kernel refuses, a warning is logged,
/// and the thread keeps the calls that it had.
pub fn confine(role: Role) {
    if let Err(error) = filter::confine(role) {
        // It keeps the process's list.
        tracing::warn!("a thread cannot be confined to less than the process: {error}");
    }
}
