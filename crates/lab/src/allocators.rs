//! The allocators of I/O virtual addresses, and where they put ranges, by the names that the command
//! line and the reports use.

use ringfence_iova::{
    Allocator, Aperture, Bitmap, Magazines, Placement, RbTree, SlabConfig, Slabs,
};
use ringfence_sync::cpu::{CpuId, OsCpu};

use crate::list::named;

named! {
    /// An allocator by name: the peers first.
    #[derive(Default)]
    AllocatorKind, "unknown allocator {:?}: there are {}":
    /// The seed's first: the red-black tree alone.
    RbTree = "rbtree",
    /// The seed's second: the bitmap, next fit.
    Bitmap = "bitmap",
    /// The tree with Linux's magazines in front.
    Magazines = "magazines",
    /// Ours.
    #[default]
    Ringfence = "ringfence",
}

impl AllocatorKind {
    /// An allocator of this kind over `aperture`. Only ours takes a placement; the others have one
    /// of their own.
    pub fn make(self, aperture: Aperture, placement: Placement) -> Box<dyn Allocator> {
        self.make_for(aperture, placement, OsCpu::new())
    }

    /// The same for threads that run where `cpu` says.
    pub(crate) fn make_for(
        self,
        aperture: Aperture,
        placement: Placement,
        cpu: impl CpuId + 'static,
    ) -> Box<dyn Allocator> {
        match self {
            AllocatorKind::RbTree => Box::new(RbTree::new(aperture)),
            // All of the aperture, up to the most that a bitmap can hold (256 GiB of pages): its
            // default window is too small for a hundred thousand ranges.
            AllocatorKind::Bitmap => Box::new(Bitmap::new(aperture, u64::MAX)),
            AllocatorKind::Magazines => Box::new(Magazines::new(RbTree::new(aperture), cpu)),
            AllocatorKind::Ringfence => {
                let config = SlabConfig { placement, ..SlabConfig::default() };
                Box::new(Slabs::with_config(aperture, cpu, config))
            }
        }
    }
}

named! {
    /// A placement by name; `size-aligned` is what `replay` called `size` once.
    #[derive(Default)]
    PlacementName, "unknown placement {:?}: there are {}":
    /// Ranges of one size side by side.
    #[default]
    Size = "size" | "size-aligned",
    /// The lowest place that fits.
    Lowest = "lowest",
    /// The highest place that fits.
    Highest = "highest",
    /// One chunk for all that the disk has in flight, cut in turn.
    Ring = "ring",
}

impl PlacementName {
    /// Where the allocator itself puts ranges.
    pub const fn of_ranges(self) -> Placement {
        match self {
            PlacementName::Size | PlacementName::Ring => Placement::SizeAligned,
            PlacementName::Lowest => Placement::Lowest,
            PlacementName::Highest => Placement::Highest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::list::List;
    use ringfence_iova::Request;

    #[test]
    fn every_allocator_is_made_by_its_name() {
        let aperture = Aperture::new(0, (1 << 39) - 1, 4096).unwrap();
        for kind in AllocatorKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
            let allocator = kind.make(aperture, Placement::default());
            let iova = allocator.alloc(&Request::new(8192)).unwrap();
            allocator.free(iova, 8192).unwrap();
        }
    }

    #[test]
    fn a_list_names_each_once() {
        let parse = str::parse::<List<AllocatorKind>>;
        let kinds = parse("rbtree, ringfence").unwrap();
        assert_eq!(kinds[..], [AllocatorKind::RbTree, AllocatorKind::Ringfence]);
        assert!(parse("rbtree,rbtree").is_err());
        assert!(parse("").is_err());
        assert!(parse("tree").unwrap_err().contains("bitmap"));
    }

    #[test]
    fn placements_have_names() {
        for placement in PlacementName::ALL {
            assert_eq!(placement.to_string().parse(), Ok(placement));
        }
        assert_eq!("size-aligned".parse(), Ok(PlacementName::Size));
        let error = "left".parse::<PlacementName>().unwrap_err();
        assert!(error.contains("lowest") && error.contains("ring"), "{error}");
    }
}
