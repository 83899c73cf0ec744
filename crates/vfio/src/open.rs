//! A PCI device and what it can reach, in one call.

use std::{fmt, io, path::Path, sync::Arc};

use ringfence_iommu::{Domain, HostAddr};

use crate::{
    Error, Iommufd, Result, Tuning, Type1,
    kernel::{Container, Device, Group, IommuFile},
};

/// A PCI device that this process drives: see [`open`].
#[non_exhaustive]
pub struct Opened {
    /// Its registers. Dropped before the domain: the device is no longer attached then.
    pub device: Device,
    /// What the device can reach, which is nothing at first: `ringfence_dma::Device::builder` takes
    /// it.
    pub domain: Arc<dyn Domain<Target = HostAddr>>,
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened").field("device", &self.device).finish_non_exhaustive()
    }
}

/// Opens the PCI device at `address` (`0000:01:00.0`), which must be bound to a driver of VFIO's
/// (vfio-pci), and makes a domain for it alone.
///
/// It opens the device's group and attaches it to a new container; where the kernel has iommufd
/// but no containers, it opens the device's own node and attaches it to a new address space. For
/// several devices in one domain, or other [`Tuning`], [`kernel`](crate::kernel) has these steps.
///
/// # Errors
/// The step that failed, and what to do: no IOMMU isolates the device, a kernel driver is bound to
/// a device of its group, access is denied.
pub fn open(address: &str) -> Result<Opened> {
    let failed =
        |error| Error::new(format!("make a domain for {address}")).because(io::Error::other(error));
    let there = |node| Path::new(node).exists();
    if there("/dev/vfio/vfio") || !there("/dev/iommu") {
        let container = Container::open()?.attach(Group::of_device(address)?)?;
        let device = container.device(address)?;
        let domain = Type1::new(container, Tuning::default()).map_err(failed)?;
        return Ok(Opened { domain: Arc::new(domain), device });
    }
    let iommufd = IommuFile::open()?;
    let bound = iommufd.bind(address)?;
    let domain = Iommufd::new(iommufd, Tuning::default()).map_err(failed)?;
    bound.attach(domain.ioas())?;
    domain.refresh().map_err(failed)?;
    Ok(Opened { domain: Arc::new(domain), device: bound.device })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_is_an_error_that_says_what_was_tried() {
        let error = open("no such device").unwrap_err().to_string();
        assert!(error.starts_with("cannot ") && error.contains(": "), "{error}");
    }
}
