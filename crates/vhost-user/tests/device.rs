//! What concerns the whole device: the dirty log, requests in flight, status, and connections one
//! after the other.

mod common;

use common::{Device, Event, VERSION_1, connect};
use ringfence_mem::{GuestRam, SharedFile};
use ringfence_vhost_user::{
    F_LOG_ALL, F_PROTOCOL_FEATURES, Frontend, FrontendError, InflightRegion, ProtocolFeatures,
    RingAddresses, ServeError, Server, WireError,
    msg::{Header, Request, code},
};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    io::Write,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{Arc, atomic::Ordering::Relaxed},
};
use zerocopy::IntoBytes;

fn negotiated(device: Device) -> (Frontend, common::Served) {
    let (mut front, served) = connect(device);
    front.negotiate(!0, ProtocolFeatures::KNOWN).unwrap();
    (front, served)
}

fn finish(front: Frontend, served: common::Served) -> Device {
    drop(front);
    let (result, device) = served.join().unwrap();
    result.unwrap();
    device
}

fn started(front: &mut Frontend) -> Arc<GuestRam> {
    let ram = GuestRam::new(1 << 16, 0).unwrap();
    front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
    front.set_vring_num(0, 64).unwrap();
    front.set_vring_addr(0, &RingAddresses { log: Some(0x3000), ..Default::default() }).unwrap();
    front.set_vring_kick(0, None).unwrap();
    front.set_vring_enable(0, true).unwrap();
    ram
}

#[test]
fn writes_are_logged_while_the_feature_is_on_also_under_a_running_ring() {
    // rule D26
    let (mut front, served) = negotiated(Device::default());
    let on = VERSION_1 | F_PROTOCOL_FEATURES | F_LOG_ALL;
    let off = on & !F_LOG_ALL;
    front.set_features(off).unwrap();
    let _ram = started(&mut front);
    let (first, fd) = SharedFile::create(4096).unwrap();
    front.request(Request::SetLogBase { len: 4096, offset: 0 }, &[fd.as_fd()]).unwrap();
    front
        .request(Request::SetLogFd, &[eventfd(0, EventfdFlags::empty()).unwrap().as_fd()])
        .unwrap();
    front.set_features(on).unwrap();
    front.set_features(on).unwrap();
    // A larger log while writes are logged.
    let (second, fd) = SharedFile::create(8192).unwrap();
    front.request(Request::SetLogBase { len: 4096, offset: 4096 }, &[fd.as_fd()]).unwrap();
    front.set_features(off).unwrap();
    front.set_features(on).unwrap();
    drop(front);
    let (result, device) = served.join().unwrap();
    result.unwrap();
    let logged: Vec<_> = device
        .events
        .into_iter()
        .filter(|event| matches!(event, Event::Log(_) | Event::LogFd | Event::Stop(_)))
        .collect();
    assert_eq!(
        logged,
        [
            Event::LogFd,
            Event::Log(true),
            Event::Log(true),
            Event::Log(false),
            Event::Log(true),
            // The connection ends: first the ring, then the log that it writes to.
            Event::Stop(0),
            Event::Log(false),
        ]
    );
    assert!(device.log.is_none());
    drop((first, second));
}

#[test]
fn logging_of_the_used_ring_begins_and_ends_under_a_running_ring() {
    // rule D26
    let (mut front, served) = negotiated(Device::default());
    let _ram = started(&mut front);
    for log in [Some(0x3000), None, None, Some(0x5000)] {
        front.set_vring_addr(0, &RingAddresses { log, ..Default::default() }).unwrap();
    }
    front.set_vring_addr(0, &RingAddresses { desc: 0x100, ..Default::default() }).unwrap();
    let events = finish(front, served).events;
    let at = events.iter().position(|event| matches!(event, Event::Enable(..))).unwrap();
    let log = |log| Event::LogRing(0, log);
    let moved = Event::Move(0, 0x100);
    assert_eq!(events[at + 1..], [log(None), log(Some(0x5000)), moved, Event::Stop(0)]);
}

#[test]
fn what_a_device_marks_the_front_end_sees() {
    // rule D26
    let (mut front, served) = negotiated(Device::default());
    let (file, fd) = SharedFile::create(8192).unwrap();
    front.request(Request::SetLogBase { len: 100, offset: 4096 }, &[fd.as_fd()]).unwrap();
    front.set_features(VERSION_1 | F_PROTOCOL_FEATURES | F_LOG_ALL).unwrap();
    let stop: fn(&mut Device) = |device| device.log.as_ref().unwrap().mark(0x5fff, 2);
    // The device is on the other thread: it marks when a ring stops.
    drop(front);
    let (_, mut device) = served.join().unwrap();
    device.on_stop = Some(stop);
    let (mut front, served) = negotiated(device);
    front.request(Request::SetLogBase { len: 100, offset: 4096 }, &[fd.as_fd()]).unwrap();
    front.set_features(VERSION_1 | F_PROTOCOL_FEATURES | F_LOG_ALL).unwrap();
    let _ram = started(&mut front);
    front.get_vring_base(0).unwrap();
    assert_eq!(file.u8_at(4096).load(Relaxed), 0b110_0000);
    finish(front, served);
}

#[test]
fn a_ring_that_cannot_be_stopped_ends_the_connection_also_where_replies_are_wanted() {
    // Otherwise the same request, sent again, would get a reply as if the ring had stopped.
    for request in [
        |front: &mut Frontend| front.get_vring_base(0).map(|_| ()),
        |front: &mut Frontend| front.reset_device(),
        |front: &mut Frontend| front.set_vring_kick(0, None),
    ] {
        let (mut front, served) = negotiated(Device { stopped_at: None, ..Device::default() });
        let _ram = started(&mut front);
        assert!(request(&mut front).is_err());
        assert!(front.queue_num().is_err(), "the connection has ended");
        let (result, device) = served.join().unwrap();
        assert!(matches!(result, Err(ServeError::Refused { .. })), "{result:?}");
        assert_eq!(device.events.iter().filter(|e| **e == Event::Stop(0)).count(), 1);
    }
}

#[test]
fn a_log_that_cannot_be_used_ends_the_connection() {
    let (mut front, served) = negotiated(Device::default());
    let (_, fd) = SharedFile::create(4096).unwrap();
    // Front ends ignore the reply's value.
    assert!(front.request(Request::SetLogBase { len: 4097, offset: 0 }, &[fd.as_fd()]).is_err());
    let error = served.join().unwrap().0.unwrap_err();
    assert!(matches!(error, ServeError::Refused { request: code::SET_LOG_BASE, .. }), "{error}");

    let protocol = ProtocolFeatures::KNOWN - ProtocolFeatures::LOG_SHMFD;
    let (mut front, served) = negotiated(Device { protocol, ..Device::default() });
    assert_eq!(front.features().unwrap() & F_LOG_ALL, 0);
    let error =
        front.request(Request::SetLogBase { len: 4096, offset: 0 }, &[fd.as_fd()]).unwrap_err();
    assert!(matches!(error, FrontendError::NotNegotiated { .. }));
    finish(front, served);
}

#[test]
fn what_is_in_flight_survives_the_back_end() {
    let (mut front, served) = negotiated(Device::default());
    let (place, file) = front.inflight(2, 64).unwrap().unwrap();
    front.request(Request::SetInflight(place), &[file.as_fd()]).unwrap();
    let _ram = started(&mut front);
    let device = finish(front, served);
    let region = device.inflight.unwrap();
    let (mut queue, heads) = region.split(1, region.place().size, 100).unwrap();
    assert!(heads.is_empty());
    [5, 9, 7].into_iter().for_each(|head| queue.take(head));
    queue.complete(9);
    queue.publish(|| 101);
    // The process is gone; the next one gets the file.
    drop((queue, region));
    let (mut front, served) = negotiated(Device::default());
    front.request(Request::SetInflight(place), &[file.as_fd()]).unwrap();
    let _ram = started(&mut front);
    // Not under a running ring.
    assert!(front.request(Request::SetInflight(place), &[file.as_fd()]).is_err());
    let (result, device) = served.join().unwrap();
    assert!(matches!(result, Err(ServeError::Wire(WireError::State { .. }))));
    let (queue, heads) = device.inflight.unwrap().split(1, 1, 101).unwrap();
    assert_eq!((heads, queue.base()), (vec![5, 7], 103));
}

#[test]
fn an_in_flight_region_for_queues_that_do_not_exist_is_refused() {
    for (queues, size) in [(3, 64), (0, 64), (1, 0), (1, 2048)] {
        let (mut front, served) = negotiated(Device::default());
        assert!(front.inflight(queues, size).is_err());
        let error = served.join().unwrap().0.unwrap_err();
        assert!(matches!(error, ServeError::Wire(WireError::Value { .. })), "{error}");
    }
    let (mut front, served) = negotiated(Device::default());
    let (made, fd) = InflightRegion::allocate(1, 64, false).unwrap();
    let mut place = made.place();
    place.offset = 4096;
    for (wrong, fds) in
        [(Request::SetInflight(place), 0), (Request::GetQueueNum, 0), (Request::SetOwner, 1)]
    {
        let refused = front.request(wrong, &[fd.as_fd()][..fds]);
        assert!(matches!(refused, Err(FrontendError::Argument { .. })), "{refused:?}");
    }
    let refused = front.request(Request::SetInflight(place), &[fd.as_fd()]);
    assert!(matches!(refused, Err(FrontendError::Refused { code: 1, .. })));
    front.request(Request::SetInflight(made.place()), &[fd.as_fd()]).unwrap();
    finish(front, served);
}

#[test]
fn status_is_kept_and_zero_is_a_reset() {
    let (mut front, served) = negotiated(Device::default());
    front.set_status(3).unwrap();
    front.set_status(11).unwrap();
    assert_eq!(front.status().unwrap(), 11);
    let _ram = started(&mut front);
    front.set_status(0).unwrap();
    assert_eq!(front.status().unwrap(), 0);
    let events = finish(front, served).events;
    let end = events.len() - 2;
    assert_eq!(events[1..3], [Event::Status(3), Event::Status(11)]);
    assert_eq!(events[end..], [Event::Stop(0), Event::Reset]);
}

#[test]
fn a_network_device_gets_its_mtu_and_the_address_of_a_guest_that_moved_in() {
    let (mut front, served) = negotiated(Device::default());
    front.request(Request::NetSetMtu(9000), &[]).unwrap();
    front.send_rarp([2, 0, 0, 1, 2, 3]).unwrap();
    let events = finish(front, served).events;
    assert_eq!(events[1..], [Event::Mtu(9000), Event::Rarp([2, 0, 0, 1, 2, 3])]);
}

#[test]
fn postcopy_is_refused_clearly() {
    for request in [code::POSTCOPY_ADVISE, code::POSTCOPY_LISTEN, code::POSTCOPY_END] {
        let (mut stream, served) = common::serve(Device::default());
        stream.write_all(Header::request(request, false, 0).as_bytes()).unwrap();
        let error = served.join().unwrap().0.unwrap_err();
        assert!(error.to_string().contains("postcopy"), "{error}");
    }
}

#[test]
fn a_device_is_served_on_one_connection_after_the_other() {
    let mut device = Device { notes_end: true, ..Device::default() };
    for _ in 0..2 {
        let (mut front, served) = negotiated(device);
        let _ram = started(&mut front);
        device = finish(front, served);
    }
    // Nothing is left over: the second connection begins like the first.
    let half = device.events.len() / 2;
    let (first, second) = device.events.split_at(half);
    assert_eq!(first, second);
    assert_eq!(first[half - 2..], [Event::Stop(0), Event::Disconnected]);
}

#[test]
fn a_front_end_that_vanishes_leaves_a_device_for_the_next() {
    let mut device = Device::default();
    for cut in [3, 12, 40] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut server = Server::new(theirs, device);
        let bytes =
            [Header::request(code::SET_VRING_ADDR, false, 40).as_bytes(), &[0; 40]].concat();
        (&ours).write_all(&bytes[..cut]).unwrap();
        drop(ours);
        assert!(matches!(server.serve(), Err(ServeError::Wire(WireError::HungUp { .. }))));
        device = server.into_handler();
    }
    let (mut front, served) = negotiated(device);
    let _ram = started(&mut front);
    finish(front, served);
}

#[test]
fn a_reset_ends_logging() {
    let (mut front, served) = negotiated(Device::default());
    let (_file, fd) = SharedFile::create(4096).unwrap();
    front.request(Request::SetLogBase { len: 4096, offset: 0 }, &[fd.as_fd()]).unwrap();
    front.set_features(VERSION_1 | F_PROTOCOL_FEATURES | F_LOG_ALL).unwrap();
    front.reset_device().unwrap();
    let events = finish(front, served).events;
    let logs: Vec<_> = events.iter().filter(|event| matches!(event, Event::Log(_))).collect();
    assert_eq!(logs[..2], [&Event::Log(true), &Event::Log(false)]);
}
