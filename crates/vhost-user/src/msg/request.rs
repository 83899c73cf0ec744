//! The requests of a front end: what each is, carries and needs.

use ringfence_mem::Region;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{
    ConfigWrite, Inflight, MAX_CONFIG, MAX_TABLE_REGIONS, ProtocolFeatures, RingAddresses, code,
};
use crate::{WireError, iotlb::IotlbWire};

/// Makes [`Request`] and what is to be known of each from one list.
macro_rules! requests {
    ($($(#[$doc:meta])* $variant:ident $(($of:ty))? $({ $($field:ident: $type:ty),+ })?
        = $code:ident $(, replies: $replies:literal)? $(, needs: $feature:ident)?;)*) => {
        /// A request of the front end, without the descriptors that go with it.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "the fields are the specification's, by its names")]
        #[non_exhaustive]
        pub enum Request {
            $($(#[$doc])* $variant $(($of))? $({ $($field: $type),+ })?,)*
        }

        impl Request {
            /// The request's number.
            pub fn code(&self) -> u32 {
                match self { $(Request::$variant { .. } => code::$code,)* }
            }

            /// Whether the request has a reply of its own, so that need_reply changes nothing.
            pub fn has_reply(&self) -> bool {
                match self { $(Request::$variant { .. } => false $(|| $replies)?,)* }
            }

            /// The protocol feature without which it is not sent; empty: none.
            pub(crate) fn needs(&self) -> ProtocolFeatures {
                match self {
                    $(Request::$variant { .. } =>
                        ProtocolFeatures::empty() $(.union(ProtocolFeatures::$feature))?,)*
                }
            }
        }
    };
}

requests! {
    /// GET_FEATURES: replied to with a u64.
    GetFeatures = GET_FEATURES, replies: true;
    /// SET_FEATURES.
    SetFeatures(u64) = SET_FEATURES;
    /// SET_OWNER.
    SetOwner = SET_OWNER;
    /// RESET_OWNER: deprecated, taken as a reset.
    ResetOwner = RESET_OWNER;
    /// SET_MEM_TABLE: 1 to 8 regions, a descriptor each.
    SetMemTable(Vec<Region>) = SET_MEM_TABLE;
    /// SET_LOG_BASE, with a descriptor: `len` bytes of a file, from `offset`, are the dirty log.
    SetLogBase { len: u64, offset: u64 } = SET_LOG_BASE, replies: true, needs: LOG_SHMFD;
    /// SET_LOG_FD, with the descriptor that signals to the front end that something was logged.
    SetLogFd = SET_LOG_FD, needs: LOG_SHMFD;
    /// SET_VRING_NUM.
    SetVringNum { ring: u32, num: u32 } = SET_VRING_NUM;
    /// SET_VRING_ADDR.
    SetVringAddr { ring: u32, addresses: RingAddresses } = SET_VRING_ADDR;
    /// SET_VRING_BASE.
    SetVringBase { ring: u32, base: u32 } = SET_VRING_BASE;
    /// GET_VRING_BASE: replied to with the ring and its base.
    GetVringBase { ring: u32 } = GET_VRING_BASE, replies: true;
    /// SET_VRING_KICK, with a descriptor or with NO_FD.
    SetVringKick { ring: u8, fd: bool } = SET_VRING_KICK;
    /// SET_VRING_CALL.
    SetVringCall { ring: u8, fd: bool } = SET_VRING_CALL;
    /// SET_VRING_ERR.
    SetVringErr { ring: u8, fd: bool } = SET_VRING_ERR;
    /// GET_PROTOCOL_FEATURES: replied to with a u64.
    GetProtocolFeatures = GET_PROTOCOL_FEATURES, replies: true;
    /// SET_PROTOCOL_FEATURES.
    SetProtocolFeatures(ProtocolFeatures) = SET_PROTOCOL_FEATURES;
    /// GET_QUEUE_NUM: replied to with a u64.
    GetQueueNum = GET_QUEUE_NUM, replies: true, needs: MQ;
    /// SET_VRING_ENABLE.
    SetVringEnable { ring: u32, enabled: bool } = SET_VRING_ENABLE;
    /// SEND_RARP: the guest with this address is here now.
    SendRarp([u8; 6]) = SEND_RARP, needs: RARP;
    /// NET_SET_MTU.
    NetSetMtu(u16) = NET_SET_MTU, needs: NET_MTU;
    /// SET_BACKEND_REQ_FD, with a descriptor.
    SetBackendReqFd = SET_BACKEND_REQ_FD, needs: BACKEND_REQ;
    /// IOTLB_MSG: always replied to with a u64 (rule [D13]).
    ///
    /// [D13]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d13
    Iotlb(IotlbWire) = IOTLB_MSG, replies: true;
    /// GET_CONFIG: replied to with the same with the bytes filled in, or with an empty payload.
    GetConfig { offset: u32, size: u32 } = GET_CONFIG, replies: true, needs: CONFIG;
    /// SET_CONFIG: 1 to 256 bytes.
    SetConfig { offset: u32, why: ConfigWrite, data: Vec<u8> } = SET_CONFIG, needs: CONFIG;
    /// GET_INFLIGHT_FD: replied to with the same, with the place of what was allocated, and a
    /// descriptor.
    GetInflight(Inflight) = GET_INFLIGHT_FD, replies: true, needs: INFLIGHT_SHMFD;
    /// SET_INFLIGHT_FD, with a descriptor.
    SetInflight(Inflight) = SET_INFLIGHT_FD, needs: INFLIGHT_SHMFD;
    /// RESET_DEVICE.
    ResetDevice = RESET_DEVICE, needs: RESET_DEVICE;
    /// GET_MAX_MEM_SLOTS: replied to with a u64.
    GetMaxMemSlots = GET_MAX_MEM_SLOTS, replies: true, needs: CONFIGURE_MEM_SLOTS;
    /// ADD_MEM_REG, with a descriptor.
    AddMemReg(Region) = ADD_MEM_REG, needs: CONFIGURE_MEM_SLOTS;
    /// REM_MEM_REG; a descriptor that comes along is closed (rule [D29]).
    ///
    /// [D29]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d29
    RemMemReg(Region) = REM_MEM_REG, needs: CONFIGURE_MEM_SLOTS;
    /// SET_STATUS: the virtio device status.
    SetStatus(u8) = SET_STATUS, needs: STATUS;
    /// GET_STATUS: replied to with a u64.
    GetStatus = GET_STATUS, replies: true, needs: STATUS;
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

/// INFLIGHT: 20 bytes, padded as a C compiler does.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct InflightWire {
    len: u64,
    offset: u64,
    queues: u16,
    size: u16,
    padding: [u8; 4],
}

/// Bytes of a region, and those before the content of a GET_CONFIG or SET_CONFIG payload.
const REGION: usize = size_of::<[u64; 4]>();
pub(crate) const CONFIG_HEAD: usize = size_of::<[u32; 3]>();

/// SET_VRING_ADDR: the used ring is logged.
const VRING_F_LOG: u32 = 1;
/// SET_VRING_KICK and the like: no descriptor comes along.
const NO_FD: u64 = 1 << 8;

fn region_wire(region: &Region) -> [u64; 4] {
    [region.gpa, region.size, region.user_addr, region.mmap_offset]
}

fn region_of([gpa, size, user_addr, mmap_offset]: [u64; 4]) -> Region {
    Region { gpa, size, user_addr, mmap_offset }
}

/// The payload of a reply to GET_VRING_BASE.
pub(crate) fn vring_base(ring: u32, base: u32) -> Vec<u8> {
    [ring, base].as_bytes().to_vec()
}

/// The payload of GET_CONFIG (both ways) and SET_CONFIG.
pub(crate) fn config(offset: u32, flags: u32, data: &[u8]) -> Vec<u8> {
    [[offset, data.len() as u32, flags].as_bytes(), data].concat()
}

/// The payload of GET_INFLIGHT_FD (both ways) and SET_INFLIGHT_FD.
pub(crate) fn inflight(&Inflight { len, offset, queues, size }: &Inflight) -> Vec<u8> {
    InflightWire { len, offset, queues, size, padding: [0; 4] }.as_bytes().to_vec()
}

/// Reads the reply to GET_VRING_BASE: the ring and its base.
pub(crate) fn parse_vring_base(payload: &[u8]) -> Result<[u32; 2], WireError> {
    Payload { request: code::GET_VRING_BASE, payload }.read()
}

/// Reads the reply to GET_INFLIGHT_FD.
pub(crate) fn parse_inflight(payload: &[u8]) -> Result<Inflight, WireError> {
    Payload { request: code::GET_INFLIGHT_FD, payload }.inflight()
}

/// The bytes of a payload, and the request that they belong to.
struct Payload<'p> {
    request: u32,
    payload: &'p [u8],
}

impl<'p> Payload<'p> {
    fn size(&self, takes: impl ToString) -> WireError {
        let (size, takes) = (self.payload.len() as u32, takes.to_string());
        WireError::Size { request: self.request, size, takes }
    }

    fn value(&self, field: &'static str, value: u64, must: impl ToString) -> WireError {
        WireError::Value { request: self.request, field, value, must: must.to_string() }
    }

    /// The whole payload, which must have exactly this shape.
    fn read<T: FromBytes>(&self) -> Result<T, WireError> {
        T::read_from_bytes(self.payload).map_err(|_| self.size(size_of::<T>()))
    }

    /// A word that has a narrower meaning.
    fn narrow<T: TryFrom<u64>>(&self, field: &'static str) -> Result<T, WireError> {
        let word: u64 = self.read()?;
        T::try_from(word)
            .map_err(|_| self.value(field, word, format!("of {} bytes", size_of::<T>())))
    }

    /// Checks that the payload is empty; returns `meaning`.
    fn empty<T>(&self, meaning: T) -> Result<T, WireError> {
        if self.payload.is_empty() { Ok(meaning) } else { Err(self.size(0)) }
    }

    fn ring_fd(&self) -> Result<(u8, bool), WireError> {
        let word: u64 = self.read()?;
        if word & !(NO_FD | 0xff) != 0 {
            return Err(self.value("ring and flags", word, "0 to 0x1ff"));
        }
        Ok((word as u8, word & NO_FD == 0))
    }

    fn regions(&self) -> Result<Vec<Region>, WireError> {
        let head = <[u32; 2]>::read_from_prefix(self.payload);
        let ([count, _padding], rest) = head.map_err(|_| self.size("8 and 32 for each region"))?;
        let count = count as usize;
        if count == 0 || count > MAX_TABLE_REGIONS {
            return Err(self.value("regions", count as u64, format!("1 to {MAX_TABLE_REGIONS}")));
        }
        // User-Mode Linux sends a table of two, however many it fills: the rest means nothing.
        let (places, more) = rest.as_chunks::<REGION>();
        if !more.is_empty() || !(count..=MAX_TABLE_REGIONS).contains(&places.len()) {
            return Err(self.size(format!("8 and 32 for each of {count} regions")));
        }
        Ok(places[..count].iter().map(|place| region_of(zerocopy::transmute!(*place))).collect())
    }

    fn slot(&self) -> Result<Region, WireError> {
        let [_padding, region @ ..]: [u64; 5] = self.read()?;
        Ok(region_of(region))
    }

    fn inflight(&self) -> Result<Inflight, WireError> {
        let InflightWire { len, offset, queues, size, .. } = self.read()?;
        Ok(Inflight { len, offset, queues, size })
    }

    /// The offset, the flags and the bytes.
    fn config(&self) -> Result<(u32, u32, &'p [u8]), WireError> {
        let head = <[u32; 3]>::read_from_prefix(self.payload);
        let ([offset, size, flags], data) = head.map_err(|_| self.size("12 and the content"))?;
        if size as usize != data.len() || data.is_empty() || data.len() > MAX_CONFIG {
            let must = format!("the {} bytes there are, 1 to {MAX_CONFIG}", data.len());
            return Err(self.value("size", size.into(), must));
        }
        if offset.checked_add(size).is_none() {
            return Err(self.value("offset", offset.into(), format!("at most 2^32 - 1 - {size}")));
        }
        Ok((offset, flags, data))
    }
}

impl Request {
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

    /// Reads a request.
    ///
    /// # Errors
    /// An unknown or unsupported number, a payload of the wrong size, or a field with an impossible
    /// value.
    pub fn parse(request: u32, payload: &[u8]) -> Result<Request, WireError> {
        let wire = Payload { request, payload };
        Ok(match request {
            code::GET_FEATURES => wire.empty(Request::GetFeatures)?,
            code::SET_FEATURES => Request::SetFeatures(wire.read()?),
            code::SET_OWNER => wire.empty(Request::SetOwner)?,
            code::RESET_OWNER => wire.empty(Request::ResetOwner)?,
            code::SET_MEM_TABLE => Request::SetMemTable(wire.regions()?),
            code::SET_LOG_BASE => {
                let [len, offset] = wire.read()?;
                Request::SetLogBase { len, offset }
            }
            // Some senders add a word that means nothing.
            code::SET_LOG_FD if payload.len() == 8 => Request::SetLogFd,
            code::SET_LOG_FD => wire.empty(Request::SetLogFd)?,
            code::SET_VRING_NUM => {
                let [ring, num] = wire.read()?;
                Request::SetVringNum { ring, num }
            }
            code::SET_VRING_ADDR => {
                let AddrWire { ring, flags, desc, used, avail, log } = wire.read()?;
                if flags & !VRING_F_LOG != 0 {
                    return Err(wire.value("flags", flags.into(), "0 or 1"));
                }
                let log = (flags & VRING_F_LOG != 0).then_some(log);
                let addresses = RingAddresses { desc, avail, used, log };
                Request::SetVringAddr { ring, addresses }
            }
            code::SET_VRING_BASE => {
                let [ring, base] = wire.read()?;
                Request::SetVringBase { ring, base }
            }
            code::GET_VRING_BASE => {
                let [ring, _meaningless] = wire.read()?;
                Request::GetVringBase { ring }
            }
            code::SET_VRING_KICK => {
                wire.ring_fd().map(|(ring, fd)| Request::SetVringKick { ring, fd })?
            }
            code::SET_VRING_CALL => {
                wire.ring_fd().map(|(ring, fd)| Request::SetVringCall { ring, fd })?
            }
            code::SET_VRING_ERR => {
                wire.ring_fd().map(|(ring, fd)| Request::SetVringErr { ring, fd })?
            }
            code::GET_PROTOCOL_FEATURES => wire.empty(Request::GetProtocolFeatures)?,
            code::SET_PROTOCOL_FEATURES => {
                Request::SetProtocolFeatures(ProtocolFeatures::from_bits_retain(wire.read()?))
            }
            code::GET_QUEUE_NUM => wire.empty(Request::GetQueueNum)?,
            code::SET_VRING_ENABLE => match wire.read::<[u32; 2]>()? {
                [ring, enabled @ 0..=1] => Request::SetVringEnable { ring, enabled: enabled == 1 },
                [_, other] => return Err(wire.value("enable", other.into(), "0 or 1")),
            },
            code::SEND_RARP => {
                let [mac @ .., _, _]: [u8; 8] = wire.read()?;
                Request::SendRarp(mac)
            }
            code::NET_SET_MTU => Request::NetSetMtu(wire.narrow("MTU")?),
            code::SET_BACKEND_REQ_FD => wire.empty(Request::SetBackendReqFd)?,
            code::IOTLB_MSG => Request::Iotlb(wire.read()?),
            code::GET_CONFIG => {
                let (offset, _meaningless, data) = wire.config()?;
                Request::GetConfig { offset, size: data.len() as u32 }
            }
            code::SET_CONFIG => {
                let (offset, flags, data) = wire.config()?;
                let why = match flags {
                    0 => ConfigWrite::Driver,
                    1 => ConfigWrite::Migration,
                    other => return Err(wire.value("flags", other.into(), "0 or 1")),
                };
                Request::SetConfig { offset, why, data: data.to_vec() }
            }
            code::GET_INFLIGHT_FD => Request::GetInflight(wire.inflight()?),
            code::SET_INFLIGHT_FD => Request::SetInflight(wire.inflight()?),
            code::RESET_DEVICE => wire.empty(Request::ResetDevice)?,
            code::GET_MAX_MEM_SLOTS => wire.empty(Request::GetMaxMemSlots)?,
            code::ADD_MEM_REG => Request::AddMemReg(wire.slot()?),
            code::REM_MEM_REG => Request::RemMemReg(wire.slot()?),
            code::SET_STATUS => Request::SetStatus(wire.narrow("status")?),
            code::GET_STATUS => wire.empty(Request::GetStatus)?,
            code::POSTCOPY_ADVISE | code::POSTCOPY_LISTEN | code::POSTCOPY_END => {
                let why = "postcopy migration is not supported";
                return Err(WireError::State { request, why });
            }
            _ => return Err(WireError::Request { request }),
        })
    }

    /// The payload as it goes over the wire.
    pub fn payload(&self) -> Vec<u8> {
        let state = |ring: u32, num: u32| [ring, num].as_bytes().to_vec();
        let word = |word: u64| word.as_bytes().to_vec();
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
            Request::SetProtocolFeatures(features) => word(features.bits()),
            Request::SetStatus(status) => word((*status).into()),
            Request::NetSetMtu(mtu) => word((*mtu).into()),
            Request::SendRarp(mac) => [&mac[..], &[0; 2]].concat(),
            Request::SetLogBase { len, offset } => [*len, *offset].as_bytes().to_vec(),
            Request::GetInflight(place) | Request::SetInflight(place) => inflight(place),
            Request::SetMemTable(regions) => {
                let mut payload = state(regions.len() as u32, 0);
                payload.extend(regions.iter().flat_map(region_wire).flat_map(u64::to_ne_bytes));
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
            | Request::SetVringErr { ring, fd } => {
                word(u64::from(*ring) | if *fd { 0 } else { NO_FD })
            }
            Request::Iotlb(message) => message.as_bytes().to_vec(),
            Request::GetConfig { offset, size } => config(*offset, 0, &vec![0; *size as usize]),
            Request::SetConfig { offset, why, data } => {
                config(*offset, u32::from(*why == ConfigWrite::Migration), data)
            }
            Request::AddMemReg(region) | Request::RemMemReg(region) => {
                [&[0], &region_wire(region)[..]].concat().as_bytes().to_vec()
            }
        }
    }
}
