//! What mapping costs a disk: random reads, each row with another way to map.
//!
//! Around each turn `run ROW SIZE` and `ran COMMANDS SECONDS CPU MAPPING REQUESTS`: the CPU time of the
//! driver's thread, which polls, and the part of it that map and unmap took, in seconds, and how often
//! the domain was asked to map. In between the machine does nothing else.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use ringfence_dma::{BounceConfig, Direction, DmaConfig, Persistent, Policy, Sampled, Written};
use ringfence_drivers::nvme::{Buffer, Completion, Data, Namespace, Op};

use super::{Disk, Machine, PAGE, Queue, buffer, first};

/// What a command carries: one buffer, or one for each page.
type List = Vec<Buffer>;

const DEPTH: u32 = 16;
const ROUNDS: usize = 4;
const ROUND: Duration = Duration::from_millis(400);
/// How much of the disk is read.
const WINDOW: u64 = 16 << 20;

/// A way to map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Row {
    /// Of buffers of a page each: a request to the kernel to map each of them, and one for each I/O to
    /// unmap.
    Pages,
    /// A request for each I/O; what completes together and lies side by side is unmapped by one.
    Batched,
    /// Copied out of memory that stays mapped.
    Bounce,
    /// Memory that stays mapped.
    Persistent,
}

impl Row {
    const ALL: [Row; 4] = [Row::Pages, Row::Batched, Row::Bounce, Row::Persistent];

    fn config(self) -> DmaConfig {
        match self {
            Row::Pages => DmaConfig { max_segment: PAGE as u64, ..DmaConfig::new(Policy::Strict) },
            Row::Batched | Row::Persistent => DmaConfig::new(Policy::StrictMap),
            // A read fills all of its buffer: nothing is copied in.
            Row::Bounce => DmaConfig {
                bounce: BounceConfig { written: Written::Reported, ..BounceConfig::default() },
                ..DmaConfig::new(Policy::Bounce)
            },
        }
    }
}

pub(super) fn run(machine: &Machine) -> Result<()> {
    for size in [PAGE, 16 * PAGE] {
        // Each row has its turn in each round; the first warms up.
        for _ in 0..ROUNDS {
            for row in Row::ALL {
                // Reset and started anew: a controller has one driver at a time.
                let config = DmaConfig { sample_every: 8, ..row.config() };
                let disk = machine.start(config)?;
                println!("run {row:?} {size}");
                let (count, seconds, cpu) = turn(&disk, row, size)?;
                let stats = disk.device().stats();
                let mean = |time: Sampled| time.mean_ns() * stats.maps as f64 / 1e9;
                let mapping = mean(stats.map_time) + mean(stats.unmap_time);
                println!("ran {count} {seconds} {cpu} {mapping} {}", stats.map_calls);
            }
        }
    }
    Ok(())
}

fn turn(disk: &Disk, row: Row, size: usize) -> Result<(u64, f64, f64)> {
    let (space, mut queue) = (first(disk)?, disk.queue(DEPTH)?);
    let arena = match row {
        Row::Persistent => {
            let arena = vec![buffer(size * DEPTH as usize)?];
            let arena = disk.device().map_persistent(arena, Direction::FromDevice);
            Some(Arc::new(arena.map_err(|error| error.error())?))
        }
        _ => None,
    };
    let mut ready: Vec<(Data<List>, u64)> = Vec::new();
    for n in 0..u64::from(DEPTH) {
        ready.push((data(row, arena.as_ref(), size, n)?, n));
    }
    let mut state = 1_u64;
    let (mut count, mut failed) = (0, Ok(()));
    let (begun, cpu) = (Instant::now(), cpu_time());
    // What is under way at the end is waited for, and counts.
    loop {
        if begun.elapsed() < ROUND {
            submit(&mut queue, &space, &mut ready, &mut state)?;
        } else if queue.is_idle() {
            break;
        }
        count += queue.reap(|Completion { token, data, outcome }| {
            if outcome.is_err() {
                failed = outcome;
            }
            ready.push((data, token));
        })? as u64;
        failed?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    Ok((count, seconds, cpu_time() - cpu))
}

fn data(
    row: Row,
    arena: Option<&Arc<Persistent<List>>>,
    size: usize,
    n: u64,
) -> Result<Data<List>> {
    Ok(match arena {
        None if row == Row::Pages => {
            Data::Buffer((0..size / PAGE).map(|_| buffer(PAGE)).collect::<Result<_>>()?)
        }
        Some(arena) => {
            let at = n * size as u64;
            Data::Persistent(Arc::clone(arena), at..at + size as u64)
        }
        None => Data::Buffer(vec![buffer(size)?]),
    })
}

fn submit(
    queue: &mut Queue<List>,
    space: &Namespace,
    ready: &mut Vec<(Data<List>, u64)>,
    state: &mut u64,
) -> Result<()> {
    for (data, token) in ready.drain(..) {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let places = WINDOW / data.len();
        let lba = (*state >> 33) % places * (data.len() / space.block_bytes());
        let submitted = queue.submit(space, Op::Read { lba }, data, token);
        submitted.map_err(|refused| refused.why).context("a read")?;
    }
    Ok(queue.publish()?)
}

/// The CPU time of this thread, in seconds.
fn cpu_time() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes the structure, which is borrowed meanwhile.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
