//! A payload that is being read: its size and its values are checked.

use ringfence_mem::Region;
use zerocopy::FromBytes;

use super::{
    Inflight, MAX_CONFIG, MAX_TABLE_REGIONS, code,
    wire::{ConfigWire, InflightWire, NO_FD, RegionWire, StateWire},
};
use crate::WireError;

/// Reads the answer to GET_VRING_BASE: the ring and its base.
pub(crate) fn parse_vring_base(payload: &[u8]) -> Result<(u32, u32), WireError> {
    let StateWire { ring, num } = Payload { request: code::GET_VRING_BASE, payload }.read()?;
    Ok((ring, num))
}

/// Reads the answer to GET_INFLIGHT_FD.
pub(crate) fn parse_inflight(payload: &[u8]) -> Result<Inflight, WireError> {
    Payload { request: code::GET_INFLIGHT_FD, payload }.read::<InflightWire>().map(Inflight::from)
}

/// The bytes of a payload, and the request that they belong to.
pub(super) struct Payload<'p> {
    pub(super) request: u32,
    pub(super) payload: &'p [u8],
}

impl<'p> Payload<'p> {
    fn size(&self) -> WireError {
        WireError::Size { request: self.request, size: self.payload.len() as u32 }
    }

    pub(super) fn value(&self, field: &'static str, value: u64) -> WireError {
        WireError::Value { request: self.request, field, value }
    }

    /// The whole payload, which must have exactly this shape.
    pub(super) fn read<T: FromBytes>(&self) -> Result<T, WireError> {
        T::read_from_bytes(self.payload).map_err(|_| self.size())
    }

    /// A word that has a narrower meaning.
    pub(super) fn narrow<T: TryFrom<u64>>(&self, field: &'static str) -> Result<T, WireError> {
        let word: u64 = self.read()?;
        T::try_from(word).map_err(|_| self.value(field, word))
    }

    /// Checks that the payload is empty; returns `meaning`.
    pub(super) fn empty<T>(&self, meaning: T) -> Result<T, WireError> {
        if self.payload.is_empty() { Ok(meaning) } else { Err(self.size()) }
    }

    pub(super) fn ring_fd(&self) -> Result<(u8, bool), WireError> {
        let word: u64 = self.read()?;
        if word & !(NO_FD | 0xff) != 0 {
            return Err(self.value("ring and flags", word));
        }
        Ok((word as u8, word & NO_FD == 0))
    }

    pub(super) fn regions(&self) -> Result<Vec<Region>, WireError> {
        let (head, rest) = StateWire::read_from_prefix(self.payload).map_err(|_| self.size())?;
        let count = head.ring as usize;
        if count == 0 || count > MAX_TABLE_REGIONS {
            return Err(self.value("regions", count as u64));
        }
        // User-Mode Linux sends a table of two, however many it fills: the rest means nothing.
        let places = rest.len() / size_of::<RegionWire>();
        if rest.len() % size_of::<RegionWire>() != 0
            || !(count..=MAX_TABLE_REGIONS).contains(&places)
        {
            return Err(self.size());
        }
        rest.chunks_exact(size_of::<RegionWire>())
            .take(count)
            .map(|bytes| RegionWire::read_from_bytes(bytes).map(Region::from))
            .collect::<Result<_, _>>()
            .map_err(|_| self.size())
    }

    pub(super) fn slot(&self) -> Result<Region, WireError> {
        let (_padding, rest) = u64::read_from_prefix(self.payload).map_err(|_| self.size())?;
        RegionWire::read_from_bytes(rest).map(Region::from).map_err(|_| self.size())
    }

    pub(super) fn config(&self) -> Result<(ConfigWire, &'p [u8]), WireError> {
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
