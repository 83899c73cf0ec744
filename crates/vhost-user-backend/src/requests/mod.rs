//! Rings of requests, whatever the device: requests are taken, parked while a translation is
//! missing, completed, on record meanwhile, and put back when the ring stops.
//!
//! A [`RequestQueue`] does all of that; its [`Serve`] implements the requests themselves. A
//! [`RequestUnit`] is a worker's share of a device: some of its queues and the worker's way to
//! memory.

mod figures;
mod queue;
mod rings;
mod unit;

use std::{io, sync::Arc};

use ringfence_mem::{Access, AccessError, Memory};
use ringfence_run::{event::Doorbell, worker::Kick};
use ringfence_vhost_user::InflightError;
use ringfence_virtq::{Chain, RingError};

pub use figures::{MOST_LEFT, Reaper, RequestFigures};
pub use queue::{KEPT, MOST_HELD, RequestQueue, Slot};
pub use rings::RequestRings;
pub use unit::{RequestUnit, Stopped};

use crate::{Bus, RingLog};

/// Serves the requests of one ring, such as a disk's, and never waits.
#[allow(unused_variables, reason = "defaults that do nothing")]
pub trait Serve: Send + Sized + 'static {
    /// Its state of a request in progress.
    type Request: Default + Send;
    /// Its name in messages.
    const NAME: &'static str;
    /// Whether to keep what the kernel still uses of an abandoned ring until the kernel is done.
    /// Otherwise it is dropped with its requests, which ends all that they may do.
    const KEEPS: bool;
    /// Whether what is written for a request shows the driver that it has failed. Otherwise the
    /// ring stops instead: a completion with nothing written might be taken for a success.
    const FAILS: bool = true;

    /// A round begins.
    fn begin_round(&mut self) {}
    /// Whether the round has moved enough: other queues have their turn, and then this one goes on.
    fn is_spent(&self) -> bool {
        false
    }
    /// How many bytes of data it has moved in all.
    fn bytes(&self) -> u64;
    /// Advances a request as far as possible: one that was taken from the ring, that has
    /// [completed](Self::completed), for which there was no room, or whose translation has come. A
    /// step that meets a missing translation has had no effect, or can be done again.
    fn advance(&mut self, request: &mut Self::Request, with: Advance<'_>) -> Next;
    /// A request that can go on from where it was [`Busy`](Next::Busy), if there is one: its
    /// number, and whether the operation that it waited for has succeeded. `enough`: this round has
    /// moved as many bytes as it should.
    fn completed(&mut self, now_ns: u64, enough: bool) -> Option<(u16, bool)> {
        None
    }
    /// The operation that a request was busy with has ended: the request is
    /// [advanced](Self::advance) next.
    fn complete(&mut self, request: &mut Self::Request, ok: bool) {}
    /// Ends a request whose translation does not come; returns whether it was done all the same,
    /// and how many bytes were written.
    fn fail(&mut self, request: &mut Self::Request, chain: &Chain, bus: &Bus) -> (bool, u32);
    /// A request was completed, or is put back into the ring: makes its state as if it had not
    /// begun.
    fn end(&mut self, request: &mut Self::Request);
    /// Whether a request has had effects, so that it cannot be put back into the ring.
    fn is_begun(&self, request: &Self::Request) -> bool;
    /// Whether a request will not go on, as what it waits for has stopped: it can be put back into
    /// the ring when that stops, too.
    fn is_left(&self, request: &Self::Request) -> bool {
        false
    }
    /// Whether all that has [completed](Self::completed) together is done, so that it can be
    /// published.
    fn is_whole(&self) -> bool {
        true
    }

    /// Takes what the kernel has completed; true if there was anything. Marks what it wrote to
    /// memory in `log`.
    fn reap(&mut self, slots: &mut [Slot<Self::Request>], log: &RingLog) -> bool {
        false
    }
    /// Before a sleep: makes what comes back wake the worker. True if something has come back since
    /// the last [`reap`](Self::reap) for which nothing wakes it.
    fn arm(&mut self) -> bool {
        false
    }
    /// The worker is awake.
    fn disarm(&mut self) {}
    /// The event by which a peer wakes the worker, besides the driver's kick.
    fn kick_back(&self) -> Option<&Kick> {
        None
    }
    /// Submits what was queued to the kernel.
    ///
    /// # Errors
    /// A system call failed.
    fn kick(&mut self) -> io::Result<()> {
        Ok(())
    }
    /// Makes later completions ring `bell`, for a worker that sleeps.
    ///
    /// # Errors
    /// A system call failed.
    fn notify(&self, bell: &Arc<Doorbell>) -> io::Result<()> {
        Ok(())
    }
    /// How many requests the kernel has.
    fn in_kernel(&self) -> u32 {
        0
    }
    /// Whether what the kernel has of a request may still change what another ring sees.
    fn holds(&self, request: &Self::Request) -> bool {
        false
    }
    /// The bus is about to lose `memory`, which the kernel may still use.
    fn keep(&mut self, memory: &Arc<Memory>) {}
    /// When a request [completes](Self::completed) by the clock, in ns of the monotonic one.
    fn next_due(&self) -> Option<u64> {
        None
    }
}

/// What a request is advanced with.
#[derive(Clone, Copy)]
pub struct Advance<'a> {
    /// The request's number.
    pub at: u16,
    /// Its buffers.
    pub chain: &'a Chain,
    /// The way to memory.
    pub bus: &'a Bus,
    /// The time, in ns of the monotonic clock.
    pub now_ns: u64,
}

/// The outcome of a step of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Next {
    /// It is done.
    Done {
        /// Whether it succeeded.
        ok: bool,
        /// How many bytes of its buffers were written, from the first on.
        used: u32,
    },
    /// It goes on when it has [completed](Serve::completed).
    Busy,
    /// There is no room now: it is retried when there is.
    Later,
    /// A translation is missing: the step is to be retried.
    Missing(Missing),
}

/// A translation that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Missing {
    /// The address.
    pub addr: u64,
    /// The access.
    pub access: Access,
}

impl Missing {
    /// The missing translation, if that is what the error reports.
    pub fn of(error: AccessError) -> Option<Missing> {
        match error {
            AccessError::Again { addr, access } => Some(Missing { addr, access }),
            _ => None,
        }
    }
}

/// What a queue has done.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct QueueStats {
    /// Requests completed.
    pub requests: u64,
    /// Of these, completed with a status other than OK.
    pub failed: u64,
    /// Bytes of data moved.
    pub bytes: u64,
    /// Interrupts sent.
    pub interrupts: u64,
    /// How often a request had to wait for a translation.
    pub parked: u64,
    /// How often the ring was not mapped.
    pub away: u64,
    /// How often the ring was not read further because requests in progress had as many descriptors
    /// as allowed.
    pub full: u64,
}

impl QueueStats {
    fn fields(&mut self) -> [&mut u64; 7] {
        let QueueStats { requests, failed, bytes, interrupts, parked, away, full } = self;
        [requests, failed, bytes, interrupts, parked, away, full]
    }

    /// What was done since it was `before`.
    fn since(mut self, mut before: QueueStats) -> QueueStats {
        for (now, before) in self.fields().into_iter().zip(before.fields()) {
            *now -= *before;
        }
        self
    }
}

/// Why a queue stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// The driver broke the rules of the ring, or the ring cannot be reached.
    #[error("the driver's ring: {0}")]
    Ring(#[from] RingError),
    /// Memory that was in use is gone.
    #[error("memory that was in use is gone: {0}")]
    Memory(#[from] AccessError),
    /// The record of an earlier process is invalid.
    #[error(transparent)]
    Record(#[from] InflightError),
    /// The record of what is in flight is gone.
    #[error("the in-flight region was truncated: without it a crash would lose requests")]
    RecordLost,
    /// What the requests go to cannot be used.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The ring is not at its new addresses.
    #[error(
        "the ring cannot be used where it was moved to, and has stopped: the log has the reason"
    )]
    Moved,
    /// Requests can neither go on nor be put back, and no completion can report their failure.
    #[error("requests that can neither be completed nor put back: {0}")]
    Lost(usize),
    /// More workers than the IOMMU has places for.
    #[error("more workers than the IOMMU has places for")]
    Readers,
}
