//! Arbitrary bytes on every socket of both ends: nothing panics, hangs or is kept.

mod common;

use common::{Device, Event, LONG, VERSION_1, alone, bytes, message, open_fds, send};
use proptest::prelude::*;
use ringfence_mem::{Access, GuestRam, Region};
use ringfence_vhost_user::{
    F_ACCESS_PLATFORM, F_LOG_ALL, F_PROTOCOL_FEATURES, Frontend, FrontendChannel, FrontendError,
    Iotlb, IotlbWire, ProtocolFeatures, RingAddresses, Server,
    msg::{Header, Inflight, Request},
};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    io::Write,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, atomic::Ordering},
    thread,
};
use zerocopy::IntoBytes;

#[derive(Clone, Debug)]
enum Piece {
    Good(Request, bool),
    Random { request: u32, flags: u32, size: u32, payload: Vec<u8> },
    Bytes(Vec<u8>),
}

fn any_piece() -> impl Strategy<Value = (Piece, Vec<u8>)> {
    let region = any::<(u8, u8, u8, bool)>().prop_map(|(gpa, size, user, offset)| Region {
        gpa: u64::from(gpa) << 12,
        size: u64::from(size) << 8,
        user_addr: u64::from(user) << 12,
        mmap_offset: u64::from(offset) << 12,
    });
    let iotlb = any::<(u16, u16, u16, u8, u8)>().prop_map(|(iova, size, user, perm, kind)| {
        Request::Iotlb(IotlbWire {
            iova: iova.into(),
            size: size.into(),
            user_addr: user.into(),
            perm: perm % 5,
            kind: kind % 6,
            padding: [0; 6],
        })
    });
    let ring = 0..3u32;
    let good = prop_oneof![
        Just(Request::SetFeatures(VERSION_1 | F_ACCESS_PLATFORM)),
        Just(Request::SetFeatures(VERSION_1 | F_PROTOCOL_FEATURES)),
        Just(Request::SetProtocolFeatures(ProtocolFeatures::KNOWN)),
        Just(Request::GetConfig { offset: 3, size: 62 }),
        Just(Request::ResetDevice),
        Just(Request::SetBackendReqFd),
        Just(Request::SetFeatures(VERSION_1 | F_ACCESS_PLATFORM | F_LOG_ALL)),
        Just(Request::SetLogFd),
        Just(Request::GetStatus),
        any::<u8>().prop_map(|status| Request::SetStatus(status & 3)),
        any::<u16>().prop_map(Request::NetSetMtu),
        (0..20u64, 0..3u64)
            .prop_map(|(len, offset)| Request::SetLogBase { len: len << 12, offset: offset << 11 }),
        (0..4u16, 0..200u16, any::<bool>(), 0..20u64).prop_map(|(queues, size, set, len)| {
            let place = Inflight { len: len << 12, offset: 0, queues, size };
            if set { Request::SetInflight(place) } else { Request::GetInflight(place) }
        }),
        prop::collection::vec(region.clone(), 1..4).prop_map(Request::SetMemTable),
        region.clone().prop_map(Request::AddMemReg),
        region.prop_map(Request::RemMemReg),
        iotlb,
        (ring.clone(), any::<u8>())
            .prop_map(|(ring, num)| Request::SetVringNum { ring, num: num.into() }),
        ring.clone().prop_map(|ring| Request::SetVringNum { ring, num: 64 }),
        (ring.clone(), 0..4u64).prop_map(|(ring, at)| {
            let addresses =
                RingAddresses { desc: at << 4, avail: at << 4, used: at << 4, log: None };
            Request::SetVringAddr { ring, addresses }
        }),
        ring.clone().prop_map(|ring| Request::GetVringBase { ring }),
        (0..3u8, any::<bool>()).prop_map(|(ring, fd)| Request::SetVringKick { ring, fd }),
        (0..3u8, any::<bool>()).prop_map(|(ring, fd)| Request::SetVringCall { ring, fd }),
        (ring, any::<bool>()).prop_map(|(ring, enabled)| Request::SetVringEnable { ring, enabled }),
    ];
    let payload = prop::collection::vec(any::<u8>(), 0..300);
    let piece = prop_oneof![
        12 => (good, any::<bool>()).prop_map(|(request, ack)| Piece::Good(request, ack)),
        2 => (0..45u32, prop_oneof![Just(1), Just(9), any::<u32>()], payload.clone(), any::<u32>(), any::<bool>())
            .prop_map(|(request, flags, payload, size, honest)| {
                let size = if honest { payload.len() as u32 } else { size };
                Piece::Random { request, flags, size, payload }
            }),
        1 => payload.prop_map(Piece::Bytes),
    ];
    // Mostly as many descriptors as the message takes; sometimes others.
    (piece, prop_oneof![3 => Just(vec![255]), 1 => prop::collection::vec(0..3u8, 0..11)])
}

/// Whether it is the reply to an IOTLB message, whatever its value.
fn is_reply(bytes: &[u8]) -> bool {
    bytes.len() == 20 && bytes.starts_with(&[1, 0, 0, 0, 1 | 1 << 2, 0, 0, 0, 8, 0, 0, 0])
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_stream_of_messages_harms_the_back_end_or_leaks_a_descriptor(
        pieces in prop::collection::vec(any_piece(), 1..24),
    ) {
        let _alone = alone();
        let before = open_fds();
        {
            let ram: Arc<GuestRam> = GuestRam::new(1 << 16, 0).unwrap();
            let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            let (pipe, _other): (OwnedFd, OwnedFd) = rustix::pipe::pipe().unwrap();
            let kinds = [ram.fd(), event.as_fd(), pipe.as_fd()];
            let (stream, theirs) = UnixStream::pair().unwrap();
            let mut server = Server::new(common::end(theirs), Device::default());
            let settle = Request::SetProtocolFeatures(ProtocolFeatures::KNOWN);
            send(&stream, &message(&settle, false), &[]);
            for (piece, fds) in pieces {
                let (bytes, wanted) = match piece {
                    Piece::Good(request, ack) => {
                        let wanted = (0..9).find(|&count| request.takes_fds(count)).unwrap();
                        (message(&request, ack), wanted)
                    }
                    Piece::Random { request, flags, size, payload } => {
                        (bytes(Header { request, flags, size }, &payload), 0)
                    }
                    Piece::Bytes(bytes) => (bytes, 0),
                };
                let fds: Vec<_> = match &fds[..] {
                    [255] => vec![ram.fd(); wanted],
                    others => others.iter().map(|&kind| kinds[kind as usize]).collect(),
                };
                send(&stream, &bytes, if bytes.is_empty() { &[] } else { &fds });
            }
            // Hung up: replies are lost, requests that were sent are served.
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let _ = server.serve();
            // Every ring that started was stopped.
            let events = &server.handler().events;
            for ring in 0..2 {
                let starts = events.iter().filter(|e| matches!(e, Event::Start { ring: r, .. } if *r == ring));
                let stops = events.iter().filter(|e| **e == Event::Stop(ring));
                prop_assert_eq!(starts.count(), stops.count());
            }
        }
        prop_assert_eq!(open_fds(), before);
    }

    #[test]
    fn no_bytes_on_the_channel_harm_the_back_end(
        misses in 0..4u64,
        pieces in prop::collection::vec(
            prop_oneof![
                4 => any::<u64>().prop_map(|word| bytes(Header::reply(1, 8), &word.to_ne_bytes())),
                // An almost valid one.
                1 => (0..12usize, 0..8u32).prop_map(|(at, bit)| {
                    let mut bytes = bytes(Header::reply(1, 8), &[0; 8]);
                    bytes[at] ^= 1 << bit;
                    bytes
                }),
                1 => prop::collection::vec(any::<u8>(), 0..30),
            ],
            0..6,
        ),
    ) {
        let _alone = alone();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut channel, end) = UnixStream::pair().unwrap();
        let device = Device {
            on_stop: Some(|device| {
                let channel = device.channel.as_ref().unwrap();
                let access = Access::Read;
                let miss = |iova| (Iotlb::Miss { iova, access }, Some(iova));
                channel.try_send((0..u64::from(device.stopped_at.unwrap())).map(miss));
            }),
            stopped_at: Some(misses as u32),
            ..Device::default()
        };
        let lost = Arc::clone(&device.lost);
        let served = thread::spawn(move || {
            let mut server = Server::new(common::end(theirs), device);
            let _ = server.serve();
            server.into_handler().events
        });
        let mut front = Frontend::new(common::end(ours), LONG);
        front.negotiate(!0, ProtocolFeatures::KNOWN).unwrap();
        front.set_backend_channel(end.as_fd()).unwrap();
        let ram = GuestRam::new(1 << 16, 0).unwrap();
        front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
        front.set_vring_num(0, 64).unwrap();
        front.set_vring_addr(0, &RingAddresses::default()).unwrap();
        front.set_vring_kick(0, None).unwrap();
        front.get_vring_base(0).unwrap();
        let sent = pieces.concat();
        let _ = channel.write_all(&sent);
        drop(channel);
        // Served until all is read, or cut off: within the time-out either way.
        while lost.load(Ordering::Relaxed) == 0 && front.queue_num().is_ok() {}
        drop(front);
        let events = served.join().unwrap();
        let replies = events.iter().filter(|event| matches!(event, Event::Reply(..))).count();
        // Read until the replies are nonsense, or no message is without a reply.
        let good = sent.chunks(20).take_while(|piece| is_reply(piece)).count();
        prop_assert_eq!(replies as u64, misses.min(good as u64));
    }

    #[test]
    fn no_bytes_on_the_channel_harm_the_front_end(
        bytes in prop::collection::vec(any::<u8>(), 0..100),
        head in any::<bool>(),
    ) {
        let _alone = alone();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let wire = Header::request(1, true, 32);
        let bytes = if head { [wire.as_bytes(), &bytes].concat() } else { bytes };
        send(&theirs, &bytes, &[]);
        drop(theirs);
        let mut channel = FrontendChannel::new(common::end(ours), LONG);
        let mut requests = Vec::new();
        while let Ok(true) = channel.recv_all(None, &mut requests) {}
        prop_assert!(requests.len() <= bytes.len() / Header::LEN);
    }

    #[test]
    fn no_reply_harms_the_front_end(reply in prop::collection::vec(any::<u8>(), 0..40)) {
        let _alone = alone();
        let (ours, theirs) = UnixStream::pair().unwrap();
        send(&theirs, &reply, &[]);
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        let mut front = Frontend::new(common::end(ours), LONG);
        prop_assert!(front.features().is_err());
        prop_assert!(matches!(front.features(), Err(FrontendError::Closed)));
    }
}
