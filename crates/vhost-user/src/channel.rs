//! Messages with descriptors over a Unix socket.

use crate::{
    WireError,
    msg::{Header, MAX_FDS},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        self, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    },
};
use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};
use zerocopy::{FromBytes, IntoBytes};

/// A message as it came: its header was checked, its payload was not.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
    /// At most [`MAX_FDS`]; whoever drops the message closes them.
    pub(crate) fds: Vec<OwnedFd>,
}

/// Until when to wait.
#[derive(Clone, Copy, Debug)]
struct Deadline {
    at: Option<Instant>,
    patience: Duration,
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: UnixStream,
    /// How long a peer may take to finish a message that it began, to take one, or to answer.
    patience: Duration,
}

impl Channel {
    pub(crate) fn new(stream: UnixStream, patience: Duration) -> Channel {
        Channel { stream, patience }
    }

    pub(crate) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    pub(crate) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    fn deadline(&self) -> Deadline {
        // A patience beyond what a clock can say is as good as none.
        Deadline { at: Instant::now().checked_add(self.patience), patience: self.patience }
    }

    /// Waits until the socket can be read or written.
    fn wait(&self, flags: PollFlags, until: Deadline, what: &'static str) -> Result<(), WireError> {
        loop {
            let left = until.at.map(|at| at.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut [PollFd::new(&self.stream, flags)], left.as_ref()) {
                Ok(0) => {
                    return Err(WireError::TimedOut { what, millis: until.patience.as_millis() });
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
        let bytes = [header.as_bytes(), payload].concat();
        let until = self.deadline();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(WireError::Fds { request: header.request, count: fds.len() });
        }
        let mut sent = 0;
        while sent < bytes.len() {
            let data = [IoSlice::new(&bytes[sent..])];
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match net::sendmsg(&self.stream, &data, &mut control, flags) {
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

    /// Receives one request, however long it takes to begin; `None` if the peer hung up instead.
    pub(crate) fn recv_request(&self) -> Result<Option<Message>, WireError> {
        self.recv(false, Deadline { at: None, patience: self.patience })
    }

    /// Receives an answer, in time.
    pub(crate) fn recv_reply(&self) -> Result<Message, WireError> {
        self.recv(true, self.deadline())?.ok_or(WireError::HungUp { what: "an answer" })
    }

    fn recv(&self, reply: bool, begin: Deadline) -> Result<Option<Message>, WireError> {
        let what = if reply { "answer" } else { "whole message" };
        let mut fds = Vec::new();
        let mut header = [0; Header::LEN];
        let mut read = self.recv_some(&mut header, &mut fds, begin, what)?;
        if read == 0 {
            return Ok(None);
        }
        let until = if reply { begin } else { self.deadline() };
        let mut fill = |buffer: &mut [u8], mut read: usize| {
            while read < buffer.len() {
                match self.recv_some(&mut buffer[read..], &mut fds, until, what)? {
                    0 => return Err(WireError::HungUp { what: "a message" }),
                    more => read += more,
                }
            }
            Ok(read)
        };
        read = fill(&mut header, read)?;
        debug_assert_eq!(read, Header::LEN);
        let header = Header::read_from_bytes(&header).expect("a header is that long");
        header.check(reply)?;
        // Bounded by the check.
        let mut payload = vec![0; header.size as usize];
        fill(&mut payload, 0)?;
        if fds.len() > MAX_FDS {
            return Err(WireError::Fds { request: header.request, count: fds.len() });
        }
        Ok(Some(Message { header, payload, fds }))
    }

    /// Receives some bytes; 0 if the peer hung up.
    fn recv_some(
        &self,
        buffer: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        until: Deadline,
        what: &'static str,
    ) -> Result<usize, WireError> {
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut data = [IoSliceMut::new(buffer)];
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            match net::recvmsg(&self.stream, &mut data, &mut control, flags) {
                Ok(message) => {
                    for ancillary in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
                            fds.extend(rights);
                        }
                    }
                    // Those that found no room were closed by the kernel. Few messages can bring
                    // few each, too: `fds` must not grow with the number of pieces.
                    if message.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
                        return Err(WireError::Fds {
                            request: 0,
                            count: fds.len().max(MAX_FDS + 1),
                        });
                    }
                    return Ok(message.bytes);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, until, what)?,
                // The peer closed with bytes of ours unread.
                Err(Errno::CONNRESET) => return Ok(0),
                Err(errno) => return Err(os("recvmsg", errno)),
            }
        }
    }

    /// Ends the connection, for both ends.
    pub(crate) fn close(&self) {
        // It fails only if it is closed already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
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
