//! All of a replay: recordings are read, then each is replayed, allocators in interleaved rounds.

use std::{
    fs::{File, OpenOptions},
    io::ErrorKind,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use ringfence_dma::Policy;
use ringfence_iova::{Allocator, Aperture, Placement, Request};

use super::{
    lines::Stoppable,
    recording::{ReadError, Recording},
    report::{AllocatorRow, LeftOutReport, PolicyRow, RECORDED, Report, TraceReport},
    requests::{Tuning, requests},
    space::{Moment, Space},
    stream::{Allocation, LeftOut, Stream},
    timing::{Fastest, Round, Script, Server},
};
use crate::{
    allocators::AllocatorKind,
    progress::{Kind, Progress},
    run::Usage,
    stats::Estimate,
};

/// Bytes of a granule: what recorded sizes are rounded up to.
pub const GRANULE: u64 = 4096;
/// Widths that an aperture is given when nobody asks for one: the narrowest of them that holds all
/// recorded addresses. 32 bits are what Linux tries first for a PCI device, the others what IOMMUs
/// of three, four and five levels translate.
const WIDTHS: [u32; 5] = [32, 39, 48, 57, 64];
/// Moments that fragmentation over time is told for.
const MOMENTS: usize = 20;
/// A long recording is told of while it is read, so often.
const BETWEEN_LINES: Duration = Duration::from_secs(2);
/// What an operation of a pass takes, roughly, for the time left.
const EXPECTED_NS: u64 = 500;

/// What to replay, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The allocators, in order.
    pub allocators: Vec<AllocatorKind>,
    /// The policies, in order.
    pub policies: Vec<Policy>,
    /// Bits of the aperture; `None`: as many as the recorded addresses have, at least 32.
    pub aperture_bits: Option<u32>,
    /// Where ours puts ranges; the others have placements of their own.
    pub placement: Placement,
    /// Measured rounds of every allocator; one more before them warms up.
    pub repeat: u32,
    /// Slots of a flush queue; `None`: as Linux tunes it.
    pub flush_queue_slots: Option<usize>,
    /// Its timer in milliseconds; `None`: as Linux tunes it.
    pub flush_queue_ms: Option<u64>,
    /// How to show progress.
    pub progress: Kind,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            allocators: AllocatorKind::ALL.to_vec(),
            policies: default_policies(),
            aperture_bits: None,
            placement: Placement::default(),
            repeat: 15,
            flush_queue_slots: None,
            flush_queue_ms: None,
            progress: Kind::Auto,
        }
    }
}

/// How a replay ended.
#[derive(Debug)]
pub struct Ended {
    /// What was found.
    pub report: Report,
    /// What went wrong, after which nothing further was begun.
    pub failure: Option<anyhow::Error>,
}

/// All policies that protect.
pub fn default_policies() -> Vec<Policy> {
    Policy::ALL.into_iter().filter(|policy| *policy != Policy::Off).collect()
}

/// The policies of a list such as `strict,lazy-mq+map`.
///
/// # Errors
/// A name is none, or the list is empty or names one twice.
pub fn parse_policies(text: &str) -> Result<Vec<Policy>, String> {
    let mut policies: Vec<Policy> = Vec::new();
    for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let policy: Policy = name.parse().map_err(|error| format!("{error}"))?;
        if policies.contains(&policy) {
            return Err(format!("{name} stands twice in the list of policies"));
        }
        policies.push(policy);
    }
    if policies.is_empty() {
        return Err("an empty list of policies".to_owned());
    }
    Ok(policies)
}

/// The placement called `name`.
///
/// # Errors
/// There is none of that name.
pub fn parse_placement(name: &str) -> Result<Placement, String> {
    PLACEMENTS
        .into_iter()
        .find(|(known, _)| *known == name)
        .map(|(_, placement)| placement)
        .ok_or_else(|| {
            let names = PLACEMENTS.map(|(known, _)| known).join(", ");
            format!("no placement is called {name:?}: there are {names}")
        })
}

/// The placements by their names.
const PLACEMENTS: [(&str, Placement); 3] = [
    ("size-aligned", Placement::SizeAligned),
    ("lowest", Placement::Lowest),
    ("highest", Placement::Highest),
];

/// Replays recordings; `-` is standard input. `stop` ends it early: what is complete is returned.
///
/// # Errors
/// A recording cannot be read, or is none ([`Usage`]): nothing was replayed.
pub fn replay(traces: &[PathBuf], options: &Options, stop: &Arc<AtomicBool>) -> Result<Ended> {
    let mut ended = Ended { report: Report::new(options.repeat), failure: None };
    let recordings = read_all(traces, options, stop, &mut ended.report)?;
    let steps = |stream: &Stream| {
        let kinds = options.allocators.len() as u64;
        let passes = 1 + kinds + options.policies.len() as u64;
        let ops = stream.ops().len() as u64;
        (passes + u64::from(options.repeat + 1) * (kinds + 1), ops)
    };
    let all = recordings.iter().map(|(_, recording)| steps(&recording.stream));
    let (total, expected) = all.fold((0, 0), |(total, expected), (steps, ops)| {
        (total + steps, expected + steps * ops * EXPECTED_NS)
    });
    let progress = Progress::new(options.progress, total, Duration::from_nanos(expected));
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
    progress.finish();
    Ok(ended)
}

/// Reads every recording before the first is replayed: what is wrong with one is told at once.
fn read_all(
    traces: &[PathBuf],
    options: &Options,
    stop: &Arc<AtomicBool>,
    report: &mut Report,
) -> Result<Vec<(String, Recording)>> {
    let stdin = traces.iter().filter(|trace| trace.as_os_str() == "-").count();
    if stdin > 1 {
        return Err(Usage("- stands twice: standard input can be read once".to_owned()).into());
    }
    let mut recordings = Vec::new();
    for trace in traces {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let file = trace.display().to_string();
        let mut told = Instant::now();
        let mut tell = |lines: u64| {
            if options.progress != Kind::Silent && told.elapsed() > BETWEEN_LINES {
                told = Instant::now();
                eprintln!("reading {file}: {lines} lines so far");
            }
        };
        let recording = match read(trace, stop, &mut tell) {
            Ok(recording) => recording,
            Err(_) if stop.load(Ordering::Relaxed) => break,
            Err(error) => return Err(error),
        };
        for warning in recording.warnings(&file) {
            if options.progress != Kind::Silent {
                eprintln!("{warning}");
            }
            report.warnings.push(warning);
        }
        recordings.push((file, recording));
    }
    Ok(recordings)
}

fn read(trace: &Path, stop: &Arc<AtomicBool>, tell: &mut dyn FnMut(u64)) -> Result<Recording> {
    let name = trace.display();
    let usage = |error: std::io::Error| match error.kind() {
        ErrorKind::IsADirectory => Usage(format!("{name} is a directory, not a recording")).into(),
        _ => anyhow!(error).context(format!("reading {name}")),
    };
    let file = if trace.as_os_str() == "-" {
        // A descriptor of our own: it is closed when all is read.
        File::from(rustix::io::dup(std::io::stdin()).map_err(std::io::Error::from).map_err(usage)?)
    } else {
        // A FIFO is opened without waiting for its writer: it is waited for where Ctrl-C ends that.
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(trace)
            .map_err(|error| Usage(format!("cannot read {name}: {error}")))?
    };
    Recording::read_telling(Stoppable::new(file, stop), stop, tell).map_err(|error| match error {
        ReadError::NotARecording(why) => Usage(format!("{name} is no recording: {why}")).into(),
        ReadError::Io(error) => usage(error),
    })
}

/// The replay of one recording.
struct Replay<'a> {
    file: &'a str,
    recording: &'a Recording,
    options: &'a Options,
    stop: &'a AtomicBool,
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

    fn placement_name(&self) -> &'static str {
        let ours = self.options.placement;
        PLACEMENTS.into_iter().find(|(_, known)| *known == ours).map_or("", |(name, _)| name)
    }

    /// What the recording is, without any figure.
    fn describe(&self) -> TraceReport {
        let (recording, stream) = (self.recording, self.stream());
        let LeftOut { maps_of_mapped, unmaps_of_nothing, unmaps_refused, maps_beyond_domains } =
            stream.left_out;
        TraceReport {
            file: self.file.to_owned(),
            format: recording.format.name().to_owned(),
            lines: recording.lines,
            damaged: recording.damaged,
            complete: recording.incomplete.is_none(),
            maps: recording.maps,
            unmaps: recording.unmaps,
            lost_events: recording.lost,
            left_out: LeftOutReport {
                maps_of_mapped,
                unmaps_of_nothing,
                unmaps_refused,
                maps_beyond_domains,
            },
            operations: stream.ops().len() as u64,
            allocations: stream.allocations().len() as u64,
            frees: stream.frees() as u64,
            live_at_end: stream.live_at_end as u64,
            domains: stream.domains as u64,
            attached: recording.attached,
            cpus: stream.cpus as u64,
            seconds: stream.duration_ns as f64 / 1e9,
            aperture_bits: self.bits(),
            placement: self.placement_name().to_owned(),
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
            trace.peak_live_ranges = row.peak_live_ranges;
            trace.peak_live_bytes = row.peak_live_bytes;
            trace.allocators.push(row);
        }
        for kind in &self.options.allocators {
            self.begin(&format!("{kind}, where it puts things"));
            let allocators: Vec<Box<dyn Allocator>> =
                std::iter::repeat_with(|| kind.make(aperture, self.options.placement))
                    .take(self.stream().domains)
                    .collect();
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
                let moment: Moment = space.moment(op.time_ns);
                row.fragmentation_over_time.push(moment);
            }
            if number % 4096 == 0 && self.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
        }
        let peaks = space.peaks();
        row.peak_live_ranges = peaks.ranges;
        row.peak_live_bytes = peaks.bytes;
        row.span_bytes = peaks.span_bytes;
        row.extent_bytes = peaks.extent_bytes;
        row.table_pages = peaks.table_pages;
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
        let tuning =
            Tuning { slots: self.options.flush_queue_slots, ms: self.options.flush_queue_ms };
        for policy in &self.options.policies {
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
        let script = Script::new(self.stream(), aperture, self.options.placement);
        let kinds = self.options.allocators.iter().map(|kind| Server::Kind(*kind));
        let servers: Vec<Server> = std::iter::once(Server::Nobody).chain(kinds).collect();
        let mut rounds: Vec<Vec<Round>> = Vec::new();
        let mut fastest: Vec<Fastest> = servers.iter().map(|_| Fastest::new(&script)).collect();
        'rounds: for number in 0..=self.options.repeat {
            let mut round = Vec::new();
            for (server, fastest) in servers.iter().zip(&mut fastest) {
                let what = match server {
                    Server::Kind(kind) => kind.name(),
                    Server::Nobody => "the loop alone",
                };
                self.begin(&match number {
                    0 => format!("{what}, warm-up"),
                    _ => format!("{what}, round {number} of {}", self.options.repeat),
                });
                match script.round(*server, fastest, self.stop)? {
                    Some(figures) => round.push(figures),
                    // A round that not all took part in compares nothing.
                    None => break 'rounds,
                }
                self.done();
            }
            // The first warms up.
            if number > 0 {
                rounds.push(round);
            }
        }
        Self::conclude(&rounds, &fastest, trace);
        Ok(())
    }

    /// Figures of complete rounds; the first column is the loop's own.
    fn conclude(rounds: &[Vec<Round>], fastest: &[Fastest], trace: &mut TraceReport) {
        let column = |index: usize, figure: fn(&Round) -> f64| -> Vec<f64> {
            rounds.iter().map(|round| figure(&round[index])).collect()
        };
        let estimate = |index, figure| Estimate::of(&column(index, figure));
        trace.rounds = rounds.len() as u32;
        trace.loop_ns_per_op = estimate(0, |round| round.both);
        // Behind the recorded guest's row; fewer, if it was stopped before.
        let ours =
            trace.allocators.iter().position(|row| row.name == AllocatorKind::Ringfence.name());
        for (index, row) in trace.allocators.iter_mut().enumerate().skip(1) {
            row.ns_per_op = estimate(index, |round| round.both);
            row.alloc_ns = estimate(index, |round| round.alloc);
            row.free_ns = estimate(index, |round| round.free);
            row.p99_ns = estimate(index, |round| round.p99);
            row.worst_ns = estimate(index, |round| round.worst);
            row.worst_steady_ns = fastest[index].longest();
            row.ratio_to_ringfence = ours.and_then(|ours| {
                Estimate::ratio(
                    &column(index, |round| round.both),
                    &column(ours, |round| round.both),
                )
            });
        }
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
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::replay::sample;

    fn recording(stream: Stream) -> Recording {
        Recording {
            format: crate::replay::Format::Qemu,
            lines: 0,
            damaged: 0,
            damage: Vec::new(),
            maps: 100,
            unmaps: 20,
            attached: 0,
            lost: 0,
            timed: true,
            incomplete: None,
            stream,
        }
    }

    fn run(stream: Stream, options: Options, stop: bool) -> TraceReport {
        let recording = recording(stream);
        let (stop, progress) =
            (AtomicBool::new(stop), Progress::new(Kind::Silent, 1, Duration::ZERO));
        let mut replay = Replay {
            file: "x",
            recording: &recording,
            options: &options,
            stop: &stop,
            progress: &progress,
        };
        let mut trace = replay.describe();
        replay.run(&mut trace).unwrap();
        trace
    }

    fn short() -> Options {
        Options { repeat: 2, progress: Kind::Silent, ..Options::default() }
    }

    #[test]
    fn the_recorded_placement_is_the_recordings_own() {
        let stream = sample::stream();
        let trace = run(stream, short(), false);
        assert_eq!(trace.allocations, trace.frees + trace.live_at_end);
        assert_eq!(trace.operations, trace.allocations + trace.frees);
        assert_eq!((trace.domains, trace.cpus, trace.rounds), (2, 2, 2));
        let recorded = &trace.allocators[0];
        assert_eq!((recorded.name.as_str(), recorded.failures), (RECORDED, 0));
        assert_eq!(recorded.ns_per_op, None);
        // Before the last unmap: what stays, and one buffer.
        assert_eq!(recorded.peak_live_ranges, 51);
        assert_eq!(recorded.table_pages, 2);
        assert_eq!(trace.policies[0].map_requests, 100);
    }

    #[test]
    fn every_allocator_and_policy_has_its_row() {
        let trace = run(sample::stream(), short(), false);
        let names: Vec<&str> = trace.allocators.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, [RECORDED, "rbtree", "bitmap", "magazines", "ringfence"]);
        for row in &trace.allocators[1..] {
            assert_eq!(row.failures, 0, "{}", row.name);
            assert_eq!(row.peak_live_ranges, 51, "{}", row.name);
            assert_eq!(row.peak_live_bytes, trace.peak_live_bytes, "{}", row.name);
            assert_eq!(row.fragmentation_over_time.len(), MOMENTS, "{}", row.name);
            assert!((0.0..1.0).contains(&row.fragmentation), "{}", row.name);
            assert!(row.span_bytes >= trace.peak_live_bytes, "{}", row.name);
            assert!(row.extent_bytes >= row.span_bytes / 2, "{}", row.name);
            for estimate in [row.ns_per_op, row.alloc_ns, row.free_ns, row.ratio_to_ringfence] {
                assert!(estimate.is_some(), "{}", row.name);
            }
        }
        assert_eq!(trace.allocators[4].ratio_to_ringfence.unwrap().median, 1.0);
        assert_eq!(trace.policies.len(), 1 + Policy::ALL.len() - 1);
    }

    #[test]
    fn ours_puts_ranges_where_it_is_told_to() {
        let at = |placement| {
            let options = Options { placement, ..short() };
            let trace = run(sample::stream(), options, false);
            (trace.placement, trace.allocators[4].span_bytes)
        };
        let (name, lowest) = at(Placement::Lowest);
        assert_eq!(name, "lowest");
        // Nothing is kept in slabs: side by side, but for what alignment leaves.
        assert!(lowest <= at(Placement::SizeAligned).1);
    }

    #[test]
    fn without_ours_there_is_no_ratio() {
        let options = Options { allocators: vec![AllocatorKind::RbTree], ..short() };
        let trace = run(sample::stream(), options, false);
        assert_eq!(trace.allocators[1].ratio_to_ringfence, None);
        assert!(trace.allocators[1].ns_per_op.is_some());
    }

    #[test]
    fn an_aperture_that_is_too_small_makes_failures_not_an_error() {
        let options = Options { aperture_bits: Some(16), ..short() };
        let trace = run(sample::stream(), options, false);
        for row in &trace.allocators[1..] {
            assert!(row.failures > 0, "{}", row.name);
            assert!(row.peak_live_bytes <= 2 << 16, "{}", row.name);
        }
        assert!(trace.policies[1].failures.unwrap() > 0);
    }

    #[test]
    fn the_aperture_is_as_wide_as_the_recorded_addresses() {
        use crate::replay::stream::{Derivation, Stamp};
        for (first, bits) in [(0x1000, 32), (1 << 32, 39), (1 << 40, 48), (1 << 63, 64)] {
            let mut derivation = Derivation::new();
            derivation.map(0, first, first + 4095, 0, Stamp::default());
            let trace = run(derivation.finish(), short(), false);
            assert_eq!(trace.aperture_bits, bits);
            assert_eq!(trace.allocators[1].free_ns, None, "nothing is freed");
        }
    }

    #[test]
    fn a_replay_that_is_stopped_tells_what_is_complete() {
        let trace = run(sample::stream(), short(), true);
        assert_eq!((trace.allocators.len(), trace.rounds), (0, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn no_recording_makes_a_replay_fail(
            script in prop::collection::vec(
                (any::<bool>(), 0u32..3, address(), address(), any::<u64>(), 0u64..20_000_000),
                1..60),
            bits in prop::option::of(13u32..=64),
        ) {
            use crate::replay::stream::{Derivation, Stamp};
            let mut derivation = Derivation::new();
            // Nothing to replay is no recording.
            derivation.map(0, 1 << 20, 1 << 21, 0, Stamp::default());
            let mut time_ns = 0;
            for (map, domain, one, other, target, wait) in script {
                time_ns += wait;
                let stamp = Stamp { time_ns: Some(time_ns), cpu: (target % 3) as u16 };
                let (first, last) = (one.min(other), one.max(other));
                match map {
                    true => {
                        let target = target.min(u64::MAX - (last - first));
                        derivation.map(domain, first, last, target, stamp);
                    }
                    false => derivation.unmap(domain, first, last, wait % 2 == 0, stamp),
                }
            }
            let options = Options {
                aperture_bits: bits,
                repeat: 1,
                flush_queue_slots: Some(4),
                policies: Policy::ALL.to_vec(),
                ..short()
            };
            let trace = run(derivation.finish(), options, false);
            prop_assert_eq!(trace.allocators.len(), 5);
            prop_assert_eq!(trace.policies.len(), 1 + Policy::ALL.len());
            for row in &trace.policies[2..] {
                prop_assert!(row.failures.unwrap() <= trace.allocations);
            }
        }
    }

    /// Small ones, so that ranges meet, and any.
    fn address() -> impl Strategy<Value = u64> {
        prop_oneof![
            8 => (0u64..64).prop_map(|page| page * 4096),
            4 => (0u64..64).prop_map(|page| page * 4096 + 4095),
            1 => (0u64..64).prop_map(|page| (page << 30) + 4095),
            1 => any::<u64>(),
            1 => Just(u64::MAX),
        ]
    }

    #[test]
    fn lists_of_policies_name_each_once() {
        assert_eq!(parse_policies("strict, off").unwrap(), [Policy::Strict, Policy::Off]);
        assert!(parse_policies("strict,strict").unwrap_err().contains("twice"));
        assert!(parse_policies(",").unwrap_err().contains("empty"));
        assert_eq!(parse_placement("lowest"), Ok(Placement::Lowest));
        assert!(parse_placement("low").unwrap_err().contains("size-aligned, lowest"));
        assert!(parse_policies("strictest").unwrap_err().contains("lazy-mq+map"));
    }
}
