//! The wire: header, requests, the IOTLB messages.
//!
//! Everything is in native byte order: both ends are on one machine. [`Request::parse`] accepts
//! what [`Request::payload`] makes, and forms that only other senders use. Regions, IOTLB messages,
//! and what depends on the state of the connection are checked later.

pub mod code;
mod request;
#[cfg(test)]
mod tests;

pub use request::Request;
pub(crate) use request::{
    CONFIG_HEAD, config, inflight, parse_inflight, parse_vring_base, vring_base,
};

use crate::{WireError, error::at_most};
use bitflags::bitflags;
use ringfence_mem::Region;
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
/// Most bytes of payload in one message: every supported one fits.
pub const MAX_PAYLOAD: usize = 512;

bitflags! {
    /// Optional parts of the protocol.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    }
}

impl ProtocolFeatures {
    /// What both ends of this crate implement.
    pub const KNOWN: ProtocolFeatures = ProtocolFeatures::all();
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
    /// The message is a reply (rule [D4]).
    ///
    /// [D4]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d4
    pub const REPLY: u32 = 1 << 2;
    /// The sender wants an acknowledgement (REPLY_ACK).
    pub const NEED_REPLY: u32 = 1 << 3;

    /// A request's header.
    pub fn request(request: u32, need_reply: bool, size: usize) -> Header {
        let flags = Self::VERSION | if need_reply { Self::NEED_REPLY } else { 0 };
        Header { request, flags, size: size as u32 }
    }

    /// A reply's header.
    pub fn reply(request: u32, size: usize) -> Header {
        Header { request, flags: Self::VERSION | Self::REPLY, size: size as u32 }
    }

    /// Whether the sender wants an acknowledgement.
    pub fn needs_reply(&self) -> bool {
        self.flags & Self::NEED_REPLY != 0
    }

    /// Checks the version, the flags and the size; `reply`: whether the message must be a reply.
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
            let must = if reply { "5 (version 1, reply)" } else { "1 or, to need a reply, 9" };
            return Err(WireError::Flags { request, flags, must });
        }
        if size as usize > MAX_PAYLOAD {
            return Err(WireError::Size { request, size, takes: at_most(MAX_PAYLOAD) });
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
    /// Where writes to the used ring are logged, if they are: guest-physical, or with
    /// ACCESS_PLATFORM an IOVA.
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

/// Whether all addresses of the front end's process from `first` to `last` lie in the regions,
/// whose addresses do not wrap.
pub(crate) fn within<'r>(
    regions: impl IntoIterator<Item = &'r Region, IntoIter: Clone>,
    first: u64,
    last: u64,
) -> bool {
    let covers = |region: &Region, addr: u64| {
        addr.checked_sub(region.user_addr).is_some_and(|offset| offset < region.size)
    };
    let regions = regions.into_iter();
    let mut at = first;
    // Each round leaves one region behind.
    while let Some(region) = regions.clone().find(|region| covers(region, at)) {
        let end = region.user_addr.saturating_add(region.size - 1);
        if end >= last {
            return true;
        }
        at = end + 1;
    }
    false
}
