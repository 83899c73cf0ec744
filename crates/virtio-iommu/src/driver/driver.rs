//! One driver a device: its request queue, its configuration, its domain numbers.

use std::{sync::Arc, time::Duration};

use ringfence_iommu::{Error, ReservedRegion, Result};
use ringfence_mem::Window;
use ringfence_virtq::driver::Queue;

use super::{Notify, Stats, Transport, ViommuDomain};
use crate::wire::{Config, Features, Property};

/// The features that this driver accepts of those on `offer` (the whole 64 bits or the device
/// type's): all but the old BYPASS (rule V31).
pub fn negotiate(offer: u64) -> Features {
    Features::from_bits_truncate(offer).difference(Features::BYPASS)
}

/// Shared memory for requests and replies.
#[derive(Clone, Debug)]
pub struct Buffers {
    /// The memory: at least [`Driver::buffer_bytes`].
    pub window: Window,
    /// Where the device sees it.
    pub addr: u64,
}

/// How a driver behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How threads wait for the device.
    pub notify: Notify,
    /// How long a device may go without answering anything before it counts as gone.
    pub timeout: Duration,
    /// The size of a page of this processor: a larger granule is refused (rule L66).
    pub cpu_page: u64,
}

impl Default for Options {
    /// Adaptive, five seconds, 4 KiB.
    fn default() -> Options {
        Options { notify: Notify::default(), timeout: Duration::from_secs(5), cpu_page: 4096 }
    }
}

/// The driver of one virtio-iommu.
pub struct Driver {}

impl Driver {
    /// The bytes of shared memory that a request queue of `size` descriptors needs for its
    /// requests.
    pub fn buffer_bytes(size: u16, config: &Config) -> usize {
        let _ = (size, config);
        todo!()
    }

    /// A driver for a device with `config` and the negotiated `features`, over its request queue.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: the granule is larger than a page, a queue of one descriptor.
    /// [`Error::NoMemory`]: `buffers` is too small.
    pub fn new(
        transport: Arc<dyn Transport>,
        queue: Queue,
        buffers: Buffers,
        config: Config,
        features: Features,
        options: Options,
    ) -> Result<Arc<Driver>> {
        let _ = (transport, queue, buffers, config, features, options);
        todo!()
    }

    /// A new, empty domain that maps.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without MAP_UNMAP; [`Error::Full`] if all numbers are taken.
    pub fn domain(self: &Arc<Self>) -> Result<Arc<ViommuDomain>> {
        todo!()
    }

    /// A domain in which every address leads to itself: a bypass domain where there are any, else
    /// one with identity mappings that leave out reserved regions (rule L66).
    ///
    /// # Errors
    /// As [`domain`](Self::domain).
    pub fn identity_domain(self: &Arc<Self>) -> Result<Arc<ViommuDomain>> {
        todo!()
    }

    /// Asks for the properties of an endpoint.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without PROBE; what the device answered.
    pub fn probe(&self, endpoint: u32) -> Result<Vec<Property>> {
        let _ = endpoint;
        todo!()
    }

    /// The regions of an endpoint that are not for mapping, from PROBE if there is one; and a
    /// window for MSIs if the device names none (rule L66).
    ///
    /// # Errors
    /// As [`probe`](Self::probe).
    pub fn reserved_regions(&self, endpoint: u32) -> Result<Vec<ReservedRegion>> {
        let _ = endpoint;
        todo!()
    }

    /// Sets whether endpoints that are attached to nothing bypass the IOMMU.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without BYPASS_CONFIG (rule V32).
    pub fn set_bypass(&self, bypass: bool) -> Result<()> {
        let _ = bypass;
        Err(Error::Unsupported("todo"))
    }

    /// The negotiated features.
    pub fn features(&self) -> Features {
        todo!()
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        todo!()
    }

    /// Why the driver gave up on the device, if it did.
    pub fn failed(&self) -> Option<Error> {
        todo!()
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        todo!()
    }
}
