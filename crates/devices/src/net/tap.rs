//! A tap device of the kernel, through which packets leave or enter the machine.

use std::{
    fs::OpenOptions,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
};

use super::{round::Terms, wire::feature};
use ringfence_mem::HostSlice;
use rustix::io::Errno;

/// A structure ifreq as far as a tap needs it.
#[repr(C)]
struct IfReq {
    name: [u8; libc::IFNAMSIZ],
    flags: libc::c_short,
    rest: [u8; 22],
}

/// A tap device, with a descriptor for each of its queues.
#[derive(Debug)]
pub struct Tap {
    name: String,
    pub(super) queues: Vec<OwnedFd>,
    /// Whether the kernel cuts UDP datagrams.
    uso: bool,
}

/// Why a tap cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TapError {
    /// A name that no network interface can have.
    #[error("{0:?} is not a name of a network interface: 1 to 15 letters")]
    Name(String),
    /// The kernel has no tap devices.
    #[error("/dev/net/tun: {0} (is the module `tun` loaded, and the device in this container?)")]
    Device(io::Error),
    /// Not allowed.
    #[error(
        "{name}: {source}; it takes CAP_NET_ADMIN, or a tap made for this user: \
         ip tuntap add dev {name} mode tap multi_queue user USER"
    )]
    NotAllowed {
        /// The tap.
        name: String,
        /// The system call's error.
        source: io::Error,
    },
    /// It is there, but of another kind or in use.
    #[error("{name}: {source}; is it in use, not a tap, or made without multi_queue?")]
    Other {
        /// The tap.
        name: String,
        /// The system call's error.
        source: io::Error,
    },
    /// The kernel does not take what a driver has negotiated.
    #[error("{name}: the kernel refuses {what}: {source}")]
    Offloads {
        /// The tap.
        name: String,
        /// The offloads by name, or the size of headers.
        what: String,
        /// The system call's error.
        source: io::Error,
    },
}

impl Tap {
    /// Opens the tap `name`, which is made if it is not there, with `queues` queues, at least one.
    ///
    /// # Errors
    /// See [`TapError`].
    pub fn open(name: &str, queues: u16) -> Result<Tap, TapError> {
        if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains(['/', ' ', '\0']) {
            return Err(TapError::Name(name.into()));
        }
        let explain = |source: io::Error| {
            let name = name.to_owned();
            match source.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => TapError::NotAllowed { name, source },
                _ => TapError::Other { name, source },
            }
        };
        let many = libc::IFF_MULTI_QUEUE;
        let mut fds = Vec::new();
        for _ in 0..queues {
            let fd = device()?;
            let joined = match join(fd.as_fd(), name, many) {
                // A tap that was made without `multi_queue` has one queue.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) && queues == 1 => {
                    join(fd.as_fd(), name, 0)
                }
                joined => joined,
            };
            joined.map_err(explain)?;
            fds.push(fd);
        }
        let mut tap = Tap { name: name.into(), queues: fds, uso: true };
        // Kernels before 6.2 refuse what they do not know.
        tap.uso = tap.settle(Terms { features: feature::GUEST_OFFLOADS, timeout_ns: 0 }).is_ok();
        tap.settle(Terms::default())?;
        // The kernel spreads packets over all that are attached. A driver may use fewer.
        for queue in 0..queues {
            tap.attach(queue.into(), false);
        }
        Ok(tap)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it leaves undone, and does for others.
    pub(super) fn offloads(&self) -> u64 {
        use feature::*;
        let uso = if self.uso { 0 } else { GUEST_USO4 | GUEST_USO6 | HOST_USO };
        (HOST_OFFLOADS | GUEST_OFFLOADS) & !(HOST_UFO | GUEST_UFO | uso)
    }

    /// A driver has settled on this.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub(super) fn settle(&self, terms: Terms) -> Result<(), TapError> {
        let has = |bit| terms.features & bit != 0;
        let (mut offloads, mut names) = (0, Vec::new());
        if has(feature::GUEST_CSUM) {
            for (bits, flag, name) in [
                (feature::GUEST_CSUM, libc::TUN_F_CSUM, "GUEST_CSUM"),
                (feature::GUEST_TSO4, libc::TUN_F_TSO4, "GUEST_TSO4"),
                (feature::GUEST_TSO6, libc::TUN_F_TSO6, "GUEST_TSO6"),
                (feature::GUEST_ECN, libc::TUN_F_TSO_ECN, "GUEST_ECN"),
                (feature::GUEST_USO4, libc::TUN_F_USO4, "GUEST_USO4"),
                (feature::GUEST_USO6, libc::TUN_F_USO6, "GUEST_USO6"),
            ] {
                if has(bits) {
                    offloads |= flag;
                    names.push(name);
                }
            }
        }
        // Both or none.
        let uso = libc::TUN_F_USO4 | libc::TUN_F_USO6;
        if offloads & uso != uso || !self.uso {
            offloads &= !uso;
        }
        let refused = |what, source| TapError::Offloads { name: self.name.clone(), what, source };
        let header = terms.header() as libc::c_int;
        for fd in &self.queues {
            // SAFETY: the ioctl reads one int, which outlives the call.
            check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETVNETHDRSZ as _, &header) })
                .map_err(|error| refused(format!("headers of {header} bytes"), error))?;
        }
        let Some(fd) = self.queues.first() else { return Ok(()) };
        let offloads = libc::c_ulong::from(offloads);
        // SAFETY: the argument is a number.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD as _, offloads) })
            .map_err(|error| refused(format!("the offloads {}", names.join(", ")), error))
    }

    /// Sets whether the kernel uses a queue: packets in a queue without a reader are lost.
    pub(super) fn attach(&self, queue: usize, attached: bool) {
        let (Some(fd), true) = (self.queues.get(queue), self.queues.len() > 1) else { return };
        let flags = if attached { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
        let request = IfReq { name: [0; 16], flags: flags as libc::c_short, rest: [0; 22] };
        // Fails if it is already in that state. SAFETY: the ioctl reads an ifreq, which outlives
        // the call.
        let _ = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETQUEUE as _, &request) };
    }

    /// A queue's descriptor.
    pub(super) fn queue(&self, queue: usize) -> BorrowedFd<'_> {
        self.queues[queue].as_fd()
    }

    /// Takes the next packet, with its header; `None` if there is none.
    ///
    /// # Errors
    /// `INVAL`: the kernel has dropped it, because it cannot describe it. Others: the device is
    /// gone.
    pub(super) fn read(&self, queue: usize, into: &mut [u8]) -> Result<Option<usize>, Errno> {
        match rustix::io::read(&self.queues[queue], into) {
            Ok(len) => Ok(Some(len).filter(|&len| len > 0)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Announces to the network that the station with this address is here now.
    ///
    /// # Errors
    /// The kernel does not take it.
    pub(super) fn announce(&self, mac: [u8; 6], terms: Terms) -> io::Result<()> {
        let packet = [&vec![0; terms.header()][..], &rarp(mac)].concat();
        rustix::io::write(self.queue(0), &packet)?;
        Ok(())
    }

    /// Sends a packet.
    ///
    /// # Errors
    /// The kernel does not take it.
    pub(super) fn write(
        &self,
        queue: usize,
        header: &[u8],
        pieces: &[HostSlice<'_>],
        vectors: &mut Vec<libc::iovec>,
    ) -> io::Result<()> {
        let part =
            |base: *const u8, len| libc::iovec { iov_base: base.cast_mut().cast(), iov_len: len };
        vectors.clear();
        vectors.push(part(header.as_ptr(), header.len()));
        vectors.extend(pieces.iter().map(|piece| part(piece.as_ptr(), piece.len())));
        let fd = self.queues[queue].as_raw_fd();
        // SAFETY: every vector is memory that is mapped while `header` and `pieces` are borrowed,
        // and the kernel only reads it.
        let sent = unsafe { libc::writev(fd, vectors.as_ptr(), vectors.len() as libc::c_int) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// A broadcast from a station, by which switches learn where it is: a request of RARP (RFC 903) for
/// its own address.
fn rarp(mac: [u8; 6]) -> [u8; 60] {
    let mut frame = [0; 60];
    frame[..6].fill(0xff);
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    for at in [6, 22, 32] {
        frame[at..at + 6].copy_from_slice(&mac);
    }
    frame
}

/// The most pieces that one packet is sent in.
pub(super) const MAX_PIECES: usize = 1000;

fn device() -> Result<OwnedFd, TapError> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open("/dev/net/tun");
    file.map(OwnedFd::from).map_err(TapError::Device)
}

fn join(fd: BorrowedFd<'_>, name: &str, more: libc::c_int) -> io::Result<()> {
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | more;
    let mut request = IfReq { name: [0; 16], flags: flags as libc::c_short, rest: [0; 22] };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: the ioctl reads and writes an ifreq, which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF as _, &mut request) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ringfence_run::worker::{Notify, Worker};

    use super::*;
    use crate::net::{Link, Net, NetOptions};

    #[test]
    fn a_device_with_more_pairs_than_its_tap_has_queues_is_refused() {
        let tap = Arc::new(Tap { name: "test".into(), queues: Vec::new(), uso: false });
        let workers = Arc::new([Worker::spawn("test", Notify::Sleep).unwrap()]);
        let refused = Net::new(NetOptions::new("test", Link::Tap(tap)), workers).map(drop);
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_name_that_no_interface_has_is_refused() {
        for name in ["", "a/b", "a b", "sixteen-letters-"] {
            assert!(matches!(Tap::open(name, 1), Err(TapError::Name(_))), "{name}");
        }
        assert_eq!(size_of::<IfReq>(), size_of::<libc::ifreq>());
    }

    #[test]
    fn a_station_is_announced_by_a_request_for_its_own_address() {
        let frame = rarp([2, 0, 0, 0, 0, 7]);
        assert_eq!(frame[..6], [0xff; 6]);
        assert_eq!(frame[6..14], [2, 0, 0, 0, 0, 7, 0x80, 0x35]);
        // Ethernet, IPv4, "request reverse", and both addresses, with none of IP.
        assert_eq!(frame[14..22], [0, 1, 8, 0, 6, 4, 0, 3]);
        assert_eq!(frame[22..42], [2, 0, 0, 0, 0, 7, 0, 0, 0, 0, 2, 0, 0, 0, 0, 7, 0, 0, 0, 0]);
    }
}
