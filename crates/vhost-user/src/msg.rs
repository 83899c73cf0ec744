//! The wire: header, requests, the IOTLB messages.
//!
//! Everything is in native byte order: both ends are on one machine. [`Request::parse`] accepts
//! exactly what [`Request::payload`] makes, and nothing that would have to be checked again later,
//! apart from what depends on the state of the connection.

use crate::{WireError, iotlb::IotlbWire};
use bitflags::bitflags;
use ringfence_mem::Region;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// VHOST_USER_F_PROTOCOL_FEATURES: the back end knows protocol features (a bit of the virtio
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
/// The longest payload of any message that is known here.
pub const MAX_PAYLOAD: usize = 512;

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

impl ProtocolFeatures {
    /// What both ends of this crate implement.
    pub const KNOWN: ProtocolFeatures = ProtocolFeatures::MQ
        .union(ProtocolFeatures::REPLY_ACK)
        .union(ProtocolFeatures::BACKEND_REQ)
        .union(ProtocolFeatures::CONFIG)
        .union(ProtocolFeatures::RESET_DEVICE)
        .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS);
}

/// What stands before every message.
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
    /// The version that is spoken here, in the lowest two bits of the flags.
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

    /// Checks the version, the flags and the size; `reply`: what the message must be.
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

/// Who writes the configuration space, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigWrite {
    /// The driver writes a writable field.
    Driver,
    /// The front end restores it after a migration.
    Migration,
}

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
    /// SET_VRING_KICK, with a descriptor or with the note that there is none.
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
    /// RESET_DEVICE.
    ResetDevice,
    /// GET_MAX_MEM_SLOTS: answered by a u64.
    GetMaxMemSlots,
    /// ADD_MEM_REG, with a descriptor.
    AddMemReg(Region),
    /// REM_MEM_REG; a descriptor that comes along is closed (rule D29).
    RemMemReg(Region),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StateWire {
    ring: u32,
    num: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct AddrWire {
    ring: u32,
    flags: u32,
    desc: u64,
    used: u64,
    avail: u64,
    log: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RegionWire {
    gpa: u64,
    size: u64,
    user_addr: u64,
    mmap_offset: u64,
}

impl From<&Region> for RegionWire {
    fn from(region: &Region) -> RegionWire {
        let &Region { gpa, size, user_addr, mmap_offset } = region;
        RegionWire { gpa, size, user_addr, mmap_offset }
    }
}

impl From<RegionWire> for Region {
    fn from(wire: RegionWire) -> Region {
        let RegionWire { gpa, size, user_addr, mmap_offset } = wire;
        Region { gpa, size, user_addr, mmap_offset }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ConfigWire {
    offset: u32,
    size: u32,
    flags: u32,
}

/// Bytes before the content of a GET_CONFIG or SET_CONFIG payload.
pub(crate) const CONFIG_HEAD: usize = size_of::<ConfigWire>();

/// SET_VRING_ADDR: the used ring is logged.
const VRING_F_LOG: u32 = 1;
/// SET_VRING_KICK and the like: no descriptor comes along.
const NO_FD: u64 = 1 << 8;

/// The numbers of the front end's requests.
#[allow(missing_docs, reason = "the names are the specification's")]
pub mod code {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
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
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const IOTLB_MSG: u32 = 22;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    /// The back end's own request, on its own channel.
    pub const BACKEND_IOTLB_MSG: u32 = 1;
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
        )
    }

    /// Whether `count` descriptors may come with it.
    pub fn takes_fds(&self, count: usize) -> bool {
        match self {
            Request::SetMemTable(regions) => count == regions.len(),
            Request::SetVringKick { fd, .. }
            | Request::SetVringCall { fd, .. }
            | Request::SetVringErr { fd, .. } => count == usize::from(*fd),
            Request::SetBackendReqFd | Request::AddMemReg(_) => count == 1,
            Request::RemMemReg(_) => count <= 1,
            _ => count == 0,
        }
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
            | Request::ResetDevice
            | Request::GetMaxMemSlots => Vec::new(),
            Request::SetFeatures(features) => word(*features),
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

    /// Reads a request.
    ///
    /// # Errors
    /// An unknown number, a payload of the wrong size, or a field with an impossible value.
    pub fn parse(request: u32, payload: &[u8]) -> Result<Request, WireError> {
        let wire = Payload { request, payload };
        Ok(match request {
            code::GET_FEATURES => wire.empty(Request::GetFeatures)?,
            code::SET_FEATURES => Request::SetFeatures(wire.read()?),
            code::SET_OWNER => wire.empty(Request::SetOwner)?,
            code::RESET_OWNER => wire.empty(Request::ResetOwner)?,
            code::SET_MEM_TABLE => Request::SetMemTable(wire.regions()?),
            code::SET_VRING_NUM => {
                let StateWire { ring, num } = wire.read()?;
                Request::SetVringNum { ring, num }
            }
            code::SET_VRING_ADDR => {
                let AddrWire { ring, flags, desc, used, avail, log } = wire.read()?;
                if flags & !VRING_F_LOG != 0 {
                    return Err(wire.value("flags", flags.into()));
                }
                let log = (flags & VRING_F_LOG != 0).then_some(log);
                let addresses = RingAddresses { desc, avail, used, log };
                Request::SetVringAddr { ring, addresses }
            }
            code::SET_VRING_BASE => {
                let StateWire { ring, num } = wire.read()?;
                Request::SetVringBase { ring, base: num }
            }
            // What stands in the other half of the request means nothing.
            code::GET_VRING_BASE => Request::GetVringBase { ring: wire.read::<StateWire>()?.ring },
            code::SET_VRING_KICK => {
                let (ring, fd) = wire.ring_fd()?;
                Request::SetVringKick { ring, fd }
            }
            code::SET_VRING_CALL => {
                let (ring, fd) = wire.ring_fd()?;
                Request::SetVringCall { ring, fd }
            }
            code::SET_VRING_ERR => {
                let (ring, fd) = wire.ring_fd()?;
                Request::SetVringErr { ring, fd }
            }
            code::GET_PROTOCOL_FEATURES => wire.empty(Request::GetProtocolFeatures)?,
            code::SET_PROTOCOL_FEATURES => {
                Request::SetProtocolFeatures(ProtocolFeatures::from_bits_retain(wire.read()?))
            }
            code::GET_QUEUE_NUM => wire.empty(Request::GetQueueNum)?,
            code::SET_VRING_ENABLE => {
                let StateWire { ring, num } = wire.read()?;
                if num > 1 {
                    return Err(wire.value("enable", num.into()));
                }
                Request::SetVringEnable { ring, enabled: num == 1 }
            }
            code::SET_BACKEND_REQ_FD => wire.empty(Request::SetBackendReqFd)?,
            code::IOTLB_MSG => Request::Iotlb(wire.read()?),
            code::GET_CONFIG => {
                let (head, data) = wire.config()?;
                // The flags of a read mean nothing.
                Request::GetConfig { offset: head.offset, size: data.len() as u32 }
            }
            code::SET_CONFIG => {
                let (head, data) = wire.config()?;
                let why = match head.flags {
                    0 => ConfigWrite::Driver,
                    1 => ConfigWrite::Migration,
                    other => return Err(wire.value("flags", other.into())),
                };
                Request::SetConfig { offset: head.offset, why, data: data.to_vec() }
            }
            code::RESET_DEVICE => wire.empty(Request::ResetDevice)?,
            code::GET_MAX_MEM_SLOTS => wire.empty(Request::GetMaxMemSlots)?,
            code::ADD_MEM_REG => Request::AddMemReg(wire.slot()?),
            code::REM_MEM_REG => Request::RemMemReg(wire.slot()?),
            _ => return Err(WireError::Request { request }),
        })
    }
}

/// The payload of an answer to GET_VRING_BASE.
pub(crate) fn vring_base(ring: u32, base: u32) -> Vec<u8> {
    StateWire { ring, num: base }.as_bytes().to_vec()
}

/// Reads the answer to GET_VRING_BASE: the ring and its base.
pub(crate) fn parse_vring_base(payload: &[u8]) -> Result<(u32, u32), WireError> {
    let StateWire { ring, num } = Payload { request: code::GET_VRING_BASE, payload }.read()?;
    Ok((ring, num))
}

/// The payload of GET_CONFIG (both ways) and SET_CONFIG.
pub(crate) fn config(offset: u32, flags: u32, data: &[u8]) -> Vec<u8> {
    let head = ConfigWire { offset, size: data.len() as u32, flags };
    [head.as_bytes(), data].concat()
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

/// A payload that is being read.
struct Payload<'p> {
    request: u32,
    payload: &'p [u8],
}

impl<'p> Payload<'p> {
    fn size(&self) -> WireError {
        WireError::Size { request: self.request, size: self.payload.len() as u32 }
    }

    fn value(&self, field: &'static str, value: u64) -> WireError {
        WireError::Value { request: self.request, field, value }
    }

    /// The whole payload, which must have exactly this shape.
    fn read<T: FromBytes>(&self) -> Result<T, WireError> {
        T::read_from_bytes(self.payload).map_err(|_| self.size())
    }

    fn empty(&self, request: Request) -> Result<Request, WireError> {
        if self.payload.is_empty() { Ok(request) } else { Err(self.size()) }
    }

    fn ring_fd(&self) -> Result<(u8, bool), WireError> {
        let word: u64 = self.read()?;
        if word & !(NO_FD | 0xff) != 0 {
            return Err(self.value("ring and flags", word));
        }
        Ok((word as u8, word & NO_FD == 0))
    }

    fn regions(&self) -> Result<Vec<Region>, WireError> {
        let (head, rest) = StateWire::read_from_prefix(self.payload).map_err(|_| self.size())?;
        let count = head.ring as usize;
        if count == 0 || count > MAX_TABLE_REGIONS {
            return Err(self.value("regions", count as u64));
        }
        if rest.len() != count * size_of::<RegionWire>() {
            return Err(self.size());
        }
        rest.chunks_exact(size_of::<RegionWire>())
            .map(|bytes| RegionWire::read_from_bytes(bytes).map(Region::from))
            .collect::<Result<_, _>>()
            .map_err(|_| self.size())
    }

    fn slot(&self) -> Result<Region, WireError> {
        let (_padding, rest) = u64::read_from_prefix(self.payload).map_err(|_| self.size())?;
        RegionWire::read_from_bytes(rest).map(Region::from).map_err(|_| self.size())
    }

    fn config(&self) -> Result<(ConfigWire, &'p [u8]), WireError> {
        let (head, data) = ConfigWire::read_from_prefix(self.payload).map_err(|_| self.size())?;
        if head.size as usize != data.len() || data.is_empty() || data.len() > MAX_CONFIG {
            return Err(self.value("size", head.size.into()));
        }
        if head.offset.checked_add(head.size).is_none() {
            return Err(self.value("offset", head.offset.into()));
        }
        Ok((head, data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_region() -> impl Strategy<Value = Region> {
        any::<[u64; 4]>().prop_map(|[gpa, size, user_addr, mmap_offset]| Region {
            gpa,
            size,
            user_addr,
            mmap_offset,
        })
    }

    fn any_request() -> impl Strategy<Value = Request> {
        let simple = prop::sample::select(vec![
            Request::GetFeatures,
            Request::SetOwner,
            Request::ResetOwner,
            Request::GetProtocolFeatures,
            Request::GetQueueNum,
            Request::SetBackendReqFd,
            Request::ResetDevice,
            Request::GetMaxMemSlots,
        ]);
        let config = (any::<bool>(), 0..1u32 << 31, prop::collection::vec(any::<u8>(), 1..=256));
        prop_oneof![
            simple,
            any::<u64>().prop_map(Request::SetFeatures),
            any::<u64>().prop_map(|bits| Request::SetProtocolFeatures(
                ProtocolFeatures::from_bits_retain(bits)
            )),
            prop::collection::vec(any_region(), 1..=8).prop_map(Request::SetMemTable),
            any_region().prop_map(Request::AddMemReg),
            any_region().prop_map(Request::RemMemReg),
            any::<(u32, u32)>().prop_map(|(ring, num)| Request::SetVringNum { ring, num }),
            any::<(u32, u32)>().prop_map(|(ring, base)| Request::SetVringBase { ring, base }),
            any::<u32>().prop_map(|ring| Request::GetVringBase { ring }),
            any::<(u32, bool)>()
                .prop_map(|(ring, enabled)| Request::SetVringEnable { ring, enabled }),
            any::<(u8, bool)>().prop_map(|(ring, fd)| Request::SetVringKick { ring, fd }),
            any::<(u8, bool)>().prop_map(|(ring, fd)| Request::SetVringCall { ring, fd }),
            any::<(u8, bool)>().prop_map(|(ring, fd)| Request::SetVringErr { ring, fd }),
            any::<(u32, [u64; 3], Option<u64>)>().prop_map(|(ring, [desc, avail, used], log)| {
                Request::SetVringAddr { ring, addresses: RingAddresses { desc, avail, used, log } }
            }),
            any::<[u8; 32]>()
                .prop_map(|raw| Request::Iotlb(IotlbWire::read_from_bytes(&raw).unwrap())),
            (0..1u32 << 31, 1..=256u32)
                .prop_map(|(offset, size)| Request::GetConfig { offset, size }),
            config.prop_map(|(driver, offset, data)| {
                let why = if driver { ConfigWrite::Driver } else { ConfigWrite::Migration };
                Request::SetConfig { offset, why, data }
            }),
        ]
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_the_same(request in any_request()) {
            let payload = request.payload();
            prop_assert!(payload.len() <= MAX_PAYLOAD);
            prop_assert_eq!(Request::parse(request.code(), &payload).unwrap(), request);
        }

        #[test]
        fn any_bytes_are_read_or_refused(
            code in 0..45u32,
            payload in prop::collection::vec(any::<u8>(), 0..400),
        ) {
            if let Ok(request) = Request::parse(code, &payload) {
                prop_assert_eq!(request.code(), code);
                // What is not said in a request means nothing, so compare only what is.
                prop_assert_eq!(Request::parse(code, &request.payload()).unwrap(), request);
            }
        }

        #[test]
        fn a_payload_of_another_size_is_refused(request in any_request(), cut in 1..8usize) {
            let mut payload = request.payload();
            payload.resize(payload.len() + cut, 0);
            prop_assert!(Request::parse(request.code(), &payload).is_err());
            payload.truncate(payload.len() - cut);
            if payload.len() >= cut {
                payload.truncate(payload.len() - cut);
                prop_assert!(Request::parse(request.code(), &payload).is_err());
            }
        }
    }

    #[test]
    fn headers_of_another_version_or_with_unknown_flags_are_refused() {
        let header = |flags| Header { request: 1, flags, size: 0 };
        assert!(header(1).check(false).is_ok());
        assert!(header(9).check(false).is_ok());
        assert!(header(5).check(true).is_ok());
        for version in [0, 2, 3] {
            assert!(matches!(header(version).check(false), Err(WireError::Version { .. })));
        }
        for flags in [5, 17, 1 | 1 << 31] {
            assert!(matches!(header(flags).check(false), Err(WireError::Flags { .. })));
        }
        for flags in [1, 13] {
            assert!(matches!(header(flags).check(true), Err(WireError::Flags { .. })));
        }
        let long = Header { request: 1, flags: 1, size: MAX_PAYLOAD as u32 + 1 };
        assert!(matches!(long.check(false), Err(WireError::Size { .. })));
    }

    #[test]
    fn a_header_takes_twelve_bytes_and_an_address_message_forty() {
        assert_eq!(size_of::<Header>(), Header::LEN);
        let addresses = RingAddresses::default();
        assert_eq!(Request::SetVringAddr { ring: 0, addresses }.payload().len(), 40);
        let region = Region { gpa: 0, size: 0, user_addr: 0, mmap_offset: 0 };
        assert_eq!(Request::SetMemTable(vec![region; 8]).payload().len(), 8 + 8 * 32);
    }
}
