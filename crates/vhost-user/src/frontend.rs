//! The front end: sends requests and waits for their replies.

mod link;

use crate::{
    Iotlb, IotlbWire, ProtocolFeatures, RingAddresses, WireError,
    inbox::Message,
    msg::{self, ConfigWrite, Inflight, Request, code},
};
use link::Link;
use ringfence_mem::Region;
use ringfence_run::PeerFd;
use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

/// Why a request did not succeed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrontendError {
    /// The connection failed or the back end sent no valid reply; every later request fails too.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The back end refused the request.
    #[error("the back end refused {} with {code}", code::name(*request))]
    Refused {
        /// The request.
        request: u32,
        /// The non-zero reply.
        code: u64,
    },
    /// The request needs a feature that was not negotiated; nothing was sent.
    #[error("{} needs {feature}, which was not negotiated", code::name(*request))]
    NotNegotiated {
        /// The request.
        request: u32,
        /// Which feature.
        feature: &'static str,
    },
    /// An argument that cannot be sent; nothing was.
    #[error("{}: {why}", code::name(*request))]
    Argument {
        /// The request.
        request: u32,
        /// What is wrong.
        why: &'static str,
    },
    /// An earlier request ended the connection.
    #[error("the connection has ended: make a new one")]
    Closed,
}

type Result<T> = std::result::Result<T, FrontendError>;

/// One connection to a back end.
///
/// Requests block until they are replied to or the time-out is over. The protocol has replies to
/// some requests only; with REPLY_ACK all are acknowledged, so that a request that returned `Ok`
/// was carried out. Without it, the others return once they are sent, but for SET_VRING_ENABLE.
#[derive(Debug)]
pub struct Frontend {
    link: Arc<Link>,
}

impl Frontend {
    /// A front end on a connected socket, which the [`Closer`](ringfence_run::Closer) of `stream`
    /// closes; every reply must come within `timeout`.
    pub fn new(stream: impl Into<PeerFd>, timeout: Duration) -> Frontend {
        Frontend { link: Arc::new(Link::new(stream.into(), timeout)) }
    }

    /// The usual beginning: SET_OWNER, features and protocol features. Negotiates what both ends
    /// have of `features` and `protocol`, and returns the virtio features; REPLY_ACK is always
    /// negotiated if the back end offers it. Logging is not switched on yet (see
    /// [`Request::SetLogBase`]).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn negotiate(&mut self, features: u64, protocol: ProtocolFeatures) -> Result<u64> {
        self.set_owner()?;
        let offered = self.features()?;
        if offered & msg::F_PROTOCOL_FEATURES != 0 {
            let wanted = (protocol | ProtocolFeatures::REPLY_ACK) & ProtocolFeatures::KNOWN;
            let common = self.protocol_features()? & wanted;
            self.set_protocol_features(common)?;
        }
        let common = offered & features & !(msg::F_PROTOCOL_FEATURES | msg::F_LOG_ALL);
        self.set_features(common | offered & msg::F_PROTOCOL_FEATURES)?;
        Ok(common)
    }

    /// The protocol features that were negotiated.
    pub fn protocol(&self) -> ProtocolFeatures {
        self.link.state.lock().protocol
    }

    /// GET_FEATURES: what the back end offers, [`F_PROTOCOL_FEATURES`](crate::F_PROTOCOL_FEATURES)
    /// included.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn features(&mut self) -> Result<u64> {
        self.word(Request::GetFeatures, "features")
    }

    /// SET_FEATURES. Without [`F_PROTOCOL_FEATURES`](crate::F_PROTOCOL_FEATURES) among them, all
    /// rings are enabled at once (rule [D28]).
    ///
    /// # Errors
    /// See [`FrontendError`].
    ///
    /// [D28]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d28
    pub fn set_features(&mut self, features: u64) -> Result<()> {
        self.make(Request::SetFeatures(features), &[])
    }

    /// GET_PROTOCOL_FEATURES. Only if the back end offers
    /// [`F_PROTOCOL_FEATURES`](crate::F_PROTOCOL_FEATURES).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn protocol_features(&mut self) -> Result<ProtocolFeatures> {
        let features = self.word(Request::GetProtocolFeatures, "protocol features")?;
        Ok(ProtocolFeatures::from_bits_retain(features))
    }

    /// SET_PROTOCOL_FEATURES.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_protocol_features(&mut self, features: ProtocolFeatures) -> Result<()> {
        self.make(Request::SetProtocolFeatures(features), &[])
    }

    /// SET_OWNER.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_owner(&mut self) -> Result<()> {
        self.make(Request::SetOwner, &[])
    }

    /// GET_QUEUE_NUM: how many rings the device has. Needs MQ.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn queue_num(&mut self) -> Result<u16> {
        self.word(Request::GetQueueNum, "queues")
    }

    /// SET_MEM_TABLE: 1 to 8 regions, each with its file.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_mem_table(&mut self, regions: &[(Region, BorrowedFd<'_>)]) -> Result<()> {
        if regions.is_empty() || regions.len() > msg::MAX_TABLE_REGIONS {
            let why = "a table has 1 to 8 regions";
            return Err(FrontendError::Argument { request: code::SET_MEM_TABLE, why });
        }
        let (table, fds): (Vec<_>, Vec<_>) = regions.iter().copied().unzip();
        self.make(Request::SetMemTable(table), &fds)
    }

    /// GET_MAX_MEM_SLOTS: how many regions the back end takes. Needs CONFIGURE_MEM_SLOTS.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn max_mem_slots(&mut self) -> Result<u64> {
        self.word(Request::GetMaxMemSlots, "regions")
    }

    /// SET_BACKEND_REQ_FD: the channel on which the back end makes requests; `channel` is the
    /// back end's side of it. Needs BACKEND_REQ (rule [D11]).
    ///
    /// # Errors
    /// See [`FrontendError`].
    ///
    /// [D11]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d11
    pub fn set_backend_channel(&mut self, channel: BorrowedFd<'_>) -> Result<()> {
        self.make(Request::SetBackendReqFd, &[channel])
    }

    /// GET_CONFIG: fills `out` (1 to 256 bytes) from the configuration space. Needs CONFIG.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<()> {
        let request = code::GET_CONFIG;
        let size = config_size(request, offset, out)?;
        let message = self.exchange(&Request::GetConfig { offset, size }, false, &[])?;
        let payload = self.link.plain(message)?;
        // Or a configuration without bytes: a head that gives 0 as the size.
        let is_head = payload.len() == msg::CONFIG_HEAD;
        if payload.is_empty() || is_head && payload[4..8] == [0; 4] {
            return Err(FrontendError::Refused { request, code: 1 });
        }
        match Request::parse(request, &payload) {
            Ok(Request::GetConfig { offset: at, size: bytes }) if (at, bytes) == (offset, size) => {
                out.copy_from_slice(&payload[msg::CONFIG_HEAD..]);
                Ok(())
            }
            Ok(_) => {
                let takes = (msg::CONFIG_HEAD + out.len()).to_string();
                let size = payload.len() as u32;
                Err(self.link.fail(WireError::Size { request, size, takes }))
            }
            Err(error) => Err(self.link.fail(error)),
        }
    }

    /// SET_CONFIG, on behalf of the driver: 1 to 256 bytes. Needs CONFIG.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_config(&mut self, offset: u32, data: &[u8]) -> Result<()> {
        config_size(code::SET_CONFIG, offset, data)?;
        let (why, data) = (ConfigWrite::Driver, data.to_vec());
        self.make(Request::SetConfig { offset, why, data }, &[])
    }

    /// RESET_DEVICE: stops and disables all rings, unsets the features. Needs RESET_DEVICE.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn reset_device(&mut self) -> Result<()> {
        self.make(Request::ResetDevice, &[])
    }

    /// SET_STATUS: the driver's device status; 0 resets the device. Needs STATUS.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_status(&mut self, status: u8) -> Result<()> {
        self.make(Request::SetStatus(status), &[])
    }

    /// GET_STATUS. Needs STATUS.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn status(&mut self) -> Result<u8> {
        self.word(Request::GetStatus, "status")
    }

    /// GET_INFLIGHT_FD: has the back end allocate an in-flight region for so many queues of so many
    /// descriptors; `None` if it cannot. Keep the file as long as the rings. Needs INFLIGHT_SHMFD,
    /// and comes after SET_FEATURES, which determines the rings' format.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn inflight(&mut self, queues: u16, size: u16) -> Result<Option<(Inflight, PeerFd)>> {
        let wanted = Inflight { queues, size, ..Inflight::default() };
        let mut message = self.exchange(&Request::GetInflight(wanted), false, &[])?;
        let place = msg::parse_inflight(&message.payload).map_err(|error| self.link.fail(error))?;
        match (message.fds.pop(), place.len, message.fds.len()) {
            (Some(fd), 1.., 0) => Ok(Some((place, fd))),
            (None, 0, 0) => Ok(None),
            (fd, ..) => {
                let count = message.fds.len() + usize::from(fd.is_some());
                let takes = "1, or none without a region".to_owned();
                Err(self.link.fail(WireError::Fds { request: code::GET_INFLIGHT_FD, count, takes }))
            }
        }
    }

    /// SEND_RARP: a guest with this address is here now. Needs RARP.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn send_rarp(&mut self, mac: [u8; 6]) -> Result<()> {
        self.make(Request::SendRarp(mac), &[])
    }

    /// Makes a request whose reply, if it has one or REPLY_ACK was negotiated, is whether it was
    /// done; `fds` are its descriptors, as many as [`Request::fds`] returns.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn request(&mut self, request: Request, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let refuse = |why| Err(FrontendError::Argument { request: request.code(), why });
        if request.has_reply() && !matches!(request, Request::SetLogBase { .. } | Request::Iotlb(_))
        {
            return refuse("its reply is more than whether it was done");
        }
        if !request.takes_fds(fds.len()) {
            return refuse("another number of descriptors goes with it");
        }
        self.make(request, fds)
    }

    /// Makes a request, as [`request`](Self::request).
    fn make(&self, request: Request, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let acks = self.protocol().contains(ProtocolFeatures::REPLY_ACK);
        if !acks && !request.has_reply() {
            self.need(&request)?;
            self.link.send(&request, fds)?;
            if matches!(request, Request::SetVringEnable { .. }) {
                // Requests are carried out in their order, and this one has a reply.
                self.word::<u64>(Request::GetFeatures, "features")?;
            }
        } else {
            let ack = acks && (!request.has_reply() || matches!(request, Request::Iotlb(_)));
            match self.link.word(self.exchange(&request, ack, fds)?)? {
                0 => {}
                code => return Err(FrontendError::Refused { request: request.code(), code }),
            }
        }
        let mut state = self.link.state.lock();
        match request {
            Request::SetFeatures(features) => state.features = features,
            Request::SetProtocolFeatures(features) => state.protocol = features,
            Request::SetMemTable(regions) => state.regions = regions,
            Request::AddMemReg(region) => state.regions.push(region),
            Request::RemMemReg(gone) => state.regions.retain(|region| region.gpa != gone.gpa),
            _ => {}
        }
        Ok(())
    }

    /// SET_VRING_NUM: the ring's size.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_num(&mut self, ring: u16, size: u16) -> Result<()> {
        self.make(Request::SetVringNum { ring: ring.into(), num: size.into() }, &[])
    }

    /// SET_VRING_ADDR: where the ring's areas are, in addresses of this process, or in IOVAs if
    /// ACCESS_PLATFORM was negotiated (rule [D2]).
    ///
    /// # Errors
    /// See [`FrontendError`].
    ///
    /// [D2]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d2
    pub fn set_vring_addr(&mut self, ring: u16, addresses: &RingAddresses) -> Result<()> {
        self.make(Request::SetVringAddr { ring: ring.into(), addresses: *addresses }, &[])
    }

    /// SET_VRING_BASE: where the back end begins in the ring (see
    /// [`RingSetup::base`](crate::RingSetup::base)).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_base(&mut self, ring: u16, base: u32) -> Result<()> {
        self.make(Request::SetVringBase { ring: ring.into(), base }, &[])
    }

    /// GET_VRING_BASE: stops the ring; returns its position (see
    /// [`RingSetup::base`](crate::RingSetup::base)).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn get_vring_base(&mut self, ring: u16) -> Result<u32> {
        let message = self.exchange(&Request::GetVringBase { ring: ring.into() }, false, &[])?;
        let payload = self.link.plain(message)?;
        let [same, base] =
            msg::parse_vring_base(&payload).map_err(|error| self.link.fail(error))?;
        if same != u32::from(ring) {
            let (request, value) = (code::GET_VRING_BASE, same.into());
            let must = ring.to_string();
            return Err(self.link.fail(WireError::Value { request, field: "ring", value, must }));
        }
        Ok(base)
    }

    /// SET_VRING_KICK: starts the ring. `None`: the back end polls.
    ///
    /// Make event descriptors non-blocking: a careful back end does so otherwise, and as the two
    /// processes share the open file, the flag then changes for this one too.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_kick(&mut self, ring: u16, kick: Option<BorrowedFd<'_>>) -> Result<()> {
        let (ring, fd) = (short(code::SET_VRING_KICK, ring)?, kick.is_some());
        self.make(Request::SetVringKick { ring, fd }, kick.as_slice())
    }

    /// SET_VRING_CALL: the descriptor with which the back end notifies the driver. `None`: the
    /// driver polls.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_call(&mut self, ring: u16, call: Option<BorrowedFd<'_>>) -> Result<()> {
        let (ring, fd) = (short(code::SET_VRING_CALL, ring)?, call.is_some());
        self.make(Request::SetVringCall { ring, fd }, call.as_slice())
    }

    /// SET_VRING_ENABLE; returns when the back end has carried it out, with REPLY_ACK or without:
    /// there are back ends that lose a kick for a ring that is not enabled yet. Only with
    /// [`F_PROTOCOL_FEATURES`](crate::F_PROTOCOL_FEATURES); without it, rings are enabled from the
    /// start (rule [D28]).
    ///
    /// # Errors
    /// See [`FrontendError`].
    ///
    /// [D28]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d28
    pub fn set_vring_enable(&mut self, ring: u16, enabled: bool) -> Result<()> {
        if self.link.state.lock().features & msg::F_PROTOCOL_FEATURES == 0 {
            let (request, feature) = (code::SET_VRING_ENABLE, "PROTOCOL_FEATURES");
            return Err(FrontendError::NotNegotiated { request, feature });
        }
        self.make(Request::SetVringEnable { ring: ring.into(), enabled }, &[])
    }

    /// IOTLB_MSG: an update or an invalidation; `Ok` once the back end has carried it out. Needs
    /// ACCESS_PLATFORM (rule [D1]). An update must lie within memory that was announced (rule
    /// [D5]). [`IotlbHandle::post`] sends many at once.
    ///
    /// Every IOTLB message has a reply (rule [D13]). Where REPLY_ACK was negotiated the message
    /// sets need_reply as well: some back ends send none otherwise.
    ///
    /// # Errors
    /// See [`FrontendError`].
    ///
    /// [D1]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d1
    /// [D5]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d5
    /// [D13]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d13
    pub fn iotlb(&mut self, message: &Iotlb) -> Result<()> {
        let (wires, _) = self.iotlb_handle().check(std::slice::from_ref(message))?;
        wires.into_iter().try_for_each(|wire| self.make(Request::Iotlb(wire), &[]))
    }

    /// A handle that sends IOTLB messages from other threads.
    pub fn iotlb_handle(&self) -> IotlbHandle {
        IotlbHandle { link: Arc::clone(&self.link) }
    }

    /// A request and its reply.
    fn exchange(&self, request: &Request, ack: bool, fds: &[BorrowedFd<'_>]) -> Result<Message> {
        self.need(request)?;
        self.link.exchange(request, ack, fds)
    }

    /// A request whose reply is a number.
    fn word<T: TryFrom<u64>>(&self, request: Request, field: &'static str) -> Result<T> {
        let value = self.link.word(self.exchange(&request, false, &[])?)?;
        let request = request.code();
        T::try_from(value).map_err(|_| {
            let must = format!("of {} bytes", size_of::<T>());
            self.link.fail(WireError::Value { request, field, value, must })
        })
    }

    /// Refuses a request whose protocol feature was not negotiated.
    fn need(&self, request: &Request) -> Result<()> {
        match request.needs().difference(self.protocol()).iter_names().next() {
            None => Ok(()),
            Some((feature, _)) => {
                Err(FrontendError::NotNegotiated { request: request.code(), feature })
            }
        }
    }
}

impl Drop for Frontend {
    /// Hangs up, even if an [`IotlbHandle`] still exists.
    fn drop(&mut self) {
        self.link.close();
    }
}

impl AsFd for Frontend {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.channel.as_fd()
    }
}

fn short(request: u32, ring: u16) -> Result<u8> {
    let why = "only rings 0 to 255 can be given a descriptor";
    u8::try_from(ring).map_err(|_| FrontendError::Argument { request, why })
}

fn config_size(request: u32, offset: u32, data: &[u8]) -> Result<u32> {
    let size = data.len() as u32;
    if data.is_empty() || data.len() > msg::MAX_CONFIG || offset.checked_add(size).is_none() {
        let why = "1 to 256 bytes of configuration space, within 2^32";
        return Err(FrontendError::Argument { request, why });
    }
    Ok(size)
}

/// Sends IOTLB messages on a [`Frontend`]'s connection, from any thread, also while the front end
/// itself waits for a reply, such as for a ring to stop.
#[derive(Clone, Debug)]
pub struct IotlbHandle {
    link: Arc<Link>,
}

impl IotlbHandle {
    /// Sends updates and invalidations, as [`Frontend::iotlb`], without waiting: the messages go
    /// with the next [`flush`](Self::flush) (or before the next request of another kind), all in
    /// one piece, in their order. Returns the last one's ticket: how many messages were ever posted
    /// on this connection.
    ///
    /// It waits only while more than 64 KiB are unsent because the socket has no room.
    ///
    /// # Errors
    /// See [`FrontendError`]. Nothing was posted.
    pub fn post(&self, messages: &[Iotlb]) -> Result<u64> {
        let (wires, ack) = self.check(messages)?;
        self.link.post(&wires, ack)
    }

    /// Whether the back end has replied to the message with that ticket, and so to all before it.
    /// An invalidation is then in effect.
    #[inline]
    pub fn is_done(&self, ticket: u64) -> bool {
        self.link.done() >= ticket
    }

    /// Sends what was posted, as far as there is room, and takes the replies that have come,
    /// without waiting. Call it repeatedly while messages are in flight.
    ///
    /// # Errors
    /// See [`FrontendError`]. [`FrontendError::Refused`]: of the first posted message that was
    /// refused since the last report.
    pub fn flush(&self) -> Result<()> {
        self.link.flush()
    }

    /// Waits until all that was posted has its reply.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn settle(&self) -> Result<()> {
        self.link.settle()
    }

    /// The messages in wire format, and whether they set need_reply.
    fn check(&self, messages: &[Iotlb]) -> Result<(Vec<IotlbWire>, bool)> {
        let request = code::IOTLB_MSG;
        let mut wires = Vec::with_capacity(messages.len());
        let state = self.link.state.lock();
        if state.features & msg::F_ACCESS_PLATFORM == 0 {
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
        Ok((wires, state.protocol.contains(ProtocolFeatures::REPLY_ACK)))
    }
}
