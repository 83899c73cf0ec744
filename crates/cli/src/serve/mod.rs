//! The frame of a vhost-user service: its sockets, one front end after the other, metrics, logs,
//! and an orderly end.

mod confine;
mod fault;
mod frame;
mod front;
mod hand_over;
mod http;
mod log;
mod mailbox;
mod manager;
mod page;
mod ready;
mod saved_state;
mod socket;

use std::{io, path::PathBuf, time::Duration};

use anyhow::Result;
use clap::Args;
use ringfence_iotlb::IotlbConfig;
use ringfence_run::{PeerFd, worker::Notify};
use ringfence_vhost_user::{Handler, Keeper, SavedConnection, ServeError, Server, Shutdown};
use ringfence_vhost_user_backend::IotlbTotals;
use rustix::fs::Gid;
use tracing::level_filters::LevelFilter;

use self::socket::Access;
pub(crate) use frame::run;
pub(crate) use page::Page;
pub(crate) use ready::{Ready, begin, open, reader};

/// How many connections of a socket that have not sent anything are kept at a time. A further one
/// replaces the first of them.
const SILENT: usize = 16;

/// The options of a service with one socket.
#[derive(Args)]
pub(crate) struct Options {
    /// The socket that front ends connect to [default: what the service manager passes]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) common: Common,
}

/// The options of a device that translates by what its front end sends, which keeps `LEAST`
/// translations at least, and waits for one for `LONGEST_MS` at most.
#[derive(Args)]
pub(crate) struct Iotlb<const LEAST: u64, const LONGEST_MS: u64> {
    /// Do not offer an IOMMU to the driver: for front ends whose drivers would accept it but cannot
    /// translate, such as User-Mode Linux
    #[arg(long)]
    pub(crate) no_iommu: bool,

    /// The most translations to keep in the IOTLB
    #[arg(long, value_name = "N", default_value_t = IotlbConfig::default().entries,
          value_parser = clap::value_parser!(u64).range(LEAST..=1 << 24))]
    iotlb_entries: u64,

    /// How long a request or a packet waits for a translation before it fails
    #[arg(long, value_name = "MS", alias = "iotlb-patience-ms",
          default_value_t = IotlbConfig::default().timeout.as_millis() as u64,
          value_parser = clap::value_parser!(u64).range(1..=LONGEST_MS))]
    iotlb_timeout_ms: u64,
}

impl<const LEAST: u64, const LONGEST_MS: u64> Iotlb<LEAST, LONGEST_MS> {
    pub(crate) fn config(&self) -> IotlbConfig {
        IotlbConfig {
            entries: self.iotlb_entries,
            timeout: Duration::from_millis(self.iotlb_timeout_ms),
            ..IotlbConfig::default()
        }
    }
}

/// The options of every service.
#[derive(Args)]
pub(crate) struct Common {
    /// The sockets' permission bits, which decide who may connect [default: 600, with
    /// --socket-group 660]
    #[arg(long, value_name = "OCTAL", value_parser = octal)]
    socket_mode: Option<u32>,

    /// The sockets' group, by name or number
    #[arg(long, value_name = "GROUP", value_parser = group)]
    socket_group: Option<Gid>,

    /// Serve only processes of this user, by name or number; may be repeated
    #[arg(long, value_name = "USER", value_parser = user)]
    allow_uid: Vec<u32>,

    /// Serve metrics for Prometheus: HOST:PORT (port 0: any) or unix:PATH
    #[arg(long, value_name = "ADDR")]
    pub(crate) metrics: Option<http::Address>,

    /// A host name that scrapers may use, beside addresses, localhost, what `uname -n` prints and
    /// the host of --metrics; may be repeated
    #[arg(long, value_name = "NAME", requires = "metrics")]
    metrics_host: Vec<String>,

    #[command(flatten)]
    confine: confine::Confinement,

    /// A socket on which the next process of this service, started with the same option, takes over
    /// connections and all
    #[arg(long, value_name = "PATH")]
    hand_over: Option<PathBuf>,

    /// How many threads move data, at most [default: one per queue, no more than CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) workers: Option<u16>,

    /// How they wait for the driver: adaptive (spin, then sleep), poll or sleep
    #[arg(long, value_name = "HOW", default_value_t = Notify::Adaptive)]
    pub(crate) notify: Notify,

    /// The level of the log on standard error: off, error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub(crate) log: LevelFilter,
}

fn octal(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode @ 0..=0o777) => Ok(mode),
        _ => Err("expected three octal digits, such as 660".into()),
    }
}

fn group(text: &str) -> Result<Gid, String> {
    let named = || uzers::get_group_by_name(text).map(|group| group.gid());
    number_or(text, named).map(Gid::from_raw).ok_or_else(|| format!("there is no group {text:?}"))
}

fn user(text: &str) -> Result<u32, String> {
    let named = || uzers::get_user_by_name(text).map(|user| user.uid());
    number_or(text, named).ok_or_else(|| format!("there is no user {text:?}"))
}

/// A user's or group's number, given as such or by name. The highest number means none to the
/// kernel.
fn number_or(text: &str, named: impl FnOnce() -> Option<u32>) -> Option<u32> {
    text.parse().ok().filter(|&number| number != u32::MAX).or_else(named)
}

impl Common {
    fn access(&self) -> Access {
        let group = self.socket_group;
        let mode =
            self.socket_mode.unwrap_or(if group.is_some() { 0o660 } else { Access::OWN.mode });
        Access { mode, owner: self.confine.user(), group }
    }
}

/// One front end's connection, whatever the device is.
pub(crate) trait Connection {
    /// Prepares it to be served: how many bytes of its files may be mapped, where its state is kept
    /// for a successor, and the state that it resumes from. Returns a handle that ends it from
    /// another thread.
    ///
    /// # Errors
    /// Out of descriptors.
    fn prepare(
        &mut self,
        most_mapped: u64,
        keeper: Option<Box<dyn Keeper>>,
        saved: Option<SavedConnection>,
    ) -> io::Result<Shutdown>;

    /// Serves it until its end.
    ///
    /// # Errors
    /// It ended for another reason than a hang-up by the front end.
    fn serve(&mut self) -> Result<(), ServeError>;
}

impl<H: Handler> Connection for Server<H> {
    fn prepare(
        &mut self,
        most_mapped: u64,
        keeper: Option<Box<dyn Keeper>>,
        saved: Option<SavedConnection>,
    ) -> io::Result<Shutdown> {
        keeper.map_or(Ok(()), |keeper| self.set_keeper(keeper))?;
        saved.into_iter().for_each(|saved| self.resume(saved));
        self.set_most_mapped(most_mapped);
        Ok(self.shutdown_handle())
    }

    fn serve(&mut self) -> Result<(), ServeError> {
        Server::serve(self)
    }
}

/// A device, or several, for front ends to connect to.
pub(crate) trait Service: Send + Sync {
    /// The service's name in messages.
    fn name(&self) -> &'static str;

    /// Called once all sockets are listened on.
    ///
    /// # Errors
    /// The service cannot continue: it ends.
    fn listening(&self) -> Result<()> {
        Ok(())
    }

    /// Called when a front end has connected to the socket of that number; the one before it is
    /// gone. Called and used on the socket's own thread.
    ///
    /// # Errors
    /// It cannot be served: the connection is closed.
    fn connect(&self, socket: usize, stream: PeerFd) -> Result<Box<dyn Connection>>;

    /// Called when all connections have ended: images with incomplete requests, and how many rings
    /// wait for each; none if only the lock waits. The kernel may not let the process end before
    /// these are complete.
    fn left(&self) -> Vec<(String, usize)> {
        Vec::new()
    }

    /// The service's own metrics.
    fn figures(&self, page: &mut Page);
}

/// Makes sure that the log is written, before the process ends.
pub(crate) fn end_log() {
    log::end();
}

/// The log of a process that serves another one of the same command.
#[cfg(feature = "lab")]
pub(crate) fn begin_quiet_log() {
    log::begin(LevelFilter::WARN);
    log::start();
}

/// The metrics of a device's IOTLB.
pub(crate) fn iotlb_figures(page: &mut Page, totals: &IotlbTotals) {
    for (name, help, value) in [
        ("iotlb_entries", "Translations in the table.", totals.entries),
        ("iotlb_open_misses", "Misses without an update yet.", totals.open),
        ("iotlb_cache_hits_total", "Lookups that a worker's own cache served.", totals.hits),
        ("iotlb_cache_misses_total", "Lookups that had to look in the table.", totals.walks),
        ("iotlb_misses_total", "Misses sent to the front end.", totals.misses),
        ("iotlb_asks_total", "Times that misses were sent, one or many.", totals.batches),
        ("iotlb_asked_again_total", "Of these, those that were sent before.", totals.sent_again),
        ("iotlb_updates_total", "IOTLB updates received.", totals.updates),
        ("iotlb_invalidations_total", "Invalidations.", totals.invalidations),
        ("iotlb_evictions_total", "Entries that made room for others.", totals.evictions),
        ("iotlb_refusals_total", "Misses for which there is no translation.", totals.refusals),
        ("iotlb_timeouts_total", "Requests that gave up waiting.", totals.timeouts),
        ("iotlb_faults_total", "Accesses that were refused.", totals.faults),
    ] {
        page.one(name, help, value);
    }
}
