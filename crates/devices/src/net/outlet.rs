//! Between a pair of queues and a queue of a tap device.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::{event::epoll, io::Errno};
use tracing::error;
use zerocopy::{FromZeros, IntoBytes};

use super::{
    pieces::{Lasting, Writer, recycle},
    receive::{read, receive},
    round::{BusRing, Lane, Round, Side, Step, Want},
    stats::Lost,
    tap::{MAX_PIECES, Tap},
    wire::{Header, MAX_PACKET},
};

/// One queue of a tap, as a worker serves it.
pub(super) struct Outlet {
    tap: Arc<Tap>,
    queue: usize,
    /// Readable while the tap is. Unlike the tap itself it loses nothing when it is read to clear a
    /// notification.
    readable: OwnedFd,
    /// What came from the tap, and its packet that has no room yet.
    packet: Box<[u8]>,
    waiting: Option<usize>,
    vectors: Vec<libc::iovec>,
    /// The state of the way in. The way out uses the pair's lane.
    pub(super) inward: Lane,
    /// Whether a driver takes packets at all.
    open: bool,
    /// What is needed before more can be taken in.
    missing: Missing,
    /// The tap is gone, as far as this driver has found.
    gone: bool,
}

/// What is missing to take in a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    /// A packet.
    Packet,
    /// Buffers.
    Buffers,
    /// The ring, its translation, or that of a buffer: these are retried by time.
    Ring,
}

impl Outlet {
    /// # Errors
    /// No descriptor is left.
    pub(super) fn new(tap: &Arc<Tap>, queue: usize) -> std::io::Result<Outlet> {
        let readable = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&readable, tap.queue(queue), data, epoll::EventFlags::IN)?;
        Ok(Outlet {
            tap: Arc::clone(tap),
            queue,
            readable,
            packet: vec![0; MAX_PACKET].into(),
            waiting: None,
            vectors: Vec::new(),
            inward: Lane::default(),
            open: false,
            missing: Missing::Ring,
            gone: false,
        })
    }

    /// What becomes readable when there is something to receive, if that can be received.
    pub(super) fn waker(&self) -> Option<BorrowedFd<'_>> {
        (self.missing == Missing::Packet).then(|| self.readable.as_fd())
    }

    /// Whether there is something to receive that can be received.
    pub(super) fn is_due(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        self.waker().is_some_and(|waker| {
            let mut fds = [PollFd::from_borrowed_fd(waker, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).is_ok_and(|count| count > 0)
        })
    }

    /// A driver begins or ends to take packets.
    pub(super) fn set_open(&mut self, open: bool) {
        if self.open != open {
            self.tap.attach(self.queue, open);
            self.open = open;
            (self.waiting, self.inward) = (None, Lane::default());
            (self.missing, self.gone) = (Missing::Ring, false);
        }
    }

    /// There is no ring for what comes in.
    pub(super) fn has_no_ring(&mut self, now_ns: u64) {
        self.missing = Missing::Ring;
        self.inward.end(now_ns);
    }

    /// Whether a packet waits for buffers.
    pub(super) fn waits_for_buffers(&self) -> bool {
        self.missing == Missing::Buffers
    }

    /// Packets of a driver go out. True if there were any.
    pub(super) fn send<S: Lasting>(
        &mut self,
        lane: &mut Lane,
        src: &mut BusRing<'_, S>,
        now_ns: u64,
    ) -> bool {
        let Some(mut round) = Round::begin(lane, src, now_ns) else { return false };
        if !round.take(src) {
            return true;
        }
        let mut pieces = recycle(std::mem::take(&mut lane.source));
        while src.ring.held() > 0 && round.has_room() {
            pieces.clear();
            let header = match read(src, &mut pieces) {
                Ok(header) => header,
                Err(Step::Lost(why)) => {
                    round.lose(src.ring, why);
                    continue;
                }
                Err(_) => {
                    round.wants = Some(Want::Translation(Side::Source));
                    break;
                }
            };
            let bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
            let header = match header.described(bytes) {
                Ok(header) => header,
                Err(why) => {
                    round.lose(src.ring, why);
                    continue;
                }
            };
            let head = &header.as_bytes()[..src.terms.header()];
            let sent = if pieces.len() <= MAX_PIECES {
                self.tap.write(self.queue, head, &pieces, &mut self.vectors)
            } else {
                self.write_whole(head, &pieces)
            };
            match sent {
                Ok(()) => {
                    src.ring.give_back(0);
                    round.moved(bytes as u64);
                }
                Err(error) => {
                    let why = match error.raw_os_error() {
                        Some(libc::EINVAL) => Lost::Malformed,
                        Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => Lost::NoRoom,
                        _ => Lost::NoReceiver,
                    };
                    round.lose(src.ring, why);
                }
            }
        }
        lane.source = recycle(pieces);
        round.end(lane, src)
    }

    /// A packet in more pieces than a system call takes.
    #[cold]
    fn write_whole(
        &mut self,
        head: &[u8],
        pieces: &[ringfence_mem::HostSlice<'_>],
    ) -> std::io::Result<()> {
        let mut whole = vec![0; pieces.iter().map(|piece| piece.len()).sum()];
        let mut at = 0;
        pieces.iter().for_each(|piece| at += piece.copy_to(&mut whole[at..]));
        let whole = [head, &whole].concat();
        rustix::io::write(self.tap.queue(self.queue), &whole)?;
        Ok(())
    }

    /// Packets come in to a driver. True if there were any.
    pub(super) fn take_in<D: Lasting>(&mut self, dst: &mut BusRing<'_, D>, now_ns: u64) -> bool {
        self.missing = Missing::Ring;
        let Some(mut round) = Round::begin(&mut self.inward, dst, now_ns) else { return false };
        while round.has_room() && !self.gone {
            let next = match self.waiting {
                Some(len) => Ok(Some(len)),
                None => self.tap.read(self.queue, &mut self.packet),
            };
            let len = match next {
                Ok(Some(len)) => len,
                Ok(None) => {
                    self.missing = Missing::Packet;
                    break;
                }
                // The kernel cannot describe the packet, and has dropped it.
                Err(Errno::INVAL) => {
                    dst.ring.counters.lose(Lost::Malformed, 1);
                    round.lost += 1;
                    continue;
                }
                Err(error) => {
                    let queue = self.queue;
                    error!(source = %self.tap.name(), "nothing comes from queue {queue} any more: {error}");
                    self.gone = true;
                    break;
                }
            };
            self.waiting = Some(len);
            let (head, bytes) = self.packet[..len].split_at(dst.terms.header().min(len));
            let mut header = Header::new_zeroed();
            if let Some(part) = header.as_mut_bytes().get_mut(..head.len()) {
                part.copy_from_slice(head);
            }
            let fill = |writer: &mut Writer<'_, '_>| writer.put_bytes(bytes);
            let store = &mut self.inward.target;
            match receive(store, dst, header, bytes.len(), &mut round, fill) {
                Ok(Step::Moved { bytes }) => {
                    self.waiting = None;
                    round.moved(bytes);
                }
                Ok(Step::Lost(why)) => {
                    self.waiting = None;
                    dst.ring.counters.lose(why, 1);
                    round.lost += 1;
                }
                Ok(Step::Missing(side)) => {
                    round.wants = Some(Want::Translation(side));
                    break;
                }
                // The kernel drops what comes meanwhile.
                Ok(Step::Full) => {
                    self.missing = Missing::Buffers;
                    break;
                }
                Err(error) => {
                    dst.ring.fail(error);
                    break;
                }
            }
        }
        round.end(&mut self.inward, dst)
    }
}
