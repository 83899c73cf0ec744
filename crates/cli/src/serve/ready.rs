//! Preparing a service: it takes over what the previous process has left, opens what it needs, and
//! gives up the rest.

use std::{
    io,
    os::{
        fd::AsFd,
        unix::{ffi::OsStrExt, net::UnixStream},
    },
    path::{Path, PathBuf, absolute},
    sync::{Arc, atomic::AtomicBool},
    thread,
};

use anyhow::{Context, Result};
use ringfence_mem::{Memory, SharedFile};
use ringfence_run::{notifier, worker::Worker};
use signal_hook::consts::{SIGINT, SIGTERM};
use tracing::warn;

use super::{
    Common, SILENT, fault,
    front::Front,
    hand_over, http, log,
    manager::Manager,
    saved_state::{Inherited, Resumed, SavedState},
    socket::{self, Access, Listener, Passed},
};

/// Descriptors of a ring: its kick, io_urings for its call and its error event, two of its image
/// with a duplicate, two of a worker's, and a duplicate of each that its front end sends, for a
/// successor.
const FDS_PER_RING: usize = 11;
/// Descriptors of a socket beside those of its rings: itself, its connection, channels, logs,
/// silent connections, io_urings of rings that its front ends have left behind, and what a
/// successor needs.
const FDS_PER_SOCKET: usize = 8 + SILENT + 17 + 10;
/// Further ones while its front end sends descriptors that take long to close: those that wait,
/// those of one message, and what a successor needs of each region of its memory.
const FDS_PER_HOSTILE_SOCKET: usize = 64 + 253 + Memory::MAX_REGIONS;
/// Descriptors of the process beside these: streams, images, signals, scrapers.
const FDS_OF_PROCESS: usize = 48;

/// What the process started with.
pub(crate) struct Begun<'a> {
    common: &'a Common,
    name: &'static str,
    /// Where to listen, for each socket; `None`: only where the service manager does.
    sockets: Vec<Option<&'a Path>>,
    passed: Passed,
    /// Whether the service manager keeps what is inherited.
    is_stored: bool,
    inherited: Option<Inherited>,
    /// Whether the service connects to another one.
    pub(crate) connects: bool,
}

impl Begun<'_> {
    /// The name of socket `at`: of the one that the service manager has passed, or its path.
    pub(crate) fn socket(&self, at: usize) -> Option<PathBuf> {
        self.passed.name(at).or_else(|| absolute(self.sockets[at]?).ok())
    }
}

/// A number for the socket of that name, the same in every process.
pub(crate) fn reader(socket: &Path) -> u64 {
    // FNV-1a, which does not depend on the library's version.
    let step = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    socket.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Starts the log at the level of `--log`, raises the limit of descriptors as far as the system
/// allows, and takes over what the previous process has left of the service `name` with as many
/// `sockets`: where to listen, unless the service manager has opened them. Call it before anything
/// is made.
///
/// # Errors
/// Wrong usage; what is left cannot be read.
pub(crate) fn begin<'a>(
    common: &'a Common,
    name: &'static str,
    sockets: &[Option<&'a Path>],
) -> Result<Begun<'a>> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    log::begin(common.log);
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    common.confine.check()?;
    let mut passed = socket::passed()?;
    let mut ends = passed.ends.take();
    let is_stored = ends.is_some();
    if let Some(path) = common.hand_over.as_deref().filter(|_| ends.is_none()) {
        ends = hand_over::take(path, name, sockets.len())?;
    }
    let read = |ends| Inherited::read(ends, name, sockets.len());
    let inherited = ends.map(read).transpose()?.flatten();
    Ok(Begun {
        common,
        name,
        sockets: sockets.to_vec(),
        passed,
        is_stored: is_stored && inherited.is_some(),
        inherited,
        connects: false,
    })
}

/// Everything that the frame needs is open, and the sandbox, if there is one, is entered: threads
/// can be started.
pub(crate) struct Ready<'a> {
    pub(super) common: &'a Common,
    pub(super) fronts: Vec<Front>,
    pub(super) endpoint: Option<http::Endpoint>,
    /// Readable when the process is to end, and by what it becomes so.
    pub(super) signals: (UnixStream, UnixStream),
    /// Hung up at the end, which wakes every waiting thread.
    pub(super) stop: (UnixStream, UnixStream),
    pub(super) manager: Manager,
    /// The state that outlives this process, if another process holds it.
    pub(super) saved_state: Option<SavedState>,
    /// The socket on which successors ask.
    pub(super) door: Option<Listener>,
    /// Connections to resume, by socket.
    pub(super) resumed: Vec<Option<Resumed>>,
    /// How many workers there may be.
    workers: usize,
}

impl Ready<'_> {
    /// Threads for a device of that many queues: no more than have work.
    ///
    /// # Errors
    /// Out of threads.
    pub(crate) fn workers(&self, name: &str, queues: u16) -> Result<Arc<[Worker]>> {
        (0..self.workers.min(queues.into()).max(1))
            .map(|at| Worker::spawn(&format!("{name}-{at}"), self.common.notify))
            .collect::<io::Result<_>>()
            .context("starting a worker")
    }

    /// Whether the connection of socket `at` is resumed from the previous process.
    pub(crate) fn goes_on(&self, at: usize) -> bool {
        self.resumed[at].is_some()
    }

    /// The connection of socket `at` is not resumed: hangs up on its front end.
    pub(crate) fn does_not_go_on(&mut self, at: usize) {
        if let Some(Resumed { stream, saved }) = self.resumed[at].take() {
            let _ = rustix::net::shutdown(&stream, rustix::net::Shutdown::Both);
            // The exit of the process closes its descriptors: closing them here may take long.
            std::mem::forget((stream, saved));
        }
    }

    /// Memory in which the devices keep what a successor needs, if there may be one, and whether it
    /// is that of the previous process; with `anew`, it never is.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn memory(
        &mut self,
        bytes: usize,
        anew: bool,
    ) -> Result<Option<(SharedFile, bool)>> {
        self.saved_state.as_mut().map(|saved_state| saved_state.memory(bytes, anew)).transpose()
    }
}

/// Listens on the sockets, or on those that the service manager has opened, and gives up opening
/// anything more. What the service itself needs is open already, and no thread runs. Its devices
/// have `rings` rings, all together; `make` makes the io_urings that they need.
///
/// # Errors
/// Wrong usage; a socket or the metrics endpoint cannot be opened; the sandbox cannot be entered.
pub(crate) fn open(
    begun: Begun<'_>,
    rings: usize,
    make: impl FnOnce() -> Result<()>,
) -> Result<Ready<'_>> {
    fault::end_process_on_panic();
    let Begun { common, name, sockets, passed, is_stored, mut inherited, connects } = begun;
    let paths: Vec<_> = sockets.iter().copied().flatten().collect();
    let sockets = sockets.len();
    enough_descriptors(rings, sockets)?;
    ringfence_mem::sigbus::install().context("preparing for truncated memory")?;
    // Before any front end can connect: the signal may come right after, and must end the service
    // in order.
    let signals = signals().context("preparing for signals")?;
    let left = inherited.as_mut().map(|left| std::mem::take(&mut left.listeners));
    let listeners = socket::open(&paths, sockets, common.access(), passed, left)?;
    let fronts: Vec<_> = listeners.into_iter().map(Front::new).collect();
    let endpoint = match &common.metrics {
        Some(address) => Some(
            http::Endpoint::open(address, &common.metrics_host, common.confine.user())
                .with_context(|| format!("cannot serve figures at {address}"))?,
        ),
        None => None,
    };
    let stop = UnixStream::pair().context("preparing for the end")?;
    let manager = Manager::of_this_process();
    let door = common.hand_over.as_deref().map(|path| {
        // A process that gets in receives all that the service has: only its own user's may,
        // whatever `--socket-mode` is.
        Listener::bind(path, Access { owner: common.confine.user(), ..Access::OWN })
    });
    let door = door.transpose()?;
    let mut resumed: Vec<_> = (0..sockets).map(|_| None).collect();
    let mut saved_state = None;
    if inherited.is_some() || door.is_some() || manager.stores {
        let names: Vec<_> = fronts.iter().map(|front| &*front.listener.name).collect();
        let closers: Vec<_> = fronts.iter().map(|front| front.closer.clone()).collect();
        if let Some(inherited) = &mut inherited {
            resumed = inherited.connections(&names, &closers)?;
        }
        let sockets = fronts.iter().map(|front| front.listener.socket.as_fd());
        let made = SavedState::new(name, sockets, &closers, inherited);
        let made = made.context("preparing for a successor")?;
        if !is_stored {
            manager.store(made.ends());
        }
        saved_state = Some(made);
    }
    let cpus = || thread::available_parallelism().map_or(1, |cpus| cpus.get());
    let workers = common.workers.map_or_else(cpus, usize::from);
    // Two a ring, and for each socket one of a replacement.
    notifier::make_ahead(2 * rings + sockets)?;
    make()?;
    let removes = fronts.iter().filter_map(|front| front.listener.folder());
    let removes = removes.chain(endpoint.iter().filter_map(http::Endpoint::folder));
    let removes = removes.chain(door.iter().filter_map(Listener::folder)).collect();
    common.confine.enter(removes, connects)?;
    log::start();
    Ok(Ready {
        common,
        fronts,
        endpoint,
        signals,
        stop,
        manager,
        saved_state,
        door,
        resumed,
        workers,
    })
}

/// Checks whether the process may have the descriptors that it needs: some for each ring, and those
/// that front ends send.
///
/// # Errors
/// Too few for all rings: better to fail now than at the last ring.
fn enough_descriptors(rings: usize, sockets: usize) -> Result<()> {
    use rustix::process::{Resource, getrlimit};
    let least = FDS_OF_PROCESS + sockets * FDS_PER_SOCKET + rings * FDS_PER_RING;
    let most = least + sockets * FDS_PER_HOSTILE_SOCKET;
    let there = match getrlimit(Resource::Nofile).current {
        Some(there) => usize::try_from(there).unwrap_or(usize::MAX),
        None => usize::MAX,
    };
    let remedy = "raise the hard limit of descriptors (LimitNOFILE= of the unit, ulimit -Hn)";
    anyhow::ensure!(
        least <= there,
        "cannot serve {rings} rings: they may take {least} descriptors, and the process may have {there}: {remedy}, \
         or serve fewer queues"
    );
    if most > there {
        warn!(
            "front ends that do harm may take {most} descriptors, and the process may have {there}: {remedy}, or \
             they can keep others from connecting"
        );
    }
    Ok(())
}

/// The first becomes readable with the first SIGTERM or SIGINT, or when something is written to the
/// second. The second signal ends the process.
fn signals() -> io::Result<(UnixStream, UnixStream)> {
    use signal_hook::{flag, low_level::pipe};
    let (read, write) = UnixStream::pair()?;
    let seen = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // In this order: a signal ends the process only if the flag was set before it.
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&seen))?;
        flag::register(signal, Arc::clone(&seen))?;
        pipe::register(signal, write.try_clone()?)?;
    }
    Ok((read, write))
}
