//! The front end's end of the back end's channel.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use ringfence_run::PeerFd;
use zerocopy::{FromBytes, IntoBytes};

use crate::{
    Iotlb, IotlbWire, WireError,
    channel::Channel,
    inbox::{Inbox, Message},
    msg::{Header, code},
};

/// What a back end sends on its own channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendMessage {
    /// A miss, or an access that the translation does not permit (rule D16): [`Iotlb::Miss`] or
    /// [`Iotlb::AccessFail`].
    Iotlb(Iotlb),
    /// The configuration space has changed: read it again.
    ConfigChange,
}

/// A message of the back end, and whether it asks for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it may want a reply"]
pub struct BackendRequest {
    /// Its content.
    pub message: BackendMessage,
    /// Whether it asks for an answer once that is done, or cannot be done (rule D9). Answers go in
    /// the order of the messages.
    pub wants_answer: bool,
}

/// The front end's end of the channel that [`Frontend::set_backend_channel`] hands out.
///
/// [`Frontend::set_backend_channel`]: crate::Frontend::set_backend_channel
#[derive(Debug)]
pub struct FrontendChannel {
    channel: Channel,
    inbox: Inbox,
}

impl FrontendChannel {
    /// A channel, and the end of it that is for the back end. The back end must complete a message
    /// that it began, and take an answer, within `timeout`.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn pair(timeout: Duration) -> io::Result<(FrontendChannel, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        Ok((FrontendChannel::new(ours, timeout), theirs.into()))
    }

    /// A channel over a socket whose other end the back end has.
    pub fn new(stream: impl Into<PeerFd>, timeout: Duration) -> FrontendChannel {
        FrontendChannel { channel: Channel::new(stream.into(), timeout), inbox: Inbox::new() }
    }

    /// Waits for a message; `None` if the back end has hung up.
    ///
    /// # Errors
    /// The back end sent no valid message: end the connection.
    pub fn recv(&mut self) -> Result<Option<BackendRequest>, WireError> {
        self.channel.recv_request(&mut self.inbox)?.map(|message| parse(&message)).transpose()
    }

    /// Waits for messages, and appends all that are there then; false if the back end has hung up.
    /// Answering them all at once saves a round trip for each.
    ///
    /// # Errors
    /// As [`recv`](Self::recv); what came before is appended.
    pub fn recv_all(&mut self, into: &mut Vec<BackendRequest>) -> Result<bool, WireError> {
        let Some(first) = self.recv()? else { return Ok(false) };
        into.push(first);
        while let Some(message) = self.inbox.take(false)? {
            into.push(parse(&message)?);
        }
        Ok(true)
    }

    /// As [`recv_all`](Self::recv_all), but waits no longer than `limit`; nothing is appended then.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_all_within(
        &mut self,
        limit: Duration,
        into: &mut Vec<BackendRequest>,
    ) -> Result<bool, WireError> {
        match self.channel.recv_request_within(&mut self.inbox, limit) {
            Ok(None) => return Ok(false),
            Ok(Some(message)) => into.push(parse(&message)?),
            Err(WireError::TimedOut { .. }) if self.inbox.is_empty() => return Ok(true),
            Err(error) => return Err(error),
        }
        while let Some(message) = self.inbox.take(false)? {
            into.push(parse(&message)?);
        }
        Ok(true)
    }

    /// Answers a message, if it asks for that, with whether it was done. For a miss, send the
    /// update first (rule D9).
    ///
    /// # Errors
    /// The back end has hung up, or takes no answers.
    pub fn answer(&self, request: &BackendRequest, done: bool) -> Result<(), WireError> {
        if !request.wants_answer {
            return Ok(());
        }
        let code = match request.message {
            BackendMessage::Iotlb(_) => code::BACKEND_IOTLB_MSG,
            BackendMessage::ConfigChange => code::BACKEND_CONFIG_CHANGE_MSG,
        };
        let word = u64::from(!done);
        self.channel.send(Header::reply(code, size_of_val(&word)), word.as_bytes(), &[])
    }
}

fn parse(message: &Message) -> Result<BackendRequest, WireError> {
    let Message { header, payload, fds } = message;
    let &Header { request, size, .. } = header;
    if !fds.is_empty() {
        return Err(WireError::Fds { request, count: fds.len() });
    }
    let wrong_size = WireError::Size { request, size };
    let message = match request {
        code::BACKEND_IOTLB_MSG => {
            let wire = IotlbWire::read_from_bytes(payload).map_err(|_| wrong_size)?;
            match wire.parse() {
                Ok(message @ (Iotlb::Miss { .. } | Iotlb::AccessFail { .. })) => {
                    BackendMessage::Iotlb(message)
                }
                _ => {
                    let (field, value) =
                        ("type and permissions", u16::from_ne_bytes([wire.kind, wire.perm]));
                    return Err(WireError::Value { request, field, value: value.into() });
                }
            }
        }
        code::BACKEND_CONFIG_CHANGE_MSG if payload.is_empty() => BackendMessage::ConfigChange,
        code::BACKEND_CONFIG_CHANGE_MSG => return Err(wrong_size),
        _ => return Err(WireError::Request { request }),
    };
    Ok(BackendRequest { message, wants_answer: header.needs_reply() })
}

impl AsFd for FrontendChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}
