//! The process at the other end of a socket.

use std::{io, mem, os::fd::AsRawFd, os::unix::net::UnixStream};

/// The process that has connected, or had the pair of sockets made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its effective user at that time. A user that is not mapped in this user namespace is 65534.
    pub uid: u32,
    /// Its number; 0 if it is in no namespace that this process can see.
    pub pid: i32,
}

impl Peer {
    /// As the kernel has it (SO_PEERCRED).
    ///
    /// # Errors
    /// The system call's.
    pub fn of(stream: &UnixStream) -> io::Result<Peer> {
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = mem::size_of_val(&peer) as libc::socklen_t;
        // SAFETY: the descriptor is open as long as `stream` is borrowed; the kernel writes at most `len` bytes, which
        // `peer` has, and any bytes make one.
        let done = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut peer).cast(),
                &raw mut len,
            )
        };
        match done {
            0 => Ok(Peer { uid: peer.uid, pid: peer.pid }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_of_this_process_is_of_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let pid = i32::try_from(std::process::id()).unwrap();
        assert_eq!(Peer::of(&one).unwrap(), Peer { uid, pid });
    }
}
