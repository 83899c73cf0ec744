//! The front end's requests.

use ringfence_mem::Region;
use zerocopy::IntoBytes;

use super::{
    ConfigWrite, Inflight, ProtocolFeatures, RingAddresses, code,
    wire::{self, AddrWire, LogWire, NO_FD, RegionWire, StateWire, VRING_F_LOG, config},
};
use crate::iotlb::IotlbWire;

/// A request of the front end, without the descriptors that go with it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the specification's, by its names")]
pub enum Request {
    /// GET_FEATURES: answered by a u64.
    GetFeatures,
    /// SET_FEATURES.
    SetFeatures(u64),
    /// SET_OWNER.
    SetOwner,
    /// RESET_OWNER: deprecated, taken as a reset.
    ResetOwner,
    /// SET_MEM_TABLE: 1 to 8 regions, a descriptor each.
    SetMemTable(Vec<Region>),
    /// SET_VRING_NUM.
    SetVringNum { ring: u32, num: u32 },
    /// SET_VRING_ADDR.
    SetVringAddr { ring: u32, addresses: RingAddresses },
    /// SET_VRING_BASE.
    SetVringBase { ring: u32, base: u32 },
    /// GET_VRING_BASE: answered by the ring and its base.
    GetVringBase { ring: u32 },
    /// SET_VRING_KICK, with a descriptor or with NO_FD.
    SetVringKick { ring: u8, fd: bool },
    /// SET_VRING_CALL.
    SetVringCall { ring: u8, fd: bool },
    /// SET_VRING_ERR.
    SetVringErr { ring: u8, fd: bool },
    /// GET_PROTOCOL_FEATURES: answered by a u64.
    GetProtocolFeatures,
    /// SET_PROTOCOL_FEATURES.
    SetProtocolFeatures(ProtocolFeatures),
    /// GET_QUEUE_NUM: answered by a u64.
    GetQueueNum,
    /// SET_VRING_ENABLE.
    SetVringEnable { ring: u32, enabled: bool },
    /// SET_BACKEND_REQ_FD, with a descriptor.
    SetBackendReqFd,
    /// IOTLB_MSG: always answered by a u64 (rule D13).
    Iotlb(IotlbWire),
    /// GET_CONFIG: answered by the same with the bytes filled in, or by an empty payload.
    GetConfig { offset: u32, size: u32 },
    /// SET_CONFIG: 1 to 256 bytes.
    SetConfig { offset: u32, why: ConfigWrite, data: Vec<u8> },
    /// SET_LOG_BASE, with a descriptor: `len` bytes of a file, from `offset`, are the dirty log.
    SetLogBase { len: u64, offset: u64 },
    /// SET_LOG_FD, with the descriptor that signals to the front end that something was logged.
    SetLogFd,
    /// SEND_RARP: the guest with this address is here now.
    SendRarp([u8; 6]),
    /// NET_SET_MTU.
    NetSetMtu(u16),
    /// GET_INFLIGHT_FD: answered by the same, with the place of what was allocated, and a
    /// descriptor.
    GetInflight(Inflight),
    /// SET_INFLIGHT_FD, with a descriptor.
    SetInflight(Inflight),
    /// SET_STATUS: the virtio device status.
    SetStatus(u8),
    /// GET_STATUS: answered by a u64.
    GetStatus,
    /// RESET_DEVICE.
    ResetDevice,
    /// GET_MAX_MEM_SLOTS: answered by a u64.
    GetMaxMemSlots,
    /// ADD_MEM_REG, with a descriptor.
    AddMemReg(Region),
    /// REM_MEM_REG; a descriptor that comes along is closed (rule D29).
    RemMemReg(Region),
}

impl Request {
    /// The request's number.
    pub fn code(&self) -> u32 {
        match self {
            Request::GetFeatures => code::GET_FEATURES,
            Request::SetFeatures(_) => code::SET_FEATURES,
            Request::SetOwner => code::SET_OWNER,
            Request::ResetOwner => code::RESET_OWNER,
            Request::SetMemTable(_) => code::SET_MEM_TABLE,
            Request::SetVringNum { .. } => code::SET_VRING_NUM,
            Request::SetVringAddr { .. } => code::SET_VRING_ADDR,
            Request::SetVringBase { .. } => code::SET_VRING_BASE,
            Request::GetVringBase { .. } => code::GET_VRING_BASE,
            Request::SetVringKick { .. } => code::SET_VRING_KICK,
            Request::SetVringCall { .. } => code::SET_VRING_CALL,
            Request::SetVringErr { .. } => code::SET_VRING_ERR,
            Request::GetProtocolFeatures => code::GET_PROTOCOL_FEATURES,
            Request::SetProtocolFeatures(_) => code::SET_PROTOCOL_FEATURES,
            Request::GetQueueNum => code::GET_QUEUE_NUM,
            Request::SetVringEnable { .. } => code::SET_VRING_ENABLE,
            Request::SetBackendReqFd => code::SET_BACKEND_REQ_FD,
            Request::Iotlb(_) => code::IOTLB_MSG,
            Request::GetConfig { .. } => code::GET_CONFIG,
            Request::SetConfig { .. } => code::SET_CONFIG,
            Request::SetLogBase { .. } => code::SET_LOG_BASE,
            Request::SetLogFd => code::SET_LOG_FD,
            Request::SendRarp(_) => code::SEND_RARP,
            Request::NetSetMtu(_) => code::NET_SET_MTU,
            Request::GetInflight(_) => code::GET_INFLIGHT_FD,
            Request::SetInflight(_) => code::SET_INFLIGHT_FD,
            Request::SetStatus(_) => code::SET_STATUS,
            Request::GetStatus => code::GET_STATUS,
            Request::ResetDevice => code::RESET_DEVICE,
            Request::GetMaxMemSlots => code::GET_MAX_MEM_SLOTS,
            Request::AddMemReg(_) => code::ADD_MEM_REG,
            Request::RemMemReg(_) => code::REM_MEM_REG,
        }
    }

    /// Whether the request has an answer of its own, so that need_reply changes nothing.
    pub fn has_reply(&self) -> bool {
        matches!(
            self,
            Request::GetFeatures
                | Request::GetVringBase { .. }
                | Request::GetProtocolFeatures
                | Request::GetQueueNum
                | Request::Iotlb(_)
                | Request::GetConfig { .. }
                | Request::GetMaxMemSlots
                | Request::SetLogBase { .. }
                | Request::GetInflight(_)
                | Request::GetStatus
        )
    }

    /// How many descriptors go with it.
    pub fn fds(&self) -> usize {
        match self {
            Request::SetMemTable(regions) => regions.len(),
            Request::SetVringKick { fd, .. }
            | Request::SetVringCall { fd, .. }
            | Request::SetVringErr { fd, .. } => usize::from(*fd),
            Request::SetBackendReqFd
            | Request::AddMemReg(_)
            | Request::SetLogBase { .. }
            | Request::SetLogFd
            | Request::SetInflight(_) => 1,
            _ => 0,
        }
    }

    /// Whether `count` descriptors may come with it.
    pub fn takes_fds(&self, count: usize) -> bool {
        count == self.fds() || count == 1 && matches!(self, Request::RemMemReg(_))
    }

    /// The payload as it goes over the wire.
    pub fn payload(&self) -> Vec<u8> {
        let state = |ring, num| StateWire { ring, num }.as_bytes().to_vec();
        let word = |word: u64| word.as_bytes().to_vec();
        let ring_fd = |ring: u8, fd| word(u64::from(ring) | if fd { 0 } else { NO_FD });
        let slot = |region| [0u64.as_bytes(), RegionWire::from(region).as_bytes()].concat();
        match self {
            Request::GetFeatures
            | Request::SetOwner
            | Request::ResetOwner
            | Request::GetProtocolFeatures
            | Request::GetQueueNum
            | Request::SetBackendReqFd
            | Request::SetLogFd
            | Request::GetStatus
            | Request::ResetDevice
            | Request::GetMaxMemSlots => Vec::new(),
            Request::SetFeatures(features) => word(*features),
            Request::SetStatus(status) => word((*status).into()),
            Request::NetSetMtu(mtu) => word((*mtu).into()),
            Request::SendRarp(mac) => {
                let [a, b, c, d, e, f] = *mac;
                vec![a, b, c, d, e, f, 0, 0]
            }
            &Request::SetLogBase { len, offset } => LogWire { len, offset }.as_bytes().to_vec(),
            Request::GetInflight(inflight) | Request::SetInflight(inflight) => {
                wire::inflight(inflight)
            }
            Request::SetProtocolFeatures(features) => word(features.bits()),
            Request::SetMemTable(regions) => {
                let mut payload = state(regions.len() as u32, 0);
                for region in regions {
                    payload.extend_from_slice(RegionWire::from(region).as_bytes());
                }
                payload
            }
            Request::SetVringNum { ring, num } => state(*ring, *num),
            Request::SetVringBase { ring, base } => state(*ring, *base),
            Request::GetVringBase { ring } => state(*ring, 0),
            Request::SetVringEnable { ring, enabled } => state(*ring, u32::from(*enabled)),
            Request::SetVringAddr { ring, addresses } => {
                let &RingAddresses { desc, avail, used, log } = addresses;
                let flags = if log.is_some() { VRING_F_LOG } else { 0 };
                let log = log.unwrap_or(0);
                AddrWire { ring: *ring, flags, desc, used, avail, log }.as_bytes().to_vec()
            }
            Request::SetVringKick { ring, fd }
            | Request::SetVringCall { ring, fd }
            | Request::SetVringErr { ring, fd } => ring_fd(*ring, *fd),
            Request::Iotlb(message) => message.as_bytes().to_vec(),
            Request::GetConfig { offset, size } => config(*offset, 0, &vec![0; *size as usize]),
            Request::SetConfig { offset, why, data } => {
                config(*offset, u32::from(*why == ConfigWrite::Migration), data)
            }
            Request::AddMemReg(region) | Request::RemMemReg(region) => slot(region),
        }
    }
}
