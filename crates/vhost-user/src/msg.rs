//! The wire: header, requests, the IOTLB messages.
//!
//! Everything is in native byte order: both ends are on one machine. [`Request::parse`] accepts
//! exactly what [`Request::payload`] makes, and leaves no check for later, apart from those that
//! depend on the state of the connection.

mod parse;
mod payload;
mod request;
#[cfg(test)]
mod tests;
mod wire;

pub(crate) use payload::{parse_inflight, parse_vring_base};
pub use request::Request;
pub(crate) use wire::{CONFIG_HEAD, config, inflight, vring_base, within};

use crate::WireError;
use bitflags::bitflags;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// VHOST_USER_F_PROTOCOL_FEATURES: the back end supports protocol features (a bit of the virtio
/// features, number 30).
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// VHOST_F_LOG_ALL: writes are logged for migration (bit 26).
pub const F_LOG_ALL: u64 = 1 << 26;
/// VIRTIO_F_ACCESS_PLATFORM: addresses are translated by an IOMMU (bit 33).
pub const F_ACCESS_PLATFORM: u64 = 1 << 33;
/// VIRTIO_F_RING_PACKED: packed rings, whose size need not be a power of two (bit 34).
pub const F_RING_PACKED: u64 = 1 << 34;

/// Most descriptors that come with one message.
pub const MAX_FDS: usize = 8;
/// Most regions in one SET_MEM_TABLE.
pub const MAX_TABLE_REGIONS: usize = 8;
/// Most bytes of configuration space in one message.
pub const MAX_CONFIG: usize = 256;
/// The longest payload of any supported message.
pub const MAX_PAYLOAD: usize = 512;

bitflags! {
    /// Optional parts of the protocol.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ProtocolFeatures: u64 {
        /// Several queues: GET_QUEUE_NUM.
        const MQ = 1 << 0;
        /// SET_LOG_BASE brings a file.
        const LOG_SHMFD = 1 << 1;
        /// SEND_RARP.
        const RARP = 1 << 2;
        /// Any request can be acknowledged.
        const REPLY_ACK = 1 << 3;
        /// NET_SET_MTU.
        const NET_MTU = 1 << 4;
        /// The back end can make requests.
        const BACKEND_REQ = 1 << 5;
        /// GET_CONFIG and SET_CONFIG.
        const CONFIG = 1 << 9;
        /// GET_INFLIGHT_FD and SET_INFLIGHT_FD.
        const INFLIGHT_SHMFD = 1 << 12;
        /// RESET_DEVICE.
        const RESET_DEVICE = 1 << 13;
        /// ADD_MEM_REG, REM_MEM_REG, GET_MAX_MEM_SLOTS.
        const CONFIGURE_MEM_SLOTS = 1 << 15;
        /// SET_STATUS and GET_STATUS.
        const STATUS = 1 << 16;
        /// Bits that are unknown here.
        const _ = !0;
    }
}

impl ProtocolFeatures {
    /// What both ends of this crate implement.
    pub const KNOWN: ProtocolFeatures = ProtocolFeatures::MQ
        .union(ProtocolFeatures::REPLY_ACK)
        .union(ProtocolFeatures::BACKEND_REQ)
        .union(ProtocolFeatures::CONFIG)
        .union(ProtocolFeatures::RESET_DEVICE)
        .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS)
        .union(ProtocolFeatures::LOG_SHMFD)
        .union(ProtocolFeatures::RARP)
        .union(ProtocolFeatures::NET_MTU)
        .union(ProtocolFeatures::INFLIGHT_SHMFD)
        .union(ProtocolFeatures::STATUS);
}

/// The header of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Which request.
    pub request: u32,
    /// Version and flags.
    pub flags: u32,
    /// How many bytes of payload follow.
    pub size: u32,
}

impl Header {
    /// Bytes of a header.
    pub const LEN: usize = 12;
    /// The supported version, in the lowest two bits of the flags.
    pub const VERSION: u32 = 1;
    /// The message is an answer (rule D4).
    pub const REPLY: u32 = 1 << 2;
    /// The sender wants an acknowledgement (REPLY_ACK).
    pub const NEED_REPLY: u32 = 1 << 3;

    /// A request's header.
    pub fn request(request: u32, need_reply: bool, size: usize) -> Header {
        let flags = Self::VERSION | if need_reply { Self::NEED_REPLY } else { 0 };
        Header { request, flags, size: size as u32 }
    }

    /// An answer's header.
    pub fn reply(request: u32, size: usize) -> Header {
        Header { request, flags: Self::VERSION | Self::REPLY, size: size as u32 }
    }

    /// Whether the sender wants an acknowledgement.
    pub fn needs_reply(&self) -> bool {
        self.flags & Self::NEED_REPLY != 0
    }

    /// Checks the version, the flags and the size; `reply`: whether the message must be an answer.
    ///
    /// # Errors
    /// [`WireError::Version`], [`WireError::Flags`], [`WireError::Size`].
    pub fn check(&self, reply: bool) -> Result<(), WireError> {
        let Header { request, flags, size } = *self;
        let version = flags & 3;
        if version != Self::VERSION {
            return Err(WireError::Version { version });
        }
        let allowed = if reply { Self::REPLY } else { Self::NEED_REPLY };
        let required = if reply { Self::REPLY } else { 0 };
        if flags & !3 & !allowed != 0 || flags & required != required {
            return Err(WireError::Flags { request, flags });
        }
        if size as usize > MAX_PAYLOAD {
            return Err(WireError::Size { request, size });
        }
        Ok(())
    }
}

/// Where a ring's areas are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingAddresses {
    /// The descriptor table.
    pub desc: u64,
    /// The available ring.
    pub avail: u64,
    /// The used ring.
    pub used: u64,
    /// Where writes to the used ring are logged (guest-physical), if they are.
    pub log: Option<u64>,
}

/// What a write to the configuration space is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigWrite {
    /// The driver writes a writable field.
    Driver,
    /// The front end restores it after a migration.
    Migration,
}

/// Where the in-flight regions of a device's queues lie, as in GET_INFLIGHT_FD and SET_INFLIGHT_FD.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inflight {
    /// How many bytes of the file; 0 in a GET_INFLIGHT_FD request.
    pub len: u64,
    /// Where they begin in it; 0 in a GET_INFLIGHT_FD request.
    pub offset: u64,
    /// How many queues.
    pub queues: u16,
    /// How many descriptors a queue has at most.
    pub size: u16,
}

/// The numbers of the front end's requests.
#[allow(missing_docs, reason = "the names are the specification's")]
pub mod code {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SEND_RARP: u32 = 19;
    pub const NET_SET_MTU: u32 = 20;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const IOTLB_MSG: u32 = 22;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const POSTCOPY_ADVISE: u32 = 28;
    pub const POSTCOPY_LISTEN: u32 = 29;
    pub const POSTCOPY_END: u32 = 30;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
    /// The back end's own requests, on its own channel.
    pub const BACKEND_IOTLB_MSG: u32 = 1;
    pub const BACKEND_CONFIG_CHANGE_MSG: u32 = 2;
}
