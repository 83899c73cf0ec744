//! The front end and the back end of this crate, against each other.

mod common;

use common::{Device, Event, LONG, VERSION_1, connect, serve};
use ringfence_mem::{Access, GuestRam, Region};
use ringfence_vhost_user::{
    ConfigWrite, F_ACCESS_PLATFORM, F_LOG_ALL, F_PROTOCOL_FEATURES, Frontend, FrontendError, Iotlb,
    ProtocolFeatures, RingAddresses, ServeError, Server, WireError,
    msg::{Header, Request, code},
};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

const RINGS: RingAddresses = RingAddresses { desc: 0x1000, avail: 0x2000, used: 0x3000, log: None };

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

fn ram() -> Arc<GuestRam> {
    GuestRam::new(1 << 16, 0x10_0000).unwrap()
}

fn negotiated(device: Device) -> (Frontend, common::Served) {
    let (mut front, served) = connect(device);
    front.negotiate(!0, ProtocolFeatures::KNOWN).unwrap();
    (front, served)
}

/// Ring 0 is ready to be kicked.
fn described(front: &mut Frontend) {
    let ram = ram();
    front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
    front.set_vring_num(0, 256).unwrap();
    front.set_vring_base(0, 5).unwrap();
    front.set_vring_addr(0, &RINGS).unwrap();
}

/// Hangs up, and returns the calls that the device got.
fn finish(front: Frontend, served: common::Served) -> Vec<Event> {
    drop(front);
    let (result, device) = served.join().unwrap();
    result.unwrap();
    device.events
}

fn started(enabled: bool, base: u32) -> Event {
    let base = Some(base);
    Event::Start { ring: 0, size: 256, base, kick: true, enabled, desc: 0x1000 }
}

#[test]
fn both_ends_settle_on_the_features_that_both_have() {
    let (mut front, served) = connect(Device::default());
    let wanted = VERSION_1 | 1 << 5;
    let common = front.negotiate(wanted, ProtocolFeatures::CONFIG).unwrap();
    assert_eq!(common, VERSION_1);
    assert_eq!(front.protocol(), ProtocolFeatures::CONFIG | ProtocolFeatures::REPLY_ACK);
    assert_eq!(
        front.features().unwrap(),
        VERSION_1 | F_ACCESS_PLATFORM | F_PROTOCOL_FEATURES | F_LOG_ALL
    );
    assert_eq!(finish(front, served), [Event::Features(VERSION_1)]);
}

#[test]
fn features_that_were_not_offered_are_refused() {
    let (mut front, served) = connect(Device::default());
    front.set_features(1).unwrap();
    let (result, _) = served.join().unwrap();
    let error = result.unwrap_err();
    assert!(matches!(error, ServeError::Wire(WireError::Value { value: 1, .. })), "{error}");

    let device = Device { protocol: ProtocolFeatures::MQ, ..Device::default() };
    let (mut front, served) = connect(device);
    front.set_protocol_features(ProtocolFeatures::REPLY_ACK).unwrap();
    assert!(served.join().unwrap().0.is_err());
}

#[test]
fn a_ring_starts_with_its_kick_and_stops_with_the_request_for_its_base() {
    // rule D28
    let (mut front, served) = negotiated(Device::default());
    described(&mut front);
    front.set_vring_call(0, Some(event().as_fd())).unwrap();
    front.request(Request::SetVringErr { ring: 0, fd: false }, &[]).unwrap();
    // A ring that never ran has the base that it was given.
    assert_eq!(front.get_vring_base(0).unwrap(), 5);
    front.set_vring_kick(0, Some(event().as_fd())).unwrap();
    front.set_vring_enable(0, true).unwrap();
    front.set_vring_enable(0, true).unwrap();
    assert_eq!(front.get_vring_base(0).unwrap(), 77);
    assert_eq!(front.get_vring_base(0).unwrap(), 77);
    front.set_vring_enable(0, false).unwrap();
    front.set_vring_enable(0, true).unwrap();
    // It goes on where it stopped, and stays enabled.
    front.set_vring_kick(0, Some(event().as_fd())).unwrap();
    let events = finish(front, served);
    assert_eq!(
        events[2..],
        [
            Event::Call(0, true),
            Event::Err(0, false),
            started(false, 5),
            Event::Enable(0, true),
            Event::Stop(0),
            started(true, 77),
            // The connection ended while it ran.
            Event::Stop(0),
        ]
    );
}

#[test]
fn a_ring_is_enabled_when_the_request_returns_without_acknowledgements_too() {
    // rule D28
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let enabled = Arc::new(AtomicBool::new(false));
    let is_enabled = Arc::clone(&enabled);
    let back = thread::spawn(move || {
        let mut requests = Vec::new();
        let mut header = [0; 12];
        while theirs.read_exact(&mut header).is_ok() {
            let [request, _, size] =
                [0, 4, 8].map(|at| u32::from_le_bytes(*header[at..].first_chunk().unwrap()));
            theirs.read_exact(&mut vec![0; size as usize]).unwrap();
            requests.push(request);
            match request {
                code::SET_VRING_ENABLE => {
                    thread::sleep(Duration::from_millis(100));
                    is_enabled.store(true, Ordering::SeqCst);
                }
                code::GET_FEATURES => {
                    let header = Header { request, flags: 1 | 1 << 2, size: 8 };
                    theirs.write_all(&common::bytes(header, &0_u64.to_ne_bytes())).unwrap();
                }
                _ => {}
            }
        }
        requests
    });
    let mut front = Frontend::new(common::end(ours), LONG);
    front.set_features(F_PROTOCOL_FEATURES).unwrap();
    front.set_vring_enable(0, true).unwrap();
    assert!(enabled.load(Ordering::SeqCst), "a kick could come first");
    drop(front);
    let requests = back.join().unwrap();
    assert_eq!(requests, [code::SET_FEATURES, code::SET_VRING_ENABLE, code::GET_FEATURES]);
}

#[test]
fn without_protocol_features_all_rings_are_enabled_at_once() {
    // rule D28
    let (mut front, served) = connect(Device::default());
    front.set_owner().unwrap();
    front.set_features(VERSION_1).unwrap();
    described(&mut front);
    front.set_vring_kick(0, Some(event().as_fd())).unwrap();
    let enable = front.set_vring_enable(0, false);
    assert!(matches!(enable, Err(FrontendError::NotNegotiated { .. })));
    let events = finish(front, served);
    assert_eq!(events[2..], [started(true, 5), Event::Stop(0)]);
}

#[test]
fn a_new_kick_for_a_running_ring_lets_it_go_on_where_it_is() {
    let (mut front, served) = negotiated(Device { stopped_at: Some(9), ..Device::default() });
    described(&mut front);
    front.set_vring_kick(0, Some(event().as_fd())).unwrap();
    front.set_vring_kick(0, None).unwrap();
    let events = finish(front, served);
    let polled = Event::Start {
        ring: 0,
        size: 256,
        base: Some(9),
        kick: false,
        enabled: false,
        desc: 0x1000,
    };
    assert_eq!(events[2..], [started(false, 5), Event::Stop(0), polled, Event::Stop(0)]);
}

#[test]
fn the_areas_of_a_running_ring_may_move_but_not_its_size_or_base() {
    let (mut front, served) = negotiated(Device::default());
    described(&mut front);
    front.set_vring_kick(0, None).unwrap();
    front.set_vring_addr(0, &RingAddresses { desc: 0x8000, ..RINGS }).unwrap();
    front.set_vring_num(0, 8).unwrap_err();
    let (result, device) = served.join().unwrap();
    assert!(matches!(result, Err(ServeError::Wire(WireError::State { .. }))));
    assert_eq!(device.events[3..], [Event::Move(0, 0x8000), Event::Stop(0)]);
}

#[test]
fn a_ring_that_is_not_described_does_not_start() {
    for forgotten in 0..3 {
        let (mut front, served) = negotiated(Device::default());
        let ram = ram();
        if forgotten != 0 {
            front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
        }
        if forgotten != 1 {
            front.set_vring_num(0, 256).unwrap();
        }
        if forgotten != 2 {
            front.set_vring_addr(0, &RINGS).unwrap();
        }
        front.set_vring_kick(0, None).unwrap_err();
        let (result, _) = served.join().unwrap();
        assert!(matches!(result, Err(ServeError::Wire(WireError::State { .. }))));
    }
}

/// What one request does to a connection that was negotiated.
fn ends_with(request: impl FnOnce(&mut Frontend) -> Result<(), FrontendError>) -> ServeError {
    let (mut front, served) = negotiated(Device::default());
    request(&mut front).unwrap_err();
    served.join().unwrap().0.unwrap_err()
}

#[test]
fn rings_that_do_not_exist_and_impossible_sizes_end_the_connection() {
    let value = |error: ServeError| matches!(error, ServeError::Wire(WireError::Value { .. }));
    assert!(value(ends_with(|front| front.set_vring_num(2, 256))));
    assert!(value(ends_with(|front| front.set_vring_base(2, 0))));
    assert!(value(ends_with(|front| front.set_vring_addr(2, &RINGS))));
    assert!(value(ends_with(|front| front.set_vring_kick(2, None))));
    assert!(value(ends_with(|front| front.set_vring_call(255, None))));
    assert!(value(ends_with(
        |front| front.request(Request::SetVringErr { ring: 2, fd: false }, &[])
    )));
    assert!(value(ends_with(|front| front.set_vring_enable(2, true))));
    assert!(value(ends_with(|front| front.get_vring_base(2).map(drop))));
    assert!(value(ends_with(|front| front.set_vring_base(0, 0x1_0000))));
    for size in [0, 3, 255, 2048] {
        assert!(value(ends_with(|front| front.set_vring_num(0, size))), "{size}");
    }
    for addresses in [
        RingAddresses { desc: 8, ..RINGS },
        RingAddresses { avail: 1, ..RINGS },
        RingAddresses { used: 2, ..RINGS },
    ] {
        assert!(value(ends_with(|front| front.set_vring_addr(0, &addresses))));
    }
}

#[test]
fn memory_that_cannot_be_mapped_is_refused_and_the_connection_goes_on() {
    let (mut front, served) = negotiated(Device::default());
    let ram = ram();
    let long = Region { size: 1 << 20, ..ram.region() };
    let error = front.set_mem_table(&[(long, ram.fd())]).unwrap_err();
    assert!(matches!(error, FrontendError::Refused { request: code::SET_MEM_TABLE, code: 1 }));
    front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
    let nine = [(ram.region(), ram.fd()); 9];
    assert!(matches!(front.set_mem_table(&nine), Err(FrontendError::Argument { .. })));
    let events = finish(front, served);
    assert_eq!(events[1..], [Event::Refused(code::SET_MEM_TABLE), Event::Memory(1)]);
}

#[test]
fn without_acknowledgement_a_refusal_ends_the_connection() {
    let (mut front, served) = connect(Device::default());
    let ram = ram();
    let long = Region { size: 1 << 20, ..ram.region() };
    front.set_mem_table(&[(long, ram.fd())]).unwrap();
    let error = served.join().unwrap().0.unwrap_err();
    assert!(matches!(error, ServeError::Refused { request: code::SET_MEM_TABLE, .. }));
    assert!(error.to_string().contains("file of 0x10000 bytes"), "{error}");
}

#[test]
fn shared_memory_is_the_same_on_both_ends() {
    let (mut front, served) = negotiated(Device::default());
    let ram = ram();
    ram.slice(0x234, 3).unwrap().copy_from(&[1, 2, 3]);
    front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
    drop(front);
    let (_, device) = served.join().unwrap();
    let memory = device.memory.unwrap();
    let mut bytes = [0; 3];
    memory.find_gpa(0x10_0234).unwrap().slice.copy_to(&mut bytes);
    assert_eq!(bytes, [1, 2, 3]);
    assert_eq!(memory.user_to_gpa(ram.user_addr() + 0x234), Some(0x10_0234));
    assert!(memory.is_sealed());
}

#[test]
fn regions_come_and_go_one_by_one() {
    let (mut front, served) = negotiated(Device::default());
    let (one, two) = (ram(), GuestRam::new(1 << 16, 0x20_0000).unwrap());
    let other = ram();
    assert_eq!(front.max_mem_slots().unwrap(), 509);
    front.request(Request::AddMemReg(one.region()), &[one.fd()]).unwrap();
    front.request(Request::AddMemReg(two.region()), &[two.fd()]).unwrap();
    // The same again, as for another pair of queues, changes nothing; another file is a conflict.
    front.request(Request::AddMemReg(two.region()), &[two.fd()]).unwrap();
    front.request(Request::AddMemReg(one.region()), &[other.fd()]).unwrap_err();
    front.request(Request::RemMemReg(one.region()), &[]).unwrap();
    front.request(Request::RemMemReg(one.region()), &[]).unwrap();
    front.request(Request::AddMemReg(one.region()), &[other.fd()]).unwrap();
    let events = finish(front, served);
    assert_eq!(
        events[1..],
        [
            Event::Memory(1),
            Event::Memory(2),
            Event::Refused(code::ADD_MEM_REG),
            Event::Memory(1),
            Event::Memory(2),
        ]
    );
}

#[test]
fn no_more_is_mapped_than_may_be() {
    const LEN: u64 = 1 << 16;
    let (stream, theirs) = UnixStream::pair().unwrap();
    let mut server = Server::new(common::end(theirs), Device::default());
    server.set_most_mapped(3 * LEN);
    let handle = server.shutdown_handle();
    let served = thread::spawn(move || (server.serve(), server.into_handler()));
    let mut front = Frontend::new(common::end(stream), LONG);
    front.negotiate(!0, ProtocolFeatures::KNOWN).unwrap();
    let rams = [1, 2, 3].map(|n| GuestRam::new(LEN as usize, n << 20).unwrap());
    let add = |front: &mut Frontend, n: usize| {
        front.request(Request::AddMemReg(rams[n].region()), &[rams[n].fd()])
    };
    add(&mut front, 0).unwrap();
    add(&mut front, 1).unwrap();
    let log = GuestRam::new(2 * LEN as usize, 0).unwrap();
    front.request(Request::SetLogBase { len: LEN, offset: 0 }, &[log.fd()]).unwrap();
    assert_eq!(handle.mapped(), 3 * LEN);
    add(&mut front, 2).unwrap_err();
    let table = [0, 1, 2].map(|n| (rams[n].region(), rams[n].fd()));
    front.set_mem_table(&table).unwrap_err();
    assert_eq!(handle.mapped(), 3 * LEN);
    front.request(Request::RemMemReg(rams[0].region()), &[]).unwrap();
    assert_eq!(handle.mapped(), 2 * LEN);
    add(&mut front, 2).unwrap();
    // No reply reports that a log is refused.
    front.request(Request::SetLogBase { len: LEN + 1, offset: 0 }, &[log.fd()]).unwrap_err();
    let (ended, device) = served.join().unwrap();
    let Err(ServeError::Refused { request: code::SET_LOG_BASE, why }) = ended else {
        panic!("{ended:?}")
    };
    assert!(why.to_string().contains("0x30001") && why.to_string().contains("0x30000"), "{why}");
    assert_eq!(device.memory.unwrap().regions().len(), 2);
}

#[test]
fn the_configuration_space_is_read_and_written() {
    let (mut front, served) = negotiated(Device::default());
    let mut bytes = [0; 8];
    front.config(4, &mut bytes).unwrap();
    assert_eq!(bytes, [4, 5, 6, 7, 8, 9, 10, 11]);
    front.set_config(2, &[9, 9]).unwrap();
    // Refused, and the connection goes on.
    assert!(matches!(front.config(60, &mut bytes), Err(FrontendError::Refused { .. })));
    assert!(matches!(front.set_config(64, &[0]), Err(FrontendError::Refused { .. })));
    for offset in [0, u32::MAX] {
        let long = front.config(offset, &mut [0; 257]);
        assert!(matches!(long, Err(FrontendError::Argument { .. })));
    }
    assert!(matches!(front.config(u32::MAX, &mut bytes), Err(FrontendError::Argument { .. })));
    assert_eq!(front.queue_num().unwrap(), 2);
    let events = finish(front, served);
    assert_eq!(events[1], Event::SetConfig(2, ConfigWrite::Driver, vec![9, 9]));
}

#[test]
fn a_reset_stops_and_disables_every_ring() {
    let (mut front, served) = negotiated(Device::default());
    described(&mut front);
    front.set_vring_enable(0, true).unwrap();
    front.set_vring_kick(0, Some(event().as_fd())).unwrap();
    front.reset_device().unwrap();
    front.set_features(VERSION_1 | F_PROTOCOL_FEATURES).unwrap();
    described(&mut front);
    front.set_vring_kick(0, Some(event().as_fd())).unwrap();
    let events = finish(front, served);
    assert_eq!(
        events[2..],
        [
            started(true, 5),
            Event::Stop(0),
            Event::Reset,
            Event::Features(VERSION_1),
            Event::Memory(1),
            started(false, 5),
            Event::Stop(0)
        ]
    );
}

#[test]
fn features_do_not_change_under_a_running_ring() {
    let error = ends_with(|front| {
        described(front);
        front.set_vring_kick(0, None)?;
        front.set_features(VERSION_1)
    });
    assert!(matches!(error, ServeError::Wire(WireError::State { .. })));
}

#[test]
fn a_ring_that_the_device_refused_can_be_stopped() {
    let (mut front, served) = negotiated(Device { refuses_rings: true, ..Device::default() });
    described(&mut front);
    let kick = front.set_vring_kick(0, None);
    assert!(matches!(kick, Err(FrontendError::Refused { .. })));
    assert_eq!(front.get_vring_base(0).unwrap(), 5);
    // It never ran, so nothing is stopped.
    assert!(!finish(front, served).contains(&Event::Stop(0)));
}

#[test]
fn iotlb_messages_are_legal_only_with_access_platform() {
    // rule D1
    let (mut front, served) = connect(Device::default());
    front.negotiate(VERSION_1, ProtocolFeatures::KNOWN).unwrap();
    let message = Iotlb::Invalidate { first: 0, last: 0xfff };
    let error = front.iotlb(&message).unwrap_err();
    assert!(matches!(error, FrontendError::NotNegotiated { .. }));
    assert_eq!(finish(front, served), [Event::Features(VERSION_1)]);
}

/// As one that a front end sends for a miss which it reads only after the reset.
#[test]
fn an_iotlb_message_that_comes_after_a_reset_is_refused_and_the_connection_goes_on() {
    // rule D1
    let (mut front, served) = negotiated(Device::default());
    front.reset_device().unwrap();
    let refused = front.iotlb(&Iotlb::Invalidate { first: 0, last: 0xfff });
    assert!(matches!(refused, Err(FrontendError::Refused { .. })));
    front.features().unwrap();
    let events = finish(front, served);
    assert!(!events.iter().any(|event| matches!(event, Event::Iotlb(_))), "{events:?}");
}

#[test]
fn iotlb_updates_lie_within_the_announced_regions() {
    // rule D5
    let (mut front, served) = negotiated(Device::default());
    let ram = ram();
    let at = ram.user_addr();
    let update = |user_addr, len: u64| Iotlb::Update {
        first: 0x4000,
        last: 0x4000 + (len - 1),
        user_addr,
        access: Some(Access::ReadWrite),
    };
    assert!(matches!(front.iotlb(&update(at, 1)), Err(FrontendError::Argument { .. })));
    front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
    front.iotlb(&update(at, 1 << 16)).unwrap();
    for outside in [update(at, (1 << 16) + 1), update(at - 1, 1), update(u64::MAX, 1)] {
        assert!(matches!(front.iotlb(&outside), Err(FrontendError::Argument { .. })));
    }
    let events = finish(front, served);
    assert_eq!(events[2..], [Event::Iotlb(update(at, 1 << 16))]);
}

#[test]
fn an_invalidation_of_everything_arrives_in_two_halves() {
    // rule D30
    let (mut front, served) = negotiated(Device::default());
    front.iotlb(&Iotlb::Invalidate { first: 0, last: u64::MAX }).unwrap();
    let half = |first, last| Event::Iotlb(Iotlb::Invalidate { first, last });
    let events = finish(front, served);
    assert_eq!(events[1..], [half(0, (1 << 63) - 1), half(1 << 63, u64::MAX)]);
}

#[test]
fn a_backend_channel_needs_its_protocol_feature() {
    // rule D11
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let (mut front, served) = connect(Device::default());
    front.negotiate(!0, ProtocolFeatures::CONFIG).unwrap();
    let error = front.set_backend_channel(theirs.as_fd()).unwrap_err();
    assert!(matches!(error, FrontendError::NotNegotiated { .. }));
    finish(front, served);

    let (mut front, served) = negotiated(Device::default());
    front.set_backend_channel(theirs.as_fd()).unwrap();
    assert_eq!(finish(front, served)[1..], [Event::Channel]);
}

#[test]
fn an_invalidation_is_carried_out_when_it_returns() {
    // rule D10
    let device = Device::default();
    let carried_out = Arc::clone(&device.carried_out);
    let (mut front, served) = negotiated(device);
    for count in 1..=200 {
        front.iotlb(&Iotlb::Invalidate { first: count << 12, last: count << 12 | 0xfff }).unwrap();
        assert_eq!(carried_out.load(Ordering::Relaxed), count);
    }
    finish(front, served);
}

#[test]
fn another_thread_ends_a_server_that_waits() {
    let (stream, theirs) = UnixStream::pair().unwrap();
    let mut server = Server::new(theirs, Device::default());
    let handle = server.shutdown_handle();
    let mut front = Frontend::new(stream, LONG);
    thread::scope(|scope| {
        let served = scope.spawn(|| server.serve());
        front.negotiate(!0, ProtocolFeatures::KNOWN).unwrap();
        described(&mut front);
        front.set_vring_kick(0, None).unwrap();
        handle.clone().shutdown();
        served.join().unwrap().unwrap();
    });
    assert_eq!(server.into_handler().events.last(), Some(&Event::Stop(0)));
    assert!(matches!(front.features(), Err(FrontendError::Wire(WireError::HungUp { .. }))));
    assert!(matches!(front.features(), Err(FrontendError::Closed)));
}

#[test]
fn the_request_that_negotiates_acknowledgements_is_acknowledged() {
    // As User-Mode Linux does: it waits for the reply before it sends anything else.
    let (mut front, served) = serve(Device::default());
    front.set_read_timeout(Some(LONG)).unwrap();
    let ack = ProtocolFeatures::REPLY_ACK.bits();
    // SET_PROTOCOL_FEATURES, version 1 with need_reply.
    let words: Vec<u8> = [16_u32, 1 | 8, 8].iter().flat_map(|w| w.to_ne_bytes()).collect();
    front.write_all(&[&words[..], &ack.to_ne_bytes()].concat()).unwrap();
    let mut reply = [0; 20];
    front.read_exact(&mut reply).unwrap();
    let expected: Vec<u8> = [16_u32, 5, 8, 0, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
    assert_eq!(reply[..], expected);
    drop(front);
    let _ = served.join().unwrap();
}
