//! A domain for endpoints of this process and for those behind a real IOMMU.
//!
//! Ordering: where a mirror joins, the primary's lock orders `mirrored`. A map or an unmap that had the lock
//! before the primary was read has left its traces there; one that has it later sees the flag, which was
//! set before. Where one leaves it is emptied first (Release): an unmap that sees the flag cleared
//! (Acquire) returns after that.

use std::{fmt, sync::Arc};

use ringfence_iommu::{
    Address, Domain, Error, Gather, GuestPhys, Iova, Map, Partial, Pending, Range, Result,
    table::Mapping,
};
use ringfence_sync::{
    atomic::{AtomicBool, Ordering},
    lock::Mutex,
    mutant,
};

use super::{Binding, Mirror};

/// How many mappings are read from a domain at a time.
const BATCH: usize = 64;

/// Calls `f` with each mapping of `domain` that ends in `range` or after it and begins in it or before
/// it.
pub(super) fn each_mapping(
    domain: &impl Domain,
    range: Range,
    mut f: impl FnMut(&Mapping) -> Result<()>,
) -> Result<()> {
    let mut batch = Vec::with_capacity(BATCH);
    let mut next = Some(range.first());
    while let Some(from) = next {
        batch.clear();
        domain.mappings_from(from, &mut batch)?;
        let more = batch.len() == batch.capacity();
        next = batch.last().filter(|_| more).and_then(|last| last.range.last().checked_add(1));
        next = next.filter(|&next| next <= range.last());
        batch.iter().take_while(|mapping| mapping.range.overlaps(range)).try_for_each(&mut f)?;
    }
    Ok(())
}

/// A domain that is repeated in others: what a driver maps is in the *primary* one, through which
/// endpoints of this process translate, and in the [`Mirror`] of each member behind a real IOMMU.
/// All of them have it, or none.
///
/// Without mirrors it is the primary domain plus a check of a flag. With mirrors, maps and unmaps
/// exclude each other, and the domains are changed one after the other: a mapping enters the
/// mirrors first and leaves the primary last, so that the primary determines what must be mapped if
/// something fails.
///
/// The primary's calls must exclude each other by a lock, as
/// [`SoftDomain`](ringfence_iommu::SoftDomain)'s do, and it must [list its
/// mappings](Domain::mappings_from).
pub struct Joint<D> {
    primary: Arc<D>,
    /// Whether there are mirrors, or will be. Set before the primary is read: a map or an unmap that
    /// did not see it has left its traces in the primary before it was read, or sees it afterwards.
    mirrored: AtomicBool,
    mirrors: Mutex<Vec<Arc<Mirror>>>,
}

impl<D: Domain<Target = GuestPhys>> Joint<D> {
    /// `primary` alone.
    pub fn new(primary: Arc<D>) -> Arc<Joint<D>> {
        let (mirrored, mirrors) = (AtomicBool::new(false), Mutex::default());
        Arc::new(Joint { primary, mirrored, mirrors })
    }

    /// The domain in which all mappings are.
    pub fn primary(&self) -> &Arc<D> {
        &self.primary
    }

    /// Repeats all that is mapped in `mirror`, in which nothing is, and all that will be. If that fails it
    /// is emptied; if that fails too, something may be left in it.
    fn join(&self, mirror: &Arc<Mirror>) -> Result<()> {
        let mut mirrors = self.mirrors.lock();
        let late = mutant!("the flag is set after the primary is read");
        if !late {
            self.mirrored.store(true, Ordering::Release);
        }
        let replayed = each_mapping(&self.primary, Range::ALL, |mapping| mirror.map(mapping));
        match &replayed {
            Ok(()) => mirrors.push(Arc::clone(mirror)),
            // Before an unmap that sees no mirror returns: nothing that it unmaps may be left there. The
            // caller empties it again, and reports it if that fails.
            Err(_) => _ = mirror.unmap(Range::ALL),
        }
        if late || replayed.is_err() {
            self.mirrored.store(!mirrors.is_empty(), Ordering::Release);
        }
        replayed
    }

    /// Empties `mirror`, and lets it be. If that fails all is as it was.
    fn part(&self, mirror: &Arc<Mirror>) -> Result<()> {
        let mut mirrors = self.mirrors.lock();
        if let Err(error) = mirror.unmap(Range::ALL) {
            self.restore(std::slice::from_ref(mirror), Range::ALL);
            return Err(error);
        }
        mirrors.retain(|held| !Arc::ptr_eq(held, mirror));
        self.mirrored.store(!mirrors.is_empty(), Ordering::Release);
        Ok(())
    }

    /// Has the mirrors repeat again what the primary has in `range`, after a failure.
    fn restore(&self, mirrors: &[Arc<Mirror>], range: Range) {
        for mirror in mirrors {
            if each_mapping(&self.primary, range, |mapping| mirror.fill(mapping)).is_err() {
                mirror.count();
            }
        }
    }

    /// As [`map_pages`](Domain::map_pages), where there are mirrors.
    #[cold]
    fn map_all(&self, map: &Map<GuestPhys>) -> Result<()> {
        let (range, mapping) = (map.range(), map.mapping());
        let mirrors = self.mirrors.lock();
        // What the primary would refuse is refused before a mirror is touched, as far as that can
        // be checked.
        if !mirrors.is_empty() {
            each_mapping(&self.primary, range, |mapping| {
                Err(Error::Exists { range, at: mapping.range.first() })
            })?;
            self.primary.geometry().check_map(map)?;
        }
        let mut done = 0;
        let mapped = mirrors.iter().try_for_each(|mirror| {
            mirror.map(&mapping)?;
            done += 1;
            Ok(())
        });
        let mapped = mapped.and_then(|()| self.primary.map(*map));
        mapped.inspect_err(|_| {
            // Counted if it fails.
            mirrors[..done].iter().for_each(|mirror| _ = mirror.unmap(range));
        })
    }

    /// As [`unmap_pages`](Domain::unmap_pages), where there are mirrors.
    #[cold]
    fn unmap_all(&self, range: Range, gather: &mut Gather) -> Result<u128> {
        let mirrors = self.mirrors.lock();
        if !mirrors.is_empty() {
            for end in [range.first(), range.last()] {
                each_mapping(&self.primary, Range::new(end, end).unwrap_or(range), |mapping| {
                    match range.covers(mapping.range) {
                        true => Ok(()),
                        // Rule V22.
                        false => Err(Error::WouldSplit { range, at: end }),
                    }
                })?;
            }
        }
        let unmapped = mirrors.iter().try_for_each(|mirror| mirror.unmap(range));
        let unmapped = unmapped.and_then(|()| self.primary.unmap(range, gather));
        unmapped.inspect_err(|_| self.restore(&mirrors, range))
    }

    /// Ends maps that began without mirrors and ended with some; the copying of the primary into
    /// these may have found the new mappings or not.
    #[cold]
    fn map_late(&self, maps: &[Map<GuestPhys>]) -> Result<(), Partial> {
        let mirrors = self.mirrors.lock();
        let filled = Partial::each(maps, |map| {
            let range = map.range();
            mirrors.iter().try_for_each(|mirror| {
                each_mapping(&self.primary, range, |mapping| mirror.fill(mapping))
            })
        });
        filled.inspect_err(|partial| {
            for range in maps[partial.done..].iter().map(Map::range) {
                // Counted if it fails.
                mirrors.iter().for_each(|mirror| _ = mirror.unmap(range));
                // The map was not reported as done: an endpoint that guesses the address may reach
                // it a little longer.
                let mut gather = Gather::new();
                let _ = self.primary.unmap(range, &mut gather);
                drop(Pending::gathered(&*self.primary, Vec::new(), &mut gather));
            }
        })
    }

    /// Ends an unmap that began without mirrors and ended with some, into which its mappings may
    /// have been copied before it removed them.
    #[cold]
    fn unmap_late(&self, range: Range) -> Result<()> {
        let mirrors = self.mirrors.lock();
        if mirrors.is_empty() {
            return Ok(());
        }
        // What has been mapped there since stays.
        let mut gaps = Vec::new();
        let mut next = Some(range.first());
        each_mapping(&self.primary, range, |mapping| {
            if let Some(first) = next
                && let Some(last) = mapping.range.first().0.checked_sub(1)
            {
                gaps.extend(Range::new(first, Iova(last)));
            }
            next = mapping.range.last().checked_add(1);
            Ok(())
        })?;
        gaps.extend(next.and_then(|first| Range::new(first, range.last())));
        let all = mirrors.iter().flat_map(|mirror| gaps.iter().map(move |&gap| (mirror, gap)));
        all.map(|(mirror, gap)| mirror.unmap(gap)).fold(Ok(()), Result::and)
    }

    #[inline]
    fn is_mirrored(&self) -> bool {
        self.mirrored.load(Ordering::Acquire)
    }
}

// SAFETY: the primary fulfils the contract for endpoints of this process; mirrors are synced before
// their part of an unmap returns, and failures of it are reported.
unsafe impl<D: Domain<Target = GuestPhys>> Domain for Joint<D> {
    type Target = GuestPhys;

    ringfence_iommu::pass_on!(
        primary: geometry, capabilities, sync_begin, sync_poll, sync_wait, sync, iova_to_phys,
        mappings_from
    );

    /// Mirrors have synced theirs when this returns.
    #[inline]
    fn map_pages(&self, maps: &[Map<GuestPhys>]) -> Result<(), Partial> {
        if self.is_mirrored() {
            return Partial::each(maps, |map| self.map_all(map));
        }
        let mapped = self.primary.map_pages(maps);
        let done = mapped.map_or_else(|partial| partial.done, |()| maps.len());
        if self.is_mirrored() { self.map_late(&maps[..done]).and(mapped) } else { mapped }
    }

    /// # Errors
    /// As the primary's. A mirror's: nothing of that range was removed, unless the mirror has
    /// counted it.
    #[inline]
    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        let mut bytes = 0;
        if self.is_mirrored() {
            Partial::each(ranges, |&range| {
                self.unmap_all(range, gather).map(|more| bytes += more)
            })?;
            return Ok(bytes);
        }
        let unmapped = self.primary.unmap_pages(ranges, gather);
        if self.is_mirrored() {
            // All that the primary has removed, even if some of it fails.
            let done = unmapped.map_or_else(|partial| partial.done, |_| ranges.len());
            let late = ranges[..done].iter().enumerate().map(|(done, &range)| {
                self.unmap_late(range).map_err(|error| Partial { done, error })
            });
            late.fold(Ok(()), Result::and)?;
        }
        unmapped
    }
}

impl<D: fmt::Debug> fmt::Debug for Joint<D> {
    ringfence_sync::shows!(Joint as it, primary: it.primary, mirrors: *it.mirrors.lock());
}

/// An endpoint behind a real IOMMU: a mirror, and what it repeats.
pub struct Outside<D> {
    mirror: Arc<Mirror>,
    binding: Mutex<Binding<Arc<Joint<D>>>>,
}

impl<D: Domain<Target = GuestPhys>> Outside<D> {
    /// An endpoint that reaches nothing.
    pub fn new(mirror: Arc<Mirror>) -> Outside<D> {
        Outside { mirror, binding: Mutex::new(Binding::Blocked) }
    }

    /// The mirror, which has what the endpoint reaches.
    pub fn mirror(&self) -> &Arc<Mirror> {
        &self.mirror
    }

    /// Its present binding.
    pub fn binding(&self) -> Binding<Arc<Joint<D>>> {
        self.binding.lock().clone()
    }

    /// Changes its binding, which is in force when this returns. Takes time for each mapping of the
    /// domain that it leaves or joins; maps and unmaps in these wait for it.
    ///
    /// # Errors
    /// The binding is the one before; or, where that could not be restored, which the mirror
    /// [counts](Mirror::failures), it is blocked, and its remaining mappings are removed before the
    /// next binding.
    pub fn bind(&self, to: Binding<Arc<Joint<D>>>) -> Result<()> {
        let mut binding = self.binding.lock();
        if is_same(&binding, &to) {
            return Ok(());
        }
        if matches!(to, Binding::Bypass) {
            self.mirror.may_bypass()?;
        }
        self.leave(&binding)?;
        if let Err(error) = self.enter(&to) {
            // Counted if it fails.
            let emptied = self.mirror.unmap(Range::ALL);
            if emptied.and_then(|()| self.enter(&binding)).is_err() {
                self.mirror.count();
                *binding = Binding::Blocked;
            }
            return Err(error);
        }
        *binding = to;
        Ok(())
    }

    fn enter(&self, to: &Binding<Arc<Joint<D>>>) -> Result<()> {
        match to {
            Binding::Blocked => Ok(()),
            Binding::Bypass => self.mirror.map_all_memory(),
            Binding::Domain(domain) => domain.join(&self.mirror),
        }
    }

    /// Empties the mirror; if that fails all is as it was.
    fn leave(&self, from: &Binding<Arc<Joint<D>>>) -> Result<()> {
        match from {
            // Something is left where nothing else could be restored.
            Binding::Blocked => self.mirror.unmap(Range::ALL),
            Binding::Bypass => self.mirror.unmap(Range::ALL).inspect_err(|_| {
                if self.mirror.fill_all_memory().is_err() {
                    self.mirror.count();
                }
            }),
            Binding::Domain(domain) => domain.part(&self.mirror),
        }
    }
}

impl<D> fmt::Debug for Outside<D> {
    ringfence_sync::shows!(Outside as it, mirror: it.mirror);
}

/// Whether there is nothing to do. (A blocked endpoint may have mappings left to remove.)
fn is_same<D>(one: &Binding<Arc<D>>, other: &Binding<Arc<D>>) -> bool {
    match (one, other) {
        (Binding::Bypass, Binding::Bypass) => true,
        (Binding::Domain(one), Binding::Domain(other)) => Arc::ptr_eq(one, other),
        _ => false,
    }
}

#[cfg(all(test, loom))]
mod model {
    use std::sync::Arc;

    use loom::thread;
    use ringfence_iommu::{
        Geometry, HostAddr, PageSizes, Prot, SoftDomain, shootdown::Shootdown, table::Limits,
    };
    use ringfence_sync::model::check;

    use super::{super::HostRegion, *};

    type Soft = SoftDomain<GuestPhys>;
    type Far = SoftDomain<HostAddr>;

    /// A slot of the model's smallest table.
    const PAGE: u64 = 1 << 56;

    fn page(n: u64) -> Range {
        Range::from_len(Iova(n * PAGE), PAGE).unwrap()
    }

    fn map(joint: &Joint<Soft>, n: u64) {
        joint.map_pages(&[Map::new(page(n), GuestPhys(n * PAGE), Prot::RW)]).unwrap();
    }

    /// What an endpoint behind an IOMMU does.
    #[derive(Clone, Copy, PartialEq)]
    enum Does {
        Join,
        /// It has no memory behind page 1.
        FailToJoin,
        Leave,
    }

    /// An endpoint behind an IOMMU joins or leaves a domain with page 0 (and 1, if it fails to join) while a
    /// driver changes it: the endpoint sees what is mapped, or nothing. What is unmapped it does not see
    /// once the unmap has returned.
    fn race(does: Does, change: fn(&Joint<Soft>, &Far)) {
        check(None, move || {
            let shootdown = Shootdown::new(1);
            let geometry = || Geometry::new(PageSizes::new(PAGE).unwrap(), Range::ALL);
            let primary = Soft::new(geometry(), Limits::NONE, Arc::clone(&shootdown));
            let far = Far::new(geometry(), Limits::NONE, shootdown);
            let last = if does == Does::FailToJoin { PAGE - 1 } else { u64::MAX };
            let memory = HostRegion { guest: (GuestPhys(0), GuestPhys(last)), host: HostAddr(0) };
            // SAFETY: nothing is ever accessed there.
            let mirror = unsafe { Mirror::new(Arc::clone(&far) as _, [memory], false) };
            let (joint, outside) = (Joint::new(primary), Outside::new(mirror));
            map(&joint, 0);
            let domain = || Binding::Domain(Arc::clone(&joint));
            match does {
                Does::Join => {}
                Does::FailToJoin => map(&joint, 1),
                Does::Leave => outside.bind(domain()).unwrap(),
            }
            let theirs = (Arc::clone(&joint), Arc::clone(&far));
            let driver = thread::spawn(move || change(&theirs.0, &theirs.1));
            let bound = outside.bind(if does == Does::Leave { Binding::Blocked } else { domain() });
            driver.join().unwrap();
            assert_eq!(bound.is_ok(), does != Does::FailToJoin);
            for n in 0..2 {
                let near = joint.iova_to_phys(Iova(n * PAGE)).filter(|_| does == Does::Join);
                let far = far.iova_to_phys(Iova(n * PAGE));
                assert_eq!(far.map(|to| to.0), near.map(|to| to.0), "page {n}");
            }
            assert_eq!(outside.mirror().failures(), 0);
        });
    }

    fn unmap_0(joint: &Joint<Soft>, far: &Far) {
        joint.unmap_pages(&[page(0)], &mut Gather::default()).unwrap();
        assert_eq!(far.iova_to_phys(Iova(0)).map(|to| to.0), None, "unmapped, and reached");
    }

    #[test]
    fn what_is_mapped_while_a_mirror_joins_is_in_both() {
        race(Does::Join, |joint, _| map(joint, 1));
    }

    #[test]
    fn what_is_unmapped_while_a_mirror_joins_is_in_neither() {
        race(Does::Join, unmap_0);
    }

    #[test]
    fn what_is_unmapped_while_a_mirror_cannot_join_is_not_left_in_it() {
        race(Does::FailToJoin, unmap_0);
    }

    #[test]
    fn a_mirror_that_leaves_keeps_nothing_of_what_is_mapped_meanwhile() {
        race(Does::Leave, |joint, _| map(joint, 1));
    }

    #[test]
    fn nor_of_what_is_unmapped() {
        race(Does::Leave, unmap_0);
    }
}
