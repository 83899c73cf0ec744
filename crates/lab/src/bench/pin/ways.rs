//! The ways to pin, timed and checked: our pinner, and by hand, with no accounting, no checks, no
//! unwinding. Pages that are pinned already cost nothing by hand.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use ringfence_iommu::{HostAddr, Iova, Prot, Range};
use ringfence_vfio::{
    Account,
    pin::{Pinner, Uring},
};
use serde_json::{Value, json};

use super::{
    memory::Memory,
    params::Lie,
    ring::{NOTHING, Name, Ring, buffer},
    set::{BASE, PAGE, Set, iova},
};
use crate::{
    bench::{
        clock::Clock,
        rounds::{Contest, Sample, Stop},
    },
    memory,
};

/// A way to pin the pages of a set, and to unpin them.
///
/// To be inlined into the timing loop: if the processor loses its return predictions during a
/// system call, a function that returns after it makes the call half as expensive again.
pub(super) trait Subject {
    /// Pins all of them.
    fn pin(&mut self, set: &Set) -> Result<()>;
    /// Unpins all of them.
    fn unpin(&mut self, set: &Set) -> Result<()>;

    /// Pins and unpins a list again and again for about the budget, at least once: what a list took,
    /// ns.
    ///
    /// The figure is the mean of the middle half of the calls: a mean, since a virtual machine's counter
    /// may have steps of 10 ns; of the middle half, since some calls are interrupted.
    /// Times of single calls are kept from slice to slice: memory that is new is slow.
    fn time(
        &mut self,
        set: &Set,
        (clock, budget): (&Clock, Duration),
        [pin, unpin]: &mut [Vec<u64>; 2],
    ) -> Result<Sample> {
        pin.clear();
        unpin.clear();
        let (budget, start) = (budget.as_nanos() as f64, clock.now());
        loop {
            let begun = clock.now();
            self.pin(set)?;
            let pinned = clock.now();
            self.unpin(set)?;
            let unpinned = clock.now();
            pin.push(pinned.wrapping_sub(begun));
            unpin.push(unpinned.wrapping_sub(pinned));
            if clock.ns(unpinned.wrapping_sub(start)) >= budget {
                break;
            }
        }
        let lists = pin.len() as f64;
        let (pin, unpin) = (clock.middle(pin), clock.middle(unpin));
        Ok(vec![("pin", pin), ("unpin", unpin), ("both", pin + unpin), ("lists", lists)])
    }

    /// Pins the list once, and checks with the kernel that it is pinned and, after that, unpinned.
    /// `new`: pages that were not pinned before.
    ///
    /// # Errors
    /// It cannot be pinned, or the kernel's count differs.
    fn check(&mut self, set: &Set, new: usize) -> Result<()> {
        let before = pinned_bytes()?;
        self.pin(set)?;
        let with = pinned_bytes()?;
        self.unpin(set)?;
        let after = pinned_bytes()?;
        // Of a huge page the kernel counts all pages, once.
        ensure!(
            with >= before + (new * PAGE) as u64,
            "of {new} pages not all are pinned: the kernel has {with} bytes, and had {before}"
        );
        ensure!(
            after == before,
            "the kernel has {after} bytes pinned afterwards, and had {before}"
        );
        Ok(())
    }
}

/// How much of this process is pinned, as the kernel counts it.
fn pinned_bytes() -> Result<u64> {
    let kib = memory::number("/proc/self/status", "VmPin");
    kib.map(|kib| kib << 10).context("/proc/self/status has no VmPin")
}

/// Our pinner, with the memory behind a window and everything that it does for its users: account,
/// permissions, counts, dirty bits.
pub(super) struct Ours {
    pinner: Pinner<Uring>,
    /// The most pages that it is called for.
    at_once: usize,
}

impl Ours {
    /// A pinner that holds the part of a set that is pinned already.
    ///
    /// # Errors
    /// There is no io_uring, or that part cannot be pinned.
    pub(super) fn new(set: &Set, memory: &Memory, at_once: usize) -> Result<Ours> {
        let backing = Uring::new().context("io_uring")?;
        let mut pinner = Pinner::new(backing, Arc::new(Account::new("bench pin")));
        let window = Range::from_len(Iova(BASE), memory.len as u64).context("no memory")?;
        pinner.add_window(window, HostAddr(memory.page(0) as u64), Prot::RW)?;
        for run in &set.held {
            pinner.pin_range(iova(run.first), (run.pages * PAGE) as u64, Prot::RW)?;
        }
        Ok(Ours { pinner, at_once })
    }
}

impl Subject for Ours {
    #[inline(always)]
    fn pin(&mut self, set: &Set) -> Result<()> {
        for iovas in set.iovas.chunks(self.at_once) {
            self.pinner.pin(iovas, Prot::RW)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn unpin(&mut self, set: &Set) -> Result<()> {
        for iovas in set.iovas.chunks(self.at_once) {
            self.pinner.unpin(iovas)?;
        }
        Ok(())
    }
}

/// Slots that one call changes: more or fewer take longer a slot.
const BATCH: usize = 64;

/// A call for each page, each page in a slot of its own.
pub(super) struct PageByPage<'m> {
    ring: Ring,
    memory: &'m Memory,
}

impl<'m> PageByPage<'m> {
    pub(super) fn new(name: Name, slots: usize, memory: &'m Memory) -> Result<PageByPage<'m>> {
        Ok(PageByPage { ring: Ring::with_slots(name, slots)?, memory })
    }
}

impl Subject for PageByPage<'_> {
    #[inline(always)]
    fn pin(&mut self, set: &Set) -> Result<()> {
        for (slot, page) in set.fresh.iter().enumerate() {
            self.ring.update(slot, &[buffer(self.memory.page(*page), 1)])?;
        }
        Ok(())
    }

    #[inline(always)]
    fn unpin(&mut self, set: &Set) -> Result<()> {
        for slot in 0..set.fresh.len() {
            self.ring.update(slot, &[NOTHING])?;
        }
        Ok(())
    }
}

/// A slot for each run, [`BATCH`] of them in a call.
pub(super) struct RunsByHand {
    ring: Ring,
    buffers: Vec<libc::iovec>,
}

impl RunsByHand {
    pub(super) fn new(name: Name, set: &Set, memory: &Memory) -> Result<RunsByHand> {
        let ring = Ring::with_slots(name, set.runs.len())?;
        let buffers =
            set.runs.iter().map(|run| buffer(memory.page(run.first), run.pages)).collect();
        Ok(RunsByHand { ring, buffers })
    }
}

impl Subject for RunsByHand {
    #[inline(always)]
    fn pin(&mut self, _: &Set) -> Result<()> {
        for (chunk, buffers) in self.buffers.chunks(BATCH).enumerate() {
            self.ring.update(chunk * BATCH, buffers)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn unpin(&mut self, _: &Set) -> Result<()> {
        const EMPTY: [libc::iovec; BATCH] = [NOTHING; BATCH];
        for (chunk, buffers) in self.buffers.chunks(BATCH).enumerate() {
            self.ring.update(chunk * BATCH, &EMPTY[..buffers.len()])?;
        }
        Ok(())
    }
}

/// A table of one buffer, made for each page and given up after it.
struct TableOfOne<'m> {
    ring: Ring,
    memory: &'m Memory,
}

impl Subject for TableOfOne<'_> {
    #[inline(always)]
    fn pin(&mut self, set: &Set) -> Result<()> {
        Ok(self.ring.register(&buffer(self.memory.page(set.fresh[0]), 1))?)
    }

    #[inline(always)]
    fn unpin(&mut self, _: &Set) -> Result<()> {
        Ok(self.ring.unregister()?)
    }
}

/// Rounds in which the calls for one page are compared, and how long each is measured in a round.
const COMPARISON: (u32, Duration) = (5, Duration::from_millis(2));

/// Measures the ways to pin one page, each in turns with the others: how the fastest names the ring,
/// of those that can pin pages one after the other, and what each way takes.
///
/// # Errors
/// The kernel has no call that pins one page after the other.
pub(super) fn one_page_calls(memory: &Memory, clock: &Clock) -> Result<(Name, Vec<Value>)> {
    let (set, mut times) = (Set::new(Lie::Contiguous, 1), [Vec::new(), Vec::new()]);
    let calls = [
        ("update, ring registered", Some(Name::Registered)),
        ("update", Some(Name::Descriptor)),
        ("table of one", None),
    ];
    let make = |name: Option<Name>| -> Result<Box<dyn Subject + '_>> {
        let mut subject: Box<dyn Subject + '_> = match name {
            Some(name) => Box::new(PageByPage::new(name, 1, memory)?),
            None => Box::new(TableOfOne { ring: Ring::new(Name::Descriptor)?, memory }),
        };
        // A kernel before 6.3 takes no registered rings in such calls.
        subject.pin(&set)?;
        subject.unpin(&set)?;
        Ok(subject)
    };
    let make = |(_, name): &(_, _)| make(*name).map_err(|error| format!("{error:#}"));
    let mut contest = Contest::new(calls, make);
    let (rounds, budget) = COMPARISON;
    let measure = |_: &_, subject: &mut Box<dyn Subject + '_>, _| {
        subject.time(&set, (clock, budget), &mut times)
    };
    let mut why = None;
    contest.run(rounds, &Stop::default(), measure, |_, error| why = Some(error));
    let ns = |one: &(_, _), figure| contest.taken(one)[figure].interval().median;
    let named = calls.iter().filter_map(|one| Some((ns(one, "both")?, one.0, one.1?)));
    let fastest = named.min_by(|(a, ..), (b, ..)| a.total_cmp(b));
    let (_, fastest, name) = fastest.with_context(|| {
        let why: &dyn std::fmt::Display = why.as_ref().map_or(&"none was measured", |why| why);
        format!("no call pins one page after the other: {why:#}")
    })?;
    let found = calls.iter().filter_map(|one| {
        let (pin, unpin) = (ns(one, "pin")?, ns(one, "unpin")?);
        let page_by_page = one.0 == fastest;
        Some(json!({ "call": one.0, "pin_ns": pin, "unpin_ns": unpin, "page_by_page": page_by_page }))
    });
    Ok((name, found.collect()))
}
