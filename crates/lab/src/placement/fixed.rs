//! Static patterns: huge ranges, and a segment for each user.
//!
//! A **huge range** is a VM's memory: allocated once, mapped with the largest pages, kept. It must
//! be aligned to them, and be found at all in a space with other ranges.
//!
//! A **segment** is one large aligned range that a user (a thread, a tenant) takes from the shared
//! allocator, to run an allocator of its own in it: it shares no lock, cache line or fragmentation.
//! It costs its creation and its memory, and saves time with every pair after that.
//!
//! All of it is measured by the clock, in rounds in which everything is measured in turn.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use ringfence_iova::{Allocator, Aperture, Magazines, Placement, RbTree, Request, Ring, Slabs};
use ringfence_sync::cpu::{CpuId as _, OneCpu, OsCpu};
use serde_json::{Value, json};

use super::{
    GRANULE, Options,
    model::{PageSize, pages},
};
use crate::{
    allocators::AllocatorKind,
    bench::{Row, threads},
    memory,
    progress::Progress,
    stats::Estimate,
};

/// About what one round takes.
pub(super) const STEP: Duration = Duration::from_millis(400);

/// The huge ranges, GiB.
const HUGE: [u64; 4] = [1, 4, 16, 64];
/// Small ranges that are allocated while huge ones are requested.
const OTHERS: u64 = 1024;
/// A figure of a round is taken over no less than this.
const LEAST: Duration = Duration::from_millis(4);
/// Segments that are created together, so that the clock costs nothing.
const SEGMENTS: usize = 64;
/// A segment, at most: what one table of 1 GiB translates. A small aperture is divided by 1024.
const SEGMENT_SHIFT: u32 = 30;
/// A ring's chunk, as far as it matters here: 256 pages.
const RING: u64 = 256 * GRANULE;

/// How many steps of progress there are.
pub(super) fn steps(options: &Options) -> u64 {
    u64::from(options.repeat)
}

pub(super) fn measure(
    options: &Options,
    progress: &Progress,
    stop: &AtomicBool,
) -> Result<Vec<Row>> {
    if stop.load(Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let last = u64::MAX >> (64 - options.aperture_bits);
    let aperture = Aperture::new(0, last, GRANULE)?;
    let mut cells = huge_cells(aperture)?;
    let mut users = Users::new(aperture, options)?;
    for round in 1..=options.repeat {
        // One round at least: rows without a figure are useless.
        if round > 1 && stop.load(Ordering::Relaxed) {
            break;
        }
        progress.begin(&format!("huge ranges and segments, round {round} of {}", options.repeat));
        for cell in &mut cells {
            cell.round();
        }
        users.round().context("segments")?;
        progress.step(STEP);
    }
    let mut rows = huge_rows(options, &cells);
    rows.extend(users.rows(options));
    Ok(rows)
}

/// One allocator and one size.
struct Huge {
    kind: AllocatorKind,
    space: Arc<dyn Allocator>,
    gib: u64,
    ns: Vec<f64>,
    entries: Value,
    failure: Option<String>,
}

fn huge_cells(aperture: Aperture) -> Result<Vec<Huge>> {
    let mut spaces = Vec::new();
    for kind in AllocatorKind::ALL {
        let space: Arc<dyn Allocator> = Arc::from(kind.make(aperture, Placement::default()));
        for n in 0..OTHERS {
            space.alloc(&Request::new((1 + n % 64) * GRANULE))?;
        }
        spaces.push((kind, space));
    }
    let cell = |gib, (kind, space): &(AllocatorKind, Arc<dyn Allocator>)| Huge {
        kind: *kind,
        space: Arc::clone(space),
        gib,
        ns: Vec::new(),
        entries: Value::Null,
        failure: None,
    };
    // The allocators of a size stand next to each other: they are compared.
    let of_size = |gib| spaces.iter().map(move |space| cell(gib, space));
    Ok(HUGE.into_iter().flat_map(of_size).collect())
}

impl Huge {
    fn round(&mut self) {
        if self.failure.is_none() {
            match self.pair() {
                Ok(ns) => self.ns.push(ns),
                Err(error) => self.failure = Some(format!("{error:#}")),
            }
        }
    }

    fn pair(&mut self) -> Result<f64> {
        let size = self.gib << 30;
        let request = Request::new(size);
        // The reason alone: the row has the request.
        let iova = self.space.alloc(&request).map_err(|error| anyhow!(error.reason))?;
        self.entries = entries(iova, size);
        self.space.free(iova, size)?;
        time(LEAST, || {
            let iova = self.space.alloc(&request)?;
            Ok(self.space.free(iova, size)?)
        })
    }
}

/// The entries that a mapping of all of it takes.
fn entries(iova: u64, size: u64) -> Value {
    let mut of = [0_u64; 3];
    pages(iova, size).for_each(|(_, page)| of[page as usize] += 1);
    let count = |page: PageSize| of[page as usize];
    json!({
        "gib": count(PageSize::Gib1),
        "mib2": count(PageSize::Mib2),
        "kib4": count(PageSize::Kib4),
    })
}

fn huge_rows(options: &Options, cells: &[Huge]) -> Vec<Row> {
    let ours =
        |gib| cells.iter().find(|cell| cell.gib == gib && cell.kind == AllocatorKind::Ringfence);
    let row = |cell: &Huge| Row {
        ns_per_op: Estimate::of(&cell.ns).into(),
        ratio_to_ringfence: ours(cell.gib).and_then(|ours| ratio(&cell.ns, &ours.ns)),
        ..super::row(
            "huge",
            cell.kind.name(),
            [
                ("pattern", "alloc+free".into()),
                ("aperture_bits", options.aperture_bits.into()),
                ("size", (cell.gib << 30).into()),
                ("threads", 1.into()),
            ],
            [("entries", cell.entries.clone()), ("failure", cell.failure.clone().into())],
        )
    };
    cells.iter().map(row).collect()
}

/// Users with segments of their own, and the same without.
struct Users {
    /// The shared allocator.
    global: Arc<Slabs<OsCpu>>,
    /// Made once: that reads a file.
    cpu: OsCpu,
    magazines: Arc<Magazines<RbTree, OsCpu>>,
    segment: u64,
    lives: [Lives; 2],
    hot: Vec<Hot>,
}

/// Segments that come and go, of one kind.
struct Lives {
    cpus: Cpus,
    create: Vec<f64>,
    destroy: Vec<f64>,
    /// Bytes a segment, as often as it was seen.
    memory: Vec<f64>,
}

/// For how many CPUs the allocator of a segment is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cpus {
    /// All of the machine's: the user has many threads.
    All,
    /// One: the user is a thread.
    One,
}

impl Cpus {
    fn count(self) -> usize {
        match self {
            Cpus::All => OsCpu::new().count(),
            Cpus::One => 1,
        }
    }
}

/// Pairs of one page, in one arrangement.
struct Hot {
    space: Space,
    threads: u32,
    ns: Vec<f64>,
}

/// Where a thread takes its pages from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    /// A segment with an allocator of its own.
    Own(Cpus),
    /// A ring of its own.
    Ring,
    /// The shared allocator.
    Shared,
    /// Linux's design, shared by all.
    Magazines,
}

impl Users {
    fn new(aperture: Aperture, options: &Options) -> Result<Users> {
        let cpu = OsCpu::new();
        let global = Arc::new(Slabs::new(aperture, cpu));
        let magazines = Arc::new(Magazines::new(RbTree::new(aperture), cpu));
        let mut hot = Vec::new();
        for threads in [1, 2] {
            for space in [
                Space::Own(Cpus::All),
                Space::Own(Cpus::One),
                Space::Ring,
                Space::Shared,
                Space::Magazines,
            ] {
                hot.push(Hot { space, threads, ns: Vec::new() });
            }
        }
        // Small enough for all of them to fit, beside what alignment wastes.
        let segment = 1 << SEGMENT_SHIFT.min(options.aperture_bits - 10);
        Ok(Users {
            global,
            cpu,
            magazines,
            segment,
            lives: [Cpus::All, Cpus::One].map(|cpus| Lives {
                cpus,
                create: Vec::new(),
                destroy: Vec::new(),
                memory: Vec::new(),
            }),
            hot,
        })
    }

    fn round(&mut self) -> Result<()> {
        for n in 0..self.lives.len() {
            self.come_and_go(n)?;
        }
        for n in 0..self.hot.len() {
            let Hot { space, threads, .. } = self.hot[n];
            let mut queues: Vec<Arc<dyn Allocator>> = Vec::new();
            let mut segments = Vec::new();
            for _ in 0..threads {
                queues.push(match space {
                    Space::Own(cpus) => {
                        let segment = self.segment(cpus)?;
                        segments.push(segment.first);
                        segment.space
                    }
                    Space::Ring => Arc::new(Ring::new(Arc::clone(&self.global), RING)?),
                    Space::Shared => Arc::clone(&self.global) as Arc<dyn Allocator>,
                    Space::Magazines => Arc::clone(&self.magazines) as Arc<dyn Allocator>,
                });
            }
            self.hot[n].ns.push(pairs(&queues)?);
            drop(queues);
            for first in segments {
                self.global.free(first, self.segment)?;
            }
        }
        Ok(())
    }

    /// Segments are created, each ready for use, and destroyed.
    fn come_and_go(&mut self, n: usize) -> Result<()> {
        let cpus = self.lives[n].cpus;
        let mut segments = Vec::with_capacity(SEGMENTS);
        let heap = memory::heap();
        let start = Instant::now();
        for _ in 0..SEGMENTS {
            segments.push(self.segment(cpus)?);
        }
        let created = start.elapsed();
        let grown = memory::heap().zip(heap).map(|(after, before)| after.saturating_sub(before));
        let start = Instant::now();
        for Segment { first, space } in segments {
            drop(space);
            self.global.free(first, self.segment)?;
        }
        let destroyed = start.elapsed();
        let each = |time: Duration| time.as_nanos() as f64 / SEGMENTS as f64;
        let lives = &mut self.lives[n];
        lives.create.push(each(created));
        lives.destroy.push(each(destroyed));
        lives.memory.extend(grown.map(|bytes| bytes as f64 / SEGMENTS as f64));
        Ok(())
    }

    /// A segment that has served its first page.
    fn segment(&self, cpus: Cpus) -> Result<Segment> {
        let first = self.global.alloc(&Request::new(self.segment))?;
        let aperture = Aperture::new(first, first + (self.segment - 1), GRANULE)?;
        let space: Arc<dyn Allocator> = match cpus {
            Cpus::All => Arc::new(Slabs::new(aperture, self.cpu)),
            Cpus::One => Arc::new(Slabs::new(aperture, OneCpu)),
        };
        let iova = space.alloc(&Request::new(GRANULE))?;
        ensure!(
            aperture.first() <= iova && iova <= aperture.last(),
            "{iova:#x} is not of the segment at {first:#x}"
        );
        space.free(iova, GRANULE)?;
        Ok(Segment { first, space })
    }

    fn rows(&self, options: &Options) -> Vec<Row> {
        let row = |pattern: &str, threads: u32, cpus: Option<Cpus>, memory: Option<f64>| {
            let size = if pattern == "hot" { GRANULE } else { self.segment };
            let params = [
                ("pattern", pattern.into()),
                ("aperture_bits", options.aperture_bits.into()),
                ("size", size.into()),
                ("threads", threads.into()),
                ("cpus", cpus.map(Cpus::count).into()),
            ];
            super::row("segment", "ringfence", params, [("memory_bytes", memory.into())])
        };
        let mut rows = Vec::new();
        for Lives { cpus, create, destroy, memory } in &self.lives {
            let memory = Estimate::of(memory).map(|bytes| bytes.median);
            for (pattern, ns, memory) in [("create", create, memory), ("destroy", destroy, None)] {
                let ns_per_op = Estimate::of(ns).into();
                rows.push(Row { ns_per_op, ..row(pattern, 1, Some(*cpus), memory) });
            }
        }
        for hot in &self.hot {
            let is_own = |o: &&Hot| o.space == Space::Own(Cpus::All) && o.threads == hot.threads;
            let own = self.hot.iter().find(is_own);
            let (space, cpus) = match hot.space {
                Space::Own(cpus) => ("own", Some(cpus)),
                Space::Ring => ("own", None),
                Space::Shared | Space::Magazines => ("shared", None),
            };
            let mut row = row("hot", hot.threads, cpus, None);
            row.params.insert("space".to_owned(), space.into());
            match hot.space {
                Space::Ring => _ = row.params.insert("placement".to_owned(), "ring".into()),
                Space::Magazines => row.implementation = "magazines".to_owned(),
                Space::Own(_) | Space::Shared => {}
            }
            row.ns_per_op = Estimate::of(&hot.ns).into();
            row.ratio_to_ringfence = own.and_then(|own| ratio(&hot.ns, &own.ns));
            rows.push(row);
        }
        rows
    }
}

/// A user's range of the global allocator, and the allocator within.
struct Segment {
    first: u64,
    space: Arc<dyn Allocator>,
}

/// The median of the rounds' ratios.
fn ratio(values: &[f64], base: &[f64]) -> Option<f64> {
    Estimate::ratio(values, base).map(|ratio| ratio.median)
}

/// ns of a pair of one page, a thread for each allocator, all at once.
fn pairs(queues: &[Arc<dyn Allocator>]) -> Result<f64> {
    let times = threads::together(&[], queues.iter().collect(), |_, queue| {
        time(LEAST, || {
            let iova = queue.alloc(&Request::new(GRANULE))?;
            Ok(queue.free(iova, GRANULE)?)
        })
    });
    let times = times.into_iter().collect::<Result<Vec<f64>>>()?;
    Ok(times.iter().sum::<f64>() / times.len() as f64)
}

/// ns of one `op`: over twice as many again and again, until they take `least`.
fn time(least: Duration, mut op: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut count = 1u32;
    loop {
        let start = Instant::now();
        for _ in 0..count {
            op()?;
        }
        let elapsed = start.elapsed();
        if elapsed >= least || count > u32::MAX / 2 {
            return Ok(elapsed.as_nanos() as f64 / f64::from(count));
        }
        count *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Kind;

    fn rows(options: &Options) -> Vec<Row> {
        let progress = Progress::new(Kind::Silent, steps(options), Duration::ZERO);
        measure(options, &progress, &AtomicBool::new(false)).unwrap()
    }

    #[test]
    fn every_allocator_is_measured_with_every_huge_range() {
        let rows = rows(&Options { repeat: 1, ..Options::default() });
        for gib in HUGE {
            for kind in AllocatorKind::ALL {
                let row = rows
                    .iter()
                    .find(|row| {
                        row.params["size"] == gib << 30 && row.implementation == kind.name()
                    })
                    .unwrap();
                assert_eq!(row.figures.get("failure"), None, "{row:?}");
                assert!(row.ns_per_op.median.unwrap() > 0.0);
                // Aligned to its size: nothing but the largest pages.
                let entries = json!({ "gib": gib, "mib2": 0, "kib4": 0 });
                assert_eq!(row.figures["entries"], entries, "{row:?}");
                assert!(row.ratio_to_ringfence.is_some());
            }
        }
    }

    #[test]
    fn segments_are_made_used_and_given_back() {
        let rows = rows(&Options { repeat: 2, aperture_bits: 32, ..Options::default() });
        let of = |pattern: &str| {
            rows.iter()
                .filter(|row| row.name == "segment" && row.params["pattern"] == pattern)
                .count()
        };
        assert_eq!((of("create"), of("destroy"), of("hot")), (2, 2, 10));
        let timed = |row: &&Row| row.name == "segment";
        assert!(rows.iter().filter(timed).all(|row| row.ns_per_op.median.is_some()));
        // 4 GiB have no room for 4 GiB and more: such rows report that, and are not left out.
        let failed = rows.iter().filter(|row| row.figures.contains_key("failure")).count();
        assert_eq!(failed, 3 * AllocatorKind::ALL.len());
    }

    #[test]
    fn time_counts_what_was_done() {
        let mut done = 0u64;
        let ns = time(Duration::from_micros(50), || {
            done += 1;
            Ok(())
        });
        // 1, 2, 4, and so on, until the last of them took long enough.
        assert!((done + 1).is_power_of_two());
        assert!(ns.unwrap() * (done.div_ceil(2) as f64) >= 50_000.0 - 1.0);
        assert!(time(Duration::ZERO, || anyhow::bail!("no")).is_err());
    }
}
