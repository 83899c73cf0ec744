//! Messages to the back end's IOTLB.

use std::sync::Arc;

use super::{Frontend, FrontendError, Result, link::Link};
use crate::{
    Iotlb, IotlbWire,
    msg::{self, Request, code},
};

/// How many messages are under way at once: what both sockets hold, requests and answers, however
/// the kernel accounts for small ones, so that neither end ever waits for the other to read.
const WINDOW: usize = 64;

/// Sends IOTLB messages on a [`Frontend`]'s connection: from other threads too, also while the
/// front end itself waits for an answer, as for a ring to stop.
#[derive(Clone, Debug)]
pub struct IotlbHandle {
    link: Arc<Link>,
}

impl IotlbHandle {
    /// Updates and invalidations, in order, many under way at once; `Ok` once the back end has
    /// carried all of them out. Needs ACCESS_PLATFORM (rule D1). An update must lie within memory
    /// that was announced (rule D5).
    ///
    /// Every IOTLB message has an answer (rule D13). Where REPLY_ACK was negotiated it is asked for
    /// as well: some back ends give none otherwise.
    ///
    /// # Errors
    /// See [`FrontendError`]. [`FrontendError::Refused`]: those after the one that was refused may
    /// have been carried out, or not.
    pub fn send(&self, messages: &[Iotlb]) -> Result<()> {
        let request = code::IOTLB_MSG;
        let (wires, ack) = self.check(messages)?;
        for window in wires.chunks(WINDOW) {
            let requests: Vec<Request> = window.iter().copied().map(Request::Iotlb).collect();
            let count = requests.len() as u64;
            let first = self.link.send(&requests, ack, &[], count)?;
            let mut refused = None;
            self.link.collect(first, count, request, |message| {
                match self.link.word(message)? {
                    0 => {}
                    code => refused = refused.or(Some(code)),
                }
                Ok(())
            })?;
            if let Some(code) = refused {
                return Err(FrontendError::Refused { request, code });
            }
        }
        Ok(())
    }

    /// As [`send`](Self::send), without waiting: the messages go with the next [`flush`](Self::flush)
    /// (or before the next request of another kind), all in one piece. Returns a ticket, that of the
    /// last: the number of messages that were ever posted on this connection.
    ///
    /// It waits only while more than 64 KiB found no room in the socket yet.
    ///
    /// # Errors
    /// See [`FrontendError`]. Nothing was posted.
    pub fn post(&self, messages: &[Iotlb]) -> Result<u64> {
        let (wires, ack) = self.check(messages)?;
        self.link.post(&wires, ack)
    }

    /// Whether the back end has answered the message of that ticket, and so all before it: an
    /// invalidation is in force.
    #[inline]
    pub fn is_done(&self, ticket: u64) -> bool {
        self.link.done() >= ticket
    }

    /// Sends what was posted, as far as there is room, and takes the answers that have come, without
    /// waiting. To be called again and again while something is under way.
    ///
    /// # Errors
    /// See [`FrontendError`]. [`FrontendError::Refused`]: a message that was posted; told once.
    pub fn flush(&self) -> Result<()> {
        self.link.flush()
    }

    /// Waits until all that was posted is answered.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn settle(&self) -> Result<()> {
        self.link.settle()
    }

    /// The messages as they go over the wire, and whether their answers are asked for.
    fn check(&self, messages: &[Iotlb]) -> Result<(Vec<IotlbWire>, bool)> {
        let request = code::IOTLB_MSG;
        let mut wires = Vec::with_capacity(messages.len());
        let state = self.link.state();
        if !state.translated {
            let feature = "ACCESS_PLATFORM";
            return Err(FrontendError::NotNegotiated { request, feature });
        }
        for message in messages {
            if let Iotlb::Update { first, last, user_addr, .. } = *message {
                let end = last.checked_sub(first).and_then(|more| user_addr.checked_add(more));
                if !end.is_some_and(|end| msg::within(&state.regions, user_addr, end)) {
                    let why = "the update leads outside of the announced memory";
                    return Err(FrontendError::Argument { request, why });
                }
            }
            for part in message.halves() {
                let wire = part.emit().filter(|wire| wire.parse().is_ok());
                let why = "the range is empty or wraps";
                wires.push(wire.ok_or(FrontendError::Argument { request, why })?);
            }
        }
        Ok((wires, state.acks))
    }
}

impl Frontend {
    /// What sends IOTLB messages from other threads.
    pub fn iotlb_handle(&self) -> IotlbHandle {
        IotlbHandle { link: Arc::clone(&self.link) }
    }

    /// IOTLB_MSG: an update or an invalidation; `Ok` once the back end has carried it out. See
    /// [`IotlbHandle::send`], which takes many.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn iotlb(&mut self, message: &Iotlb) -> Result<()> {
        self.iotlb_handle().send(std::slice::from_ref(message))
    }
}
