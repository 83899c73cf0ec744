//! Message-signalled interrupts behind an IOMMU that translates them.

use ringfence_iommu::{Domain, Error, GuestPhys, Iova, Prot, Range, ReservedKind, Result};

use super::{
    ViommuDomain,
    domain::{Meaning, State},
    regions::SOFTWARE_MSI,
    report::Sent,
};
use crate::wire::{Features, MapFlags, Request};

impl ViommuDomain {
    /// Where the domain's endpoints write to reach the interrupt doorbell that the processor has at
    /// `doorbell`.
    ///
    /// If the device names a window for MSIs that is `doorbell` itself: writes to the window are not
    /// translated. Else the granule that it lies in is mapped, once, into the window that
    /// [`reserved_regions`](super::Driver::reserved_regions) reports: for writing, and with MMIO if
    /// that is negotiated (rules V39, V42).
    ///
    /// # Errors
    /// [`Error::Unsupported`]: no endpoint is attached, or the device's window is elsewhere.
    /// [`Error::OutsideAperture`]: nothing can be mapped where the window is. [`Error::Full`]: the
    /// window is. The status of the MAP.
    pub fn map_doorbell(&self, doorbell: GuestPhys) -> Result<Iova> {
        if self.meaning != Meaning::Mapped {
            return Ok(Iova(doorbell.0));
        }
        let mut prot = Prot::WRITE;
        prot.set(Prot::MMIO, self.driver.features().contains(Features::MMIO));
        let range = loop {
            let mut state = self.settled();
            if !self.is_attached() {
                return Err(Error::Unsupported("no endpoint is attached"));
            }
            if let Some(named) = state.named_msi() {
                return match named.contains(Iova(doorbell.0)) {
                    true => Ok(Iova(doorbell.0)),
                    false => Err(Error::Unsupported("the doorbell is not in the MSI window")),
                };
            }
            let granule = state.geometry.page_sizes.granule();
            let target = GuestPhys(doorbell.0 & !(granule - 1));
            let (range, new) = state.doorbell(target, prot)?;
            if !new {
                break range;
            }
            let flags = MapFlags::from_prot(prot);
            let map = Request::Map { domain: self.id, range, phys: target.0, flags };
            if let Some(seq) = self.driver.try_send(&map, Sent::Map)? {
                state.shadow.insert(range, target, prot, seq);
                break range;
            }
            drop(state);
            self.driver.make_room()?;
        };
        self.iotlb_sync_map(range)?;
        Ok(Iova(range.first().0 + doorbell.0 % (range.extent() + 1)))
    }
}

impl State {
    /// The window for MSIs that an endpoint's device names.
    fn named_msi(&self) -> Option<Range> {
        let mut regions = self.endpoints.iter().flat_map(|(_, regions)| regions);
        regions.find(|region| region.kind == ReservedKind::Msi).map(|region| region.range)
    }

    /// The granule of the window where `target` is mapped, or is to be: then true.
    fn doorbell(&self, target: GuestPhys, prot: Prot) -> Result<(Range, bool)> {
        let granule = self.geometry.page_sizes.granule();
        let (first, len) = SOFTWARE_MSI;
        let window = Range::from_len(Iova(first), len).expect("a legal range");
        // A granule that is larger than the window, or a byte, which no MAP can map (rule V38).
        if granule > len || granule == 1 {
            return Err(Error::Unsupported("the window for MSIs holds no granule"));
        }
        let aperture = self.geometry.aperture;
        if !aperture.covers(window) {
            return Err(Error::OutsideAperture { range: window, aperture });
        }
        let named = |range: Range| {
            let mut regions = self.endpoints.iter().flat_map(|(_, regions)| regions);
            regions.any(|region| region.range.overlaps(range))
        };
        let mut free = None;
        for at in (first..=window.last().0).step_by(granule as usize) {
            let range = Range::from_len(Iova(at), granule).expect("within the window");
            match self.shadow.find(Iova(at)) {
                Some((held, mapping))
                    if (held, mapping.target, mapping.prot) == (range, target, prot) =>
                {
                    return Ok((range, false));
                }
                Some(_) => {}
                None if free.is_none() && !named(range) => free = Some(range),
                None => {}
            }
        }
        let limit = len / granule;
        let full = Error::Full { what: "doorbells", used: limit, limit };
        free.map(|range| (range, true)).ok_or(full)
    }
}
