//! `ringfence compare`.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Result;
use clap::Args;
use ringfence_lab::{
    allocators::AllocatorKind,
    job::JobFile,
    list::{List, number, seconds},
    report,
    run::{
        DiskChoice, Ended, Notify, Options, Row, compare,
        space::{MOST_LIVE, NARROWEST, PlacementName, Space, WIDEST},
        tuning::{TrustChoice, Tuning},
    },
};

use crate::lab::session::{Begun, Session, conclude, untold};
use crate::output::Output;

/// Rounds and seconds for which the default jobs take under two minutes.
const DEFAULT_REPEAT: u32 = 5;
const DEFAULT_RUNTIME: Duration = Duration::from_millis(650);

/// More busy threads than this show nothing new: a row's threads then hardly run.
const MOST_LOAD: i64 = 1024;

/// Runs a fio job under every DMA policy and prints what each costs.
///
/// A driver process runs the job; a device process serves the disk. Between them are real
/// virtqueues, a virtio-iommu and its translation: every figure is measured between the two.
/// Without a job file, two jobs run one after the other: 64 KiB random writes (16 jobs, 16 deep)
/// and 4 KiB random reads and writes (128 deep).
#[derive(Args)]
#[command(after_help = "EXAMPLES:
    ringfence compare
    ringfence compare --repeat 30 --runtime 10                      the protocol of the mailing list
    ringfence compare my.fio --policy off,strict+map --disk ram
    ringfence compare my.fio --policy off,strict+map --allocator rbtree,bitmap,ringfence
    ringfence compare my.fio --policy off,strict+map,lazy-mq+map --max-exposure-ms 2
    ringfence compare my.fio --policy off,strict+map,bounce,auto,zero-copy --explain
    ringfence compare --load 2                                      beside two busy threads
    ringfence compare my.fio --disk /dev/nvme1n1 --destroy-data --report report.html

EXIT STATUS:
    0   done
    1   an I/O failed or came back wrong, a strict policy leaked, a process died, or Ctrl-C
    2   wrong usage: nothing was run")]
pub(crate) struct Arguments {
    /// A fio job file. Its `filename` is never opened: --disk decides.
    job: Option<PathBuf>,

    /// The rows of the table, separated by commas: host, io_uring, persistent, zero-copy, off,
    /// strict, strict+map, lazy-sq, lazy-mq, lazy-sq+map, lazy-mq+map, bounce, auto [default: all
    /// but io_uring, which --disk ram adds, persistent and zero-copy].
    ///
    /// `bounce` copies each buffer into a slot that stays mapped, and back; `auto` copies or maps,
    /// whichever is cheaper.
    ///
    /// `persistent` maps the job's buffers once, before its first I/O, and unmaps them after its
    /// last: the IOMMU gets no request in between, and the device can access the buffers all the
    /// while.
    ///
    /// `zero-copy` takes memory of the bounce pools for each I/O, fills or reads it in place and
    /// gives it back: nothing is copied or mapped, and the device can access that memory all the
    /// while.
    ///
    /// A lazy policy with `+flush` behind it, such as `lazy-mq+map+flush`, runs in a lazy domain of
    /// the virtio-iommu: a proposal (virtio-spec issue 204), not part of the specification. The
    /// device completes an UNMAP at once, and invalidates when an IOTLB_FLUSH asks for it.
    #[arg(long, value_name = "LIST")]
    policy: Option<List<Row>>,

    /// The allocators of I/O virtual addresses (IOVAs), separated by commas: rbtree, bitmap,
    /// magazines, ringfence. With several, each policy that maps is run with each of them, in rows
    /// such as `strict+map/rbtree`.
    ///
    /// `rbtree` searches a red-black tree of the used ranges from the top down, `bitmap` a bit for
    /// each page by next fit (in at most 256 GiB of the aperture), `magazines` is the tree with
    /// Linux's caches per CPU in front, `ringfence` is Ringfence's own. All of them first try
    /// addresses below 4 GiB, as for a PCI device.
    #[arg(long, value_name = "LIST", default_value = "ringfence")]
    allocator: List<AllocatorKind>,

    /// Where `ringfence` puts ranges: `size`, adjacent by size, from the top; `lowest` or
    /// `highest`, at the lowest or the highest place that fits; `ring`, in one chunk for all that
    /// is in flight, cut in turn (what does not fit it as under `size`).
    #[arg(long, value_name = "NAME", default_value_t = PlacementName::default())]
    placement: PlacementName,

    /// Bits of an I/O virtual address, 32 to 57: 32 is what every PCI device can address; 39, 48 and
    /// 57 are what page tables of three, four and five levels translate.
    #[arg(long, value_name = "BITS", default_value_t = Space::default().aperture_bits,
        value_parser = clap::value_parser!(u32).range(i64::from(NARROWEST)..=i64::from(WIDEST)))]
    aperture: u32,

    /// Ranges of 1 to 6 pages that are allocated before a round begins and stay allocated,
    /// scattered among as many holes: the mappings of the rest of the system. The device cannot
    /// access them.
    #[arg(long, value_name = "N", default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(..=i64::from(MOST_LIVE)))]
    live: u32,

    /// The disk: `paced` (memory at the pace of an SSD: 2.5 GiB/s, 600,000 IOPS, 80 us), `ram`
    /// (memory, unpaced: the harshest case), or a file or block device.
    #[arg(long, value_name = "paced|ram|PATH", default_value = "paced")]
    disk: String,

    /// Lets jobs write to a file or device that exists. Its content is lost.
    #[arg(long)]
    destroy_data: bool,

    /// How both ends of a ring wait: `adaptive` spins for a while and then sleeps, and does not
    /// spin where other threads want the CPU; `poll` only spins; `sleep` always sleeps, so that
    /// each wait costs a wake-up.
    #[arg(long, value_name = "MODE", default_value_t = Notify::Adaptive)]
    notify: Notify,

    /// Measured rounds of every row; one more before them warms up and is discarded.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_REPEAT,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,

    /// Seconds that each job runs in a round [default: as in the job file; 0.65 without one].
    #[arg(long, value_name = "S", value_parser = seconds)]
    runtime: Option<Duration>,

    /// Queues of the disk, with a job thread and a device worker each [default: half of the
    /// processors].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: Option<u16>,

    /// Adjacent pages of a buffer in guest memory. An application that has run for a while has
    /// single ones.
    #[arg(long, value_name = "PAGES", default_value_t = 1,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    page_run: usize,

    /// The most requests that share one map sync, under a policy with `+map`, and the most that
    /// share one unmap sync under `strict+map`: as many as are there, never waiting for more. 1
    /// maps and unmaps each on its own, as on the mailing list.
    #[arg(long, value_name = "N", default_value_t = Tuning::BATCH,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1024))]
    batch: usize,

    /// The most buffers that become one mapping, where they are adjacent in guest memory (see
    /// --page-run) and have the same direction; it is unmapped whole, after its last I/O.
    #[arg(long, value_name = "N", default_value_t = Tuning::CHUNK,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1024))]
    chunk: usize,

    /// Slots of each flush queue [default: 32768 for lazy-sq, 256 for lazy-mq].
    #[arg(long, value_name = "N",
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(2..=1 << 20))]
    flush_queue_slots: Option<usize>,

    /// How long an unmapped range waits for its flush at most [default: 1000 for lazy-sq, 10 for
    /// lazy-mq].
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=600_000))]
    flush_queue_ms: Option<u64>,

    /// Entries of a flush queue at which its flush starts, before the queue is full and an unmap
    /// must wait for one.
    #[arg(long, value_name = "N",
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..1 << 20))]
    high_water: Option<usize>,

    /// The longest that memory may stay reachable after it was unmapped, whatever the flush queue's
    /// slots and time.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=600_000))]
    max_exposure_ms: Option<u64>,

    /// The most bytes that may be unmapped and still reachable, all queues together: a number, or
    /// one with k, m or g (powers of 1024), at least a page.
    #[arg(long, value_name = "BYTES", value_parser = parse_bound)]
    max_exposure_bytes: Option<u64>,

    /// The longest mapping that `bounce` copies; longer ones are mapped, strictly. A number of
    /// bytes, or one with k, m or g (powers of 1024) [default: 1m].
    #[arg(long, value_name = "BYTES", value_parser = parse_threshold)]
    bounce_threshold: Option<u64>,

    /// The most bytes of bounce slots that the disk may hold at a time, as a size like the above,
    /// at least a page. A buffer without a slot is mapped; an I/O that must not be mapped fails
    /// [default: 256m, for `zero-copy` at least what the jobs need].
    #[arg(long, value_name = "BYTES", value_parser = parse_bound)]
    bounce_quota: Option<u64>,

    /// Busy threads that run beside every row, `off` and `host` included: the ratios then show the
    /// price of protection on a host with shared CPUs. The share of time that these threads had a
    /// CPU is printed under the table.
    #[arg(long, value_name = "N", default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(..=MOST_LOAD))]
    load: u32,

    /// Prints every figure: intervals, times in map and unmap, requests, exposure, waits.
    #[arg(long)]
    details: bool,

    /// Prints what `auto` chose for which mappings, and why.
    #[arg(long)]
    explain: bool,

    /// Whether the disk is trusted: `auto`, as the machine says; `trusted`; `untrusted`, which is
    /// lazy in no row, whatever its name (the table says so), and gets a copy of any buffer that
    /// shares a page.
    #[arg(long, value_name = "auto|trusted|untrusted", default_value_t = TrustChoice::Auto)]
    trust: TrustChoice,

    /// Writes a report with charts, one self-contained HTML file; or, for a name that ends in .svg,
    /// the price of safety as a picture.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,

    #[command(flatten)]
    session: Session,
}

/// A size in bytes, at least a page: with a smaller bound no range could wait, or be copied.
fn parse_bound(text: &str) -> Result<u64, String> {
    parse_size(text, 4096)
}

/// A size in bytes, at least that of the shortest I/O.
fn parse_threshold(text: &str) -> Result<u64, String> {
    parse_size(text, 512)
}

fn parse_size(text: &str, least: u64) -> Result<u64, String> {
    // No sign: the standard library's parser would take a `+`.
    let bytes = match text.starts_with('+') {
        true => None,
        false => number(text, "", ("kmg", 1024), least..=u64::MAX).ok(),
    };
    bytes.ok_or_else(|| {
        format!("a number of bytes, at least {least}, with k, m or g (powers of 1024) if wanted")
    })
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let (jobs, runtime) = match &arguments.job {
        Some(path) => (JobFile::load(path)?, arguments.runtime),
        None => {
            // Warnings about our own file are not worth printing.
            let jobs = JobFile { warnings: Vec::new(), ..JobFile::seed() };
            (jobs, arguments.runtime.or(Some(DEFAULT_RUNTIME)))
        }
    };
    let disk = DiskChoice::parse(&arguments.disk);
    let rows = arguments.policy.map_or_else(
        || {
            let mut rows = Row::defaults();
            if disk == DiskChoice::Ram {
                rows.insert(1, Row::IoUring);
            }
            rows
        },
        |rows| rows.0,
    );
    let Begun { json, progress, stop } = arguments.session.begin()?;
    let report_file = arguments.report.as_deref().map(Output::open).transpose()?;
    let table = !json.iter().chain(&report_file).any(Output::is_stdout);

    let options = Options {
        rows,
        allocators: arguments.allocator.0,
        space: Space {
            placement: arguments.placement,
            aperture_bits: arguments.aperture,
            live: arguments.live,
        },
        disk,
        destroy_data: arguments.destroy_data,
        notify: arguments.notify,
        repeat: arguments.repeat,
        runtime,
        queues: arguments.queues,
        run_pages: arguments.page_run,
        tuning: Tuning {
            flush_queue_slots: arguments.flush_queue_slots,
            flush_queue_ms: arguments.flush_queue_ms,
            high_water: arguments.high_water,
            max_exposure_ms: arguments.max_exposure_ms,
            max_exposure_bytes: arguments.max_exposure_bytes,
            batch: arguments.batch,
            chunk: arguments.chunk,
            bounce_threshold: arguments.bounce_threshold,
            bounce_quota: arguments.bounce_quota,
            trust: arguments.trust,
        },
        load: arguments.load,
        explain: arguments.explain,
        progress,
    };
    let Ended { mut comparison, leaks, failure } = compare(jobs, &options, &stop)?;

    let measured = !comparison.jobs.is_empty();
    let mut verdict: Vec<String> = leaks.iter().map(|leak| format!("LEAK: {leak}")).collect();
    verdict.extend(failure.map(|failure| format!("error: {}", crate::explain(&failure))));
    if comparison.interrupted {
        verdict.push(match measured {
            true => "interrupted: the figures are of the rounds that were complete".to_owned(),
            false => "interrupted before a round was complete".to_owned(),
        });
    }
    let errors = comparison.errors();
    if errors > 0 {
        verdict.push(format!("error: {errors} I/Os failed or came back wrong"));
    }

    // Files outlive the terminal: they contain all warnings.
    let told = comparison.warnings.clone();
    comparison.warnings.extend(verdict.iter().cloned());
    let json = json.map_or(Ok(()), |output| output.write(&report::json::render(&comparison)));
    let picture =
        arguments.report.as_ref().and_then(|path| path.extension()) == Some("svg".as_ref());
    let report_file = report_file.map_or(Ok(()), |output| {
        output.write(&match picture {
            true => report::picture::render(&comparison),
            false => report::html::render(&comparison),
        })
    });
    comparison.warnings = untold(told, progress);
    let mut shown = String::new();
    if table && measured {
        shown.push_str(&match arguments.details {
            true => report::table::render(&comparison),
            false => report::summary::render(&comparison, verdict.is_empty()),
        });
        if arguments.explain {
            shown.push_str(&report::table::explain(&comparison));
        }
    }
    conclude(&shown, &verdict, json.and(report_file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_powers_of_1024() {
        for (text, bytes) in
            [("4096", 4096), ("64k", 64 << 10), ("1m", 1 << 20), ("1M", 1 << 20), ("3G", 3 << 30)]
        {
            assert_eq!(parse_bound(text), Ok(bytes), "{text}");
        }
        for text in ["", "k", "0", "4095", "3k", "+64k", "-1", "1.5m", "64kb", "64 k", "1t", "ä"] {
            assert!(parse_bound(text).unwrap_err().contains("powers of 1024"), "{text}");
        }
        assert_eq!(parse_threshold("512"), Ok(512));
        assert!(parse_threshold("511").unwrap_err().contains("at least 512"));
        // Larger than 2^64.
        assert!(parse_bound("99999999999999g").is_err());
        assert!(parse_bound("18446744073709551616").is_err());
    }
}
