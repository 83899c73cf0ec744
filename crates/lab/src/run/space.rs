//! The space of I/O virtual addresses of a link: their allocator, how many there are, and what is
//! taken already.

use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use ringfence_dma::Device;
use ringfence_drivers::{blk::MappedQueue, ram::PagedBuffer};
use ringfence_iommu::{Domain, ReservedRegion};
use ringfence_iova::{Allocator, Aperture, Preferred32, Request, Ring};
use ringfence_virtio_iommu::driver::ViommuDomain;

use super::Usage;
use crate::{
    allocators::{AllocatorKind, PlacementName},
    list::defaults,
    random::SplitMix,
};

/// The allocator of a link, of any kind, behind Linux's preference for addresses below 4 GiB for a
/// PCI device.
pub(crate) type AnyAllocator = Arc<Preferred32<Box<dyn Allocator>>>;

/// The DMA API as the jobs use it.
pub(crate) type Dma = Device<Arc<ViommuDomain>, AnyAllocator>;

/// A queue of the disk, behind the DMA API.
pub(crate) type Queue = MappedQueue<Arc<ViommuDomain>, AnyAllocator, PagedBuffer>;

/// What devices map in: x86 and Arm translate 4 KiB at the least, and so does the lab's device.
const GRANULE: u64 = 4096;
/// The most ranges that [`Space::live`] may ask for. They are made anew for each round; so many take
/// a tree a second or more.
const MOST_LIVE: u32 = 1_000_000;
/// The narrowest aperture: what every PCI device can address.
const NARROWEST: u32 = 32;
/// What IOMMUs with tables of four levels translate, on x86 as on Arm. Allocators whose memory grows with
/// the aperture refuse that much.
const DEFAULT_BITS: u32 = 48;
/// The widest: page tables of five levels have no more.
const WIDEST: u32 = 57;

// The addresses that a link has.
#[allow(missing_docs, reason = "clap would take it for that of the command")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Args)]
pub struct Space {
    /// Where `ringfence` puts ranges: `size`, adjacent by size, from the top; `lowest` or
    /// `highest`, at the lowest or the highest place that fits; `ring`, in one chunk for all that
    /// is in flight, cut in turn (what does not fit it as under `size`).
    #[arg(long, value_name = "NAME", default_value_t = PlacementName::default())]
    pub placement: PlacementName,

    /// Bits of an I/O virtual address, 32 to 57: 32 is what every PCI device can address; 39, 48 and
    /// 57 are what page tables of three, four and five levels translate.
    #[arg(long = "aperture", value_name = "BITS", default_value_t = DEFAULT_BITS,
        value_parser = clap::value_parser!(u32).range(i64::from(NARROWEST)..=i64::from(WIDEST)))]
    pub aperture_bits: u32,

    /// Ranges of 1 to 6 pages that are allocated before a round begins and stay allocated,
    /// scattered among as many holes: the mappings of the rest of the system. The device cannot
    /// access them.
    #[arg(long, value_name = "N", default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(..=i64::from(MOST_LIVE)))]
    pub live: u32,
}

impl Default for Space {
    fn default() -> Space {
        defaults()
    }
}

/// Bytes of a ring's chunk that holds all that is mapped at the same time, of these lengths.
/// `lazy`: ranges wait for a flush after they were unmapped.
fn chunk(mapped: &[usize], lazy: bool) -> u64 {
    let aligned = |len: usize| (len as u64).next_multiple_of(GRANULE).next_power_of_two();
    let mapped: u64 = mapped.iter().map(|&len| aligned(len)).sum();
    if lazy { mapped.saturating_mul(WAITING) } else { mapped }
}

/// How many times what is in flight a chunk holds under a lazy policy, where ranges wait for their
/// flush. A guess: it depends on time. What does not fit comes from elsewhere.
const WAITING: u64 = 8;

impl Space {
    /// Whether these `kinds` can have such a space.
    ///
    /// # Errors
    /// Wrong usage: out of bounds, or without effect on any of them.
    pub fn check(&self, kinds: &[AllocatorKind]) -> Result<(), Usage> {
        let Space { placement, aperture_bits: bits, live } = *self;
        if placement != PlacementName::default() && !kinds.contains(&AllocatorKind::Ringfence) {
            return Err(Usage(format!(
                "placement {placement}: of the allocators only ringfence takes a placement, and it \
                 is not among those given"
            )));
        }
        // Half of the aperture is left to the jobs.
        let most = ((1u64 << (bits - 1)) / (2 * FOOTPRINT)).min(MOST_LIVE.into());
        if u64::from(live) > most {
            return Err(Usage(format!(
                "{live} live ranges: an aperture of {bits} bits has room for {most}"
            )));
        }
        Ok(())
    }

    /// An allocator of this kind for a device in `domain`: see [`chunk`].
    pub(crate) fn of_domain(
        &self,
        kind: AllocatorKind,
        domain: &ViommuDomain,
        mapped: &[usize],
        lazy: bool,
    ) -> Result<AnyAllocator> {
        let bounds = |region: &ReservedRegion| (region.range.first().0, region.range.last().0);
        let reserved: Vec<_> = domain.geometry().reserved.iter().map(bounds).collect();
        self.make(kind, &reserved, chunk(mapped, lazy))
    }

    /// An allocator of this kind over these addresses, except those `reserved`, inclusive.
    fn make(
        &self,
        kind: AllocatorKind,
        reserved: &[(u64, u64)],
        chunk: u64,
    ) -> Result<AnyAllocator> {
        let last = u64::MAX >> (u64::BITS - self.aperture_bits);
        let aperture = Aperture::new(0, last, GRANULE).context("the aperture")?;
        let allocator = kind.make(aperture, self.placement.of_ranges());
        // First: ranges that others hold must not be there.
        for &(first, last) in reserved {
            allocator.reserve(first, last).context("keeping reserved addresses free")?;
        }
        // Others have a preference of their own: where they do not fit below 4 GiB any more, the
        // disk still may.
        age(&Preferred32::new(&*allocator), self.live)
            .with_context(|| format!("taking {} ranges before the jobs begin", self.live))?;
        let ring = self.placement == PlacementName::Ring && kind == AllocatorKind::Ringfence;
        let allocator = if ring { cut(allocator, chunk)? } else { allocator };
        Ok(Arc::new(Preferred32::new(allocator)))
    }
}

/// A ring with a chunk of `bytes`, or of the largest part of it that there is room for.
fn cut(allocator: Box<dyn Allocator>, bytes: u64) -> Result<Box<dyn Allocator>> {
    // The chunk is allocated as a PCI device's buffers are: below 4 GiB if there is room.
    let below = Arc::new(Preferred32::new(allocator));
    let mut bytes = bytes.max(GRANULE);
    loop {
        match Ring::new(Arc::clone(&below), bytes) {
            Ok(ring) => return Ok(Box::new(ring)),
            Err(_) if bytes > GRANULE => bytes /= 2,
            Err(error) => return Err(error).context("a chunk for the ring"),
        }
    }
}

/// The sizes of what others hold, in granules: mostly single ones, as rings of network packets and
/// small I/O have.
const SIZES: [u64; 8] = [1, 1, 1, 1, 2, 2, 3, 6];
/// What such a range takes on average where ranges are aligned to their size, bytes.
const FOOTPRINT: u64 = (1 + 1 + 1 + 1 + 2 + 2 + 4 + 8) * GRANULE / 8;

/// Takes twice as many ranges as shall stay, and frees half of them in no order: what stays is
/// scattered among holes of all these sizes. The same in every run of the program.
fn age(allocator: &dyn Allocator, live: u32) -> Result<()> {
    let mut random = SplitMix(0x9e37_79b9_7f4a_7c15);
    let mut taken = Vec::with_capacity(2 * live as usize);
    for _ in 0..2 * u64::from(live) {
        let size = SIZES[random.index(SIZES.len())] * GRANULE;
        taken.push((allocator.alloc(&Request::new(size))?, size));
    }
    for _ in 0..live {
        let (iova, size) = taken.swap_remove(random.index(taken.len()));
        allocator.free(iova, size)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSI: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);

    fn space(aperture_bits: u32, live: u32) -> Space {
        Space { aperture_bits, live, ..Space::default() }
    }

    fn make(space: Space, kind: AllocatorKind) -> AnyAllocator {
        space.make(kind, &[MSI], 0).unwrap()
    }

    #[test]
    fn every_allocator_works_in_every_aperture() {
        for kind in AllocatorKind::ALL {
            for bits in [NARROWEST, 39, 48, WIDEST] {
                let allocator = make(space(bits, 0), kind);
                let iova = allocator.alloc(&Request::new(GRANULE)).unwrap();
                assert!(iova <= 0xffff_ffff, "{kind}: PCI devices prefer 32 bits");
                allocator.free(iova, GRANULE).unwrap();
            }
        }
    }

    #[test]
    fn an_aged_space_holds_the_requested_ranges() {
        for kind in AllocatorKind::ALL {
            let allocator = make(space(32, 1000), kind);
            let stats = allocator.stats();
            assert_eq!(stats.allocs - stats.frees, 1000, "{kind}: {stats:?}");
            assert_eq!(stats.failures, 0, "{kind}");
            // A device may be made in front of it, which reserves what is reserved.
            allocator.reserve(MSI.0, MSI.1).unwrap();
        }
    }

    #[test]
    fn an_impossible_space_is_wrong_usage() {
        let ours = [AllocatorKind::Ringfence];
        for bits in NARROWEST..=WIDEST {
            space(bits, 100_000).check(&ours).unwrap();
        }
        assert!(space(32, 200_000).check(&ours).unwrap_err().0.contains("room for 104857"));
        assert!(space(48, MOST_LIVE + 1).check(&ours).is_err());
        let lowest = Space { placement: PlacementName::Lowest, ..Space::default() };
        assert!(lowest.check(&[AllocatorKind::RbTree]).unwrap_err().0.contains("ringfence"));
        lowest.check(&[AllocatorKind::RbTree, AllocatorKind::Ringfence]).unwrap();
    }

    #[test]
    fn the_most_that_may_be_live_fits() {
        for kind in AllocatorKind::ALL {
            make(space(32, 104_857), kind);
        }
    }

    #[test]
    fn a_ring_holds_all_that_is_mapped_side_by_side() {
        let ring = Space { placement: PlacementName::Ring, ..Space::default() };
        let mapped = [65536, 65536, 65536, 20_000, 1024];
        for bits in [NARROWEST, 48] {
            let ring = Space { aperture_bits: bits, ..ring };
            let chunk = chunk(&mapped, false);
            let allocator = ring.make(AllocatorKind::Ringfence, &[MSI], chunk).unwrap();
            let mut places: Vec<u64> = mapped
                .iter()
                .map(|&len| allocator.alloc(&Request::new(len as u64)).unwrap())
                .collect();
            places.sort_unstable();
            let first = places[0];
            let offsets: Vec<u64> = places.iter().map(|place| place - first).collect();
            assert_eq!(offsets, [0, 0x10000, 0x20000, 0x30000, 0x35000], "{bits}");
            assert!(first <= 0xffff_ffff, "{bits}");
        }
    }

    #[test]
    fn a_ring_that_has_no_room_is_as_large_as_it_can_be() {
        let space = Space { placement: PlacementName::Ring, aperture_bits: 32, live: 0 };
        let mapped = [1 << 30; 16];
        let chunk = chunk(&mapped, true);
        let allocator = space.make(AllocatorKind::Ringfence, &[MSI], chunk).unwrap();
        allocator.alloc(&Request::new(1 << 29)).unwrap();
    }
}
