//! The back end's own channel, on which it makes requests of the front end.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
};

use rustix::net::{self, SendFlags};
use zerocopy::IntoBytes;

use crate::{Iotlb, msg::Header};

/// BACKEND_IOTLB_MSG.
const BACKEND_IOTLB_MSG: u32 = 1;

/// The back end's end of the channel that SET_BACKEND_REQ_FD brings.
#[derive(Debug)]
pub struct BackendChannel {
    stream: UnixStream,
    /// Whether the front end answers where it is asked to (REPLY_ACK).
    acks: bool,
}

impl BackendChannel {
    /// A channel over `stream`; `acks`: whether REPLY_ACK was negotiated.
    ///
    /// # Errors
    /// The stream cannot be made non-blocking.
    pub fn new(stream: UnixStream, acks: bool) -> io::Result<BackendChannel> {
        stream.set_nonblocking(true)?;
        Ok(BackendChannel { stream, acks })
    }

    /// Sends IOTLB messages (misses and access failures, rule D16), each with whether an answer is
    /// wanted: without blocking. Returns how many were sent, from the first on.
    pub fn try_send(&self, messages: impl IntoIterator<Item = (Iotlb, bool)>) -> usize {
        let mut sent = 0;
        for (message, ack) in messages {
            let Some(wire) = message.emit() else { break };
            let header = Header::request(BACKEND_IOTLB_MSG, ack && self.acks, size_of_val(&wire));
            let bytes = [header.as_bytes(), wire.as_bytes()].concat();
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match net::send(&self.stream, &bytes, flags) {
                Ok(count) if count == bytes.len() => sent += 1,
                _ => break,
            }
        }
        sent
    }
}

impl AsFd for BackendChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
