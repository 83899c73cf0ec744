//! What another process needs to take over a connection when the process that serves it ends or
//! dies.
//!
//! The state is kept as requests: those by which a front end would bring a new back end into this
//! state. The successor carries them out, with all checks, as if they had just arrived. A request
//! that repeats what already holds changes nothing, so the order of events does not matter, with
//! one exception: requests that were in progress. Which of those were carried out and replied to is
//! unknown, and the connection cannot go on.

use std::os::fd::{AsFd, BorrowedFd};

use ringfence_run::PeerFd;
use zerocopy::{FromBytes, IntoBytes};

use crate::{
    WireError,
    backend_channel::MOST_REPLIES,
    msg::{Header, Request},
};

/// The first bytes, and the version of the format.
const MAGIC: [u8; 4] = *b"RFvu";
const VERSION: u32 = 2;
/// Stands for an unknown number of replies that are still to come.
const NOT_KNOWN: u32 = u32::MAX;

/// Keeps what another process needs to take over a connection. The [`Server`](crate::Server) calls
/// it on its own thread; a slow keeper holds up the front end.
pub trait Keeper: Send {
    /// From now on requests may be in progress, until [`settled`](Self::settled). Record it at
    /// once: a process may die at any moment. Called for each batch of requests.
    fn unsettled(&mut self);

    /// All requests were carried out and replied to, and the current state is kept.
    fn settled(&mut self);

    /// This is the state from now on; `None`: the connection cannot go on elsewhere, or is over.
    /// Called before the reply to a request that has changed it.
    fn keep(&mut self, state: Option<&ConnectionState<'_>>);
}

/// The state of a connection, and the descriptors that belong to it.
#[derive(Debug, Default)]
pub struct ConnectionState<'a> {
    /// How many replies the front end owes on the back end's channel; `None`: unknown.
    pub(crate) replies_owed: Option<u32>,
    pub(crate) requests: Vec<(Request, Vec<BorrowedFd<'a>>)>,
}

impl<'a> ConnectionState<'a> {
    /// As bytes and descriptors, for [`SavedConnection::parse`].
    pub fn emit(&self) -> (Vec<u8>, Vec<BorrowedFd<'a>>) {
        let replies_owed = self.replies_owed.unwrap_or(NOT_KNOWN);
        let mut bytes = [MAGIC, VERSION.to_ne_bytes(), replies_owed.to_ne_bytes()].concat();
        for (request, _) in &self.requests {
            let payload = request.payload();
            bytes.extend_from_slice(
                Header::request(request.code(), false, payload.len()).as_bytes(),
            );
            bytes.extend_from_slice(&payload);
        }
        (bytes, self.requests.iter().flat_map(|(_, fds)| fds).copied().collect())
    }
}

/// The saved state of a connection, for [`Server::resume`](crate::Server::resume).
#[derive(Debug)]
pub struct SavedConnection {
    pub(crate) replies_owed: Option<u32>,
    pub(crate) requests: Vec<(Request, Vec<PeerFd>)>,
}

/// Bytes that are no [`SavedConnection`] of this version.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// They do not begin with the magic number.
    #[error("no saved connection")]
    Magic,
    /// Another version made them.
    #[error("a saved connection of version {0}; this program knows {VERSION}")]
    Version(u32),
    /// They end within a request.
    #[error("a saved connection that is cut off after {0} bytes")]
    Short(usize),
    /// They hold anything but requests.
    #[error("a saved connection: {0}")]
    Wire(#[from] WireError),
    /// Its requests need more descriptors than came, or fewer.
    #[error("a saved connection with {there} descriptors where its requests have {needed}")]
    Fds {
        /// How many its requests have.
        needed: usize,
        /// How many came.
        there: usize,
    },
}

/// Checks magic number and version; returns how many replies are to come, and the rest of the
/// bytes.
fn begin(bytes: &[u8]) -> Result<(Option<u32>, &[u8]), ResumeError> {
    let word = |rest| u32::read_from_prefix(rest).map_err(|_| ResumeError::Short(bytes.len()));
    let (version, rest) = word(bytes.strip_prefix(&MAGIC[..]).ok_or(ResumeError::Magic)?)?;
    if version != VERSION {
        return Err(ResumeError::Version(version));
    }
    let (replies_owed, rest) = word(rest)?;
    // No front end owes more.
    Ok((Some(replies_owed).filter(|replies_owed| *replies_owed <= MOST_REPLIES), rest))
}

impl SavedConnection {
    /// The same, without the bases of the rings that will run.
    pub(crate) fn without_bases(&self) -> ConnectionState<'_> {
        let runs = |number: u32| {
            self.requests.iter().any(|(request, _)| {
                matches!(request, Request::SetVringKick { ring, .. } if u32::from(*ring) == number)
            })
        };
        let keeps = |request: &Request| match request {
            Request::SetVringBase { ring, .. } => !runs(*ring),
            _ => true,
        };
        let mut state = ConnectionState::default();
        for (request, fds) in self.requests.iter().filter(|(request, _)| keeps(request)) {
            state.requests.push((request.clone(), fds.iter().map(AsFd::as_fd).collect()));
        }
        state
    }

    /// Whether the bytes begin with a version that [`parse`](Self::parse) supports.
    ///
    /// # Errors
    /// [`ResumeError::Magic`], [`ResumeError::Version`], [`ResumeError::Short`].
    pub fn check(bytes: &[u8]) -> Result<(), ResumeError> {
        begin(bytes).map(|_| ())
    }

    /// Reads what [`ConnectionState::emit`] wrote.
    ///
    /// # Errors
    /// See [`ResumeError`].
    pub fn parse(bytes: &[u8], fds: Vec<PeerFd>) -> Result<SavedConnection, ResumeError> {
        let short = |rest: &[u8]| ResumeError::Short(bytes.len() - rest.len());
        let (replies_owed, mut rest) = begin(bytes)?;
        let mut requests = Vec::new();
        while !rest.is_empty() {
            let (header, behind) = Header::read_from_prefix(rest).map_err(|_| short(rest))?;
            header.check(false)?;
            let payload = behind.split_at_checked(header.size as usize);
            let (payload, behind) = payload.ok_or_else(|| short(rest))?;
            requests.push(Request::parse(header.request, payload)?);
            rest = behind;
        }
        let (needed, there) = (requests.iter().map(Request::fds).sum(), fds.len());
        if needed != there {
            return Err(ResumeError::Fds { needed, there });
        }
        let mut fds = fds.into_iter();
        let with_fds = |request: Request| {
            let fds = fds.by_ref().take(request.fds()).collect();
            (request, fds)
        };
        Ok(SavedConnection { replies_owed, requests: requests.into_iter().map(with_fds).collect() })
    }
}

#[cfg(test)]
mod tests {
    use ringfence_mem::Region;
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let region = Region { gpa: 0, size: 4096, user_addr: 4096, mmap_offset: 0 };
        let requests = [
            (Request::SetFeatures(1 << 32), vec![]),
            (Request::AddMemReg(region), vec![event.as_fd()]),
            (Request::SetVringKick { ring: 0, fd: true }, vec![event.as_fd()]),
            (Request::SetVringKick { ring: 1, fd: false }, vec![]),
        ];
        let emit = |count: usize, replies_owed| {
            let requests = requests[..count].to_vec();
            ConnectionState { replies_owed, requests }.emit().0
        };
        let state = ConnectionState { replies_owed: Some(3), requests: requests.to_vec() };
        let (bytes, fds) = state.emit();
        let count = fds.len();
        let fds = || -> Vec<PeerFd> {
            let each = (0..count).map(|_| event.try_clone().unwrap());
            each.map(PeerFd::from).collect()
        };
        let read = SavedConnection::parse(&bytes, fds()).unwrap();
        assert_eq!(read.replies_owed, Some(3));
        for too_many in [None, Some(MOST_REPLIES + 1), Some(NOT_KNOWN - 1)] {
            let read = SavedConnection::parse(&emit(0, too_many), vec![]).unwrap();
            assert_eq!(read.replies_owed, None);
        }
        assert!(
            read.requests.iter().map(|(request, _)| request).eq(requests.iter().map(|(r, _)| r))
        );
        assert!(read.requests.iter().all(|(request, fds)| request.takes_fds(fds.len())));

        let parse = |bytes: &[u8], fds| SavedConnection::parse(bytes, fds).unwrap_err();
        assert!(matches!(parse(&bytes, vec![]), ResumeError::Fds { needed: 2, there: 0 }));
        let whole: Vec<usize> = (0..requests.len()).map(|count| emit(count, None).len()).collect();
        for len in (0..bytes.len()).filter(|len| !whole.contains(len)) {
            let error = parse(&bytes[..len], fds());
            assert!(matches!(error, ResumeError::Magic | ResumeError::Short(_)), "{len}: {error}");
        }
        for (at, error) in
            [(0, "no saved"), (4, "of version"), (13, "request 258"), (16, "protocol version")]
        {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            let text = parse(&bytes, fds()).to_string();
            assert!(text.contains(error), "{at}: {text}");
        }
    }
}
