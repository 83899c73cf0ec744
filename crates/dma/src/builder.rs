//! How a device is made.

use core::fmt;

use ringfence_iommu::Domain;
use ringfence_iova::{Allocator, Aperture, ApertureError, Slabs};
use ringfence_sync::cpu::OsCpu;

use crate::{BouncePools, DmaConfig, Environment};

/// The smallest granule of an allocator that is made from a geometry.
const PAGE: u64 = 4096;

/// Makes a [`Device`](crate::Device): [`Device::builder`](crate::Device::builder).
#[must_use = "build makes the device"]
pub struct DeviceBuilder<D: Domain, A> {
    pub(crate) domain: D,
    /// An error if none was given and none can be made.
    pub(crate) allocator: Result<A, ApertureError>,
    pub(crate) config: DmaConfig,
    pub(crate) environment: Environment,
    pub(crate) pools: Option<BouncePools<D::Target>>,
}

impl<D: Domain> DeviceBuilder<D, Slabs<OsCpu>> {
    pub(crate) fn new(domain: D) -> Self {
        let geometry = domain.geometry();
        let (aperture, granule) = (geometry.aperture, geometry.page_sizes.granule().max(PAGE));
        let aperture = Aperture::new(aperture.first().0, aperture.last().0, granule);
        DeviceBuilder {
            domain,
            allocator: aperture.map(|aperture| Slabs::new(aperture, OsCpu::new())),
            config: DmaConfig::default(),
            environment: Environment::default(),
            pools: None,
        }
    }
}

impl<D: Domain + 'static, A: Allocator + 'static> DeviceBuilder<D, A> {
    /// The I/O virtual addresses come from `allocator`, in which the domain's reserved regions are
    /// reserved. Default: [`Slabs`] over the domain's aperture, in pages of 4 KiB or the domain's
    /// granules, whichever are larger.
    pub fn allocator<B: Allocator + 'static>(self, allocator: B) -> DeviceBuilder<D, B> {
        let DeviceBuilder { domain, config, environment, pools, .. } = self;
        DeviceBuilder { domain, allocator: Ok(allocator), config, environment, pools }
    }

    /// How it maps. Default: [`Policy::StrictMap`](crate::Policy::StrictMap) for a trusted device.
    pub fn config(self, config: DmaConfig) -> Self {
        DeviceBuilder { config, ..self }
    }

    /// Clocks and CPU numbers. Default: those of the operating system.
    pub fn environment(self, environment: Environment) -> Self {
        DeviceBuilder { environment, ..self }
    }

    /// Memory for copies, of the same domain, perhaps shared with its other devices: what
    /// [`Policy::Bounce`](crate::Policy::Bounce) and [`Policy::Auto`](crate::Policy::Auto) need,
    /// and an untrusted device whose buffers do not fill their granules. Default: none.
    pub fn pools(self, pools: &BouncePools<D::Target>) -> Self {
        DeviceBuilder { pools: Some(pools.clone()), ..self }
    }
}

impl<D: Domain, A> fmt::Debug for DeviceBuilder<D, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuilder")
            .field("config", &self.config)
            .field("pools", &self.pools.is_some())
            .finish_non_exhaustive()
    }
}
