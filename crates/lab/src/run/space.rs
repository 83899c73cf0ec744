//! The space of I/O virtual addresses of a link: who hands them out, how many there are, and what is
//! taken already.

use std::{fmt, str::FromStr};

use anyhow::{Context, Result};
use ringfence_iova::{Allocator, Aperture, Bitmap, Placement, Preferred32, Request};

use super::Usage;
use crate::allocators::AllocatorKind;

/// The allocator of a link, whichever it is, with Linux's preference of a PCI device for addresses
/// below 4 GiB in front.
pub(crate) type AnyAllocator = Preferred32<Box<dyn Allocator>>;

/// What devices map in: x86 and Arm translate 4 KiB at the least, and so does the lab's device.
const GRANULE: u64 = 4096;
/// The most ranges that [`Space::live`] may ask for: ten times what the largest guest of the lab's
/// traces keeps, and still made in less than a second.
pub const MOST_LIVE: u32 = 1_000_000;
/// The narrowest aperture: what every PCI device can address.
pub const NARROWEST: u32 = 32;
/// The widest: page tables of five levels have no more.
pub const WIDEST: u32 = 57;

/// The addresses that a link has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Where ranges go, if the allocator can be told.
    pub placement: PlacementName,
    /// How many bits an address has: [`NARROWEST`] to [`WIDEST`].
    pub aperture_bits: u32,
    /// Ranges that others hold before the jobs begin, and keep: at most [`MOST_LIVE`].
    pub live: u32,
}

impl Default for Space {
    /// 48 bits: what IOMMUs with tables of four levels translate, on x86 as on Arm. Allocators that
    /// cost memory in proportion to the aperture cannot have that much, and say so.
    fn default() -> Space {
        Space { placement: PlacementName::default(), aperture_bits: 48, live: 0 }
    }
}

/// A placement by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlacementName(pub Placement);

impl PlacementName {
    /// All of them, with their names.
    const ALL: [(&'static str, Placement); 3] = [
        ("size", Placement::SizeAligned),
        ("lowest", Placement::Lowest),
        ("highest", Placement::Highest),
    ];
}

impl fmt::Display for PlacementName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = Self::ALL.into_iter().find(|(_, placement)| *placement == self.0);
        f.pad(known.map_or("unnamed", |(name, _)| name))
    }
}

impl FromStr for PlacementName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|(known, _)| *known == name);
        known.map(|(_, placement)| PlacementName(placement)).ok_or_else(|| {
            let names = Self::ALL.map(|(name, _)| name).join(", ");
            format!("no placement is called {name:?}: there are {names}")
        })
    }
}

impl Space {
    /// Whether `kinds` can be had like this.
    ///
    /// # Errors
    /// Wrong usage: out of bounds, or nobody there to heed it.
    pub fn check(&self, kinds: &[AllocatorKind]) -> Result<(), Usage> {
        let Space { placement, aperture_bits: bits, live } = *self;
        if !(NARROWEST..=WIDEST).contains(&bits) {
            return Err(Usage(format!(
                "an aperture of {bits} bits: from {NARROWEST} to {WIDEST} can be had"
            )));
        }
        if placement != PlacementName::default() && !kinds.contains(&AllocatorKind::Ringfence) {
            return Err(Usage(format!(
                "placement {placement}: of the allocators only ringfence can be told where to put \
                 ranges, and it is not among those asked for"
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

    /// An allocator of this kind over these addresses.
    pub(crate) fn make(&self, kind: AllocatorKind) -> Result<AnyAllocator> {
        let last = u64::MAX >> (u64::BITS - self.aperture_bits);
        let aperture = Aperture::new(0, last, GRANULE).context("the aperture")?;
        Ok(Preferred32::new(match kind {
            // The whole aperture is its window, as far as a bitmap goes.
            AllocatorKind::Bitmap => Box::new(Bitmap::new(aperture, last)),
            other => other.make(aperture, self.placement.0),
        }))
    }

    /// Takes what others hold. After what is reserved was reserved: that must be free until then.
    pub(crate) fn age(&self, allocator: &AnyAllocator) -> Result<()> {
        // Others have a preference of their own: where they do not fit below 4 GiB any more, the
        // disk still may.
        age(&Preferred32::new(allocator.inner()), self.live)
            .with_context(|| format!("taking {} ranges before the jobs begin", self.live))
    }
}

/// The sizes of what others hold, in granules: mostly single ones, as rings of network packets and
/// small I/O have.
const SIZES: [u64; 8] = [1, 1, 1, 1, 2, 2, 3, 6];
/// What such a range takes on average where ranges are aligned to their size, bytes.
const FOOTPRINT: u64 = (1 + 1 + 1 + 1 + 2 + 2 + 4 + 8) * GRANULE / 8;

/// Takes twice as many ranges as shall stay, and gives half of them back in no order: what stays
/// lies scattered among holes of all these sizes. The same in every run of the program.
fn age(allocator: &dyn Allocator, live: u32) -> Result<()> {
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut below = |n: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % n as u64) as usize
    };
    let mut taken = Vec::with_capacity(2 * live as usize);
    for _ in 0..2 * u64::from(live) {
        let size = SIZES[below(SIZES.len())] * GRANULE;
        taken.push((allocator.alloc(&Request::new(size))?, size));
    }
    for _ in 0..live {
        let (iova, size) = taken.swap_remove(below(taken.len()));
        allocator.free(iova, size)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(aperture_bits: u32, live: u32) -> Space {
        Space { aperture_bits, live, ..Space::default() }
    }

    #[test]
    fn every_allocator_can_be_had_in_every_aperture() {
        for kind in AllocatorKind::ALL {
            for bits in [NARROWEST, 39, 48, WIDEST] {
                let allocator = space(bits, 0).make(kind).unwrap();
                let iova = allocator.alloc(&Request::new(GRANULE)).unwrap();
                assert!(iova <= 0xffff_ffff, "{kind}: PCI devices prefer 32 bits");
                allocator.free(iova, GRANULE).unwrap();
            }
        }
    }

    #[test]
    fn an_aged_space_holds_what_was_asked_for() {
        for kind in AllocatorKind::ALL {
            let space = space(32, 1000);
            let allocator = space.make(kind).unwrap();
            space.age(&allocator).unwrap();
            // What magazines keep counts as live below them.
            let stats = allocator.stats();
            assert_eq!(stats.allocs - stats.frees, 1000, "{kind}: {stats:?}");
            assert_eq!(stats.failures, 0, "{kind}");
        }
    }

    #[test]
    fn what_cannot_be_had_is_wrong_usage() {
        let ours = [AllocatorKind::Ringfence];
        for bits in [0, 31, 58, 64, u32::MAX] {
            let error = space(bits, 0).check(&ours).unwrap_err().to_string();
            assert!(error.contains("32") && error.contains("57"), "{error}");
        }
        for bits in NARROWEST..=WIDEST {
            space(bits, 100_000).check(&ours).unwrap();
        }
        assert!(space(32, 200_000).check(&ours).unwrap_err().0.contains("room for 104857"));
        assert!(space(48, MOST_LIVE + 1).check(&ours).is_err());
        let lowest = Space { placement: "lowest".parse().unwrap(), ..Space::default() };
        assert!(lowest.check(&[AllocatorKind::RbTree]).unwrap_err().0.contains("ringfence"));
        lowest.check(&[AllocatorKind::RbTree, AllocatorKind::Ringfence]).unwrap();
    }

    #[test]
    fn the_most_that_may_be_live_fits() {
        for kind in AllocatorKind::ALL {
            let space = space(32, 104_857);
            space.age(&space.make(kind).unwrap()).unwrap();
        }
    }

    #[test]
    fn placements_have_names() {
        for (name, placement) in PlacementName::ALL {
            let parsed: PlacementName = name.parse().unwrap();
            assert_eq!((parsed.0, parsed.to_string().as_str()), (placement, name));
        }
        assert!("left".parse::<PlacementName>().unwrap_err().contains("lowest"));
    }
}
