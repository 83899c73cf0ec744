//! Messages to the back end's IOTLB.

use std::sync::Arc;

use super::{Frontend, FrontendError, Result, link::Link};
use crate::{
    Iotlb, IotlbWire,
    msg::{self, Request, code},
};

/// How many messages are in flight at once: few enough that both sockets hold them and their
/// answers, however the kernel accounts for small ones, so that neither end ever waits for the
/// other to read.
const WINDOW: usize = 64;

/// Sends IOTLB messages on a [`Frontend`]'s connection, from any thread, also while the front end
/// itself waits for an answer, such as for a ring to stop.
#[derive(Clone, Debug)]
pub struct IotlbHandle {
    link: Arc<Link>,
}

impl IotlbHandle {
    /// Sends updates and invalidations, in order, many in flight at once; `Ok` once the back end
    /// has carried all of them out. Needs ACCESS_PLATFORM (rule D1). An update must lie within
    /// memory that was announced (rule D5).
    ///
    /// Every IOTLB message has an answer (rule D13). Where REPLY_ACK was negotiated the message
    /// asks for it as well: some back ends send none otherwise.
    ///
    /// # Errors
    /// See [`FrontendError`]. After [`FrontendError::Refused`], the messages behind the refused one
    /// may or may not have been carried out.
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

    /// As [`send`](Self::send), without waiting: the messages go with the next
    /// [`flush`](Self::flush) (or before the next request of another kind), all in one piece.
    /// Returns the last one's ticket: how many messages were ever posted on this connection.
    ///
    /// It waits only while more than 64 KiB are unsent because the socket has no room.
    ///
    /// # Errors
    /// See [`FrontendError`]. Nothing was posted.
    pub fn post(&self, messages: &[Iotlb]) -> Result<u64> {
        let (wires, ack) = self.check(messages)?;
        self.link.post(&wires, ack)
    }

    /// Whether the back end has answered the message with that ticket, and so all before it. An
    /// invalidation is then in effect.
    #[inline]
    pub fn is_done(&self, ticket: u64) -> bool {
        self.link.done() >= ticket
    }

    /// Sends what was posted, as far as there is room, and takes the answers that have come,
    /// without waiting. Call it repeatedly while messages are in flight.
    ///
    /// # Errors
    /// See [`FrontendError`]. [`FrontendError::Refused`]: of a posted message; reported once.
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

    /// The messages in wire format, and whether they ask for answers.
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
    /// A handle that sends IOTLB messages from other threads.
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
