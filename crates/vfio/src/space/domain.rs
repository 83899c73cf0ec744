//! A kernel's address space as a [`Domain`](ringfence_iommu::Domain).

/// Makes a type with a [`Space`](super::Space) a domain: `is_a_domain!(TYPE, TRAIT OF ITS KERNEL)`.
macro_rules! is_a_domain {
    ($domain:ident, $kernel:ident) => {
        impl<K: $kernel> ringfence_iommu::Domain for $domain<K> {
            type Target = HostAddr;

            fn geometry(&self) -> Geometry {
                self.space.geometry()
            }

            fn capabilities(&self) -> ringfence_iommu::Capabilities {
                $crate::space::CAPABILITIES
            }

            fn map_pages(&self, range: Range, target: HostAddr, prot: Prot) -> Result<()> {
                self.space.map(range, target, prot)
            }

            fn iotlb_sync_map(&self, range: Range) -> Result<()> {
                self.space.sync_map(range)
            }

            fn unmap_pages(
                &self,
                range: Range,
                _gather: &mut ringfence_iommu::Gather,
            ) -> Result<u128> {
                self.space.unmap(range)
            }

            fn iotlb_sync(&self, gather: &mut ringfence_iommu::Gather) -> Result<()> {
                $crate::space::finish(gather);
                Ok(())
            }

            fn flush_iotlb_all(&self) -> Result<()> {
                Ok(())
            }

            fn iova_to_phys(&self, iova: ringfence_iommu::Iova) -> Option<HostAddr> {
                self.space.find(iova)
            }
        }

        impl<K: $kernel> std::fmt::Debug for $domain<K> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut shown = f.debug_struct(stringify!($domain));
                shown.field("usage", &self.usage()).finish_non_exhaustive()
            }
        }
    };
}

pub(crate) use is_a_domain;
