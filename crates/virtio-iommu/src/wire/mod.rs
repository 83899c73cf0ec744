//! The format of virtio-iommu: constants, requests, properties, configuration, fault records.
//!
//! Each part is a small type that holds only what the format can say ([`Request`]); parsing and
//! emitting are inverse, and no string of bytes panics.

use std::fmt;

use zerocopy::TryFromBytes;

mod config;
mod fault;
mod property;
mod request;

pub(crate) use config::{BYPASS_AT, RawConfig};
pub use config::{CONFIG_LEN, ConfigError, IommuConfig};
pub(crate) use fault::{F_ADDRESS, RawFault};
pub use fault::{FAULT_LEN, FaultRecord};
pub(crate) use property::RawRegion;
pub use property::{Properties, write_properties};
pub use request::{
    AttachFlags, Kind, MAX_REQUEST_LEN, MapFlags, MapRequest, ParseError, Request, TAIL_LEN,
    UnmapRequest, emit_tail, parse_tail,
};

/// The virtio device number of an IOMMU.
pub const DEVICE_ID: u32 = 23;

/// The index of the request queue, which the driver fills.
pub const REQUEST_QUEUE: u16 = 0;

/// The index of the event queue, where the device fills buffers with fault records.
pub const EVENT_QUEUE: u16 = 1;

bitflags::bitflags! {
    /// The feature bits of a virtio-iommu (5.13.3).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Features: u64 {
        /// `input_range` in the configuration holds: only those addresses can be mapped.
        const INPUT_RANGE = 1 << 0;
        /// `domain_range` in the configuration holds: only those domain numbers can be used.
        const DOMAIN_RANGE = 1 << 1;
        /// MAP and UNMAP requests exist.
        const MAP_UNMAP = 1 << 2;
        /// Unattached endpoints bypass the IOMMU (old; not to be offered by new devices).
        const BYPASS = 1 << 3;
        /// PROBE requests exist.
        const PROBE = 1 << 4;
        /// MAP supports the flag MMIO.
        const MMIO = 1 << 5;
        /// The field `bypass` in the configuration and bypass domains exist.
        const BYPASS_CONFIG = 1 << 6;
        /// Lazy domains and IOTLB_FLUSH requests exist. A proposal (oasis-tcs/virtio-spec#204), not
        /// part of the specification: the bit, the flag and the type are our own choice, as far
        /// from the specification's as possible, and both ends use them only if an option enables
        /// them.
        const LAZY_IOTLB_FLUSH = 1 << 63;
    }
}

impl Features {
    /// The features that are not in the specification.
    pub const PROPOSED: Features = Features::LAZY_IOTLB_FLUSH;
}

/// How a request ended: the first byte of its tail (5.13.6.2). Displayed as the specification
/// spells it: `NOENT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, TryFromBytes)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The buffers could not be read or written.
    IoErr = 1,
    /// The request cannot be done by this device.
    Unsupp = 2,
    /// The device failed.
    DevErr = 3,
    /// A parameter is wrong.
    Inval = 4,
    /// An address or a number is out of range.
    Range = 5,
    /// The domain or the endpoint does not exist.
    NoEnt = 6,
    /// A guest address could not be reached.
    Fault = 7,
    /// A limit is reached.
    NoMem = 8,
}

impl Status {
    /// The status that `raw` stands for, if it is one.
    pub fn from_u8(raw: u8) -> Option<Status> {
        Status::try_read_from_bytes(&[raw]).ok()
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_uppercase())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_its_number_and_nothing_else_is_one() {
        for raw in 0..=u8::MAX {
            match Status::from_u8(raw) {
                Some(status) => assert_eq!(status as u8, raw),
                None => assert!(raw > 8),
            }
        }
    }
}
