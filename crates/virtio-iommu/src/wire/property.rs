//! The properties of an endpoint, as PROBE returns them (5.13.6.7).

use ringfence_iommu::{Iova, Range, ReservedKind, ReservedRegion};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, little_endian::U64};

/// Header bytes of a property: type and length.
const HEADER: usize = 4;
/// The only type there is: a region that is not for mapping.
const RESV_MEM: u16 = 1;
/// The bits of the first header word that hold the type; the others are reserved.
const TYPE_MASK: u16 = 0x0fff;
/// The bytes of a RESV_MEM property with its header.
const RESV_MEM_LEN: usize = HEADER + size_of::<RawRegion>();

/// A RESV_MEM property without its header: these are the bytes that its length counts (rule V25).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawRegion {
    pub(crate) subtype: u8,
    pub(crate) reserved: [u8; 3],
    pub(crate) first: U64,
    pub(crate) last: U64,
}

/// The bytes of the property that describes `region`. A driver must not map over a directly mapped
/// region, so it is reported as reserved.
fn emit(region: ReservedRegion) -> [u8; RESV_MEM_LEN] {
    let body = RawRegion {
        subtype: (region.kind == ReservedKind::Msi).into(),
        reserved: [0; 3],
        first: region.range.first().0.into(),
        last: region.range.last().0.into(),
    };
    let mut out = [0; RESV_MEM_LEN];
    out[0..2].copy_from_slice(&RESV_MEM.to_le_bytes());
    out[2..4].copy_from_slice(&(size_of::<RawRegion>() as u16).to_le_bytes());
    out[HEADER..].copy_from_slice(body.as_bytes());
    out
}

/// Fills `out` with the properties of an endpoint that has these `regions`, one directly after the
/// other, the rest zero (rule [V25]). False, and `out` is left alone, if they do not fit.
///
/// [V25]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v25
#[must_use]
pub fn write_properties(regions: &[ReservedRegion], out: &mut [u8]) -> bool {
    if regions.len() > out.len() / RESV_MEM_LEN {
        return false;
    }
    out.fill(0);
    for (&region, at) in regions.iter().zip(out.chunks_exact_mut(RESV_MEM_LEN)) {
        at.copy_from_slice(&emit(region));
    }
    true
}

/// Iterates over the regions that the property bytes of a PROBE describe.
///
/// Tolerant (rules [V41], [V42]): a property with reserved header bits, an unknown type, or a short
/// or invalid body is skipped and parsing goes on behind it; an unknown subtype counts as reserved.
/// Parsing ends at a length that leads outside.
///
/// [V41]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v41
/// [V42]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v42
#[derive(Clone, Debug)]
pub struct Properties<'a> {
    rest: &'a [u8],
}

impl<'a> Properties<'a> {
    /// The properties in `bytes`.
    pub fn new(bytes: &'a [u8]) -> Properties<'a> {
        Properties { rest: bytes }
    }
}

impl Iterator for Properties<'_> {
    type Item = ReservedRegion;

    fn next(&mut self) -> Option<ReservedRegion> {
        loop {
            let (header, rest) = self.rest.split_first_chunk::<HEADER>()?;
            let word = u16::from_le_bytes([header[0], header[1]]);
            let len = usize::from(u16::from_le_bytes([header[2], header[3]]));
            let Some((body, rest)) = rest.split_at_checked(len) else {
                self.rest = &[];
                return None;
            };
            self.rest = rest;
            if word & !TYPE_MASK == 0
                && word & TYPE_MASK == RESV_MEM
                && let Some(region) = resv_mem(body)
            {
                return Some(region);
            }
        }
    }
}

fn resv_mem(body: &[u8]) -> Option<ReservedRegion> {
    let (region, _) = RawRegion::read_from_prefix(body).ok()?;
    let kind = if region.subtype == 1 { ReservedKind::Msi } else { ReservedKind::Reserved };
    let (first, last) = (Iova(region.first.get()), Iova(region.last.get()));
    Some(ReservedRegion { range: Range::new(first, last)?, kind })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn msi() -> ReservedRegion {
        let range = Range::new(Iova(0xfee0_0000), Iova(0xfeef_ffff)).unwrap();
        ReservedRegion { range, kind: ReservedKind::Msi }
    }

    fn reserved(first: u64, last: u64) -> ReservedRegion {
        let range = Range::new(Iova(first), Iova(last)).unwrap();
        ReservedRegion { range, kind: ReservedKind::Reserved }
    }

    #[test]
    fn a_length_excludes_the_header_and_the_next_property_follows_at_once() {
        // rule V25
        let mut out = [0xff; 100];
        assert!(write_properties(&[msi(), reserved(0, 0xfff)], &mut out));
        assert_eq!(out[..4], [1, 0, 20, 0]);
        assert_eq!(out[4..8], [1, 0, 0, 0]);
        assert_eq!(out[24..28], [1, 0, 20, 0]);
        assert!(out[48..].iter().all(|&b| b == 0));
        assert_eq!(Properties::new(&out).collect::<Vec<_>>(), [msi(), reserved(0, 0xfff)]);
    }

    #[test]
    fn properties_that_do_not_fit_are_not_written_at_all() {
        // rule V26
        let mut out = [0xff; 47];
        assert!(!write_properties(&[msi(), msi()], &mut out));
        assert_eq!(out, [0xff; 47]);
    }

    #[test]
    fn unknown_types_and_reserved_bits_are_skipped_and_parsing_goes_on() {
        // rule V41
        let mut bytes = vec![7, 0, 3, 0, 0xaa, 0xaa, 0xaa]; // unknown type, odd length
        let mut with_reserved_bits = emit(msi());
        with_reserved_bits[1] |= 0x10;
        bytes.extend(with_reserved_bits);
        bytes.extend([1, 0, 4, 0, 0, 0, 0, 0]); // RESV_MEM, too short
        let mut longer = emit(reserved(0x1000, 0x1fff)).to_vec(); // RESV_MEM of a later version
        longer[2] = 24;
        longer.extend([9; 4]);
        bytes.extend(longer);
        bytes.extend([0; 8]);
        bytes.extend(emit(reserved(2, 1 << 20)));
        bytes.extend([1, 0, 0xff, 0xff]); // leads outside
        let found: Vec<_> = Properties::new(&bytes).collect();
        assert_eq!(found, [reserved(0x1000, 0x1fff), reserved(2, 1 << 20)]);
    }

    #[test]
    fn an_unknown_subtype_is_reserved_and_reserved_bytes_are_ignored() {
        // rule V42
        let mut bytes = emit(msi());
        bytes[4] = 77;
        bytes[5..8].fill(0xff);
        let found: Vec<_> = Properties::new(&bytes).collect();
        assert_eq!(found, [reserved(0xfee0_0000, 0xfeef_ffff)]);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            regions in proptest::collection::vec((any::<bool>(), any::<u64>(), any::<u64>()), 0..6),
            spare in 0usize..40,
        ) {
            let properties: Vec<_> = regions
                .iter()
                .map(|&(msi, a, b)| ReservedRegion {
                    kind: if msi { ReservedKind::Msi } else { ReservedKind::Reserved },
                    range: Range::new(Iova(a.min(b)), Iova(a.max(b))).unwrap(),
                })
                .collect();
            let mut out = vec![0xff; properties.len() * RESV_MEM_LEN + spare];
            prop_assert!(write_properties(&properties, &mut out));
            prop_assert_eq!(Properties::new(&out).collect::<Vec<_>>(), properties);
        }

        #[test]
        fn no_bytes_panic_or_loop(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(Properties::new(&bytes).count() <= bytes.len() / RESV_MEM_LEN);
        }
    }
}
