//! Rounds: every row once, then every row again.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use ringfence_dma::{BounceLimits, Policy, Trust};
use ringfence_drivers::ram::PagedBuffer;
use ringfence_run::slice;

use super::{
    Options, Row, Usage,
    device::{DiskKind, open_disk},
    engine::{self, Control, Counted, JobClone, Phase},
    figures::{Conducted, bounce_sample, iommu_sample},
    link::{Link, LinkPath, local_buffers},
    load::Load,
    path::{FilePath, MemoryPath},
    plan::Plan,
    row::Line,
    target::{Content, DiskChoice, Target},
};
use crate::{
    block::Format,
    job::{Job, JobFile, Scale},
    progress::{Kind, Progress},
    report::{
        Comparison, IommuSample, Iotlb, JobReport, PolicyRounds, Sample, StaleWindow, WaitsSample,
    },
    workload::Workload,
};

/// How a comparison ended.
#[derive(Debug)]
pub struct Ended {
    /// What was measured.
    pub comparison: Comparison,
    /// Strict policies under which unmapped memory was reached: each makes the run a failure.
    pub leaks: Vec<String>,
    /// What went wrong in a round, after which no further one was begun.
    pub failure: Option<anyhow::Error>,
}

/// Time that a round runs before it is measured, at most: queues fill, caches warm, `auto` tries.
const RUN_IN: Duration = Duration::from_millis(200);
/// How long the discarded round runs, at most.
const WARM_UP: Duration = Duration::from_millis(300);
/// What setting a round up takes, roughly, for the time left.
const ROUND_OVERHEAD: Duration = Duration::from_millis(120);
/// The most pieces of a buffer: with what else is in a chain, a queue of 1024 can hold it.
const MOST_PIECES: usize = 1000;

/// Runs the comparison. Sets of rounds are interleaved: every row once, then every row again.
/// `each` gets each job when it has been measured: what is known by then, in which it is the last,
/// and the counts of its rounds, row by row, of which a report has only a summary. `stop` ends it early; what was measured until then is returned.
///
/// # Errors
/// Nothing could be measured at all: the jobs do not fit, or the disk cannot be opened.
pub fn compare(
    file: JobFile,
    options: &Options,
    progress: Kind,
    stop: &AtomicBool,
    each: &mut dyn FnMut(&Comparison, &Job, &[PolicyRounds]),
) -> Result<Ended> {
    options.space.check(&options.allocators)?;
    let rows = options.rows();
    options.tuning.check(&rows)?;
    if options.explain && !rows.contains(&Row::Policy(Policy::Auto)) {
        bail!(Usage(String::from(
            "--explain: only auto chooses, and it is not among the rows asked for"
        )));
    }
    let lines = Line::all(&rows, &options.allocators);
    let mut jobs = file.jobs;
    let mut warnings: Vec<String> = file.warnings.iter().map(ToString::to_string).collect();
    if let Some(runtime) = options.runtime() {
        for job in &mut jobs {
            job.runtime = Some(runtime);
            job.time_based = true;
        }
    }
    let machine = crate::report::Machine::detect();
    let scale = Scale {
        memory: Scale::default_memory(machine.memory_bytes),
        disk_in_memory: !matches!(options.disk, DiskChoice::Path(_)),
    };
    let changes = scale.apply(&mut jobs);
    warnings.extend(changes.map_err(|error| Usage(format!("{}: {error}", file.file)))?);
    let disk_bytes = Scale::disk_bytes(&jobs).next_multiple_of(4096);

    let trust = options.tuning.trust.trust(&options.disk)?;
    if trust != Trust::Trusted && rows.contains(&Row::Policy(Policy::Off)) {
        warnings.push(format!(
            "the disk is {trust}; off is run all the same, since the others are measured by it"
        ));
    }
    let destroy = options.destroy_data;
    let target = Target::open(&options.disk, disk_bytes, &jobs, destroy, &mut warnings)?;
    let sizes = jobs.iter().flat_map(|job| {
        job.block_sizes().map(u64::from).chain(std::iter::once(job.offset)).collect::<Vec<_>>()
    });
    let format = Format::for_sizes(sizes, generation());
    // Files may be in a page cache, with or without O_DIRECT (tmpfs): reads there are not atomic.
    let tears = target.kind == DiskKind::File && jobs.iter().any(|job| job.rw.writes());
    let content = Content { format, foreign: target.foreign, tears };
    let stages = JobFile::stages(&jobs);
    let longest = jobs.iter().filter_map(|job| job.runtime).max().unwrap_or_default();
    let comparison = Comparison {
        disk: options.disk.describe(),
        notify: options.notify.to_string(),
        allocators: options.allocators.iter().map(ToString::to_string).collect(),
        placement: options.space.placement.to_string(),
        aperture_bits: options.space.aperture_bits,
        live_ranges: options.space.live,
        tuning: options.tuning,
        load_threads: options.load,
        rounds: options.repeat,
        runtime_s: longest.as_secs_f64(),
        warnings,
        ..Comparison::new()
    };
    let per_set = (stages.len() * lines.len()) as u32;
    let expected: Duration = stages
        .iter()
        .flat_map(|stage| (0..=options.repeat).map(|round| expected(&jobs[stage.clone()], round)))
        .sum::<Duration>()
        * lines.len() as u32;
    let progress = Progress::new(progress, u64::from(per_set * (options.repeat + 1)), expected);
    comparison.warnings.iter().for_each(|line| progress.note(line));
    if target.kind == DiskKind::File && !target.foreign {
        progress.note(&format!("filling {} of the disk", crate::text::bytes(disk_bytes)));
        target.lay_out(disk_bytes, content, stop)?;
    }

    let load = Load::start(options.load).context("starting the threads of --load")?;
    let mut ended = Ended { comparison, leaks: Vec::new(), failure: None };
    for (number, range) in stages.into_iter().enumerate() {
        if ended.failure.is_some() || stop.load(Ordering::Relaxed) {
            break;
        }
        let jobs = &jobs[range];
        let target = &target;
        let stage =
            Stage { jobs, lines: &lines, options, target, trust, content, load: &load, stop };
        let rows = stage.run_all(&progress, &mut ended);
        ended.comparison.interrupted = stop.load(Ordering::Relaxed);
        for (index, job) in stage.jobs.iter().enumerate() {
            let rounds: Vec<PolicyRounds> = rows.iter().map(|row| row[index].clone()).collect();
            if rounds.iter().any(|row| !row.rounds.is_empty()) {
                ended.comparison.jobs.push(JobReport::new(job, number as u32 + 1, &rounds));
                progress.hidden(|| each(&ended.comparison, job, &rounds));
            }
        }
    }
    ended.comparison.interrupted = stop.load(Ordering::Relaxed);
    Ok(ended)
}

/// What a round of a row of these jobs takes, roughly.
fn expected(jobs: &[Job], round: u32) -> Duration {
    // The length of a job that ends by itself is unknown.
    let longest = jobs.iter().map(|job| job.runtime.unwrap_or(WARM_UP)).max().unwrap_or_default();
    let measured = if round == 0 { longest.min(WARM_UP) } else { longest };
    measured + RUN_IN + ROUND_OVERHEAD
}

/// A number that distinguishes this run's blocks from those of earlier runs.
fn generation() -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(1, |now| now.as_secs() as u32 ^ now.subsec_nanos()) | 1
}

/// Jobs that run at the same time.
struct Stage<'a> {
    jobs: &'a [Job],
    lines: &'a [Line],
    options: &'a Options,
    target: &'a Target,
    /// Whether it is trusted.
    trust: Trust,
    content: Content,
    load: &'a Load,
    stop: &'a AtomicBool,
}

impl Stage<'_> {
    /// All rounds of all rows: for each row, and each job of the stage, its rounds.
    fn run_all(&self, progress: &Progress, ended: &mut Ended) -> Vec<Vec<PolicyRounds>> {
        let names: Vec<&str> = self.jobs.iter().map(|job| job.name.as_str()).collect();
        let names = names.join(" + ");
        let fresh = |line: &Line| PolicyRounds {
            policy: line.row.to_string(),
            allocator: line.allocator.map(|kind| kind.to_string()),
            ..PolicyRounds::default()
        };
        let rows = self.lines.iter().map(|line| vec![fresh(line); self.jobs.len()]);
        let mut rows: Vec<Vec<PolicyRounds>> = rows.collect();
        for round in 0..=self.options.repeat {
            for (line, results) in self.lines.iter().zip(&mut rows) {
                let label = match self.options.allocators.len() {
                    1 => line.row.to_string(),
                    _ => line.to_string(),
                };
                let what = match round {
                    0 => format!("{names}: {label}, warm-up"),
                    _ => format!("{names}: {label}, round {round} of {}", self.options.repeat),
                };
                progress.begin(&what);
                let measured = match self.run_row(*line, round) {
                    Ok(measured) => measured,
                    // An error while everything is being stopped is no finding.
                    Err(_) if self.stop.load(Ordering::Relaxed) => return rows,
                    Err(error) => {
                        ended.failure = Some(error.context(what));
                        return rows;
                    }
                };
                progress.step(expected(self.jobs, round));
                if let Some(leak) = measured.leak {
                    ended.leaks.push(format!("{what}: {leak}"));
                }
                if let Some(failure) = measured.failure {
                    ended.failure = Some(failure.context(what));
                    return rows;
                }
                for (kept, (sample, counted)) in results.iter_mut().zip(measured.samples) {
                    kept.effective_policy.clone_from(&measured.effective);
                    kept.fallback.clone_from(&measured.fallback);
                    // `auto` has learnt the most in the last round.
                    kept.explain.clone_from(&measured.explain);
                    if counted.torn > 0 && !kept.warnings.iter().any(|warning| warning == TORN) {
                        kept.warnings.push(TORN.to_owned());
                    }
                    let first =
                        counted.first_error.map(|error| format!("the first error: {error}"));
                    // The first round warms up, and is discarded, except for its errors.
                    if round > 0 {
                        if kept.rounds.iter().all(|round| round.errors == 0) {
                            kept.warnings.extend(first);
                        }
                        kept.rounds.push(sample);
                    } else if sample.errors > 0 {
                        let (errors, first) = (sample.errors, first.unwrap_or_default());
                        ended.failure = Some(anyhow!("{what}: {errors} I/Os failed; {first}"));
                        return rows;
                    }
                }
            }
        }
        rows
    }

    /// How many threads, each with a queue and a device worker, the jobs run on.
    fn threads(&self) -> u16 {
        let clones: u32 = self.jobs.iter().map(|job| job.numjobs).sum();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let queues = self.options.queues.unwrap_or((cpus / 2).clamp(1, 64) as u16);
        queues.clamp(1, clones.min(u16::MAX.into()) as u16)
    }

    /// For each thread, its clones, dealt in turn, so that threads have equal shares. They have no
    /// buffers yet.
    fn deal(&self, threads: u16, round: u32) -> Vec<Vec<JobClone>> {
        let clones = self.jobs.iter().enumerate().flat_map(|(index, job)| {
            // A job that ends before the others ends by itself, the rest are stopped.
            let runtime = job.runtime.filter(|&own| self.runtime() != Some(own));
            (0..job.numjobs).map(move |number| JobClone {
                job: index,
                // The same I/Os for all rows of a round, others in the next.
                workload: Workload::new(job, number, u64::from(round)),
                runtime_ns: runtime.map_or(u64::MAX, |time| time.as_nanos() as u64),
                buffers: BTreeMap::new(),
            })
        });
        let threads = usize::from(threads);
        (0..threads).map(|thread| clones.clone().skip(thread).step_by(threads).collect()).collect()
    }

    /// How long a round is measured at most: until the last job is over. `None` if one has no
    /// `runtime` and ends when its area is done.
    fn runtime(&self) -> Option<Duration> {
        let all: Option<Vec<Duration>> = self.jobs.iter().map(|job| job.runtime).collect();
        all?.into_iter().max()
    }

    fn run_row(&self, Line { row, allocator }: Line, round: u32) -> Result<Measured> {
        let threads = self.threads();
        let clones = self.deal(threads, round);
        // The lengths of a clone's buffers.
        let lens = |clone: &JobClone| {
            let job = &self.jobs[clone.job];
            std::iter::repeat_n(job.max_block() as usize, job.iodepth as usize)
        };
        let depths = clones.iter().map(|own| own.iter().flat_map(lens).count());
        let depth = depths.max().unwrap_or(1);
        let buffers: Vec<usize> = clones.iter().flatten().flat_map(lens).collect();
        // A buffer must fit into a chain of descriptors, whatever its pages' order.
        let pages = buffers.iter().copied().max().unwrap_or(1).div_ceil(4096);
        let run_pages = self.options.run_pages.max(pages.div_ceil(MOST_PIECES)).max(1);
        let &Options { space, notify, tuning, .. } = self.options;
        if !matches!(row, Row::Host | Row::IoUring) {
            let plan = Plan {
                row,
                // Not used under `off`.
                allocator: allocator.unwrap_or_default(),
                space,
                notify,
                tuning,
                target: self.target,
                // `off` is the base of all ratios: it is run, with a warning. A proxy copies by itself.
                trust: if row.policy() == Policy::Off { Trust::Trusted } else { self.trust },
                queues: threads,
                depth: depth + 1,
                pieces: pages.div_ceil(run_pages) + 1,
                buffers,
                run_pages,
                idle_ms: BounceLimits::default().idle_ms,
            };
            return self.run_linked(&plan, clones, round);
        }
        let buffers = local_buffers(&buffers, run_pages)?;
        let Target { kind, file, bytes, .. } = self.target;
        let disk = (row == Row::Host && *kind != DiskKind::File)
            .then(|| open_disk(*kind, file.try_clone()?, *bytes))
            .transpose()?;
        let path = |_| -> Result<LinkPath> {
            Ok(match &disk {
                Some(disk) => Box::new(MemoryPath::new(disk.clone(), depth, notify)),
                None => Box::new(FilePath::new(file, depth, notify)?),
            })
        };
        let mut paths = (0..threads).map(path).collect::<Result<Vec<_>>>()?;
        let conducted = self.conduct(&mut paths, clones, buffers, round, None)?;
        Ok(Measured { samples: conducted.samples(self.jobs, |_, _, _| ()), ..Measured::default() })
    }

    fn run_linked(
        &self,
        plan: &Plan<'_>,
        clones: Vec<Vec<JobClone>>,
        round: u32,
    ) -> Result<Measured> {
        let (link, mut paths, buffers) = Link::open(plan)?;
        let dma = &link.behind.dma;
        let protected = plan.is_protected();
        let conducted = self.conduct(&mut paths, clones, buffers, round, Some(&link));
        let probes = paths.iter().filter_map(|path| path.probe());
        let found = probes.fold(StaleWindow::default(), |sum, probe| sum.and(probe.found));
        let leak = (dma.effective_policy().is_strict() && found.accesses > 0).then(|| {
            format!(
                "after unmap had returned, the device reached the memory in {} of {} attempts, \
                 up to {:.3} ms later",
                found.accesses, found.probes, found.max_ms
            )
        });
        // Memory that was reached after its unmap is the finding, whatever else failed.
        let conducted = match (conducted, leak.is_some()) {
            (Err(failure), true) => {
                return Ok(Measured { leak, failure: Some(failure), ..Measured::default() });
            }
            (conducted, _) => conducted?,
        };
        drop(paths);
        // What is still queued was exposed until now.
        dma.flush().context("the last flush")?;
        if let Some(pools) = dma.pools() {
            let slots = pools.stats().slots;
            ensure!(slots == 0, "{slots} bounce slots were not given back: {:?}", pools.holders());
        }
        let exposure = protected.then(|| dma.stats());
        let pool_bytes = dma.pools().map(|pools| pools.stats().peak_bytes);
        let explain = dma.choices().map(|choices| choices.to_string());
        let fallback = dma.fallback().map(|why| why.to_string());
        let effective = match (plan.row, dma.effective_policy()) {
            // The device process offers what is proposed.
            (Row::LazyDomain(_), policy) if policy.is_lazy() => Row::LazyDomain(policy),
            (Row::LazyDomain(_) | Row::Policy(_), policy) => Row::Policy(policy),
            // A way that keeps its buffers mapped is no strict policy, whatever unmaps them in the end.
            (row, _) => row,
        };
        let report = link.close()?;
        // Nothing is unmapped while it runs, so there is nothing to probe.
        let probed = exposure.filter(|_| !plan.row.stays_mapped());
        let stale = probed.map(|counted| {
            let byte_ms = counted.exposure.byte_ns as f64 / 1e6;
            StaleWindow { byte_ms, ..found }
        });
        let iotlb = protected.then_some(Iotlb {
            hits: report.iotlb_hits,
            misses: report.iotlb_misses,
            invalidations: report.iommu_syncs,
        });
        let all_ios = conducted.ios();
        let thread_ns = conducted.thread_ns();
        // Thread time in taking and giving back the memory of requests.
        let memory_ns = conducted.ran.iter().map(|ran| ran.memory_ns).sum::<u64>() as f64;
        // Jobs that run at the same time share one IOMMU.
        let samples = conducted.samples(self.jobs, |sample, stock, share| {
            let [before, after] = stock;
            if protected {
                let iommu = iommu_sample(stock, share);
                let waits = after.waits.since(&before.waits);
                let waits = WaitsSample { waits, ios: all_ios, thread_ns };
                let cpu_ns = iommu.cpu_ns + (memory_ns * share) as u64;
                sample.iommu = Some(IommuSample { cpu_ns, waits, ..iommu });
            }
            sample.bounce = pool_bytes.map(|bytes| bounce_sample(stock, share, bytes));
            let kicks = (after.iommu.kicks - before.iommu.kicks) as f64 * share;
            sample.kicks = sample.kicks.map(|own| own + kicks as u64);
            sample.stale = stale;
            sample.exposure = exposure;
            sample.iotlb = iotlb;
        });
        let effective = effective.to_string();
        Ok(Measured { samples, effective, fallback, explain, leak, failure: None })
    }

    /// Runs the threads through a round and takes stock at the beginning and the end of its
    /// measured part.
    fn conduct(
        &self,
        paths: &mut [LinkPath],
        mut clones: Vec<Vec<JobClone>>,
        buffers: Vec<PagedBuffer>,
        round: u32,
        link: Option<&Link>,
    ) -> Result<Conducted> {
        let mut buffers = buffers.into_iter();
        for clone in clones.iter_mut().flatten() {
            let own = buffers.by_ref().take(self.jobs[clone.job].iodepth as usize);
            clone.buffers = (0..).zip(own).collect();
        }
        let threads = paths.len() as u32;
        let (jobs, content) = (self.jobs.len(), self.content);
        let control = &Control::default();
        let endless = self.jobs.iter().all(|job| job.time_based && job.runtime.is_some());
        let runtime = match (self.runtime(), round) {
            (runtime, 0) => Some(runtime.unwrap_or(WARM_UP).min(WARM_UP)),
            (runtime, _) => runtime,
        };
        // A job that ends by itself is measured from its first I/O.
        let run_in =
            if endless { RUN_IN.min(runtime.unwrap_or_default() / 3) } else { Duration::ZERO };
        let take_stock = || {
            let load_ns = self.load.cpu_ns();
            let device_ns = || link.map_or(0, Link::device_cpu_ns);
            let stock = link.map(Link::stock);
            let own = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
            let own_ns = own.tv_sec as u64 * 1_000_000_000 + own.tv_nsec as u64;
            (stock, own_ns.saturating_sub(load_ns) + device_ns(), load_ns)
        };
        // Which process ended, and how, if one has.
        let lost = || link.and_then(Link::lost);
        let mut before = take_stock();
        if run_in.is_zero() {
            control.enter(Phase::Measured);
        }
        let mut begun = Instant::now();
        std::thread::scope(|scope| {
            let started = paths.iter_mut().zip(clones).map(|(path, clones)| {
                scope.spawn(move || {
                    slice::shorten();
                    engine::run(&mut **path, clones, jobs, content, control)
                })
            });
            let handles: Vec<_> = started.collect();
            let wait = |limit: Option<Duration>| {
                let begun = Instant::now();
                loop {
                    if self.stop.load(Ordering::Relaxed) {
                        return false;
                    }
                    // Ordering: as in `engine`, flags by which threads agree that it is over.
                    let over = control.finished.load(Ordering::Acquire) >= threads
                        || control.failed.load(Ordering::Acquire);
                    if over {
                        return true;
                    }
                    if lost().is_some() {
                        control.abandoned.store(true, Ordering::Relaxed);
                        return true;
                    }
                    let left = limit.map(|limit| limit.saturating_sub(begun.elapsed()));
                    let left = left.unwrap_or(Duration::MAX);
                    if left.is_zero() {
                        return true;
                    }
                    let step = if endless { 50 } else { 1 };
                    std::thread::sleep(left.min(Duration::from_millis(step)));
                }
            };
            let mut go_on = true;
            if !run_in.is_zero() {
                go_on = wait(Some(run_in));
                before = take_stock();
                begun = Instant::now();
                control.enter(Phase::Measured);
            }
            let go_on = go_on && wait(runtime);
            let elapsed = begun.elapsed();
            let after = take_stock();
            control.enter(Phase::Ending);
            let mut ran = Vec::new();
            let mut failure = None;
            for handle in handles {
                match handle.join() {
                    Ok(Ok(one)) => ran.push(one),
                    Ok(Err(error)) => failure = failure.or(Some(error)),
                    Err(_) => failure = Some(anyhow!("a job thread panicked")),
                }
            }
            if let Some(error) = failure {
                // The end of a process is the cause, whatever noticed it first; it may take a moment until
                // its parent can see it.
                for _ in 0..50 {
                    if let Some((process, status)) = lost() {
                        bail!("the {process} ended in the middle ({status})");
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                return Err(error);
            }
            if !go_on {
                bail!("stopped");
            }
            Ok(Conducted {
                elapsed,
                limit: self.runtime(),
                begun_ns: control.measured_ns().unwrap_or(0),
                cpu_ns: after.1.saturating_sub(before.1),
                load: self.load.cpu_share(after.2.saturating_sub(before.2), elapsed),
                stock: before.0.zip(after.0).map(<[_; 2]>::from),
                ran,
            })
        })
    }
}

/// The warning of a row in which reads came back torn.
const TORN: &str = "reads that met a write to the same block half-way were repeated";

/// One round of one row.
#[derive(Default)]
struct Measured {
    /// One per job.
    samples: Vec<(Sample, Counted)>,
    effective: String,
    /// Why that is not the requested policy.
    fallback: Option<String>,
    /// What `auto` chose, and why.
    explain: Option<String>,
    leak: Option<String>,
    /// What broke a round that leaked.
    failure: Option<anyhow::Error>,
}
