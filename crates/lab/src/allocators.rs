//! The allocators of I/O virtual addresses, and where they put ranges, by the names that the command
//! line and the reports use.

use std::{fmt, str::FromStr};

use ringfence_iova::{
    Allocator, Aperture, Bitmap, Magazines, Placement, RbTree, SlabConfig, Slabs,
};
use ringfence_sync::cpu::OsCpu;

use crate::list;

/// An allocator by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AllocatorKind {
    /// The seed's first: the red-black tree alone.
    RbTree,
    /// The seed's second: the bitmap, next fit.
    Bitmap,
    /// The tree with Linux's magazines in front.
    Magazines,
    /// Ours.
    #[default]
    Ringfence,
}

impl AllocatorKind {
    /// All of them, the peers first.
    pub const ALL: [AllocatorKind; 4] = [
        AllocatorKind::RbTree,
        AllocatorKind::Bitmap,
        AllocatorKind::Magazines,
        AllocatorKind::Ringfence,
    ];

    /// Its name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            AllocatorKind::RbTree => "rbtree",
            AllocatorKind::Bitmap => "bitmap",
            AllocatorKind::Magazines => "magazines",
            AllocatorKind::Ringfence => "ringfence",
        }
    }

    /// An allocator of this kind over `aperture`. Only ours knows placements; the others have
    /// their own.
    pub fn make(self, aperture: Aperture, placement: Placement) -> Box<dyn Allocator> {
        match self {
            AllocatorKind::RbTree => Box::new(RbTree::new(aperture)),
            // All of the aperture, as far as a bitmap can be asked to hold it (256 GiB of pages):
            // its default window is too small for a hundred thousand ranges.
            AllocatorKind::Bitmap => Box::new(Bitmap::new(aperture, u64::MAX)),
            AllocatorKind::Magazines => {
                Box::new(Magazines::new(RbTree::new(aperture), OsCpu::new()))
            }
            AllocatorKind::Ringfence => {
                let config = SlabConfig { placement, ..SlabConfig::default() };
                Box::new(Slabs::with_config(aperture, OsCpu::new(), config))
            }
        }
    }

    /// The kinds of a list such as `rbtree,ringfence`.
    ///
    /// # Errors
    /// A name is none, or the list is empty or names one twice.
    pub fn parse_list(text: &str) -> Result<Vec<AllocatorKind>, String> {
        list::parse(text, "list of allocators")
    }
}

impl fmt::Display for AllocatorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for AllocatorKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|kind| kind.name()).collect();
            format!("no allocator is called {name:?}: there are {}", names.join(", "))
        })
    }
}

/// A placement by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlacementName {
    /// Ranges of one size side by side.
    #[default]
    Size,
    /// The lowest place that fits.
    Lowest,
    /// The highest place that fits.
    Highest,
    /// One chunk for all that the disk has in flight, cut in turn.
    Ring,
}

impl PlacementName {
    /// All of them.
    pub const ALL: [PlacementName; 4] =
        [PlacementName::Size, PlacementName::Lowest, PlacementName::Highest, PlacementName::Ring];

    /// Its name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            PlacementName::Size => "size",
            PlacementName::Lowest => "lowest",
            PlacementName::Highest => "highest",
            PlacementName::Ring => "ring",
        }
    }

    /// Where the allocator itself puts ranges.
    pub const fn of_ranges(self) -> Placement {
        match self {
            PlacementName::Size | PlacementName::Ring => Placement::SizeAligned,
            PlacementName::Lowest => Placement::Lowest,
            PlacementName::Highest => Placement::Highest,
        }
    }

    /// The placement called `name`, one of `offered`: not every command has all of them.
    ///
    /// `size-aligned`, as `replay` called `size` once, is still understood.
    ///
    /// # Errors
    /// There is none of that name, or it is not offered.
    pub fn parse_of(name: &str, offered: &[PlacementName]) -> Result<PlacementName, String> {
        let name = if name == "size-aligned" { "size" } else { name };
        offered.iter().copied().find(|placement| placement.name() == name).ok_or_else(|| {
            let names: Vec<&str> = offered.iter().map(|placement| placement.name()).collect();
            format!("no placement is called {name:?}: there are {}", names.join(", "))
        })
    }
}

impl fmt::Display for PlacementName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PlacementName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        PlacementName::parse_of(name, &Self::ALL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let kinds = AllocatorKind::parse_list("rbtree, ringfence").unwrap();
        assert_eq!(kinds, [AllocatorKind::RbTree, AllocatorKind::Ringfence]);
        assert!(AllocatorKind::parse_list("rbtree,rbtree").is_err());
        assert!(AllocatorKind::parse_list("").is_err());
        assert!(AllocatorKind::parse_list("tree").unwrap_err().contains("bitmap"));
    }

    #[test]
    fn placements_have_names() {
        for placement in PlacementName::ALL {
            assert_eq!(placement.to_string().parse(), Ok(placement));
        }
        assert_eq!("size-aligned".parse(), Ok(PlacementName::Size));
        let error = "left".parse::<PlacementName>().unwrap_err();
        assert!(error.contains("lowest") && error.contains("ring"), "{error}");
        let offered = [PlacementName::Size, PlacementName::Lowest];
        assert!(PlacementName::parse_of("ring", &offered).unwrap_err().ends_with("size, lowest"));
    }
}
