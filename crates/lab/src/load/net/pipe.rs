//! IOTLB messages in flight: many are sent before the first reply is read.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ringfence_mem::Access;
use ringfence_vhost_user::{Iotlb, IotlbHandle};

use super::{Entry, Messages};

/// The time-out for a reply of the back end.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The updates and invalidations of one driver, gathered and posted together. No other sender uses
/// the connection.
#[derive(Debug)]
pub(crate) struct Pipe {
    iotlb: IotlbHandle,
    gathered: Vec<Iotlb>,
    pub(crate) messages: Messages,
}

impl Pipe {
    pub(super) fn new(iotlb: IotlbHandle) -> Pipe {
        Pipe { iotlb, gathered: Vec::new(), messages: Messages::default() }
    }

    /// Puts a translation in, to be sent with the next [`flush`](Self::flush). Returns its ticket.
    pub(crate) fn update(&mut self, entry: Entry) -> u64 {
        self.gathered.push(update(entry));
        self.messages.updates += 1;
        self.put()
    }

    /// Puts in that translations end: nothing uses them any more when the ticket is done.
    pub(crate) fn invalidate(&mut self, first: u64, last: u64) -> u64 {
        self.gathered.push(Iotlb::Invalidate { first, last });
        self.messages.invalidations += 1;
        self.put()
    }

    /// How many were ever put in: the ticket of the last.
    #[inline]
    fn put(&self) -> u64 {
        self.messages.updates + self.messages.invalidations
    }

    /// Whether the back end has carried out the message of that ticket, and so all before.
    #[inline]
    pub(super) fn is_done(&self, ticket: u64) -> bool {
        self.iotlb.is_done(ticket)
    }

    /// Sends what was put in, and takes the replies that have come, without waiting.
    pub(super) fn flush(&mut self) -> Result<()> {
        if !self.gathered.is_empty() {
            self.iotlb.post(&self.gathered)?;
            self.gathered.clear();
        }
        Ok(self.iotlb.flush()?)
    }

    /// Waits until everything is carried out, by polling: a wake-up would cost more than the reply.
    pub(super) fn settle(&mut self) -> Result<()> {
        let begun = Instant::now();
        while !self.is_done(self.put()) {
            self.flush()?;
            ensure!(begun.elapsed() <= TIMEOUT, "the back end does not reply");
        }
        Ok(())
    }
}

/// The UPDATE for an entry.
pub(super) fn update(Entry { first, last, user_addr }: Entry) -> Iotlb {
    Iotlb::Update { first, last, user_addr, access: Some(Access::ReadWrite) }
}
