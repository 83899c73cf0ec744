//! The records of a journal's log.

use std::collections::VecDeque;

use super::{Completions, JournalError, PLACES};
use crate::wire::{Kind, MAX_REQUEST_LEN, Request, Status, parse_tail};

/// All requests before this one in the ring are completed.
pub(super) const FIRST: u64 = 1;
/// This replaces the completion of an earlier record.
pub(super) const AMENDED: u64 = 2;

/// How a request is completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Completion {
    /// With this status.
    Status(Status),
    /// Without a status: used length 0.
    Unwritten,
    /// With more than a status, and without any change: it can be carried out again.
    Again,
}

const UNWRITTEN: u8 = 0xff;
const AGAIN: u8 = 0xfe;

impl Completion {
    fn code(self) -> u8 {
        match self {
            Completion::Status(status) => status as u8,
            Completion::Unwritten => UNWRITTEN,
            Completion::Again => AGAIN,
        }
    }

    fn from_code(code: u8) -> Option<Completion> {
        match code {
            UNWRITTEN => Some(Completion::Unwritten),
            AGAIN => Some(Completion::Again),
            code => parse_tail([code, 0, 0, 0]).ok().map(Completion::Status),
        }
    }
}

/// The first word of a record.
pub(super) fn head(position: u16, completion: Completion, flags: u64, len: usize) -> u64 {
    u64::from(position) | u64::from(completion.code()) << 16 | (len as u64) << 24 | flags << 32
}

/// Whether a request changes something that is completed with OK.
pub(in super::super) fn changes(kind: Kind) -> bool {
    match kind {
        Kind::Map | Kind::Unmap | Kind::Attach | Kind::Detach => true,
        // What a lazy domain has unmapped is not cached in another process.
        Kind::Probe | Kind::IotlbFlush => false,
    }
}

/// The requests and the last completions in a log.
pub(super) fn read_log(
    mut words: impl Iterator<Item = u64>,
    len: usize,
) -> Result<(Vec<Request>, Completions), JournalError> {
    let (mut requests, mut completions) = (Vec::new(), VecDeque::<(u16, Completion)>::new());
    let mut at = 0;
    while let Some(head) = words.next() {
        let wrong = |what| JournalError::Record { at, what };
        let [p0, p1, code, request_len, flags, rest @ ..] = head.to_le_bytes();
        let (position, flags) = (u16::from_le_bytes([p0, p1]), u64::from(flags));
        let request_len = usize::from(request_len);
        if rest != [0; 3] || flags > AMENDED {
            return Err(wrong("it has unknown fields"));
        }
        let completion = Completion::from_code(code).ok_or(wrong("its status is unknown"))?;
        if request_len > MAX_REQUEST_LEN || request_len.next_multiple_of(8) > len - at - 8 {
            return Err(wrong("it passes the end"));
        }
        if flags == AMENDED {
            let earlier = completions.iter_mut().rev().find(|(earlier, _)| *earlier == position);
            let (_, held) = earlier.ok_or(wrong("it belongs to no request"))?;
            *held = completion;
        } else {
            if flags == FIRST {
                completions.clear();
            }
            if completions.back().is_some_and(|&(last, _)| last.wrapping_add(1) != position) {
                return Err(wrong("it does not follow the one before it"));
            }
            if completions.len() == PLACES {
                return Err(wrong("the ring has fewer places"));
            }
            completions.push_back((position, completion));
        }
        if request_len > 0 {
            let mut bytes = [0; MAX_REQUEST_LEN.next_multiple_of(8)];
            for (to, word) in bytes[..request_len.next_multiple_of(8)].chunks_mut(8).zip(&mut words)
            {
                to.copy_from_slice(&word.to_ne_bytes());
            }
            let request = Request::parse(&bytes[..request_len]).ok();
            let request = request.filter(|request| changes(request.kind()));
            let done = flags != AMENDED && completion == Completion::Status(Status::Ok);
            requests.push(request.filter(|_| done).ok_or(wrong("it changed nothing"))?);
        }
        at += 8 + request_len.next_multiple_of(8);
    }
    Ok((requests, Completions { open: completions }))
}
