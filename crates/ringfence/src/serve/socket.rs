//! The sockets that a service listens on.

use std::{
    fs, io,
    os::unix::{
        fs::{FileTypeExt, MetadataExt, PermissionsExt},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use listenfd::ListenFd;
use ringfence_lab::run::Usage;
use rustix::{
    fs::Mode,
    net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
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

impl Drop for Placed {
    fn drop(&mut self) {
        if self.file.is_some() && identity(&self.path) == self.file {
            let _ = fs::remove_file(&self.path);
        }
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
    // Linux gives the file the bits that the socket has, less the umask: from its first moment on
    // nobody else may connect.
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    let placed = Placed { path: path.to_owned(), file: identity(path) };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    net::listen(&socket, 16)?;
    Ok((UnixListener::from(socket), placed))
}

/// A socket of the service.
pub(crate) struct Listener {
    pub(super) socket: UnixListener,
    /// Its name in messages.
    pub(super) name: String,
    _placed: Option<Placed>,
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
        listeners.push(Listener { socket, name, _placed: None });
    }
    if listeners.is_empty() {
        for path in paths {
            let (socket, placed) =
                bind(path, mode).with_context(|| format!("cannot listen on {}", path.display()))?;
            let name = path.display().to_string();
            listeners.push(Listener { socket, name, _placed: Some(placed) });
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
