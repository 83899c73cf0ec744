//! The end of a connection, from another thread.
//!
//! Ordering: `stopping` is set before the stream is shut down, and read after that has woken its reader.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use ringfence_run::{PeerFd, event};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net,
};

/// A handle on a connection: ends its [`Server::serve`](crate::Server::serve) from another thread,
/// and reports whether the front end is there.
#[derive(Clone, Debug)]
pub struct Shutdown {
    pub(super) stopping: Arc<AtomicBool>,
    pub(super) stream: Arc<PeerFd>,
    pub(super) mapped: Arc<AtomicU64>,
    /// The eventfd to which [`leave`](Self::leave) writes.
    pub(super) leave: Option<Arc<OwnedFd>>,
}

impl Shutdown {
    /// Ends the connection: `serve` stops all rings and returns `Ok` soon.
    pub fn shutdown(&self) {
        self.stopping.store(true, Ordering::Release);
        // It fails only if the connection has ended already.
        let _ = net::shutdown(&*self.stream, net::Shutdown::Both);
    }

    /// Leaves the connection to another process: once no request is in progress, `serve` stops all
    /// rings, has the [keeper](crate::Keeper) record their positions and returns `Ok`, and the
    /// front end notices nothing. Without a keeper, or if the device [cannot be
    /// resumed](crate::Handler::can_be_resumed), the connection ends.
    pub fn leave(&self) {
        match &self.leave {
            Some(leave) => event::signal(leave),
            None => self.shutdown(),
        }
    }

    /// Whether [`shutdown`](Self::shutdown) was called.
    pub fn is_shut_down(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// How many bytes of the front end's memory and log are mapped.
    pub fn mapped(&self) -> u64 {
        self.mapped.load(Ordering::Relaxed)
    }

    /// Whether no reply can reach the front end any more: it has hung up, or the connection was
    /// ended at this end. A device that waits without a time-out
    /// ([`Handler::iotlb`](crate::Handler::iotlb),
    /// [`Handler::stop_ring`](crate::Handler::stop_ring)) waits until then.
    pub fn is_over(&self) -> bool {
        let mut fds = [PollFd::new(&*self.stream, PollFlags::empty())];
        self.is_shut_down() || matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
    }
}
