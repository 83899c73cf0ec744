//! A ring as the front end has it: where it is placed, which of its buffers are free, and what
//! waits for the back end's replies.

use std::{
    collections::VecDeque,
    ops::Range,
    os::fd::{AsFd, OwnedFd},
};

use anyhow::Result;
use ringfence_run::event;
use ringfence_virtq::driver::{Queue, QueueConfig, Rings};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use super::{link::Link, space::RINGS};

/// For how long a driver sleeps before it looks whether it is to end.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A ring, and the buffers that are its own.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) number: u16,
    pub(crate) queue: Queue,
    /// The first of its buffers.
    pub(crate) first: u32,
    /// Buffers that can be used, the one that was free the longest first.
    pub(crate) free: VecDeque<u32>,
    /// What was added is published when this ticket is done.
    pub(crate) held: u64,
    /// How much that is.
    pub(crate) unpublished: usize,
    kick: OwnedFd,
    /// The eventfd that the device signals when it has used buffers, if the driver sleeps.
    call: Option<OwnedFd>,
    /// Buffers that the device can no longer use once their ticket is done, with the ticket.
    parked: VecDeque<(u64, u32)>,
}

impl Ring {
    /// Starts ring number `number`, in its place in memory. `sleeps`: the driver waits by
    /// [`wait`](Self::wait).
    pub(crate) fn start(
        link: &mut Link,
        number: u16,
        config: QueueConfig,
        own: Range<u32>,
        sleeps: bool,
    ) -> Result<Ring> {
        let bytes = RINGS as usize / 2;
        let at = usize::from(number) * bytes;
        let window = link.space.ram.window(at, bytes)?;
        let mut queue = Queue::with_config(config, Rings::placed(&window, &config)?)?;
        // Until the driver waits.
        queue.suppress_notifications();
        let kick = event::new()?;
        let call = sleeps.then(event::new).transpose()?;
        let calls = call.as_ref().map(AsFd::as_fd);
        link.start_ring(number, config, at, kick.as_fd(), calls)?;
        let (first, held, unpublished, parked) = (own.start, 0, 0, VecDeque::new());
        Ok(Ring {
            number,
            queue,
            first,
            free: own.collect(),
            held,
            unpublished,
            kick,
            call,
            parked,
        })
    }

    /// The index of a buffer among those of this ring.
    #[inline]
    pub(crate) fn index(&self, buffer: u32) -> usize {
        (buffer - self.first) as usize
    }

    /// Sleeps until the device has used something, for [`NAP`] at most; not at all without
    /// notifications.
    #[inline]
    pub(crate) fn wait(&mut self) -> Result<()> {
        let Some(call) = &self.call else { return Ok(()) };
        if !self.queue.enable_notifications() {
            match poll(&mut [PollFd::new(call, PollFlags::IN)], Some(&NAP)) {
                Ok(_) | Err(Errno::INTR) => event::drain(call),
                Err(errno) => return Err(errno.into()),
            }
        }
        self.queue.suppress_notifications();
        Ok(())
    }

    /// A buffer can be used again when `ticket` is done.
    pub(crate) fn park(&mut self, ticket: u64, buffer: u32) {
        self.parked.push_back((ticket, buffer));
    }

    /// Frees the buffers whose ticket is done.
    pub(crate) fn unpark(&mut self, link: &Link) {
        while let Some(&(ticket, buffer)) = self.parked.front()
            && link.pipe.is_done(ticket)
        {
            self.parked.pop_front();
            self.free.push_back(buffer);
        }
    }

    /// Publishes what was added, unless its translations are still on their way. Returns whether
    /// nothing is held back any more.
    #[inline]
    pub(crate) fn release(&mut self, link: &Link) -> bool {
        if !link.pipe.is_done(self.held) {
            return false;
        }
        if std::mem::take(&mut self.unpublished) > 0 {
            self.queue.publish();
            if self.queue.needs_kick() {
                event::signal(&self.kick);
            }
        }
        true
    }
}
