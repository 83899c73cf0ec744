//! Fault records: what the device puts into buffers of the event queue (5.13.6.9).

use ringfence_iommu::{Fault, FaultReason, Iova, Prot};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

/// The bytes of a fault record.
pub const FAULT_LEN: usize = size_of::<RawFault>();

/// The flags for reads and writes are the bits of [`Prot`].
pub(crate) const F_ADDRESS: u32 = 0x100;

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawFault {
    pub(crate) reason: u8,
    pub(crate) reserved: [u8; 3],
    pub(crate) flags: U32,
    pub(crate) endpoint: U32,
    pub(crate) reserved1: U32,
    pub(crate) address: U64,
}

/// A refused access, as it is reported to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FaultRecord {
    /// Why it was refused.
    pub reason: FaultReason,
    /// The endpoint that made the access.
    pub endpoint: u32,
    /// What was attempted: [`Prot::READ`], [`Prot::WRITE`], both, or nothing where it is unknown.
    pub access: Prot,
    /// The first address that was refused, if it is known.
    pub address: Option<Iova>,
}

impl From<Fault> for FaultRecord {
    fn from(fault: Fault) -> FaultRecord {
        FaultRecord {
            reason: fault.reason,
            endpoint: fault.endpoint,
            access: fault.access.intersection(Prot::RW),
            address: Some(fault.iova),
        }
    }
}

impl FaultRecord {
    /// The bytes of the record: reserved fields and undefined flags zero (rule [V28]).
    ///
    /// [V28]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v28
    pub fn emit(&self) -> [u8; FAULT_LEN] {
        let address = if self.address.is_some() { F_ADDRESS } else { 0 };
        let flags = self.access.intersection(Prot::RW).bits() | address;
        zerocopy::transmute!(RawFault {
            reason: match self.reason {
                FaultReason::NoDomain => 1,
                FaultReason::Mapping => 2,
                _ => 0,
            },
            reserved: [0; 3],
            flags: flags.into(),
            endpoint: self.endpoint.into(),
            reserved1: 0.into(),
            address: self.address.unwrap_or_default().0.into(),
        })
    }

    /// The access in the form that users of a domain get; `None` if the device did not report the
    /// address.
    pub fn fault(&self) -> Option<Fault> {
        let FaultRecord { reason, endpoint, access, address } = *self;
        Some(Fault { reason, endpoint, iova: address?, access })
    }

    /// Parses a record; `None` if it is too short or must be ignored because the bytes after the
    /// reason are not zero. The other reserved field and undefined flags are ignored, an unknown
    /// reason is [`FaultReason::Unknown`] (rule [V43]).
    ///
    /// [V43]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v43
    pub fn parse(bytes: &[u8]) -> Option<FaultRecord> {
        let (raw, _) = RawFault::read_from_prefix(bytes).ok()?;
        if raw.reserved != [0; 3] {
            return None;
        }
        let flags = raw.flags.get();
        let access = Prot::from_bits_truncate(flags).intersection(Prot::RW);
        Some(FaultRecord {
            reason: match raw.reason {
                1 => FaultReason::NoDomain,
                2 => FaultReason::Mapping,
                _ => FaultReason::Unknown,
            },
            endpoint: raw.endpoint.get(),
            access,
            address: (flags & F_ADDRESS != 0).then(|| Iova(raw.address.get())),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_record_has_zero_reserved_fields_and_no_undefined_flag() {
        // rule V28
        let fault = Fault {
            reason: FaultReason::Mapping,
            endpoint: 8,
            iova: Iova(0x1234),
            access: Prot::WRITE | Prot::MMIO,
        };
        let bytes = FaultRecord::from(fault).emit();
        assert_eq!(bytes.len(), 24);
        assert_eq!(bytes[..8], [2, 0, 0, 0, 2, 1, 0, 0]);
        assert_eq!(bytes[8..16], [8, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[16..], 0x1234u64.to_le_bytes());
    }

    #[test]
    fn a_fault_survives_the_record() {
        let fault = Fault {
            reason: FaultReason::Mapping,
            endpoint: 8,
            iova: Iova(u64::MAX),
            access: Prot::READ,
        };
        assert_eq!(FaultRecord::from(fault).fault(), Some(fault));
        let nowhere = FaultRecord { address: None, ..FaultRecord::from(fault) };
        assert_eq!(nowhere.fault(), None);
    }

    #[test]
    fn a_report_with_reserved_bytes_is_ignored_and_the_rest_is_tolerated() {
        // rule V43
        let record = FaultRecord {
            reason: FaultReason::NoDomain,
            endpoint: 1,
            access: Prot::READ,
            address: None,
        };
        let good = record.emit();
        let mut bytes = good;
        bytes[2] = 1;
        assert_eq!(FaultRecord::parse(&bytes), None);
        bytes = good;
        bytes[6] = 0xff; // undefined flags
        bytes[12..16].fill(0xff); // reserved1
        assert_eq!(FaultRecord::parse(&bytes), Some(record));
        bytes = good;
        bytes[0] = 200;
        assert_eq!(FaultRecord::parse(&bytes).unwrap().reason, FaultReason::Unknown);
        assert_eq!(FaultRecord::parse(&good[..23]), None);
    }

    proptest! {
        #[test]
        fn parsing_undoes_emitting(
            reason in 0..3, endpoint: u32, access in 0u32..4, address: Option<u64>,
        ) {
            let record = FaultRecord {
                reason: match reason {
                    0 => FaultReason::Unknown,
                    1 => FaultReason::NoDomain,
                    _ => FaultReason::Mapping,
                },
                endpoint,
                access: Prot::from_bits_truncate(access),
                address: address.map(Iova),
            };
            prop_assert_eq!(FaultRecord::parse(&record.emit()), Some(record));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = FaultRecord::parse(&bytes);
        }
    }
}
