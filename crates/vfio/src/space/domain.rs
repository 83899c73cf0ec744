//! A kernel address space as a [`Domain`](ringfence_iommu::Domain).

/// Makes a type with a [`Space`](super::Space) a domain, and gives it what all such types have:
/// `is_a_domain!(TYPE, TRAIT OF ITS KERNEL)`.
macro_rules! is_a_domain {
    ($domain:ident, $kernel:ident) => {
        // SAFETY: when the kernel's unmap returns, the translations and their cached copies are
        // gone.
        unsafe impl<K: $kernel> ringfence_iommu::Domain for $domain<K> {
            type Target = HostAddr;

            fn geometry(&self) -> Geometry {
                self.space.geometry()
            }

            fn capabilities(&self) -> ringfence_iommu::Capabilities {
                $crate::space::CAPABILITIES
            }

            fn map_pages(&self, maps: &[Map<HostAddr>]) -> Result<(), Partial> {
                Partial::each(maps, |map| self.space.map(map))
            }

            fn unmap_pages(
                &self,
                ranges: &[Range],
                gather: &mut ringfence_iommu::Gather,
            ) -> Result<u128, Partial> {
                let mut bytes = 0;
                Partial::each(ranges, |&range| {
                    bytes += self.space.unmap(range)?;
                    gather.add(range);
                    Ok(())
                })?;
                Ok(bytes)
            }

            /// Unmaps are complete already; maps may only have been noted.
            fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
                if let Work::Map(ranges) = work {
                    ranges.iter().try_for_each(|&range| self.space.sync_map(range))?;
                }
                Ok(SyncToken::DONE)
            }

            fn sync_poll(
                &self,
                _token: SyncToken,
                _work: Work<'_>,
                _failed: &mut dyn FnMut(Range, Error),
            ) -> bool {
                true
            }

            fn sync_wait(&self, _token: SyncToken) {}

            fn iova_to_phys(&self, iova: ringfence_iommu::Iova) -> Option<HostAddr> {
                self.space.find(iova)
            }
        }

        impl<K: $kernel> $domain<K> {
            /// How many mappings there are, and how many of the kernel's they take.
            pub fn usage(&self) -> Usage {
                self.space.usage()
            }

            /// Maps many ranges with as few kernel mappings as possible: those that follow each
            /// other (address, target, permission) become one, which is unmapped as one. All or
            /// nothing; what the kernel fails to remove after an error can still be unmapped.
            ///
            /// # Errors
            /// As [`map_pages`](ringfence_iommu::Domain::map_pages).
            pub fn map_batch(&self, batch: &[Map<HostAddr>]) -> Result<()> {
                self.space.map_batch(batch)
            }

            /// Stops tracking dirty pages.
            ///
            /// # Errors
            /// As [`start_dirty`](Self::start_dirty).
            pub fn stop_dirty(&self) -> Result<()> {
                self.track(false)
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
