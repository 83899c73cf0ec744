//! The back end: serves one connection, and keeps the state of the rings consistent.

mod kept;
mod requests;
mod shutdown;

use crate::{
    Handler, HandlerError, Iotlb, IotlbWire, Offer, ProtocolFeatures, RingAddresses,
    SavedConnection, WireError,
    backend_channel::Replies,
    channel::Channel,
    inbox::{Inbox, Message},
    msg::{self, Header, Request},
};
use kept::Kept;
use ringfence_mem::{DirtyLog, Memory};
use ringfence_run::PeerFd;
use ringfence_sync::{
    clock::{Clock, MonotonicClock},
    wait::{Next, Notify, Wait},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
pub use shutdown::Shutdown;
use std::{
    mem,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};
use zerocopy::IntoBytes;

/// The features that the server itself offers.
const OWN_FEATURES: u64 = msg::F_PROTOCOL_FEATURES | msg::F_LOG_ALL;

/// Most bytes of replies that wait to be sent together.
const MOST_UNSENT: usize = 4096;

/// Time-out for a front end to finish a message that it began, or to take a reply.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How often to check whether descriptors that are slow to close are closed.
const LOOK: Duration = Duration::from_millis(10);

/// Why serving ended before the front end hung up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The peer's bytes are no valid message, or not valid now.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The device refused a request, and no acknowledgement could report that.
    #[error("{} was refused: {why}", msg::code::name(*request))]
    Refused {
        /// The request.
        request: u32,
        /// Why.
        #[source]
        why: HandlerError,
    },
    /// The connection's saved state cannot be restored here.
    #[error("the connection cannot go on here: {why}")]
    NotResumed {
        /// Why.
        #[source]
        why: HandlerError,
    },
}

/// The outcome of a request.
enum Outcome {
    /// No reply, unless an acknowledgement is wanted.
    Done,
    /// The request's own reply.
    Reply(Vec<u8>),
    /// The request's own reply, and a descriptor with it.
    ReplyFd(Vec<u8>, OwnedFd),
}

/// Why a request was not carried out.
enum Failure {
    /// A reply can report it, and the connection goes on.
    Refused(HandlerError),
    /// The device is in a state that no reply can report: the connection ends.
    Broken(HandlerError),
    /// It must not have been sent: the connection ends.
    Wire(WireError),
}

impl From<WireError> for Failure {
    fn from(error: WireError) -> Failure {
        Failure::Wire(error)
    }
}

impl From<HandlerError> for Failure {
    fn from(error: HandlerError) -> Failure {
        Failure::Refused(error)
    }
}

/// One ring, as the front end has described it (rule D28: stopped and disabled at first).
#[derive(Clone, Copy, Debug, Default)]
struct Ring {
    size: Option<u16>,
    addresses: Option<RingAddresses>,
    base: u32,
    running: bool,
    enabled: bool,
    /// It is to go on where a dead process has left it: the base is meaningless.
    base_unknown: bool,
}

/// Serves one connection: checks every message against the protocol and the state of the
/// connection, and calls the [`Handler`].
#[derive(Debug)]
pub struct Server<H> {
    channel: Channel,
    stopping: Arc<AtomicBool>,
    handler: H,
    /// `F_PROTOCOL_FEATURES` included, and without what is not implemented.
    offer: Offer,
    /// Negotiated.
    features: u64,
    /// Negotiated; `None` until SET_PROTOCOL_FEATURES.
    protocol: Option<ProtocolFeatures>,
    memory: Option<Arc<Memory>>,
    /// How many bytes of the front end's files may be mapped, and are.
    most_mapped: u64,
    mapped: Arc<AtomicU64>,
    rings: Vec<Ring>,
    /// SET_LOG_BASE's; used while F_LOG_ALL is negotiated.
    log: Option<Arc<DirtyLog>>,
    status: u8,
    inbox: Inbox,
    /// Replies that are not sent yet, because the next request is there already.
    replies: Vec<u8>,
    backend: Option<Replies>,
    /// The wait for the next message: polling, as long as that has paid off. A front end sends the
    /// updates for several misses one by one, and invalidations follow each other.
    wait: Wait,
    /// IOTLB messages that arrived together, and their outcomes: empty between uses, kept for their
    /// allocations.
    iotlb_batch: Vec<Iotlb>,
    outcomes: Vec<Result<(), HandlerError>>,
    /// What is kept for another process, if one is to be able to take over.
    kept: Option<Kept>,
    /// The saved state to restore first.
    saved: Option<SavedConnection>,
    /// The connection is left to another process.
    left_to_successor: bool,
    /// The saved state is being restored.
    resuming: bool,
    /// How many replies the front end owes to the previous process, if that is known.
    replies_owed: Option<u32>,
}

impl<H: Handler> Server<H> {
    /// A server for one connection. The [`Closer`](ringfence_run::Closer) of `stream` closes its
    /// socket, and those of the front end's descriptors that are slow to close.
    pub fn new(stream: impl Into<PeerFd>, handler: H) -> Server<H> {
        let mut offer = handler.offer();
        offer.protocol &= ProtocolFeatures::KNOWN;
        let log = offer.protocol.contains(ProtocolFeatures::LOG_SHMFD);
        let own = msg::F_PROTOCOL_FEATURES | if log { msg::F_LOG_ALL } else { 0 };
        offer.features = offer.features & !OWN_FEATURES | own;
        Server {
            channel: Channel::new(stream.into(), TIMEOUT),
            stopping: Arc::new(AtomicBool::new(false)),
            offer,
            features: 0,
            protocol: None,
            memory: None,
            most_mapped: u64::MAX,
            mapped: Arc::default(),
            rings: vec![Ring::default(); offer.queues.into()],
            log: None,
            status: 0,
            inbox: Inbox::new(),
            replies: Vec::new(),
            backend: None,
            wait: Wait::new(Notify::Adaptive),
            iotlb_batch: Vec::new(),
            outcomes: Vec::new(),
            kept: None,
            saved: None,
            left_to_successor: false,
            resuming: false,
            replies_owed: None,
            handler,
        }
    }

    /// Sets the time-out for the front end to finish a message that it began, or to take a reply
    /// (10 s by default). Silence between messages is not limited.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.channel.timeout = timeout;
    }

    /// Limits how many bytes of the front end's files are mapped, its memory and its log (2^64 - 1
    /// by default): what exceeds that is refused. The limit is on address space, which runs out
    /// before memory does: a sparse file has any size. While a table replaces another, and as long
    /// as a ring still uses the old one, both are mapped.
    pub fn set_most_mapped(&mut self, bytes: u64) {
        self.most_mapped = bytes;
    }

    /// A handle that ends [`serve`](Self::serve). One that was made before
    /// [`set_keeper`](Self::set_keeper) cannot [leave](Shutdown::leave) the connection.
    pub fn shutdown_handle(&self) -> Shutdown {
        let stream = Arc::clone(&self.channel.stream);
        let (stopping, mapped) = (Arc::clone(&self.stopping), Arc::clone(&self.mapped));
        let leave = self.kept.as_ref().map(|kept| Arc::clone(&kept.leave));
        Shutdown { stopping, stream, mapped, leave }
    }

    /// The device.
    pub fn handler(&mut self) -> &mut H {
        &mut self.handler
    }

    /// The device, at the end.
    pub fn into_handler(self) -> H {
        self.handler
    }

    /// Serves until the front end hangs up or [`Shutdown`] is used (`Ok`), or the connection must
    /// end for another reason. When it returns, all rings are stopped, and the connection is closed
    /// or [left](Shutdown::leave) to another process. A request that has no reply is possibly
    /// not carried out if the front end hangs up behind it while its
    /// [`Closer`](ringfence_run::Closer) is full.
    ///
    /// # Errors
    /// See [`ServeError`].
    pub fn serve(&mut self) -> Result<(), ServeError> {
        self.handler.connected(self.shutdown_handle());
        let mut resumed = self.do_again().map_err(|failure| match failure {
            Failure::Wire(error) => error.into(),
            Failure::Refused(why) | Failure::Broken(why) => ServeError::NotResumed { why },
        });
        let result = loop {
            match mem::replace(&mut resumed, Ok(())).and_then(|()| self.step()) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                // Cut off in the middle of a message, by our own shutdown.
                // Ordering: the flag was set before the shutdown that has ended the reading.
                Err(_) if self.stopping.load(Ordering::Acquire) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        // Replies to what was carried out, if the front end still reads.
        let _ = self.flush();
        self.left_to_successor &= self.handler.can_be_resumed();
        match self.left_to_successor {
            true => self.handler.leaves(),
            false => self.channel.close(),
        }
        let ran: Vec<bool> = self.rings.iter().map(|ring| ring.running).collect();
        for ring in 0..self.rings.len() {
            // No process can go on from an unknown ring state. If the connection ends in any case,
            // there is no process to report it to.
            self.left_to_successor &= self.stop(ring).is_ok();
        }
        if self.backend.as_ref().is_some_and(|own| own.channel.is_lost()) {
            self.lose_channel();
        }
        self.left_to_successor =
            self.left_to_successor && self.backend.as_ref().is_none_or(|own| own.channel.leave());
        match self.left_to_successor {
            true => {
                let owed = self.backend.as_ref().map_or(Some(0), |own| own.channel.replies_owed());
                self.keep_stopped(&ran, owed);
                self.channel.left = true;
                // Leaked on purpose: dropping it would shut the channel down, which the next
                // process uses. Its reader receives nothing more, and ends with the process.
                if let Some(backend) = self.backend.take() {
                    mem::forget(backend);
                }
            }
            false => {
                self.channel.close();
                self.kept.iter_mut().for_each(|kept| kept.keeper.keep(None));
            }
        }
        if self.log.take().is_some() {
            let _ = self.handler.set_log(None);
        }
        self.backend = None;
        self.handler.disconnected();
        result
    }

    /// Serves one request; `false` if the front end hung up instead.
    fn step(&mut self) -> Result<bool, ServeError> {
        if self.inbox.is_empty() {
            self.settle();
            if !self.wait()? {
                self.left_to_successor = true;
                return Ok(false);
            }
            self.kept.iter_mut().for_each(|kept| kept.keeper.unsettled());
        }
        if !self.await_closer() {
            return Ok(false);
        }
        if !self.channel.arrive(&mut self.inbox, false, None)? {
            return Ok(false);
        }
        if self.serve_iotlb() {
            self.flush_unless_more()?;
            return Ok(true);
        }
        self.handler.settled();
        let Some(Message { header, payload, fds }) = self.inbox.take(false)? else {
            return Ok(true);
        };
        let code = header.request;
        let request = Request::parse(code, &payload)?;
        if !request.takes_fds(fds.len()) {
            let (count, takes) = (fds.len(), request.fds().to_string());
            return Err(WireError::Fds { request: code, count, takes }.into());
        }
        self.permit(&request)?;
        let wants_reply = header.needs_reply() && !request.has_reply();
        let acks = self.has(ProtocolFeatures::REPLY_ACK);
        let outcome = self.carry_out_kept(request, fds);
        // As negotiated when the request was sent, or by the request itself: User-Mode Linux wants
        // the very request that negotiates REPLY_ACK acknowledged.
        let ack = wants_reply && (acks || self.has(ProtocolFeatures::REPLY_ACK));
        match outcome {
            Ok(Outcome::Reply(payload)) => self.reply(code, &payload),
            Ok(Outcome::ReplyFd(payload, fd)) => {
                self.flush()?;
                self.keep_changes();
                let header = Header::reply(code, payload.len());
                self.channel.send(header, &payload, &[fd.as_fd()])?;
            }
            Ok(Outcome::Done) if ack => self.reply(code, &0u64.to_ne_bytes()),
            Ok(Outcome::Done) => {}
            Err(Failure::Refused(why)) if ack => {
                self.handler.refused(code, &why);
                self.reply(code, &1u64.to_ne_bytes());
            }
            Err(Failure::Refused(why) | Failure::Broken(why)) => {
                return Err(ServeError::Refused { request: code, why });
            }
            Err(Failure::Wire(error)) => return Err(error.into()),
        }
        self.flush_unless_more()?;
        Ok(true)
    }

    /// Carries out the IOTLB messages that come next, all that are there together; false if
    /// something else comes next. Their replies carry the outcomes: refusing one is no reason to
    /// hang up (rules D13, D14).
    fn serve_iotlb(&mut self) -> bool {
        let code = msg::code::IOTLB_MSG;
        let mut batch = mem::take(&mut self.iotlb_batch);
        let mut outcomes = mem::take(&mut self.outcomes);
        let mut unreadable = None;
        while unreadable.is_none()
            && let Some(wire) = self.inbox.take_plain::<IotlbWire>(code, false)
        {
            match self.read_iotlb(&wire) {
                Ok(message) => batch.push(message),
                Err(why) => unreadable = Some(why),
            }
        }
        if !batch.is_empty() {
            let update = |message: &&Iotlb| matches!(message, Iotlb::Update { .. });
            if let Some(backend) = &self.backend {
                backend.channel.updates_sent(batch.iter().filter(update).count() as u32);
            }
            self.handler.iotlb_all(&batch, &mut outcomes);
            let silent = || Err(HandlerError::new("the device did not report an outcome"));
            outcomes.resize_with(batch.len(), silent);
        }
        outcomes.extend(unreadable.map(Err));
        let any = !outcomes.is_empty();
        for outcome in outcomes.drain(..) {
            if let Err(why) = &outcome {
                self.handler.refused(code, why);
            }
            self.reply(code, &u64::from(outcome.is_err()).to_ne_bytes());
        }
        batch.clear();
        (self.iotlb_batch, self.outcomes) = (batch, outcomes);
        any
    }

    /// Sends the replies, unless an IOTLB message is there whose reply can go with them. Other
    /// requests may take long.
    fn flush_unless_more(&mut self) -> Result<(), WireError> {
        let next = self.inbox.next_code();
        match next == Some(msg::code::IOTLB_MSG) && self.replies.len() <= MOST_UNSENT {
            true => Ok(()),
            false => self.flush(),
        }
    }

    /// Waits while too many of the front end's descriptors are being closed; false if the
    /// connection is over.
    fn await_closer(&self) -> bool {
        while self.channel.stream.closer().is_full() {
            if self.shutdown_handle().is_over() {
                return false;
            }
            thread::sleep(LOOK);
        }
        true
    }

    /// Waits until the front end sends something on the main channel; takes its replies on the back
    /// end's channel meanwhile. False if the connection is to be left instead.
    fn wait(&mut self) -> Result<bool, ServeError> {
        let (mut looked, mut settled) = (false, false);
        loop {
            let backend = self.backend.as_ref();
            let leave = self.kept.as_ref().map(|kept| &*kept.leave);
            // Without either, the receive itself waits.
            if backend.is_none() && leave.is_none() {
                self.handler.settled();
                return Ok(true);
            }
            let spins = self.wait.step(&MonotonicClock, || None) == Next::Look;
            let more = spins && backend.is_some_and(|backend| backend.channel.is_open());
            if !more && !mem::replace(&mut settled, true) {
                self.handler.settled();
            }
            if spins {
                looked = true;
            } else if mem::take(&mut looked)
                && let Some(backend) = backend
            {
                // Polled in vain: some misses never get an update.
                backend.channel.forget();
            }
            // Only its reader polls the channel, unless a message is cut.
            let cut = backend.map(|backend| &backend.channel).filter(|channel| channel.is_cut());
            let zero = Timespec::default();
            let main = || PollFd::new(&self.channel, PollFlags::IN);
            let nothing = || PollFd::new(&self.channel, PollFlags::empty());
            let mut fds = [
                main(),
                backend.map_or_else(nothing, |backend| PollFd::new(backend, PollFlags::IN)),
                leave.map_or_else(nothing, |leave| PollFd::new(leave, PollFlags::IN)),
                cut.map_or_else(nothing, |channel| PollFd::new(&**channel, PollFlags::OUT)),
            ];
            let count = if cut.is_some() { 4 } else { 2 + usize::from(leave.is_some()) };
            match poll(&mut fds[..count], spins.then_some(&zero)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => {
                    return Err(WireError::Os { what: "poll", source: errno.into() }.into());
                }
            }
            let [main, own, leave, room] = fds.map(|fd| !fd.revents().is_empty());
            if leave && self.kept.is_some() {
                return Ok(false);
            }
            if let Some(channel) = cut.filter(|_| room) {
                channel.finish();
            }
            if let Some(backend) = backend.filter(|_| own) {
                let handler = &mut self.handler;
                match backend.take(|message, number, done| {
                    handler.channel_reply(message, number, done);
                }) {
                    Ok(()) => {}
                    Err(why @ WireError::HungUp { .. }) => {
                        self.lose_channel();
                        self.handler.channel_lost(&why);
                    }
                    Err(error) => return Err(error.into()),
                }
                settled = false;
            }
            if main {
                self.wait.found(|| MonotonicClock.now_ns());
                return Ok(true);
            }
        }
    }

    fn reply(&mut self, request: u32, payload: &[u8]) {
        let header = Header::reply(request, payload.len());
        self.replies.extend_from_slice(header.as_bytes());
        self.replies.extend_from_slice(payload);
    }

    /// Sends the replies that are waiting.
    fn flush(&mut self) -> Result<(), WireError> {
        if self.replies.is_empty() {
            return Ok(());
        }
        self.keep_changes();
        let replies = mem::take(&mut self.replies);
        self.channel.send_bytes(0, &replies, &[])?;
        self.replies = replies;
        self.replies.clear();
        Ok(())
    }

    /// Whether a protocol feature was negotiated.
    fn has(&self, feature: ProtocolFeatures) -> bool {
        self.protocol.unwrap_or_default().contains(feature)
    }
}
