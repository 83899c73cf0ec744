//! IOTLB messages in flight: many are sent before the first answer is looked for.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use ringfence_vhost_user::{
    Iotlb, IotlbWire,
    msg::{Header, code},
};
use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags},
};
use zerocopy::{FromBytes, IntoBytes};

use super::NetDriverError;

/// Bytes of a message about an IOTLB.
pub(super) const MESSAGE: usize = Header::LEN + size_of::<IotlbWire>();
/// Bytes of an answer.
pub(super) const ANSWER: usize = Header::LEN + size_of::<u64>();
/// Most bytes that wait for room in the socket before the driver waits too.
const MOST_UNSENT: usize = 1 << 16;
/// How long the back end may take for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Messages of one size, from a stream that may cut them anywhere.
#[derive(Debug)]
pub(super) struct Records<const N: usize> {
    buffer: Box<[u8]>,
    held: usize,
}

impl<const N: usize> Records<N> {
    pub(super) fn new() -> Records<N> {
        Records { buffer: vec![0; 64 * N].into(), held: 0 }
    }

    /// Receives what is there, without waiting, and calls `each` with every whole message.
    pub(super) fn receive(
        &mut self,
        socket: impl AsFd,
        mut each: impl FnMut(&[u8; N]) -> Result<(), NetDriverError>,
    ) -> Result<(), NetDriverError> {
        loop {
            let room = &mut self.buffer[self.held..];
            let len = match rustix::net::recv(&socket, &mut *room, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok((_, len)) => len,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
                Err(errno) => return Err(io::Error::from(errno).into()),
            };
            let full = len == room.len();
            self.held += len;
            let (whole, _) = self.buffer[..self.held].as_chunks::<N>();
            let used = whole.len() * N;
            whole.iter().try_for_each(&mut each)?;
            self.buffer.copy_within(used..self.held, 0);
            self.held -= used;
            if !full {
                return Ok(());
            }
        }
    }
}

/// The front end's socket, as far as IOTLB messages use it. Requests of other kinds must wait until
/// nothing is in flight ([`settle`](Pipe::settle)): answers come in order, and tell only what kind of
/// request they are for.
#[derive(Debug)]
pub(super) struct Pipe {
    socket: OwnedFd,
    unsent: Vec<u8>,
    answers: Records<ANSWER>,
    /// How many messages were ever put in, and answered.
    put: u64,
    answered: u64,
}

impl Pipe {
    pub(super) fn new(socket: impl AsFd) -> io::Result<Pipe> {
        let socket = socket.as_fd().try_clone_to_owned()?;
        Ok(Pipe { socket, unsent: Vec::new(), answers: Records::new(), put: 0, answered: 0 })
    }

    /// Puts a message in, to be sent with the next [`flush`](Self::flush). Returns its ticket.
    pub(super) fn put(&mut self, message: Iotlb) -> u64 {
        let wire = message.emit().expect("a range of the driver's is not all addresses");
        // Always with a wish for an answer: DPDK gives none otherwise.
        let header = Header::request(code::IOTLB_MSG, true, size_of::<IotlbWire>());
        self.unsent.extend_from_slice(header.as_bytes());
        self.unsent.extend_from_slice(wire.as_bytes());
        self.put += 1;
        self.put
    }

    /// Whether the back end has carried out the message of that ticket, and so all before.
    #[inline]
    pub(super) fn is_done(&self, ticket: u64) -> bool {
        self.answered >= ticket
    }

    /// Sends what was put in, and takes the answers that have come, without waiting.
    pub(super) fn flush(&mut self) -> Result<(), NetDriverError> {
        let mut sent = 0;
        while sent < self.unsent.len() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, &self.unsent[sent..], flags) {
                Ok(len) => sent += len,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if self.unsent.len() - sent < MOST_UNSENT => break,
                // The back end may wait for room as well, so its answers must be taken meanwhile.
                Err(Errno::AGAIN) => self.collect()?,
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
        self.unsent.drain(..sent);
        self.collect()
    }

    /// Waits until everything is carried out.
    pub(super) fn settle(&mut self) -> Result<(), NetDriverError> {
        let begun = Instant::now();
        while self.answered < self.put {
            self.flush()?;
            if begun.elapsed() > PATIENCE {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
        }
        Ok(())
    }

    fn collect(&mut self) -> Result<(), NetDriverError> {
        let Pipe { answers, answered, socket, put, .. } = self;
        if answered == put {
            return Ok(());
        }
        answers.receive(&*socket, |answer| {
            let (head, value) = answer.split_at(Header::LEN);
            let head = Header::read_from_bytes(head).expect("that long");
            let value = u64::from_ne_bytes(value.try_into().expect("that long"));
            let answers_ours = head.request == code::IOTLB_MSG && head.size == 8;
            if head.check(true).is_err() || !answers_ours || *answered == *put {
                return Err(NetDriverError::Answer { request: head.request });
            }
            *answered += 1;
            match value {
                0 => Ok(()),
                code => Err(NetDriverError::Refused { code }),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::Write, os::unix::net::UnixStream};

    fn reply(value: u64) -> Vec<u8> {
        let header = Header::reply(code::IOTLB_MSG, 8);
        [header.as_bytes(), &value.to_ne_bytes()].concat()
    }

    fn update(page: u64) -> Iotlb {
        let access = Some(ringfence_mem::Access::ReadWrite);
        Iotlb::Update { first: page << 12, last: page << 12 | 0xfff, user_addr: 0, access }
    }

    #[test]
    fn messages_are_done_when_they_are_answered_however_the_answers_are_cut() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut pipe = Pipe::new(&ours).unwrap();
        let tickets: Vec<u64> = (0..100).map(|page| pipe.put(update(page))).collect();
        pipe.flush().unwrap();
        assert!(!pipe.is_done(tickets[0]));
        let bytes: Vec<u8> = (0..100).flat_map(|_| reply(0)).collect();
        for (at, byte) in bytes.iter().enumerate() {
            theirs.write_all(&[*byte]).unwrap();
            if at % 7 == 0 || at + 1 == bytes.len() {
                pipe.flush().unwrap();
                let whole = (at + 1) / ANSWER;
                assert_eq!(tickets.iter().filter(|ticket| pipe.is_done(**ticket)).count(), whole);
            }
        }
    }

    #[test]
    fn a_refusal_and_an_answer_to_nothing_are_errors() {
        for (answers, wanted) in [(vec![1], "refused"), (vec![0, 0], "answer")] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let mut pipe = Pipe::new(&ours).unwrap();
            pipe.put(update(0));
            for value in answers {
                theirs.write_all(&reply(value)).unwrap();
            }
            let error = pipe.flush().unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn who_hangs_up_is_noticed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut pipe = Pipe::new(&ours).unwrap();
        pipe.put(update(0));
        drop(theirs);
        assert!(pipe.settle().is_err());
    }
}
