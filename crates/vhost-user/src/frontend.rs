//! The front end: asks and waits.

use crate::{
    Iotlb, ProtocolFeatures, RingAddresses, WireError,
    channel::{Channel, Message},
    msg::{self, ConfigWrite, Header, Request, code},
};
use ringfence_mem::Region;
use std::{
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

/// Why a request did not succeed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrontendError {
    /// The connection failed or the back end answered nonsense; every later request fails too.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The back end refused the request.
    #[error("the back end refused request {request} with {code}")]
    Refused {
        /// The request.
        request: u32,
        /// The non-zero answer.
        code: u64,
    },
    /// The request needs a feature that was not negotiated; nothing was sent.
    #[error("request {request} needs {feature}, which was not negotiated")]
    NotNegotiated {
        /// The request.
        request: u32,
        /// Which feature.
        feature: &'static str,
    },
    /// An argument that cannot be sent; nothing was.
    #[error("request {request}: {why}")]
    Argument {
        /// The request.
        request: u32,
        /// What is wrong.
        why: &'static str,
    },
    /// An earlier request ended the connection.
    #[error("the connection has ended")]
    Closed,
}

type Result<T> = std::result::Result<T, FrontendError>;

/// One connection to a back end.
///
/// Requests block until they are answered or the time limit passes. The protocol has answers for
/// some requests only; with REPLY_ACK all are acknowledged, so that a request that returned `Ok`
/// was carried out. Without it, the others return once they are sent.
#[derive(Debug)]
pub struct Frontend {
    channel: Channel,
    /// The virtio features that were settled on.
    features: u64,
    /// The protocol features that were settled on.
    protocol: ProtocolFeatures,
    /// The memory that was announced.
    regions: Vec<Region>,
    /// An earlier failure ended the connection.
    closed: bool,
}

impl Frontend {
    /// A front end on a connected socket; every answer must come within `timeout`.
    pub fn new(stream: UnixStream, timeout: Duration) -> Frontend {
        let channel = Channel::new(stream, timeout);
        let protocol = ProtocolFeatures::empty();
        Frontend { channel, features: 0, protocol, regions: Vec::new(), closed: false }
    }

    /// The usual beginning: SET_OWNER, features and protocol features. Settles on what both ends
    /// have of `features` and `protocol`, and returns the virtio features; REPLY_ACK is taken
    /// wherever there is one.
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
        let common = offered & features & !msg::F_PROTOCOL_FEATURES;
        self.set_features(common | offered & msg::F_PROTOCOL_FEATURES)?;
        Ok(common)
    }

    /// The protocol features that were settled on.
    pub fn protocol(&self) -> ProtocolFeatures {
        self.protocol
    }

    /// GET_FEATURES: what the back end offers, [`F_PROTOCOL_FEATURES`](crate::F_PROTOCOL_FEATURES)
    /// included.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn features(&mut self) -> Result<u64> {
        self.ask_word(Request::GetFeatures)
    }

    /// SET_FEATURES. Without [`F_PROTOCOL_FEATURES`](crate::F_PROTOCOL_FEATURES) among them, all
    /// rings are enabled at once (rule D28).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_features(&mut self, features: u64) -> Result<()> {
        self.tell(Request::SetFeatures(features), &[])?;
        self.features = features;
        Ok(())
    }

    /// GET_PROTOCOL_FEATURES. Only if the back end offers
    /// [`F_PROTOCOL_FEATURES`](crate::F_PROTOCOL_FEATURES).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn protocol_features(&mut self) -> Result<ProtocolFeatures> {
        self.ask_word(Request::GetProtocolFeatures).map(ProtocolFeatures::from_bits_retain)
    }

    /// SET_PROTOCOL_FEATURES.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_protocol_features(&mut self, features: ProtocolFeatures) -> Result<()> {
        self.tell(Request::SetProtocolFeatures(features), &[])?;
        self.protocol = features;
        Ok(())
    }

    /// SET_OWNER.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_owner(&mut self) -> Result<()> {
        self.tell(Request::SetOwner, &[])
    }

    /// GET_QUEUE_NUM: how many rings the device has. Needs MQ.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn queue_num(&mut self) -> Result<u16> {
        self.need(code::GET_QUEUE_NUM, ProtocolFeatures::MQ, "MQ")?;
        let value = self.ask_word(Request::GetQueueNum)?;
        let request = code::GET_QUEUE_NUM;
        u16::try_from(value)
            .map_err(|_| self.fail(WireError::Value { request, field: "queues", value }))
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
        self.tell(Request::SetMemTable(table.clone()), &fds)?;
        self.regions = table;
        Ok(())
    }

    /// GET_MAX_MEM_SLOTS: how many regions the back end takes. Needs CONFIGURE_MEM_SLOTS.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn max_mem_slots(&mut self) -> Result<u64> {
        self.need_slots(code::GET_MAX_MEM_SLOTS)?;
        self.ask_word(Request::GetMaxMemSlots)
    }

    /// ADD_MEM_REG. Needs CONFIGURE_MEM_SLOTS.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn add_mem_region(&mut self, region: Region, file: BorrowedFd<'_>) -> Result<()> {
        self.need_slots(code::ADD_MEM_REG)?;
        self.tell(Request::AddMemReg(region), &[file])?;
        self.regions.push(region);
        Ok(())
    }

    /// REM_MEM_REG. Needs CONFIGURE_MEM_SLOTS.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn remove_mem_region(&mut self, region: Region) -> Result<()> {
        self.need_slots(code::REM_MEM_REG)?;
        self.tell(Request::RemMemReg(region), &[])?;
        self.regions.retain(|other| other.gpa != region.gpa);
        Ok(())
    }

    /// SET_VRING_NUM: the ring's size.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_num(&mut self, ring: u16, size: u16) -> Result<()> {
        self.tell(Request::SetVringNum { ring: ring.into(), num: size.into() }, &[])
    }

    /// SET_VRING_ADDR: where the ring's areas are, in addresses of this process, or in IOVAs if
    /// ACCESS_PLATFORM was negotiated (rule D2).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_addr(&mut self, ring: u16, addresses: &RingAddresses) -> Result<()> {
        self.tell(Request::SetVringAddr { ring: ring.into(), addresses: *addresses }, &[])
    }

    /// SET_VRING_BASE: where the back end begins in the available ring.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_base(&mut self, ring: u16, base: u32) -> Result<()> {
        self.tell(Request::SetVringBase { ring: ring.into(), base }, &[])
    }

    /// GET_VRING_BASE: stops the ring; returns its next available index.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn get_vring_base(&mut self, ring: u16) -> Result<u32> {
        let payload = self.ask(Request::GetVringBase { ring: ring.into() })?;
        let (same, base) = msg::parse_vring_base(&payload).map_err(|error| self.fail(error))?;
        if same != u32::from(ring) {
            let (request, value) = (code::GET_VRING_BASE, same.into());
            return Err(self.fail(WireError::Value { request, field: "ring", value }));
        }
        Ok(base)
    }

    /// SET_VRING_KICK: starts the ring. `None`: the back end polls.
    ///
    /// Make event descriptors non-blocking: a careful back end does it otherwise, and as the two
    /// processes share the open file, it changes for this one too.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_kick(&mut self, ring: u16, kick: Option<BorrowedFd<'_>>) -> Result<()> {
        self.tell_ring_fd(code::SET_VRING_KICK, ring, kick, |ring, fd| Request::SetVringKick {
            ring,
            fd,
        })
    }

    /// SET_VRING_CALL: what the back end notifies the driver with. `None`: the driver polls.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_call(&mut self, ring: u16, call: Option<BorrowedFd<'_>>) -> Result<()> {
        self.tell_ring_fd(code::SET_VRING_CALL, ring, call, |ring, fd| Request::SetVringCall {
            ring,
            fd,
        })
    }

    /// SET_VRING_ERR: what the back end tells with that the ring is broken.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_err(&mut self, ring: u16, err: Option<BorrowedFd<'_>>) -> Result<()> {
        self.tell_ring_fd(code::SET_VRING_ERR, ring, err, |ring, fd| Request::SetVringErr {
            ring,
            fd,
        })
    }

    /// SET_VRING_ENABLE. Only with [`F_PROTOCOL_FEATURES`](crate::F_PROTOCOL_FEATURES); without
    /// it, rings are enabled from the start.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_enable(&mut self, ring: u16, enabled: bool) -> Result<()> {
        if self.features & msg::F_PROTOCOL_FEATURES == 0 {
            let (request, feature) = (code::SET_VRING_ENABLE, "PROTOCOL_FEATURES");
            return Err(FrontendError::NotNegotiated { request, feature });
        }
        self.tell(Request::SetVringEnable { ring: ring.into(), enabled }, &[])
    }

    /// GET_CONFIG: fills `out` (1 to 256 bytes) from the configuration space. Needs CONFIG.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<()> {
        let request = code::GET_CONFIG;
        self.need(request, ProtocolFeatures::CONFIG, "CONFIG")?;
        let size = config_size(request, offset, out)?;
        let payload = self.ask(Request::GetConfig { offset, size })?;
        if payload.is_empty() {
            return Err(FrontendError::Refused { request, code: 1 });
        }
        match Request::parse(request, &payload) {
            Ok(Request::GetConfig { offset: at, size: bytes }) if (at, bytes) == (offset, size) => {
                out.copy_from_slice(&payload[msg::CONFIG_HEAD..]);
                Ok(())
            }
            Ok(_) => Err(self.fail(WireError::Size { request, size: payload.len() as u32 })),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// SET_CONFIG, on behalf of the driver: 1 to 256 bytes. Needs CONFIG.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_config(&mut self, offset: u32, data: &[u8]) -> Result<()> {
        self.need(code::SET_CONFIG, ProtocolFeatures::CONFIG, "CONFIG")?;
        config_size(code::SET_CONFIG, offset, data)?;
        let (why, data) = (ConfigWrite::Driver, data.to_vec());
        self.tell(Request::SetConfig { offset, why, data }, &[])
    }

    /// RESET_DEVICE: stops and disables all rings, unsets the features. Needs RESET_DEVICE.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn reset_device(&mut self) -> Result<()> {
        self.need(code::RESET_DEVICE, ProtocolFeatures::RESET_DEVICE, "RESET_DEVICE")?;
        self.tell(Request::ResetDevice, &[])
    }

    /// SET_BACKEND_REQ_FD: the channel on which the back end makes requests; `channel` is the
    /// back end's side of it. Needs BACKEND_REQ (rule D11).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_backend_channel(&mut self, channel: BorrowedFd<'_>) -> Result<()> {
        self.need(code::SET_BACKEND_REQ_FD, ProtocolFeatures::BACKEND_REQ, "BACKEND_REQ")?;
        self.tell(Request::SetBackendReqFd, &[channel])
    }

    /// IOTLB_MSG: an update or an invalidation; `Ok` once the back end has carried it out. Needs
    /// ACCESS_PLATFORM (rule D1). An update must lie within memory that was announced (rule D5).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn iotlb(&mut self, message: &Iotlb) -> Result<()> {
        let request = code::IOTLB_MSG;
        if self.features & msg::F_ACCESS_PLATFORM == 0 {
            let feature = "ACCESS_PLATFORM";
            return Err(FrontendError::NotNegotiated { request, feature });
        }
        if let Iotlb::Update { first, last, user_addr, .. } = *message {
            let end = last.checked_sub(first).and_then(|more| user_addr.checked_add(more));
            if !end.is_some_and(|end| msg::within(&self.regions, user_addr, end)) {
                let why = "the update leads outside of the announced memory";
                return Err(FrontendError::Argument { request, why });
            }
        }
        for part in message.halves() {
            let wire = part.emit().filter(|wire| wire.parse().is_ok());
            let why = "the range is empty or wraps";
            let wire = wire.ok_or(FrontendError::Argument { request, why })?;
            // The answer comes in any case (rule D13), but there are back ends that give it only
            // where it is asked for.
            let ack = self.protocol.contains(ProtocolFeatures::REPLY_ACK);
            self.send(&Request::Iotlb(wire), ack, &[])?;
            match self.reply_word(request)? {
                0 => {}
                code => return Err(FrontendError::Refused { request, code }),
            }
        }
        Ok(())
    }

    fn need(&self, request: u32, bit: ProtocolFeatures, feature: &'static str) -> Result<()> {
        if self.protocol.contains(bit) {
            return Ok(());
        }
        Err(FrontendError::NotNegotiated { request, feature })
    }

    fn need_slots(&self, request: u32) -> Result<()> {
        self.need(request, ProtocolFeatures::CONFIGURE_MEM_SLOTS, "CONFIGURE_MEM_SLOTS")
    }

    /// Ends the connection: nothing that comes after a fault can be trusted to belong to a request
    /// of ours (rule D12).
    fn fail(&mut self, error: WireError) -> FrontendError {
        self.closed = true;
        self.channel.close();
        error.into()
    }

    fn send(&mut self, request: &Request, ack: bool, fds: &[BorrowedFd<'_>]) -> Result<()> {
        if self.closed {
            return Err(FrontendError::Closed);
        }
        let payload = request.payload();
        let header = Header::request(request.code(), ack, payload.len());
        self.channel.send(header, &payload, fds).map_err(|error| self.fail(error))
    }

    fn reply(&mut self, request: u32) -> Result<Vec<u8>> {
        let Message { header, payload, fds } =
            self.channel.recv_reply().map_err(|error| self.fail(error))?;
        if header.request != request {
            let (wanted, got) = (request, header.request);
            return Err(self.fail(WireError::WrongReply { wanted, got }));
        }
        if !fds.is_empty() {
            return Err(self.fail(WireError::Fds { request, count: fds.len() }));
        }
        Ok(payload)
    }

    fn reply_word(&mut self, request: u32) -> Result<u64> {
        let payload = self.reply(request)?;
        let size = payload.len() as u32;
        let word = payload.try_into().map_err(|_| self.fail(WireError::Size { request, size }))?;
        Ok(u64::from_ne_bytes(word))
    }

    /// A request with an answer of its own.
    fn ask(&mut self, request: Request) -> Result<Vec<u8>> {
        debug_assert!(request.has_reply());
        self.send(&request, false, &[])?;
        self.reply(request.code())
    }

    fn ask_word(&mut self, request: Request) -> Result<u64> {
        debug_assert!(request.has_reply());
        self.send(&request, false, &[])?;
        self.reply_word(request.code())
    }

    /// A request without an answer, or with an acknowledgement where that was negotiated.
    fn tell(&mut self, request: Request, fds: &[BorrowedFd<'_>]) -> Result<()> {
        debug_assert!(!request.has_reply());
        let ack = self.protocol.contains(ProtocolFeatures::REPLY_ACK);
        self.send(&request, ack, fds)?;
        if ack {
            let request = request.code();
            let code = self.reply_word(request)?;
            if code != 0 {
                return Err(FrontendError::Refused { request, code });
            }
        }
        Ok(())
    }

    fn tell_ring_fd(
        &mut self,
        request: u32,
        ring: u16,
        fd: Option<BorrowedFd<'_>>,
        make: fn(u8, bool) -> Request,
    ) -> Result<()> {
        let why = "only rings 0 to 255 can be given a descriptor";
        let ring = u8::try_from(ring).map_err(|_| FrontendError::Argument { request, why })?;
        self.tell(make(ring, fd.is_some()), fd.as_slice())
    }
}

impl AsFd for Frontend {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

fn config_size(request: u32, offset: u32, data: &[u8]) -> Result<u32> {
    let why = "1 to 256 bytes of configuration space, within 2^32";
    if data.is_empty() || data.len() > msg::MAX_CONFIG {
        return Err(FrontendError::Argument { request, why });
    }
    let size = data.len() as u32;
    offset.checked_add(size).ok_or(FrontendError::Argument { request, why }).map(|_| size)
}
