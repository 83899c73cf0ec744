//! States in which a front end leaves a device while it stays connected: none of them takes
//! processor time.

use std::{
    any::Any,
    io::Write as _,
    net::{Shutdown, TcpListener, TcpStream},
    os::fd::AsFd as _,
    thread,
    time::Duration,
};

use rustix::event::{EventfdFlags, eventfd};

use crate::{
    common::Place,
    guest::{Desc, OTHER, PLATFORM, RING, Ring, SIZE, Session, WRITE},
    honest::{Device, DiskDriver},
    service::{Service, Target},
    wire::{iotlb, request::*, state, words},
};

/// What must be kept for the state to last; its connection stays up meanwhile, and responds.
type Kept = (Option<Session>, Box<dyn Any>);
type State = fn(&Target) -> Kept;

fn kept(session: Session, more: impl Any) -> Kept {
    (Some(session), Box::new(more))
}

fn started(session: &Session, index: u32) -> Ring {
    let ring = Ring::new(index);
    assert!(session.start(&ring, 0));
    ring
}

/// A ring with a chain that the device has not seen.
fn offered(session: &Session, index: u32) -> Ring {
    let mut ring = started(session, index);
    place_buffer(session, &mut ring);
    ring
}

fn place_buffer(session: &Session, ring: &mut Ring) {
    ring.place(&session.ram, 0, &[Desc(session.ram.data(), 2048, WRITE, 0)]);
    ring.offer(&session.ram, 0);
}

/// A ring with a kick that stays readable.
fn kicked_for_ever(target: &Target) -> DiskDriver {
    let session = target.open(0);
    let mut ring = Ring::new(0);
    ring.kick = eventfd(u32::MAX, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE).unwrap();
    assert!(session.start(&ring, 0));
    DiskDriver { session, ring }
}

/// A ring with no buffers.
fn without_buffers(target: &Target) -> Kept {
    let session = target.open(0);
    let ring = started(&session, 0);
    kept(session, ring)
}

const ANY: &[(&str, State)] = &[
    ("a connection that sends nothing", |target| kept(target.open(0), ())),
    ("half a message", |target| {
        let session = target.open(0);
        session.client.raw(&[1, 0, 0, 0, 1], &[]);
        (None, Box::new(session))
    }),
    ("a ring without requests", without_buffers),
    ("chains in a ring that is disabled", |target| {
        let session = target.open(0);
        let mut ring = started(&session, 0);
        assert!(session.client.set(SET_VRING_ENABLE, &state(0, 0), &[]));
        place_buffer(&session, &mut ring);
        kept(session, ring)
    }),
    ("chains behind one that leaves the table", |target| {
        let session = target.open(0);
        let rings = [0, 1].map(|index| {
            let mut ring = started(&session, index);
            ring.offer(&session.ram, RING);
            (0..4).for_each(|_| place_buffer(&session, &mut ring));
            ring
        });
        kept(session, rings)
    }),
    ("an eventfd that stays readable", |target| {
        let DiskDriver { session, ring } = kicked_for_ever(target);
        kept(session, ring)
    }),
    ("a pipe that has hung up for a kick", |target| {
        // Finding B10.
        let session = target.open(0);
        let mut ring = Ring::new(0);
        ring.kick = rustix::pipe::pipe().unwrap().0;
        assert!(!session.start(&ring, 0), "it was taken");
        kept(session, ring)
    }),
    ("a connection that was reset for a channel", |target| {
        let session = target.open(PLATFORM);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let channel = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        // Unread data is lost: this is not an orderly end.
        (&channel).write_all(b"x").unwrap();
        assert_eq!(other.peek(&mut [0]).unwrap(), 1);
        drop(other);
        assert!(!session.client.set(SET_BACKEND_REQ_FD, &[], &[channel.as_fd()]), "it was taken");
        kept(session, channel)
    }),
    ("a call that is full", |target| {
        let session = target.open(0);
        let call = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert!(session.client.set(
            SET_VRING_CALL,
            &words(&[target.index().into()]),
            &[call.as_fd()]
        ));
        let mut ring = started(&session, target.index());
        target.works(&session, &mut ring);
        kept(session, (ring, call))
    }),
    ("a channel that has been shut down", |target| {
        let (session, channel) = target.open_with_channel();
        channel.shutdown(Shutdown::Both).unwrap();
        let rings = [0, 1].map(|index| offered(&session, index));
        kept(session, (rings, channel))
    }),
    ("rings of which no translation comes", |target| {
        let (session, channel) = target.open_with_channel();
        let rings = [0, 1].map(|index| offered(&session, index));
        kept(session, (rings, channel))
    }),
    ("rings of whose tables no translation comes", |target| {
        let (session, channel) = target.open_with_channel();
        let rings = [0, 1].map(|index| {
            let ring = Ring::new(index);
            let update = iotlb(ring.avail(), 0x2000, ring.avail(), 3, 2);
            assert!(session.client.set(IOTLB_MSG, &update, &[]));
            offered(&session, index)
        });
        kept(session, (rings, channel))
    }),
];

/// The states of a receiver while the other end sends to it.
const RECEIVERS: &[(&str, State)] = &[
    ("packets without a receiver", |_| (None, Box::new(()))),
    ("packets for one whose rings do not run", |target| kept(target.open(0), ())),
    ("packets for one without buffers", without_buffers),
    ("packets for one with a buffer that is too small", |target| {
        let session = target.open(0);
        let mut ring = started(&session, 0);
        ring.place(&session.ram, 0, &[Desc(session.ram.data(), 16, WRITE, 0)]);
        ring.offer(&session.ram, 0);
        kept(session, ring)
    }),
    ("packets for a ring that has failed", |target| {
        let session = target.open(0);
        let mut ring = started(&session, 0);
        ring.offer(&session.ram, RING);
        kept(session, ring)
    }),
    ("packets for a ring that is disabled", |target| {
        let session = target.open(0);
        let ring = offered(&session, 0);
        assert!(session.client.set(SET_VRING_ENABLE, &state(0, 0), &[]));
        kept(session, ring)
    }),
    ("packets for a ring of which no translation comes", |target| {
        let (session, channel) = target.open_with_channel();
        let ring = offered(&session, 0);
        kept(session, (ring, channel))
    }),
    ("packets for a ring that was stopped while they waited", |target| {
        let session = target.open(0);
        let ring = started(&session, 0);
        thread::sleep(Duration::from_millis(2));
        session.stop(0);
        kept(session, ring)
    }),
];

/// Checks that the service is nearly idle for a while.
pub(crate) fn takes_no_time(service: &Service, name: &str) {
    service.process().takes_no_time(name, || thread::sleep(Duration::from_millis(100)));
}

/// A connection that has ended takes no time either.
fn is_there(session: Option<&Session>, name: &str) {
    let replies = |session: &Session| session.client.number(GET_FEATURES).is_some();
    assert!(session.is_none_or(replies), "{name}: the connection has ended");
}

#[test]
fn a_kick_that_was_in_vain_is_late_and_not_lost() {
    for device in [Device::Disk, Device::Guarded] {
        let mut service = Service::start(device);
        service.drop_neighbour();
        let mut driver = kicked_for_ever(&service.target());
        for byte in 0..20 {
            // Long enough for it to settle.
            thread::sleep(Duration::from_millis(20));
            driver.writes_and_reads(0, byte);
        }
        service.end();
    }
}

#[test]
fn a_front_end_that_stays_and_does_nothing() {
    for device in [Device::Disk, Device::Guarded, Device::Net] {
        let mut service = Service::start(device);
        service.drop_neighbour();
        for (name, state) in ANY {
            let (session, _more) = state(&service.target());
            takes_no_time(&service, &format!("{device:?}: {name}"));
            is_there(session.as_ref(), name);
        }
        service.end();
    }
}

#[test]
fn packets_that_do_not_arrive() {
    for more in [&[][..], &["--queues", "2"]] {
        let mut service = Service::with_more(Place::new(), Device::Net, "", more);
        service.drop_neighbour();
        for (name, state) in RECEIVERS {
            let sender = Session::open_at(OTHER, &service.path("other"), 0);
            let mut rings =
                [1, 3].map(|index| (index == 1 || !more.is_empty()).then(|| sender.ring(index)));
            let mut send = || {
                for ring in rings.iter_mut().flatten() {
                    sender.ram.put(sender.ram.data(), &[0; 76]);
                    ring.place(&sender.ram, 0, &[Desc(sender.ram.data(), 76, 0, 0)]);
                    (0..16).for_each(|_| ring.offer(&sender.ram, 0));
                }
            };
            send();
            let (session, _more) = state(&service.target());
            send();
            takes_no_time(&service, &format!("{more:?}: {name}"));
            rings.iter().flatten().for_each(|ring| assert!(sender.stop(ring.index).is_some()));
            takes_no_time(&service, &format!("{more:?}: {name}, no more of them"));
            is_there(session.as_ref(), name);
        }
        service.end();
    }
}

/// A transmit ring in which each descriptor is a packet.
fn packets(sender: &Session) -> Ring {
    let ring = sender.ring(1);
    let packet = || Desc(sender.ram.data(), 76, 0, 0);
    ring.place(&sender.ram, 0, &[(); RING as usize].map(|()| packet()));
    ring
}

#[test]
fn packets_of_a_ring_that_goes_away_while_they_wait() {
    let mut service = Service::start(Device::Net);
    service.drop_neighbour();
    let (_receiver, _buffers) = without_buffers(&service.target());
    let sender = Session::open_at(OTHER, &service.path("other"), PLATFORM);
    let _channel = sender.give_channel();
    let mut ring = packets(&sender);
    // The ring is unmapped before the device gives up on the receiver, unless the machine is very
    // busy.
    for _ in 0..3 {
        assert!(sender.client.set(IOTLB_MSG, &iotlb(OTHER, SIZE, OTHER, 3, 2), &[]));
        ring.offer(&sender.ram, 0);
        thread::sleep(Duration::from_millis(1));
        assert!(sender.client.set(IOTLB_MSG, &iotlb(OTHER, SIZE, 0, 0, 3), &[]));
        takes_no_time(&service, "packets of a ring that goes away while they wait");
    }
    is_there(Some(&sender), "packets of a ring that goes away");
    service.end();
}

#[test]
fn packets_whose_receiver_gives_too_little() {
    for more in [&[][..], &["--queues", "2"]] {
        let mut service = Service::with_more(Place::new(), Device::Net, "", more);
        service.drop_neighbour();
        let sender = Session::open_at(OTHER, &service.path("other"), 0);
        let mut packets = packets(&sender);
        let mut heads = (0..RING).cycle();
        let mut send = || packets.offer(&sender.ram, heads.next().unwrap());
        let receiver = service.target().open(0);
        let rings = (0..=more.len() as u32).step_by(2).map(|index| {
            let ring = started(&receiver, index);
            let at = receiver.ram.data();
            ring.place(&receiver.ram, 0, &[Desc(at, 16, WRITE, 0), Desc(at, 2048, WRITE, 0)]);
            ring
        });
        let mut rings: Vec<Ring> = rings.collect();
        for _ in 0..3 {
            send();
            thread::sleep(Duration::from_millis(1));
            rings[0].offer(&receiver.ram, 0);
            takes_no_time(&service, "a buffer that comes late is too small");
        }
        if let [_, other] = &mut rings[..] {
            (0..16).for_each(|_| other.offer(&receiver.ram, 1));
            service.process().takes_no_time("a buffer at a time", || {
                send();
                thread::sleep(Duration::from_millis(6));
                rings[0].offer(&receiver.ram, 1);
            });
        }
        service.end();
    }
}

#[test]
fn packets_that_a_ring_had_which_fails_are_given_back() {
    let more = ["--notify", "sleep"];
    let mut service = Service::with_more(Place::new(), Device::Net, "", &more);
    service.drop_neighbour();
    let sender = Session::open_at(OTHER, &service.path("other"), 0);
    let mut packets = packets(&sender);
    let receiver = service.target().open(0);
    let mut ring = started(&receiver, 0);
    ring.offer(&receiver.ram, RING);
    packets.offer(&sender.ram, 0);
    assert_eq!(packets.wait(&sender.ram).0, 0);
    service.end();
}
