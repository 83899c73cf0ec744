//! The device itself: domains, attachments, configuration, and what each request does to them.

use std::marker::PhantomData;

use ringfence_iommu::{PageSizes, Range, SyncToken};

use super::Backing;
use crate::wire::{CONFIG_LEN, Features};

/// What a device offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The features on offer. [`Features::BYPASS`] is refused (rule V1).
    pub features: Features,
    /// Page sizes; the lowest is the granule.
    pub page_sizes: PageSizes,
    /// The addresses that can be mapped.
    pub input_range: Range,
    /// The first and the last domain number.
    pub domain_range: (u32, u32),
    /// The bytes of properties in a PROBE.
    pub probe_size: u32,
    /// The initial value of `bypass`.
    pub bypass: bool,
    /// How many domains may exist at a time.
    pub max_domains: usize,
}

impl Default for Options {
    /// All features but the old BYPASS, 4 KiB to 1 GiB pages, all addresses, 65,536 domains, 512
    /// bytes of properties, no bypass.
    fn default() -> Options {
        Options {
            features: Features::all().difference(Features::BYPASS),
            page_sizes: PageSizes::X86,
            input_range: Range::ALL,
            domain_range: (0, u32::MAX),
            probe_size: 512,
            bypass: false,
            max_domains: 1 << 16,
        }
    }
}

/// A virtio-iommu device over the endpoints and domains of a [`Backing`].
#[derive(Debug)]
pub struct Device<B: Backing> {
    backing: B,
}

impl<B: Backing> Device<B> {
    /// A device that offers what `options` say. All endpoints are unattached.
    pub fn new(backing: B, options: Options) -> Device<B> {
        let _ = options;
        Device { backing }
    }

    /// What the device maps into.
    pub fn backing(&self) -> &B {
        &self.backing
    }

    /// The features on offer (bits of the device type only).
    pub fn features(&self) -> Features {
        todo!()
    }

    /// Accepts what the driver negotiated; bits that are not on offer are left out. Bits above
    /// the device type's (VIRTIO_F_VERSION_1 and so on) are ignored.
    pub fn set_features(&self, features: u64) {
        let _ = features;
        todo!()
    }

    /// The configuration space as it is now.
    pub fn config(&self) -> [u8; CONFIG_LEN] {
        todo!()
    }

    /// Reads configuration bytes from `offset`; zeroes beyond the end.
    pub fn read_config(&self, offset: usize, out: &mut [u8]) {
        let _ = (offset, out);
        todo!()
    }

    /// A driver's write to the configuration: `bypass` alone can change.
    pub fn write_config(&self, offset: usize, data: &[u8]) {
        let _ = (offset, data);
        todo!()
    }

    /// Device reset: no endpoint is attached, no domain exists, nothing is negotiated; `bypass`
    /// stays. Request queues must have been stopped.
    pub fn reset(&self) {
        todo!()
    }

    /// System reset: as [`reset`](Self::reset), and `bypass` has its initial value.
    pub fn system_reset(&self) {
        todo!()
    }

    /// How many domains exist.
    pub fn domains(&self) -> usize {
        todo!()
    }
}

/// What one request queue keeps between requests of a batch: which domains wait for their
/// invalidation, and the domain that the last request was for.
#[derive(Debug)]
pub struct Session<B: Backing> {
    backing: PhantomData<B>,
    tokens: Vec<SyncToken>,
}

/// What became of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The used length: 0 if nothing was written.
    pub used: u32,
}
