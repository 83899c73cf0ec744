//! `ringfence compare`.

use std::{
    io::Write,
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use anyhow::{Context, Result};
use clap::{ArgAction, Args};
use ringfence_lab::{
    job::JobFile,
    progress::Kind,
    report,
    run::{DiskChoice, Notify, Options, Row, compare},
};

/// Rounds and seconds that let the default jobs end in under two minutes.
const DEFAULT_REPEAT: u32 = 5;
const DEFAULT_RUNTIME: Duration = Duration::from_millis(900);

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
    ringfence compare my.fio --disk /dev/nvme1n1 --destroy-data --report report.html")]
pub(crate) struct Arguments {
    /// A fio job file. Its `filename` is never opened: --disk decides.
    job: Option<PathBuf>,

    /// The rows of the table, separated by commas: host, io_uring, off, strict, strict+map,
    /// lazy-sq, lazy-mq, lazy-sq+map, lazy-mq+map [default: all but io_uring, which --disk ram
    /// adds].
    #[arg(long, value_name = "LIST", value_parser = parse_rows)]
    policy: Option<Rows>,

    /// The disk: `paced` (memory at the pace of an SSD: 2.5 GiB/s, 600,000 IOPS, 80 us), `ram`
    /// (memory, unpaced: the harshest case), or a file or block device.
    #[arg(long, value_name = "paced|ram|PATH", default_value = "paced")]
    disk: String,

    /// Lets jobs write to a file or device that exists. What is on it is lost.
    #[arg(long)]
    destroy_data: bool,

    /// How both ends of a ring wait: `adaptive` spins for a while and then sleeps, `poll` only
    /// spins, `sleep` always sleeps, so that each wait costs a wake-up.
    #[arg(long, value_name = "MODE", default_value_t = Notify::Adaptive)]
    notify: Notify,

    /// Measured rounds of every row; one more before them warms up and is discarded.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_REPEAT,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,

    /// Seconds that each job runs in a round [default: as the job file says; 0.9 without one].
    #[arg(long, value_name = "S", value_parser = parse_seconds)]
    runtime: Option<Duration>,

    /// Queues of the disk, with a job thread and a device worker each [default: half of the
    /// processors].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: Option<u16>,

    /// Pages of a buffer that lie side by side in guest memory. An application that has run for a
    /// while has single ones.
    #[arg(long, value_name = "PAGES", default_value_t = 1,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    page_run: usize,

    /// Slots of each flush queue [default: 32768 for lazy-sq, 256 for lazy-mq].
    #[arg(long, value_name = "N",
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(2..=1 << 20))]
    flush_queue_slots: Option<usize>,

    /// How long an unmapped range waits for its flush at most [default: 1000 for lazy-sq, 10 for
    /// lazy-mq].
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=600_000))]
    flush_queue_ms: Option<u64>,

    /// Writes everything that was measured as JSON; `-` prints it, and nothing else.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Writes a report with charts, one self-contained HTML file.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,

    /// Shows no progress.
    #[arg(long, short, action = ArgAction::SetTrue)]
    quiet: bool,
}

/// The rows asked for (a type of its own, since clap takes a bare `Vec` for a repeated option).
#[derive(Clone)]
struct Rows(Vec<Row>);

fn parse_rows(text: &str) -> Result<Rows, String> {
    Row::parse_list(text).map(Rows)
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds, such as 10 or 0.5")?;
    if (0.01..=86_400.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("from 0.01 to 86400 seconds".to_owned())
    }
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let (jobs, runtime) = match &arguments.job {
        Some(path) => (JobFile::load(path)?, arguments.runtime),
        None => (JobFile::seed(), arguments.runtime.or(Some(DEFAULT_RUNTIME))),
    };
    let prints_json = arguments.json.as_deref().is_some_and(|path| path.as_os_str() == "-");
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
    // Opened now: a wrong path is told before anything runs, not after.
    let mut json = match &arguments.json {
        Some(path) if !prints_json => Some(create(path)?),
        _ => None,
    };
    let mut html = arguments.report.as_ref().map(|path| create(path)).transpose()?;
    let stop = Arc::new(AtomicBool::new(false));
    ringfence_lab::run::stop_on_signals(&stop).context("catching Ctrl-C")?;

    let options = Options {
        rows,
        disk,
        destroy_data: arguments.destroy_data,
        notify: arguments.notify,
        repeat: arguments.repeat,
        runtime,
        queues: arguments.queues,
        run_pages: arguments.page_run,
        flush_queue_slots: arguments.flush_queue_slots,
        flush_queue_ms: arguments.flush_queue_ms,
        progress: if prints_json || arguments.quiet { Kind::Silent } else { Kind::Auto },
    };
    let ended = compare(jobs, &options, &stop)?;
    let comparison = &ended.comparison;

    if prints_json {
        print!("{}", report::json::render(comparison));
    } else if !comparison.jobs.is_empty() {
        let mut out = std::io::stdout().lock();
        let table = report::table::render(comparison);
        // A reader that has left (`| head`) is no failure of ours.
        let _ = writeln!(out, "{table}");
    }
    if let Some(file) = &mut json {
        write!(file, "{}", report::json::render(comparison)).context("writing the JSON")?;
    }
    if let Some(file) = &mut html {
        let page = report::html::render(comparison);
        file.write_all(page.as_bytes()).context("writing the report")?;
    }

    for leak in &ended.leaks {
        eprintln!("LEAK: {leak}");
    }
    if let Some(failure) = &ended.failure {
        eprintln!("error: {failure:#}");
    }
    if comparison.interrupted {
        eprintln!("interrupted: the figures are of the rounds that were complete");
    }
    let errors = comparison.errors();
    if errors > 0 {
        eprintln!("error: {errors} I/Os failed or came back wrong");
    }
    let failed = !ended.leaks.is_empty()
        || ended.failure.is_some()
        || comparison.interrupted
        || errors > 0;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn create(path: &PathBuf) -> Result<std::fs::File> {
    std::fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))
}
