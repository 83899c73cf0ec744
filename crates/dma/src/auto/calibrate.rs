//! Measuring what copies and maps cost, before the policy is used.

use core::panic::Location;

use arrayvec::ArrayVec;
use ringfence_iommu::{Address, Domain, Gather, Iova, Map, Prot, Range};
use ringfence_iova::{Allocator, Request};
use ringfence_sync::clock::Clock;

use super::{
    cell::sizes,
    choices::{Calibration, CopyCost},
};
use crate::{
    Direction, Error, Policy,
    bounce::{Bounced, Client, Written},
    shared::Shared,
    stats::Counters,
};

const MS: u64 = 1_000_000;
/// No measurement begins after this long, so that the whole, with the last one, stays below 200 ms.
const BUDGET_NS: u64 = 150 * MS;
/// The longest time for one measurement, and the most repeats.
const EACH_NS: u64 = 2 * MS;
const REPEATS: usize = 9;
/// The longest time for one measurement of maps: the device's thread may wait for a time slice.
const EACH_MAP_NS: u64 = 20 * MS;
/// How many granules share a sync in a batch.
const BATCH: u64 = 32;
/// Copies take their source from successive places in a buffer of this size, so that it is not all
/// in the nearest caches. It is larger than most caches together: with 8 MiB a copy took a quarter
/// of the time.
const SOURCE: usize = 32 << 20;
/// Half of the source.
const FAR: u64 = (SOURCE / 2) as u64;
/// From this size on a copy is taken to go to and from far memory.
const LARGE: u64 = 32 << 10;

impl<D: Domain, A: Allocator> Shared<D, A> {
    /// Measures what copies and maps cost, if the policy depends on it. The caller must hold no
    /// lock that mapping threads wait for.
    pub(crate) fn prepare(&self, policy: Policy) {
        if policy == Policy::Auto
            && let Some(bouncer) = &self.bouncer
        {
            bouncer.auto.restart(calibrate(self, &bouncer.client));
        }
    }
}

/// Measures what copies and maps cost on this machine and in this domain, in slots of `client`.
/// What cannot be measured is missing from the result.
fn calibrate<D: Domain, A: Allocator>(
    shared: &Shared<D, A>,
    client: &Client<D::Target>,
) -> Calibration {
    let clock = &*shared.clock;
    let began_ns = clock.now_ns();
    let is_late = || clock.now_ns().saturating_sub(began_ns) >= BUDGET_NS;
    // Maps first: in a slow domain they take long, and copies, which never do, must not use up the
    // time.
    let failed = |error| Calibration { failed: Some(error), ..Calibration::default() };
    let mut calibration = maps(shared, client, &is_late).unwrap_or_else(failed);
    // Not the system's zero pages: until written, these would be one page, in the nearest cache.
    // But zeros all the same, so that slots are left without data however this ends.
    let mut source = vec![1u8; SOURCE];
    core::hint::black_box(&mut source).fill(0);
    let far = far_copy(clock, &mut source);
    for bytes in sizes() {
        if is_late() {
            break;
        }
        let mut one = |direction| {
            let mut at = 0;
            median(clock, EACH_NS, || {
                let len = bytes as usize;
                at = if at + 2 * len <= SOURCE { at + len } else { 0 };
                copy(client, &mut source[at..at + len], direction)
            })
        };
        let both = one(Direction::ToDevice).and_then(|in_ns| {
            one(Direction::FromDevice).map(|out_ns| {
                // A slot that is used again and again is in a near cache, as small ones are in real
                // use too. Large ones are not: the many in flight do not fit into any cache.
                let least_ns = if bytes >= LARGE { far.saturating_mul(bytes) / FAR } else { 0 };
                let (in_ns, out_ns) = (in_ns.max(least_ns), out_ns.max(least_ns));
                CopyCost { bytes, in_ns, out_ns }
            })
        });
        match both {
            Ok(cost) => calibration.copies.push(cost),
            Err(error) => {
                calibration.failed = calibration.failed.or(Some(error));
                break;
            }
        }
    }
    calibration.took_ns = clock.now_ns().saturating_sub(began_ns);
    calibration
}

/// The time to copy [`FAR`] bytes that were not used for a while.
fn far_copy(clock: &dyn Clock, memory: &mut [u8]) -> u64 {
    let (from, to) = memory.split_at_mut(FAR as usize);
    let start_ns = clock.now_ns();
    to[..FAR as usize].copy_from_slice(from);
    core::hint::black_box(to);
    clock.now_ns().saturating_sub(start_ns)
}

/// The median time of several calls in about `each_ns`, not counting the first.
fn median(
    clock: &dyn Clock,
    each_ns: u64,
    mut call: impl FnMut() -> Result<(), Error>,
) -> Result<u64, Error> {
    call()?;
    let began_ns = clock.now_ns();
    let mut times = ArrayVec::<u64, REPEATS>::new();
    while !times.is_full() {
        let start_ns = clock.now_ns();
        call()?;
        let end_ns = clock.now_ns();
        times.push(end_ns.saturating_sub(start_ns));
        if end_ns.saturating_sub(began_ns) >= each_ns {
            break;
        }
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

/// Does all that a copied mapping does, from map to unmap.
fn copy<T: Address>(
    client: &Client<T>,
    buffer: &mut [u8],
    direction: Direction,
) -> Result<(), Error> {
    let len = buffer.len() as u64;
    let slot = client.take(len, direction, Location::caller())?;
    let mut bounced = Bounced::new(slot, len, direction);
    let loaded = bounced.load(direction, Written::Reported, &|each| {
        each((&*buffer).into());
        true
    });
    debug_assert!(loaded.is_some(), "the CPU reaches its own memory");
    let (slot, _) = bounced.finish(Some(&mut |each| {
        each(buffer.into());
        true
    }));
    client.give_back(slot);
    Ok(())
}

/// Measures the time to map and unmap, in a batch and alone.
fn maps<D: Domain, A: Allocator>(
    shared: &Shared<D, A>,
    client: &Client<D::Target>,
    is_late: &dyn Fn() -> bool,
) -> Result<Calibration, Error> {
    let granule = shared.limits.granule();
    let size = granule.checked_mul(BATCH).ok_or(Error::TooLong)?;
    // Memory as that of slots, which the domain's devices may reach.
    client.with_memory(size, |target| {
        let mut safe = true;
        let memory = (target, Direction::ToDevice.prot());
        (measure(shared, memory, is_late, &mut safe), safe)
    })?
}

fn measure<D: Domain, A: Allocator>(
    shared: &Shared<D, A>,
    memory: (D::Target, Prot),
    is_late: &dyn Fn() -> bool,
    safe: &mut bool,
) -> Result<Calibration, Error> {
    let clock = &*shared.clock;
    // The medians of the time in the calls, and of the time in all: those of copies are medians too.
    let mut timed = |count: u64| -> Result<(u64, u64), Error> {
        let (mut calls, mut number) = ([0; REPEATS + 1], 0);
        let all_ns = median(clock, EACH_MAP_NS, || {
            calls[number] = pair(shared, memory, count, safe)?;
            number += 1;
            Ok(())
        })?;
        // Without the first.
        let calls = &mut calls[1..number];
        calls.sort_unstable();
        Ok((calls[calls.len() / 2], all_ns))
    };
    let (one_ns, lone_ns) = timed(1)?;
    let (many_ns, all_ns) = match is_late() {
        true => (one_ns.saturating_mul(BATCH), lone_ns.saturating_mul(BATCH)),
        false => timed(BATCH)?,
    };
    let [run_ns, wall_ns] = [(many_ns, one_ns), (all_ns, lone_ns)]
        .map(|(many_ns, one_ns)| many_ns.saturating_sub(one_ns) / (BATCH - 1));
    Ok(Calibration {
        map_call_ns: Some(one_ns.saturating_sub(run_ns)),
        map_run_ns: Some(run_ns),
        map_wall_ns: Some(wall_ns),
        map_lone_ns: Some(lone_ns),
        ..Calibration::default()
    })
}

/// Maps `count` granules of `memory` one by one, and unmaps them, with two syncs for all. Returns the
/// time without the syncs. `safe` becomes false if the device may still reach them.
fn pair<D: Domain, A: Allocator>(
    shared: &Shared<D, A>,
    memory: (D::Target, Prot),
    count: u64,
    safe: &mut bool,
) -> Result<u64, Error> {
    // Counted nowhere: no caller asked for these mappings.
    let counters = Counters::default();
    let clock = &*shared.clock;
    let start_ns = clock.now_ns();
    let granule = shared.limits.granule();
    let size = granule.checked_mul(count).ok_or(Error::TooLong)?;
    let size = shared.allocation_size(size).ok_or(Error::TooLong)?;
    let request = Request::new(size).limit(shared.limit);
    let base = shared.allocator.alloc(&request).map_err(Error::NoIova)?;
    let range = Range::from_len(Iova(base), size).ok_or(Error::TooLong)?;
    let mapped = (0..count).try_for_each(|number| map(shared, memory, range, number * granule));
    let mapped_ns = clock.now_ns();
    let mapped = mapped.and_then(|()| Ok(shared.domain.iotlb_sync_map(range)?));
    let mut gather = Gather::new();
    let synced_ns = clock.now_ns();
    let unmapped = shared.domain.unmap(range, &mut gather);
    let unmapped_ns = clock.now_ns();
    let unmapped = unmapped.and_then(|_| shared.domain.iotlb_sync(&mut gather));
    drop(gather);
    *safe &= unmapped.is_ok();
    let unsynced_ns = clock.now_ns();
    shared.settle(range, None, unmapped, &counters)?;
    mapped?;
    let parts = [(start_ns, mapped_ns), (synced_ns, unmapped_ns), (unsynced_ns, clock.now_ns())];
    Ok(parts.iter().fold(0, |sum, (from, to)| sum + to.saturating_sub(*from)))
}

/// Maps the granule at `offset` of the memory to the same place of `range`.
fn map<D: Domain, A: Allocator>(
    shared: &Shared<D, A>,
    (target, prot): (D::Target, Prot),
    range: Range,
    offset: u64,
) -> Result<(), Error> {
    let granule = shared.limits.granule();
    let target = target.checked_add(offset);
    let at = range.first().0.checked_add(offset).map(Iova);
    let granule = at.and_then(|iova| Range::from_len(iova, granule));
    let (Some(target), Some(granule)) = (target, granule) else { return Err(Error::Unstable) };
    // SAFETY: memory of the pools, which the client keeps, for ever if the unmap fails (`safe`).
    Ok(shared.domain.map(unsafe { Map::of(granule, target, prot) })?)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use ringfence_sync::clock::ManualClock;

    use super::*;

    #[test]
    fn the_median_leaves_out_the_first_and_ends_in_time() {
        let clock = ManualClock::new(0);
        let mut calls = 0;
        let time = median(&clock, EACH_NS, || {
            calls += 1;
            clock.advance(if calls == 1 { 1_000_000 } else { 10 * calls });
            Ok(())
        });
        assert_eq!((time, calls), (Ok(60), 10), "of 20 to 100");
        let slow = median(&clock, EACH_NS, || {
            calls += 1;
            clock.advance(EACH_NS);
            Ok(())
        });
        assert_eq!((slow, calls), (Ok(EACH_NS), 12));
        assert_eq!(median(&clock, EACH_NS, || Err(Error::Empty)), Err(Error::Empty));
    }
}
