//! The sockets that a service listens on.

use std::{
    io::{self, ErrorKind},
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixListener,
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use super::manager::ENDS;
use crate::usage;
use anyhow::{Context, Result};
use listenfd::ListenFd;
use parking_lot::Mutex;
use ringfence_devices::path::FolderEntry;
use rustix::{
    fs::{
        AtFlags, FileType, FlockOperation, Gid, Mode, OFlags, Stat, Uid, chownat, flock, openat,
        statat, unlinkat,
    },
    io::Errno,
    net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
    process::{geteuid, umask},
};

/// A socket in the file system; removed at the end, if it is still ours.
pub(crate) struct SocketFile {
    entry: FolderEntry,
    /// Its device and inode.
    identity: (u64, u64),
    /// It was removed: the next file of that name may have the same inode number.
    gone: AtomicBool,
}

impl SocketFile {
    /// Its folder.
    pub(super) fn folder(&self) -> BorrowedFd<'_> {
        self.entry.folder()
    }

    /// The socket that the previous process has put there.
    fn existing(path: &Path) -> io::Result<SocketFile> {
        let entry = FolderEntry::of(path)?;
        let (_, stat) = entry.look()?;
        Ok(SocketFile::new(entry, &stat))
    }

    fn new(entry: FolderEntry, stat: &Stat) -> SocketFile {
        SocketFile { entry, identity: identity(stat), gone: AtomicBool::new(false) }
    }

    /// Removes it from the file system, if it is still ours.
    pub(super) fn remove(&self) {
        if self.gone.swap(true, Ordering::Relaxed) {
            return;
        }
        let (folder, name) = (self.entry.folder(), self.entry.name());
        let stat = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW);
        if stat.is_ok_and(|stat| identity(&stat) == self.identity) {
            let _ = unlinkat(folder, name, AtFlags::empty());
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.remove();
    }
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

fn is_socket(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Socket
}

/// Who may connect to a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    /// Its permission bits.
    pub(crate) mode: u32,
    /// Its owner, unless that is the process's user.
    pub(crate) owner: Option<Uid>,
    /// Its group, unless that is the process's.
    pub(crate) group: Option<Gid>,
}

impl Access {
    /// Only this user.
    pub(crate) const OWN: Access = Access { mode: 0o600, owner: None, group: None };
}

/// Listens at `path`. Replaces a socket that no process listens on any more.
///
/// # Errors
/// Another process listens there; there is a file that is not a socket; it cannot be made; another
/// user's link leads there.
pub(crate) fn bind(path: &Path, access: Access) -> io::Result<(UnixListener, SocketFile)> {
    let refuse = |kind, why| Err(io::Error::new(kind, why));
    let at = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = || net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let entry = FolderEntry::of(path)?;
    let _alone = lock(entry.folder());
    if let Ok((_, stat)) = entry.look() {
        if !is_socket(&stat) {
            let why = "there is a file, not a socket: remove it, or name another path";
            return refuse(ErrorKind::AlreadyExists, why);
        }
        match net::connect(socket()?, &at) {
            Err(Errno::CONNREFUSED) => unlinkat(entry.folder(), entry.name(), AtFlags::empty())?,
            Err(Errno::NOENT) => {}
            // AGAIN: it has as many connections to accept as it may.
            Ok(()) | Err(Errno::AGAIN) => {
                return refuse(ErrorKind::AddrInUse, "another process serves this socket");
            }
            Err(error) => return Err(error.into()),
        }
    }
    let socket = socket()?;
    bind_with(&socket, &at, Mode::from_raw_mode(access.mode))?;
    // It is in its place, unless a folder on the way was replaced meanwhile.
    let (node, stat) = entry.look()?;
    if !is_socket(&stat) || stat.st_uid != geteuid().as_raw() {
        return refuse(ErrorKind::AlreadyExists, "another process has put a file there");
    }
    let file = SocketFile::new(entry, &stat);
    // No peer can connect before it listens.
    if access.owner.is_some() || access.group.is_some() {
        chownat(&node, "", access.owner, access.group, AtFlags::EMPTY_PATH)?;
    }
    net::listen(&socket, 16)?;
    Ok((UnixListener::from(socket), file))
}

/// Binds a socket whose file has the permission bits `mode` from its first moment on. Linux gives
/// the file those of the socket, less the umask. They cannot be set afterwards: by then another
/// file may have the name, or a link to one.
fn bind_with(socket: &OwnedFd, at: &SocketAddrUnix, mode: Mode) -> io::Result<()> {
    // The umask is per process: two threads that change it at a time would leave it changed.
    static UMASK: Mutex<()> = Mutex::new(());
    let _alone = UMASK.lock();
    rustix::fs::fchmod(socket, mode)?;
    // Files that other threads make meanwhile have at most the bits of the socket.
    let before = umask(mode.complement() & Mode::from_raw_mode(0o777));
    let bound = net::bind(socket, at);
    umask(before);
    Ok(bound?)
}

/// A socket of the service.
pub(crate) struct Listener {
    // Dropped before the socket: while this process listens, no other one binds there.
    pub(super) file: Option<SocketFile>,
    pub(super) socket: UnixListener,
    /// Its name in messages.
    pub(super) name: String,
}

impl Listener {
    /// Listens at `path`, for those that `access` admits.
    ///
    /// # Errors
    /// As [`bind`].
    pub(super) fn bind(path: &Path, access: Access) -> Result<Listener> {
        let name = path.display().to_string();
        let (socket, file) =
            bind(path, access).with_context(|| format!("cannot listen on {name}"))?;
        Ok(Listener { socket, name, file: Some(file) })
    }

    /// Its folder, if the service has put it there.
    pub(super) fn folder(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(SocketFile::folder)
    }

    /// The service ends: removes the socket's file.
    pub(super) fn remove(&self) {
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}

/// What the service manager has passed.
pub(super) struct Passed {
    listeners: Vec<UnixListener>,
    /// What the previous process has left.
    pub(super) ends: Option<[OwnedFd; 2]>,
}

impl Passed {
    /// The name of a socket that was passed.
    pub(super) fn name(&self, at: usize) -> Option<PathBuf> {
        name(self.listeners.get(at)?)
    }
}

/// The file of a socket, if it has one.
fn name(socket: &UnixListener) -> Option<PathBuf> {
    Some(socket.local_addr().ok()?.as_pathname()?.to_owned())
}

/// What the service manager has passed (`LISTEN_FDS`): sockets to listen on, and descriptors that
/// it has kept.
///
/// # Errors
/// A descriptor is something else.
pub(super) fn passed() -> Result<Passed> {
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let mut fds = ListenFd::from_env();
    let (mut listeners, mut ends) = (Vec::new(), [None, None]);
    for at in 0..fds.len() {
        let name = names.next().unwrap_or_default();
        let taken = "a descriptor of the service manager was taken twice";
        if let Some(end) = ENDS.iter().position(|end| *end == name) {
            let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
            let (family, kind) = (family.as_raw().into(), kind.as_raw() as i32);
            let kept = fds.take_custom(at, family, kind, "what the previous process has left");
            ends[end] = Some(kept?.context(taken)?);
            continue;
        }
        let socket = fds.take_unix_listener(at).context("a socket of the service manager")?;
        listeners.push(socket.context(taken)?);
    }
    let [write, read] = ends;
    Ok(Passed { listeners, ends: write.zip(read).map(|(write, read)| [write, read]) })
}

/// Locks a folder, so that one process at a time replaces what is there. A folder that cannot be
/// read, or that others keep locked, does not hold up the start. Without the lock, two starts at
/// once may replace each other's socket.
fn lock(folder: BorrowedFd<'_>) -> Option<OwnedFd> {
    let how = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat(folder, ".", how, Mode::empty()).ok()?;
    // After the first time-out no other folder is waited for.
    static GIVEN_UP: AtomicBool = AtomicBool::new(false);
    let begun = Instant::now();
    while flock(&folder, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
        && !GIVEN_UP.load(Ordering::Relaxed)
    {
        GIVEN_UP.store(begun.elapsed() >= LOCKED_WITHIN, Ordering::Relaxed);
        thread::sleep(LOCKED_WITHIN / 200);
    }
    Some(folder)
}

/// For how long another process may keep a folder locked: far longer than a start takes. Any user
/// that can read a folder can lock it.
const LOCKED_WITHIN: Duration = Duration::from_secs(2);

/// The sockets that were passed, or those that the previous process has left, or those at `paths`;
/// there must be `count`.
///
/// # Errors
/// [`Usage`](usage::Usage) if their number differs; a socket cannot be opened.
pub(super) fn open(
    paths: &[&Path],
    count: usize,
    access: Access,
    passed: Passed,
    left: Option<Vec<UnixListener>>,
) -> Result<Vec<Listener>> {
    let mut listeners = Vec::new();
    let activated = !passed.listeners.is_empty();
    let sockets = if activated { passed.listeners } else { left.unwrap_or_default() };
    for (at, socket) in sockets.into_iter().enumerate() {
        socket.set_nonblocking(true)?;
        let path = name(&socket);
        let name = path.as_ref().map(|path| path.display().to_string());
        let name = name.unwrap_or(format!("LISTEN_FDS[{at}]"));
        let own = path.filter(|path| !activated && paths.get(at) == Some(&&**path));
        match own.map(|path| (SocketFile::existing(&path), path)) {
            // The previous process removed it when it ended by itself, or another process did.
            Some((Err(error), path)) if error.kind() == ErrorKind::NotFound => {
                listeners.push(Listener::bind(&path, access)?);
            }
            own => {
                let file = own.and_then(|(file, _)| file.ok());
                listeners.push(Listener { socket, name, file });
            }
        }
    }
    if listeners.is_empty() {
        let bound = paths.iter().map(|path| Listener::bind(path, access));
        listeners = bound.collect::<Result<_>>()?;
    }
    match listeners.len() {
        0 => Err(usage::wrong("no socket: --socket PATH, or have it passed in LISTEN_FDS")),
        found if found != count => Err(usage::wrong(format!(
            "the service takes {count} sockets, and LISTEN_FDS or the previous process has passed \
             {found}: pass {count}"
        ))),
        _ => Ok(listeners),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::{fs::MetadataExt as _, net::UnixStream},
    };

    use super::*;

    #[test]
    fn a_socket_whose_process_accepts_nothing_is_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let at = SocketAddrUnix::new(&path).unwrap();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            || net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let listener = socket();
        net::bind(&listener, &at).unwrap();
        net::listen(&listener, 0).unwrap();
        let waiting = [(); 2].map(|()| socket());
        let full = waiting.iter().any(|socket| net::connect(socket, &at) == Err(Errno::AGAIN));
        assert!(full, "another one would wait");
        let refused = bind(&path, Access::OWN).map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AddrInUse);
    }

    #[test]
    fn of_two_that_replace_a_stale_socket_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        for _ in 0..200 {
            drop(UnixListener::bind(&path).unwrap());
            let bound = std::thread::scope(|scope| {
                let both = [(); 2].map(|()| scope.spawn(|| bind(&path, Access::OWN)));
                both.map(|one| one.join().unwrap())
            });
            assert_eq!(bound.iter().filter(|bound| bound.is_ok()).count(), 1);
            UnixStream::connect(&path).expect("it leads to the one that listens");
            drop(bound);
            let _ = fs::remove_file(&path);
        }
    }

    #[test]
    fn a_stale_socket_is_replaced_a_live_one_and_a_file_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        let (listener, file) = bind(&path, Access { mode: 0o640, ..Access::OWN }).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        // More than the umask would allow.
        let all = folder.path().join("all");
        let _kept = bind(&all, Access { mode: 0o777, ..Access::OWN }).unwrap();
        assert_eq!(fs::metadata(&all).unwrap().mode() & 0o777, 0o777);
        assert_eq!(bind(&path, Access::OWN).err().unwrap().kind(), io::ErrorKind::AddrInUse);
        drop((listener, file));
        assert!(!path.exists());
        fs::write(&path, "kept").unwrap();
        assert_eq!(bind(&path, Access::OWN).err().unwrap().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
    }

    #[test]
    fn what_took_its_place_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let (_listener, file) = bind(&path, Access::OWN).unwrap();
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(file);
        assert!(path.exists());
    }
}
