//! Domains around a domain: counting, and faults injected.
//!
//! Each is a [`Domain`](crate::Domain) itself, so they stack in any order: `Counted` outside of
//! `Faulty` counts the faults, inside of it does not.

mod counted;
mod faulty;

use core::fmt;

pub use counted::{Count, Counted, Counts};
pub use faulty::{Faulty, Stage, When};

/// The calls of a [`Domain`](crate::Domain) that do something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// [`map_pages`](crate::Domain::map_pages)
    Map,
    /// [`iotlb_sync_map`](crate::Domain::iotlb_sync_map)
    SyncMap,
    /// [`unmap_pages`](crate::Domain::unmap_pages)
    Unmap,
    /// [`iotlb_sync`](crate::Domain::iotlb_sync)
    Sync,
    /// [`iotlb_sync_begin`](crate::Domain::iotlb_sync_begin)
    SyncBegin,
    /// [`iotlb_sync_poll`](crate::Domain::iotlb_sync_poll)
    SyncPoll,
    /// [`iotlb_sync_map_begin`](crate::Domain::iotlb_sync_map_begin)
    SyncMapBegin,
    /// [`iotlb_sync_map_poll`](crate::Domain::iotlb_sync_map_poll)
    SyncMapPoll,
    /// [`iotlb_sync_wait`](crate::Domain::iotlb_sync_wait)
    SyncWait,
    /// [`flush_iotlb_all`](crate::Domain::flush_iotlb_all)
    FlushAll,
    /// [`iova_to_phys`](crate::Domain::iova_to_phys)
    Lookup,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 11] = [
        Kind::Map,
        Kind::SyncMap,
        Kind::Unmap,
        Kind::Sync,
        Kind::SyncBegin,
        Kind::SyncPoll,
        Kind::SyncMapBegin,
        Kind::SyncMapPoll,
        Kind::SyncWait,
        Kind::FlushAll,
        Kind::Lookup,
    ];

    /// The name, as traces and metrics have it.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Map => "map",
            Kind::SyncMap => "sync-map",
            Kind::Unmap => "unmap",
            Kind::Sync => "sync",
            Kind::SyncBegin => "sync-begin",
            Kind::SyncPoll => "sync-poll",
            Kind::SyncMapBegin => "sync-map-begin",
            Kind::SyncMapPoll => "sync-map-poll",
            Kind::SyncWait => "sync-wait",
            Kind::FlushAll => "flush-all",
            Kind::Lookup => "lookup",
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

/// Makes a wrapper with an `inner` domain and a method
/// `around(kind, call: FnOnce(&D) -> Result<R>, bytes: FnOnce(&R) -> u128) -> Result<R>` a domain.
macro_rules! domain_around {
    ($wrapper:ident<D $(, $param:ident: $bound:path)*>) => {
        impl<D: $crate::Domain $(, $param: $bound)*> $crate::Domain for $wrapper<D $(, $param)*> {
            type Target = D::Target;

            fn geometry(&self) -> $crate::Geometry {
                self.inner.geometry()
            }
            fn capabilities(&self) -> $crate::Capabilities {
                self.inner.capabilities()
            }
            fn map_pages(
                &self,
                range: $crate::Range,
                target: Self::Target,
                prot: $crate::Prot,
            ) -> $crate::Result<()> {
                let call = |inner: &D| inner.map_pages(range, target, prot);
                self.around($crate::wrap::Kind::Map, call, |_| range.len())
            }
            fn iotlb_sync_map(&self, range: $crate::Range) -> $crate::Result<()> {
                let call = |inner: &D| inner.iotlb_sync_map(range);
                self.around($crate::wrap::Kind::SyncMap, call, |_| 0)
            }
            fn unmap_pages(
                &self,
                range: $crate::Range,
                gather: &mut $crate::Gather,
            ) -> $crate::Result<u128> {
                let call = |inner: &D| inner.unmap_pages(range, gather);
                self.around($crate::wrap::Kind::Unmap, call, |&bytes| bytes)
            }
            fn iotlb_sync(&self, gather: &mut $crate::Gather) -> $crate::Result<()> {
                let call = |inner: &D| inner.iotlb_sync(gather);
                self.around($crate::wrap::Kind::Sync, call, |_| 0)
            }
            fn flush_iotlb_all(&self) -> $crate::Result<()> {
                self.around($crate::wrap::Kind::FlushAll, |inner: &D| inner.flush_iotlb_all(), |_| 0)
            }
            fn iova_to_phys(&self, iova: $crate::Iova) -> Option<Self::Target> {
                let call = |inner: &D| Ok(inner.iova_to_phys(iova));
                self.around($crate::wrap::Kind::Lookup, call, |_| 0).ok().flatten()
            }
            fn mappings_from(
                &self,
                iova: $crate::Iova,
                into: &mut alloc::vec::Vec<$crate::table::Mapping>,
            ) -> $crate::Result<()> {
                self.inner.mappings_from(iova, into)
            }
            fn iotlb_sync_begin(
                &self,
                gather: &mut $crate::Gather,
            ) -> $crate::Result<$crate::SyncToken> {
                let call = |inner: &D| inner.iotlb_sync_begin(gather);
                self.around($crate::wrap::Kind::SyncBegin, call, |_| 0)
            }
            fn iotlb_sync_poll(
                &self,
                token: $crate::SyncToken,
                ranges: &[$crate::Range],
            ) -> $crate::Result<bool> {
                let call = |inner: &D| inner.iotlb_sync_poll(token, ranges);
                self.around($crate::wrap::Kind::SyncPoll, call, |_| 0)
            }
            fn iotlb_sync_map_begin(
                &self,
                ranges: &[$crate::Range],
            ) -> $crate::Result<$crate::SyncToken> {
                let call = |inner: &D| inner.iotlb_sync_map_begin(ranges);
                self.around($crate::wrap::Kind::SyncMapBegin, call, |_| 0)
            }
            fn iotlb_sync_map_poll(
                &self,
                token: $crate::SyncToken,
                ranges: &[$crate::Range],
            ) -> $crate::Result<bool> {
                let call = |inner: &D| inner.iotlb_sync_map_poll(token, ranges);
                self.around($crate::wrap::Kind::SyncMapPoll, call, |_| 0)
            }
            fn iotlb_sync_wait(&self, token: $crate::SyncToken) -> $crate::Result<()> {
                let call = |inner: &D| inner.iotlb_sync_wait(token);
                self.around($crate::wrap::Kind::SyncWait, call, |_| 0)
            }
        }
    };
}
use domain_around;

#[cfg(all(test, not(loom)))]
pub(crate) mod fake {
    //! A domain of the simplest kind, to wrap in tests.

    use alloc::collections::BTreeMap;

    use ringfence_sync::lock::SpinLock;

    use crate::{
        Capabilities, Domain, Error, Gather, Geometry, GuestPhys, Iova, PageSizes, Prot, Range,
        Result, SyncToken,
    };

    /// Mappings by their first address.
    #[derive(Default)]
    pub(crate) struct Fake {
        pub(crate) mappings: SpinLock<BTreeMap<u64, (Range, GuestPhys)>>,
    }

    impl Domain for Fake {
        type Target = GuestPhys;

        fn geometry(&self) -> Geometry {
            Geometry::new(PageSizes::X86, Range::ALL)
        }
        fn capabilities(&self) -> Capabilities {
            Capabilities::FULL
        }
        fn map_pages(&self, range: Range, target: GuestPhys, _prot: Prot) -> Result<()> {
            let mut mappings = self.mappings.lock();
            if mappings.values().any(|(held, _)| held.overlaps(range)) {
                return Err(Error::Exists { range, at: range.first() });
            }
            mappings.insert(range.first().0, (range, target));
            Ok(())
        }
        fn iotlb_sync_map(&self, _range: Range) -> Result<()> {
            Ok(())
        }
        fn unmap_pages(&self, range: Range, gather: &mut Gather) -> Result<u128> {
            gather.add(range);
            Ok(self.mappings.lock().remove(&range.first().0).map_or(0, |(held, _)| held.len()))
        }
        fn iotlb_sync(&self, gather: &mut Gather) -> Result<()> {
            gather.clear_ranges();
            Ok(())
        }
        fn flush_iotlb_all(&self) -> Result<()> {
            Ok(())
        }
        fn iova_to_phys(&self, iova: Iova) -> Option<GuestPhys> {
            let mappings = self.mappings.lock();
            let (range, target) = *mappings.range(..=iova.0).next_back()?.1;
            range.contains(iova).then(|| GuestPhys(iova.0 - range.first().0 + target.0))
        }
        fn iotlb_sync_begin(&self, gather: &mut Gather) -> Result<SyncToken> {
            gather.clear_ranges();
            Ok(SyncToken(7))
        }
        fn iotlb_sync_poll(&self, token: SyncToken, _ranges: &[Range]) -> Result<bool> {
            Ok(token == SyncToken(7))
        }
        fn iotlb_sync_map_begin(&self, ranges: &[Range]) -> Result<SyncToken> {
            Ok(SyncToken(ranges.len() as u64))
        }
        fn iotlb_sync_map_poll(&self, token: SyncToken, ranges: &[Range]) -> Result<bool> {
            Ok(token == SyncToken(ranges.len() as u64))
        }
        fn iotlb_sync_wait(&self, _token: SyncToken) -> Result<()> {
            Err(Error::Gone("never to be over"))
        }
    }

    pub(crate) fn page(n: u64) -> Range {
        Range::from_len(Iova(n << 12), 4096).unwrap()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{
        fake::{Fake, page},
        *,
    };
    use crate::{Domain, Gather, GuestPhys, Prot, SyncToken};

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
        domain.map_pages(page(1), GuestPhys(0x5000), Prot::RW).unwrap();
        domain.iotlb_sync_map(page(1)).unwrap();
        assert_eq!(domain.iova_to_phys(page(1).first()), Some(GuestPhys(0x5000)));
        assert_eq!(domain.iova_to_phys(page(2).first()), None);
        let mut gather = Gather::new();
        assert_eq!(domain.unmap_pages(page(1), &mut gather), Ok(4096));
        // The inner domain's own way to begin a sync, not the default one of the trait.
        assert_eq!(domain.iotlb_sync_begin(&mut gather), Ok(SyncToken(7)));
        assert_eq!(domain.iotlb_sync_poll(SyncToken(7), &[page(1)]), Ok(true));
        assert_eq!(domain.iotlb_sync_poll(SyncToken(8), &[page(1)]), Ok(false));
        let pages = [page(1), page(2)];
        assert_eq!(domain.iotlb_sync_map_begin(&pages), Ok(SyncToken(2)));
        assert_eq!(domain.iotlb_sync_map_poll(SyncToken(2), &pages), Ok(true));
        assert_eq!(domain.iotlb_sync_map_poll(SyncToken(2), &pages[1..]), Ok(false));
        assert!(domain.iotlb_sync_wait(SyncToken(2)).is_err());
        domain.iotlb_sync(&mut gather).unwrap();
        domain.flush_iotlb_all().unwrap();
        assert_eq!(domain.geometry(), Fake::default().geometry());
        assert_eq!(domain.capabilities(), Fake::default().capabilities());
        assert_eq!(Kind::ALL.iter().map(|&kind| domain.counts()[kind].calls).sum::<u64>(), 14);
    }
}
