//! Domains around a domain: counting, and faults injected.
//!
//! Each is a [`Domain`](crate::Domain) itself, so they stack in any order: `Counted` outside of
//! `Faulty` counts the faults, inside of it does not.

mod counted;
mod faulty;

use core::fmt;

use crate::Work;

pub use counted::{Count, Counted, Counts};
pub use faulty::{Faulty, Stage, When};

/// For [`pass_on`](crate::pass_on).
#[doc(hidden)]
pub use alloc::vec::Vec;

/// Forwards methods to a wrapped domain in a field: `pass_on!(inner: geometry, sync_wait)` in the
/// implementation of [`Domain`](crate::Domain).
#[macro_export]
macro_rules! pass_on {
    ($inner:ident: $($method:ident),+ $(,)?) => { $($crate::pass_on!(@$method $inner);)+ };
    (@geometry $inner:ident) => {
        fn geometry(&self) -> $crate::Geometry {
            $crate::Domain::geometry(&self.$inner)
        }
    };
    (@capabilities $inner:ident) => {
        fn capabilities(&self) -> $crate::Capabilities {
            $crate::Domain::capabilities(&self.$inner)
        }
    };
    (@sync_begin $inner:ident) => {
        #[inline]
        fn sync_begin(&self, work: $crate::Work<'_>) -> $crate::Result<$crate::SyncToken> {
            $crate::Domain::sync_begin(&self.$inner, work)
        }
    };
    (@sync_poll $inner:ident) => {
        #[inline]
        fn sync_poll(
            &self,
            token: $crate::SyncToken,
            work: $crate::Work<'_>,
            failed: &mut dyn FnMut($crate::Range, $crate::Error),
        ) -> bool {
            $crate::Domain::sync_poll(&self.$inner, token, work, failed)
        }
    };
    (@sync_wait $inner:ident) => {
        fn sync_wait(&self, token: $crate::SyncToken) {
            $crate::Domain::sync_wait(&self.$inner, token);
        }
    };
    (@sync $inner:ident) => {
        #[inline]
        fn sync(&self, work: $crate::Work<'_>) -> $crate::Result<$crate::Synced> {
            $crate::Domain::sync(&self.$inner, work)
        }
    };
    (@iova_to_phys $inner:ident) => {
        fn iova_to_phys(&self, iova: $crate::Iova) -> Option<Self::Target> {
            $crate::Domain::iova_to_phys(&self.$inner, iova)
        }
    };
    (@mappings_from $inner:ident) => {
        fn mappings_from(
            &self,
            iova: $crate::Iova,
            into: &mut $crate::wrap::Vec<$crate::table::Mapping>,
        ) -> $crate::Result<()> {
            $crate::Domain::mappings_from(&self.$inner, iova, into)
        }
    };
}

/// The calls of a [`Domain`](crate::Domain) that do something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// An element of [`map_pages`](crate::Domain::map_pages)
    Map,
    /// An element of [`unmap_pages`](crate::Domain::unmap_pages)
    Unmap,
    /// [`sync_begin`](crate::Domain::sync_begin) of [`Work::Map`]
    SyncMap,
    /// [`sync_begin`](crate::Domain::sync_begin) of [`Work::Unmap`]
    Sync,
    /// [`sync_begin`](crate::Domain::sync_begin) of [`Work::All`]
    FlushAll,
    /// A [`sync_poll`](crate::Domain::sync_poll) that finds the sync over.
    SyncEnd,
    /// [`iova_to_phys`](crate::Domain::iova_to_phys)
    Lookup,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 7] = [
        Kind::Map,
        Kind::Unmap,
        Kind::SyncMap,
        Kind::Sync,
        Kind::FlushAll,
        Kind::SyncEnd,
        Kind::Lookup,
    ];

    /// The name, as traces and metrics have it.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Map => "map",
            Kind::Unmap => "unmap",
            Kind::SyncMap => "sync-map",
            Kind::Sync => "sync",
            Kind::FlushAll => "flush-all",
            Kind::SyncEnd => "sync-end",
            Kind::Lookup => "lookup",
        }
    }

    /// The kind of a sync's beginning.
    const fn of(work: Work<'_>) -> Kind {
        match work {
            Work::Map(_) => Kind::SyncMap,
            Work::Unmap { .. } => Kind::Sync,
            Work::All => Kind::FlushAll,
        }
    }

    const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(all(test, not(loom)))]
pub(crate) mod fake {
    //! A domain of the simplest kind, to wrap in tests.

    use alloc::collections::BTreeMap;

    use ringfence_sync::lock::SpinLock;

    use crate::{
        Capabilities, Domain, Error, Gather, Geometry, GuestPhys, Iova, Map, PageSizes, Partial,
        Range, Result, SyncToken, Work,
    };

    /// Mappings by their first address.
    #[derive(Default)]
    pub(crate) struct Fake {
        pub(crate) mappings: SpinLock<BTreeMap<u64, (Range, GuestPhys)>>,
    }

    /// The token of a sync of everything.
    pub(crate) const ALL: SyncToken = SyncToken(7);

    // SAFETY: there is no device that could reach anything.
    unsafe impl Domain for Fake {
        type Target = GuestPhys;

        fn geometry(&self) -> Geometry {
            Geometry::new(PageSizes::X86, Range::ALL)
        }
        fn capabilities(&self) -> Capabilities {
            Capabilities::FULL
        }
        fn map_pages(&self, maps: &[Map<GuestPhys>]) -> Result<(), Partial> {
            let mut mappings = self.mappings.lock();
            for (done, map) in maps.iter().enumerate() {
                let range = map.range();
                if mappings.values().any(|(held, _)| held.overlaps(range)) {
                    let error = Error::Exists { range, at: range.first() };
                    return Err(Partial { done, error });
                }
                mappings.insert(range.first().0, (range, map.target()));
            }
            Ok(())
        }
        fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
            let mut mappings = self.mappings.lock();
            ranges.iter().for_each(|&range| gather.add(range));
            let removed = ranges.iter().filter_map(|range| mappings.remove(&range.first().0));
            Ok(removed.map(|(held, _)| held.len()).sum())
        }
        fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
            Ok(match work {
                Work::Map(_) => SyncToken::DONE,
                Work::Unmap { ranges, .. } => SyncToken(ranges.len() as u64),
                Work::All => ALL,
            })
        }
        fn sync_poll(
            &self,
            token: SyncToken,
            work: Work<'_>,
            failed: &mut dyn FnMut(Range, Error),
        ) -> bool {
            assert_eq!(self.sync_begin(work), Ok(token), "another's token");
            if let Work::Unmap { ranges: [only], .. } = work {
                failed(*only, Error::Gone("alone"));
            }
            true
        }
        fn sync_wait(&self, _token: SyncToken) {}
        fn iova_to_phys(&self, iova: Iova) -> Option<GuestPhys> {
            let mappings = self.mappings.lock();
            let (range, target) = *mappings.range(..=iova.0).next_back()?.1;
            range.contains(iova).then(|| GuestPhys(iova.0 - range.first().0 + target.0))
        }
    }

    pub(crate) fn page(n: u64) -> Range {
        Range::from_len(Iova(n << 12), 4096).unwrap()
    }

    pub(crate) fn map(range: Range, target: u64) -> Map<GuestPhys> {
        Map::new(range, GuestPhys(target), crate::Prot::RW)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{
        fake::{Fake, map, page},
        *,
    };
    use crate::{Domain, Error, Gather, GuestPhys, Partial};

    #[test]
    fn names_and_indices_are_distinct() {
        for (at, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind.index(), at);
            assert_eq!(Kind::ALL.iter().filter(|other| other.name() == kind.name()).count(), 1);
        }
    }

    #[test]
    fn wrappers_stack_and_pass_everything_through() {
        let domain = Counted::new(Faulty::new(Fake::default(), 1));
        domain.map_pages(&[map(page(1), 0x5000), map(page(2), 0x7000)]).unwrap();
        let again = [map(page(3), 0), map(page(2), 0), map(page(4), 0)];
        let error = Error::Exists { range: page(2), at: page(2).first() };
        assert_eq!(domain.map_pages(&again), Err(Partial { done: 1, error }));
        domain.iotlb_sync_map(page(1)).unwrap();
        assert_eq!(domain.iova_to_phys(page(1).first()), Some(GuestPhys(0x5000)));
        assert_eq!(domain.iova_to_phys(page(4).first()), None);
        let mut gather = Gather::new();
        let ranges = [page(1), page(3)];
        assert_eq!(domain.unmap_pages(&ranges, &mut gather), Ok(8192));
        domain.iotlb_sync(&mut gather).unwrap();
        domain.unmap(page(2), &mut gather).unwrap();
        assert_eq!(domain.iotlb_sync(&mut gather), Err(Error::Gone("alone")));
        domain.flush_iotlb_all().unwrap();
        assert_eq!(domain.geometry(), Fake::default().geometry());
        assert_eq!(domain.capabilities(), Fake::default().capabilities());
        let counts =
            Kind::ALL.map(|kind| (domain.counts()[kind].calls, domain.counts()[kind].errors));
        assert_eq!(counts, [(4, 1), (3, 0), (1, 0), (2, 0), (1, 0), (4, 1), (2, 0)]);
    }
}
