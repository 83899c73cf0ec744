//! Attacks by descriptors: of other kinds than the message claims, and of files that change while
//! they are in use.

use std::{
    fs::{File, OpenOptions},
    io::Write as _,
    net::UdpSocket,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::{UnixDatagram, UnixListener, UnixStream},
    },
};

use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{FallocateFlags, OFlags, fallocate, fcntl_setfl},
    time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    },
};

use crate::{
    guest::{BASE, LOG_ALL, PLATFORM, RING, Ram, Ring, SIZE},
    service::{Attack, Target, all},
    wire::{addresses, in_flight, request::*, words},
};

/// Descriptors of every kind, and what keeps them in their state.
fn kinds() -> Vec<(OwnedFd, Vec<OwnedFd>)> {
    let mut kinds = Vec::new();
    let (end, start) = rustix::pipe::pipe().unwrap();
    // The end of a pipe.
    kinds.push((end, vec![start]));
    let (end, start) = rustix::pipe::pipe().unwrap();
    fcntl_setfl(&start, OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&start, &[0; 4096]).is_ok() {}
    fcntl_setfl(&start, OFlags::empty()).unwrap();
    // The start of a full pipe.
    kinds.push((start, vec![end]));
    let (end, start) = rustix::pipe::pipe().unwrap();
    drop(start);
    // A pipe that hung up.
    kinds.push((end, vec![]));
    let (end, start) = rustix::pipe::pipe().unwrap();
    drop(end);
    // A pipe without a reader.
    kinds.push((start, vec![]));
    for name in ["/dev/zero", "/dev/null", "/dev/urandom", "/proc/self/mem", "/proc/self/status"] {
        let file = File::open(name).unwrap();
        kinds.push((file.into(), vec![]));
    }
    let folder = OpenOptions::new().read(true).open("/").unwrap();
    // A folder.
    kinds.push((folder.into(), vec![]));
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    // The replies that the port is closed go to its error queue.
    let gone = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    udp.connect(gone).unwrap();
    let _ = udp.send(&[0]);
    // A socket with errors.
    kinds.push((udp.into(), vec![]));
    let (one, other) = UnixDatagram::pair().unwrap();
    // A datagram socket.
    kinds.push((one.into(), vec![other.into()]));
    let (one, other) = UnixStream::pair().unwrap();
    one.set_nonblocking(true).unwrap();
    while (&one).write(&[0; 4096]).is_ok() {}
    one.set_nonblocking(false).unwrap();
    // A full stream.
    kinds.push((one.into(), vec![other.into()]));
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    // A socket that listens.
    kinds.push((listener.into(), vec![]));
    let flags = rustix::event::epoll::CreateFlags::CLOEXEC;
    // An epoll.
    kinds.push((rustix::event::epoll::create(flags).unwrap(), vec![]));
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::empty()).unwrap();
    let millisecond = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    let every = Itimerspec { it_interval: millisecond, it_value: millisecond };
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &every).unwrap();
    // A timer.
    kinds.push((timer, vec![]));
    // Memory.
    kinds.push((Ram::new().file.into(), vec![]));
    // A semaphore.
    kinds.push((eventfd(5, EventfdFlags::SEMAPHORE).unwrap(), vec![]));
    // A full eventfd.
    kinds.push((full(), vec![]));
    kinds
}

/// An eventfd to which nothing can be added: a write to it blocks.
fn full() -> OwnedFd {
    let event = eventfd(0, EventfdFlags::empty()).unwrap();
    rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    event
}

/// With a ring that has its addresses and does not run yet, so that nothing else is refused.
fn in_place_of(target: &Target, request: u32) {
    for (fd, _kept) in kinds() {
        let session = target.open(0);
        let mut ring = Ring::new(target.index());
        assert!(session.place(&ring, 0, RING.into()));
        session.client.set(request, &words(&[ring.index.into()]), &[fd.as_fd()]);
        session.run(&ring);
        target.works(&session, &mut ring);
        session.stop(ring.index);
    }
}

pub(crate) const KINDS: &[(&str, Attack)] = &[
    ("kicks that are none", |target| in_place_of(target, SET_VRING_KICK)),
    ("calls that are none", |target| in_place_of(target, SET_VRING_CALL)),
    ("errors that are none", |target| in_place_of(target, SET_VRING_ERR)),
    ("channels that are none", |target| {
        for (fd, _kept) in kinds() {
            let session = target.open(PLATFORM);
            session.client.set(SET_BACKEND_REQ_FD, &[], &[fd.as_fd()]);
            let mut ring = session.ring(target.index());
            target.works(&session, &mut ring);
            session.stop(target.index());
        }
    }),
    ("memory that is none", |target| {
        for (fd, _kept) in kinds() {
            let session = target.open(0);
            session.client.set(SET_MEM_TABLE, &Ram::new().table(), &[fd.as_fd()]);
            let mut ring = Ring::new(target.index());
            session.start(&ring, 0);
            target.works(&session, &mut ring);
        }
    }),
    ("logs and records that are none", |target| {
        for (fd, _kept) in kinds() {
            for (request, payload) in [
                (SET_LOG_BASE, words(&[4096, 0])),
                (SET_LOG_FD, vec![]),
                (SET_INFLIGHT_FD, in_flight(4096, 0, 1, RING)),
            ] {
                let session = target.open(LOG_ALL);
                session.client.set(request, &payload, &[fd.as_fd()]);
                let mut ring = session.ring(target.index());
                target.works(&session, &mut ring);
            }
        }
    }),
    ("where a device's state goes", |target| {
        for (fd, _kept) in kinds() {
            let session = target.open(0);
            session.client.send(SET_DEVICE_STATE_FD, &words(&[0]), &[fd.as_fd()]);
            let _ = session.client.stream.shutdown(std::net::Shutdown::Write);
            session.client.drain();
        }
    }),
    ("a call that can no longer be written to without waiting", |target| {
        // Findings B2: state that two processes share through a descriptor changes after the
        // descriptor was accepted.
        let session = target.open(0);
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let mut ring = Ring::new(target.index());
        session.start(&ring, 0);
        let number = words(&[ring.index.into()]);
        assert!(session.client.set(SET_VRING_CALL, &number, &[event.as_fd()]));
        // It is notified when it is set.
        rustix::io::read(&event, &mut [0u8; 8]).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        fcntl_setfl(&event, OFlags::empty()).unwrap();
        for _ in 0..20 {
            target.works(&session, &mut ring);
        }
        session.stop(target.index());
    }),
    ("a kick that another process reads", |target| {
        let session = target.open(0);
        let mut ring = session.ring(target.index());
        fcntl_setfl(&ring.kick, OFlags::empty()).unwrap();
        for _ in 0..200 {
            target.works(&session, &mut ring);
            fcntl_setfl(&ring.kick, OFlags::NONBLOCK).unwrap();
            let _ = rustix::io::read(&ring.kick, &mut [0u8; 8]);
            fcntl_setfl(&ring.kick, OFlags::empty()).unwrap();
        }
        session.stop(target.index());
    }),
    ("one eventfd for everything", |target| {
        let session = target.open(0);
        let mut ring = Ring::new(target.index());
        assert!(session.place(&ring, 0, RING.into()));
        let kick = ring.kick.try_clone().unwrap();
        for request in [SET_VRING_CALL, SET_VRING_ERR] {
            assert!(session.client.set(request, &words(&[ring.index.into()]), &[kick.as_fd()]));
        }
        assert!(session.run(&ring));
        for _ in 0..20 {
            target.works(&session, &mut ring);
        }
        session.stop(ring.index);
    }),
];

pub(crate) const CHANGES: &[(&str, Attack)] = &[
    ("memory that is cut off under running rings", |target| {
        for len in [SIZE / 2, 0x2000, 4096, 1, 0] {
            let session = target.open(0);
            let mut ring = session.ring(target.index());
            target.works(&session, &mut ring);
            session.ram.file.set_len(len).unwrap();
            ring.kick();
            session.client.set(SET_VRING_ENABLE, &words(&[1 << 32]), &[]);
            session.stop(target.index());
        }
    }),
    ("memory that comes and goes", |target| {
        let session = target.open(0);
        let mut ring = session.ring(target.index());
        for _ in 0..50 {
            session.ram.file.set_len(0).unwrap();
            ring.kick();
            session.ram.file.set_len(SIZE).unwrap();
            target.works(&session, &mut ring);
        }
        session.stop(target.index());
    }),
    ("holes in memory", |target| {
        let session = target.open(0);
        let mut ring = session.ring(target.index());
        for _ in 0..100 {
            target.works(&session, &mut ring);
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&session.ram.file, flags, 0, SIZE).unwrap();
            ring.kick();
        }
        session.stop(target.index());
    }),
    ("a log that is cut off", |target| {
        let session = target.open(LOG_ALL);
        let log = Ram::new();
        session.client.set(SET_LOG_BASE, &words(&[4096, 0]), &[log.file.as_fd()]);
        session.client.set(SET_FEATURES, &words(&[session.features | LOG_ALL]), &[]);
        let mut ring = Ring::new(target.index());
        let at = [ring.descs(), ring.used(), ring.avail(), ring.used()];
        session.start(&ring, 0);
        session.client.set(SET_VRING_ADDR, &addresses(ring.index, 1, at), &[]);
        log.file.set_len(0).unwrap();
        target.works(&session, &mut ring);
        session.stop(target.index());
    }),
    ("a record that is cut off, and one that is nonsense", |target| {
        for byte in [0, 1, 0x7f, 0xff] {
            let session = target.open(0);
            let file = Ram::new();
            file.put(BASE, &[byte; 8192]);
            session.client.set(SET_INFLIGHT_FD, &in_flight(8192, 0, 1, RING), &[file.file.as_fd()]);
            let mut ring = Ring::new(target.index());
            session.start(&ring, 0);
            target.works(&session, &mut ring);
            file.file.set_len(0).unwrap();
            target.works(&session, &mut ring);
            session.stop(target.index());
        }
    }),
];

#[test]
fn descriptors_of_every_kind_in_every_place() {
    all(KINDS);
}

#[test]
fn files_that_change_in_use() {
    all(CHANGES);
}
