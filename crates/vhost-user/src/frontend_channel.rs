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

/// A message that a back end sends on its own channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendMessage {
    /// A miss, or an access that the translation does not permit (rule [D16]): [`Iotlb::Miss`] or
    /// [`Iotlb::AccessFail`].
    ///
    /// [D16]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d16
    Iotlb(Iotlb),
    /// The configuration space has changed: read it again.
    ConfigChange,
}

/// A message of the back end, and whether it needs a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it may need a reply"]
pub struct BackendRequest {
    /// Its content.
    pub message: BackendMessage,
    /// Whether a reply is needed once the message has been carried out, or has failed
    /// (rule [D9]). Replies are sent in the order of the messages.
    ///
    /// [D9]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d9
    pub need_reply: bool,
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
    /// that it began, while that is waited for, and take a reply, within `timeout`.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn pair(timeout: Duration) -> io::Result<(FrontendChannel, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        Ok((FrontendChannel::new(ours, timeout), theirs.into()))
    }

    /// A channel over `stream`, whose other end is the back end's.
    pub fn new(stream: impl Into<PeerFd>, timeout: Duration) -> FrontendChannel {
        FrontendChannel { channel: Channel::new(stream.into(), timeout), inbox: Inbox::new() }
    }

    /// Waits for a message; `None` if the back end has hung up.
    ///
    /// # Errors
    /// The back end sent no valid message: end the connection.
    pub fn recv(&mut self) -> Result<Option<BackendRequest>, WireError> {
        self.channel.arrive(&mut self.inbox, false, None)?;
        self.inbox.take(false)?.map(|message| parse(&message)).transpose()
    }

    /// Waits up to `limit` for a message to begin (`None`: without a limit), and appends all
    /// messages that have arrived by then to `into`, perhaps none; false if the back end has hung
    /// up. Replying to all of them at once saves a round trip for each. With a `limit` of zero it waits for
    /// nothing, not even for the rest of a message.
    ///
    /// # Errors
    /// As [`recv`](Self::recv); the messages before the invalid one are appended.
    pub fn recv_all(
        &mut self,
        limit: Option<Duration>,
        into: &mut Vec<BackendRequest>,
    ) -> Result<bool, WireError> {
        let arrived = match limit {
            // One call takes what is there; to wait would be another.
            Some(Duration::ZERO) => {
                self.channel.receive(&mut self.inbox).map(|more| more != Some(false))
            }
            limit => self.channel.arrive(&mut self.inbox, false, limit),
        };
        match arrived {
            Ok(false) => return Ok(false),
            Err(WireError::TimedOut { .. }) if self.inbox.is_empty() => return Ok(true),
            arrived => _ = arrived?,
        }
        while let Some(message) = self.inbox.take(false)? {
            into.push(parse(&message)?);
        }
        Ok(true)
    }

    /// Replies to a message if it needs a reply: `done` is whether it was carried out. For a
    /// miss, send the update first (rule [D9]).
    ///
    /// # Errors
    /// The back end has hung up, or takes no replies.
    ///
    /// [D9]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d9
    pub fn reply(&self, request: &BackendRequest, done: bool) -> Result<(), WireError> {
        if !request.need_reply {
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
        return Err(WireError::Fds { request, count: fds.len(), takes: "none".to_owned() });
    }
    let wrong_size = |takes: usize| WireError::Size { request, size, takes: takes.to_string() };
    let message = match request {
        code::BACKEND_IOTLB_MSG => {
            let wire = IotlbWire::read_from_bytes(payload)
                .map_err(|_| wrong_size(size_of::<IotlbWire>()))?;
            match wire.parse() {
                Ok(message @ (Iotlb::Miss { .. } | Iotlb::AccessFail { .. })) => {
                    BackendMessage::Iotlb(message)
                }
                _ => {
                    let (field, value) =
                        ("type and permissions", u16::from_ne_bytes([wire.kind, wire.perm]));
                    let must = "1 (miss) or 4 (access-fail), plus 0x100 to 0x300".to_owned();
                    return Err(WireError::Value { request, field, value: value.into(), must });
                }
            }
        }
        code::BACKEND_CONFIG_CHANGE_MSG if payload.is_empty() => BackendMessage::ConfigChange,
        code::BACKEND_CONFIG_CHANGE_MSG => return Err(wrong_size(0)),
        _ => return Err(WireError::Request { request }),
    };
    Ok(BackendRequest { message, need_reply: header.needs_reply() })
}

impl AsFd for FrontendChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}
