//! The ways to pin, timed and checked: our pinner, and by hand, with no accounting, no checks, no
//! unwinding. Pages that are pinned already cost nothing by hand.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ringfence_iommu::{HostAddr, Iova, Prot, Range};
use ringfence_vfio::{
    Account,
    pin::{Pinner, Uring},
};
use serde_json::{Value, json};

use super::{
    memory::Memory,
    ring::{NOTHING, Name, Ring, buffer},
    set::{BASE, PAGE, Set, iova},
};
use crate::{
    bench::{clock::Clock, rounds::Sample},
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
    /// Called for each page, not for the list.
    each: bool,
}

impl Ours {
    /// A pinner that holds the part of a set that is pinned already.
    ///
    /// # Errors
    /// There is no io_uring, or that part cannot be pinned.
    pub(super) fn new(set: &Set, memory: &Memory, each: bool) -> Result<Ours> {
        let backing = Uring::new().context("io_uring")?;
        let mut pinner = Pinner::new(backing, Arc::new(Account::new("bench pin")));
        let window = Range::from_len(Iova(BASE), memory.len as u64).context("no memory")?;
        pinner.add_window(window, HostAddr(memory.page(0) as u64), Prot::RW)?;
        for run in &set.held {
            pinner.pin_range(iova(run.first), (run.pages * PAGE) as u64, Prot::RW)?;
        }
        Ok(Ours { pinner, each })
    }
}

impl Subject for Ours {
    #[inline(always)]
    fn pin(&mut self, set: &Set) -> Result<()> {
        if self.each {
            for iova in &set.iovas {
                self.pinner.pin(std::slice::from_ref(iova), Prot::RW)?;
            }
            return Ok(());
        }
        Ok(self.pinner.pin(&set.iovas, Prot::RW)?)
    }

    #[inline(always)]
    fn unpin(&mut self, set: &Set) -> Result<()> {
        if self.each {
            for iova in &set.iovas {
                self.pinner.unpin(std::slice::from_ref(iova))?;
            }
            return Ok(());
        }
        Ok(self.pinner.unpin(&set.iovas)?)
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

/// How long the ways are compared.
const COMPARISON: Duration = Duration::from_millis(40);
/// Times in a block.
const BLOCK: u64 = 100;

/// Measures the ways to pin one page, each in turns with the others: how the fastest names the ring,
/// of those that can pin pages one after the other, and what each way takes.
///
/// # Errors
/// A call that every kernel has fails.
pub(super) fn one_page_calls(memory: &Memory, clock: &Clock) -> Result<(Name, Vec<Value>)> {
    let page = buffer(memory.page(0), 1);
    let mut ways: Vec<OnePageCall<'_>> = Vec::new();
    for (call, name) in
        [("update, ring registered", Name::Registered), ("update", Name::Descriptor)]
    {
        // A kernel before 6.3 takes no registered rings in such calls.
        let Ok(ring) = Ring::with_slots(name, 1) else { continue };
        if ring.update(0, &[page]).is_err() && name == Name::Registered {
            continue;
        }
        let once = move |pin: bool| ring.update(0, &[if pin { page } else { NOTHING }]);
        ways.push(OnePageCall::new(call, Some(name), once));
    }
    let ring = Ring::new(Name::Descriptor)?;
    let once = move |pin: bool| if pin { ring.register(&page) } else { ring.unregister() };
    ways.push(OnePageCall::new("table of one", None, once));
    let begun = Instant::now();
    while begun.elapsed() < COMPARISON {
        for OnePageCall { call, block, ticks, .. } in &mut ways {
            let [pin, unpin] = block(clock).with_context(|| format!("pinning a page ({call})"))?;
            *ticks = [ticks[0].min(pin), ticks[1].min(unpin)];
        }
    }
    let each = |ticks| (clock.ns(ticks) / BLOCK as f64 - clock.cost_ns).max(0.0);
    let sum = |way: &OnePageCall<'_>| way.ticks.map(each).iter().sum::<f64>();
    let named = ways.iter().filter_map(|way| Some((way, way.name?)));
    let fastest = named.min_by(|(a, _), (b, _)| sum(a).total_cmp(&sum(b)));
    let (fastest, name) =
        fastest.context("the kernel has no call that pins one page after the other")?;
    let calls = ways.iter().map(|way| {
        let ([pin_ns, unpin_ns], page_by_page) = (way.ticks.map(each), way.call == fastest.call);
        json!({ "call": way.call, "pin_ns": pin_ns, "unpin_ns": unpin_ns, "page_by_page": page_by_page })
    });
    Ok((name, calls.collect()))
}

/// The ticks of a block's pins, and of its unpins.
type Block<'a> = Box<dyn Fn(&Clock) -> rustix::io::Result<[u64; 2]> + 'a>;

/// A call that pins one page, and how long it takes.
struct OnePageCall<'a> {
    call: &'static str,
    /// How it names the ring, if it can pin pages one after the other.
    name: Option<Name>,
    block: Block<'a>,
    /// Of the shortest block.
    ticks: [u64; 2],
}

impl<'a> OnePageCall<'a> {
    /// `once` pins (true) or unpins the page. Each has a loop of its own, into which it is inlined.
    fn new(
        call: &'static str,
        name: Option<Name>,
        once: impl Fn(bool) -> rustix::io::Result<()> + 'a,
    ) -> OnePageCall<'a> {
        let block = move |clock: &Clock| {
            let mut ticks = [0, 0];
            for _ in 0..BLOCK {
                let begun = clock.now();
                once(true)?;
                let pinned = clock.now();
                once(false)?;
                ticks[0] += pinned.wrapping_sub(begun);
                ticks[1] += clock.now().wrapping_sub(pinned);
            }
            Ok(ticks)
        };
        OnePageCall { call, name, block: Box::new(block), ticks: [u64::MAX; 2] }
    }
}
