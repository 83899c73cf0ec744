//! IOTLB messages in flight: many are sent before the first reply is read.

use std::{
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use ringfence_mem::Access;
use ringfence_vhost_user::{Iotlb, IotlbHandle, IotlbWire, msg::Header};
use rustix::{io::Errno, net::RecvFlags};

use super::{Entry, Messages, Result};

/// Bytes of a message about an IOTLB.
pub(super) const MESSAGE: usize = Header::LEN + size_of::<IotlbWire>();
/// The time-out for a reply of the back end.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Messages about an IOTLB, from a stream that may cut them anywhere.
#[derive(Debug)]
pub(super) struct Records {
    buffer: Box<[u8]>,
    held: usize,
}

impl Records {
    pub(super) fn new() -> Records {
        Records { buffer: vec![0; 64 * MESSAGE].into(), held: 0 }
    }

    /// Receives what is there, without waiting, and calls `each` with every whole message.
    pub(super) fn receive(
        &mut self,
        socket: impl AsFd,
        mut each: impl FnMut(&[u8; MESSAGE]) -> Result<()>,
    ) -> Result<()> {
        loop {
            let room = &mut self.buffer[self.held..];
            let len = match rustix::net::recv(&socket, &mut *room, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok((_, len)) => len,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
                Err(errno) => return Err(io::Error::from(errno).into()),
            };
            let full = len == room.len();
            self.held += len;
            let (whole, _) = self.buffer[..self.held].as_chunks::<MESSAGE>();
            let used = whole.len() * MESSAGE;
            whole.iter().try_for_each(&mut each)?;
            self.buffer.copy_within(used..self.held, 0);
            self.held -= used;
            if !full {
                return Ok(());
            }
        }
    }
}

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
            if begun.elapsed() > TIMEOUT {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
        }
        Ok(())
    }
}

/// The UPDATE for an entry.
pub(super) fn update(Entry { first, last, user_addr }: Entry) -> Iotlb {
    Iotlb::Update { first, last, user_addr, access: Some(Access::ReadWrite) }
}
