//! Descriptors that take as long to close as their sender likes, wherever a front end can put them.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    mem::MaybeUninit,
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    thread,
    time::Instant,
};

use rustix::{
    event::{EventfdFlags, eventfd},
    net::{
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg,
        sockopt::{set_socket_linger, set_socket_recv_buffer_size, set_socket_send_buffer_size},
    },
};

use crate::{
    common::LIMIT,
    fuse::Fuse,
    guest::{BASE, LOG_ALL, PLATFORM, RING, Ram, SIZE},
    honest::Device,
    service::{Service, Target},
    wire::{Client, MOST_FDS, header, in_flight, request::*, state, words},
};

/// Makes descriptors that cannot be closed until they are released.
trait Holds {
    fn held(&mut self) -> Held;

    fn let_go(&mut self);
}

/// One of them. For kinds in which only the last close waits, that close may be ours.
struct Held(Option<OwnedFd>);

impl AsFd for Held {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().unwrap().as_fd()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let fd = self.0.take();
        thread::spawn(move || drop(fd));
    }
}

/// TCP sockets that wait until the other end has read what was written, which never happens: even
/// in the queue of another socket.
struct Linger {
    listener: TcpListener,
    peers: Vec<TcpStream>,
}

impl Linger {
    fn new() -> Linger {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        set_socket_recv_buffer_size(&listener, 1).unwrap();
        Linger { listener, peers: Vec::new() }
    }
}

impl Holds for Linger {
    fn held(&mut self) -> Held {
        let socket = TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
        self.peers.push(self.listener.accept().unwrap().0);
        set_socket_send_buffer_size(&socket, 1).unwrap();
        socket.set_nonblocking(true).unwrap();
        while (&socket).write(&[0; 4096]).is_ok() {}
        // Longer than any test.
        set_socket_linger(&socket, Some(10 * LIMIT)).unwrap();
        Held(Some(socket.into()))
    }

    fn let_go(&mut self) {
        self.peers.clear();
    }
}

/// Files of FUSE.
impl Holds for Fuse {
    fn held(&mut self) -> Held {
        self.hold(true);
        Held(Some(self.open().into()))
    }

    fn let_go(&mut self) {
        self.hold(false);
    }
}

type Attack = fn(&Target, &mut dyn Holds);

/// A Unix stream that has a held descriptor in its queue, and its other end.
fn stream(holds: &mut dyn Holds) -> (Held, UnixStream) {
    let (stream, other) = UnixStream::pair().unwrap();
    put(&other, &[holds.held().as_fd()]);
    (Held(Some(stream.into())), other)
}

/// Puts descriptors into the queue of a stream's other end.
fn put(stream: &UnixStream, fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    let bytes = [std::io::IoSlice::new(&[1])];
    sendmsg(stream.as_fd(), &bytes, &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// Requests that carry a descriptor, each with its payload.
fn takers(target: &Target) -> Vec<(u32, Vec<u8>)> {
    let ring = words(&[target.index().into()]);
    vec![
        (SET_MEM_TABLE, Ram::new().table()),
        (ADD_MEM_REG, words(&[0, BASE + SIZE, SIZE, BASE + SIZE, 0])),
        (SET_VRING_KICK, ring.clone()),
        (SET_VRING_CALL, ring.clone()),
        (SET_VRING_ERR, ring),
        (SET_LOG_BASE, words(&[SIZE, 0])),
        (SET_LOG_FD, vec![]),
        (SET_BACKEND_REQ_FD, vec![]),
        (SET_INFLIGHT_FD, in_flight(4096, 0, 1, RING)),
    ]
}

const ATTACKS: &[(&str, Attack)] = &[
    ("where a request takes one", |target, holds| {
        for (request, payload) in takers(target) {
            let session = target.open(LOG_ALL | PLATFORM);
            session.client.send(request, &payload, &[holds.held().as_fd()]);
        }
    }),
    ("the same twice", |target, holds| {
        let session = target.open(0);
        let held = holds.held();
        let region = words(&[0, BASE + SIZE, SIZE, BASE + SIZE, 0]);
        for _ in 0..2 {
            session.client.set(ADD_MEM_REG, &region, &[held.as_fd()]);
        }
    }),
    ("where a request takes none", |target, holds| {
        let session = target.open(0);
        session.client.send(GET_FEATURES, &[], &[holds.held().as_fd()]);
    }),
    ("more than a message has", |target, holds| {
        for count in [9, 16] {
            let session = target.open(0);
            let held = holds.held();
            session.client.send(SET_MEM_TABLE, &Ram::new().table(), &vec![held.as_fd(); count]);
        }
    }),
    ("in the queue of what a request takes", |target, holds| {
        for (request, payload) in takers(target) {
            let session = target.open(LOG_ALL | PLATFORM);
            let (stream, _other) = stream(holds);
            session.client.send(request, &payload, &[stream.as_fd()]);
        }
    }),
    ("in the queue of a call that another replaces", |target, holds| {
        let session = target.open(0);
        let ring = session.ring(target.index());
        let call = words(&[ring.index.into()]);
        for _ in 0..3 {
            let (stream, _other) = stream(holds);
            session.client.set(SET_VRING_CALL, &call, &[stream.as_fd()]);
        }
        session.stop(ring.index);
    }),
    ("in a queue in a queue", |target, holds| {
        let session = target.open(0);
        let (inner, _inner) = stream(holds);
        let (outer, other) = UnixStream::pair().unwrap();
        let outer = Held(Some(outer.into()));
        put(&other, &[inner.as_fd()]);
        drop(inner);
        let call = words(&[target.index().into()]);
        session.client.send(SET_VRING_CALL, &call, &[outer.as_fd()]);
    }),
    ("in the queue of the connection", |target, holds| {
        // The invalid part ends the connection, and what comes after it is never read.
        let session = target.open(0);
        let bytes = [header(GET_FEATURES, 0, 0), vec![0; 1 << 14]].concat();
        let (held, kept) = (holds.held(), bytes.len() - 1);
        session.client.raw(&bytes[..kept], &[]);
        session.client.raw(&bytes[kept..], &[held.as_fd()]);
    }),
    ("in the queue of a connection that waits for its turn", |target, holds| {
        let session = target.open(0);
        let next = Client::connect(&target.socket);
        for _ in 0..3 {
            next.send(GET_FEATURES, &[], &[holds.held().as_fd()]);
        }
        drop(next);
        drop(session);
    }),
    ("in what comes on the back end's channel", |target, holds| {
        let session = target.open(PLATFORM);
        let (ours, theirs) = UnixStream::pair().unwrap();
        session.client.set(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
        drop(theirs);
        for _ in 0..3 {
            put(&ours, &[holds.held().as_fd()]);
        }
    }),
];

/// Every attack on every device; while nothing can be closed the other devices are served, and once
/// it can, the process has what it had before.
fn all(mut holds: impl FnMut(&Target) -> Box<dyn Holds>) {
    for device in [Device::Disk, Device::Guarded, Device::Net] {
        let mut service = Service::start(device);
        let target = service.target();
        for (name, attack) in ATTACKS {
            let mut holds = holds(&target);
            attack(&target, &mut *holds);
            service.still_serves(name);
            holds.let_go();
            service.attack(name, |_| {});
        }
        service.end();
    }
}

#[test]
fn sockets_that_linger_delay_no_other() {
    all(|_| Box::new(Linger::new()));
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn files_that_cannot_be_closed_delay_no_other() {
    all(|target| Box::new(Fuse::mount(&target.folder.join("foreign"), SIZE as usize)));
}

/// More than a socket has room for: it waits, and its neighbour does not.
fn full(mut holds: impl FnMut(&Target) -> Box<dyn Holds>, attack: Attack) {
    for device in [Device::Guarded, Device::Net] {
        let mut service = Service::start(device);
        let target = service.target();
        let mut holds = holds(&target);
        let begun = Instant::now();
        while !service.log().contains("wait to be closed") {
            assert!(begun.elapsed() < LIMIT, "it takes all and logs nothing:\n{}", service.log());
            attack(&target, &mut *holds);
        }
        service.neighbour_goes_on("a full socket");
        holds.let_go();
        service.attack("a full socket", |_| {});
        service.end();
    }
}

#[test]
fn a_socket_that_is_full_of_what_cannot_be_closed_waits_and_says_so() {
    full(
        |_| Box::new(Linger::new()),
        |target, holds| {
            let Some(client) = Client::connect_now(&target.socket) else { return };
            let (stream, _other) = stream(holds);
            client.send(SET_BACKEND_REQ_FD, &[], &[stream.as_fd()]);
        },
    );
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn a_socket_that_a_single_message_fills_waits_and_says_so() {
    full(
        |target| Box::new(Fuse::mount(&target.folder.join("foreign"), SIZE as usize)),
        |target, holds| {
            let Some(client) = Client::connect_now(&target.socket) else { return };
            client.send(SET_LOG_FD, &[], &[holds.held().as_fd(); MOST_FDS]);
        },
    );
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn a_service_that_ends_lets_go_of_sockets_and_images_though_a_file_cannot_be_closed() {
    let mut service = Service::start(Device::Disk);
    let target = service.target();
    let mut fuse = Fuse::mount(&target.folder.join("foreign"), SIZE as usize);
    (ATTACKS[0].1)(&target, &mut fuse);
    service.still_serves(ATTACKS[0].0);
    service.terminate();
    service.ends_or_logs("cannot be closed");
    // Another process takes its place; in the end both are gone.
    let mut next = service.again();
    next.still_serves("a service that could not close a file");
    next.end();
    fuse.let_go();
    service.ended_with(0);
}

/// The front end has our end of the channel too, and receives from it into memory whose pages never
/// come: meanwhile the kernel blocks every other receiver.
#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn a_channel_that_the_front_end_reads_itself_delays_no_other() {
    let mut service = Service::start(Device::Guarded);
    let target = service.target();
    let fuse = Fuse::mount(&target.folder.join("foreign"), 4096);
    let session = target.open(PLATFORM);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let file = fuse.open();
    thread::scope(|scope| {
        fuse.hold_own(true);
        scope.spawn(|| receive_into(&theirs, &file));
        (&ours).write_all(&[0; 20]).unwrap();
        fuse.await_held(1);
        session.client.set(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
        // Something to receive.
        (&ours).write_all(&[0; 20]).unwrap();
        service.neighbour_goes_on("a channel that another reads");
        drop(session);
        service.still_serves("a channel that another reads");
        fuse.hold_own(false);
    });
    drop((ours, theirs));
    service.attack("a channel that another reads", |_| {});
    service.end();
}

/// The last close of an eventfd waits for each epoll that has it, and an epoll that writes its
/// events into memory whose pages never come is held up.
#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn an_eventfd_that_the_front_end_watches_delays_no_other() {
    use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
    for device in [Device::Disk, Device::Guarded, Device::Net] {
        let mut service = Service::start(device);
        let target = service.target();
        for request in
            [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR, SET_LOG_FD, SET_BACKEND_REQ_FD]
        {
            let fuse = Fuse::mount(&target.folder.join("foreign"), 4096);
            let file = fuse.open();
            let event = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
            let set = epoll::create(CreateFlags::CLOEXEC).unwrap();
            epoll::add(&set, &event, EventData::new_u64(0), EventFlags::IN).unwrap();
            let event = Held(Some(event));
            thread::scope(|scope| {
                fuse.hold_own(true);
                scope.spawn(|| {
                    into_page(&file, |page| {
                        // SAFETY: it is large enough for an event, aligned, and the kernel fills
                        // it.
                        let events =
                            unsafe { page.cast::<[MaybeUninit<epoll::Event>; 1]>().as_mut() };
                        epoll::wait(&set, &mut events.unwrap()[..], None).unwrap();
                    });
                });
                fuse.await_held(1);
                let session = target.open(LOG_ALL | PLATFORM);
                let mut ring = session.ring(target.index());
                let payload = match request {
                    SET_LOG_FD | SET_BACKEND_REQ_FD => vec![],
                    _ => words(&[target.index().into()]),
                };
                session.client.send(request, &payload, &[event.as_fd()]);
                target.works(&session, &mut ring);
                drop(event);
                session.client.send(GET_VRING_BASE, &state(ring.index, 0), &[]);
                service.neighbour_goes_on("a watched eventfd");
                drop(session);
                service.still_serves("a watched eventfd");
                fuse.hold_own(false);
            });
            service.attack("a watched eventfd", |_| {});
        }
        service.end();
    }
}

/// Receives into a page of a file.
fn receive_into(mut stream: &UnixStream, file: &File) {
    into_page(file, |page| {
        // SAFETY: all of the page is mapped until this returns, and nothing else refers to it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(page.cast::<u8>(), 4096) };
        assert_ne!(stream.read(bytes).unwrap(), 0);
    });
}

/// Calls `f` with a mapped page of a file.
fn into_page(file: &File, f: impl FnOnce(*mut std::ffi::c_void)) {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses a free place.
    let page = unsafe { mmap(std::ptr::null_mut(), 4096, access, MapFlags::SHARED, file, 0) };
    let page = page.unwrap();
    f(page);
    // Unmapping would write it too, and block every mmap of the process meanwhile: even in the
    // thread that replies.
    // SAFETY: nothing refers to it any more.
    unsafe { msync(page, 4096, MsyncFlags::SYNC) }.unwrap();
    // SAFETY: as above.
    unsafe { munmap(page, 4096) }.unwrap();
}
