//! A mailbox of one message that outlives its writer: bytes and descriptors in the queue of a
//! socket. Another process, such as the service manager, holds both ends of the socket too.
//!
//! A message replaces the last one: it is added to the queue, whole, and only then is the last one
//! taken out. So a crash at any moment leaves one of the two. (In a service manager's store of
//! named descriptors a replacement takes several steps, with a possible crash after each; and
//! systemd keeps a file under one name only, while front ends share files.)

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use ringfence_run::{
    Closer, PeerFd,
    passing::{self, MOST_FDS},
};
use rustix::{
    io::ioctl_fionread,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair},
};

/// A message is sent in parts. The most bytes in one: several parts fit a socket's buffer.
const PART_BYTES: usize = 16 << 10;

/// The length of a part's header: the number of its message (8 bytes), the number of the part in it
/// (4), and how many parts the message has (4).
const HEADER: usize = 16;

/// Bytes and descriptors.
pub(super) type Message = (Vec<u8>, Vec<OwnedFd>);

/// The two ends of the socket. A process that holds them can read the last message at any moment.
pub(super) struct Mailbox {
    write: OwnedFd,
    read: OwnedFd,
    /// Closes descriptors that came from peers, which may take long.
    closer: Option<Closer>,
    /// The number of the last message, and how many parts are in the queue.
    last: u64,
    parts: usize,
    /// Descriptors to close with the next write.
    discarded: Vec<OwnedFd>,
}

/// A message of which some parts have been read.
struct Partial {
    number: u64,
    /// The part to be read next.
    next: u32,
    message: Message,
}

impl Mailbox {
    /// An empty mailbox.
    ///
    /// # Errors
    /// Out of descriptors.
    pub(super) fn new(closer: Option<&Closer>) -> io::Result<Mailbox> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (write, read) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok(Mailbox::from_ends([write, read], closer))
    }

    /// The mailbox that another process has left, from its [`ends`](Self::ends).
    pub(super) fn from_ends([write, read]: [OwnedFd; 2], closer: Option<&Closer>) -> Mailbox {
        Mailbox { write, read, closer: closer.cloned(), last: 0, parts: 0, discarded: Vec::new() }
    }

    /// Has `closer` close discarded descriptors from now on.
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
    /// The kernel does not accept the whole message: the last one stays.
    pub(super) fn write(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let written = self.replace(bytes, fds);
        for fd in self.discarded.drain(..) {
            match &self.closer {
                Some(closer) => drop(PeerFd::new(fd, closer)),
                None => drop(fd),
            }
        }
        written
    }

    /// As [`write`](Self::write), but leaves the last message's descriptors open, in `discarded`:
    /// closing them may start a thread.
    fn replace(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let count = bytes.len().div_ceil(PART_BYTES).max(fds.len().div_ceil(MOST_FDS)).max(1);
        let before = std::mem::take(&mut self.parts);
        self.last += 1;
        let (mut bytes, mut fds) = (bytes, fds);
        for part in 0..count as u32 {
            let (part_bytes, more_bytes) = bytes.split_at(bytes.len().min(PART_BYTES));
            let (part_fds, more_fds) = fds.split_at(fds.len().min(MOST_FDS));
            (bytes, fds) = (more_bytes, more_fds);
            let (number, part) = (self.last.to_ne_bytes(), part.to_ne_bytes());
            let bytes = [&number[..], &part, &(count as u32).to_ne_bytes(), part_bytes].concat();
            if let Err(error) = passing::send(&self.write, &bytes, part_fds, SendFlags::NOSIGNAL) {
                // Readers skip the incomplete message.
                self.parts += before;
                return Err(error.into());
            }
            self.parts += 1;
        }
        for taken in 0..before {
            match self.receive() {
                Ok(part) => self.discarded.extend(part.into_iter().flat_map(|(_, fds)| fds)),
                // The remaining parts are taken with the next message.
                Err(_) => {
                    self.parts += before - taken;
                    break;
                }
            }
        }
        Ok(())
    }

    /// The last whole message, whichever process has written it. It stays in the queue. Closes no
    /// descriptor and starts no thread.
    ///
    /// # Errors
    /// Those of the system; the queue holds something else than parts of messages.
    pub(super) fn read(&mut self) -> io::Result<Option<Message>> {
        let invalid =
            || io::Error::new(io::ErrorKind::InvalidData, "not a message of this program");
        // Usually the queue holds one message of one part, which need not be taken out.
        if let Some((data, fds)) = self.receive_part(RecvFlags::PEEK, true)? {
            let alone = ioctl_fionread(&self.read)? == data.len() as u64;
            if let (true, Some((number, 0, 1, bytes))) = (alone, parse(&data)) {
                (self.last, self.parts) = (number, 1);
                return Ok(Some((bytes.to_vec(), fds)));
            }
            self.discarded.extend(fds);
        }
        let mut whole: Option<Partial> = None;
        let mut partial: Option<Partial> = None;
        while let Some((data, fds)) = self.receive()? {
            let (number, part, count, bytes) = parse(&data).ok_or_else(invalid)?;
            if part == 0 {
                let message = (Vec::new(), Vec::new());
                self.discard(partial.replace(Partial { number, next: 0, message }));
            }
            let fits = |partial: &Partial| {
                (partial.number, partial.next) == (number, part) && part < count
            };
            if !partial.as_ref().is_some_and(fits) {
                self.discard(partial.take());
                self.discarded.extend(fds);
                continue;
            }
            let Some(Partial { next, message, .. }) = &mut partial else { continue };
            message.0.extend_from_slice(bytes);
            message.1.extend(fds);
            *next += 1;
            if *next == count {
                self.last = self.last.max(number);
                let earlier = std::mem::replace(&mut whole, partial.take());
                self.discard(earlier);
            }
        }
        self.discard(partial);
        self.parts = 0;
        let whole = whole.map(|whole| whole.message);
        if let Some((bytes, fds)) = &whole {
            let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            self.replace(bytes, &fds)?;
        }
        Ok(whole)
    }

    /// Closes these descriptors with the next write.
    pub(super) fn discard_all(&mut self, fds: impl IntoIterator<Item = OwnedFd>) {
        self.discarded.extend(fds);
    }

    fn discard(&mut self, partial: Option<Partial>) {
        self.discarded.extend(partial.into_iter().flat_map(|partial| partial.message.1));
    }

    /// The first part of the first message, left in the queue: the process that writes to the
    /// mailbox may still run. `with_fds` includes its descriptors.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(super) fn peek(&self, with_fds: bool) -> io::Result<Option<Message>> {
        let Some((mut data, fds)) = self.receive_part(RecvFlags::PEEK, with_fds)? else {
            return Ok(None);
        };
        drop(data.drain(..HEADER.min(data.len())));
        Ok(Some((data, fds)))
    }

    /// Takes the first part out of the queue; `None` if it is empty.
    fn receive(&self) -> io::Result<Option<Message>> {
        self.receive_part(RecvFlags::empty(), true)
    }

    fn receive_part(&self, flags: RecvFlags, with_fds: bool) -> io::Result<Option<Message>> {
        let flags = flags | RecvFlags::DONTWAIT;
        match receive(self.read.as_fd(), HEADER + PART_BYTES, flags, with_fds) {
            // The other end is closed, and the queue is empty.
            Ok((bytes, _)) if bytes.is_empty() => Ok(None),
            Ok(part) => Ok(Some(part)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// The three numbers of a part's [header](HEADER), and its content.
fn parse(data: &[u8]) -> Option<(u64, u32, u32, &[u8])> {
    let (number, rest) = data.split_first_chunk()?;
    let (part, rest) = rest.split_first_chunk()?;
    let (count, bytes) = rest.split_first_chunk()?;
    let (number, part) = (u64::from_ne_bytes(*number), u32::from_ne_bytes(*part));
    Some((number, part, u32::from_ne_bytes(*count), bytes))
}

/// Receives at most `max_len` bytes, and their descriptors if `with_fds`.
pub(super) fn receive(
    from: BorrowedFd<'_>,
    max_len: usize,
    flags: RecvFlags,
    with_fds: bool,
) -> io::Result<Message> {
    let mut data = vec![0; max_len];
    let received = passing::receive(from, &mut data, flags, with_fds)?;
    if with_fds && received.truncated {
        return Err(io::Error::other(
            "this process has no free descriptors for those that were sent",
        ));
    }
    data.truncate(received.bytes);
    Ok((data, received.fds))
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

    /// The mailbox as the next process finds it.
    fn inherit(mailbox: &Mailbox) -> Mailbox {
        let ends = mailbox.ends().map(|end| end.try_clone_to_owned().unwrap());
        Mailbox::from_ends(ends, None)
    }

    #[test]
    fn the_last_message_is_there_for_the_holder_of_the_ends() {
        let mut mailbox = Mailbox::new(Some(&Closer::default())).unwrap();
        assert!(inherit(&mailbox).read().unwrap().is_none());
        let events: Vec<_> = (1..=600).map(event).collect();
        for (len, count) in [(3, 1), (0, 0), (40_000, 2), (5, 600), (0, 253), (16 << 10, 254)] {
            let fds: Vec<_> = events[..count].iter().map(|event| event.as_fd()).collect();
            let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
            mailbox.write(&bytes, &fds).unwrap();
            // Read twice by the next process, and twice by the one after that.
            for _ in 0..2 {
                let mut next = inherit(&mailbox);
                for _ in 0..2 {
                    let (read, fds) = next.read().unwrap().unwrap();
                    assert_eq!((read, values(&fds)), (bytes.clone(), (1..=count as u64).collect()));
                }
                (mailbox.last, mailbox.parts) = (next.last, next.parts);
            }
        }
    }

    #[test]
    fn a_message_that_was_not_finished_leaves_the_one_before() {
        let mut mailbox = Mailbox::new(None).unwrap();
        mailbox.write(b"one", &[]).unwrap();
        // The writer has sent the first of two parts, and died.
        for (number, part, count) in [(2_u64, 0_u32, 2_u32), (3, 1, 2), (4, 2, 2), (5, 9, 0)] {
            let header = [&number.to_ne_bytes()[..], &part.to_ne_bytes(), &count.to_ne_bytes()];
            let bytes = [&header.concat()[..], b"x"].concat();
            passing::send(&mailbox.write, &bytes, &[], SendFlags::NOSIGNAL).unwrap();
        }
        let mut next = inherit(&mailbox);
        assert_eq!(next.read().unwrap().unwrap().0, b"one");
        next.write(b"two", &[]).unwrap();
        assert_eq!(inherit(&mailbox).read().unwrap().unwrap().0, b"two");
        passing::send(&mailbox.write, b"short", &[], SendFlags::NOSIGNAL).unwrap();
        assert!(inherit(&mailbox).read().is_err());
    }

    #[test]
    fn a_write_that_does_not_fit_fails_and_keeps_the_last_message() {
        let mut mailbox = Mailbox::new(None).unwrap();
        mailbox.write(b"one", &[]).unwrap();
        assert!(mailbox.write(&vec![7; 1 << 20], &[]).is_err());
        assert_eq!(inherit(&mailbox).read().unwrap().unwrap().0, b"one");
    }
}
