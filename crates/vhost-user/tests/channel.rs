//! The back end's channel: misses, their replies, and peers that break it.

mod common;

use common::{Device, Event, LONG, connect};
use ringfence_mem::{Access, GuestRam};
use ringfence_vhost_user::{
    BackendChannel, BackendMessage, BackendRequest, Frontend, FrontendChannel, FrontendError,
    Iotlb, IotlbWire, ProtocolFeatures, RingAddresses, ServeError, WireError,
    msg::{Header, Request, code},
};
use std::{
    io::{Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};
use zerocopy::{FromBytes, IntoBytes};

fn miss(iova: u64) -> Iotlb {
    Iotlb::Miss { iova, access: Access::Read }
}

/// A front end whose back end has a channel and, if wanted, a running ring; and the memory.
fn with_channel(
    device: Device,
    runs: bool,
) -> (Frontend, UnixStream, common::Served, Arc<GuestRam>) {
    let (mut front, served) = connect(device);
    front.negotiate(!0, ProtocolFeatures::KNOWN).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    front.set_backend_channel(theirs.as_fd()).unwrap();
    let ram = GuestRam::new(1 << 20, 0).unwrap();
    front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
    if runs {
        start(&mut front);
    }
    (front, ours, served, ram)
}

fn start(front: &mut Frontend) {
    front.set_vring_num(0, 64).unwrap();
    front.set_vring_addr(0, &RingAddresses::default()).unwrap();
    front.set_vring_kick(0, None).unwrap();
}

fn update(iova: u64, ram: &GuestRam) -> Iotlb {
    let access = Some(Access::ReadWrite);
    Iotlb::Update { first: iova, last: iova | 0xfff, user_addr: ram.user_addr(), access }
}

/// A channel whose peer takes few bytes at a time.
fn narrow() -> (BackendChannel, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 1).unwrap();
    (BackendChannel::new(ours, true).unwrap(), theirs)
}

#[test]
fn a_channel_that_is_not_a_unix_stream_is_refused() {
    let (mut front, served) = connect(Device::default());
    front.negotiate(!0, ProtocolFeatures::KNOWN).unwrap();
    let (datagram, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    for fd in [datagram.as_fd(), udp.as_fd(), pipe.as_fd()] {
        assert!(front.set_backend_channel(fd).is_err());
    }
    assert_eq!(front.queue_num().unwrap(), 2, "the connection goes on");
    drop(front);
    served.join().unwrap().0.unwrap();
}

#[test]
fn a_message_of_which_a_part_found_room_is_finished_first() {
    let (channel, theirs) = narrow();
    let mut sent = 0;
    let mut front = FrontendChannel::new(theirs, LONG);
    let mut requests = Vec::new();
    let mut full = 0;
    for round in 0..200 {
        // Single ones fill the buffer by different amounts; many at once then find room in part.
        for wanted in std::iter::repeat_n(1, round % 9).chain([64]) {
            let misses = (sent..sent + wanted).map(|page| (miss(page << 12), None));
            let count = channel.try_send(misses) as u64;
            sent += count;
            if count < wanted {
                full += 1;
                // Read all that there is: the stream must go on where it was cut.
                while front.recv_all(Some(Duration::ZERO), &mut requests).unwrap() {
                    if requests.len() as u64 + 1 >= sent {
                        break;
                    }
                }
            }
        }
    }
    assert!(full > 0, "the socket took all at once");
    // A cut message is finished before another one goes.
    while channel.try_send([(miss(sent << 12), None)]) == 0 {
        let _ = front.recv_all(Some(Duration::ZERO), &mut requests).unwrap();
    }
    sent += 1;
    drop(channel);
    while front.recv_all(None, &mut requests).unwrap() {}
    let expected: Vec<BackendRequest> = (0..sent)
        .map(|page| BackendRequest {
            message: BackendMessage::Iotlb(miss(page << 12)),
            need_reply: false,
        })
        .collect();
    assert_eq!(requests, expected);
}

#[test]
fn no_more_replies_are_requested_than_can_be_kept() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let channel = BackendChannel::new(ours, true).unwrap();
    let messages = |ack| (0..1000).map(move |page| (miss(page << 12), ack));
    assert_eq!(channel.try_send(messages(Some(1))), 256);
    assert_eq!(channel.try_send(messages(Some(1))), 0);
    // Messages that ask for no reply may still go.
    assert!(channel.try_send(messages(None).take(10)) > 0);
}

#[test]
fn a_channel_without_a_peer_takes_nothing_and_reports_it() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let channel = BackendChannel::new(ours, true).unwrap();
    assert_eq!(channel.try_send([(miss(0), None)]), 0);
    assert!(!channel.config_changed());
}

#[test]
fn misses_and_access_failures_carry_an_address_and_a_permission() {
    // rules D16, D29
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let channel = BackendChannel::new(ours, true).unwrap();
    let fail = Iotlb::AccessFail { iova: 0x7123, access: Access::Write };
    assert_eq!(channel.try_send([(miss(0x1234), None), (fail, Some(0))]), 2);
    let mut bytes = [0; 88];
    theirs.read_exact(&mut bytes).unwrap();
    for (part, flags, kind, iova, perm) in
        [(&bytes[..44], 1, 1, 0x1234, 1), (&bytes[44..], 1 | 8, 4, 0x7123, 2)]
    {
        let header = Header::read_from_bytes(&part[..12]).unwrap();
        assert_eq!((header.request, header.flags, header.size), (1, flags, 32));
        let wire = IotlbWire::read_from_bytes(&part[12..]).unwrap();
        assert_eq!((wire.kind, wire.iova, wire.perm), (kind, iova, perm));
    }
}

#[test]
fn nothing_is_sent_while_every_ring_is_stopped() {
    // rule D27
    let (mut front, channel, served, _ram) = with_channel(Device::default(), false);
    drop(channel);
    let (_ours, theirs) = UnixStream::pair().unwrap();
    front.set_backend_channel(theirs.as_fd()).unwrap();
    drop(front);
    let (_, device) = served.join().unwrap();
    let stopped = device.channel.clone().unwrap();
    assert_eq!(stopped.try_send([(miss(0), None)]), 0);
    assert!(!stopped.config_changed());

    // A miss that the device sends while its ring stops goes out; a later one does not.
    let on_stop: fn(&mut Device) = |device| {
        let channel = device.channel.as_ref().unwrap();
        assert_eq!(channel.try_send([(miss(1 << 12), None)]), 1);
    };
    let (mut front, channel, served, _ram) =
        with_channel(Device { on_stop: Some(on_stop), ..Device::default() }, true);
    front.get_vring_base(0).unwrap();
    drop(front);
    let (_, device) = served.join().unwrap();
    assert_eq!(device.channel.as_ref().unwrap().try_send([(miss(2 << 12), None)]), 0);
    drop(device);
    let mut front = FrontendChannel::new(channel, LONG);
    let first = front.recv().unwrap().unwrap();
    assert_eq!(first.message, BackendMessage::Iotlb(miss(1 << 12)));
    assert!(front.recv().unwrap().is_none());
}

#[test]
fn replies_reach_the_device_in_the_order_of_its_messages() {
    // rule D9
    let (back_channel, front_channel) = UnixStream::pair().unwrap();
    let on_stop: fn(&mut Device) = |device| {
        let channel = device.channel.as_ref().unwrap();
        let misses = [(miss(0), Some(7)), (miss(1 << 12), None), (miss(2 << 12), Some(5))];
        assert_eq!(channel.try_send(misses), 3);
        assert!(channel.config_changed());
    };
    let device = Device { on_stop: Some(on_stop), ..Device::default() };
    let lost = Arc::clone(&device.lost);
    let (mut front, served) = connect(device);
    front.negotiate(!0, ProtocolFeatures::KNOWN).unwrap();
    front.set_backend_channel(back_channel.as_fd()).unwrap();
    drop(back_channel);
    let ram = GuestRam::new(1 << 16, 0).unwrap();
    front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
    start(&mut front);
    front.get_vring_base(0).unwrap();
    let mut channel = FrontendChannel::new(front_channel, LONG);
    let mut requests = Vec::new();
    while requests.len() < 4 {
        assert!(channel.recv_all(None, &mut requests).unwrap());
    }
    assert_eq!(requests[3].message, BackendMessage::ConfigChange);
    front.iotlb(&update(0, &ram)).unwrap();
    for (index, request) in requests.iter().enumerate() {
        assert_eq!(request.need_reply, index == 0 || index == 2);
        // The first was translated, the others could not be.
        channel.reply(request, index == 0).unwrap();
    }
    drop(channel);
    // The back end reads the replies though nothing comes on the main socket.
    await_loss(&lost);
    drop(front);
    let (_, device) = served.join().unwrap();
    let update_at = device.events.iter().position(|e| matches!(e, Event::Iotlb(_))).unwrap();
    let replies: Vec<_> = device.events[update_at + 1..]
        .iter()
        .filter(|event| matches!(event, Event::Reply(..) | Event::ChannelLost))
        .collect();
    let first = &Event::Reply(miss(0), 7, true);
    let second = &Event::Reply(miss(2 << 12), 5, false);
    assert_eq!(replies, [first, second, &Event::ChannelLost]);
}

/// Waits until the device has lost its channel.
fn await_loss(lost: &AtomicU64) {
    let begun = Instant::now();
    while lost.load(Ordering::Relaxed) == 0 {
        assert!(begun.elapsed() < LONG, "the end of the channel is not noticed");
        thread::sleep(Duration::from_millis(1));
    }
}

/// What the front end's bytes on the channel do to a back end that has sent one miss.
fn channel_receives(bytes: &[u8]) -> Result<(), ServeError> {
    let on_stop: fn(&mut Device) = |device| {
        device.channel.as_ref().unwrap().try_send([(miss(0), Some(1))]);
    };
    let (mut front, mut channel, served, _ram) =
        with_channel(Device { on_stop: Some(on_stop), ..Device::default() }, true);
    front.get_vring_base(0).unwrap();
    channel.write_all(bytes).unwrap();
    // Nothing else is sent: the back end must notice by itself.
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(served.join().unwrap().0));
    let result = receiver.recv_timeout(LONG).expect("the back end hangs");
    assert!(matches!(front.features(), Err(FrontendError::Wire(_))));
    result
}

#[test]
fn nonsense_on_the_channel_ends_the_connection_with_a_reason() {
    let reply = |header: Header, payload: &[u8]| [header.as_bytes(), payload].concat();
    let good = Header::reply(code::BACKEND_IOTLB_MSG, 8);
    let zero = [0; 8];
    let twice = [reply(good, &zero), reply(good, &zero)].concat();
    let wire = |bytes: &[u8]| match channel_receives(bytes) {
        Err(ServeError::Wire(error)) => error,
        other => panic!("{other:?}"),
    };
    assert!(matches!(wire(&twice), WireError::State { .. }));
    assert!(matches!(wire(&reply(Header { size: 4, ..good }, &zero[..4])), WireError::Size { .. }));
    assert!(matches!(wire(&reply(Header { flags: 1, ..good }, &zero)), WireError::Flags { .. }));
    assert!(matches!(wire(&reply(Header { flags: 6, ..good }, &zero)), WireError::Version { .. }));
    assert!(matches!(wire(&reply(Header::reply(2, 8), &zero)), WireError::WrongReply { .. }));
    assert!(matches!(wire(&[0xff; 600]), WireError::Version { .. }));
}

#[test]
fn a_front_end_that_closes_the_channel_is_served_on() {
    let device = Device::default();
    let lost = Arc::clone(&device.lost);
    let (mut front, channel, served, ram) = with_channel(device, true);
    drop(channel);
    await_loss(&lost);
    // The main socket still works, and does not spin on the other.
    for page in 0..10 {
        front.iotlb(&update(page << 12, &ram)).unwrap();
    }
    front.get_vring_base(0).unwrap();
    drop(front);
    let (result, device) = served.join().unwrap();
    result.unwrap();
    let lost = device.events.iter().filter(|event| **event == Event::ChannelLost);
    assert_eq!(lost.count(), 1);
}

#[test]
fn a_channel_that_takes_no_more_is_lost_also_in_the_middle_of_a_message() {
    let on_stop: fn(&mut Device) = |device| {
        let channel = device.channel.as_ref().unwrap();
        let send = |count| channel.try_send((0..count).map(|page| (miss(page << 12), None)));
        send(1);
        // The last one that finds room finds it in part.
        let sent = send(64);
        assert!(0 < sent && sent < 64, "{sent}");
    };
    for (cut, on_stop) in [(false, None), (true, Some(on_stop))] {
        let device = Device { on_stop, ..Device::default() };
        let lost = Arc::clone(&device.lost);
        let (mut front, served) = connect(device);
        front.negotiate(!0, ProtocolFeatures::KNOWN).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&theirs, 1).unwrap();
        front.set_backend_channel(theirs.as_fd()).unwrap();
        drop(theirs);
        let ram = GuestRam::new(1 << 16, 0).unwrap();
        front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
        start(&mut front);
        front.get_vring_base(0).unwrap();
        ours.shutdown(std::net::Shutdown::Read).unwrap();
        if cut {
            // There is room again, but nothing more comes.
            while !matches!((&ours).read(&mut [0; 4096]), Ok(0)) {}
        } else {
            ours.shutdown(std::net::Shutdown::Write).unwrap();
        }
        await_loss(&lost);
        drop(front);
        served.join().unwrap().0.unwrap();
    }
}

#[test]
fn updates_are_served_while_a_miss_is_open_and_another_thread_waits() {
    // rules D7, D8, D9, D19
    // The device sends a miss when its ring is to stop, so that two threads use one socket.
    let on_stop: fn(&mut Device) = |device| {
        let channel = device.channel.as_ref().unwrap();
        let misses = (0..200).map(|page| (miss(page << 12), (page % 2 == 0).then_some(page)));
        assert_eq!(channel.try_send(misses), 200);
    };
    let (mut front, channel, served, ram) =
        with_channel(Device { on_stop: Some(on_stop), ..Device::default() }, true);
    let handle = front.iotlb_handle();
    let mut channel = FrontendChannel::new(channel, LONG);
    thread::scope(|scope| {
        let replying = scope.spawn(|| {
            let mut replied = 0;
            while replied < 200 {
                let mut requests = Vec::new();
                assert!(channel.recv_all(None, &mut requests).unwrap());
                let updates: Vec<_> = requests
                    .iter()
                    .map(|request| match request.message {
                        BackendMessage::Iotlb(Iotlb::Miss { iova, .. }) => update(iova, &ram),
                        other => panic!("{other:?}"),
                    })
                    .collect();
                handle.post(&updates).unwrap();
                handle.settle().unwrap();
                requests.iter().for_each(|request| channel.reply(request, true).unwrap());
                replied += requests.len();
            }
        });
        // This thread waits for the ring, on the same socket.
        assert_eq!(front.get_vring_base(0).unwrap(), 77);
        replying.join().unwrap();
    });
    drop(front);
    let (result, device) = served.join().unwrap();
    result.unwrap();
    let updates: Vec<u64> = device
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Iotlb(Iotlb::Update { first, .. }) => Some(first >> 12),
            _ => None,
        })
        .collect();
    assert_eq!(updates, (0..200).collect::<Vec<_>>());
}

#[test]
fn many_messages_are_in_flight_at_once_and_a_refusal_is_reported() {
    // rule D13
    let (mut front, _channel, served, ram) = with_channel(Device::default(), false);
    let handle = front.iotlb_handle();
    let updates: Vec<_> = (0..1000).map(|page| update(page << 12, &ram)).collect();
    assert_eq!(handle.post(&updates).unwrap(), 1000);
    handle.settle().unwrap();
    let outside = Iotlb::Update { first: 0, last: 0xfff, user_addr: 0, access: None };
    assert!(matches!(handle.post(&[outside]), Err(FrontendError::Argument { .. })));
    // Every reply was read: the next request gets its own.
    assert_eq!(front.queue_num().unwrap(), 2);
    front.request(Request::RemMemReg(ram.region()), &[]).unwrap();
    assert!(matches!(handle.post(&updates[..1]), Err(FrontendError::Argument { .. })));
    drop(front);
    let (result, device) = served.join().unwrap();
    result.unwrap();
    let count = device.events.iter().filter(|event| matches!(event, Event::Iotlb(_))).count();
    assert_eq!(count, 1000);
    // A handle that still exists reports that the connection is over.
    assert!(handle.post(&[Iotlb::Invalidate { first: 0, last: 1 }]).is_err());
}

#[test]
fn threads_that_share_a_connection_get_their_own_replies() {
    let (mut front, _channel, served, ram) = with_channel(Device::default(), false);
    thread::scope(|scope| {
        for thread in 0..3u64 {
            let (handle, ram) = (front.iotlb_handle(), &ram);
            scope.spawn(move || {
                for page in 0..200 {
                    handle.post(&[update((thread << 32) + (page << 12), ram)]).unwrap();
                    handle.settle().unwrap();
                }
            });
        }
        for _ in 0..200 {
            assert_eq!(front.queue_num().unwrap(), 2);
            assert_eq!(front.status().unwrap(), 0);
        }
    });
    drop(front);
    let (result, _) = served.join().unwrap();
    result.unwrap();
}

#[test]
fn invalid_messages_of_a_back_end_on_the_channel_are_refused() {
    let received = |bytes: &[u8]| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(bytes).unwrap();
        drop(theirs);
        FrontendChannel::new(ours, LONG).recv()
    };
    let wire = |kind, perm| {
        let wire = IotlbWire { iova: 0, size: 0, user_addr: 0, perm, kind, padding: [0; 6] };
        [Header::request(1, false, 32).as_bytes(), wire.as_bytes()].concat()
    };
    assert!(received(&wire(1, 3)).unwrap().is_some());
    assert!(received(&[]).unwrap().is_none());
    // A back end only sends misses and access failures.
    for (kind, perm) in [(2, 3), (3, 0), (1, 0), (1, 4), (0, 1), (5, 1)] {
        assert!(
            matches!(received(&wire(kind, perm)), Err(WireError::Value { .. })),
            "{kind} {perm}"
        );
    }
    assert!(matches!(received(&wire(1, 3)[..40]), Err(WireError::HungUp { .. })));
    let header = |request, flags, size| Header { request, flags, size };
    assert!(matches!(received(header(3, 1, 0).as_bytes()), Err(WireError::Request { .. })));
    assert!(matches!(received(header(1, 1, 0).as_bytes()), Err(WireError::Size { .. })));
    assert!(matches!(received(header(1, 5, 32).as_bytes()), Err(WireError::Flags { .. })));
    assert!(matches!(received(header(1, 1, 1 << 20).as_bytes()), Err(WireError::Size { .. })));
}

/// A device may delay waking its workers, so the server must call it when nothing more is there,
/// whether all its misses got replies or none.
#[test]
fn a_device_is_notified_when_no_more_replies_come() {
    let on_stop: fn(&mut Device) = |device| {
        device.channel.as_ref().unwrap().try_send((0..50).map(|page| (miss(page << 12), None)));
    };
    for (on_stop, with_channel_too) in [(None, true), (Some(on_stop), true), (None, false)] {
        let device = Device { on_stop, ..Device::default() };
        let settled = Arc::clone(&device.settled);
        let (mut front, channel, served, ram) = with_channel(device, true);
        if on_stop.is_some() {
            front.get_vring_base(0).unwrap();
        }
        if !with_channel_too {
            channel.shutdown(std::net::Shutdown::Both).unwrap();
        }
        for count in 1..10 {
            front.iotlb(&update(count << 12, &ram)).unwrap();
            let begun = Instant::now();
            while settled.load(Ordering::Relaxed) != count {
                assert!(
                    begun.elapsed() < LONG,
                    "{count} messages, and the device was not notified"
                );
                thread::yield_now();
            }
        }
        drop((front, channel));
        served.join().unwrap().0.unwrap();
    }
}
