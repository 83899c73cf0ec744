//! The configuration space: 40 bytes (5.13.4).

use ringfence_iommu::{Iova, PageSizes, Range};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

/// The bytes of the configuration space.
pub const CONFIG_LEN: usize = size_of::<RawConfig>();

/// The offset of the field `bypass`.
pub(crate) const BYPASS_AT: usize = 36;

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawConfig {
    pub(crate) page_size_mask: U64,
    pub(crate) input_start: U64,
    pub(crate) input_end: U64,
    pub(crate) domain_start: U32,
    pub(crate) domain_end: U32,
    pub(crate) probe_size: U32,
    pub(crate) bypass: u8,
    reserved: [u8; 3],
}

/// The contents of the configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IommuConfig {
    /// The page sizes; the lowest is the granule, others are hints (rule [V2]).
    ///
    /// [V2]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v2
    pub page_sizes: PageSizes,
    /// The addresses that can be mapped, if INPUT_RANGE is negotiated.
    pub input_range: Range,
    /// The first and the last number of a domain, if DOMAIN_RANGE is negotiated.
    pub domain_range: (u32, u32),
    /// The bytes of properties in a PROBE, if PROBE is negotiated.
    pub probe_size: u32,
    /// Whether unattached endpoints bypass, if BYPASS_CONFIG is offered.
    pub bypass: bool,
}

/// Why configuration bytes make no sense: no page size is set (rule [V2]), or a range ends before it
/// begins.
///
/// [V2]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v2
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

impl IommuConfig {
    /// Parses the configuration space. Bits 1 to 7 of `bypass` are ignored (rule [V32]).
    ///
    /// # Errors
    /// [`ConfigError`].
    ///
    /// [V32]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v32
    pub fn parse(bytes: &[u8; CONFIG_LEN]) -> Result<IommuConfig, ConfigError> {
        let raw: RawConfig = zerocopy::transmute!(*bytes);
        let page_sizes = PageSizes::new(raw.page_size_mask.get());
        let page_sizes = page_sizes.ok_or_else(|| ConfigError("page_size_mask is empty".into()))?;
        let (start, end) = (raw.input_start.get(), raw.input_end.get());
        let input_range = Range::new(Iova(start), Iova(end)).ok_or_else(|| {
            let ends = format!("input_range ends at {end:#x}, before it begins at {start:#x}");
            ConfigError(ends)
        })?;
        let (start, end) = (raw.domain_start.get(), raw.domain_end.get());
        if end < start {
            let ends = format!("domain_range ends at {end}, before it begins at {start}");
            return Err(ConfigError(ends));
        }
        Ok(IommuConfig {
            page_sizes,
            input_range,
            domain_range: (start, end),
            probe_size: raw.probe_size.get(),
            bypass: raw.bypass & 1 != 0,
        })
    }

    /// The bytes of the configuration space.
    pub fn emit(&self) -> [u8; CONFIG_LEN] {
        zerocopy::transmute!(RawConfig {
            page_size_mask: self.page_sizes.bitmap().into(),
            input_start: self.input_range.first().0.into(),
            input_end: self.input_range.last().0.into(),
            domain_start: self.domain_range.0.into(),
            domain_end: self.domain_range.1.into(),
            probe_size: self.probe_size.into(),
            bypass: self.bypass.into(),
            reserved: [0; 3],
        })
    }

    /// Fills `out` with what a driver reads from byte `offset` on: zeroes beyond the end.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let bytes = self.emit();
        for (at, byte) in out.iter_mut().enumerate() {
            *byte = offset.checked_add(at).and_then(|at| bytes.get(at)).copied().unwrap_or(0);
        }
    }

    /// The value that a driver's write of `data` at `offset` gives to `bypass`; `None` if the write
    /// does not touch it or its value is neither 0 nor 1. All other fields are read-only
    /// (rule [V32]).
    ///
    /// [V32]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v32
    pub fn bypass_written(offset: usize, data: &[u8]) -> Option<bool> {
        match data.get(BYPASS_AT.checked_sub(offset)?)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn config() -> IommuConfig {
        IommuConfig {
            page_sizes: PageSizes::X86,
            input_range: Range::new(Iova(0x1000), Iova(u64::MAX)).unwrap(),
            domain_range: (1, 7),
            probe_size: 512,
            bypass: true,
        }
    }

    #[test]
    fn the_layout_is_that_of_the_specification() {
        assert_eq!(CONFIG_LEN, 40);
        let bytes = config().emit();
        assert_eq!(bytes[0..8], PageSizes::X86.bitmap().to_le_bytes());
        assert_eq!(bytes[8..16], 0x1000u64.to_le_bytes());
        assert_eq!(bytes[16..24], [0xff; 8]);
        assert_eq!(bytes[24..32], [1, 0, 0, 0, 7, 0, 0, 0]);
        assert_eq!(bytes[32..40], [0, 2, 0, 0, 1, 0, 0, 0]);
        assert_eq!(IommuConfig::parse(&bytes), Ok(config()));
    }

    #[test]
    fn the_upper_bits_of_bypass_are_ignored_on_reading() {
        // rule V32
        let mut bytes = config().emit();
        bytes[BYPASS_AT] = 0xfe;
        assert!(!IommuConfig::parse(&bytes).unwrap().bypass);
        bytes[BYPASS_AT] = 0xff;
        assert!(IommuConfig::parse(&bytes).unwrap().bypass);
    }

    #[test]
    fn a_write_reaches_bypass_alone_and_only_with_zero_or_one() {
        // rule V32
        assert_eq!(IommuConfig::bypass_written(36, &[0]), Some(false));
        assert_eq!(IommuConfig::bypass_written(36, &[1, 9, 9, 9]), Some(true));
        assert_eq!(IommuConfig::bypass_written(32, &[9, 9, 9, 9, 1]), Some(true));
        assert_eq!(IommuConfig::bypass_written(36, &[2]), None);
        assert_eq!(IommuConfig::bypass_written(37, &[1]), None);
        assert_eq!(IommuConfig::bypass_written(usize::MAX, &[1]), None);
        assert_eq!(IommuConfig::bypass_written(0, &[1; 8]), None);
    }

    #[test]
    fn a_read_past_the_end_gives_zeroes() {
        let mut out = [9; 8];
        config().read(36, &mut out);
        assert_eq!(out, [1, 0, 0, 0, 0, 0, 0, 0]);
        config().read(usize::MAX - 1, &mut out);
        assert_eq!(out, [0; 8]);
    }

    proptest! {
        #[test]
        fn what_parses_is_emitted_again(bytes in any::<[u8; CONFIG_LEN]>()) {
            if let Ok(config) = IommuConfig::parse(&bytes) {
                prop_assert_eq!(IommuConfig::parse(&config.emit()), Ok(config));
                prop_assert_eq!(&config.emit()[..BYPASS_AT], &bytes[..BYPASS_AT]);
            }
        }
    }
}
