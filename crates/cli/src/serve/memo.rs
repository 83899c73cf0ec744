//! A message that outlives its writer: bytes and descriptors in the queue of a socket, both ends of
//! which another process, such as the service manager, has too.
//!
//! A message with descriptors is in the queue or not, and the one before it is taken out only
//! then. In a service manager's store of named descriptors a replacement takes several steps, with a
//! possible crash in each; and systemd keeps a file under one name only, where front ends share
//! theirs.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use ringfence_run::{Closer, PeerFd};
use rustix::{
    io::{Errno, ioctl_fionread},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
        sendmsg, socketpair,
    },
};

/// The most descriptors of a part (Linux's SCM_MAX_FD), and the most bytes: well within a socket's
/// buffer, together with the earlier parts.
const PART_FDS: usize = 253;
const PART_BYTES: usize = 16 << 10;

/// The head of a part: the number of its message, its own, and how many parts the message has.
const HEAD: usize = 16;

/// Bytes and descriptors.
pub(super) type Message = (Vec<u8>, Vec<OwnedFd>);

/// The two ends. Anyone who holds them can read the last message, until the next one is written: at
/// every moment one of the two can be read.
pub(super) struct Memo {
    write: OwnedFd,
    read: OwnedFd,
    /// Closes descriptors that came from peers, which may take long.
    closer: Option<Closer>,
    /// The number of the last message, and how many parts of it are in the queue.
    last: u64,
    parts: usize,
    /// Descriptors that are no longer needed.
    spent: Vec<OwnedFd>,
}

impl Memo {
    /// A memo in which nothing was written.
    ///
    /// # Errors
    /// Out of descriptors.
    pub(super) fn new(closer: Option<&Closer>) -> io::Result<Memo> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (write, read) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok(Memo::of([write, read], closer))
    }

    /// A memo that another process has left: its two ends, as in [`ends`](Self::ends).
    pub(super) fn of([write, read]: [OwnedFd; 2], closer: Option<&Closer>) -> Memo {
        Memo { write, read, closer: closer.cloned(), last: 0, parts: 0, spent: Vec::new() }
    }

    /// From now on, `closer` closes the descriptors that are read.
    pub(super) fn set_closer(&mut self, closer: &Closer) {
        self.closer = Some(closer.clone());
    }

    /// Its ends, for a process that outlives this one.
    pub(super) fn ends(&self) -> [BorrowedFd<'_>; 2] {
        [self.write.as_fd(), self.read.as_fd()]
    }

    /// Writes a message, which replaces the last one.
    ///
    /// # Errors
    /// The system accepts no more: the message before may still be there.
    pub(super) fn write(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let written = self.put(bytes, fds);
        for spent in self.spent.drain(..) {
            match &self.closer {
                Some(closer) => drop(PeerFd::new(spent, closer)),
                None => drop(spent),
            }
        }
        written
    }

    /// As [`write`](Self::write), but does not yet close the earlier descriptors: a closer starts
    /// threads.
    fn put(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let count = bytes.len().div_ceil(PART_BYTES).max(fds.len().div_ceil(PART_FDS)).max(1);
        let before = std::mem::take(&mut self.parts);
        self.last += 1;
        let (mut bytes, mut fds) = (bytes, fds);
        for part in 0..count as u32 {
            let (some, rest) = bytes.split_at(bytes.len().min(PART_BYTES));
            let (with, more) = fds.split_at(fds.len().min(PART_FDS));
            (bytes, fds) = (rest, more);
            let (number, part) = (self.last.to_ne_bytes(), part.to_ne_bytes());
            let head = [&number[..], &part, &(count as u32).to_ne_bytes()].concat();
            if let Err(error) = send(self.write.as_fd(), &head, some, with) {
                // Readers skip the incomplete message.
                self.parts += before;
                return Err(error);
            }
            self.parts += 1;
        }
        for taken in 0..before {
            match self.receive() {
                Ok(part) => self.spent.extend(part.into_iter().flat_map(|(_, fds)| fds)),
                // The remaining parts are taken with the next message.
                Err(_) => {
                    self.parts += before - taken;
                    break;
                }
            }
        }
        Ok(())
    }

    /// The last message, from whichever writer. It stays in the queue. This closes nothing, and
    /// starts no thread.
    ///
    /// # Errors
    /// Those of the system; the content was not written by a memo.
    pub(super) fn read(&mut self) -> io::Result<Option<Message>> {
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, "not a message of this program");
        // Usually there is one message of one part, and nothing to remove.
        if let Some((data, fds)) = self.look(RecvFlags::PEEK, true)? {
            let alone = ioctl_fionread(&self.read)? == data.len() as u64;
            if let (true, Some((number, 0, 1, bytes))) = (alone, parse(&data)) {
                (self.last, self.parts) = (number, 1);
                return Ok(Some((bytes.to_vec(), fds)));
            }
            self.spent.extend(fds);
        }
        let mut whole: Option<(u64, u32, Message)> = None;
        let mut under_way: Option<(u64, u32, Message)> = None;
        while let Some((data, fds)) = self.receive()? {
            let (number, part, count, bytes) = parse(&data).ok_or_else(wrong)?;
            if part == 0 {
                self.spend(under_way.replace((number, 0, (Vec::new(), Vec::new()))));
            }
            let fits = |(of, next, _): &(u64, u32, Message)| {
                (*of, *next) == (number, part) && part < count
            };
            if !under_way.as_ref().is_some_and(fits) {
                self.spend(under_way.take());
                self.spent.extend(fds);
                continue;
            }
            let Some((_, next, message)) = &mut under_way else { continue };
            message.0.extend_from_slice(bytes);
            message.1.extend(fds);
            *next += 1;
            if *next == count {
                self.last = self.last.max(number);
                let before = std::mem::replace(&mut whole, under_way.take());
                self.spend(before);
            }
        }
        self.spend(under_way);
        self.parts = 0;
        let whole = whole.map(|(.., message)| message);
        if let Some((bytes, fds)) = &whole {
            let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            self.put(bytes, &fds)?;
        }
        Ok(whole)
    }

    /// Closes these descriptors with the next write.
    pub(super) fn spend_all(&mut self, fds: impl IntoIterator<Item = OwnedFd>) {
        self.spent.extend(fds);
    }

    fn spend(&mut self, of: Option<(u64, u32, Message)>) {
        self.spent.extend(of.into_iter().flat_map(|(.., (_, fds))| fds));
    }

    /// The first part of the first message in the queue, while another process may write more; its
    /// descriptors only if `wanted`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(super) fn peek(&self, wanted: bool) -> io::Result<Option<Message>> {
        let Some((mut data, fds)) = self.look(RecvFlags::PEEK, wanted)? else { return Ok(None) };
        drop(data.drain(..HEAD.min(data.len())));
        Ok(Some((data, fds)))
    }

    /// Takes the first part; `None` if there is none.
    fn receive(&self) -> io::Result<Option<Message>> {
        self.look(RecvFlags::empty(), true)
    }

    fn look(&self, how: RecvFlags, wanted: bool) -> io::Result<Option<Message>> {
        let how = how | RecvFlags::DONTWAIT;
        match receive(self.read.as_fd(), HEAD + PART_BYTES, how, wanted) {
            // Or the other end is closed, and the queue is empty.
            Ok((bytes, _)) if bytes.is_empty() => Ok(None),
            Ok(part) => Ok(Some(part)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// The three numbers of a part's head, and what comes after it.
fn parse(part: &[u8]) -> Option<(u64, u32, u32, &[u8])> {
    let (number, rest) = part.split_first_chunk()?;
    let (at, rest) = rest.split_first_chunk()?;
    let (count, bytes) = rest.split_first_chunk()?;
    let (number, at) = (u64::from_ne_bytes(*number), u32::from_ne_bytes(*at));
    Some((number, at, u32::from_ne_bytes(*count), bytes))
}

/// Receives at most that many bytes, and their descriptors if `wanted`.
pub(super) fn receive(
    from: BorrowedFd<'_>,
    most: usize,
    how: RecvFlags,
    wanted: bool,
) -> io::Result<Message> {
    let mut data = vec![0; most];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PART_FDS))];
    let space = if wanted { &mut space[..] } else { &mut [] };
    let mut control = RecvAncillaryBuffer::new(space);
    let how = how | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match recvmsg(from, &mut [IoSliceMut::new(&mut data)], &mut control, how) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    let mut fds = Vec::new();
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
            fds.extend(rights);
        }
    }
    if wanted && received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other("the process has no descriptor left for what is sent"));
    }
    data.truncate(received.bytes);
    Ok((data, fds))
}

/// Sends a part, with its descriptors.
pub(super) fn send(
    to: BorrowedFd<'_>,
    head: &[u8],
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PART_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors for a message"));
    }
    let data = [IoSlice::new(head), IoSlice::new(bytes)];
    let flags = SendFlags::NOSIGNAL;
    loop {
        match sendmsg(to, &data, &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn event(value: u32) -> OwnedFd {
        eventfd(value, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
    }

    fn values(fds: &[OwnedFd]) -> Vec<u64> {
        let value = |fd: &OwnedFd| {
            let mut value = [0; 8];
            rustix::io::read(fd, &mut value).unwrap();
            rustix::io::write(fd, &value).unwrap();
            u64::from_ne_bytes(value)
        };
        fds.iter().map(value).collect()
    }

    fn left(memo: &Memo) -> Memo {
        let ends = memo.ends().map(|end| end.try_clone_to_owned().unwrap());
        Memo::of(ends, None)
    }

    #[test]
    fn the_last_message_is_there_for_the_holder_of_the_ends() {
        let mut memo = Memo::new(Some(&Closer::default())).unwrap();
        assert!(left(&memo).read().unwrap().is_none());
        let events: Vec<_> = (1..=600).map(event).collect();
        for (len, count) in [(3, 1), (0, 0), (40_000, 2), (5, 600), (0, 253), (16 << 10, 254)] {
            let fds: Vec<_> = events[..count].iter().map(|event| event.as_fd()).collect();
            let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
            memo.write(&bytes, &fds).unwrap();
            // By the next process, and by the one after that.
            for _ in 0..2 {
                let mut next = left(&memo);
                for _ in 0..2 {
                    let (read, fds) = next.read().unwrap().unwrap();
                    assert_eq!((read, values(&fds)), (bytes.clone(), (1..=count as u64).collect()));
                }
                (memo.last, memo.parts) = (next.last, next.parts);
            }
        }
    }

    #[test]
    fn a_message_that_was_not_finished_leaves_the_one_before() {
        let mut memo = Memo::new(None).unwrap();
        memo.write(b"one", &[]).unwrap();
        // The writer has sent the first of two parts, and died.
        for (number, part, count) in [(2_u64, 0_u32, 2_u32), (3, 1, 2), (4, 2, 2), (5, 9, 0)] {
            let head = [&number.to_ne_bytes()[..], &part.to_ne_bytes(), &count.to_ne_bytes()];
            send(memo.write.as_fd(), &head.concat(), b"x", &[]).unwrap();
        }
        let mut next = left(&memo);
        assert_eq!(next.read().unwrap().unwrap().0, b"one");
        next.write(b"two", &[]).unwrap();
        assert_eq!(left(&memo).read().unwrap().unwrap().0, b"two");
        send(memo.write.as_fd(), b"short", b"", &[]).unwrap();
        assert!(left(&memo).read().is_err());
    }

    #[test]
    fn one_that_is_full_says_so_and_keeps_what_it_has() {
        let mut memo = Memo::new(None).unwrap();
        memo.write(b"one", &[]).unwrap();
        assert!(memo.write(&vec![7; 1 << 20], &[]).is_err());
        assert_eq!(left(&memo).read().unwrap().unwrap().0, b"one");
    }
}
