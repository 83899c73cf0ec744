//! Scatter lists for an untrusted device, whose elements do not fill their granules: bounced whole,
//! and element by element. Between two processes, over a virtio-iommu.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringfence_dma::{Direction, Mapping, Policy};
use ringfence_drivers::ram::PagedBuffer;

use super::{Options, Part, linear::Linear};
use crate::{
    bench::{
        Benchmark, Row,
        clock::{cpu_time, fitting},
        rounds::{Sample, Stop, Taken, stopped, turns},
        row::{object, value},
    },
    list::named,
    progress::{Kind, Progress},
    run::{Dma, bare, link::Link},
};

/// Bytes of the elements, in turn: none fills its granule.
const LENS: [usize; 4] = [1024, 2048, 3072, 3584];
const PAGE: usize = 4096;
/// Bytes of the linear pool: more than the longest list takes.
const BLOCK: u64 = 1 << 20;

/// Elements of a list, the longest last.
const ELEMENTS: [usize; 3] = [4, 16, 64];
/// How long one measurement runs, if not said otherwise.
pub(super) const BUDGET: Duration = Duration::from_millis(40);

named! {
    /// How a list is bounced.
    Way, "unknown way to bounce a list {:?}: there are {}":
    /// All of it in one slot.
    Whole = "ringfence",
    /// Each element in a slot of our pools.
    Each = "each",
    /// Each element as Linux does it: a slot of a linear pool, mapped for this use and unmapped after it, a
    /// sync each time.
    SingleUse = "single-use",
}

const DIRECTIONS: [(Direction, &str); 2] =
    [(Direction::ToDevice, "to"), (Direction::FromDevice, "from")];

/// Runs all of it.
///
/// # Errors
/// There is no device process.
pub(super) fn run(options: &Options, show: Kind, stop: &Stop, into: &mut Benchmark) -> Result<()> {
    let (repeat, budget) = (options.repeat, options.budget.unwrap_or(BUDGET));
    let longest = ELEMENTS[ELEMENTS.len() - 1];
    let linear = Linear::new(BLOCK, 1);
    let pages = (linear.bytes() / PAGE as u64) as usize;
    let elements = LENS.iter().copied().cycle().take(longest);
    let buffers = elements.chain(std::iter::repeat_n(PAGE, pages)).collect();
    // Under a strict policy that does not share syncs, as Linux maps such an element.
    let (link, paths, mut buffers) = bare::untrusted(Policy::Strict, options.notify, buffers)?;
    let pages = buffers.split_off(longest).into_iter().map(Some).collect();
    let single = SingleUse { linear, pages, mapped: Vec::new() };
    let mut bench = Bench { link, list: Vec::new(), spare: buffers, single, each: Vec::new() };

    let cells = ELEMENTS.len() * DIRECTIONS.len();
    let step = budget.mul_f64(1.2) * Way::ALL.len() as u32;
    let steps = cells as u64 * u64::from(repeat);
    let progress = Progress::new(show, steps, step.mul_f64(steps as f64));
    for elements in ELEMENTS {
        for (direction, name) in DIRECTIONS.into_iter().take_while(|_| !stopped(stop)) {
            bench.draw(elements);
            bench.check().with_context(|| format!("lists of {elements} elements"))?;
            let mut taken = vec![Taken::default(); Way::ALL.len()];
            for round in 1..=repeat {
                progress.begin(&format!(
                    "lists of {elements}, {name} the device, round {round} of {repeat}"
                ));
                for (way, taken) in turns(Way::ALL.into_iter().zip(&mut taken), round, stop) {
                    taken.push(bench.measure(way, direction, budget)?);
                }
                progress.step(step);
            }
            for (way, own) in Way::ALL.into_iter().zip(&taken) {
                into.rows.push(row(way, name, elements, own, &taken[0]));
            }
        }
    }
    drop(paths);
    bench.link.close().map(drop)
}

fn row(way: Way, direction: &str, elements: usize, own: &Taken, ours: &Taken) -> Row {
    let name = format!("list/{direction}/{elements}");
    let params = object([
        ("part", Part::List.name().into()),
        ("direction", direction.into()),
        ("elements", elements.into()),
    ]);
    let mut row = own["wall"].row((name, way.name()), params, &ours["wall"], None);
    let names = ["thread_cpu_ns", "device_cpu_ns", "cpu_ns", "requests_per_list"];
    row.figures.extend(own.intervals(&names));
    row.figures.extend(object([("cpu_ratio", value(own["cpu_ns"].ratio_to(&ours["cpu_ns"])))]));
    row
}

struct Bench {
    link: Link,
    /// The elements of the list.
    list: Vec<PagedBuffer>,
    /// More of them, for longer lists.
    spare: Vec<PagedBuffer>,
    single: SingleUse,
    each: Vec<Mapping<PagedBuffer>>,
}

/// What bouncing each element by itself needs.
struct SingleUse {
    linear: Linear,
    /// The pages of the linear pool's block, `None` while they are mapped.
    pages: Vec<Option<PagedBuffer>>,
    mapped: Vec<(Mapping<PagedBuffer>, u64)>,
}

impl Bench {
    /// Makes the list `elements` long.
    fn draw(&mut self, elements: usize) {
        self.spare.splice(0..0, self.list.drain(..));
        self.list.extend(self.spare.drain(..elements));
    }

    /// Maps and unmaps the list.
    fn pass(&mut self, way: Way, direction: Direction) -> Result<()> {
        let (dma, list) = (&self.link.behind.dma, &mut self.list);
        let writes = direction != Direction::ToDevice;
        match way {
            Way::Whole => {
                let mut mapping = dma.map(std::mem::take(list), direction)?;
                ensure!(mapping.is_bounced(), "a list was mapped instead of copied");
                ensure!(mapping.segments().len() == 1, "a copied list has several segments");
                if writes {
                    let len = mapping.len();
                    mapping.note_written(0..len)?;
                }
                *list = mapping.unmap()?;
            }
            Way::Each => {
                for buffer in list.drain(..) {
                    let mapping = dma.map(buffer, direction)?;
                    ensure!(mapping.is_bounced(), "an element was mapped instead of copied");
                    self.each.push(mapping);
                }
                for mut mapping in self.each.drain(..) {
                    if writes {
                        let len = mapping.len();
                        mapping.note_written(0..len)?;
                    }
                    list.push(mapping.unmap()?);
                }
            }
            Way::SingleUse => {
                for buffer in &mut *list {
                    self.single.map(dma, buffer, direction)?;
                }
                self.single.unmap(list, writes)?;
            }
        }
        Ok(())
    }

    /// Checks that every way copies back what it should.
    fn check(&mut self) -> Result<()> {
        for way in Way::ALL {
            for direction in [Direction::Bidirectional, Direction::ToDevice] {
                self.list.iter().for_each(|buffer| buffer.piece().fill(0xa5));
                self.pass(way, direction)?;
                ensure!(self.holds(0xa5), "{}: bytes are lost", way.name());
            }
            if way != Way::SingleUse {
                // The device wrote nothing, and is said to have: what comes back must be zeros.
                self.pass(way, Direction::FromDevice)?;
                ensure!(self.holds(0), "{}: bytes of another came back", way.name());
            }
        }
        Ok(())
    }

    /// Whether the list's elements are in their order, full of `byte`.
    fn holds(&mut self, byte: u8) -> bool {
        self.list.iter().zip(LENS.iter().cycle()).all(|(buffer, len)| {
            let bytes = buffer.piece().to_vec();
            bytes.len() == *len && bytes.iter().all(|found| *found == byte)
        })
    }

    fn measure(&mut self, way: Way, direction: Direction, budget: Duration) -> Result<Sample> {
        let run_in = Instant::now();
        while run_in.elapsed() < budget / 8 {
            self.pass(way, direction)?;
        }
        let requests = |link: &Link| link.behind.iommu.stats().requests();
        let before = (self.link.device_cpu_ns(), requests(&self.link));
        let cpu = cpu_time();
        let (passes, took) =
            fitting(budget, |passes| (0..passes).try_for_each(|_| self.pass(way, direction)))?;
        let cpu = cpu_time().saturating_sub(cpu).as_nanos() as f64;
        let device = self.link.device_cpu_ns().saturating_sub(before.0) as f64;
        let requests = requests(&self.link).saturating_sub(before.1) as f64;
        let each = |(name, all)| (name, all / passes as f64);
        let all = [
            ("wall", took.as_nanos() as f64),
            ("thread_cpu_ns", cpu),
            ("device_cpu_ns", device),
            ("cpu_ns", cpu + device),
            ("requests_per_list", requests),
        ];
        Ok(all.map(each).to_vec())
    }
}

impl SingleUse {
    fn map(&mut self, dma: &Dma, buffer: &mut PagedBuffer, direction: Direction) -> Result<()> {
        let bytes = buffer.piece();
        let original = bytes.as_ptr().addr() as u64;
        let offset = self.linear.take(0, original, PAGE as u64, PAGE as u64);
        let offset = offset.context("the linear pool is full")?;
        let page = self.pages.get_mut(offset as usize / PAGE).and_then(Option::take);
        let page = page.context("the linear pool gave a slot twice")?;
        let copied = page.piece().copy_from_piece(bytes.into());
        page.piece().part(copied, PAGE).fill_zero();
        self.mapped.push((dma.map(page, direction)?, offset));
        Ok(())
    }

    fn unmap(&mut self, list: &mut [PagedBuffer], writes: bool) -> Result<()> {
        for ((mapping, offset), buffer) in self.mapped.drain(..).zip(list) {
            ensure!(!mapping.is_bounced(), "a whole granule was copied");
            let page = mapping.unmap()?;
            if writes {
                buffer.piece().copy_from_piece(page.piece().into());
            }
            self.pages[offset as usize / PAGE] = Some(page);
            self.linear.give_back(offset).context("the linear pool lost a slot")?;
        }
        Ok(())
    }
}
