//! Bytes and descriptors that were received and not parsed yet.

use std::collections::VecDeque;

use ringfence_run::PeerFd;
use zerocopy::FromBytes;

use crate::{
    WireError,
    error::at_most,
    msg::{Header, MAX_FDS, MAX_PAYLOAD},
};

/// Room for many small messages, so that one call receives all that are there.
const ROOM: usize = 8192;

/// A received message: its header was checked, its payload was not.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
    /// At most [`MAX_FDS`].
    pub(crate) fds: Vec<PeerFd>,
}

/// Bytes of a stream of messages, with the descriptors that came along.
#[derive(Debug)]
pub(crate) struct Inbox {
    buffer: Box<[u8]>,
    /// What is there lies in `buffer[start..end]`.
    start: usize,
    end: usize,
    /// Where `start` is in the stream.
    position: u64,
    /// Descriptors, each with the end of what had been received when it came, as a position in the
    /// stream.
    fds: VecDeque<(u64, PeerFd)>,
}

impl Inbox {
    pub(crate) fn new() -> Inbox {
        let buffer = vec![0; ROOM].into_boxed_slice();
        Inbox { buffer, start: 0, end: 0, position: 0, fds: VecDeque::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The code of the next message, if all of it is there. Unchecked.
    pub(crate) fn next_code(&self) -> Option<u32> {
        let there = &self.buffer[self.start..self.end];
        let (header, rest) = Header::read_from_prefix(there).ok()?;
        (rest.len() >= header.size as usize).then_some(header.request)
    }

    /// Where to receive to; never empty.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        // The rest is less than a message, or it would have been taken.
        if ROOM - self.end < Header::LEN + MAX_PAYLOAD {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.buffer[self.end..]
    }

    /// Records that so many bytes were received, with these descriptors.
    pub(crate) fn filled(&mut self, bytes: usize, fds: Vec<PeerFd>) -> Result<(), WireError> {
        self.end += bytes;
        let received = self.position + (self.end - self.start) as u64;
        self.fds.extend(fds.into_iter().map(|fd| (received, fd)));
        // A message may come in pieces that bring descriptors each: limit their sum.
        match self.fds.len() {
            count if count > MAX_FDS => {
                Err(WireError::Fds { request: 0, count, takes: at_most(MAX_FDS) })
            }
            _ => Ok(()),
        }
    }

    /// The header and the payload of the next message, if all of it is there; `reply`: whether it
    /// must be a reply.
    fn next(&self, reply: bool) -> Result<Option<(Header, &[u8])>, WireError> {
        let there = &self.buffer[self.start..self.end];
        let Ok((header, rest)) = Header::read_from_prefix(there) else { return Ok(None) };
        header.check(reply)?;
        Ok(rest.get(..header.size as usize).map(|payload| (header, payload)))
    }

    /// Whether all of a message is there; `reply`: whether it must be a reply.
    pub(crate) fn has_message(&self, reply: bool) -> Result<bool, WireError> {
        self.next(reply).map(|next| next.is_some())
    }

    /// The next message, if all of it is there; `reply`: whether it must be a reply.
    ///
    /// The kernel ends a receive behind a piece that has descriptors: they belong to the last
    /// message that was begun by then.
    pub(crate) fn take(&mut self, reply: bool) -> Result<Option<Message>, WireError> {
        let Some((header, payload)) = self.next(reply)? else { return Ok(None) };
        let payload = payload.to_vec();
        self.pass(Header::LEN + payload.len());
        let count = self.fds.iter().take_while(|(at, _)| *at <= self.position).count();
        let fds = self.fds.drain(..count).map(|(_, fd)| fd).collect();
        Ok(Some(Message { header, payload, fds }))
    }

    /// The payload of the next message, if it is that request (`reply`: the reply to it), all of
    /// it is there, it has that size and no descriptors; otherwise it stays for
    /// [`take`](Self::take). A fast path for messages that come by the dozen.
    pub(crate) fn take_plain<T: FromBytes>(&mut self, request: u32, reply: bool) -> Option<T> {
        let (header, payload) = self.next(reply).ok()??;
        let payload = T::read_from_bytes(payload).ok()?;
        let len = Header::LEN + size_of::<T>();
        let end = self.position + len as u64;
        if header.request != request || self.fds.front().is_some_and(|(at, _)| *at <= end) {
            return None;
        }
        self.pass(len);
        Some(payload)
    }

    /// Consumes so many bytes.
    fn pass(&mut self, len: usize) {
        self.start += len;
        self.position += len as u64;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rustix::event::{EventfdFlags, eventfd};
    use zerocopy::IntoBytes;

    use super::*;

    fn message(request: u32, size: usize) -> Vec<u8> {
        let payload = vec![request as u8; size];
        [Header::request(request, false, size).as_bytes(), &payload[..]].concat()
    }

    proptest! {
        #[test]
        fn messages_are_cut_apart_however_they_arrive(
            sizes in prop::collection::vec(0..=MAX_PAYLOAD, 1..60),
            pieces in prop::collection::vec(1..2000usize, 1..40),
        ) {
            let stream: Vec<u8> =
                sizes.iter().enumerate().flat_map(|(i, &size)| message(i as u32, size)).collect();
            let mut inbox = Inbox::new();
            let mut rest = &stream[..];
            let mut taken = 0;
            for &piece in pieces.iter().cycle() {
                let room = inbox.room();
                let len = piece.min(room.len()).min(rest.len());
                room[..len].copy_from_slice(&rest[..len]);
                rest = &rest[len..];
                inbox.filled(len, Vec::new()).unwrap();
                while let Some(code) = inbox.next_code() {
                    let message = inbox.take(false).unwrap().unwrap();
                    prop_assert_eq!((code, message.header.request), (taken as u32, taken as u32));
                    prop_assert_eq!(message.payload, vec![taken as u8; sizes[taken]]);
                    taken += 1;
                }
                prop_assert!(inbox.take(false).unwrap().is_none());
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(taken, sizes.len());
            prop_assert!(inbox.is_empty());
        }
    }

    #[test]
    fn descriptors_belong_to_the_last_message_that_was_begun() {
        let fd = || PeerFd::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let put = |inbox: &mut Inbox, bytes: &[u8], fds| {
            inbox.room()[..bytes.len()].copy_from_slice(bytes);
            inbox.filled(bytes.len(), fds).unwrap();
        };
        let mut inbox = Inbox::new();
        // Two without descriptors and the head of one with, received at once.
        let last = message(3, 8);
        let bytes = [message(1, 4), message(2, 0), last[..12].to_vec()].concat();
        put(&mut inbox, &bytes, vec![fd()]);
        let counts =
            |inbox: &mut Inbox| inbox.take(false).unwrap().map(|message| message.fds.len());
        assert_eq!((counts(&mut inbox), counts(&mut inbox)), (Some(0), Some(0)));
        assert_eq!(counts(&mut inbox), None);
        put(&mut inbox, &last[12..], vec![fd()]);
        assert_eq!(counts(&mut inbox), Some(2));
        // Pieces with descriptors each do not add up without a limit.
        for _ in 0..MAX_FDS {
            put(&mut inbox, &message(1, 9)[..1], vec![fd()]);
        }
        assert!(matches!(inbox.filled(1, vec![fd()]), Err(WireError::Fds { count: 9, .. })));
    }
}
