//! The checks.

use std::fmt;

use super::{
    bench::{Bench, Stop, ensure, fail},
    subject::{MEMORY, Subject},
};
use ringfence_iommu::{
    Address, Domain, Error, Gather, Iova, Map, Partial, Pending, Prot, Range, Result, Work,
};

type Checked = Result<(), Stop>;

/// A check.
#[derive(Clone, Copy)]
pub struct Check<S> {
    /// Its name.
    pub name: &'static str,
    /// What it checks, in a sentence.
    pub description: &'static str,
    pub(super) run: fn(&mut Bench<'_, S>) -> Result<(), Stop>,
}

impl<S> fmt::Debug for Check<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Check").field("name", &self.name).finish_non_exhaustive()
    }
}

/// All checks, in the order in which they are done.
pub fn checks<S: Subject>() -> Vec<Check<S>> {
    macro_rules! list {
        ($($name:ident: $text:literal,)*) => {
            vec![$(Check { name: stringify!($name), description: $text, run: $name::<S> }),*]
        };
    }
    list! {
        refuses_what_its_geometry_refuses: "a mapping that is unaligned, without permission, outside the aperture or reserved changes nothing",
        leads_where_it_was_mapped_to: "each mapped address leads to its target after the sync",
        maps_nothing_besides: "what lies beside a mapping is not reached",
        enforces_permissions: "a mapping for reads refuses writes",
        refuses_to_map_twice: "a mapping over another is refused, and changes nothing",
        maps_a_list_up_to_the_first_refused: "of a list those before the first that is refused are made, and no other",
        unmaps_for_good: "after unmap and sync no access succeeds, cached or not",
        unmaps_what_another_removed: "an unmap waits for what was removed before and not synced, too",
        keeps_the_neighbours: "an unmap leaves what lies beside it",
        unmaps_over_holes: "an unmap over holes removes what is mapped, and reports how many bytes",
        splits_nothing: "an unmap that would split a mapping is refused, and removes nothing",
        unmaps_a_list_up_to_the_first_refused: "of a list those before the first that is refused are removed, and no other",
        flushes_what_was_queued: "after a flush nothing that was unmapped before is reached",
        ends_a_sync_that_was_begun: "a sync that was begun is over once no access succeeds, and stays over",
        syncs_a_list: "one sync is for all ranges of a list",
        reports_a_sync_that_failed: "a sync that fails reports it for each of its ranges, each time",
        leads_anew_after_a_sync: "an address that is mapped again leads to its new target",
        finds_what_is_mapped: "a look-up finds the target of what is mapped, and nothing elsewhere",
        lists_what_is_mapped: "its list, if it keeps one, is of what is mapped",
        maps_its_last_granule: "the last granule of the aperture is one like any other",
    }
}

fn refuses_what_its_geometry_refuses<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    let (geometry, granule) = (bench.domain().geometry(), bench.granule());
    if granule > 1 {
        let first = bench.page(1).first().0;
        for (first, len) in [(first + 1, granule), (first, granule + 1), (first, granule - 1)] {
            let Some(range) = Range::from_len(Iova(first), len) else { continue };
            let unaligned = |error: &Error| matches!(error, Error::Unaligned { .. });
            let mapped = bench.map(range, 0, Prot::RW);
            bench.must_refuse(&format!("mapping {range}"), mapped, unaligned)?;
            let unmapped = bench.domain().unmap(range, &mut Gather::new());
            bench.must_refuse(&format!("unmapping {range}"), unmapped, unaligned)?;
        }
    }
    let page = bench.page(1);
    let mapped = bench.map(page, 0, Prot::empty());
    let without = |error: &Error| matches!(error, Error::NoPermission(_));
    bench.must_refuse("mapping without permission", mapped, without)?;
    if let Some(reserved) = geometry.reserved.iter().find(|it| it.range.is_aligned(granule)) {
        let mapped = bench.map(reserved.range, 0, Prot::RW);
        bench.must_refuse("mapping what is reserved", mapped, |_| true)?;
    }
    if let Some(first) = geometry.aperture.last().0.checked_add(1)
        && let Some(outside) = Range::from_len(Iova(first), granule)
    {
        let mapped = bench.map(outside, 0, Prot::RW);
        bench.must_refuse("mapping outside of the aperture", mapped, |_| true)?;
    }
    bench.refused(1)
}

fn leads_where_it_was_mapped_to<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    // Scattered, at both ends, in no order; one of several granules.
    for (n, to) in [(0, 5), (7, 3), (2, 60), (63, 0)] {
        bench.must_map(bench.page(n), to, Prot::RW)?;
    }
    bench.must_map(bench.pages(20, 35), 16, Prot::RW)?;
    for (n, to) in [(0, 5), (7, 3), (2, 60), (63, 0)] {
        bench.reaches(n, to)?;
    }
    (20..=35).try_for_each(|n| bench.reaches(n, n - 4))
}

fn maps_nothing_besides<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    bench.must_map(bench.pages(10, 11), 10, Prot::RW)?;
    [9, 12, 0, 63].into_iter().try_for_each(|n| bench.refused(n))
}

fn enforces_permissions<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    if !bench.domain().capabilities().enforces_prot {
        return Err(Stop::NotApplicable("the domain does not enforce permissions"));
    }
    bench.must_map(bench.page(4), 4, Prot::READ)?;
    bench.must_map(bench.page(6), 6, Prot::RW)?;
    bench.reaches(4, 4)?;
    let (read_only, both) = (bench.page(4).first(), bench.page(6).first());
    let written = bench.subject.access(read_only, Prot::WRITE);
    ensure(written.is_none(), || format!("{read_only} is written, though it is for reads"))?;
    let written = bench.subject.access(both, Prot::WRITE);
    ensure(written.is_some(), || format!("{both} is not written, though it may be"))
}

fn refuses_to_map_twice<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    bench.must_map(bench.pages(8, 11), 8, Prot::RW)?;
    for (first, last) in [(8, 11), (9, 9), (11, 12), (7, 8), (0, 63)] {
        let range = bench.pages(first, last);
        let to = if range.covers(bench.pages(0, 63)) { 0 } else { 30 };
        let mapped = bench.map(range, to, Prot::RW);
        let there = |error: &Error| matches!(error, Error::Exists { .. });
        bench.must_refuse(&format!("mapping {range} over another"), mapped, there)?;
    }
    (8..=11).try_for_each(|n| bench.reaches(n, n))?;
    [7, 12].into_iter().try_for_each(|n| bench.refused(n))
}

fn maps_a_list_up_to_the_first_refused<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    bench.must_map(bench.page(5), 5, Prot::RW)?;
    let list = [1, 3, 5, 7].map(|n| bench.subject.map(bench.page(n), n + 10, Prot::RW));
    match bench.domain().map_pages(&list) {
        Err(Partial { done: 2, error: Error::Exists { .. } }) => {}
        other => return Err(Stop::Fail(format!("a list whose third is there already: {other:?}"))),
    }
    let synced = bench.domain().sync(Work::Map(&list.map(|map| map.range())[..2]));
    synced.map_err(|error| fail("syncing those before".into(), error))?;
    [(1, 11), (3, 13), (5, 5)].into_iter().try_for_each(|(n, to)| bench.reaches(n, to))?;
    bench.refused(7)
}

fn unmaps_for_good<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    for (n, to) in [(3, 3), (9, 1)] {
        bench.must_map(bench.page(n), to, Prot::RW)?;
        // Now it is cached.
        bench.reaches(n, to)?;
    }
    for n in [3, 9] {
        bench.must_unmap(bench.page(n))?;
        let offset = (bench.granule() / 2) & !7;
        let middle = Iova(bench.page(n).first().0 + offset);
        let found = bench.subject.access(middle, Prot::READ);
        ensure(found.is_none(), || format!("{middle} is reached after its unmap"))?;
        bench.refused(n)?;
    }
    Ok(())
}

fn unmaps_what_another_removed<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    // One range, and a list of those that another caller has removed and not synced.
    for list in [&[3][..], &[5, 9, 20]] {
        let ranges: Vec<Range> = list.iter().map(|&n| bench.page(n)).collect();
        for &n in list {
            bench.must_map(bench.page(n), n, Prot::RW)?;
            bench.reaches(n, n)?;
        }
        let removed = bench.domain().unmap_pages(&ranges, &mut Gather::new());
        removed.map_err(|error| fail("unmapping for another".into(), error))?;
        let mut gather = Gather::new();
        let removed = bench.domain().unmap_pages(&ranges, &mut gather);
        removed.map_err(|error| fail("unmapping once more".into(), error))?;
        let synced = bench.domain().iotlb_sync(&mut gather);
        synced.map_err(|error| fail("syncing".into(), error))?;
        list.iter().try_for_each(|&n| bench.refused(n))?;
    }
    Ok(())
}

fn keeps_the_neighbours<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    (10..13).try_for_each(|n| bench.must_map(bench.page(n), n, Prot::RW))?;
    bench.must_unmap(bench.page(11))?;
    bench.refused(11)?;
    [10, 12].into_iter().try_for_each(|n| bench.reaches(n, n))
}

fn unmaps_over_holes<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    let mapped = [2, 3, 9, 15];
    mapped.into_iter().try_for_each(|n| bench.must_map(bench.page(n), n, Prot::RW))?;
    let bytes = bench.must_unmap(bench.pages(0, 15))?;
    let wanted = 4 * u128::from(bench.granule());
    ensure(bytes == wanted, || format!("{bytes} bytes were unmapped, not {wanted}"))?;
    mapped.into_iter().try_for_each(|n| bench.refused(n))?;
    let bytes = bench.must_unmap(bench.pages(0, 15))?;
    ensure(bytes == 0, || format!("{bytes} bytes were unmapped where nothing was"))
}

fn splits_nothing<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    bench.must_map(bench.pages(4, 7), 4, Prot::RW)?;
    bench.must_map(bench.page(8), 8, Prot::RW)?;
    for (first, last) in [(4, 4), (7, 8), (5, 6), (0, 5)] {
        let range = bench.pages(first, last);
        let unmapped = bench.unmap(range);
        let split = |error: &Error| matches!(error, Error::WouldSplit { .. });
        bench.must_refuse(&format!("unmapping {range}, a part"), unmapped, split)?;
    }
    (4..=8).try_for_each(|n| bench.reaches(n, n))
}

fn unmaps_a_list_up_to_the_first_refused<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    for n in [1, 3, 9] {
        bench.must_map(bench.page(n), n, Prot::RW)?;
        bench.reaches(n, n)?;
    }
    bench.must_map(bench.pages(5, 6), 5, Prot::RW)?;
    let list = [1, 3, 5, 9].map(|n| bench.page(n));
    let mut gather = Gather::new();
    match bench.domain().unmap_pages(&list, &mut gather) {
        Err(Partial { done: 2, error: Error::WouldSplit { .. } }) => {}
        other => return Err(Stop::Fail(format!("a list whose third is a part: {other:?}"))),
    }
    let synced = bench.domain().iotlb_sync(&mut gather);
    synced.map_err(|error| fail("syncing those before".into(), error))?;
    [1, 3].into_iter().try_for_each(|n| bench.refused(n))?;
    [5, 6, 9].into_iter().try_for_each(|n| bench.reaches(n, n))
}

fn flushes_what_was_queued<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    for n in [1, 30, 63] {
        bench.must_map(bench.page(n), n, Prot::RW)?;
        bench.reaches(n, n)?;
    }
    let mut gather = Gather::queued();
    for n in [1, 30] {
        let unmapped = bench.domain().unmap(bench.page(n), &mut gather);
        unmapped.map_err(|error| fail(format!("unmapping granule {n}"), error))?;
    }
    let flushed = bench.domain().flush_iotlb_all();
    flushed.map_err(|error| fail("flushing".into(), error))?;
    [1, 30].into_iter().try_for_each(|n| bench.refused(n))?;
    bench.reaches(63, 63)
}

fn ends_a_sync_that_was_begun<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    bench.must_map(bench.page(6), 6, Prot::RW)?;
    for round in 0..20 {
        let page = bench.page(6);
        bench.reaches(6, 6)?;
        let mut gather = Gather::new();
        let unmapped = bench.domain().unmap(page, &mut gather);
        unmapped.map_err(|error| fail(format!("unmapping {page}"), error))?;
        let mut sync = Pending::unmap(bench.domain(), vec![page], &mut gather);
        if round % 2 == 0 {
            sync.wait(bench.domain());
        }
        while !sync.poll(bench.domain()) {
            core::hint::spin_loop();
        }
        bench.refused(6)?;
        for _ in 0..2 {
            let outcome = (sync.poll(bench.domain()), sync.outcome(page));
            ensure(matches!(outcome, (true, Some(Ok(_)))), || {
                format!("a sync that is over: {outcome:?}")
            })?;
        }
        bench.must_map(page, 6, Prot::RW)?;
    }
    Ok(())
}

fn syncs_a_list<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    // More ranges than a gather can hold, none of which touch.
    let numbers = || (0..MEMORY).step_by(2);
    let list: Vec<Map<_>> =
        numbers().map(|n| bench.subject.map(bench.page(n), n, Prot::RW)).collect();
    let ranges: Vec<Range> = list.iter().map(Map::range).collect();
    let mapped = bench.domain().map_pages(&list);
    mapped.map_err(|error| fail("mapping a list".into(), error))?;
    let mut sync = Pending::map(bench.domain(), ranges.clone());
    sync.wait(bench.domain());
    ensure(matches!(sync.outcome(Range::ALL), Some(Ok(_))), || format!("{sync:?}"))?;
    numbers().try_for_each(|n| bench.reaches(n, n))?;
    let mut gather = Gather::new();
    let unmapped = bench.domain().unmap_pages(&ranges, &mut gather);
    let bytes = unmapped.map_err(|error| fail("unmapping a list".into(), error))?;
    let wanted = ranges.len() as u128 * u128::from(bench.granule());
    ensure(bytes == wanted, || format!("{bytes} bytes were unmapped, not {wanted}"))?;
    let mut sync = Pending::unmap(bench.domain(), ranges, &mut gather);
    sync.wait(bench.domain());
    ensure(matches!(sync.outcome(Range::ALL), Some(Ok(_))), || format!("{sync:?}"))?;
    numbers().try_for_each(|n| bench.refused(n))
}

fn reports_a_sync_that_failed<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    let pages = [4, 8].map(|n| bench.page(n));
    for begun in [false, true] {
        pages.into_iter().try_for_each(|page| bench.must_map(page, 4, Prot::RW))?;
        if !bench.subject.fail_next() {
            bench.empty()?;
            return Err(Stop::NotApplicable("no sync of the subject can be made to fail"));
        }
        let mut gather = Gather::new();
        let unmapped = bench.domain().unmap_pages(&pages, &mut gather);
        unmapped.map_err(|error| fail("unmapping".into(), error))?;
        if begun {
            let mut sync = Pending::unmap(bench.domain(), pages.to_vec(), &mut gather);
            sync.wait(bench.domain());
            for _ in 0..2 {
                let outcomes = pages.map(|page| sync.outcome(page));
                let failed = outcomes.iter().all(|outcome| matches!(outcome, Some(Err(_))));
                ensure(failed, || format!("a sync that failed: {outcomes:?}"))?;
                sync.poll(bench.domain());
            }
        } else {
            let synced = bench.domain().iotlb_sync(&mut gather);
            ensure(synced.is_err(), || "a sync that failed succeeds".into())?;
        }
        // The next flush does what the failed sync did not.
        let flushed = bench.domain().flush_iotlb_all();
        flushed.map_err(|error| fail("flushing after a failure".into(), error))?;
        [4, 8].into_iter().try_for_each(|n| bench.refused(n))?;
    }
    Ok(())
}

fn leads_anew_after_a_sync<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    for to in [3, 40, 3, 17] {
        bench.must_map(bench.page(2), to, Prot::RW)?;
        bench.reaches(2, to)?;
        bench.must_unmap(bench.page(2))?;
    }
    Ok(())
}

fn finds_what_is_mapped<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    let range = bench.pages(5, 6);
    bench.must_map(range, 9, Prot::RW)?;
    let target = bench.subject.map(range, 9, Prot::RW).target();
    let last = Address::checked_add(target, range.extent());
    let find = |iova| bench.domain().iova_to_phys(iova);
    let found = (find(range.first()), find(range.last()));
    ensure(found == (Some(target), last), || format!("{range} is found at {found:?}"))?;
    let beside = [bench.page(4).first(), bench.page(7).first()].map(find);
    ensure(beside == [None; 2], || format!("beside {range} there is {beside:?}"))
}

fn lists_what_is_mapped<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    let ranges = [bench.page(0), bench.page(1), bench.pages(8, 11)];
    ranges.into_iter().try_for_each(|range| bench.must_map(range, 2, Prot::READ))?;
    let (mut listed, mut batch, mut from) = (Vec::new(), Vec::with_capacity(2), ranges[0].first());
    let end = bench.page(MEMORY - 1).last();
    loop {
        batch.clear();
        match bench.domain().mappings_from(from, &mut batch) {
            Ok(()) => {}
            Err(Error::Unsupported(why)) => return Err(Stop::NotApplicable(why)),
            Err(error) => return Err(fail("listing".into(), error)),
        }
        listed
            .extend(batch.iter().map(|mapping| mapping.range).filter(|range| range.last() <= end));
        match batch.last().filter(|_| batch.len() == batch.capacity()) {
            Some(last) if last.range.last() < end => from = Iova(last.range.last().0 + 1),
            _ => break,
        }
    }
    ensure(listed == ranges, || format!("listed are {listed:?}"))
}

fn maps_its_last_granule<S: Subject>(bench: &mut Bench<'_, S>) -> Checked {
    let (geometry, granule) = (bench.domain().geometry(), bench.granule());
    let last = geometry.aperture.last();
    let first = last.0.checked_sub(granule - 1).map(Iova);
    let range = first.and_then(|first| Range::new(first, last));
    let Some(range) =
        range.filter(|range| range.is_aligned(granule) && geometry.reserved_in(*range).is_none())
    else {
        return Err(Stop::NotApplicable("the last granule of the aperture is not for mapping"));
    };
    bench.must_map(range, 1, Prot::RW)?;
    let wanted = Address::as_u64(bench.subject.map(range, 1, Prot::RW).target());
    let found = bench.subject.access(range.first(), Prot::READ);
    let unmapped = bench.must_unmap(range)?;
    ensure(found == Some(wanted), || format!("{range} leads to {found:?}"))?;
    ensure(unmapped == range.len(), || format!("{unmapped} bytes were unmapped of {range}"))?;
    let found = bench.subject.access(range.first(), Prot::READ);
    ensure(found.is_none(), || format!("{range} is reached after its unmap"))
}
