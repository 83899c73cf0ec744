//! The sockets of a service and their front ends, from start to orderly end.
//!
//! Ordering: `stopping` and `leaves` end loops. What else their readers need is behind locks.

use std::{
    io::{self, Write as _},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use parking_lot::Mutex;
use ringfence_devices::peer::Peer;
use ringfence_run::{PeerFd, slice};
use ringfence_sandbox::{Refusals, Role};
use ringfence_vhost_user::{Keeper, SavedConnection, Shutdown};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{self, RecvFlags},
};
use tracing::{error, info, warn};

use super::{
    Page, Ready, SILENT, Service,
    front::Front,
    hand_over, log,
    manager::Manager,
    saved_state::{Resumed, SavedState, Turn},
    socket::Listener,
};

/// How long the service may take to end: longer than any single wait in it.
const LAST: Duration = Duration::from_secs(5);

/// How often to check whether enough was closed to accept a connection again.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// The most bytes of front ends' files that are mapped, over all sockets: half of a process's
/// address space, which has 47 bits or more where guests are that large. Each socket has its share,
/// at most half of it, since a memory table replaces another while both are mapped.
const MAPPED: u64 = 1 << 46;

/// How long to wait at the end until descriptors are closed.
const CLOSED: Duration = Duration::from_secs(1);

struct Frame<'a, S> {
    service: S,
    manager: Manager,
    /// The users that may connect; if empty, the sockets' permissions decide.
    users: &'a [u32],
    begun: Instant,
    fronts: Vec<Front>,
    saved_state: Option<SavedState>,
    /// Which socket's connection may resume.
    turn: Arc<Turn>,
    /// Leave connections to a successor.
    leaves: AtomicBool,
    stopping: AtomicBool,
}

/// Serves until SIGTERM or SIGINT. Requests that are under way then are completed; a second signal
/// ends the process at once.
///
/// # Errors
/// Some I/O does not complete.
pub(crate) fn run<S: Service>(ready: Ready<'_>, service: S) -> Result<ExitCode> {
    let Ready { common, fronts, endpoint, signals, manager, saved_state, door, .. } = ready;
    let ((stop, running), resumed) = (ready.stop, ready.resumed);
    let frame = Frame {
        service,
        // A manager that stores what is left also starts the next process.
        leaves: AtomicBool::new(manager.stores),
        manager,
        users: &common.allow_uid,
        begun: Instant::now(),
        fronts,
        saved_state,
        turn: Arc::default(),
        stopping: AtomicBool::new(false),
    };
    let name = frame.service.name();
    let (signals, wake) = signals;
    let successor = Mutex::new(None);
    for front in &frame.fronts {
        info!("{name}: listening on {}", front.listener.name);
    }
    if let Some(endpoint) = &endpoint {
        info!("{name}: figures at {}", endpoint.address);
    }
    frame.service.listening()?;
    log::limit();
    frame.manager.is_ready("READY=1\nSTATUS=waiting for a front end");

    let named = |name: &str| thread::Builder::new().name(name.to_owned());
    thread::scope(|scope| {
        for (at, resumed) in resumed.into_iter().enumerate() {
            let (frame, stop) = (&frame, stop.as_fd());
            let accept = move || {
                // A front end that waits for a reply may hold up its whole machine.
                slice::shorten();
                ringfence_sandbox::confine(Role::Front);
                frame.turn.wait(at);
                if let Some(Resumed { stream, saved }) = resumed {
                    frame.serve(at, stream, Some(saved));
                }
                frame.turn.end(at);
                frame.accept(at, stop);
            };
            named("front").spawn_scoped(scope, accept).expect("a thread for a socket");
        }
        if let Some(endpoint) = &endpoint {
            let (frame, stop) = (&frame, stop.as_fd());
            let serve = move || {
                ringfence_sandbox::confine(Role::Figures);
                endpoint.serve(stop, || frame.page());
            };
            named("figures").spawn_scoped(scope, serve).expect("a thread for figures");
        }
        if let (Some(door), Some(saved_state)) = (&door, &frame.saved_state) {
            let (frame, stop, known, wake) = (&frame, stop.as_fd(), &successor, &wake);
            let wait = move || {
                ringfence_sandbox::confine(Role::Front);
                let successor = hand_over::await_successor(door, stop, saved_state)?;
                let mut known = known.lock();
                *known = Some(successor);
                // Otherwise it ends by itself: the successor finds sockets without files, and makes new ones.
                if !frame.stopping.load(Ordering::Acquire) {
                    info!("{name}: a successor takes over");
                    frame.leaves.store(true, Ordering::Release);
                    // Not a signal: it would be the second, if one has come.
                    let _ = (&*wake).write(&[0]);
                }
                Some(())
            };
            named("successor").spawn_scoped(scope, wait).expect("a thread for a successor");
        }
        wait_for(&signals);
        info!("{name}: ending");
        frame.manager.report("STOPPING=1");
        // Not a thread of the scope, which would wait for it.
        thread::spawn(move || {
            thread::sleep(LAST);
            error!("{name}: it has not ended for {LAST:?}: giving up");
            log::end();
            std::process::exit(1);
        });
        {
            // A successor either knows that it is left all, or that it is left nothing.
            let _known = successor.lock();
            frame.stopping.store(true, Ordering::Release);
        }
        frame.end();
        drop(running);
    });
    let left = frame.service.left();
    for (image, rings) in &left {
        match rings {
            0 => error!(
                source = %image,
                "the disk has not completed a flush; the image stays locked until then"
            ),
            _ => error!(
                source = %image,
                "the disk has not completed requests of {rings} rings; the kernel has them still"
            ),
        }
    }
    let leaves = frame.is_leaving();
    frame.close();
    drop(endpoint);
    // Images and taps are closed, and nothing is served: the successor need not wait for the
    // remaining closes; nor one that came too late to be accepted.
    if leaves {
        door.iter().for_each(hand_over::turn_away);
    }
    drop(door);
    drop(successor.into_inner().map(|stream| stream.shutdown(std::net::Shutdown::Both)));
    info!("{name}: ended");
    Ok(if left.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Waits for a signal. Logs what the sandbox refuses meanwhile.
fn wait_for(signals: &UnixStream) {
    loop {
        let refused = Refusals.fd();
        let all = [Some(signals.as_fd()), refused];
        let all = all.iter().flatten();
        let mut fds: Vec<_> = all.map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        let _ = poll(&mut fds, None);
        if !fds[0].revents().is_empty() {
            return;
        }
        if let Some((count, last)) = Refusals.take() {
            error!(
                "the sandbox has refused {count} times, at last {last}: this program has a fault, or what a peer \
                 sends has taken it over"
            );
        }
    }
}

impl<S: Service> Frame<'_, S> {
    /// Serves the front ends of a socket, one after the other, until `stop` is hung up. A
    /// connection is served once it has sent something: a silent one does not hold up others.
    fn accept(&self, at: usize, stop: BorrowedFd<'_>) {
        let front = &self.fronts[at];
        let Listener { socket, name, .. } = &front.listener;
        // The longest silent one comes first.
        let mut silent: Vec<PeerFd> = Vec::new();
        while !self.stopping.load(Ordering::Acquire) {
            // Each further connection is another one to close.
            let full = front.closer.is_full();
            let watched = if full { &[] } else { &silent[..] };
            let wanted = if full { PollFlags::empty() } else { PollFlags::IN };
            let own = [PollFd::from_borrowed_fd(stop, PollFlags::IN), PollFd::new(socket, wanted)];
            let theirs = watched.iter().map(|stream| PollFd::new(stream, PollFlags::IN));
            let mut fds: Vec<PollFd<'_>> = own.into_iter().chain(theirs).collect();
            let _ = poll(&mut fds, full.then_some(&LOOK));
            let ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
            if ready(&fds[0]) {
                return;
            }
            if full {
                continue;
            }
            if let Some(speaks) = fds[2..].iter().position(ready) {
                drop(fds);
                let stream = silent.remove(speaks);
                // One that has only hung up was no front end: nothing changes for the devices.
                let mut first = [0];
                if !matches!(net::recv(&stream, &mut first, RecvFlags::PEEK), Ok((0, _))) {
                    self.serve(at, stream, None);
                }
                continue;
            }
            match socket.accept() {
                Ok((stream, _)) => {
                    let allowed = self.allows(&stream, name);
                    let stream = PeerFd::new(stream, &front.closer);
                    if !allowed {
                        continue;
                    }
                    if silent.len() == SILENT {
                        front.silent.fetch_add(1, Ordering::Relaxed);
                        warn!(source = %name, "a connection that has sent nothing gives way to a new one");
                        silent.remove(0);
                    }
                    silent.push(stream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    // Out of descriptors, for example: slow down.
                    warn!(source = %name, "{error}");
                    thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    /// Whether the peer's user may connect.
    fn allows(&self, stream: &UnixStream, name: &str) -> bool {
        if self.users.is_empty() {
            return true;
        }
        match Peer::of(stream) {
            Ok(Peer { uid, .. }) if self.users.contains(&uid) => return true,
            Ok(Peer { uid, pid }) => {
                warn!(source = %name, "user {uid}, process {pid}, is not among those of --allow-uid");
            }
            Err(error) => warn!(source = %name, "{error}: the peer's user is not known"),
        }
        false
    }

    fn serve(&self, at: usize, stream: PeerFd, saved: Option<SavedConnection>) {
        let front = &self.fronts[at];
        let name = &front.listener.name;
        match saved {
            Some(_) => {
                front.resumed.fetch_add(1, Ordering::Relaxed);
                info!(source = %name, "going on with its front end");
            }
            None => {
                front.connections.fetch_add(1, Ordering::Relaxed);
                info!(source = %name, "a front end has connected");
            }
        }
        self.manager.report("STATUS=serving a front end");
        let ended = self.converse(front, at, stream, saved);
        *front.current.lock() = None;
        match ended {
            Ok(()) if self.is_leaving() => info!(source = %name, "left to a successor"),
            Ok(()) => info!(source = %name, "the front end is gone"),
            Err(why) => {
                front.broken.fetch_add(1, Ordering::Relaxed);
                warn!(source = %name, "connection ended: {}", crate::explain(&why));
            }
        }
        self.manager.report("STATUS=waiting for a front end");
    }

    fn converse(
        &self,
        front: &Front,
        at: usize,
        stream: PeerFd,
        saved: Option<SavedConnection>,
    ) -> Result<()> {
        let keeper = self.saved_state.as_ref().map(|saved_state| {
            let turn = saved.as_ref().map(|_| Arc::clone(&self.turn));
            saved_state.keeper(at, &front.listener.name, &stream, turn)
        });
        let mut connection = self.service.connect(at, stream)?;
        let keeper = keeper.transpose()?.map(|keeper| Box::new(keeper) as Box<dyn Keeper>);
        let mapped = MAPPED / self.fronts.len().max(2) as u64;
        let shutdown = connection.prepare(mapped, keeper, saved)?;
        {
            // The thread that ends the service sets the flag first and then checks this.
            let mut current = front.current.lock();
            if self.stopping.load(Ordering::Acquire) {
                if self.is_leaving() {
                    // The saved state is still that of the previous process: dropping the
                    // connection would hang up.
                    std::mem::forget(connection);
                }
                return Ok(());
            }
            *current = Some(shutdown.clone());
        }
        connection.serve()?;
        if shutdown.is_shut_down() && !self.stopping.load(Ordering::Acquire) {
            bail!("this end has ended it");
        }
        Ok(())
    }

    fn end(&self) {
        let leaves = self.leaves.load(Ordering::Acquire);
        for front in &self.fronts {
            if !leaves {
                front.listener.remove();
            }
            match &*front.current.lock() {
                Some(connection) if leaves => connection.leave(),
                Some(connection) => connection.shutdown(),
                None => {}
            }
        }
    }

    /// Whether the process is ending and leaves its connections to a successor.
    fn is_leaving(&self) -> bool {
        self.stopping.load(Ordering::Acquire) && self.leaves.load(Ordering::Acquire)
    }

    /// Closes sockets and images before the process ends. Waits for pending closes for a while; any
    /// that are held up are left to the kernel.
    fn close(self) {
        let leaves = self.is_leaving();
        let Frame { service, fronts, .. } = self;
        drop(service);
        let begun = Instant::now();
        for Front { listener: Listener { socket, name, file }, closer, .. } in fronts {
            match leaves {
                // The successor needs the file.
                true => std::mem::forget(file),
                false => drop(file),
            }
            // It still holds connections that were never accepted.
            drop(PeerFd::new(socket, &closer));
            while !closer.is_idle() && begun.elapsed() < CLOSED {
                thread::sleep(Duration::from_millis(1));
            }
            if !closer.is_idle() {
                warn!(
                    source = %name,
                    "descriptors of a front end cannot be closed: the process stays, doing nothing, until \
                     the server of their files releases them"
                );
            }
        }
    }

    fn page(&self) -> String {
        let mut page = Page::default();
        let uptime = self.begun.elapsed().as_secs_f64();
        page.one("uptime_seconds", "Since the service began.", uptime);
        let of = |read: fn(&Front) -> u64| {
            let fronts = self.fronts.iter();
            fronts.map(move |front| (&front.listener.name, read(front))).collect::<Vec<_>>()
        };
        let made = of(|front| front.connections.load(Ordering::Relaxed));
        let broken = of(|front| front.broken.load(Ordering::Relaxed));
        let silent = of(|front| front.silent.load(Ordering::Relaxed));
        let connected = of(|front| front.current.lock().is_some().into());
        page.many("connections_total", "Front ends so far.", "socket", made);
        let resumed = of(|front| front.resumed.load(Ordering::Relaxed));
        let help = "Connections that were taken over from the previous process.";
        page.many("resumed_connections_total", help, "socket", resumed);
        let help = "Connections that ended for another reason than the front end's leave.";
        page.many("broken_connections_total", help, "socket", broken);
        let help = "Connections that had sent nothing and gave way to others.";
        page.many("silent_connections_total", help, "socket", silent);
        page.many("connected", "Whether there is a front end.", "socket", connected);
        let mapped = of(|front| front.current.lock().as_ref().map_or(0, Shutdown::mapped));
        page.many("mapped_bytes", "Of the front end's files.", "socket", mapped);
        let help = "Lines of the log that were left out: more than their source may have, or than was taken.";
        page.one("log_lines_left_out_total", help, log::not_logged());
        let help = "System calls that the sandbox has refused.";
        let refused = ringfence_sandbox::refusals();
        page.one("sandbox_refusals_total", help, refused);
        self.service.figures(&mut page);
        page.text
    }
}
