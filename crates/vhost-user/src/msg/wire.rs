//! The shapes of payloads.

use ringfence_mem::Region;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Inflight;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct StateWire {
    pub(super) ring: u32,
    pub(super) num: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct AddrWire {
    pub(super) ring: u32,
    pub(super) flags: u32,
    pub(super) desc: u64,
    pub(super) used: u64,
    pub(super) avail: u64,
    pub(super) log: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct RegionWire {
    pub(super) gpa: u64,
    pub(super) size: u64,
    pub(super) user_addr: u64,
    pub(super) mmap_offset: u64,
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
pub(super) struct ConfigWire {
    pub(super) offset: u32,
    pub(super) size: u32,
    pub(super) flags: u32,
}

/// Bytes before the content of a GET_CONFIG or SET_CONFIG payload.
pub(crate) const CONFIG_HEAD: usize = size_of::<ConfigWire>();

/// SET_VRING_ADDR: the used ring is logged.
pub(super) const VRING_F_LOG: u32 = 1;
/// SET_VRING_KICK and the like: no descriptor comes along.
pub(super) const NO_FD: u64 = 1 << 8;

/// INFLIGHT: 20 bytes, padded as a C compiler does.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct InflightWire {
    pub(super) len: u64,
    pub(super) offset: u64,
    pub(super) queues: u16,
    pub(super) size: u16,
    pub(super) padding: [u8; 4],
}

impl From<&Inflight> for InflightWire {
    fn from(inflight: &Inflight) -> InflightWire {
        let &Inflight { len, offset, queues, size } = inflight;
        InflightWire { len, offset, queues, size, padding: [0; 4] }
    }
}

impl From<InflightWire> for Inflight {
    fn from(wire: InflightWire) -> Inflight {
        let InflightWire { len, offset, queues, size, .. } = wire;
        Inflight { len, offset, queues, size }
    }
}

/// SET_LOG_BASE.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct LogWire {
    pub(super) len: u64,
    pub(super) offset: u64,
}

/// The payload of an answer to GET_VRING_BASE.
pub(crate) fn vring_base(ring: u32, base: u32) -> Vec<u8> {
    StateWire { ring, num: base }.as_bytes().to_vec()
}

/// The payload of GET_CONFIG (both ways) and SET_CONFIG.
pub(crate) fn config(offset: u32, flags: u32, data: &[u8]) -> Vec<u8> {
    let head = ConfigWire { offset, size: data.len() as u32, flags };
    [head.as_bytes(), data].concat()
}

/// The payload of an answer to GET_INFLIGHT_FD.
pub(crate) fn inflight(inflight: &Inflight) -> Vec<u8> {
    InflightWire::from(inflight).as_bytes().to_vec()
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
