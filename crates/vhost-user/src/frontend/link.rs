//! The connection itself, on which several threads may make requests.

use std::{
    collections::VecDeque,
    ops::Range,
    os::fd::BorrowedFd,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::{Condvar, Mutex, MutexGuard};
use ringfence_mem::Region;
use ringfence_run::PeerFd;
use zerocopy::IntoBytes;

use super::{FrontendError, Result};
use crate::{
    IotlbWire, ProtocolFeatures, WireError,
    channel::Channel,
    inbox::{Inbox, Message},
    msg::{Header, Request, code},
};

/// Most bytes that wait for room in the socket; beyond that a poster waits too.
const MOST_UNSENT: usize = 1 << 16;
/// Most posted messages that may have no reply when a request that waits for its reply is sent:
/// their replies fit into any socket, so that the back end never waits for us to read them while we
/// wait for it to read.
const MOST_WITHOUT_REPLY: u64 = 64;

/// What was negotiated, which requests are checked against.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) features: u64,
    pub(super) protocol: ProtocolFeatures,
    /// The memory that was announced.
    pub(super) regions: Vec<Region>,
}

/// Replies come in the order of the requests: a requester takes a number, and reads when it is that
/// number's turn. Whichever thread gets to them reads the replies to [posted](Link::post) messages.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) channel: Channel,
    pub(super) state: Mutex<State>,
    outgoing: Mutex<Outgoing>,
    replies: Mutex<Replies>,
    turn: Condvar,
    /// How many posted messages have their reply.
    done: AtomicU64,
    /// A failure ended the connection.
    closed: AtomicBool,
}

#[derive(Debug, Default)]
struct Outgoing {
    /// How many replies were requested.
    requested: u64,
    /// Posted messages that are not sent yet; they go before everything else.
    unsent: Vec<u8>,
    /// How many messages were ever posted.
    posts: u64,
    /// Which of the replies that did not come yet are to posted messages.
    posted: VecDeque<Range<u64>>,
    /// The first non-zero reply to a posted message that was not reported yet.
    refused: Option<u64>,
}

#[derive(Debug)]
struct Replies {
    /// How many came.
    came: u64,
    inbox: Inbox,
}

impl Link {
    pub(super) fn new(stream: PeerFd, timeout: Duration) -> Link {
        Link {
            channel: Channel::new(stream, timeout),
            state: Mutex::default(),
            outgoing: Mutex::default(),
            replies: Mutex::new(Replies { came: 0, inbox: Inbox::new() }),
            turn: Condvar::new(),
            done: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        }
    }

    /// Ends the connection, for every thread: after an error, bytes cannot be matched to our
    /// requests (rule D12).
    pub(super) fn fail(&self, error: WireError) -> FrontendError {
        self.close();
        error.into()
    }

    /// Ends the connection.
    // Ordering: a flag; a message that is sent meanwhile fails in the socket.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.channel.close();
    }

    /// Sends a request that gets no reply.
    pub(super) fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.put(request, false, fds, 0).map(drop)
    }

    /// Sends a request and waits for its reply.
    pub(super) fn exchange(
        &self,
        request: &Request,
        ack: bool,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Message> {
        let turn = self.put(request, ack, fds, 1)?;
        let mut replies = self.replies.lock();
        while replies.came != turn {
            if self.posted_next(&replies).is_some() {
                // A poster need not read before our turn. A failure closes the connection.
                let _ = self.take_posted(&mut replies, true);
                self.turn.notify_all();
                continue;
            }
            // The current reader has a time limit, and so have all before us.
            self.turn.wait(&mut replies);
        }
        let result =
            self.check_open().and_then(|()| self.reply(&mut replies.inbox, request.code()));
        // Even after a failure: other threads wait for their turn, to fail too.
        replies.came += 1;
        drop(replies);
        self.turn.notify_all();
        result
    }

    /// Sends a request that gets so many replies; returns the number of its own.
    fn put(
        &self,
        request: &Request,
        ack: bool,
        fds: &[BorrowedFd<'_>],
        replies: u64,
    ) -> Result<u64> {
        let payload = request.payload();
        let header = Header::request(request.code(), ack, payload.len());
        // Numbers are given in the order in which requests go out.
        let mut outgoing = self.after_posted()?;
        self.channel.send(header, &payload, fds).map_err(|error| self.fail(error))?;
        let turn = outgoing.requested;
        outgoing.requested += replies;
        Ok(turn)
    }

    // Ordering: see `close`.
    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) { Err(FrontendError::Closed) } else { Ok(()) }
    }

    fn reply(&self, inbox: &mut Inbox, wanted: u32) -> Result<Message> {
        let message = self.channel.recv_reply(inbox).map_err(|error| self.fail(error))?;
        let got = message.header.request;
        match got == wanted {
            true => Ok(message),
            false => Err(self.fail(WireError::WrongReply { wanted, got })),
        }
    }

    /// A reply's payload; descriptors with it are an error.
    pub(super) fn plain(&self, message: Message) -> Result<Vec<u8>> {
        let Message { header, payload, fds } = message;
        match fds.len() {
            0 => Ok(payload),
            count => {
                let (request, takes) = (header.request, "none".to_owned());
                Err(self.fail(WireError::Fds { request, count, takes }))
            }
        }
    }

    /// A reply's word.
    pub(super) fn word(&self, message: Message) -> Result<u64> {
        let request = message.header.request;
        let payload = self.plain(message)?;
        let size = payload.len() as u32;
        let wrong = |_| self.fail(WireError::Size { request, size, takes: "8".to_owned() });
        let word = payload.try_into().map_err(wrong)?;
        Ok(u64::from_ne_bytes(word))
    }

    /// Queues messages to go with the next [`flush`](Self::flush); `ack`: with need_reply in their
    /// headers. Returns how many were ever queued.
    pub(super) fn post(&self, messages: &[IotlbWire], ack: bool) -> Result<u64> {
        let header = Header::request(code::IOTLB_MSG, ack, size_of::<IotlbWire>());
        loop {
            let mut outgoing = self.outgoing.lock();
            self.check_open()?;
            if outgoing.unsent.len() > MOST_UNSENT {
                drop(outgoing);
                self.progress(|outgoing| outgoing.unsent.len() <= MOST_UNSENT)?;
                continue;
            }
            for message in messages {
                outgoing.unsent.extend_from_slice(header.as_bytes());
                outgoing.unsent.extend_from_slice(message.as_bytes());
            }
            let first = outgoing.requested;
            outgoing.requested += messages.len() as u64;
            outgoing.posts += messages.len() as u64;
            let requested = outgoing.requested;
            match outgoing.posted.back_mut() {
                Some(last) if last.end == first => last.end = requested,
                _ if messages.is_empty() => {}
                _ => outgoing.posted.push_back(first..requested),
            }
            return Ok(outgoing.posts);
        }
    }

    /// How many posted messages have their reply.
    // Ordering: needed between threads: a thread that sees that a reply was taken sees what its
    // taker has seen. No model has a socket.
    #[inline]
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Sends what was posted, as far as there is room, and takes the replies that are there,
    /// without waiting.
    pub(super) fn flush(&self) -> Result<()> {
        if self.send_posted(&mut self.outgoing.lock())? {
            // A thread that reads takes them when it gets to them.
            if let Some(mut replies) = self.replies.try_lock()
                && self.posted_next(&replies).is_some()
            {
                let taken = self.take(&mut replies);
                drop(replies);
                self.turn.notify_all();
                taken?;
            }
        }
        self.check_open()?;
        let request = code::IOTLB_MSG;
        let refused = self.outgoing.lock().refused.take();
        refused.map_or(Ok(()), |code| Err(FrontendError::Refused { request, code }))
    }

    /// Waits until all that was posted before has its reply.
    pub(super) fn settle(&self) -> Result<()> {
        let posts = self.outgoing.lock().posts;
        while self.done() < posts {
            self.progress(|_| self.done() >= posts)?;
        }
        self.flush()
    }

    /// Waits until what was posted is sent and mostly replied to; then another request may be sent.
    fn after_posted(&self) -> Result<MutexGuard<'_, Outgoing>> {
        let may = |outgoing: &Outgoing| {
            outgoing.unsent.is_empty() && outgoing.posts - self.done() <= MOST_WITHOUT_REPLY
        };
        loop {
            let mut outgoing = self.outgoing.lock();
            self.check_open()?;
            self.send_posted(&mut outgoing)?;
            if may(&outgoing) {
                return Ok(outgoing);
            }
            drop(outgoing);
            self.progress(may)?;
        }
    }

    /// Sends and takes replies, and waits if nothing else is possible; until it is `over`, or
    /// sooner.
    fn progress(&self, over: impl Fn(&Outgoing) -> bool) -> Result<()> {
        // The reading thread has a time limit, and may read the replies that are awaited here.
        let mut replies = self.replies.lock();
        let mut outgoing = self.outgoing.lock();
        self.check_open()?;
        self.send_posted(&mut outgoing)?;
        if over(&outgoing) {
            return Ok(());
        }
        let unsent = !outgoing.unsent.is_empty();
        drop(outgoing);
        if self.posted_next(&replies).is_none() {
            // Another thread's reply comes first: that thread reads it once the lock is released,
            // and this one looks at what is behind it then.
            self.turn.wait(&mut replies);
            return Ok(());
        }
        // The last reader may have received more than its own reply.
        let done = self.done();
        let mut result = self.take_posted(&mut replies, false);
        if result.is_ok() && self.done() == done {
            let waited = self.channel.await_progress(unsent);
            result =
                waited.map_err(|error| self.fail(error)).and_then(|()| self.take(&mut replies));
        }
        drop(replies);
        self.turn.notify_all();
        result
    }

    /// Sends as far as there is room; returns whether replies to posted messages are still to come.
    fn send_posted(&self, outgoing: &mut Outgoing) -> Result<bool> {
        if !outgoing.unsent.is_empty() {
            let sent = self.channel.send_some(&outgoing.unsent);
            outgoing.unsent.drain(..sent.map_err(|error| self.fail(error))?);
        }
        Ok(!outgoing.posted.is_empty())
    }

    /// Receives what is there, and takes the replies to posted messages that come next.
    fn take(&self, replies: &mut Replies) -> Result<()> {
        match self.channel.receive_some(&mut replies.inbox) {
            Ok(_) => self.take_posted(replies, false),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// Which replies come next, if they are to posted messages.
    fn posted_next(&self, replies: &Replies) -> Option<Range<u64>> {
        self.outgoing.lock().posted.front().filter(|posted| posted.start == replies.came).cloned()
    }

    /// Takes the replies to posted messages that come next; if it `waits`, until all that are known
    /// of now have come. After a failure they count as come: other threads wait for their turn, to
    /// fail too.
    fn take_posted(&self, replies: &mut Replies, waits: bool) -> Result<()> {
        let Some(Range { start, end }) = self.posted_next(replies) else { return Ok(()) };
        let request = code::IOTLB_MSG;
        let (mut result, mut refused) = (Ok(()), None);
        let mut next = start;
        while next < end && result.is_ok() {
            let word = match replies.inbox.take_plain::<u64>(request, true) {
                Some(word) => Ok(Some(word)),
                // It is not there, or is malformed.
                None if waits => self.awaited(replies).map(Some),
                None => match replies.inbox.has_message(true) {
                    Ok(false) => Ok(None),
                    Ok(true) => self.awaited(replies).map(Some),
                    Err(error) => Err(self.fail(error)),
                },
            };
            match word {
                Ok(Some(word)) => {
                    next += 1;
                    refused = refused.or((word != 0).then_some(word));
                }
                Ok(None) => break,
                Err(error) => result = Err(error),
            }
        }
        let passed = if result.is_ok() { next } else { end };
        replies.came = passed;
        let mut outgoing = self.outgoing.lock();
        outgoing.refused = outgoing.refused.or(refused);
        if let Some(posted) = outgoing.posted.front_mut() {
            posted.start = passed;
            if posted.is_empty() {
                outgoing.posted.pop_front();
            }
        }
        drop(outgoing);
        // Ordering: a reader of `done` sees what the back end did before it replied, as far as
        // another process's writes can be seen at all.
        self.done.fetch_add(next - start, Ordering::Release);
        result
    }

    fn awaited(&self, replies: &mut Replies) -> Result<u64> {
        self.reply(&mut replies.inbox, code::IOTLB_MSG).and_then(|message| self.word(message))
    }
}
