//! All of a replay: recordings are read, then each is replayed, allocators in interleaved rounds.

use std::{sync::atomic::Ordering, time::Duration};

use anyhow::{Context, Result, anyhow};
use ringfence_iova::{Aperture, Request};

use super::{
    Options,
    open::read_all,
    recording::Recording,
    report::{AllocatorRow, PolicyRow, RECORDED, Report, TraceReport},
    requests::requests,
    space::Space,
    stream::{Allocation, Stream},
    timing::{Fastest, Script, Server},
};
use crate::{
    allocators::AllocatorKind,
    bench::rounds::{Contest, Sample, Stop},
    progress::{Kind, Progress},
    run::tuning::Tuning,
    stats::Estimate,
};

/// Bytes of a granule: what recorded sizes are rounded up to.
pub const GRANULE: u64 = 4096;
/// Default widths of an aperture: the narrowest of them that holds all recorded addresses is taken.
/// 32 bits are what Linux tries first for a PCI device, the others what IOMMUs of three, four and
/// five levels translate.
const WIDTHS: [u32; 5] = [32, 39, 48, 57, 64];
/// Moments for which fragmentation is reported over time.
const MOMENTS: usize = 20;
/// What an operation of a pass takes, roughly, for the time left.
const EXPECTED_NS: u64 = 500;

/// How a replay ended.
#[derive(Debug)]
pub struct Ended {
    /// What was found.
    pub report: Report,
    /// What went wrong, after which nothing further was begun.
    pub failure: Option<anyhow::Error>,
}

/// Replays recordings. `stop` ends it early: what is complete is returned.
///
/// # Errors
/// A file cannot be read, or is no recording ([`Usage`](crate::run::Usage)): nothing was replayed.
pub fn replay(options: &Options, progress: Kind, stop: &Stop) -> Result<Ended> {
    let mut ended = Ended { report: Report::new(options.repeat), failure: None };
    // All of them before the first is replayed: what is wrong with one is reported at once.
    let recordings = read_all(&options.traces, progress, stop, &mut ended.report.warnings)?;
    // Of each recording.
    let with_loop = options.allocators.len() as u64 + 1;
    let steps = with_loop * u64::from(options.repeat + 2) + options.policies.len() as u64;
    let ops: usize = recordings.iter().map(|(_, recording)| recording.stream.ops().len()).sum();
    let expected = Duration::from_nanos(steps * ops as u64 * EXPECTED_NS);
    let progress = Progress::new(progress, steps * recordings.len() as u64, expected);
    for (file, recording) in &recordings {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let mut one = Replay { file, recording, options, stop, progress: &progress };
        let mut trace = one.describe();
        let result = one.run(&mut trace);
        ended.report.traces.push(trace);
        if let Err(error) = result {
            ended.failure = Some(error.context(file.clone()));
            break;
        }
    }
    ended.report.interrupted = stop.load(Ordering::Relaxed);
    Ok(ended)
}

/// The replay of one recording.
struct Replay<'a> {
    file: &'a str,
    recording: &'a Recording,
    options: &'a Options,
    stop: &'a Stop,
    progress: &'a Progress,
}

impl Replay<'_> {
    fn stream(&self) -> &Stream {
        &self.recording.stream
    }

    fn bits(&self) -> u32 {
        let highest = self.stream().highest();
        let holds = |bits: &u32| *bits == 64 || highest >> bits == 0;
        self.options.aperture_bits.or_else(|| WIDTHS.into_iter().find(holds)).unwrap_or(64)
    }

    /// What the recording is, without any figure.
    fn describe(&self) -> TraceReport {
        let (recording, stream) = (self.recording, self.stream());
        TraceReport {
            file: self.file.to_owned(),
            format: recording.format.name().to_owned(),
            lines: recording.lines,
            damaged: recording.damaged,
            complete: recording.incomplete.is_none(),
            maps: recording.maps,
            unmaps: recording.unmaps,
            lost_events: recording.lost,
            left_out: stream.left_out,
            operations: stream.ops().len() as u64,
            allocations: stream.allocations().len() as u64,
            frees: stream.frees() as u64,
            live_at_end: stream.live_at_end as u64,
            domains: stream.domains as u64,
            attached: recording.attached,
            cpus: stream.cpus as u64,
            seconds: stream.duration_ns as f64 / 1e9,
            aperture_bits: self.bits(),
            placement: self.options.placement.to_string(),
            ..TraceReport::default()
        }
    }

    fn run(&mut self, trace: &mut TraceReport) -> Result<()> {
        let last = u64::MAX >> (64 - self.bits());
        let aperture = Aperture::new(0, last, GRANULE).context("an aperture without a granule")?;
        self.place(aperture, trace)?;
        self.send(aperture, trace)?;
        self.time(aperture, trace)
    }

    /// Where the recorded guest and every allocator put things.
    fn place(&self, aperture: Aperture, trace: &mut TraceReport) -> Result<()> {
        self.begin("where the guest put things");
        let recorded = |allocation: &Allocation| Some(allocation.first);
        if let Some(row) = self.placement(RECORDED, recorded, |_, _, _| Ok(()))? {
            trace.peak_live_ranges = row.peaks.ranges;
            trace.peak_live_bytes = row.peaks.bytes;
            trace.allocators.push(row);
        }
        for kind in self.options.allocators.iter() {
            self.begin(&format!("{kind}, where it puts things"));
            let one = |_| kind.make(aperture, self.options.placement.of_ranges());
            let allocators: Vec<_> = (0..self.stream().domains).map(one).collect();
            let of = |allocation: &Allocation| &*allocators[usize::from(allocation.domain)];
            let place = |allocation: &Allocation| {
                of(allocation).alloc(&Request::new(allocation.size())).ok()
            };
            let free = |allocation: &Allocation, iova, size| {
                of(allocation).free(iova, size).with_context(|| {
                    format!("the allocator {kind} does not take back what it handed out")
                })
            };
            let Some(row) = self.placement(kind.name(), place, free)? else { return Ok(()) };
            trace.allocators.push(row);
        }
        Ok(())
    }

    /// Walks through the stream with ranges where `place` puts them, or nowhere. `None` if it was
    /// stopped.
    fn placement(
        &self,
        name: &str,
        place: impl Fn(&Allocation) -> Option<u64>,
        free: impl Fn(&Allocation, u64, u64) -> Result<()>,
    ) -> Result<Option<AllocatorRow>> {
        let stream = self.stream();
        let mut space = Space::new(stream.domains);
        let mut held = vec![None; stream.slots];
        let mut row = AllocatorRow { name: name.to_owned(), ..AllocatorRow::default() };
        let mut sum = 0.0;
        let ops = stream.ops().len();
        for (number, op) in stream.ops().iter().enumerate() {
            let allocation = stream.allocation(op);
            let (domain, slot) = (usize::from(allocation.domain), allocation.slot as usize);
            if op.free {
                if let Some(first) = held[slot].take() {
                    space.remove(domain, first);
                    free(allocation, first, allocation.size())?;
                }
            } else if let Some(first) = place(allocation) {
                let last = first
                    .checked_add(allocation.last - allocation.first)
                    .with_context(|| format!("{name} handed out what passes 2^64"))?;
                match space.insert(domain, first, last) {
                    Ok(()) => held[slot] = Some(first),
                    Err(_) if name == RECORDED => row.failures += 1,
                    Err(taken) => {
                        return Err(anyhow!("the allocator {name} handed out {taken:#x} twice"));
                    }
                }
            } else {
                row.failures += 1;
            }
            sum += space.fragmentation();
            // The last moment is that of the last operation.
            if (number + 1) * MOMENTS / ops > number * MOMENTS / ops {
                row.fragmentation_over_time.push(space.moment(op.time_ns));
            }
            if number % 4096 == 0 && self.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
        }
        row.peaks = space.peaks();
        row.fragmentation = sum / ops as f64;
        self.done();
        Ok(Some(row))
    }

    /// What the recorded guest and every policy send.
    fn send(&self, aperture: Aperture, trace: &mut TraceReport) -> Result<()> {
        trace.policies.push(PolicyRow {
            policy: RECORDED.to_owned(),
            effective_policy: RECORDED.to_owned(),
            map_requests: self.recording.maps,
            unmap_requests: self.recording.unmaps,
            ..PolicyRow::default()
        });
        let tuning = Tuning {
            flush_queue_slots: self.options.flush_queue_slots,
            flush_queue_ms: self.options.flush_queue_ms,
            ..Tuning::default()
        };
        for policy in self.options.policies.iter() {
            self.begin(&format!("what {policy} sends"));
            let (stream, timed) = (self.stream(), self.recording.timed);
            match requests(stream, timed, *policy, aperture, tuning, self.stop)
                .with_context(|| format!("under {policy}"))?
            {
                Some(row) => trace.policies.push(row),
                None => return Ok(()),
            }
            self.done();
        }
        Ok(())
    }

    /// What every allocator takes, in interleaved rounds.
    fn time(&self, aperture: Aperture, trace: &mut TraceReport) -> Result<()> {
        let script = Script::new(self.stream(), aperture, self.options.placement.of_ranges());
        let kinds = self.options.allocators.iter().copied().map(Some);
        let servers = std::iter::once(None).chain(kinds);
        let mut contest = Contest::new(servers, |_| Ok(Fastest::new(&script)));
        let mut failure = None;
        let measure = |server: &Server, fastest: &mut Fastest, round| {
            if failure.is_some() {
                return Ok(Sample::new());
            }
            let what = server.map_or("the loop alone", AllocatorKind::name);
            self.begin(&match round {
                0 => format!("{what}, warm-up"),
                _ => format!("{what}, round {round} of {}", self.options.repeat),
            });
            let taken = script.round(*server, fastest, self.stop);
            self.done();
            Ok(taken.unwrap_or_else(|error| {
                failure = Some(error);
                Sample::new()
            }))
        };
        contest.run(self.options.repeat, self.stop, measure, |_, _| {});
        if let Some(error) = failure {
            return Err(error);
        }
        trace.rounds = contest.taken(&None)["both"].0.len() as u32;
        trace.loop_ns_per_op = Estimate::of(&contest.taken(&None)["both"].0);
        let ours = &contest.taken(&Some(AllocatorKind::Ringfence))["both"];
        // After the recorded guest's row; fewer, if the run was stopped.
        for (row, one) in trace.allocators.iter_mut().zip(&contest.0).skip(1) {
            let estimate = |figure| Estimate::of(&one.taken[figure].0);
            row.ns_per_op = estimate("both");
            row.alloc_ns = estimate("alloc");
            row.free_ns = estimate("free");
            row.p99_ns = estimate("p99");
            row.worst_ns = estimate("worst");
            row.worst_steady_ns = one.subject.as_ref().ok().and_then(Fastest::longest);
            row.ratio_to_ringfence = Estimate::ratio(&one.taken["both"].0, &ours.0);
        }
        Ok(())
    }

    fn begin(&self, what: &str) {
        self.progress.begin(&format!("{}: {what}", self.file));
    }

    fn done(&self) {
        let ops = self.stream().ops().len() as u64;
        self.progress.step(Duration::from_nanos(ops * EXPECTED_NS));
    }
}

#[cfg(test)]
mod tests;
