//! The wire: header, payloads, the IOTLB messages.

use bitflags::bitflags;
use ringfence_mem::Access;

/// VHOST_USER_F_PROTOCOL_FEATURES: the back end knows protocol features (a bit of the virtio
/// features, number 30).
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// VHOST_F_LOG_ALL: writes are logged for migration (bit 26).
pub const F_LOG_ALL: u64 = 1 << 26;
/// VIRTIO_F_ACCESS_PLATFORM: addresses are translated by an IOMMU (bit 33).
pub const F_ACCESS_PLATFORM: u64 = 1 << 33;

bitflags! {
    /// Optional parts of the protocol.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ProtocolFeatures: u64 {
        /// Several queues: GET_QUEUE_NUM.
        const MQ = 1 << 0;
        /// Any request can be acknowledged.
        const REPLY_ACK = 1 << 3;
        /// The back end can make requests.
        const BACKEND_REQ = 1 << 5;
        /// GET_CONFIG and SET_CONFIG.
        const CONFIG = 1 << 9;
        /// RESET_DEVICE.
        const RESET_DEVICE = 1 << 13;
        /// ADD_MEM_REG, REM_MEM_REG, GET_MAX_MEM_SLOTS.
        const CONFIGURE_MEM_SLOTS = 1 << 15;
        /// Bits of peers that know more.
        const _ = !0;
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

/// A message of the device IOTLB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Iotlb {
    /// The back end lacks a translation.
    Miss {
        /// The address.
        iova: u64,
        /// For which access.
        access: Access,
    },
    /// A translation.
    Update {
        /// Its first address.
        first: u64,
        /// Its last address, inclusive.
        last: u64,
        /// The address of `first` in the front end's process.
        user_addr: u64,
        /// What it permits; `None`: nothing.
        access: Option<Access>,
    },
    /// Translations that are no longer true.
    Invalidate {
        /// The first address.
        first: u64,
        /// The last address, inclusive.
        last: u64,
    },
    /// There is a translation, but not for this access.
    AccessFail {
        /// The address.
        iova: u64,
        /// For which access.
        access: Access,
    },
}
