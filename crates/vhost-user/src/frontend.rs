//! The front end: asks and waits.
use crate::{Iotlb, ProtocolFeatures, RingAddresses, WireError};
use ringfence_mem::Region;
use std::{
    os::{fd::BorrowedFd, unix::net::UnixStream},
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

/// One connection to a back end. Requests block until answered (where the protocol has an answer;
/// with REPLY_ACK all have) or the time limit passes.
#[derive(Debug)]
pub struct Frontend {}

#[allow(unused_variables)]
impl Frontend {
    /// A front end on a connected socket; every answer must come within `timeout`.
    ///
    /// # Errors
    /// The operating system refused.
    pub fn new(stream: UnixStream, timeout: Duration) -> std::io::Result<Frontend> {
        todo!()
    }

    /// The usual beginning: SET_OWNER, features and protocol features. Settles on what both ends
    /// have of `features` and `protocol`; returns the virtio features. Protocol features are in
    /// [`protocol`](Self::protocol) afterwards. REPLY_ACK is asked for always.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn negotiate(&mut self, features: u64, protocol: ProtocolFeatures) -> Result<u64> {
        todo!()
    }
    /// The protocol features that were settled on.
    pub fn protocol(&self) -> ProtocolFeatures {
        todo!()
    }
    /// GET_FEATURES.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn features(&mut self) -> Result<u64> {
        todo!()
    }
    /// SET_FEATURES.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_features(&mut self, features: u64) -> Result<()> {
        todo!()
    }
    /// GET_PROTOCOL_FEATURES.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn protocol_features(&mut self) -> Result<ProtocolFeatures> {
        todo!()
    }
    /// SET_PROTOCOL_FEATURES.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_protocol_features(&mut self, features: ProtocolFeatures) -> Result<()> {
        todo!()
    }
    /// SET_OWNER.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_owner(&mut self) -> Result<()> {
        todo!()
    }
    /// GET_QUEUE_NUM.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn queue_num(&mut self) -> Result<u16> {
        todo!()
    }
    /// SET_MEM_TABLE: at most 8 regions.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_mem_table(&mut self, regions: &[(Region, BorrowedFd<'_>)]) -> Result<()> {
        todo!()
    }
    /// SET_VRING_NUM: the ring's size.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_num(&mut self, ring: u16, size: u16) -> Result<()> {
        todo!()
    }
    /// SET_VRING_ADDR.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_addr(&mut self, ring: u16, addresses: &RingAddresses) -> Result<()> {
        todo!()
    }
    /// SET_VRING_BASE.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_base(&mut self, ring: u16, base: u32) -> Result<()> {
        todo!()
    }
    /// GET_VRING_BASE: stops the ring; returns its next available index.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn get_vring_base(&mut self, ring: u16) -> Result<u32> {
        todo!()
    }
    /// SET_VRING_KICK: starts the ring. `None`: the back end polls.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_kick(&mut self, ring: u16, kick: Option<BorrowedFd<'_>>) -> Result<()> {
        todo!()
    }
    /// SET_VRING_CALL. `None`: the driver polls.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_call(&mut self, ring: u16, call: Option<BorrowedFd<'_>>) -> Result<()> {
        todo!()
    }
    /// SET_VRING_ERR.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_err(&mut self, ring: u16, err: Option<BorrowedFd<'_>>) -> Result<()> {
        todo!()
    }
    /// SET_VRING_ENABLE.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_enable(&mut self, ring: u16, enabled: bool) -> Result<()> {
        todo!()
    }
    /// GET_CONFIG: fills `out` (at most 256 bytes).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<()> {
        todo!()
    }
    /// SET_CONFIG, on behalf of the driver.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_config(&mut self, offset: u32, data: &[u8]) -> Result<()> {
        todo!()
    }
    /// RESET_DEVICE.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn reset_device(&mut self) -> Result<()> {
        todo!()
    }
    /// SET_BACKEND_REQ_FD: the channel on which the back end makes requests; `channel` is the
    /// back end's side of it.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_backend_channel(&mut self, channel: BorrowedFd<'_>) -> Result<()> {
        todo!()
    }
    /// IOTLB_MSG.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn iotlb(&mut self, message: &Iotlb) -> Result<()> {
        todo!()
    }
}
