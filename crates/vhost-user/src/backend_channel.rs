//! The back end's own channel, on which it sends requests to the front end.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::{Builder, JoinHandle},
    time::Duration,
};

use parking_lot::Mutex;
use ringfence_run::{PeerFd, event};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{Errno, retry_on_intr},
    net::{self, RecvFlags},
};
use zerocopy::IntoBytes;

use crate::{
    Iotlb, WireError, channel,
    inbox::{Inbox, Message},
    msg::{Header, code},
};

/// Most messages that need a reply and have none yet, or whose reply is not taken yet. Beyond
/// it no such message is sent.
pub(crate) const MOST_REPLIES: u32 = 256;

/// How long a receive may take while the channel is left. A receive takes the bytes that are there;
/// it takes longer only if the front end receives on our end itself, into memory that never comes,
/// and that front end loses its own connection by it.
const LEAVE: Duration = Duration::from_secs(2);

/// Most messages that one system call sends.
const BATCH: usize = 64;

/// The back end's end of the channel that SET_BACKEND_REQ_FD brings.
///
/// Workers send on it without ever blocking; a thread of the connection's reads the replies. No
/// message begins while every ring is stopped (rule [D27]); the rest of one that was cut is still
/// sent.
///
/// [D27]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d27
#[derive(Debug)]
pub struct BackendChannel {
    stream: PeerFd,
    /// Whether the front end replies to messages that need a reply (REPLY_ACK).
    acks: bool,
    outbox: Mutex<Outbox>,
    received: Mutex<Received>,
    /// How many misses were sent and have probably not been followed by an update yet.
    open: AtomicU32,
    /// Every ring is stopped.
    silent: AtomicBool,
}

#[derive(Debug)]
struct Received {
    /// What was received and is no whole message yet; `None` once the channel is left to another
    /// process.
    inbox: Option<Inbox>,
    /// How many of the next replies to skip: they belong to requests of another process. `None`:
    /// all of them do.
    foreign: Option<u32>,
}

#[derive(Debug, Default)]
struct Outbox {
    /// The end of a message that found no room; less than one message.
    rest: Vec<u8>,
    /// What was sent with need_reply, in order, each with its number.
    pending: VecDeque<(Iotlb, u64)>,
    /// What was replied to and not taken yet, and whether the front end could do it.
    replied: Vec<(Iotlb, u64, bool)>,
    /// The front end is gone.
    broken: bool,
}

impl BackendChannel {
    /// A channel over `stream`; `acks`: whether REPLY_ACK was negotiated.
    ///
    /// # Errors
    /// It is no Unix stream. Other sockets may report something to read that a receive does not
    /// return, so that a wait on them would never sleep.
    pub fn new(stream: impl Into<PeerFd>, acks: bool) -> io::Result<BackendChannel> {
        BackendChannel::resumed(stream, acks, Some(0))
    }

    /// A channel that another process has used, with so many replies still to come. If that process
    /// has died, their number is unknown (`None`), and replies could not be matched to requests:
    /// this channel requests none.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn resumed(
        stream: impl Into<PeerFd>,
        acks: bool,
        foreign: Option<u32>,
    ) -> io::Result<BackendChannel> {
        let stream = stream.into();
        if !stream.is_unix_stream() {
            let why = "a channel must be a Unix stream";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(BackendChannel {
            stream,
            acks: acks && foreign.is_some(),
            outbox: Mutex::default(),
            received: Mutex::new(Received { inbox: Some(Inbox::new()), foreign }),
            open: AtomicU32::new(0),
            silent: AtomicBool::new(false),
        })
    }

    /// Sends IOTLB messages (misses and access failures, rule [D16]) without blocking, many with
    /// one call. A number requests a reply (rule [D9]; with REPLY_ACK only), which
    /// [`Handler::channel_reply`](crate::Handler::channel_reply) gets with that number. Returns
    /// how many were sent, from the first on: for the rest there is no room now, every ring is
    /// stopped, or the channel has ended.
    ///
    /// [D16]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d16
    /// [D9]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d9
    pub fn try_send(&self, messages: impl IntoIterator<Item = (Iotlb, Option<u64>)>) -> usize {
        let mut messages = messages.into_iter();
        let mut outbox = self.outbox.lock();
        let (mut total, mut bytes) = (0, Vec::new());
        loop {
            bytes.clear();
            let mut replies = outbox.pending.len() + outbox.replied.len();
            let fits = |(message, ack): (Iotlb, Option<u64>)| {
                let (wire, ack) = (message.emit()?, ack.filter(|_| self.acks));
                replies += usize::from(ack.is_some());
                if replies > MOST_REPLIES as usize {
                    return None;
                }
                let len = size_of_val(&wire);
                let header = Header::request(code::BACKEND_IOTLB_MSG, ack.is_some(), len);
                bytes.extend_from_slice(header.as_bytes());
                bytes.extend_from_slice(wire.as_bytes());
                Some((message, ack))
            };
            let batch: Vec<_> = messages.by_ref().map_while(fits).take(BATCH).collect();
            if batch.is_empty() {
                return total;
            }
            let sent = self.send(&mut outbox, &bytes, bytes.len() / batch.len());
            for &(message, ack) in &batch[..sent] {
                if let Some(number) = ack {
                    outbox.pending.push_back((message, number));
                }
                if let Iotlb::Miss { .. } = message {
                    self.open.fetch_add(1, Ordering::Relaxed);
                }
            }
            total += sent;
            if sent < BATCH {
                return total;
            }
        }
    }

    /// Notifies the front end that the configuration space has changed (BACKEND_CONFIG_CHANGE_MSG);
    /// false if there is no room, or no ring runs (rule [D27]): try again later; also if the
    /// channel has ended. Needs CONFIG.
    ///
    /// [D27]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d27
    pub fn config_changed(&self) -> bool {
        let header = Header::request(code::BACKEND_CONFIG_CHANGE_MSG, false, 0);
        self.send(&mut self.outbox.lock(), header.as_bytes(), Header::LEN) == 1
    }

    /// Sends messages of `each` bytes; returns how many are on their way. If only a part of the
    /// last one finds room, its rest goes before everything else.
    fn send(&self, outbox: &mut Outbox, bytes: &[u8], each: usize) -> usize {
        // Ordering: the lock of the outbox orders it.
        if self.silent.load(Ordering::Acquire) || !self.flush_rest(outbox) {
            return 0;
        }
        let sent = self.put(outbox, bytes);
        // If the front end is gone, nothing of it was sent.
        let begun = sent.div_ceil(each);
        outbox.rest.extend_from_slice(&bytes[sent..begun * each]);
        begun
    }

    /// Sends the rest of a cut message; returns whether all of it is sent.
    fn flush_rest(&self, outbox: &mut Outbox) -> bool {
        if !outbox.rest.is_empty() {
            let rest = std::mem::take(&mut outbox.rest);
            let sent = self.put(outbox, &rest);
            if !outbox.broken {
                outbox.rest.extend_from_slice(&rest[sent..]);
            }
        }
        outbox.rest.is_empty() && !outbox.broken
    }

    /// Sends bytes, as far as there is room.
    fn put(&self, outbox: &mut Outbox, bytes: &[u8]) -> usize {
        let sent = channel::put(&self.stream, bytes, &[]);
        sent.unwrap_or_else(|_| {
            self.end(outbox);
            0
        })
    }

    /// Whether a message was cut and waits for room.
    pub(crate) fn is_cut(&self) -> bool {
        !self.outbox.lock().rest.is_empty()
    }

    /// Sends the rest of the cut message, as far as there is room.
    pub(crate) fn finish(&self) {
        self.flush_rest(&mut self.outbox.lock());
    }

    /// Waits until something can be received, and stores the replies in it. False if another
    /// process has taken over the channel by then.
    ///
    /// # Errors
    /// The front end hung up, or sent a reply that no message asked for.
    pub(crate) fn read(&self) -> Result<bool, WireError> {
        retry_on_intr(|| poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], None))
            .map_err(|errno| channel::os("poll", errno))?;
        // The lock is held during the receive, which the front end can make arbitrarily long.
        let mut received = self.received.lock();
        let Received { inbox: Some(inbox), foreign } = &mut *received else { return Ok(false) };
        // No descriptors are expected here: a receive that does not ask for them closes them.
        match net::recv(&self.stream, inbox.room(), RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::CONNRESET) => {
                self.hang_up();
                return Err(WireError::HungUp { what: "the back end's channel" });
            }
            Ok((bytes, _)) => inbox.filled(bytes, Vec::new())?,
            Err(Errno::INTR) => {}
            // Polling for it again would never end.
            Err(Errno::AGAIN) => {
                let why = "a message on the back end's channel cannot be received";
                return Err(WireError::State { request: code::BACKEND_IOTLB_MSG, why });
            }
            Err(errno) => return Err(channel::os("recv", errno)),
        }
        while let Some(Message { header, payload, .. }) = inbox.take(true)? {
            let (got, wanted) = (header.request, code::BACKEND_IOTLB_MSG);
            if got != wanted {
                return Err(WireError::WrongReply { wanted, got });
            }
            let wrong =
                |_| WireError::Size { request: got, size: header.size, takes: "8".to_owned() };
            let word = <[u8; 8]>::try_from(&payload[..]).map_err(wrong)?;
            match foreign {
                Some(0) => {}
                Some(more) => {
                    *more -= 1;
                    continue;
                }
                None => continue,
            }
            let mut outbox = self.outbox.lock();
            let why = "a reply that no message asked for";
            let sent = outbox.pending.pop_front();
            let (message, number) = sent.ok_or(WireError::State { request: got, why })?;
            outbox.replied.push((message, number, u64::from_ne_bytes(word) == 0));
        }
        Ok(true)
    }

    /// Leaves the channel to another process: nothing more is received here. To be called when
    /// nothing more is sent.
    ///
    /// False if either end has sent part of a message, whose other part is here, or if the front
    /// end blocks our receive ([`LEAVE`]): the connection then ends with the process.
    pub(crate) fn leave(&self) -> bool {
        let Some(mut received) = self.received.try_lock_for(LEAVE) else { return false };
        received.inbox.take().is_some_and(|inbox| inbox.is_empty())
            && self.flush_rest(&mut self.outbox.lock())
    }

    /// How many replies are still to come on a channel that was [left](Self::leave); `None`:
    /// unknown, or more than one process requests.
    pub(crate) fn replies_owed(&self) -> Option<u32> {
        let foreign = self.received.lock().foreign?;
        let pending = self.outbox.lock().pending.len() as u32;
        foreign.checked_add(pending).filter(|replies_owed| *replies_owed <= MOST_REPLIES)
    }

    /// Whether it has ended: either end hung up, or a send failed.
    pub(crate) fn is_lost(&self) -> bool {
        self.outbox.lock().broken
    }

    /// Ends the channel, for both ends: nothing more is sent, and a reader sees the end of the
    /// stream.
    pub(crate) fn hang_up(&self) {
        self.end(&mut self.outbox.lock());
    }

    /// Drops a cut message; the reader sees the end of the stream.
    fn end(&self, outbox: &mut Outbox) {
        outbox.broken = true;
        outbox.rest.clear();
        // It fails only if it is closed already.
        let _ = net::shutdown(&self.stream, net::Shutdown::Both);
    }

    /// Whether misses were sent that have probably not been followed by an update yet.
    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed) != 0
    }

    /// The front end has sent so many updates.
    pub(crate) fn updates_sent(&self, updates: u32) {
        let less = |open: u32| (open != 0).then(|| open.saturating_sub(updates));
        let _ = self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Nothing came for a while: some misses never get an update.
    pub(crate) fn forget(&self) {
        let less = |open: u32| (open != 0).then_some(open / 2);
        let _ = self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Sets whether every ring is stopped (rule [D27]).
    ///
    /// [D27]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d27
    pub(crate) fn set_silent(&self, silent: bool) {
        // A sender has either sent already, or sees the flag.
        let _outbox = self.outbox.lock();
        // Ordering: the lock orders it.
        self.silent.store(silent, Ordering::Release);
    }
}

impl AsFd for BackendChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Reads a channel until it is dropped, which hangs up.
///
/// The front end may have our end of the channel too, and the kernel lets one receive run at a
/// time: a receive that never gets its memory holds up the others for as long as the front end
/// likes, and no signal ends that. So the thread that serves does not receive, and the connection's
/// [`Closer`](ringfence_run::Closer) waits for the thread that does.
#[derive(Debug)]
pub(crate) struct Replies {
    pub(crate) channel: Arc<BackendChannel>,
    /// Readable when there is something to take.
    news: Arc<OwnedFd>,
    end: Arc<Mutex<Option<WireError>>>,
    reader: Option<JoinHandle<()>>,
}

impl Replies {
    pub(crate) fn read(channel: Arc<BackendChannel>) -> io::Result<Replies> {
        let news = Arc::new(event::new()?);
        let end = Arc::new(Mutex::new(None));
        let (from, notify, over) = (Arc::clone(&channel), Arc::clone(&news), Arc::clone(&end));
        let reader = Builder::new().name("replies".into()).spawn(move || {
            loop {
                let read = from.read();
                let ended = !matches!(read, Ok(true));
                *over.lock() = read.err();
                event::signal(&notify);
                if ended {
                    return;
                }
            }
        })?;
        Ok(Replies { channel, news, end, reader: Some(reader) })
    }

    /// Calls `each` for every reply that has come: with its message and number, and whether the
    /// front end could do it.
    ///
    /// # Errors
    /// The front end hung up, or sent a reply that no message asked for.
    pub(crate) fn take(&self, mut each: impl FnMut(Iotlb, u64, bool)) -> Result<(), WireError> {
        // It is empty if an earlier call has taken the replies that it announced.
        let _ = rustix::io::read(&self.news, &mut [0; 8]);
        // Replies that came before the end are stored before the end is.
        let end = self.end.lock().take();
        // Not under the lock: `each` may send.
        let replied = std::mem::take(&mut self.channel.outbox.lock().replied);
        replied.into_iter().for_each(|(message, number, done)| each(message, number, done));
        end.map_or(Ok(()), Err)
    }
}

impl AsFd for Replies {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.news.as_fd()
    }
}

impl Drop for Replies {
    fn drop(&mut self) {
        self.channel.hang_up();
        if let Some(reader) = self.reader.take() {
            self.channel.stream.closer().run(move || drop(reader.join()));
        }
    }
}
