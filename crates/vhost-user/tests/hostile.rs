//! Invalid messages: either end reports an error, closes the connection and keeps no resources.
//! Also the exact bytes of the replies.

mod common;

use common::{Device, Event, VERSION_1, alone, bytes, message, open_fds, send};
use ringfence_mem::{GuestRam, Region};
use ringfence_vhost_user::{
    F_ACCESS_PLATFORM, F_LOG_ALL, F_PROTOCOL_FEATURES, Frontend, FrontendError, IotlbWire,
    ProtocolFeatures, ServeError, Server, WireError,
    msg::{Header, Inflight, Request, code},
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, memfd_create},
};
use std::{
    io::{Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    thread,
    time::Duration,
};
use zerocopy::IntoBytes;

/// Reads one reply to a request.
fn reply(mut stream: &UnixStream, request: u32) -> Vec<u8> {
    let mut header = [0; 12];
    stream.read_exact(&mut header).unwrap();
    let field = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
    assert_eq!(field(0), request);
    assert_eq!(field(4), 1 | 1 << 2, "version 1, and a reply");
    let mut payload = vec![0; field(8) as usize];
    stream.read_exact(&mut payload).unwrap();
    payload
}

fn reply_word(stream: &UnixStream, request: u32) -> u64 {
    u64::from_ne_bytes(reply(stream, request).try_into().unwrap())
}

/// A connection whose back end has negotiated these features.
fn settled(features: u64, protocol: ProtocolFeatures) -> (UnixStream, common::Served) {
    let (stream, served) = common::serve(Device::default());
    send(&stream, &message(&Request::SetProtocolFeatures(protocol), false), &[]);
    send(&stream, &message(&Request::SetFeatures(features | F_PROTOCOL_FEATURES), false), &[]);
    (stream, served)
}

fn finish(stream: UnixStream, served: common::Served) -> Vec<Event> {
    drop(stream);
    let (result, device) = served.join().unwrap();
    result.unwrap();
    device.events
}

#[test]
fn replies_carry_the_reply_bit_and_zero_for_success() {
    // rule D4
    let _alone = alone();
    let (stream, served) = settled(VERSION_1, ProtocolFeatures::KNOWN);
    send(&stream, &message(&Request::GetFeatures, false), &[]);
    let features = VERSION_1 | F_ACCESS_PLATFORM | F_PROTOCOL_FEATURES | F_LOG_ALL;
    assert_eq!(reply_word(&stream, code::GET_FEATURES), features);
    send(&stream, &message(&Request::SetOwner, true), &[]);
    assert_eq!(reply_word(&stream, code::SET_OWNER), 0);
    let region = Region { gpa: 0, size: 4096, user_addr: 0, mmap_offset: 0 };
    let short = memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
    let table = message(&Request::SetMemTable(vec![region]), true);
    send(&stream, &table, &[short.as_fd()]);
    assert_ne!(reply_word(&stream, code::SET_MEM_TABLE), 0);
    send(&stream, &message(&Request::GetVringBase { ring: 1 }, false), &[]);
    assert_eq!(reply(&stream, code::GET_VRING_BASE), [1u32, 0].as_bytes());
    finish(stream, served);
}

#[test]
fn a_request_with_a_reply_of_its_own_never_gets_two() {
    // rule D13
    let _alone = alone();
    let (stream, served) = settled(VERSION_1 | F_ACCESS_PLATFORM, ProtocolFeatures::KNOWN);
    let invalidate =
        IotlbWire { iova: 0, size: 4096, user_addr: 9, perm: 77, kind: 3, padding: [1; 6] };
    for need_reply in [true, false] {
        send(&stream, &message(&Request::Iotlb(invalidate), need_reply), &[]);
        send(&stream, &message(&Request::GetQueueNum, need_reply), &[]);
        assert_eq!(reply_word(&stream, code::IOTLB_MSG), 0);
        assert_eq!(reply_word(&stream, code::GET_QUEUE_NUM), 2);
    }
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut rest = Vec::new();
    (&stream).read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    finish(stream, served);
}

#[test]
fn need_reply_means_nothing_before_it_was_negotiated() {
    let _alone = alone();
    let (stream, served) = common::serve(Device::default());
    send(&stream, &message(&Request::SetOwner, true), &[]);
    let reply_ack = Request::SetProtocolFeatures(ProtocolFeatures::REPLY_ACK);
    send(&stream, &message(&reply_ack, true), &[]);
    // The first reply: the request before it was sent when nothing was negotiated.
    assert_eq!(reply_word(&stream, code::SET_PROTOCOL_FEATURES), 0);
    send(&stream, &message(&Request::SetFeatures(VERSION_1), true), &[]);
    assert_eq!(reply_word(&stream, code::SET_FEATURES), 0);
    finish(stream, served);
}

#[test]
fn impossible_iotlb_messages_get_replies_and_change_nothing() {
    // rule D14
    let _alone = alone();
    let (stream, served) = settled(VERSION_1 | F_ACCESS_PLATFORM, ProtocolFeatures::KNOWN);
    let ram = GuestRam::new(1 << 16, 0).unwrap();
    send(&stream, &message(&Request::SetMemTable(vec![ram.region()]), true), &[ram.fd()]);
    assert_eq!(reply_word(&stream, code::SET_MEM_TABLE), 0);
    let at = ram.user_addr();
    let wire = |kind, iova, size, user_addr, perm| {
        Request::Iotlb(IotlbWire { iova, size, user_addr, perm, kind, padding: [0; 6] })
    };
    for bad in [
        wire(2, 0, 0, at, 3),
        wire(2, 0, (1 << 16) + 1, at, 3),
        wire(2, 0, 4096, at - 4096, 3),
        wire(2, 0, u64::MAX, at, 3),
        wire(2, u64::MAX, 2, at, 3),
        wire(2, 0, 4096, at, 4),
        wire(3, 0, 0, 0, 0),
        wire(3, u64::MAX, 2, 0, 0),
        wire(1, 0, 0, 0, 3),
        wire(4, 0, 0, 0, 3),
        wire(0, 0, 4096, at, 3),
        wire(5, 0, 4096, at, 3),
        wire(255, 0, 4096, at, 3),
    ] {
        send(&stream, &message(&bad, true), &[]);
        assert_ne!(reply_word(&stream, code::IOTLB_MSG), 0, "{bad:?}");
    }
    send(&stream, &message(&wire(2, u64::MAX - 4095, 4096, at, 3), true), &[]);
    assert_eq!(reply_word(&stream, code::IOTLB_MSG), 0);
    let events = finish(stream, served);
    let taken = events.iter().filter(|event| matches!(event, Event::Iotlb(_))).count();
    assert_eq!(taken, 1);
}

/// What one message does to a connection.
fn ends_with(
    features: u64,
    protocol: ProtocolFeatures,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> WireError {
    let (stream, served) = settled(features, protocol);
    send(&stream, bytes, fds);
    // Closed: there is nothing to read, ever.
    let mut rest = Vec::new();
    let _ = (&stream).read_to_end(&mut rest);
    assert!(rest.is_empty());
    match served.join().unwrap().0 {
        Err(ServeError::Wire(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_was_not_negotiated_ends_the_connection() {
    // rule D11
    let _alone = alone();
    let (socket, _other) = UnixStream::pair().unwrap();
    let none: &[BorrowedFd<'_>] = &[];
    let one = &[socket.as_fd()][..];
    let place = Inflight { len: 4096, offset: 0, queues: 1, size: 64 };
    let region = Region { gpa: 0, size: 4096, user_addr: 0, mmap_offset: 0 };
    for (request, fds, needed) in [
        (Request::SetBackendReqFd, one, ProtocolFeatures::BACKEND_REQ),
        (Request::GetQueueNum, none, ProtocolFeatures::MQ),
        (Request::GetConfig { offset: 0, size: 4 }, none, ProtocolFeatures::CONFIG),
        (Request::ResetDevice, none, ProtocolFeatures::RESET_DEVICE),
        (Request::SetLogBase { len: 4096, offset: 0 }, one, ProtocolFeatures::LOG_SHMFD),
        (Request::SetLogFd, one, ProtocolFeatures::LOG_SHMFD),
        (Request::SendRarp([0; 6]), none, ProtocolFeatures::RARP),
        (Request::NetSetMtu(1500), none, ProtocolFeatures::NET_MTU),
        (Request::GetInflight(place), none, ProtocolFeatures::INFLIGHT_SHMFD),
        (Request::SetInflight(place), one, ProtocolFeatures::INFLIGHT_SHMFD),
        (Request::SetStatus(1), none, ProtocolFeatures::STATUS),
        (Request::GetStatus, none, ProtocolFeatures::STATUS),
        (Request::GetMaxMemSlots, none, ProtocolFeatures::CONFIGURE_MEM_SLOTS),
        (Request::AddMemReg(region), one, ProtocolFeatures::CONFIGURE_MEM_SLOTS),
    ] {
        let protocol = ProtocolFeatures::KNOWN - needed;
        let error = ends_with(VERSION_1, protocol, &message(&request, true), fds);
        assert!(matches!(error, WireError::Request { .. }), "{error}");
    }
}

#[test]
fn a_backend_channel_is_acknowledged_and_surplus_descriptors_are_not_kept() {
    // rule D29
    let _alone = alone();
    let before = open_fds();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (stream, served) = settled(VERSION_1, ProtocolFeatures::KNOWN);
    send(&stream, &message(&Request::SetBackendReqFd, true), &[theirs.as_fd()]);
    assert_eq!(reply_word(&stream, code::SET_BACKEND_REQ_FD), 0);

    let ram = GuestRam::new(1 << 16, 0).unwrap();
    for request in [Request::AddMemReg(ram.region()), Request::RemMemReg(ram.region())] {
        send(&stream, &message(&request, true), &[ram.fd()]);
        assert_eq!(reply_word(&stream, request.code()), 0);
    }
    // Ours: two channels, the memory; the back end's: its end, the channel that it was given, and
    // the eventfd that announces replies. Not the two descriptors of the region.
    assert_eq!(open_fds(), before + 7);
    finish(stream, served);
    drop((ours, theirs, ram));

    let ram = GuestRam::new(1 << 16, 0).unwrap();
    for count in [9, 16] {
        let table = message(&Request::SetMemTable(vec![ram.region(); 8]), true);
        let fds = vec![ram.fd(); count];
        let error = ends_with(VERSION_1, ProtocolFeatures::KNOWN, &table, &fds);
        assert!(matches!(error, WireError::Fds { .. }), "{error}");
    }
    drop(ram);
    assert_eq!(open_fds(), before);
}

#[test]
fn descriptors_that_a_request_does_not_take_end_the_connection() {
    let _alone = alone();
    let before = open_fds();
    let file = eventfd(0, EventfdFlags::empty()).unwrap();
    let two = [file.as_fd(); 2];
    let kick = |fd| Request::SetVringKick { ring: 0, fd };
    let region = Region { gpa: 0, size: 4096, user_addr: 0, mmap_offset: 0 };
    for (request, fds) in [
        (Request::GetFeatures, &two[..1]),
        (kick(true), &two[..0]),
        (kick(true), &two[..]),
        (kick(false), &two[..1]),
        (Request::SetMemTable(vec![region]), &two[..0]),
        (Request::SetMemTable(vec![region]), &two[..]),
        (Request::SetBackendReqFd, &two[..0]),
        (Request::RemMemReg(region), &two[..]),
    ] {
        let error = ends_with(VERSION_1, ProtocolFeatures::KNOWN, &message(&request, true), fds);
        assert!(matches!(error, WireError::Fds { .. }), "{request:?}: {error}");
    }
    drop(file);
    assert_eq!(open_fds(), before);
}

#[test]
fn a_message_that_breaks_off_anywhere_ends_the_connection() {
    let _alone = alone();
    let before = open_fds();
    let ram = GuestRam::new(1 << 16, 0).unwrap();
    let whole = message(&Request::SetMemTable(vec![ram.region()]), true);
    for cut in 0..=whole.len() {
        let (stream, served) = common::serve(Device::default());
        if cut > 0 {
            send(&stream, &whole[..cut], &[ram.fd()]);
        }
        drop(stream);
        let (result, device) = served.join().unwrap();
        if cut == 0 || cut == whole.len() {
            result.unwrap();
        } else {
            assert!(matches!(result, Err(ServeError::Wire(WireError::HungUp { .. }))));
        }
        assert_eq!(device.memory.is_some(), cut == whole.len());
    }
    drop(ram);
    assert_eq!(open_fds(), before);
}

#[test]
fn a_message_may_come_in_single_bytes() {
    let _alone = alone();
    let (mut stream, served) = common::serve(Device::default());
    for byte in message(&Request::GetFeatures, false) {
        stream.write_all(&[byte]).unwrap();
    }
    reply_word(&stream, code::GET_FEATURES);
    finish(stream, served);
}

#[test]
fn a_front_end_that_stalls_in_the_middle_of_a_message_is_cut_off() {
    let _alone = alone();
    let (stream, theirs) = UnixStream::pair().unwrap();
    let mut server = Server::new(common::end(theirs), Device::default());
    server.set_timeout(Duration::from_millis(20));
    send(&stream, &message(&Request::GetFeatures, false)[..5], &[]);
    let result = server.serve();
    assert!(matches!(result, Err(ServeError::Wire(WireError::TimedOut { .. }))));
}

#[test]
fn a_front_end_that_takes_no_replies_is_cut_off() {
    let _alone = alone();
    let (stream, theirs) = UnixStream::pair().unwrap();
    let mut server = Server::new(common::end(theirs), Device::default());
    server.set_timeout(Duration::from_millis(20));
    let asking = thread::spawn(move || {
        let request = message(&Request::GetFeatures, false);
        // Until the back end closes the connection.
        while (&stream).write_all(&request).is_ok() {}
    });
    let result = server.serve();
    assert!(matches!(result, Err(ServeError::Wire(WireError::TimedOut { .. }))));
    drop(server);
    asking.join().unwrap();
}

/// A front end's outcome for a reply to GET_FEATURES; afterwards it must have hung up.
fn front_end_on(bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<u64, FrontendError> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut front = Frontend::new(common::end(ours), Duration::from_millis(50));
    send(&theirs, bytes, fds);
    let result = front.features();
    if result.is_err() {
        assert!(matches!(front.features(), Err(FrontendError::Closed)));
        let mut sent = Vec::new();
        let _ = (&theirs).read_to_end(&mut sent);
    }
    result
}

#[test]
fn an_invalid_or_short_reply_closes_the_connection() {
    // rule D12
    let _alone = alone();
    let before = open_fds();
    let good = Header::reply(code::GET_FEATURES, 8);
    let word = 7u64.to_ne_bytes();
    let wire = |header, payload: &[u8], fds: &[BorrowedFd<'_>]| match front_end_on(
        &bytes(header, payload),
        fds,
    ) {
        Err(FrontendError::Wire(error)) => error,
        other => panic!("{other:?}"),
    };
    assert_eq!(front_end_on(&bytes(good, &word), &[]).unwrap(), 7);
    let short = Header { size: 4, ..good };
    assert!(matches!(wire(short, &word[..4], &[]), WireError::Size { .. }));
    assert!(matches!(wire(Header { size: 9, ..good }, &[0; 9], &[]), WireError::Size { .. }));
    assert!(matches!(wire(Header { size: 1 << 30, ..good }, &word, &[]), WireError::Size { .. }));
    let version = Header { flags: 6, ..good };
    assert!(matches!(wire(version, &word, &[]), WireError::Version { version: 2 }));
    assert!(matches!(wire(Header { flags: 1, ..good }, &word, &[]), WireError::Flags { .. }));
    let other = Header { request: code::GET_QUEUE_NUM, ..good };
    assert!(matches!(wire(other, &word, &[]), WireError::WrongReply { .. }));
    let file = eventfd(0, EventfdFlags::empty()).unwrap();
    assert!(matches!(wire(good, &word, &[file.as_fd()]), WireError::Fds { .. }));
    assert!(matches!(wire(good, &word[..7], &[]), WireError::TimedOut { .. }));
    drop(file);
    assert_eq!(open_fds(), before);
}

/// As rust-vmm's back ends refuse it: the head of a configuration that has no bytes.
#[test]
fn a_configuration_without_bytes_is_a_refusal_and_the_connection_goes_on() {
    let _alone = alone();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut front = Frontend::new(common::end(ours), Duration::from_secs(60));
    let word = |request, word: u64| bytes(Header::reply(request, 8), &word.to_ne_bytes());
    let refusal = bytes(Header::reply(code::GET_CONFIG, 12), &[0; 12]);
    for reply in [
        word(code::GET_FEATURES, F_PROTOCOL_FEATURES),
        word(code::GET_PROTOCOL_FEATURES, ProtocolFeatures::CONFIG.bits()),
        refusal,
        word(code::GET_FEATURES, 7),
    ] {
        send(&theirs, &reply, &[]);
    }
    front.negotiate(0, ProtocolFeatures::CONFIG).unwrap();
    let refused = front.config(0, &mut [0; 60]);
    assert!(matches!(refused, Err(FrontendError::Refused { .. })), "{refused:?}");
    assert_eq!(front.features().unwrap(), 7);
}
