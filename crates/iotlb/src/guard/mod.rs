//! Accesses that wait for their translation, for devices that cannot come again later.
//!
//! [`Guards`] are made of an [`Endpoint`](crate::Endpoint). A device takes a [`Guard`] for each
//! piece of work; what it translates comes straight from the table that invalidations act on, and
//! is kept in use by leases for as long as the guard lives: an invalidation of it is not over
//! before (rule [D15]); other invalidations do not wait.
//!
//! # Waiting
//! An access whose translation is missing sends a miss and waits (a [`View`](crate::View) does not;
//! a device written for it serves other requests meanwhile). The front end may invalidate before it
//! updates, even everything. So while a thread waits its guards hold no leases. When the update has
//! arrived, all that they had handed out is translated anew: if it leads to the same places the
//! access goes on, and if not the guard has failed, and so has the access. Nothing is touched in
//! between, because guards stay with their thread; for asynchronous I/O there is [`Guard::hold`]. A
//! device must not use targets of a guard that failed any more.
//!
//! What the guards of a thread have handed out must be in the table all at once to be leased again:
//! a request must not need more entries than [`IotlbConfig::entries`](crate::IotlbConfig::entries),
//! or it times out.
//!
//! [D15]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d15

mod guards;
mod held;
mod pieces;

pub use guards::{GuardCounters, Guards};
pub use held::Guard;

/// What is unusable after a translation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureScope {
    /// The guard that it happened to, and its clones.
    Guard,
    /// Every guard of the same [`Guards`], old and new.
    Space,
}

/// Why an access could not be translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// There is no such translation, or none that permits the access.
    #[error("{addr:#x}: no translation for this access")]
    Refused {
        /// The first address without one.
        addr: u64,
    },
    /// No update or refusal arrived in time.
    #[error("{addr:#x}: no update or refusal in time")]
    TimedOut {
        /// The first address that is missing.
        addr: u64,
    },
    /// What had been handed out leads elsewhere, or nowhere, after a wait.
    #[error("{addr:#x}: changed while another translation was waited for")]
    Changed {
        /// The first address that does.
        addr: u64,
    },
    /// It would have had to wait, and the guard is [held](Guard::hold); or its thread waits for
    /// another access.
    #[error("{addr:#x}: not translated yet, and the guard is held")]
    WouldWait {
        /// The first address that is missing.
        addr: u64,
    },
    /// The translation leads out of memory.
    #[error("{addr:#x}: leads out of memory")]
    OutsideMemory {
        /// The first address of the access.
        addr: u64,
    },
    /// The access passes 2^64.
    #[error("{count} bytes at {addr:#x} pass the end of the address space")]
    Overflow {
        /// The address.
        addr: u64,
        /// The number of bytes.
        count: usize,
    },
    /// One access of more than 65,536 translations (rule [D23]).
    ///
    /// [D23]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d23
    #[error("{addr:#x}: an access with more than {} parts", held::PIECES)]
    TooManyParts {
        /// The first address of the access.
        addr: u64,
    },
}
