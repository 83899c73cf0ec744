//! Requests: what the driver puts into the request queue, and the tail that the device writes.

use ringfence_iommu::{Iova, Range};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned,
    little_endian::{U32, U64},
};

use super::Status;

/// The bytes of the device-readable part of the longest request (PROBE).
pub const MAX_REQUEST_LEN: usize = size_of::<RawProbe>();

/// The bytes of a tail: the status and three reserved bytes.
pub const TAIL_LEN: usize = 4;

/// The flags of MAP: the bits of a domain's permission. MMIO needs the feature of that name.
pub use ringfence_iommu::Prot as MapFlags;

bitflags::bitflags! {
    /// The flags of ATTACH.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct AttachFlags: u32 {
        /// The domain is a bypass domain. Needs the feature BYPASS_CONFIG.
        const BYPASS = 1;
        /// The domain is lazy: UNMAP there is completed before its invalidation. Needs the proposed
        /// feature LAZY_IOTLB_FLUSH.
        const LAZY = 1 << 31;
    }
}

/// The type of a request: the type byte of its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, TryFromBytes)]
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
    #[inline]
    pub fn from_u8(raw: u8) -> Option<Kind> {
        Kind::try_read_from_bytes(&[raw]).ok()
    }

    /// The bytes of the part that the device reads.
    pub const fn request_len(self) -> usize {
        match self {
            Kind::Attach => size_of::<RawAttach>(),
            Kind::Detach => size_of::<RawDetach>(),
            Kind::Map => size_of::<RawMap>(),
            Kind::Unmap => size_of::<RawUnmap>(),
            Kind::Probe => size_of::<RawProbe>(),
            Kind::IotlbFlush => size_of::<RawIotlbFlush>(),
        }
    }
}

macro_rules! raw {
    ($name:ident { $($field:ident: $type:ty),* $(,)? }) => {
        #[derive(
            Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
        )]
        #[repr(C)]
        struct $name { kind: u8, head_reserved: [u8; 3], $($field: $type),* }
    };
}

raw!(RawAttach { domain: U32, endpoint: U32, flags: U32, reserved: [u8; 4] });
raw!(RawDetach { domain: U32, endpoint: U32, reserved: [u8; 8] });
raw!(RawMap { domain: U32, virt_start: U64, virt_end: U64, phys_start: U64, flags: U32 });
raw!(RawUnmap { domain: U32, virt_start: U64, virt_end: U64, reserved: [u8; 4] });
raw!(RawProbe { endpoint: U32, reserved: [u8; 64] });
raw!(RawIotlbFlush { domain: U32, reserved: [u8; 12] });

/// Why bytes are not a request that can be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// There are fewer bytes than the 4 of a head, or the type is unknown (rule [V8]).
    ///
    /// [V8]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v8
    #[error("no head of 4 bytes with a type from 1 to 5 or 0xf0")]
    Unknown,
    /// The request is cut short.
    #[error("{0:?} is cut short: it has {len} bytes", len = .0.request_len())]
    Short(Kind),
    /// What is invalid in it: a reserved field that is not zero (rules [V9], [V21]), a flag that does
    /// not exist (rules [V9], [V17]), or a range that ends before it begins (rule [V38]).
    ///
    /// [V9]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v9
    /// [V17]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v17
    /// [V21]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v21
    /// [V38]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v38
    #[error("{0:?}: {1}")]
    Invalid(Kind, &'static str),
}

const RESERVED: &str = "reserved bytes are not zero";
const UNKNOWN_FLAGS: &str = "unknown flags";
const EMPTY_RANGE: &str = "the range ends before it begins";

impl ParseError {
    /// The kind of the request, if the bytes are enough to determine it.
    pub const fn kind(self) -> Option<Kind> {
        match self {
            ParseError::Unknown => None,
            ParseError::Short(kind) | ParseError::Invalid(kind, _) => Some(kind),
        }
    }

    /// The status to complete with; `None` where the buffer is to be returned unwritten (rule
    /// [V8]).
    ///
    /// [V8]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v8
    pub const fn status(self) -> Option<Status> {
        match self {
            ParseError::Unknown => None,
            _ => Some(Status::Inval),
        }
    }
}

#[inline(always)]
fn range_of(kind: Kind, start: U64, end: U64) -> Result<Range, ParseError> {
    let range = Range::new(Iova(start.get()), Iova(end.get()));
    range.ok_or(ParseError::Invalid(kind, EMPTY_RANGE))
}

/// A request, holding only what can be carried out or refused for what it *means*: an unknown flag
/// or a range that ends before it begins does not get this far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Request {
    /// Put `endpoint` into `domain`, making the domain if it does not exist.
    Attach {
        /// The domain.
        domain: u32,
        /// The endpoint.
        endpoint: u32,
        /// What kind of domain.
        flags: AttachFlags,
    },
    /// Take `endpoint` out of `domain`.
    Detach {
        /// The domain.
        domain: u32,
        /// The endpoint.
        endpoint: u32,
    },
    /// Map `range` of `domain` to `phys` and what follows it.
    Map(MapRequest),
    /// Remove all mappings of `domain` in `range`.
    Unmap(UnmapRequest),
    /// Get the properties of `endpoint`.
    Probe {
        /// The endpoint.
        endpoint: u32,
    },
    /// Invalidate what was unmapped of `domain`, a lazy one, before this request.
    IotlbFlush {
        /// The domain.
        domain: u32,
    },
}

impl Request {
    /// Parses the device-readable bytes of a request; those beyond its
    /// [length](Kind::request_len) are ignored.
    ///
    /// # Errors
    /// [`ParseError`]. Reserved bytes are checked where the specification lets a device do so:
    /// ATTACH (rule [V9]) and UNMAP (rule [V21]), not DETACH ([V13]) and PROBE ([V24]); and in
    /// IOTLB_FLUSH.
    ///
    /// [V9]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v9
    /// [V21]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v21
    /// [V13]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v13
    /// [V24]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v24
    pub fn parse(bytes: &[u8]) -> Result<Request, ParseError> {
        let head = bytes.first_chunk::<4>().ok_or(ParseError::Unknown)?;
        let kind = Kind::from_u8(head[0]).ok_or(ParseError::Unknown)?;
        let (short, invalid) = (ParseError::Short(kind), |why| ParseError::Invalid(kind, why));
        let zero = |reserved: &[u8]| match reserved.iter().all(|&byte| byte == 0) {
            true => Ok(()),
            false => Err(invalid(RESERVED)),
        };
        Ok(match kind {
            Kind::Map => Request::Map(MapRequest::parse(bytes).ok_or(short)??),
            Kind::Unmap => Request::Unmap(UnmapRequest::parse(bytes).ok_or(short)??),
            Kind::Attach => {
                let (raw, _) = RawAttach::ref_from_prefix(bytes).map_err(|_| short)?;
                zero(&raw.reserved)?;
                let (domain, endpoint, flags) = (raw.domain, raw.endpoint, raw.flags.get());
                let flags = AttachFlags::from_bits(flags).ok_or(invalid(UNKNOWN_FLAGS))?;
                Request::Attach { domain: domain.get(), endpoint: endpoint.get(), flags }
            }
            Kind::Detach => {
                let (raw, _) = RawDetach::ref_from_prefix(bytes).map_err(|_| short)?;
                Request::Detach { domain: raw.domain.get(), endpoint: raw.endpoint.get() }
            }
            Kind::Probe => {
                let (raw, _) = RawProbe::ref_from_prefix(bytes).map_err(|_| short)?;
                Request::Probe { endpoint: raw.endpoint.get() }
            }
            Kind::IotlbFlush => {
                let (raw, _) = RawIotlbFlush::ref_from_prefix(bytes).map_err(|_| short)?;
                zero(&raw.reserved)?;
                Request::IotlbFlush { domain: raw.domain.get() }
            }
        })
    }

    /// What kind it is.
    pub const fn kind(&self) -> Kind {
        match self {
            Request::Attach { .. } => Kind::Attach,
            Request::Detach { .. } => Kind::Detach,
            Request::Map(_) => Kind::Map,
            Request::Unmap(_) => Kind::Unmap,
            Request::Probe { .. } => Kind::Probe,
            Request::IotlbFlush { .. } => Kind::IotlbFlush,
        }
    }

    /// Writes the device-readable bytes to the front of `out`, reserved fields zero (rule [V34]),
    /// and returns how many there are: [`Kind::request_len`].
    ///
    /// [V34]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v34
    #[inline(always)]
    pub fn emit(&self, out: &mut [u8; MAX_REQUEST_LEN]) -> usize {
        let (kind, head_reserved) = (self.kind() as u8, [0; 3]);
        fn put(out: &mut [u8], raw: &(impl IntoBytes + Immutable)) -> usize {
            let raw = raw.as_bytes();
            out[..raw.len()].copy_from_slice(raw);
            raw.len()
        }
        match *self {
            Request::Attach { domain, endpoint, flags } => {
                let (domain, endpoint) = (domain.into(), endpoint.into());
                let flags = flags.bits().into();
                let reserved = [0; 4];
                put(out, &RawAttach { kind, head_reserved, domain, endpoint, flags, reserved })
            }
            Request::Detach { domain, endpoint } => {
                let (domain, endpoint) = (domain.into(), endpoint.into());
                put(out, &RawDetach { kind, head_reserved, domain, endpoint, reserved: [0; 8] })
            }
            Request::Map(MapRequest { domain, range, phys, flags }) => put(
                out,
                &RawMap {
                    kind,
                    head_reserved,
                    domain: domain.into(),
                    virt_start: range.first().0.into(),
                    virt_end: range.last().0.into(),
                    phys_start: phys.into(),
                    flags: flags.bits().into(),
                },
            ),
            Request::Unmap(UnmapRequest { domain, range }) => put(
                out,
                &RawUnmap {
                    kind,
                    head_reserved,
                    domain: domain.into(),
                    virt_start: range.first().0.into(),
                    virt_end: range.last().0.into(),
                    reserved: [0; 4],
                },
            ),
            Request::Probe { endpoint } => {
                let endpoint = endpoint.into();
                put(out, &RawProbe { kind, head_reserved, endpoint, reserved: [0; 64] })
            }
            Request::IotlbFlush { domain } => {
                let domain = domain.into();
                put(out, &RawIotlbFlush { kind, head_reserved, domain, reserved: [0; 12] })
            }
        }
    }
}

/// A MAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MapRequest {
    /// The domain.
    pub domain: u32,
    /// The addresses to map.
    pub range: Range,
    /// Where the first leads to: a guest-physical address.
    pub phys: u64,
    /// What is allowed.
    pub flags: MapFlags,
}

impl MapRequest {
    /// As [`Request::parse`] of what is a MAP; `None` if it is none, or cut short. Nearly all requests
    /// are one, or an UNMAP: what is parsed is used where it is, and not carried about as one of many
    /// kinds.
    #[inline(always)]
    pub(crate) fn parse(bytes: &[u8]) -> Option<Result<MapRequest, ParseError>> {
        let (raw, _) = RawMap::ref_from_prefix(bytes).ok()?;
        if raw.kind != Kind::Map as u8 {
            return None;
        }
        let unknown = ParseError::Invalid(Kind::Map, UNKNOWN_FLAGS);
        let map = |flags| {
            let range = range_of(Kind::Map, raw.virt_start, raw.virt_end)?;
            Ok(MapRequest { domain: raw.domain.get(), range, phys: raw.phys_start.get(), flags })
        };
        Some(MapFlags::from_bits(raw.flags.get()).ok_or(unknown).and_then(map))
    }
}

/// An UNMAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnmapRequest {
    /// The domain.
    pub domain: u32,
    /// The addresses.
    pub range: Range,
}

impl UnmapRequest {
    /// As [`MapRequest::parse`], of an UNMAP.
    #[inline(always)]
    pub(crate) fn parse(bytes: &[u8]) -> Option<Result<UnmapRequest, ParseError>> {
        let (raw, _) = RawUnmap::ref_from_prefix(bytes).ok()?;
        let kind = Kind::Unmap;
        if raw.kind != kind as u8 {
            return None;
        }
        if raw.reserved != [0; 4] {
            return Some(Err(ParseError::Invalid(kind, RESERVED)));
        }
        let range = range_of(kind, raw.virt_start, raw.virt_end);
        Some(range.map(|range| UnmapRequest { domain: raw.domain.get(), range }))
    }
}

/// The tail with `status`, reserved bytes zero (rule [V7]).
///
/// [V7]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v7
pub const fn emit_tail(status: Status) -> [u8; TAIL_LEN] {
    [status as u8, 0, 0, 0]
}

/// The status that a tail holds, its reserved bytes ignored (rule [V34]).
///
/// # Errors
/// The byte, where it is no status.
///
/// [V34]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v34
pub fn parse_tail(tail: [u8; TAIL_LEN]) -> Result<Status, u8> {
    Status::from_u8(tail[0]).ok_or(tail[0])
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range() -> impl Strategy<Value = Range> {
        (any::<u64>(), any::<u64>())
            .prop_map(|(a, b)| Range::new(Iova(a.min(b)), Iova(a.max(b))).unwrap())
    }

    /// Any request there is.
    pub(crate) fn request() -> impl Strategy<Value = Request> {
        prop_oneof![
            (any::<u32>(), any::<u32>(), any::<u32>()).prop_map(|(domain, endpoint, flags)| {
                let flags = AttachFlags::from_bits_truncate(flags);
                Request::Attach { domain, endpoint, flags }
            }),
            (any::<u32>(), any::<u32>())
                .prop_map(|(domain, endpoint)| Request::Detach { domain, endpoint }),
            (any::<u32>(), range(), any::<u64>(), 0u32..8).prop_map(
                |(domain, range, phys, flags)| {
                    let flags = MapFlags::from_bits_truncate(flags);
                    Request::Map(MapRequest { domain, range, phys, flags })
                }
            ),
            (any::<u32>(), range())
                .prop_map(|(domain, range)| Request::Unmap(UnmapRequest { domain, range })),
            any::<u32>().prop_map(|endpoint| Request::Probe { endpoint }),
            any::<u32>().prop_map(|domain| Request::IotlbFlush { domain }),
        ]
    }

    proptest! {
        #[test]
        fn parsing_undoes_emitting(request in request()) {
            // rule V34
            let mut bytes = [0xaa; MAX_REQUEST_LEN];
            let len = request.emit(&mut bytes);
            prop_assert_eq!(len, request.kind().request_len());
            prop_assert_eq!(Request::parse(&bytes[..len]), Ok(request));
            prop_assert_eq!(&bytes[1..4], &[0, 0, 0]);
            // One byte less is never the same request.
            let short = ParseError::Short(request.kind());
            prop_assert_eq!(Request::parse(&bytes[..len - 1]), Err(short));
        }

        #[test]
        fn emitting_undoes_parsing_but_for_what_is_ignored(
            kind in prop_oneof![0u8..7, Just(0xf0)], rest in proptest::collection::vec(any::<u8>(), 0..90),
        ) {
            let mut bytes = vec![kind];
            bytes.extend(rest);
            if let Ok(request) = Request::parse(&bytes) {
                let mut again = [0; MAX_REQUEST_LEN];
                let len = request.emit(&mut again);
                bytes.truncate(len);
                bytes[1..4].fill(0);
                match request {
                    Request::Detach { .. } => bytes[12..].fill(0),
                    Request::Probe { .. } => bytes[8..].fill(0),
                    _ => {}
                }
                prop_assert_eq!(&bytes[..], &again[..len]);
            }
        }

        #[test]
        fn a_map_and_an_unmap_are_what_any_request_is(
            kind in prop_oneof![0u8..7, Just(0xf0)],
            reserved in prop_oneof![3 => Just(0), 1 => any::<u8>()],
            flags in 0u8..10,
            rest in proptest::collection::vec(any::<u8>(), 0..90),
        ) {
            let mut bytes = vec![kind];
            bytes.extend(rest);
            // Such as are legal more often than not.
            if let Some(body) = bytes.get_mut(24..28) {
                body.fill(reserved);
            }
            if let Some(bits) = bytes.get_mut(32..36) {
                bits.copy_from_slice(&u32::from(flags).to_le_bytes());
            }
            let long = Request::parse(&bytes);
            let map = MapRequest::parse(&bytes).map(|map| map.map(Request::Map));
            let unmap = UnmapRequest::parse(&bytes).map(|unmap| unmap.map(Request::Unmap));
            let is = |of: Kind| kind == of as u8 && bytes.len() >= of.request_len();
            prop_assert_eq!(map, is(Kind::Map).then_some(long));
            prop_assert_eq!(unmap, is(Kind::Unmap).then_some(long));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Request::parse(&bytes);
        }
    }

    #[test]
    fn a_flush_of_a_lazy_domain_is_distinct_from_the_specifications_requests() {
        let mut bytes = [0xaa; MAX_REQUEST_LEN];
        let len = Request::IotlbFlush { domain: 0x0403_0201 }.emit(&mut bytes);
        assert_eq!((len, &bytes[..8]), (20, &[0xf0, 0, 0, 0, 1, 2, 3, 4][..]));
        bytes[19] = 1;
        let refused = Request::parse(&bytes[..len]).unwrap_err();
        assert_eq!(refused, ParseError::Invalid(Kind::IotlbFlush, RESERVED));
        assert_eq!(refused.kind(), Some(Kind::IotlbFlush));
        assert!(!AttachFlags::BYPASS.intersects(AttachFlags::LAZY));
    }

    #[test]
    fn the_lengths_are_those_of_the_specification() {
        let lengths = [Kind::Attach, Kind::Detach, Kind::Map, Kind::Unmap, Kind::Probe]
            .map(|kind| kind.request_len());
        assert_eq!(lengths, [20, 20, 36, 28, 72]);
        let flags = [MapFlags::READ, MapFlags::WRITE, MapFlags::MMIO, MapFlags::all()];
        assert_eq!(flags.map(|flags| flags.bits()), [1, 2, 4, 7]);
    }

    #[test]
    fn reserved_bytes_of_the_head_are_ignored() {
        // rule V7
        let mut bytes = [0; MAX_REQUEST_LEN];
        let request = Request::Attach { domain: 1, endpoint: 2, flags: AttachFlags::empty() };
        let len = request.emit(&mut bytes);
        bytes[1..4].fill(0xff);
        assert_eq!(Request::parse(&bytes[..len]), Ok(request));
    }

    #[test]
    fn a_range_must_not_end_before_it_begins() {
        // rule V38
        let mut bytes = [0; MAX_REQUEST_LEN];
        let range = Range::new(Iova(0x1000), Iova(0x1000)).unwrap();
        let flags = MapFlags::READ;
        let len = Request::Map(MapRequest { domain: 1, range, phys: 0, flags }).emit(&mut bytes);
        bytes[16] = 0xff;
        bytes[17] = 0x0f;
        let err = Request::parse(&bytes[..len]).unwrap_err();
        assert_eq!(err, ParseError::Invalid(Kind::Map, EMPTY_RANGE));
        assert_eq!(err.status(), Some(Status::Inval));
    }
}
