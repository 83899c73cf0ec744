//! The front end: sends requests and waits for their answers.

mod device;
mod iotlb;
mod link;
mod rings;

use crate::{
    ProtocolFeatures, WireError,
    inbox::Message,
    msg::{self, Request, code},
};
use link::Link;
use ringfence_mem::Region;
use ringfence_run::PeerFd;
use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

pub use iotlb::IotlbHandle;

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
    link: Arc<Link>,
    /// The virtio features that were negotiated.
    features: u64,
    /// The protocol features that were negotiated.
    protocol: ProtocolFeatures,
}

impl Frontend {
    /// A front end on a connected socket, which the [`Closer`](ringfence_run::Closer) of `stream`
    /// closes; every answer must come within `timeout`.
    pub fn new(stream: impl Into<PeerFd>, timeout: Duration) -> Frontend {
        let link = Arc::new(Link::new(stream.into(), timeout));
        Frontend { link, features: 0, protocol: ProtocolFeatures::empty() }
    }

    /// The usual beginning: SET_OWNER, features and protocol features. Negotiates what both ends
    /// have of `features` and `protocol`, and returns the virtio features; REPLY_ACK is always
    /// negotiated if the back end offers it. Logging is not switched on yet (see
    /// [`set_log_base`](Self::set_log_base)).
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
        self.protocol
    }

    /// GET_FEATURES: what the back end offers, [`F_PROTOCOL_FEATURES`](crate::F_PROTOCOL_FEATURES)
    /// included.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn features(&mut self) -> Result<u64> {
        self.request_word(Request::GetFeatures, &[])
    }

    /// SET_FEATURES. Without [`F_PROTOCOL_FEATURES`](crate::F_PROTOCOL_FEATURES) among them, all
    /// rings are enabled at once (rule D28).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_features(&mut self, features: u64) -> Result<()> {
        self.send(Request::SetFeatures(features), &[])?;
        self.features = features;
        self.link.state().translated = features & msg::F_ACCESS_PLATFORM != 0;
        Ok(())
    }

    /// GET_PROTOCOL_FEATURES. Only if the back end offers
    /// [`F_PROTOCOL_FEATURES`](crate::F_PROTOCOL_FEATURES).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn protocol_features(&mut self) -> Result<ProtocolFeatures> {
        self.request_word(Request::GetProtocolFeatures, &[]).map(ProtocolFeatures::from_bits_retain)
    }

    /// SET_PROTOCOL_FEATURES.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_protocol_features(&mut self, features: ProtocolFeatures) -> Result<()> {
        self.send(Request::SetProtocolFeatures(features), &[])?;
        self.protocol = features;
        self.link.state().acks = features.contains(ProtocolFeatures::REPLY_ACK);
        Ok(())
    }

    /// SET_OWNER.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_owner(&mut self) -> Result<()> {
        self.send(Request::SetOwner, &[])
    }

    /// GET_QUEUE_NUM: how many rings the device has. Needs MQ.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn queue_num(&mut self) -> Result<u16> {
        self.need(code::GET_QUEUE_NUM, ProtocolFeatures::MQ, "MQ")?;
        let value = self.request_word(Request::GetQueueNum, &[])?;
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
        self.send(Request::SetMemTable(table.clone()), &fds)?;
        self.link.state().regions = table;
        Ok(())
    }

    /// GET_MAX_MEM_SLOTS: how many regions the back end takes. Needs CONFIGURE_MEM_SLOTS.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn max_mem_slots(&mut self) -> Result<u64> {
        self.need_slots(code::GET_MAX_MEM_SLOTS)?;
        self.request_word(Request::GetMaxMemSlots, &[])
    }

    /// ADD_MEM_REG. Needs CONFIGURE_MEM_SLOTS.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn add_mem_region(&mut self, region: Region, file: BorrowedFd<'_>) -> Result<()> {
        self.need_slots(code::ADD_MEM_REG)?;
        self.send(Request::AddMemReg(region), &[file])?;
        self.link.state().regions.push(region);
        Ok(())
    }

    /// REM_MEM_REG. Needs CONFIGURE_MEM_SLOTS.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn remove_mem_region(&mut self, region: Region) -> Result<()> {
        self.need_slots(code::REM_MEM_REG)?;
        self.send(Request::RemMemReg(region), &[])?;
        self.link.state().regions.retain(|other| other.gpa != region.gpa);
        Ok(())
    }

    /// SET_BACKEND_REQ_FD: the channel on which the back end makes requests; `channel` is the
    /// back end's side of it. Needs BACKEND_REQ (rule D11).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_backend_channel(&mut self, channel: BorrowedFd<'_>) -> Result<()> {
        self.need(code::SET_BACKEND_REQ_FD, ProtocolFeatures::BACKEND_REQ, "BACKEND_REQ")?;
        self.send(Request::SetBackendReqFd, &[channel])
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

    /// Ends the connection: after an error, bytes cannot be matched to our requests (rule D12).
    fn fail(&self, error: WireError) -> FrontendError {
        self.link.fail(error)
    }

    /// A request and its answer.
    fn exchange(&self, request: &Request, ack: bool, fds: &[BorrowedFd<'_>]) -> Result<Message> {
        let code = request.code();
        let ticket = self.link.send(std::slice::from_ref(request), ack, fds, 1)?;
        let mut answer = None;
        self.link.collect(ticket, 1, code, |message| {
            answer = Some(message);
            Ok(())
        })?;
        answer.ok_or(FrontendError::Closed)
    }

    /// A request with an answer of its own.
    fn request(&mut self, request: Request) -> Result<Vec<u8>> {
        debug_assert!(request.has_reply());
        self.exchange(&request, false, &[]).and_then(|message| self.link.plain(message))
    }

    fn request_word(&mut self, request: Request, fds: &[BorrowedFd<'_>]) -> Result<u64> {
        debug_assert!(request.has_reply());
        self.exchange(&request, false, fds).and_then(|message| self.link.word(message))
    }

    /// A request without an answer, or with an acknowledgement where that was negotiated.
    fn send(&mut self, request: Request, fds: &[BorrowedFd<'_>]) -> Result<()> {
        debug_assert!(!request.has_reply());
        if !self.protocol.contains(ProtocolFeatures::REPLY_ACK) {
            return self.link.send(&[request], false, fds, 0).map(drop);
        }
        let code = request.code();
        match self.exchange(&request, true, fds).and_then(|message| self.link.word(message))? {
            0 => Ok(()),
            word => Err(FrontendError::Refused { request: code, code: word }),
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
        self.link.as_fd()
    }
}
