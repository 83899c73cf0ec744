//! What requests there are.

/// The type of a request: the type byte of its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Put an endpoint into a domain.
    Attach = 1,
    /// Take an endpoint out of a domain.
    Detach = 2,
    /// Map a range of a domain.
    Map = 3,
    /// Remove mappings of a domain.
    Unmap = 4,
    /// Get the properties of an endpoint.
    Probe = 5,
    /// Invalidate what a lazy domain has unmapped. Needs the proposed feature LAZY_IOTLB_FLUSH.
    IotlbFlush = 0xf0,
}

impl Kind {
    /// The kind that a type byte stands for, if it is one.
    pub const fn from_u8(raw: u8) -> Option<Kind> {
        Some(match raw {
            1 => Kind::Attach,
            2 => Kind::Detach,
            3 => Kind::Map,
            4 => Kind::Unmap,
            5 => Kind::Probe,
            0xf0 => Kind::IotlbFlush,
            _ => return None,
        })
    }
}
