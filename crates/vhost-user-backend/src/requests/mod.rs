//! Requests of a ring, whatever the device: taken, parked while a translation is missing, answered, on record
//! meanwhile, put back when the ring stops.
//!
//! A [`RequestQueue`] has all of that in hand; what a request is, its [`Serve`] knows. A [`RequestUnit`] is a worker's
//! share of a device: some of its queues and the worker's way to memory.

mod error;
mod figures;
mod queue;
mod reaper;
mod rings;
mod stats;
mod unit;

use std::{io, sync::Arc};

use ringfence_mem::{Access, AccessError, Memory};
use ringfence_run::event::Doorbell;
use ringfence_virtq::Chain;

pub use error::QueueError;
pub use figures::{MOST_LEFT, RequestFigures};
pub use queue::{KEPT, MOST_HELD, RequestQueue, Slot};
pub use reaper::Reaper;
pub use rings::RequestRings;
pub use stats::QueueStats;
pub use unit::{RequestUnit, Start, Stopped};

use crate::{Bus, RingLog};

/// What serves the requests of one ring, and never waits: a disk, say.
pub trait Serve: Send + Sized + 'static {
    /// What it keeps of a request that is under way.
    type Request: Default + Send;
    /// What it is in messages.
    const NAME: &'static str;
    /// Whether what the kernel still has of a ring that is given up is kept until that has ended. Else it is dropped
    /// with its requests, which ends all that they may do.
    const KEEPS: bool;

    /// A round begins.
    fn begin_round(&mut self) {}
    /// Whether the round has moved enough: others have their turn, and then it goes on.
    fn is_spent(&self) -> bool {
        false
    }
    /// How many bytes of data it has moved in all.
    fn bytes(&self) -> u64;
    /// Goes on with request `at` as far as it goes: one that was taken from the ring, that has
    /// [completed](Self::completed), for which there was no room, or whose translation has come. A step that meets a
    /// missing translation has had no effect, or can be done again.
    fn advance(
        &mut self,
        at: u16,
        request: &mut Self::Request,
        chain: &Chain,
        bus: &Bus,
        now_ns: u64,
    ) -> Next;
    /// A request that goes on from where it was [`Busy`](Next::Busy), if there is one by now: its number, and whether what
    /// was waited for has succeeded. `enough`: this round has moved as many bytes as it should.
    fn completed(&mut self, now_ns: u64, enough: bool) -> Option<(u16, bool)> {
        let _ = (now_ns, enough);
        None
    }
    /// What a request was busy with has ended: it is [advanced](Self::advance) next.
    fn complete(&mut self, request: &mut Self::Request, ok: bool) {
        let _ = (request, ok);
    }
    /// Answers a request whose translation does not come: whether it was done all the same, and how many bytes were
    /// written.
    fn fail(&mut self, request: &mut Self::Request, chain: &Chain, bus: &Bus) -> (bool, u32);
    /// A request was answered, or is put back into the ring: as if it had not been begun.
    fn end(&mut self, request: &mut Self::Request);
    /// Whether a request has had effects, so that it cannot be put back into the ring.
    fn is_begun(request: &Self::Request) -> bool;

    /// Takes what the kernel has done; true if there was anything. What it wrote to memory is marked in `log`.
    fn reap(&mut self, slots: &mut [Slot<Self::Request>], log: &RingLog) -> bool {
        let _ = (slots, log);
        false
    }
    /// Whether something has come back since it was [reaped](Self::reap) that nothing but a bell tells of: looked at before
    /// a sleep.
    fn has_returned(&self) -> bool {
        false
    }
    /// Hands what was queued to the kernel.
    ///
    /// # Errors
    /// As the kernel says.
    fn kick(&mut self) -> io::Result<()> {
        Ok(())
    }
    /// Has what completes later ring `bell`, for a worker that sleeps.
    ///
    /// # Errors
    /// As the kernel says.
    fn notify(&self, bell: &Arc<Doorbell>) -> io::Result<()> {
        let _ = bell;
        Ok(())
    }
    /// How many requests the kernel has.
    fn in_kernel(&self) -> u32 {
        0
    }
    /// Whether what the kernel has of a request may still change what another ring sees.
    fn holds(&self, request: &Self::Request) -> bool {
        let _ = request;
        false
    }
    /// The bus is about to lose `memory`, which the kernel may still use.
    fn keep(&mut self, memory: &Arc<Memory>) {
        let _ = memory;
    }
    /// When something [completes](Self::completed) by the clock.
    fn next_due(&self) -> Option<u64> {
        None
    }
}

/// What became of a step of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It is answered.
    Done {
        /// Whether it succeeded.
        ok: bool,
        /// How many bytes of its buffers were written, from the first on.
        used: u32,
    },
    /// It goes on when it has [completed](Serve::completed).
    Busy,
    /// There is no room now: it goes on when there is.
    Later,
    /// A translation is missing: the step is to be tried again.
    Missing(Missing),
}

/// A translation that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Of this address.
    pub addr: u64,
    /// For this access.
    pub access: Access,
}

impl Missing {
    /// What is missing, if that is what the error says.
    pub fn of(error: AccessError) -> Option<Missing> {
        match error {
            AccessError::Again { addr, access } => Some(Missing { addr, access }),
            _ => None,
        }
    }
}
