//! The virtio-blk format (virtio 1.3, section 5.2).

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes,
    little_endian::{U16, U32, U64},
};

/// Device ID of a block device.
pub const DEVICE_ID: u32 = 2;
/// The unit of `sector` and `capacity`, whatever the block size.
pub const SECTOR: u64 = 512;
/// The length of the data of [`Kind::GetId`].
pub const ID_BYTES: usize = 20;

/// Feature bits, as masks.
pub mod feature {
    /// `size_max` in the configuration is valid.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// `seg_max` in the configuration is valid.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The disk is read-only.
    pub const RO: u64 = 1 << 5;
    /// `blk_size` in the configuration is valid.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// Flush requests are understood.
    pub const FLUSH: u64 = 1 << 9;
    /// `writeback` in the configuration is valid, and may be written.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// `num_queues` in the configuration is valid.
    pub const MQ: u64 = 1 << 12;
    /// Discard requests are understood.
    pub const DISCARD: u64 = 1 << 13;
    /// Requests to write zeroes are understood.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// The header of every request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// A [`Kind`].
    pub kind: U32,
    /// Ignored by the device.
    pub reserved: U32,
    /// The first sector.
    pub sector: U64,
}

/// The size of a [`Header`].
pub const HEADER_BYTES: usize = size_of::<Header>();

/// A range of a discard, or of a request to write zeroes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Extent {
    /// Where it begins, in sectors.
    pub sector: U64,
    /// How many sectors.
    pub sectors: U32,
    /// [`EXTENT_UNMAP`], or 0.
    pub flags: U32,
}

/// The size of an [`Extent`].
pub const EXTENT_BYTES: usize = size_of::<Extent>();
/// Zeroes may be written by deallocating the range.
pub const EXTENT_UNMAP: u32 = 1;

/// The type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes)]
#[repr(u32)]
pub enum Kind {
    /// Read.
    In = 0,
    /// Write.
    Out = 1,
    /// Make what was written durable.
    Flush = 4,
    /// The name of the disk, [`ID_BYTES`] long.
    GetId = 8,
    /// The content of a range no longer matters.
    Discard = 11,
    /// Make a range read as zeroes.
    WriteZeroes = 13,
}

impl Kind {
    /// The number on the wire.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The kind of a number; `None` if it is none of these.
    pub fn from_code(code: u32) -> Option<Kind> {
        Kind::try_read_from_bytes(&code.to_ne_bytes()).ok()
    }
}

/// A request's status, in its last byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// It failed.
    IoErr = 1,
    /// The device does not support the request.
    Unsupported = 2,
}

impl Status {
    /// The byte on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

/// The configuration space up to `write_zeroes_may_unmap`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BlkConfig {
    /// Sectors of 512 bytes.
    pub capacity: U64,
    /// Most bytes of a segment; 0 without its feature.
    pub size_max: U32,
    /// Most segments of data in a request.
    pub seg_max: U32,
    /// Cylinders, heads, sectors: obsolete.
    pub geometry: [u8; 4],
    /// Bytes of a block.
    pub blk_size: U32,
    /// Physical block exponent, alignment, minimum and optimal I/O size.
    pub topology: [u8; 8],
    /// Cache mode: 0 write-through, 1 write-back.
    pub writeback: u8,
    /// Nothing.
    pub unused0: u8,
    /// Request queues.
    pub num_queues: U16,
    /// The most sectors of a discard.
    pub max_discard_sectors: U32,
    /// The most ranges of a discard.
    pub max_discard_seg: U32,
    /// The preferred alignment of discards, in sectors.
    pub discard_sector_alignment: U32,
    /// The most sectors of a request to write zeroes.
    pub max_write_zeroes_sectors: U32,
    /// The most ranges of one.
    pub max_write_zeroes_seg: U32,
    /// Whether such a request may deallocate.
    pub write_zeroes_may_unmap: u8,
    /// Nothing.
    pub unused1: [u8; 3],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sizes_are_those_of_the_specification() {
        assert_eq!(HEADER_BYTES, 16);
        assert_eq!(EXTENT_BYTES, 16);
        assert_eq!(size_of::<BlkConfig>(), 60);
        assert_eq!(std::mem::offset_of!(BlkConfig, write_zeroes_may_unmap), 56);
        assert_eq!(std::mem::offset_of!(BlkConfig, num_queues), 34);
    }

    #[test]
    fn every_kind_keeps_its_number() {
        use Kind::{Discard, Flush, GetId, In, Out, WriteZeroes};
        for kind in [In, Out, Flush, GetId, Discard, WriteZeroes] {
            assert_eq!(Kind::from_code(kind.code()), Some(kind));
        }
        assert_eq!(Kind::from_code(2), None);
    }
}
