//! The sockets that a service listens on.

use std::{
    fs, io,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use listenfd::ListenFd;
use parking_lot::Mutex;
use ringfence_lab::run::Usage;
use rustix::{
    fs::Mode,
    net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
    process::umask,
};

/// A socket in the file system; removed in the end, if it is still ours.
pub(crate) struct Placed {
    path: PathBuf,
    file: Option<(u64, u64)>,
}

impl Placed {
    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Placed {
    /// Takes it out of the file system, if it is still ours.
    fn remove(&self) {
        if self.file.is_some() && identity(&self.path) == self.file {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        self.remove();
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|about| (about.dev(), about.ino()))
}

/// Listens at `path`, with the permission bits `mode`. A socket that nobody listens on any more is
/// replaced.
///
/// # Errors
/// Somebody listens there; there is a file that is no socket; it cannot be made.
pub(crate) fn bind(path: &Path, mode: u32) -> io::Result<(UnixListener, Placed)> {
    if let Ok(about) = fs::symlink_metadata(path) {
        if !about.file_type().is_socket() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file, no socket"));
        }
        match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
            Ok(_) => {
                return Err(io::Error::new(
                    io::ErrorKind::AddrInUse,
                    "another process serves this socket",
                ));
            }
        }
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    bind_with(&socket, &SocketAddrUnix::new(path)?, Mode::from_raw_mode(mode))?;
    let placed = Placed { path: path.to_owned(), file: identity(path) };
    net::listen(&socket, 16)?;
    Ok((UnixListener::from(socket), placed))
}

/// Binds a socket whose file has the permission bits `mode` from its first moment on. Linux gives the file
/// those of the socket, less the umask. They cannot be set afterwards: by then another file may have
/// the name, or a link to one.
fn bind_with(socket: &OwnedFd, at: &SocketAddrUnix, mode: Mode) -> io::Result<()> {
    // The umask is the process's: two that change it at a time would leave it changed.
    static UMASK: Mutex<()> = Mutex::new(());
    let _alone = UMASK.lock();
    rustix::fs::fchmod(socket, mode)?;
    // What another thread makes meanwhile has at most the bits of the socket.
    let before = umask(mode.complement() & Mode::from_raw_mode(0o777));
    let bound = net::bind(socket, at);
    umask(before);
    Ok(bound?)
}

/// A socket of the service.
pub(crate) struct Listener {
    pub(super) socket: UnixListener,
    /// Its name in messages.
    pub(super) name: String,
    pub(super) placed: Option<Placed>,
}

impl Listener {
    /// The service ends: nobody finds the socket any more.
    pub(super) fn remove(&self) {
        if let Some(placed) = &self.placed {
            placed.remove();
        }
    }
}

/// The sockets at `paths`, or those that the service manager has opened (`LISTEN_FDS`), which go
/// first; there must be `count`.
///
/// # Errors
/// [`Usage`] if there are not so many; a socket cannot be had.
pub(crate) fn open(paths: &[&Path], count: usize, mode: u32) -> Result<Vec<Listener>> {
    let mut passed = ListenFd::from_env();
    let mut listeners = Vec::new();
    for at in 0..passed.len() {
        let socket = passed.take_unix_listener(at).context("a socket of the service manager")?;
        let socket = socket.context("a socket of the service manager was taken twice")?;
        socket.set_nonblocking(true)?;
        let name = socket.local_addr().ok().and_then(|at| Some(at.as_pathname()?.to_owned()));
        let name = name.map_or(format!("LISTEN_FDS[{at}]"), |path| path.display().to_string());
        listeners.push(Listener { socket, name, placed: None });
    }
    if listeners.is_empty() {
        for path in paths {
            let (socket, placed) =
                bind(path, mode).with_context(|| format!("cannot listen on {}", path.display()))?;
            let name = path.display().to_string();
            listeners.push(Listener { socket, name, placed: Some(placed) });
        }
    }
    match listeners.len() {
        0 => Err(Usage("no socket: --socket PATH, or have it passed in LISTEN_FDS".into()).into()),
        found if found != count => {
            Err(Usage(format!("{found} sockets where {count} are needed")).into())
        }
        _ => Ok(listeners),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_a_live_one_and_a_file_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        let (listener, placed) = bind(&path, 0o640).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        // More than the umask would leave.
        let all = folder.path().join("all");
        let _kept = bind(&all, 0o777).unwrap();
        assert_eq!(fs::metadata(&all).unwrap().mode() & 0o777, 0o777);
        assert_eq!(bind(&path, 0o600).err().unwrap().kind(), io::ErrorKind::AddrInUse);
        drop((listener, placed));
        assert!(!path.exists());
        fs::write(&path, "kept").unwrap();
        assert_eq!(bind(&path, 0o600).err().unwrap().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
    }

    #[test]
    fn what_took_its_place_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let (_listener, placed) = bind(&path, 0o600).unwrap();
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(placed);
        assert!(path.exists());
    }
}
