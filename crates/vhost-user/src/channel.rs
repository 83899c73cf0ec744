//! Messages with descriptors over a Unix socket.

use crate::{
    WireError,
    error::at_most,
    inbox::{Inbox, Message},
    msg::{Header, MAX_FDS},
};
use ringfence_run::{PeerFd, passing};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, retry_on_intr},
    net::{self, RecvFlags, SendFlags, sockopt},
};
use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::{Duration, Instant},
};
use zerocopy::IntoBytes;

/// Until when to wait; a time beyond the clock's range is none.
#[derive(Clone, Copy)]
struct Deadline {
    at: Option<Instant>,
    timeout: Duration,
}

impl Deadline {
    fn within(timeout: Option<Duration>) -> Deadline {
        let at = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Deadline { at, timeout: timeout.unwrap_or_default() }
    }
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) stream: Arc<PeerFd>,
    /// The time-out for a peer to finish a message that it began, to take one, or to reply.
    pub(crate) timeout: Duration,
    /// Another process takes over the connection: dropping this does not end it.
    pub(crate) left: bool,
}

impl Channel {
    pub(crate) fn new(stream: PeerFd, timeout: Duration) -> Channel {
        // Receive urgent bytes inline: out of band, one would make the socket readable without
        // anything to read.
        let _ = sockopt::set_socket_oobinline(&stream, true);
        Channel { stream: Arc::new(stream), timeout, left: false }
    }

    /// Waits until the socket can be read or written.
    fn wait(&self, flags: PollFlags, until: Deadline, what: &'static str) -> Result<(), WireError> {
        loop {
            let left = until.at.map(|at| at.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut [PollFd::new(&*self.stream, flags)], left.as_ref()) {
                Ok(0) => {
                    return Err(WireError::TimedOut { what, millis: until.timeout.as_millis() });
                }
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(os("poll", errno)),
            }
        }
    }

    /// Sends one message.
    pub(crate) fn send(
        &self,
        header: Header,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), WireError> {
        self.send_bytes(header.request, &[header.as_bytes(), payload].concat(), fds)
    }

    /// Sends whole messages; descriptors belong to the only one. `request` is for errors.
    pub(crate) fn send_bytes(
        &self,
        request: u32,
        mut bytes: &[u8],
        mut fds: &[BorrowedFd<'_>],
    ) -> Result<(), WireError> {
        let until = Deadline::within(Some(self.timeout));
        if fds.len() > MAX_FDS {
            return Err(WireError::Fds { request, count: fds.len(), takes: at_most(MAX_FDS) });
        }
        while !bytes.is_empty() {
            match put(&self.stream, bytes, fds)? {
                0 => self.wait(PollFlags::OUT, until, "room to send")?,
                sent => (bytes, fds) = (&bytes[sent..], &[]),
            }
        }
        Ok(())
    }

    /// Sends as much as there is room for now of messages without descriptors; returns how many
    /// bytes.
    pub(crate) fn send_some(&self, bytes: &[u8]) -> Result<usize, WireError> {
        put(&self.stream, bytes, &[])
    }

    /// Receives what is there of replies, without waiting.
    pub(crate) fn receive_some(&self, inbox: &mut Inbox) -> Result<(), WireError> {
        match self.receive(inbox)? {
            Some(false) => Err(WireError::HungUp { what: "a reply" }),
            _ => Ok(()),
        }
    }

    /// Waits until there is something to receive or, if `sends`, room to send; at most for the
    /// time-out.
    pub(crate) fn await_progress(&self, sends: bool) -> Result<(), WireError> {
        let flags = if sends { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        self.wait(flags, Deadline::within(Some(self.timeout)), "reply")
    }

    /// Receives a reply, within the time-out.
    pub(crate) fn recv_reply(&self, inbox: &mut Inbox) -> Result<Message, WireError> {
        self.arrive(inbox, true, Some(self.timeout))?;
        inbox.take(true)?.ok_or(WireError::HungUp { what: "a reply" })
    }

    /// Waits until all of a message is there, which must begin within `limit`; false if the peer
    /// hung up instead.
    pub(crate) fn arrive(
        &self,
        inbox: &mut Inbox,
        reply: bool,
        limit: Option<Duration>,
    ) -> Result<bool, WireError> {
        let what = if reply { "reply" } else { "whole message" };
        let (begin, mut begun) = (Deadline::within(limit), None);
        while !inbox.has_message(reply)? {
            let until = if reply || inbox.is_empty() {
                begin
            } else {
                *begun.get_or_insert_with(|| Deadline::within(Some(self.timeout)))
            };
            match self.receive(inbox)? {
                Some(true) => {}
                None => self.wait(PollFlags::IN, until, what)?,
                Some(false) if inbox.is_empty() => return Ok(false),
                Some(false) => return Err(WireError::HungUp { what: "a message" }),
            }
        }
        Ok(true)
    }

    /// Receives some bytes, of several messages perhaps; `None` if there are none now, false if the
    /// peer hung up.
    pub(crate) fn receive(&self, inbox: &mut Inbox) -> Result<Option<bool>, WireError> {
        let received = passing::receive(&*self.stream, inbox.room(), RecvFlags::DONTWAIT, true);
        let message = match received {
            Ok(message) => message,
            Err(Errno::AGAIN) => return Ok(None),
            // The peer closed with bytes of ours unread.
            Err(Errno::CONNRESET) => return Ok(Some(false)),
            Err(errno) => return Err(os("recvmsg", errno)),
        };
        let fds = message.fds.into_iter().map(|fd| PeerFd::new(fd, self.stream.closer()));
        let fds: Vec<PeerFd> = fds.collect();
        // Descriptors that got no number, because the process has too many, are closed already.
        if message.truncated {
            let takes = format!("{}, and RLIMIT_NOFILE must leave room", at_most(MAX_FDS));
            return Err(WireError::Fds { request: 0, count: fds.len() + 1, takes });
        }
        inbox.filled(message.bytes, fds)?;
        Ok(Some(message.bytes != 0))
    }

    /// Ends the connection, for both ends.
    pub(crate) fn close(&self) {
        // It fails only if it is closed already.
        let _ = net::shutdown(&*self.stream, net::Shutdown::Both);
    }
}

/// The peer sees the end at once, however long it takes to close the socket.
impl Drop for Channel {
    fn drop(&mut self) {
        if !self.left {
            self.close();
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Sends as much as there is room for now; returns how many bytes. Descriptors go with the first.
pub(crate) fn put(
    stream: &PeerFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<usize, WireError> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = match fds {
        // The only call that a worker's sandbox allows.
        [] => retry_on_intr(|| net::send(stream, bytes, flags)),
        fds => passing::send(stream, bytes, fds, flags),
    };
    match sent {
        Err(Errno::AGAIN) => Ok(0),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(WireError::HungUp { what: "a message to it" }),
        sent => sent.map_err(|errno| os("send", errno)),
    }
}

pub(crate) fn os(what: &'static str, errno: Errno) -> WireError {
    WireError::Os { what, source: errno.into() }
}
