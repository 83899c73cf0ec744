//! A recording of a real front end, message by message: all of it must be accepted.

mod common;

use common::{Device, Event};
use ringfence_mem::Region;
use ringfence_vhost_user::{
    F_PROTOCOL_FEATURES, Iotlb, IotlbWire, ProtocolFeatures, RingAddresses, Server,
    msg::{Header, Request},
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{self, MemfdFlags},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use std::{
    io::{IoSlice, Read},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    thread,
};
use zerocopy::{FromBytes, IntoBytes};

const RECORDING: &str = include_str!("data/qemu-7.2-blk-intel-lazy.txt");

/// Sends a request as a front end does; returns the reply, if one comes.
fn send_request(
    mut stream: &UnixStream,
    request: &Request,
    need_reply: bool,
    fds: &[BorrowedFd<'_>],
) -> Option<Vec<u8>> {
    let payload = request.payload();
    let header = Header::request(request.code(), need_reply, payload.len());
    let bytes = [header.as_bytes(), &payload].concat();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
    if !need_reply && !request.has_reply() {
        return None;
    }
    let mut header = [0; Header::LEN];
    stream.read_exact(&mut header).unwrap_or_else(|error| panic!("{request:?}: {error}"));
    let header = Header::read_from_bytes(&header).unwrap();
    assert_eq!(header.request, request.code());
    let mut payload = vec![0; header.size as usize];
    stream.read_exact(&mut payload).unwrap();
    Some(payload)
}

fn word(reply: Option<Vec<u8>>) -> u64 {
    u64::from_ne_bytes(reply.expect("a reply").try_into().unwrap())
}

fn number(text: &str) -> u64 {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).unwrap(),
        None => text.parse().unwrap(),
    }
}

/// The value of `name=value` in a line.
fn field(line: &str, name: &str) -> u64 {
    let value = line.split(' ').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
    number(value.unwrap_or_else(|| panic!("no {name} in {line}")))
}

#[test]
fn every_message_of_a_qemu_is_accepted() {
    // rules D1, D2, D6, D13, D28
    let (stream, theirs) = UnixStream::pair().unwrap();
    let features = 0x3_1000_0244;
    let device = Device { features, stopped_at: Some(1), ..Device::default() };
    let served = thread::spawn(move || {
        let mut server = Server::new(theirs, device);
        let result = server.serve();
        (result, server.into_handler())
    });
    let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let memory = fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    fs::ftruncate(&memory, 0x1000_0000).unwrap();
    let (_channel, theirs) = UnixStream::pair().unwrap();

    // What comes before the recording.
    let offered = word(send_request(&stream, &Request::GetFeatures, false, &[]));
    assert_ne!(offered & F_PROTOCOL_FEATURES, 0);
    word(send_request(&stream, &Request::GetProtocolFeatures, false, &[]));
    let mut sent = 0;
    for line in RECORDING.lines().filter(|line| !line.starts_with('#')) {
        let parts: Vec<&str> = line.split(' ').collect();
        let at = |index: usize| number(parts[index]);
        let (request, acks, fds) = match parts[0] {
            "SET_PROTOCOL_FEATURES" => {
                let features = ProtocolFeatures::from_bits_retain(at(1));
                (Request::SetProtocolFeatures(features), false, None)
            }
            "SET_OWNER" => {
                word(send_request(&stream, &Request::GetQueueNum, false, &[]));
                let channel =
                    send_request(&stream, &Request::SetBackendReqFd, true, &[theirs.as_fd()]);
                assert_eq!(word(channel), 0);
                (Request::SetOwner, false, None)
            }
            "SET_VRING_ERR" => {
                let call = Request::SetVringCall { ring: 0, fd: true };
                send_request(&stream, &call, false, &[event.as_fd()]);
                (Request::SetVringErr { ring: 0, fd: true }, false, Some(event.as_fd()))
            }
            "SET_FEATURES" => (Request::SetFeatures(at(1)), true, None),
            "MEM" => {
                let region = Region {
                    gpa: field(line, "gpa"),
                    size: field(line, "size"),
                    user_addr: field(line, "uaddr"),
                    mmap_offset: field(line, "off"),
                };
                (Request::SetMemTable(vec![region]), true, Some(memory.as_fd()))
            }
            "SET_VRING_NUM" => {
                (Request::SetVringNum { ring: at(1) as u32, num: at(2) as u32 }, false, None)
            }
            "SET_VRING_BASE" => {
                (Request::SetVringBase { ring: at(1) as u32, base: at(2) as u32 }, false, None)
            }
            "SET_VRING_ADDR" => {
                let addresses = RingAddresses {
                    desc: field(line, "desc"),
                    avail: field(line, "avail"),
                    used: field(line, "used"),
                    log: None,
                };
                (Request::SetVringAddr { ring: 0, addresses }, true, None)
            }
            "KICK" => (Request::SetVringKick { ring: 0, fd: true }, false, Some(event.as_fd())),
            "ENABLE" => {
                (Request::SetVringEnable { ring: at(1) as u32, enabled: at(2) == 1 }, true, None)
            }
            "GET_VRING_BASE" => (Request::GetVringBase { ring: at(1) as u32 }, false, None),
            "IOTLB" => {
                let wire = IotlbWire {
                    iova: field(line, "iova"),
                    size: field(line, "size"),
                    user_addr: field(line, "uaddr"),
                    perm: field(line, "perm") as u8,
                    kind: field(line, "type") as u8,
                    padding: [0x5a; 6],
                };
                (Request::Iotlb(wire), true, None)
            }
            other => panic!("{other}"),
        };
        let reply = send_request(&stream, &request, acks, fds.as_slice());
        match request {
            Request::GetVringBase { .. } => assert_eq!(reply.unwrap(), [0u32, 1].as_bytes()),
            // Garbage in unused fields is no reason to refuse.
            _ if acks => assert_eq!(word(reply), 0, "{line}"),
            _ => {}
        }
        sent += 1;
    }
    assert_eq!(word(send_request(&stream, &Request::GetQueueNum, false, &[])), 2);
    drop(stream);
    let (result, device) = served.join().unwrap();
    result.unwrap();
    assert!(sent > 90, "{sent}");
    let count = |wanted: fn(&Event) -> bool| device.events.iter().filter(|e| wanted(e)).count();
    assert_eq!(count(|event| matches!(event, Event::Refused(_))), 0);
    assert_eq!(count(|event| matches!(event, Event::Start { .. })), 2);
    assert_eq!(count(|event| *event == Event::Stop(0)), 2);
    let invalidate = |first, last| Event::Iotlb(Iotlb::Invalidate { first, last });
    // The whole address space except the interrupt window, in two pieces.
    assert!(device.events.contains(&invalidate(0, 0xfedf_ffff)));
    assert!(device.events.contains(&invalidate(0xfef0_0000, u64::MAX)));
}
