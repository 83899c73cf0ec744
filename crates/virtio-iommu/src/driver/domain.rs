//! An address space behind a virtio-iommu.

use ringfence_iommu::{
    Capabilities, Domain, Gather, Geometry, GuestPhys, Iova, Prot, Range, Result,
};

/// A domain of a virtio-iommu. Made by [`Driver::domain`](super::Driver::domain).
///
/// As long as no endpoint is attached, mappings are only noted; the first
/// [`attach`](Self::attach) sends them all (rule L65).
pub struct ViommuDomain {}

impl ViommuDomain {
    /// The number that the device knows the domain by.
    pub fn id(&self) -> u32 {
        todo!()
    }

    /// Probes `endpoint` (rule V33) and attaches it, waiting for the device. Its reserved regions
    /// become part of the geometry.
    ///
    /// # Errors
    /// What the device answered; [`Error::Reserved`](ringfence_iommu::Error::Reserved) if
    /// something is mapped where the endpoint cannot have it. The endpoint is not attached then.
    pub fn attach(&self, endpoint: u32) -> Result<()> {
        let _ = endpoint;
        todo!()
    }

    /// Detaches `endpoint`, waiting for the device. Mappings stay noted for a later attach.
    ///
    /// # Errors
    /// What the device answered; it is attached still.
    pub fn detach(&self, endpoint: u32) -> Result<()> {
        let _ = endpoint;
        todo!()
    }

    /// How many mappings there are.
    pub fn mappings(&self) -> usize {
        todo!()
    }
}

impl Domain for ViommuDomain {
    type Target = GuestPhys;

    fn geometry(&self) -> Geometry {
        todo!()
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::FULL
    }
    fn map_pages(&self, range: Range, target: GuestPhys, prot: Prot) -> Result<()> {
        let _ = (range, target, prot);
        todo!()
    }
    fn iotlb_sync_map(&self, range: Range) -> Result<()> {
        let _ = range;
        todo!()
    }
    fn unmap_pages(&self, range: Range, gather: &mut Gather) -> Result<u128> {
        let _ = (range, gather);
        todo!()
    }
    fn iotlb_sync(&self, gather: &mut Gather) -> Result<()> {
        let _ = gather;
        todo!()
    }
    fn flush_iotlb_all(&self) -> Result<()> {
        todo!()
    }
    fn iova_to_phys(&self, iova: Iova) -> Option<GuestPhys> {
        let _ = iova;
        todo!()
    }
}
