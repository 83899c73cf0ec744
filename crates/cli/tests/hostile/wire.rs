//! vhost-user byte by byte: a front end that sends what no library would.

use std::{
    io::{ErrorKind, IoSlice, Read as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Instant,
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
        SocketFlags, SocketType, connect, sendmsg, socket_with,
    },
};

use crate::common::LIMIT;

/// The requests that the attacks use, by number.
pub(crate) mod request {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const RESET_OWNER: u32 = 4;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_LOG_BASE: u32 = 6;
    pub(crate) const SET_LOG_FD: u32 = 7;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const GET_VRING_BASE: u32 = 11;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const SET_VRING_ERR: u32 = 14;
    pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(crate) const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(crate) const IOTLB_MSG: u32 = 22;
    pub(crate) const GET_CONFIG: u32 = 24;
    pub(crate) const SET_CONFIG: u32 = 25;
    pub(crate) const GET_INFLIGHT_FD: u32 = 31;
    pub(crate) const SET_INFLIGHT_FD: u32 = 32;
    pub(crate) const RESET_DEVICE: u32 = 34;
    pub(crate) const ADD_MEM_REG: u32 = 37;
    pub(crate) const REM_MEM_REG: u32 = 38;
    pub(crate) const SET_STATUS: u32 = 39;
    pub(crate) const SET_DEVICE_STATE_FD: u32 = 42;
}

const VERSION: u32 = 1;
const NEED_REPLY: u32 = 1 << 3;
/// The most descriptors that one `sendmsg` can carry.
pub(crate) const MOST_FDS: usize = 253;

pub(crate) fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// `struct vhost_vring_state`.
pub(crate) fn state(index: u32, number: u32) -> Vec<u8> {
    [index.to_ne_bytes(), number.to_ne_bytes()].concat()
}

/// `struct vhost_vring_addr`: descriptors, used, available, log.
pub(crate) fn addresses(index: u32, flags: u32, at: [u64; 4]) -> Vec<u8> {
    [state(index, flags), words(&at)].concat()
}

/// `struct vhost_iotlb_msg`.
pub(crate) fn iotlb(iova: u64, size: u64, user: u64, access: u8, kind: u8) -> Vec<u8> {
    [words(&[iova, size, user]), vec![access, kind, 0, 0, 0, 0, 0, 0]].concat()
}

/// `struct vhost_user_inflight`.
pub(crate) fn in_flight(size: u64, offset: u64, queues: u16, ring: u16) -> Vec<u8> {
    let sizes = u64::from(queues) | u64::from(ring) << 16;
    words(&[size, offset, sizes.to_le()])
}

/// A header with any flags and any size.
pub(crate) fn header(request: u32, flags: u32, size: u32) -> Vec<u8> {
    [request, flags, size].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// A connection. What is sent to a back end that has hung up is lost, rightly.
pub(crate) struct Client {
    pub(crate) stream: UnixStream,
}

impl Client {
    /// Waits until the service listens.
    pub(crate) fn connect(path: &Path) -> Client {
        let begun = Instant::now();
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) => assert!(begun.elapsed() < LIMIT, "{}: {error}", path.display()),
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        };
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
        Client { stream }
    }

    /// A connection, unless the queue of connections to be accepted is full.
    pub(crate) fn connect_now(path: &Path) -> Option<Client> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        match connect(&socket, &SocketAddrUnix::new(path).unwrap()) {
            Ok(()) => {}
            Err(Errno::AGAIN) => return None,
            Err(errno) => panic!("{}: {errno}", path.display()),
        }
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false).unwrap();
        Some(Client { stream })
    }

    /// Sends these bytes, the descriptors with the first of them; returns whether the peer was
    /// still there.
    pub(crate) fn raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
        let mut sent = 0;
        while sent < bytes.len() {
            let part = [IoSlice::new(&bytes[sent..])];
            match sendmsg(self.stream.as_fd(), &part, &mut control, SendFlags::NOSIGNAL) {
                Ok(count) => sent += count,
                Err(errno) => {
                    let kind = errno.kind();
                    let gone = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&kind);
                    assert!(gone, "it neither takes a message nor hangs up: {errno}");
                    return false;
                }
            }
            control.clear();
        }
        true
    }

    pub(crate) fn send(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let header = header(request, VERSION, payload.len() as u32);
        self.raw(&[&header, payload].concat(), fds)
    }

    /// The next message from the back end: `None` if it has hung up.
    pub(crate) fn receive(&self) -> Option<Vec<u8>> {
        let mut header = [0; 12];
        self.read(&mut header)?;
        let len = u32::from_ne_bytes(header[8..].try_into().unwrap());
        let mut payload = vec![0; len as usize];
        self.read(&mut payload)?;
        Some(payload)
    }

    fn read(&self, into: &mut [u8]) -> Option<()> {
        match (&self.stream).read_exact(into) {
            Ok(()) => Some(()),
            Err(error) => {
                let kinds = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset];
                let gone = kinds.contains(&error.kind());
                assert!(gone, "it neither replies nor hangs up: {error}");
                None
            }
        }
    }

    /// A request that always gets a reply.
    pub(crate) fn call(&self, request: u32, payload: &[u8]) -> Option<Vec<u8>> {
        self.send(request, payload, &[]).then(|| self.receive()).flatten()
    }

    /// The same for one number.
    pub(crate) fn number(&self, request: u32) -> Option<u64> {
        Some(u64::from_ne_bytes(self.call(request, &[])?.try_into().ok()?))
    }

    /// A request that gets a reply if REPLY_ACK was negotiated; returns whether the back end
    /// reports success.
    pub(crate) fn set(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let header = header(request, VERSION | NEED_REPLY, payload.len() as u32);
        self.raw(&[&header, payload].concat(), fds)
            && self.receive().is_some_and(|reply| reply == [0; 8])
    }

    /// Waits until it hangs up; what it still sends is lost.
    pub(crate) fn drain(&self) {
        while self.receive().is_some() {}
    }
}
