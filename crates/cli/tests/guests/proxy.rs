//! Records the traffic between a stock front end and our back end: it stands between them, passes
//! everything on, and changes nothing.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
    time::Instant,
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Requests by number, as far as tests need them.
pub(crate) const SET_FEATURES: u32 = 2;
pub(crate) const SET_VRING_BASE: u32 = 10;
pub(crate) const GET_VRING_BASE: u32 = 11;
pub(crate) const SET_VRING_KICK: u32 = 12;
pub(crate) const ADD_MEM_REG: u32 = 37;
const SET_BACKEND_REQ_FD: u32 = 21;
const IOTLB_MSG: u32 = 22;
const BACKEND_IOTLB_MSG: u32 = 1;
/// The header's flags.
pub(crate) const REPLY: u32 = 4;
pub(crate) const NEED_REPLY: u32 = 8;

/// A message, and its direction.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) at: Instant,
    pub(crate) direction: Direction,
    pub(crate) request: u32,
    pub(crate) flags: u32,
    pub(crate) payload: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the front end, on the main socket.
    ToBack,
    /// From the back end, on the main socket.
    ToFront,
    /// From the back end, on its channel.
    ChannelToFront,
    /// The front end's reply there.
    ChannelToBack,
}

/// The fields of an IOTLB message, as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Iotlb {
    pub(crate) iova: u64,
    pub(crate) size: u64,
    pub(crate) user_addr: u64,
    pub(crate) perm: u8,
    pub(crate) kind: u8,
    pub(crate) need_reply: bool,
}

pub(crate) const MISS: u8 = 1;
pub(crate) const UPDATE: u8 = 2;
pub(crate) const INVALIDATE: u8 = 3;

impl Message {
    /// The request, if this is an IOTLB message and not a reply to one.
    pub(crate) fn iotlb(&self) -> Option<Iotlb> {
        let code = match self.direction {
            Direction::ToBack => IOTLB_MSG,
            Direction::ChannelToFront => BACKEND_IOTLB_MSG,
            _ => return None,
        };
        if self.request != code || self.flags & REPLY != 0 {
            return None;
        }
        let word = |at: usize| u64::from_ne_bytes(self.payload[at..at + 8].try_into().unwrap());
        Some(Iotlb {
            iova: word(0),
            size: word(8),
            user_addr: word(16),
            perm: self.payload[24],
            kind: self.payload[25],
            need_reply: self.flags & NEED_REPLY != 0,
        })
    }

    /// The first number of the payload.
    pub(crate) fn number(&self) -> u64 {
        u64::from_ne_bytes(self.payload[..8].try_into().unwrap())
    }
}

/// All traffic, in order.
pub(crate) struct Recording(Arc<Mutex<Vec<Message>>>);

impl Recording {
    /// Listens at `socket`, and connects each front end to `back`.
    pub(crate) fn between(socket: PathBuf, back: &Path) -> Recording {
        let listener = UnixListener::bind(socket).unwrap();
        let (log, back) = (Arc::new(Mutex::new(Vec::new())), back.to_owned());
        let recording = Recording(Arc::clone(&log));
        // It ends with the process: nothing wakes it.
        thread::spawn(move || {
            for front in listener.incoming() {
                // If the back end is gone, it refuses: the front end then sees its connection end.
                let (Ok(front), Ok(back)) = (front, UnixStream::connect(&back)) else { continue };
                pump(&front, &back, Direction::ToBack, &log);
                pump(&back, &front, Direction::ToFront, &log);
            }
        });
        recording
    }

    pub(crate) fn messages(&self) -> Vec<Message> {
        self.0.lock().unwrap().clone()
    }

    /// The IOTLB messages of one kind.
    pub(crate) fn iotlb(&self, kind: u8) -> Vec<Iotlb> {
        self.messages().iter().filter_map(Message::iotlb).filter(|m| m.kind == kind).collect()
    }

    /// The front end's requests of one number.
    pub(crate) fn requests(&self, request: u32) -> Vec<Message> {
        let wanted = |m: &Message| m.direction == Direction::ToBack && m.request == request;
        self.messages().into_iter().filter(wanted).collect()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        let messages = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        eprintln!("--- the end of {} messages", messages.len());
        let Some(last) = messages.last() else { return };
        for message in &messages[messages.len().saturating_sub(80)..] {
            let before = last.at.duration_since(message.at).as_secs_f64();
            let Message { direction, request, flags, payload, .. } = message;
            match message.iotlb() {
                Some(iotlb) => eprintln!("-{before:.6} {direction:?} {iotlb:x?}"),
                None => {
                    eprintln!("-{before:.6} {direction:?} {request} flags {flags:x} {payload:x?}")
                }
            }
        }
    }
}

/// Passes messages on, in a thread of its own, until one end is gone.
fn pump(from: &UnixStream, to: &UnixStream, direction: Direction, log: &Arc<Mutex<Vec<Message>>>) {
    let (from, to, log) = (from.try_clone().unwrap(), to.try_clone().unwrap(), Arc::clone(log));
    thread::spawn(move || {
        while let Ok((message, mut descriptors)) = receive(&from, direction) {
            if direction == Direction::ToBack && message.request == SET_BACKEND_REQ_FD {
                // The channel is recorded too: each end gets one of ours.
                let theirs = UnixStream::from(descriptors.remove(0));
                let (ours, given) = UnixStream::pair().unwrap();
                pump(&ours, &theirs, Direction::ChannelToFront, &log);
                pump(&theirs, &ours, Direction::ChannelToBack, &log);
                descriptors.push(given.into());
            }
            log.lock().unwrap().push(message.clone());
            if send(&to, &message, &descriptors).is_err() {
                break;
            }
        }
        let _ = from.shutdown(std::net::Shutdown::Both);
        let _ = to.shutdown(std::net::Shutdown::Both);
    });
}

pub(crate) fn receive(
    from: &UnixStream,
    direction: Direction,
) -> io::Result<(Message, Vec<OwnedFd>)> {
    let mut descriptors = Vec::new();
    let mut header = [0; 12];
    fill(from, &mut header, &mut descriptors)?;
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
    let mut payload = vec![0; word(8) as usize];
    fill(from, &mut payload, &mut descriptors)?;
    let message =
        Message { at: Instant::now(), direction, request: word(0), flags: word(4), payload };
    Ok((message, descriptors))
}

fn fill(from: &UnixStream, into: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<()> {
    let mut there = 0;
    while there < into.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut into[there..])];
        let got = match recvmsg(from.as_fd(), &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        {
            Err(rustix::io::Errno::INTR) => continue,
            got => got?.bytes,
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                descriptors.extend(files);
            }
        }
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        there += got;
    }
    Ok(())
}

pub(crate) fn send(to: &UnixStream, message: &Message, descriptors: &[OwnedFd]) -> io::Result<()> {
    let mut bytes = Vec::new();
    for word in [message.request, message.flags, message.payload.len() as u32] {
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    bytes.extend_from_slice(&message.payload);
    let files: Vec<_> = descriptors.iter().map(|file| file.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
    }
    let mut sent = 0;
    while sent < bytes.len() {
        sent += sendmsg(
            to.as_fd(),
            &[IoSlice::new(&bytes[sent..])],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )?;
        // The descriptors went with the first byte.
        ancillary.clear();
    }
    Ok(())
}
