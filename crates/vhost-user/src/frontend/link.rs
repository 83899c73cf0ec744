//! The connection itself, on which several threads may make requests.

mod posts;

use std::{
    collections::VecDeque,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use ringfence_mem::Region;
use ringfence_run::PeerFd;
use zerocopy::IntoBytes;

use super::{FrontendError, Result};
use crate::{
    WireError,
    channel::Channel,
    inbox::{Inbox, Message},
    msg::{Header, Request},
};

/// What IOTLB messages are checked against.
#[derive(Debug, Default)]
pub(super) struct State {
    /// ACCESS_PLATFORM was negotiated.
    pub(super) translated: bool,
    /// REPLY_ACK was negotiated.
    pub(super) acks: bool,
    /// The memory that was announced.
    pub(super) regions: Vec<Region>,
}

/// Answers come in the order of the requests: a requester takes a number, and reads when it is that
/// number's turn. Whichever thread gets to them reads the answers to [posted](Link::post) messages.
#[derive(Debug)]
pub(super) struct Link {
    channel: Channel,
    state: Mutex<State>,
    outgoing: Mutex<Outgoing>,
    answers: Mutex<Answers>,
    turn: Condvar,
    /// How many posted messages were answered.
    done: AtomicU64,
    /// A failure ended the connection.
    closed: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct Outgoing {
    /// How many answers were requested.
    requested: u64,
    /// Posted messages that are not sent yet; they go before everything else.
    unsent: Vec<u8>,
    /// How many messages were ever posted.
    posts: u64,
    /// Which of the answers that did not come yet are to posted messages.
    posted: VecDeque<Range<u64>>,
    /// The first non-zero answer to a posted message that was not reported yet.
    refused: Option<u64>,
}

#[derive(Debug)]
struct Answers {
    /// How many came.
    came: u64,
    inbox: Inbox,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Link {
    pub(super) fn new(stream: PeerFd, timeout: Duration) -> Link {
        Link {
            channel: Channel::new(stream, timeout),
            state: Mutex::default(),
            outgoing: Mutex::default(),
            answers: Mutex::new(Answers { came: 0, inbox: Inbox::new() }),
            turn: Condvar::new(),
            done: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Ends the connection, for every thread: after an error, bytes cannot be matched to our
    /// requests (rule D12).
    pub(super) fn fail(&self, error: WireError) -> FrontendError {
        self.close();
        error.into()
    }

    /// Ends the connection.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.channel.close();
    }

    /// Sends requests that get `answers` answers in all; returns the number of the first. The
    /// caller must [`collect`](Self::collect) them.
    pub(super) fn send(
        &self,
        requests: &[Request],
        ack: bool,
        fds: &[BorrowedFd<'_>],
        answers: u64,
    ) -> Result<u64> {
        let mut bytes = Vec::new();
        for request in requests {
            let payload = request.payload();
            let header = Header::request(request.code(), ack, payload.len());
            bytes.extend_from_slice(header.as_bytes());
            bytes.extend_from_slice(&payload);
        }
        // Numbers are given in the order in which requests go out.
        let mut outgoing = self.after_posted()?;
        let code = requests.first().map_or(0, Request::code);
        self.channel.send_bytes(code, &bytes, fds).map_err(|error| self.fail(error))?;
        let first = outgoing.requested;
        outgoing.requested += answers;
        Ok(first)
    }

    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) { Err(FrontendError::Closed) } else { Ok(()) }
    }

    /// Reads `count` answers to `request`, from the one with this number on.
    pub(super) fn collect(
        &self,
        first: u64,
        count: u64,
        request: u32,
        mut each: impl FnMut(Message) -> Result<()>,
    ) -> Result<()> {
        let mut answers = lock(&self.answers);
        while answers.came != first {
            if self.posted_next(&answers).is_some() {
                // A poster need not read before our turn. A failure closes the connection.
                let _ = self.take_posted(&mut answers, true);
                self.turn.notify_all();
                continue;
            }
            // The current reader has a time limit, and so have all before us.
            answers = self.turn.wait(answers).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        let mut result = Ok(());
        for _ in 0..count {
            if result.is_ok() {
                result = match self.closed.load(Ordering::Acquire) {
                    true => Err(FrontendError::Closed),
                    false => self.answer(&mut answers.inbox, request).and_then(&mut each),
                };
            }
            // Even after a failure: other threads wait for their turn, to fail too.
            answers.came += 1;
        }
        drop(answers);
        self.turn.notify_all();
        result
    }

    fn answer(&self, inbox: &mut Inbox, wanted: u32) -> Result<Message> {
        let message = self.channel.recv_reply(inbox).map_err(|error| self.fail(error))?;
        let got = message.header.request;
        match got == wanted {
            true => Ok(message),
            false => Err(self.fail(WireError::WrongReply { wanted, got })),
        }
    }

    /// An answer's payload; descriptors with it are an error.
    pub(super) fn plain(&self, message: Message) -> Result<Vec<u8>> {
        let Message { header, payload, fds } = message;
        match fds.len() {
            0 => Ok(payload),
            count => Err(self.fail(WireError::Fds { request: header.request, count })),
        }
    }

    /// An answer's word.
    pub(super) fn word(&self, message: Message) -> Result<u64> {
        let request = message.header.request;
        let payload = self.plain(message)?;
        let size = payload.len() as u32;
        let word = payload.try_into().map_err(|_| self.fail(WireError::Size { request, size }))?;
        Ok(u64::from_ne_bytes(word))
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}
