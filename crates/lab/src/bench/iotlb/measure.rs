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
use ringfence_iommu::{GuestPhys, Iova, Prot, Range, shootdown::Shootdown};
use ringfence_iotlb::{Binding, Endpoint, Iotlb, IotlbConfig, View};
use ringfence_mem::{Access, Memory, Translate};

use super::{
    params::{Implementation, Order},
    peers::{Map, Shared, SingleLock, SortedList, Table, VmMemory},
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
    pub(super) operations: u64,
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
        Implementation::VmMemory => Box::new(Peer(RwLock::new(filled::<VmMemory>(set)))),
        Implementation::BTreeMap => Box::new(Peer(RwLock::new(filled::<Map>(set)))),
        Implementation::SortedList => Box::new(Peer(RwLock::new(filled::<SortedList>(set)))),
        Implementation::SingleLock => Box::new(Peer(filled::<SingleLock>(set))),
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
            let each = |time: Duration| time.as_nanos() as f64 / done as f64;
            return Sample {
                operations: done,
                wall: each(wall),
                cpu: each(cpu_time() - cpu),
                renewed: 0.0,
            };
        }
    }
}

/// Runs `work`; for [`Order::Steady`] beside another thread, which calls `renew` for a random entry
/// [`PACE`] times a millisecond.
fn beside(
    order: Order,
    set: &Set,
    renew: impl Fn(u64) + Send,
    work: impl FnOnce() -> Vec<Sample>,
) -> Sample {
    if order != Order::Steady {
        return mean(&work());
    }
    let (stop, renewed) = (&AtomicBool::new(false), &AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(move || {
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

/// The mean of what threads took for an operation.
fn mean(samples: &[Sample]) -> Sample {
    let of = |value: fn(&Sample) -> f64| {
        samples.iter().map(value).sum::<f64>() / samples.len().max(1) as f64
    };
    Sample {
        operations: samples.iter().map(|sample| sample.operations).sum(),
        wall: of(|sample| sample.wall),
        cpu: of(|sample| sample.cpu),
        renewed: 0.0,
    }
}

/// The work of one thread of several: random lookups with `quiet` after each burst, and `renew` of a
/// random entry now and then.
fn steadily(
    set: &Set,
    seed: usize,
    budget: Duration,
    mut look: impl FnMut(&mut Cursor),
    mut renew: impl FnMut(u64),
) -> Sample {
    let mut cursor = Cursor::new(seed as u64);
    let mut work = || {
        for _ in 0..STEADY / BURST {
            look(&mut cursor);
        }
        renew(cursor.random.below(set.entries));
    };
    // Once through all of it, so that caches are warm.
    timed(STEADY, budget / 4, &mut work);
    timed(STEADY, budget, work)
}

fn filled<T: Table>(set: &Set) -> T {
    let mut table = T::default();
    // From the last on, so that a list need not be walked to its end each time.
    for entry in (0..set.entries).rev() {
        table.insert(set.iova(entry), set.page, set.target(entry));
    }
    table
}

fn time_table<T: Table>(
    table: &mut T,
    set: &Set,
    order: Order,
    cursor: &mut Cursor,
    budget: Duration,
) -> Sample {
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

fn time_shared<S: Shared>(
    table: &S,
    set: &Set,
    (order, cpus): (Order, &[usize]),
    budget: Duration,
) -> Sample {
    let renew = |entry| table.renew(set.iova(entry), set.page, set.target(entry));
    beside(order, set, renew, || {
        together(cpus, vec![(); cpus.len()], |index, ()| {
            let look = |cursor: &mut Cursor| {
                burst(Order::Random, set, cursor, |addr, len| table.lookup(addr, len).unwrap_or(0));
            };
            let own = |entry| {
                if order == Order::Threads {
                    renew(entry)
                }
            };
            steadily(set, index, budget, look, own)
        })
    })
}

/// A table by itself, and behind its lock where threads share it.
struct Peer<S>(S);

impl<S: Shared> Subject for Peer<S> {
    fn find(&mut self, addr: u64) -> Option<u64> {
        self.0.lookup(addr, 64)
    }

    fn time(&mut self, set: &Set, order: Order, cursor: &mut Cursor, budget: Duration) -> Sample {
        time_table(self.0.alone(), set, order, cursor, budget)
    }

    fn threads(&mut self, set: &Set, order: Order, cpus: &[usize], budget: Duration) -> Sample {
        time_shared(&self.0, set, (order, cpus), budget)
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
            renew(&iotlb, set, entry)?;
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

/// Invalidates an entry and inserts it again; returns the token of the invalidation.
fn renew(iotlb: &Iotlb, set: &Set, entry: u64) -> ringfence_iommu::Result<u64> {
    let range = Range::from_len(Iova(set.iova(entry)), set.page).expect("no entry wraps");
    let token = iotlb.invalidate(range)?;
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
                let token = renew(iotlb, set, entry);
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
        let (endpoint, memory, iotlb) = (&self.endpoint, &self.memory, &self.iotlb);
        let again =
            |entry| renew(iotlb, set, entry).expect("there is room for what was just there");
        let waited = |entry| {
            let range = Range::from_len(Iova(set.iova(entry)), set.page).expect("no entry wraps");
            let token = iotlb.invalidate(range).expect("it is aligned");
            // Until the invalidation is over, the entry may not map elsewhere.
            iotlb.shootdown().wait(token);
            let target = GuestPhys(set.target(entry));
            iotlb.update(range, target, Prot::RW).expect("there is room for what was just there");
        };
        let sample = beside(order, set, waited, || {
            together(cpus, vec![(); cpus.len()], |index, ()| {
                let view = View::new(Arc::clone(endpoint), Arc::clone(memory));
                let mut view = view.expect("there are places for all of them");
                let look = |cursor: &mut Cursor| {
                    view.quiet();
                    burst(Order::Random, set, cursor, |addr, len| look(&view, addr, len));
                };
                let own = |entry| {
                    if order == Order::Threads {
                        _ = again(entry)
                    }
                };
                steadily(set, index, budget, look, own)
            })
        });
        self.view.online();
        sample
    }
}
