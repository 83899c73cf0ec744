//! IOTLB messages in batches, at both ends: carried out together, their replies in order, however they are
//! cut and whatever comes between them.

mod common;

use common::{Device, Event, LONG, VERSION_1, bytes, connect, message, send, serve};
use proptest::prelude::*;
use ringfence_mem::{Access, GuestRam};
use ringfence_vhost_user::{
    F_ACCESS_PLATFORM, F_LOG_ALL, F_PROTOCOL_FEATURES, Frontend, FrontendError, Iotlb, IotlbHandle,
    IotlbWire, ProtocolFeatures,
    msg::{Header, Request, code},
};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    io::{Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    thread,
};

const MESSAGE: usize = Header::LEN + size_of::<IotlbWire>();

fn invalidate(page: u64) -> Iotlb {
    Iotlb::Invalidate { first: page << 12, last: page << 12 | 0xfff }
}

fn request(message: &Iotlb) -> Request {
    Request::Iotlb(message.emit().unwrap())
}

/// A message that is refused for its content (rule D14).
fn empty() -> Request {
    Request::Iotlb(IotlbWire { size: 0, ..invalidate(1).emit().unwrap() })
}

fn words(stream: &mut UnixStream, count: usize) -> Vec<(u32, u64)> {
    let mut reply = [0; Header::LEN + 8];
    let mut each = || {
        stream.read_exact(&mut reply).unwrap();
        let word = |at: usize| u32::from_ne_bytes(reply[at..at + 4].try_into().unwrap());
        assert_eq!(word(4), Header::VERSION | Header::REPLY, "rule D4");
        (word(0), u64::from_ne_bytes(reply[Header::LEN..].try_into().unwrap()))
    };
    (0..count).map(|_| each()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    /// Rule D13: one reply each, in order; a request with a descriptor comes between them.
    #[test]
    fn the_replies_to_a_batch_come_in_order_however_it_is_cut(
        kinds in prop::collection::vec(0..8u8, 1..150),
        cuts in prop::collection::vec(1..900usize, 1..30),
    ) {
        let offered = Device::default().features | F_PROTOCOL_FEATURES | F_LOG_ALL;
        let (mut stream, served) = serve(Device::default());
        send(&stream, &message(&Request::SetFeatures(VERSION_1 | F_ACCESS_PLATFORM), false), &[]);
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (mut rest, mut wanted, mut replies) = (Vec::new(), Vec::new(), Vec::new());
        let mut cuts = cuts.into_iter().cycle();
        let mut write = |rest: &mut Vec<u8>| {
            let mut rest = &*std::mem::take(rest);
            while !rest.is_empty() {
                let (now, later) = rest.split_at(cuts.next().unwrap().min(rest.len()));
                send(&stream, now, &[]);
                rest = later;
            }
        };
        for (page, kind) in kinds.into_iter().enumerate() {
            match kind {
                // Its descriptor goes with its first byte.
                0 => {
                    write(&mut rest);
                    let call = message(&Request::SetVringCall { ring: 1, fd: true }, false);
                    send(&stream, &call, &[event.as_fd()]);
                    wanted.push(Event::Call(1, true));
                }
                1 => {
                    rest.extend(message(&empty(), page % 2 == 0));
                    replies.push((code::IOTLB_MSG, 1));
                }
                2 => {
                    rest.extend(message(&Request::GetFeatures, false));
                    replies.push((code::GET_FEATURES, offered));
                }
                _ => {
                    let invalidate = invalidate(page as u64);
                    rest.extend(message(&request(&invalidate), page % 2 == 0));
                    wanted.push(Event::Iotlb(invalidate));
                    replies.push((code::IOTLB_MSG, 0));
                }
            }
        }
        // After a hang-up, requests without replies may not be carried out: one thread closes the
        // descriptors of all these tests, and may not have run for a while.
        rest.extend(message(&Request::GetFeatures, false));
        replies.push((code::GET_FEATURES, offered));
        write(&mut rest);
        prop_assert_eq!(words(&mut stream, replies.len()), replies);
        drop(stream);
        let (result, device) = served.join().unwrap();
        prop_assert!(result.is_ok(), "{:?}", result);
        let is_call = |event: &&Event| matches!(event, Event::Iotlb(_) | Event::Call(..));
        let calls: Vec<_> = device.events.iter().filter(is_call).collect();
        prop_assert_eq!(calls, wanted.iter().collect::<Vec<_>>());
    }
}

#[test]
fn what_came_together_is_carried_out_together_but_for_half_a_message() {
    let (mut stream, theirs) = UnixStream::pair().unwrap();
    send(&stream, &message(&Request::SetFeatures(VERSION_1 | F_ACCESS_PLATFORM), false), &[]);
    let batch: Vec<u8> =
        (0..65).flat_map(|page| message(&request(&invalidate(page)), false)).collect();
    let (now, later) = batch.split_at(batch.len() - MESSAGE / 2);
    send(&stream, now, &[]);
    let served = thread::spawn(move || {
        let mut server = ringfence_vhost_user::Server::new(theirs, Device::default());
        (server.serve(), server.into_handler())
    });
    assert_eq!(words(&mut stream, 64), [(code::IOTLB_MSG, 0); 64]);
    send(&stream, later, &[]);
    assert_eq!(words(&mut stream, 1), [(code::IOTLB_MSG, 0)]);
    drop(stream);
    assert_eq!(served.join().unwrap().1.together, [64, 1]);
}

#[test]
fn a_descriptor_with_an_iotlb_message_ends_the_connection_after_those_before_it() {
    let (mut stream, served) = serve(Device::default());
    send(&stream, &message(&Request::SetFeatures(VERSION_1 | F_ACCESS_PLATFORM), false), &[]);
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    send(&stream, &message(&request(&invalidate(1)), false), &[]);
    send(&stream, &message(&request(&invalidate(2)), false), &[event.as_fd()]);
    assert_eq!(words(&mut stream, 1), [(code::IOTLB_MSG, 0)]);
    let (result, device) = served.join().unwrap();
    assert!(result.unwrap_err().to_string().contains("1 descriptors"));
    assert!(device.events.contains(&Event::Iotlb(invalidate(1))));
    assert!(!device.events.contains(&Event::Iotlb(invalidate(2))));
}

/// A front end that has negotiated ACCESS_PLATFORM alone, and the other end of its connection.
fn alone() -> (Frontend, IotlbHandle, UnixStream) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut front = Frontend::new(ours, LONG);
    front.set_features(F_ACCESS_PLATFORM).unwrap();
    let mut head = [0; Header::LEN + 8];
    theirs.read_exact(&mut head).unwrap();
    let handle = front.iotlb_handle();
    (front, handle, theirs)
}

fn reply(word: u64) -> Vec<u8> {
    bytes(Header::reply(code::IOTLB_MSG, 8), &word.to_ne_bytes())
}

#[test]
fn posts_are_done_when_their_replies_come_however_these_are_cut() {
    let (_front, handle, mut theirs) = alone();
    let first = handle.post(&(0..50).map(invalidate).collect::<Vec<_>>()).unwrap();
    let last = handle.post(&(50..100).map(invalidate).collect::<Vec<_>>()).unwrap();
    assert_eq!((first, last), (50, 100));
    handle.flush().unwrap();
    assert!(!handle.is_done(1));
    let replies: Vec<u8> = (0..100).flat_map(|_| reply(0)).collect();
    for (at, byte) in replies.iter().enumerate() {
        theirs.write_all(&[*byte]).unwrap();
        if at % 7 == 0 || at + 1 == replies.len() {
            handle.flush().unwrap();
            let whole = ((at + 1) / reply(0).len()) as u64;
            assert_eq!((1..=100).filter(|&ticket| handle.is_done(ticket)).count() as u64, whole);
        }
    }
    handle.settle().unwrap();
}

#[test]
fn replies_are_requested_where_that_was_negotiated() {
    // rules D9, D13
    let head = |theirs: &mut UnixStream| {
        let mut message = [0; MESSAGE];
        theirs.read_exact(&mut message).unwrap();
        u32::from_ne_bytes(message[4..8].try_into().unwrap()) & Header::NEED_REPLY != 0
    };
    let (mut front, handle, mut theirs) = alone();
    handle.post(&[invalidate(1)]).unwrap();
    handle.flush().unwrap();
    assert!(!head(&mut theirs));
    theirs.write_all(&reply(0)).unwrap();
    handle.settle().unwrap();
    front.set_protocol_features(ProtocolFeatures::REPLY_ACK).unwrap();
    theirs.read_exact(&mut [0; Header::LEN + 8]).unwrap();
    handle.post(&[invalidate(1)]).unwrap();
    handle.flush().unwrap();
    assert!(head(&mut theirs));
    theirs.write_all(&[reply(0), reply(0)].concat()).unwrap();
    front.iotlb(&invalidate(1)).unwrap();
    assert!(head(&mut theirs), "also by a call that waits");
}

#[test]
fn a_refusal_is_reported_once_and_an_invalid_reply_ends_the_connection() {
    let (_front, handle, mut theirs) = alone();
    handle.post(&[invalidate(1), invalidate(2), invalidate(3)]).unwrap();
    theirs.write_all(&[reply(0), reply(7), reply(9)].concat()).unwrap();
    let refused = handle.settle();
    assert!(matches!(refused, Err(FrontendError::Refused { code: 7, .. })), "{refused:?}");
    handle.settle().unwrap();
    assert!(handle.is_done(3));

    for nonsense in [bytes(Header::reply(3, 8), &[0; 8]), bytes(Header::reply(22, 4), &[0; 4])] {
        let (_front, handle, mut theirs) = alone();
        handle.post(&[invalidate(1)]).unwrap();
        theirs.write_all(&nonsense).unwrap();
        assert!(matches!(handle.settle(), Err(FrontendError::Wire(_))));
        assert!(matches!(handle.post(&[invalidate(1)]), Err(FrontendError::Closed)));
        assert!(matches!(handle.flush(), Err(FrontendError::Closed)));
    }
    let (_front, handle, theirs) = alone();
    handle.post(&[invalidate(1)]).unwrap();
    drop(theirs);
    assert!(handle.settle().is_err(), "a hang-up is noticed");
}

#[test]
fn requests_behind_posts_get_replies_although_the_posts_are_not_polled() {
    let (mut front, served) = connect(Device::default());
    front.negotiate(VERSION_1 | F_ACCESS_PLATFORM, ProtocolFeatures::KNOWN).unwrap();
    let handle = front.iotlb_handle();
    handle.post(&(0..100).map(invalidate).collect::<Vec<_>>()).unwrap();
    // The posts go before this request, and their replies before its own.
    let mut config = [0; 4];
    front.config(8, &mut config).unwrap();
    assert_eq!(config, [8, 9, 10, 11]);
    assert!(handle.is_done(100));
    drop(front);
    let (result, device) = served.join().unwrap();
    result.unwrap();
    let count = device.events.iter().filter(|event| matches!(event, Event::Iotlb(_))).count();
    assert_eq!(count, 100);
}

#[test]
fn threads_that_post_and_send_get_their_own_replies() {
    let (mut front, served) = connect(Device::default());
    front.negotiate(VERSION_1 | F_ACCESS_PLATFORM, ProtocolFeatures::KNOWN).unwrap();
    let ram = GuestRam::new(1 << 16, 0).unwrap();
    front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
    let update = Iotlb::Update {
        first: 0,
        last: 4095,
        user_addr: ram.user_addr(),
        access: Some(Access::ReadWrite),
    };
    thread::scope(|scope| {
        for _ in 0..2 {
            let handle = front.iotlb_handle();
            scope.spawn(move || {
                for round in 0..200 {
                    let ticket = handle.post(&[update, invalidate(round)]).unwrap();
                    while !handle.is_done(ticket) {
                        handle.flush().unwrap();
                        thread::yield_now();
                    }
                }
            });
        }
        let handle = front.iotlb_handle();
        scope.spawn(move || {
            for page in 0..200 {
                handle.post(&[invalidate(page)]).unwrap();
                handle.settle().unwrap();
            }
        });
        let handle = front.iotlb_handle();
        for round in 0..200 {
            let mut config = [0; 4];
            front.config(8, &mut config).unwrap();
            assert_eq!(config, [8, 9, 10, 11]);
            if round % 10 == 0 {
                handle.settle().unwrap();
            }
        }
    });
    drop(front);
    let (result, device) = served.join().unwrap();
    result.unwrap();
    let count = device.events.iter().filter(|event| matches!(event, Event::Iotlb(_))).count();
    assert_eq!(count, 2 * 200 * 2 + 200);
}

#[test]
fn more_than_the_sockets_hold_is_posted() {
    let (mut front, served) = connect(Device::default());
    front.negotiate(VERSION_1 | F_ACCESS_PLATFORM, ProtocolFeatures::KNOWN).unwrap();
    let handle = front.iotlb_handle();
    let many: Vec<Iotlb> = (0..1000).map(invalidate).collect();
    for _ in 0..30 {
        handle.post(&many).unwrap();
    }
    handle.settle().unwrap();
    assert!(handle.is_done(30_000));
    drop(front);
    served.join().unwrap().0.unwrap();
}
