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
use serde_json::{Map, Value, json};

use super::{
    GRANULE, Options,
    model::{PageSize, pages},
};
use crate::{
    allocators::AllocatorKind,
    bench::{Row, clock::fitting, threads},
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

/// One measurement of a round.
struct Cell<'a> {
    /// A row for each time that it takes.
    rows: Vec<Row>,
    /// The times, each in all rounds.
    ns: Vec<Vec<f64>>,
    /// The cell that it is compared with.
    base: Option<usize>,
    /// Takes the times of a round, and notes in the rows what else it sees.
    measure: Box<Measure<'a>>,
}

type Measure<'a> = dyn FnMut(&mut [Row]) -> Result<Vec<f64>> + 'a;

impl<'a> Cell<'a> {
    fn new(
        rows: Vec<Row>,
        base: Option<usize>,
        measure: impl FnMut(&mut [Row]) -> Result<Vec<f64>> + 'a,
    ) -> Cell<'a> {
        Cell { ns: vec![Vec::new(); rows.len()], rows, base, measure: Box::new(measure) }
    }
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
    let users = Users::new(aperture, options);
    let mut cells = huge_cells(aperture, options)?;
    users.add_cells(&mut cells);
    for round in 1..=options.repeat {
        // One round at least: rows without a figure are useless.
        if round > 1 && stop.load(Ordering::Relaxed) {
            break;
        }
        progress.begin(&format!("huge ranges and segments, round {round} of {}", options.repeat));
        for Cell { rows, ns, measure, .. } in &mut cells {
            let times = measure(rows).context("segments")?;
            ns.iter_mut().zip(times).for_each(|(ns, time)| ns.push(time));
        }
        progress.step(STEP);
    }
    let mut rows = Vec::new();
    for Cell { rows: of, ns, base, .. } in &cells {
        // The median of the rounds' ratios.
        let ratio = base.and_then(|base| Estimate::ratio(&ns[0], &cells[base].ns[0]));
        rows.extend(of.iter().zip(ns).map(|(row, ns)| Row {
            ns_per_op: Estimate::of(ns).into(),
            ratio_to_ringfence: ratio.map(|ratio| ratio.median),
            ..row.clone()
        }));
    }
    Ok(rows)
}

/// Each allocator with each size. The allocators of a size stand next to each other: they are
/// compared.
fn huge_cells(aperture: Aperture, options: &Options) -> Result<Vec<Cell<'static>>> {
    let mut spaces = Vec::new();
    for kind in AllocatorKind::ALL {
        let space: Arc<dyn Allocator> = Arc::from(kind.make(aperture, Placement::default()));
        for n in 0..OTHERS {
            space.alloc(&Request::new((1 + n % 64) * GRANULE))?;
        }
        spaces.push((kind, space));
    }
    let ours = AllocatorKind::ALL.iter().position(|kind| *kind == AllocatorKind::Ringfence);
    let mut cells = Vec::new();
    for gib in HUGE {
        let base = ours.map(|ours| cells.len() + ours);
        for (kind, space) in &spaces {
            let space = Arc::clone(space);
            let params = [
                ("pattern", "alloc+free".into()),
                ("aperture_bits", options.aperture_bits.into()),
                ("size", (gib << 30).into()),
                ("threads", 1.into()),
            ];
            let row = super::row("huge", kind.name(), params);
            cells.push(Cell::new(vec![row], base, move |rows| {
                let figures = &mut rows[0].figures;
                if figures.contains_key("failure") {
                    return Ok(Vec::new());
                }
                huge_pair(&*space, gib << 30, figures).map(|ns| vec![ns]).or_else(|error| {
                    figures.insert("failure".to_owned(), format!("{error:#}").into());
                    Ok(Vec::new())
                })
            }));
        }
    }
    Ok(cells)
}

fn huge_pair(space: &dyn Allocator, size: u64, figures: &mut Map<String, Value>) -> Result<f64> {
    let request = Request::new(size);
    // The reason alone: the row has the request.
    let iova = space.alloc(&request).map_err(|error| anyhow!(error.reason))?;
    // The entries that a mapping of all of it takes.
    let mut of = [0_u64; 3];
    pages(iova, size).for_each(|(_, page)| of[page as usize] += 1);
    let count = |page: PageSize| of[page as usize];
    let entries = json!({
        "gib": count(PageSize::Gib1),
        "mib2": count(PageSize::Mib2),
        "kib4": count(PageSize::Kib4),
    });
    figures.insert("entries".to_owned(), entries);
    space.free(iova, size)?;
    time(|| {
        let iova = space.alloc(&request)?;
        Ok(space.free(iova, size)?)
    })
}

/// Where users take their pages from: segments of their own, or not.
struct Users {
    /// The shared allocator.
    global: Arc<Slabs<OsCpu>>,
    /// Made once: that reads a file.
    cpu: OsCpu,
    magazines: Arc<Magazines<RbTree, OsCpu>>,
    segment: u64,
    aperture_bits: u32,
}

/// Where a thread takes its pages from.
#[derive(Clone, Copy, Debug)]
enum Space {
    /// A segment with an allocator of its own, for all CPUs: the user has many threads.
    Own,
    /// The same for one CPU: the user is a thread.
    OwnCpu,
    /// A ring of its own.
    Ring,
    /// The shared allocator.
    Shared,
    /// Linux's design, shared by all.
    Magazines,
}

impl Users {
    fn new(aperture: Aperture, options: &Options) -> Users {
        let cpu = OsCpu::new();
        Users {
            global: Arc::new(Slabs::new(aperture, cpu)),
            cpu,
            magazines: Arc::new(Magazines::new(RbTree::new(aperture), cpu)),
            // Small enough for all of them to fit, beside what alignment wastes.
            segment: 1 << SEGMENT_SHIFT.min(options.aperture_bits - 10),
            aperture_bits: options.aperture_bits,
        }
    }

    fn add_cells<'a>(&'a self, cells: &mut Vec<Cell<'a>>) {
        for space in [Space::Own, Space::OwnCpu] {
            let row = |pattern| self.row(pattern, self.segment, 1, space);
            let mut memory = Vec::new();
            let rows = vec![row("create"), row("destroy")];
            cells.push(Cell::new(rows, None, move |rows| {
                let (times, grown) = self.come_and_go(space)?;
                memory.extend(grown);
                if let Some(bytes) = Estimate::of(&memory) {
                    rows[0].figures.insert("memory_bytes".to_owned(), bytes.median.into());
                }
                Ok(times)
            }));
        }
        for threads in [1, 2] {
            let base = Some(cells.len());
            for space in [Space::Own, Space::OwnCpu, Space::Ring, Space::Shared, Space::Magazines] {
                let mut row = self.row("hot", GRANULE, threads, space);
                let own = !matches!(space, Space::Shared | Space::Magazines);
                row.params.insert("space".to_owned(), if own { "own" } else { "shared" }.into());
                match space {
                    Space::Ring => _ = row.params.insert("placement".to_owned(), "ring".into()),
                    Space::Magazines => row.implementation = "magazines".to_owned(),
                    _ => {}
                }
                let measure = move |_: &mut [Row]| Ok(vec![self.hot(space, threads)?]);
                cells.push(Cell::new(vec![row], base, measure));
            }
        }
    }

    fn row(&self, pattern: &str, size: u64, threads: u32, space: Space) -> Row {
        let cpus = match space {
            Space::Own => self.cpu.count().into(),
            Space::OwnCpu => 1.into(),
            _ => Value::Null,
        };
        let params = [
            ("pattern", pattern.into()),
            ("aperture_bits", self.aperture_bits.into()),
            ("size", size.into()),
            ("threads", threads.into()),
            ("cpus", cpus),
        ];
        super::row("segment", "ringfence", params)
    }

    /// Pairs of one page, in threads each of which has such a space.
    fn hot(&self, space: Space, threads: u32) -> Result<f64> {
        let mut queues: Vec<Arc<dyn Allocator>> = Vec::new();
        let mut segments = Vec::new();
        for _ in 0..threads {
            queues.push(match space {
                Space::Own | Space::OwnCpu => {
                    let (first, queue) = self.segment(space)?;
                    segments.push(first);
                    queue
                }
                Space::Ring => Arc::new(Ring::new(Arc::clone(&self.global), RING)?),
                Space::Shared => Arc::clone(&self.global) as Arc<dyn Allocator>,
                Space::Magazines => Arc::clone(&self.magazines) as Arc<dyn Allocator>,
            });
        }
        let ns = pairs(&queues)?;
        drop(queues);
        segments.into_iter().try_for_each(|first| self.global.free(first, self.segment))?;
        Ok(ns)
    }

    /// Segments are created, each ready for use, and destroyed: how long either takes, and the bytes
    /// that one has if they are known.
    fn come_and_go(&self, space: Space) -> Result<(Vec<f64>, Option<f64>)> {
        let mut segments = Vec::with_capacity(SEGMENTS);
        let heap = memory::heap();
        let start = Instant::now();
        for _ in 0..SEGMENTS {
            segments.push(self.segment(space)?);
        }
        let created = start.elapsed();
        let grown = memory::heap().zip(heap).map(|(after, before)| after.saturating_sub(before));
        let start = Instant::now();
        for (first, space) in segments {
            drop(space);
            self.global.free(first, self.segment)?;
        }
        let times = [created, start.elapsed()].map(|time| time.as_nanos() as f64 / SEGMENTS as f64);
        Ok((times.into(), grown.map(|bytes| bytes as f64 / SEGMENTS as f64)))
    }

    /// A user's range of the global allocator, and the allocator within, which has served its first
    /// page.
    fn segment(&self, space: Space) -> Result<(u64, Arc<dyn Allocator>)> {
        let first = self.global.alloc(&Request::new(self.segment))?;
        let aperture = Aperture::new(first, first + (self.segment - 1), GRANULE)?;
        let space: Arc<dyn Allocator> = match space {
            Space::OwnCpu => Arc::new(Slabs::new(aperture, OneCpu)),
            _ => Arc::new(Slabs::new(aperture, self.cpu)),
        };
        let iova = space.alloc(&Request::new(GRANULE))?;
        ensure!(
            aperture.first() <= iova && iova <= aperture.last(),
            "{iova:#x} is not of the segment at {first:#x}"
        );
        space.free(iova, GRANULE)?;
        Ok((first, space))
    }
}

/// ns of a pair of one page, a thread for each allocator, all at once.
fn pairs(queues: &[Arc<dyn Allocator>]) -> Result<f64> {
    let times = threads::together(&[], queues.iter().collect(), |_, queue| {
        time(|| {
            let iova = queue.alloc(&Request::new(GRANULE))?;
            Ok(queue.free(iova, GRANULE)?)
        })
    });
    let times = times.into_iter().collect::<Result<Vec<f64>>>()?;
    Ok(times.iter().sum::<f64>() / times.len() as f64)
}

/// ns of one `op`.
fn time(mut op: impl FnMut() -> Result<()>) -> Result<f64> {
    let (done, took) = fitting(LEAST, |times| (0..times).try_for_each(|_| op()))?;
    Ok(took.as_nanos() as f64 / done as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Kind;

    fn rows(options: &Options) -> Vec<Row> {
        let progress = Progress::new(Kind::Silent, options.repeat.into(), Duration::ZERO);
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
}
