//! Messages with descriptors over a Unix socket.

use crate::{
    WireError,
    inbox::{Inbox, Message},
    msg::{Header, MAX_FDS},
};
use ringfence_run::PeerFd;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        self, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sockopt,
    },
};
use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::{Duration, Instant},
};
use zerocopy::IntoBytes;

/// The most descriptors that come with one call (Linux's SCM_MAX_FD). With less room the kernel
/// would close the rest, within the receive.
const MOST_FDS: usize = 253;

/// Until when to wait.
#[derive(Clone, Copy, Debug)]
struct Deadline {
    at: Option<Instant>,
    timeout: Duration,
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: Arc<PeerFd>,
    /// The time-out for a peer to finish a message that it began, to take one, or to answer.
    timeout: Duration,
    /// Another process takes over the connection.
    left: bool,
}

impl Channel {
    pub(crate) fn new(stream: PeerFd, timeout: Duration) -> Channel {
        // Receive urgent bytes inline: out of band, one would make the socket readable without
        // anything to read.
        let _ = sockopt::set_socket_oobinline(&stream, true);
        Channel { stream: Arc::new(stream), timeout, left: false }
    }

    pub(crate) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    pub(crate) fn stream(&self) -> &Arc<PeerFd> {
        &self.stream
    }

    fn deadline(&self) -> Deadline {
        // A time-out beyond the clock's range is none.
        Deadline { at: Instant::now().checked_add(self.timeout), timeout: self.timeout }
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
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), WireError> {
        let until = self.deadline();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(WireError::Fds { request, count: fds.len() });
        }
        let mut sent = 0;
        while sent < bytes.len() {
            let data = [IoSlice::new(&bytes[sent..])];
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match net::sendmsg(&*self.stream, &data, &mut control, flags) {
                Ok(count) => {
                    sent += count;
                    // The descriptors went with the first byte.
                    control.clear();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, until, "room to send")?,
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    return Err(WireError::HungUp { what: "a message to it" });
                }
                Err(errno) => return Err(os("sendmsg", errno)),
            }
        }
        Ok(())
    }

    /// Sends as much as there is room for now of messages without descriptors; returns how many
    /// bytes.
    pub(crate) fn send_some(&self, bytes: &[u8]) -> Result<usize, WireError> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            match net::send(&*self.stream, bytes, flags) {
                Ok(sent) => return Ok(sent),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(0),
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    return Err(WireError::HungUp { what: "a message to it" });
                }
                Err(errno) => return Err(os("send", errno)),
            }
        }
    }

    /// Receives what is there, without waiting; false if there is nothing.
    pub(crate) fn receive_some(&self, inbox: &mut Inbox) -> Result<bool, WireError> {
        let now = Deadline { at: Some(Instant::now()), timeout: Duration::ZERO };
        match self.fill(inbox, now, "reply") {
            Ok(true) => Ok(true),
            Ok(false) => Err(WireError::HungUp { what: "a reply" }),
            Err(WireError::TimedOut { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until there is something to receive or, if `sends`, room to send; at most for the
    /// time-out.
    pub(crate) fn await_progress(&self, sends: bool) -> Result<(), WireError> {
        let flags = if sends { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        self.wait(flags, self.deadline(), "reply")
    }

    /// Receives one request, without a limit on when it begins; `None` if the peer hung up instead.
    pub(crate) fn recv_request(&self, inbox: &mut Inbox) -> Result<Option<Message>, WireError> {
        self.recv(inbox, false, Deadline { at: None, timeout: self.timeout })
    }

    /// Waits until all of a request is there, without a limit on when it begins; false if the peer
    /// hung up instead.
    pub(crate) fn await_request(&self, inbox: &mut Inbox) -> Result<bool, WireError> {
        self.arrive(inbox, false, Deadline { at: None, timeout: self.timeout })
    }

    /// As [`recv_request`](Self::recv_request), but it must begin within `limit`.
    pub(crate) fn recv_request_within(
        &self,
        inbox: &mut Inbox,
        limit: Duration,
    ) -> Result<Option<Message>, WireError> {
        let begin = Deadline { at: Instant::now().checked_add(limit), timeout: limit };
        self.recv(inbox, false, begin)
    }

    /// Receives an answer, within the time-out.
    pub(crate) fn recv_reply(&self, inbox: &mut Inbox) -> Result<Message, WireError> {
        let answer = self.recv(inbox, true, self.deadline())?;
        answer.ok_or(WireError::HungUp { what: "a reply" })
    }

    fn recv(
        &self,
        inbox: &mut Inbox,
        reply: bool,
        begin: Deadline,
    ) -> Result<Option<Message>, WireError> {
        if self.arrive(inbox, reply, begin)? { inbox.take(reply) } else { Ok(None) }
    }

    /// Waits until all of a message is there; false if the peer hung up instead.
    fn arrive(&self, inbox: &mut Inbox, reply: bool, begin: Deadline) -> Result<bool, WireError> {
        let what = if reply { "reply" } else { "whole message" };
        let mut begun = None;
        loop {
            if inbox.has_message(reply)? {
                return Ok(true);
            }
            let until = if reply || inbox.is_empty() {
                begin
            } else {
                *begun.get_or_insert_with(|| self.deadline())
            };
            if !self.fill(inbox, until, what)? {
                return match inbox.is_empty() {
                    true => Ok(false),
                    false => Err(WireError::HungUp { what: "a message" }),
                };
            }
        }
    }

    /// Receives some bytes, of several messages perhaps; false if the peer hung up.
    fn fill(
        &self,
        inbox: &mut Inbox,
        until: Deadline,
        what: &'static str,
    ) -> Result<bool, WireError> {
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut data = [IoSliceMut::new(inbox.room())];
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            match net::recvmsg(&*self.stream, &mut data, &mut control, flags) {
                Ok(message) => {
                    let mut fds = Vec::new();
                    for ancillary in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
                            fds.extend(rights.map(|fd| PeerFd::new(fd, self.stream.closer())));
                        }
                    }
                    // Descriptors that got no number, because the process has too many, are closed
                    // already.
                    if message.flags.contains(ReturnFlags::CTRUNC) {
                        return Err(WireError::Fds { request: 0, count: fds.len() + 1 });
                    }
                    inbox.filled(message.bytes, fds)?;
                    return Ok(message.bytes != 0);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, until, what)?,
                // The peer closed with bytes of ours unread.
                Err(Errno::CONNRESET) => return Ok(false),
                Err(errno) => return Err(os("recvmsg", errno)),
            }
        }
    }

    /// Leaves the connection to another process: dropping this does not end it.
    pub(crate) fn leave(&mut self) {
        self.left = true;
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

fn os(what: &'static str, errno: Errno) -> WireError {
    WireError::Os { what, source: errno.into() }
}
