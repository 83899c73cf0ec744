//! One implementation with its entries: checked, and timed.

use std::{
    hint::black_box,
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use ringfence_iommu::{GuestPhys, Iova, Prot, Range, shootdown::Shootdown};
use ringfence_iotlb::{Binding, Endpoint, Iotlb, IotlbConfig, View};
use ringfence_mem::{Access, Memory, Translate};

use super::{
    params::{Implementation, Order},
    peers::{Map, Shared, SortedList, Table, VmMemory},
    set::{Random, Set},
};
use crate::bench::{clock::cpu_time, threads::together};

/// Operations between two looks at the clock; and between two quiet points, as between bursts of
/// packets.
const BURST: u64 = 256;
/// Lookups after which a thread of `threads` invalidates an entry.
const STEADY: u64 = 8192;
/// Entries that another thread renews each millisecond.
const PACE: u64 = 10;
/// Entries that are checked.
const CHECKED: u64 = 4096;

/// What an operation took, ns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) operations: f64,
    pub(super) wall: f64,
    pub(super) cpu: f64,
    /// Entries that another thread renewed meanwhile, a second.
    pub(super) renewed: f64,
}

/// An implementation with its entries.
pub(super) trait Subject {
    /// The guest-physical address that an address maps to.
    fn find(&mut self, addr: u64) -> Option<u64>;
    /// Times operations for about that long.
    fn time(&mut self, set: &Set, order: Order, cursor: &mut Cursor, budget: Duration) -> Sample;
    /// Times as many threads as there are CPUs in the list.
    fn threads(&mut self, set: &Set, order: Order, cpus: &[usize], budget: Duration) -> Sample;
}

/// Makes an implementation, with the entries of a set.
///
/// # Errors
/// It cannot be made, or finds something else than what was inserted.
pub(super) fn subject(
    implementation: Implementation,
    set: &Set,
    memory: &Arc<Memory>,
) -> Result<Box<dyn Subject>> {
    let mut subject: Box<dyn Subject> = match implementation {
        Implementation::Ringfence => Box::new(Ours::new(set, memory)?),
        Implementation::VmMemory => Box::new(RwLock::new(filled::<VmMemory>(set))),
        Implementation::BTreeMap => Box::new(RwLock::new(filled::<Map>(set))),
        Implementation::SortedList => Box::new(RwLock::new(filled::<SortedList>(set))),
        Implementation::SingleLock => Box::new(filled::<Mutex<Map>>(set)),
    };
    check(&mut *subject, set).with_context(|| implementation.name())?;
    Ok(subject)
}

/// Looks up entries, and addresses beside them.
pub(super) fn check(subject: &mut dyn Subject, set: &Set) -> Result<()> {
    for n in 0..set.entries.min(CHECKED) {
        let entry = n * (set.entries / set.entries.min(CHECKED));
        for offset in [0, set.page - 64] {
            let (found, wanted) =
                (subject.find(set.iova(entry) + offset), set.target(entry) + offset);
            ensure!(found == Some(wanted), "entry {entry} leads to {found:x?}, not to {wanted:#x}");
        }
    }
    let beyond = set.iova(set.entries);
    ensure!(subject.find(beyond).is_none(), "there is something at {beyond:#x}, where nothing is");
    Ok(())
}

/// Where in the entries the next operation is.
pub(super) struct Cursor {
    random: Random,
    at: u64,
    /// 0, which the compiler cannot know.
    zero: u64,
}

impl Cursor {
    pub(super) fn new(seed: u64) -> Cursor {
        Cursor { random: Random(seed), at: 0, zero: black_box(0) }
    }

    /// 64 bytes in a random entry.
    #[inline]
    fn random(&mut self, set: &Set) -> u64 {
        let entry = self.random.below(set.entries);
        set.iova(entry) + ((self.random.0 >> 2) & (set.page - 1) & !63)
    }

    fn next(&mut self, set: &Set) -> u64 {
        self.at = if self.at + 1 < set.entries { self.at + 1 } else { 0 };
        set.iova(self.at)
    }
}

/// Lookups of an order, [`BURST`] of them; `lookup` returns where the bytes are.
#[inline(always)]
fn burst(order: Order, set: &Set, cursor: &mut Cursor, mut lookup: impl FnMut(u64, u64) -> u64) {
    let mut sum = 0u64;
    match order {
        Order::Seq => {
            for _ in 0..BURST {
                sum = sum.wrapping_add(lookup(cursor.next(set), 64));
            }
        }
        Order::Dependent => {
            for _ in 0..BURST {
                let found = lookup(cursor.random(set), 64);
                cursor.random.0 ^= found & cursor.zero;
            }
        }
        Order::Chain => {
            for _ in 0..BURST {
                let [header, data, status] = [(); 3].map(|()| cursor.random(set));
                sum = sum.wrapping_add(lookup(header, 16));
                sum = sum.wrapping_add(lookup(data & !4095, 4096));
                sum = sum.wrapping_add(lookup(status, 1));
            }
        }
        Order::Random | Order::Churn | Order::Threads | Order::Steady => {
            for _ in 0..BURST {
                sum = sum.wrapping_add(lookup(cursor.random(set), 64));
            }
        }
    }
    black_box(sum);
}

/// Repeats `work`, of so many operations, for about that long.
fn timed(operations: u64, budget: Duration, mut work: impl FnMut()) -> Sample {
    let (begun, cpu) = (Instant::now(), cpu_time());
    let mut done = 0;
    loop {
        work();
        done += operations;
        let wall = begun.elapsed();
        if wall >= budget {
            let (operations, cpu) = (done as f64, cpu_time() - cpu);
            let each = |time: Duration| time.as_nanos() as f64 / operations;
            return Sample { operations, wall: each(wall), cpu: each(cpu), renewed: 0.0 };
        }
    }
}

/// Times a thread on each of the CPUs: random lookups by `look` in what `join` makes, with a quiet
/// point after each burst. Each thread calls `renew` for a random entry now and then or, for
/// [`Order::Steady`], another thread does, [`PACE`] times a millisecond.
fn threads<V>(
    (set, order): (&Set, Order),
    (cpus, budget): (&[usize], Duration),
    renew: impl Fn(u64) + Sync,
    join: impl Fn() -> V + Sync,
    look: impl Fn(&mut V, &mut Cursor) + Sync,
) -> Sample {
    let work = || {
        together(cpus, vec![(); cpus.len()], |index, ()| {
            let (mut view, mut cursor) = (join(), Cursor::new(index as u64));
            let mut work = || {
                for _ in 0..STEADY / BURST {
                    look(&mut view, &mut cursor);
                }
                let entry = cursor.random.below(set.entries);
                if order == Order::Threads {
                    renew(entry);
                }
            };
            // Once through all of it, so that caches are warm.
            timed(STEADY, budget / 4, &mut work);
            timed(STEADY, budget, work)
        })
    };
    if order != Order::Steady {
        return mean(&work());
    }
    let (stop, renewed) = (&AtomicBool::new(false), &AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(7);
            while !stop.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(1));
                (0..PACE).for_each(|_| renew(random.below(set.entries)));
                renewed.fetch_add(PACE, Ordering::Relaxed);
            }
        });
        let begun = Instant::now();
        let samples = work();
        let seconds = begun.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        Sample { renewed: renewed.load(Ordering::Relaxed) as f64 / seconds, ..mean(&samples) }
    })
}

/// The mean of what threads took for an operation, and the sum of their operations.
fn mean(samples: &[Sample]) -> Sample {
    let sum = |value: fn(&Sample) -> f64| samples.iter().map(value).sum::<f64>();
    let threads = samples.len().max(1) as f64;
    let (wall, cpu) = (sum(|one| one.wall) / threads, sum(|one| one.cpu) / threads);
    Sample { operations: sum(|one| one.operations), wall, cpu, renewed: 0.0 }
}

fn filled<T: Table>(set: &Set) -> T {
    let mut table = T::default();
    // From the last on, so that a list need not be walked to its end each time.
    for entry in (0..set.entries).rev() {
        table.insert(set.iova(entry), set.page, set.target(entry));
    }
    table
}

/// A table by itself, and behind its lock where threads share it.
impl<S: Shared> Subject for S {
    fn find(&mut self, addr: u64) -> Option<u64> {
        self.shared_lookup(addr, 64)
    }

    fn time(&mut self, set: &Set, order: Order, cursor: &mut Cursor, budget: Duration) -> Sample {
        let table = self.alone();
        if order == Order::Churn {
            return timed(1, budget, || {
                let entry = cursor.random.below(set.entries);
                let (iova, target) = (set.iova(entry), set.target(entry));
                table.remove(iova, set.page);
                table.insert(iova, set.page, target);
                black_box(table.lookup(iova, 64));
            });
        }
        let table = &*table;
        timed(BURST, budget, || {
            burst(order, set, cursor, |addr, len| table.lookup(addr, len).unwrap_or(0));
        })
    }

    fn threads(&mut self, set: &Set, order: Order, cpus: &[usize], budget: Duration) -> Sample {
        let renew = |entry| self.renew(set.iova(entry), set.page, set.target(entry));
        let look = |(): &mut (), cursor: &mut Cursor| {
            let lookup = |addr, len| self.shared_lookup(addr, len).unwrap_or(0);
            burst(Order::Random, set, cursor, lookup);
        };
        threads((set, order), (cpus, budget), renew, || (), look)
    }
}

/// Ours: a table, and a view for each thread.
struct Ours {
    iotlb: Arc<Iotlb>,
    endpoint: Arc<Endpoint>,
    memory: Arc<Memory>,
    view: View,
}

impl Ours {
    fn new(set: &Set, memory: &Arc<Memory>) -> Result<Ours> {
        let shootdown = Shootdown::new(8);
        let config =
            IotlbConfig { entries: set.entries, table_bytes: 4 << 30, ..IotlbConfig::default() };
        let iotlb = Iotlb::new(config, Arc::clone(&shootdown));
        for entry in 0..set.entries {
            renew(&iotlb, set, entry, false)?;
        }
        let endpoint = Endpoint::new(0, shootdown, Binding::Iotlb(Arc::clone(&iotlb)));
        let view =
            View::new(Arc::clone(&endpoint), Arc::clone(memory)).context("no place for a view")?;
        ensure!(
            iotlb.stats().evictions.load(Ordering::Relaxed) == 0,
            "entries made room for others"
        );
        Ok(Ours { iotlb, endpoint, memory: Arc::clone(memory), view })
    }
}

/// Invalidates an entry and inserts it again, with `wait` when the invalidation is over; returns the
/// token of the invalidation.
#[inline]
fn renew(iotlb: &Iotlb, set: &Set, entry: u64, wait: bool) -> ringfence_iommu::Result<u64> {
    let range = Range::from_len(Iova(set.iova(entry)), set.page).expect("no entry wraps");
    let token = iotlb.invalidate(range)?;
    if wait {
        // Until the invalidation is over, the entry may not map elsewhere.
        iotlb.shootdown().wait(token);
    }
    iotlb.update(range, GuestPhys(set.target(entry)), Prot::RW)?;
    Ok(token)
}

/// Where the first of the bytes is in this process; 0 if the lookup misses.
#[inline(always)]
fn look(view: &View, addr: u64, len: u64) -> u64 {
    let mut found = 0;
    let _ = view.slices(addr, len, Access::Read, |piece| found = piece.as_ptr() as u64);
    found
}

impl Subject for Ours {
    fn find(&mut self, addr: u64) -> Option<u64> {
        let base = self.memory.find_gpa(0)?.slice.as_ptr() as u64;
        self.view.quiet();
        match look(&self.view, addr, 64) {
            0 => None,
            found => found.checked_sub(base),
        }
    }

    fn time(&mut self, set: &Set, order: Order, cursor: &mut Cursor, budget: Duration) -> Sample {
        let (iotlb, view) = (&self.iotlb, &mut self.view);
        if order == Order::Churn {
            return timed(1, budget, || {
                let entry = cursor.random.below(set.entries);
                let token = renew(iotlb, set, entry, false);
                view.quiet();
                // The invalidation was over before the entry may map elsewhere.
                assert!(token.is_ok_and(|token| iotlb.shootdown().is_over(token)));
                black_box(look(view, set.iova(entry), 64));
            });
        }
        timed(BURST, budget, || {
            view.quiet();
            burst(order, set, cursor, |addr, len| look(view, addr, len));
        })
    }

    fn threads(&mut self, set: &Set, order: Order, cpus: &[usize], budget: Duration) -> Sample {
        // No invalidation waits for this thread meanwhile.
        self.view.offline();
        let join = || {
            let view = View::new(Arc::clone(&self.endpoint), Arc::clone(&self.memory));
            view.expect("there are places for all of them")
        };
        let again = |entry| {
            let renewed = renew(&self.iotlb, set, entry, order == Order::Steady);
            renewed.expect("there is room for what was just there");
        };
        let look = |view: &mut View, cursor: &mut Cursor| {
            view.quiet();
            burst(Order::Random, set, cursor, |addr, len| look(view, addr, len));
        };
        let sample = threads((set, order), (cpus, budget), again, join, look);
        self.view.online();
        sample
    }
}
