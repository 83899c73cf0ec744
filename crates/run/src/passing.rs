//! Messages with descriptors, over Unix sockets (`SCM_RIGHTS`).

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::{Errno, retry_on_intr},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};

/// The most descriptors of a message: Linux's SCM_MAX_FD.
pub const MOST_FDS: usize = 253;

/// What [`receive`] has received.
#[derive(Debug)]
pub struct Received {
    /// How many bytes.
    pub bytes: usize,
    /// Their descriptors, closed on exec. Those of a hostile peer may take long to close:
    /// [`PeerFd`](crate::PeerFd).
    pub fds: Vec<OwnedFd>,
    /// Whether descriptors were lost, because the process has too many, or was to take none.
    pub truncated: bool,
}

/// Sends `bytes` with descriptors. Returns how many bytes were sent.
///
/// # Errors
/// Those of sendmsg(2) except EINTR; more than [`MOST_FDS`] descriptors are EINVAL.
pub fn send(
    to: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    retry_on_intr(|| sendmsg(&to, &[IoSlice::new(bytes)], &mut control, flags))
}

/// Receives bytes, and their descriptors if `with_fds`. Closes none: with less room than for
/// [`MOST_FDS`] the kernel would close the rest, within the call.
///
/// # Errors
/// Those of recvmsg(2) except EINTR.
pub fn receive(
    from: impl AsFd,
    bytes: &mut [u8],
    flags: RecvFlags,
    with_fds: bool,
) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(if with_fds { &mut space } else { &mut [] });
    let (mut data, flags) = ([IoSliceMut::new(bytes)], flags | RecvFlags::CMSG_CLOEXEC);
    let message = retry_on_intr(|| recvmsg(&from, &mut data, &mut control, flags))?;
    let mut fds = Vec::new();
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
            fds.extend(rights);
        }
    }
    let truncated = message.flags.contains(ReturnFlags::CTRUNC);
    Ok(Received { bytes: message.bytes, fds, truncated })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn descriptors_come_with_their_bytes_as_many_as_linux_takes() {
        let (here, there) = UnixStream::pair().unwrap();
        let fds = [here.as_fd(); MOST_FDS + 1];
        let sent = |fds| send(&here, b"bytes", fds, SendFlags::empty());
        assert_eq!(sent(&fds), Err(Errno::INVAL));
        let mut bytes = [0; 8];
        let mut received = |with_fds| {
            assert_eq!(sent(&fds[..MOST_FDS]), Ok(5));
            receive(&there, &mut bytes, RecvFlags::empty(), with_fds).unwrap()
        };
        let all = received(true);
        assert_eq!((all.bytes, all.fds.len(), all.truncated), (5, MOST_FDS, false));
        let none = received(false);
        assert_eq!((none.bytes, none.fds.len(), none.truncated), (5, 0, true));
        assert_eq!(bytes[..5], *b"bytes");
    }
}
