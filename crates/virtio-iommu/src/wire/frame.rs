//! The bytes of a request, checked once, and why they may be none.

use super::{Kind, Status};

/// Why bytes are not a request that can be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// There is not even a head.
    #[error("{0} bytes hold no request head")]
    NoHead(usize),
    /// The type is unknown (rule V8).
    #[error("unknown request type {0}")]
    UnknownType(u8),
    /// The request is cut short.
    #[error("{kind:?} of {len} bytes is cut short")]
    Short {
        /// The kind that it claims.
        kind: Kind,
        /// How long it is.
        len: usize,
    },
    /// A reserved field that must be zero is not (rules V9, V21).
    #[error("reserved bytes of {0:?} are not zero")]
    Reserved(Kind),
    /// A flag that does not exist (rules V9, V17).
    #[error("unknown flags {flags:#x} of {kind:?}")]
    UnknownFlags {
        /// The request.
        kind: Kind,
        /// All its flags.
        flags: u32,
    },
    /// The range ends before it begins (rule V38).
    #[error("{kind:?} ends at {end:#x}, before it begins at {start:#x}")]
    EmptyRange {
        /// The request.
        kind: Kind,
        /// Its first address.
        start: u64,
        /// Its last.
        end: u64,
    },
}

impl ParseError {
    /// The kind of the request, if the bytes are enough to determine it.
    pub const fn kind(self) -> Option<Kind> {
        match self {
            ParseError::NoHead(_) | ParseError::UnknownType(_) => None,
            ParseError::Reserved(kind)
            | ParseError::Short { kind, .. }
            | ParseError::UnknownFlags { kind, .. }
            | ParseError::EmptyRange { kind, .. } => Some(kind),
        }
    }

    /// The status to answer with; `None` where the buffer is to be returned unwritten (rule V8).
    pub const fn status(self) -> Option<Status> {
        match self {
            ParseError::NoHead(_) | ParseError::UnknownType(_) => None,
            _ => Some(Status::Inval),
        }
    }
}

/// A view of the device-readable bytes of a request: long enough for its type, so that no accessor
/// can fail. Bytes beyond the type's length are not looked at.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    kind: Kind,
    bytes: &'a [u8],
}

impl<'a> Frame<'a> {
    /// A view of `bytes`.
    ///
    /// # Errors
    /// [`ParseError::NoHead`], [`ParseError::UnknownType`], [`ParseError::Short`].
    pub fn new_checked(bytes: &'a [u8]) -> Result<Frame<'a>, ParseError> {
        if bytes.len() < 4 {
            return Err(ParseError::NoHead(bytes.len()));
        }
        let kind = Kind::from_u8(bytes[0]).ok_or(ParseError::UnknownType(bytes[0]))?;
        match bytes.get(..kind.request_len()) {
            Some(bytes) => Ok(Frame { kind, bytes }),
            None => Err(ParseError::Short { kind, len: bytes.len() }),
        }
    }

    /// The type of the request.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The domain; 0 for PROBE, which names none.
    pub fn domain(&self) -> u32 {
        if self.kind == Kind::Probe { 0 } else { self.u32_at(4) }
    }

    /// The endpoint; 0 for MAP, UNMAP and IOTLB_FLUSH, which name none.
    pub fn endpoint(&self) -> u32 {
        match self.kind {
            Kind::Attach | Kind::Detach => self.u32_at(8),
            Kind::Probe => self.u32_at(4),
            Kind::Map | Kind::Unmap | Kind::IotlbFlush => 0,
        }
    }

    /// The flags; 0 for the kinds without.
    pub fn flags(&self) -> u32 {
        match self.kind {
            Kind::Attach => self.u32_at(12),
            Kind::Map => self.u32_at(32),
            _ => 0,
        }
    }

    /// The first address of MAP and UNMAP; 0 for others.
    pub fn virt_start(&self) -> u64 {
        if matches!(self.kind, Kind::Map | Kind::Unmap) { self.u64_at(8) } else { 0 }
    }

    /// The last address of MAP and UNMAP; 0 for others.
    pub fn virt_end(&self) -> u64 {
        if matches!(self.kind, Kind::Map | Kind::Unmap) { self.u64_at(16) } else { 0 }
    }

    /// Where MAP leads to; 0 for others.
    pub fn phys_start(&self) -> u64 {
        if self.kind == Kind::Map { self.u64_at(24) } else { 0 }
    }

    /// The reserved bytes of the body (those of the head are never looked at, rule V7).
    pub fn reserved(&self) -> &'a [u8] {
        let from = match self.kind {
            Kind::Attach => 16,
            Kind::Detach => 12,
            Kind::Map => 36,
            Kind::Unmap => 24,
            Kind::Probe | Kind::IotlbFlush => 8,
        };
        self.bytes.get(from..).unwrap_or(&[])
    }

    fn u32_at(&self, at: usize) -> u32 {
        self.bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }

    fn u64_at(&self, at: usize) -> u64 {
        self.bytes
            .get(at..at + 8)
            .map_or(0, |b| u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
    }
}
