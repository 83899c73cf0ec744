//! What to compare, and how: the options of `ringfence compare`.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use ringfence_run::worker::Notify;

use super::{DiskChoice, Row, space::Space, tuning::Tuning};
use crate::{
    allocators::AllocatorKind,
    job::{JobError, JobFile},
    list::{List, seconds},
};

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
#[derive(Clone, Debug, Args)]
#[command(after_help = "EXAMPLES:
    ringfence compare
    ringfence compare --repeat 30 --runtime 10                      the protocol of the mailing list
    ringfence compare my.fio --policy off,strict+map --disk ram
    ringfence compare my.fio --policy off,strict+map --allocator rbtree,bitmap,ringfence
    ringfence compare my.fio --policy off,strict+map,lazy-mq+map --max-exposure-ms 2
    ringfence compare my.fio --policy off,strict+map,bounce,auto,zero-copy --explain
    ringfence compare --policy off,strict+map,proxy                 a back end without any of the guest's memory
    ringfence compare --load 2                                      beside two busy threads
    ringfence compare my.fio --disk /dev/nvme1n1 --destroy-data --report report.html

EXIT STATUS:
    0   done
    1   an I/O failed or came back wrong, a strict policy leaked, a process died, or Ctrl-C
    2   wrong usage: nothing was run")]
pub struct Options {
    /// A fio job file. Its `filename` is never opened: --disk decides.
    pub job: Option<PathBuf>,

    /// The rows of the table, separated by commas: host, io_uring, persistent, zero-copy, proxy, off,
    /// strict, strict+map, lazy-sq, lazy-mq, lazy-sq+map, lazy-mq+map, bounce, auto [default: all
    /// but io_uring, which --disk ram adds, persistent, zero-copy and proxy].
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
    /// `proxy` has no IOMMU: `ringfence proxy` stands between driver and disk, and the disk's process
    /// reaches copies of the requests in flight, in the proxy's memory, and nothing else.
    ///
    /// A lazy policy with `+flush` behind it, such as `lazy-mq+map+flush`, runs in a lazy domain of
    /// the virtio-iommu: a proposal (virtio-spec issue 204), not part of the specification. The
    /// device completes an UNMAP at once, and invalidates when an IOTLB_FLUSH asks for it.
    #[arg(long = "policy", value_name = "LIST")]
    pub rows: Option<List<Row>>,

    /// The allocators of I/O virtual addresses (IOVAs), separated by commas: rbtree, bitmap,
    /// magazines, ringfence. With several, each policy that maps is run with each of them, in rows
    /// such as `strict+map/rbtree`.
    ///
    /// `rbtree` searches a red-black tree of the used ranges from the top down, `bitmap` a bit for
    /// each page by next fit (in at most 256 GiB of the aperture), `magazines` is the tree with
    /// Linux's caches per CPU in front, `ringfence` is Ringfence's own. All of them first try
    /// addresses below 4 GiB, as for a PCI device.
    #[arg(long = "allocator", value_name = "LIST", default_value = "ringfence")]
    pub allocators: List<AllocatorKind>,

    /// What they hand out.
    #[command(flatten)]
    pub space: Space,

    /// The disk: `paced` (memory at the pace of an SSD: 2.5 GiB/s, 600,000 IOPS, 80 us), `ram`
    /// (memory, unpaced: the harshest case), or a file or block device.
    #[arg(long, value_name = "paced|ram|PATH", default_value = "paced")]
    pub disk: DiskChoice,

    /// Lets jobs write to a file or device that exists. Its content is lost.
    #[arg(long)]
    pub destroy_data: bool,

    /// How both ends of a ring wait: `adaptive` spins for a while and then sleeps, and does not
    /// spin where other threads want the CPU; `poll` only spins; `sleep` always sleeps, so that
    /// each wait costs a wake-up.
    #[arg(long, value_name = "MODE", default_value_t = Notify::Adaptive)]
    pub notify: Notify,

    /// Measured rounds of every row; one more before them warms up and is discarded.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_REPEAT,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,

    /// Seconds that each job runs in a round [default: as in the job file; 0.65 without one].
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub runtime: Option<Duration>,

    /// Queues of the disk, with a job thread and a device worker each [default: half of the
    /// processors].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub queues: Option<u16>,

    /// Adjacent pages of a buffer in guest memory. An application that has run for a while has
    /// single ones.
    #[arg(long = "page-run", value_name = "PAGES", default_value_t = 1,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    pub run_pages: usize,

    /// How policies are carried out.
    #[command(flatten)]
    pub tuning: Tuning,

    /// Busy threads that run beside every row, `off` and `host` included: the ratios then show the
    /// price of protection on a host with shared CPUs. The share of time that these threads had a
    /// CPU is printed under the table.
    #[arg(long, value_name = "N", default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(..=MOST_LOAD))]
    pub load: u32,

    /// Prints what `auto` chose for which mappings, and why.
    #[arg(long)]
    pub explain: bool,
}

impl Options {
    /// The jobs to run: those of the file, or the seed's.
    ///
    /// # Errors
    /// The file cannot be read, or is no job file.
    pub fn jobs(&self) -> Result<JobFile, JobError> {
        match &self.job {
            Some(path) => JobFile::load(path),
            // Warnings about our own file are not worth printing.
            None => Ok(JobFile { warnings: Vec::new(), ..JobFile::seed() }),
        }
    }

    /// The rows, in order.
    pub(super) fn rows(&self) -> Vec<Row> {
        self.rows.as_ref().map_or_else(|| Row::defaults(&self.disk), |rows| rows.0.clone())
    }

    /// How long each job runs in a round, if not as it says.
    pub(super) fn runtime(&self) -> Option<Duration> {
        self.runtime.or_else(|| self.job.is_none().then_some(DEFAULT_RUNTIME))
    }
}
