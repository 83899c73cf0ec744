//! Attacks by messages: their content, their order, and their number.

use std::os::{
    fd::{AsFd as _, BorrowedFd},
    unix::net::UnixStream,
};

use rustix::net::{SendFlags, send};

use crate::{
    guest::{BASE, LOG_ALL, PACKED, PLATFORM, RING, Ram, Ring, SIZE},
    service::{Attack, Target, all},
    wire::{Client, MOST_FDS, addresses, header, in_flight, iotlb, request::*, state, words},
};

/// Values at which a numeric check may be off.
const EDGES: [u64; 22] = [
    0,
    1,
    2,
    3,
    63,
    64,
    65,
    255,
    256,
    0x7fff,
    0x8000,
    0x8001,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_f000,
    0xffff_ffff_ffff_ffff,
];

fn edges32() -> impl Iterator<Item = u32> {
    EDGES.into_iter().filter_map(|edge| u32::try_from(edge).ok())
}

pub(crate) const MESSAGES: &[(&str, Attack)] = &[
    ("every request with every length", |target| {
        for number in (0..=64).chain([255, 256, 0x8000_0000, u32::MAX]) {
            for len in [0, 1, 7, 8, 12, 16, 40, 44, 256] {
                let session = target.open(0);
                session.client.send(number, &vec![0xff; len], &[]);
                // Another request, if the connection still takes one.
                let _ = session.client.call(GET_FEATURES, &[]);
            }
        }
    }),
    ("flags that are not the protocol's", |target| {
        for flags in [0, 2, 3, 4, 5, 0xfffffff0, u32::MAX] {
            let client = Client::connect(&target.socket);
            client.raw(&header(GET_FEATURES, flags, 0), &[]);
            let _ = client.call(GET_FEATURES, &[]);
        }
    }),
    ("sizes that do not come", |target| {
        for size in [1, 8, 4096, 0x7fff_ffff, u32::MAX] {
            let client = Client::connect(&target.socket);
            client.raw(&header(SET_FEATURES, 1, size), &[]);
            client.raw(&[0; 7], &[]);
        }
    }),
    ("a part of a header", |target| {
        for len in 0..12 {
            let client = Client::connect(&target.socket);
            client.raw(&header(GET_FEATURES, 1, 0)[..len], &[]);
        }
    }),
    ("an end of what is sent, in the middle", |target| {
        let client = Client::connect(&target.socket);
        client.raw(&header(SET_FEATURES, 1, 8), &[]);
        client.stream.shutdown(std::net::Shutdown::Write).unwrap();
        client.drain();
    }),
    ("byte by byte", |target| {
        let client = Client::connect(&target.socket);
        let bytes = [header(SET_OWNER, 1, 0), header(GET_FEATURES, 1, 0)].concat();
        bytes.iter().for_each(|byte| assert!(client.raw(&[*byte], &[])));
        assert!(client.receive().is_some());
    }),
    ("descriptors that belong to nothing", |target| {
        let ram = Ram::new();
        for count in [1, 2, 8, 9, 32, MOST_FDS] {
            for number in [GET_FEATURES, SET_OWNER, SET_MEM_TABLE, SET_VRING_KICK, 0, 255] {
                let client = Client::connect(&target.socket);
                let fds: Vec<BorrowedFd<'_>> = vec![ram.file.as_fd(); count];
                client.send(number, &[0; 8], &fds);
                client.send(GET_FEATURES, &[], &[]);
                let _ = client.stream.shutdown(std::net::Shutdown::Write);
                client.drain();
            }
        }
    }),
    ("descriptors with every byte of a message", |target| {
        let ram = Ram::new();
        let client = Client::connect(&target.socket);
        for byte in header(GET_FEATURES, 1, 0).repeat(4) {
            client.raw(&[byte], &[ram.file.as_fd(); MOST_FDS]);
        }
    }),
    ("no descriptors where some belong", |target| {
        for number in [
            SET_MEM_TABLE,
            SET_LOG_BASE,
            SET_LOG_FD,
            SET_VRING_KICK,
            SET_VRING_CALL,
            SET_VRING_ERR,
            SET_BACKEND_REQ_FD,
            SET_INFLIGHT_FD,
            ADD_MEM_REG,
            SET_DEVICE_STATE_FD,
        ] {
            for payload in [vec![], words(&[0]), Ram::new().table(), words(&[0; 5])] {
                let session = target.open(LOG_ALL);
                session.client.set(number, &payload, &[]);
            }
        }
    }),
];

#[test]
fn messages_that_are_none() {
    all(MESSAGES);
}

/// Positions to start at, also those at the ring's end, with the same and the other wrap counter
/// (finding B1).
fn bases() -> impl Iterator<Item = u32> {
    let end = u32::from(RING);
    let ends = [0, 1, end - 1, end, end | 1 << 15, 1 << 15];
    let ends = ends.into_iter().flat_map(move |used| ends.map(|next| used << 16 | next));
    (0..32).map(|bit| 1 << bit).chain(edges32()).chain(ends)
}

pub(crate) const PLACES: &[(&str, Attack)] = &[
    ("places in a split ring", |target| {
        for base in bases() {
            let session = target.open(0);
            let mut ring = Ring::new(target.index());
            ring.goes_on_at(&session.ram, base as u16);
            session.start(&ring, base);
            target.works(&session, &mut ring);
            session.stop(ring.index);
        }
    }),
    ("places in a packed ring", |target| {
        for base in bases() {
            let session = target.open(PACKED);
            let mut ring = Ring::new(target.index());
            session.start(&ring, base);
            ring.offer_packed(&session.ram, base as u16, &target.chain(&session));
            ring.settle(&session.ram);
            session.stop(ring.index);
        }
    }),
    ("sizes of a ring", |target| {
        for value in (0..20).chain(edges32()) {
            let session = target.open(0);
            let mut ring = Ring::new(0);
            session.place(&ring, 0, value);
            session.run(&ring);
            ring.offer(&session.ram, 0);
            session.client.set(SET_VRING_NUM, &state(0, value), &[]);
            session.stop(0);
        }
    }),
    ("addresses of a ring", |target| {
        for value in EDGES.into_iter().chain([BASE + 1, BASE + SIZE - 1, BASE + SIZE]) {
            for place in 0..4 {
                let session = target.open(0);
                let mut ring = session.ring(0);
                let mut at = [ring.descs(), ring.used(), ring.avail(), 0];
                at[place] = value;
                session.client.set(SET_VRING_ADDR, &addresses(0, place as u32, at), &[]);
                ring.offer(&session.ram, 0);
                session.stop(0);
            }
        }
    }),
    ("numbers of rings", |target| {
        for number in [
            SET_VRING_NUM,
            SET_VRING_BASE,
            SET_VRING_ADDR,
            GET_VRING_BASE,
            SET_VRING_KICK,
            SET_VRING_CALL,
            SET_VRING_ERR,
            SET_VRING_ENABLE,
        ] {
            for index in edges32().skip(2) {
                let session = target.open(0);
                let ring = Ring::new(0);
                let payload = match number {
                    SET_VRING_ADDR => addresses(index, 0, [BASE; 4]),
                    _ => state(index, 1),
                };
                let kick = [ring.kick.as_fd()];
                let fds: &[_] = match number {
                    SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR => &kick,
                    _ => &[],
                };
                session.client.set(number, &payload, fds);
            }
        }
    }),
    ("rings that are started, stopped and enabled again and again", |target| {
        let session = target.open(0);
        let ring = Ring::new(0);
        for round in 0..200 {
            assert!(session.start(&ring, round % 3));
            ring.kick();
            assert!(session.client.set(SET_VRING_ENABLE, &state(0, round % 2), &[]));
            assert!(session.stop(0).is_some());
        }
    }),
    ("requests for ring positions without an end, whose replies are not read", |target| {
        let session = target.open(0);
        let _ring = session.ring(0);
        pour(&session.client, &[header(GET_VRING_BASE, 1, 8), state(0, 0)].concat());
    }),
];

#[test]
fn rings_that_are_none() {
    all(PLACES);
}

/// Sends a message again and again until there is no room.
fn pour(client: &Client, message: &[u8]) {
    let many = message.repeat((1 << 16) / message.len() + 1);
    let mut quiet = 0;
    while quiet < 3 {
        match send(client.stream.as_fd(), &many, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(_) => quiet = 0,
            Err(rustix::io::Errno::AGAIN) => quiet += 1,
            Err(_) => return,
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

pub(crate) const ORDERS: &[(&str, Attack)] = &[
    ("rings before anything else", |target| {
        let client = Client::connect(&target.socket);
        let ring = Ring::new(0);
        client.send(SET_VRING_ADDR, &ring.addresses(), &[]);
        client.send(SET_VRING_KICK, &words(&[0]), &[ring.kick.as_fd()]);
        client.send(SET_VRING_ENABLE, &state(0, 1), &[]);
        ring.kick();
        let _ = client.call(GET_VRING_BASE, &state(0, 0));
    }),
    ("features that change under running rings", |target| {
        for features in EDGES.into_iter().chain((0..64).map(|bit| 1 << bit)) {
            let session = target.open(0);
            let mut ring = session.ring(0);
            session.client.set(SET_FEATURES, &words(&[features]), &[]);
            ring.offer(&session.ram, 0);
            session.client.set(SET_PROTOCOL_FEATURES, &words(&[features]), &[]);
            session.client.send(GET_VRING_BASE, &state(0, 0), &[]);
            let _ = session.client.stream.shutdown(std::net::Shutdown::Write);
            session.client.drain();
        }
    }),
    ("memory that goes under running rings", |target| {
        let session = target.open(0);
        let mut ring = session.ring(0);
        for round in 0..50 {
            ring.offer(&session.ram, round % RING);
            let other = Ram::new();
            let fds = [other.file.as_fd()];
            match round % 4 {
                0 => session.client.set(SET_MEM_TABLE, &words(&[1, BASE * 8, SIZE, 0, 0]), &fds),
                1 => session.client.set(SET_MEM_TABLE, &Ram::new().table(), &fds),
                2 => session.client.set(REM_MEM_REG, &words(&[0, BASE, SIZE, BASE, 0]), &[]),
                _ => session.client.set(ADD_MEM_REG, &words(&[0, BASE, SIZE, BASE, 0]), &fds),
            };
        }
    }),
    ("resets under running rings", |target| {
        for number in [RESET_OWNER, RESET_DEVICE, SET_OWNER, SET_STATUS] {
            let session = target.open(0);
            let payload = if number == SET_STATUS { words(&[0]) } else { vec![] };
            for _ in 0..20 {
                let mut ring = session.ring(target.index());
                target.works(&session, &mut ring);
                ring.offer(&session.ram, 0);
                session.client.set(number, &payload, &[]);
            }
        }
    }),
    ("connections one after the other, and as many at a time as there is room for", |target| {
        for _ in 0..50 {
            drop(Client::connect(&target.socket));
            let connections: Vec<UnixStream> =
                (0..1000).map_while(|_| connect_if_room(target)).collect();
            drop(connections);
        }
    }),
];

#[test]
fn messages_out_of_their_order() {
    all(ORDERS);
}

/// A connection if there is room for one.
fn connect_if_room(target: &Target) -> Option<UnixStream> {
    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let address = SocketAddrUnix::new(&target.socket).unwrap();
    connect(&socket, &address).ok().map(|()| socket.into())
}

pub(crate) const SHARING: &[(&str, Attack)] = &[
    ("regions of memory", |target| {
        let ram = Ram::new();
        let fds = [ram.file.as_fd(); 9];
        for edge in EDGES {
            for place in 0..4 {
                for number in [SET_MEM_TABLE, ADD_MEM_REG] {
                    let mut region = [BASE, SIZE, BASE, 0];
                    region[place] = edge;
                    let session = target.open(0);
                    let first = u64::from(number == SET_MEM_TABLE);
                    let payload = [words(&[first]), words(&region)].concat();
                    session.client.set(number, &payload, &fds[..1]);
                }
            }
            let session = target.open(0);
            let table = [words(&[edge]), words(&[BASE, SIZE, BASE, 0].repeat(8))].concat();
            session.client.set(SET_MEM_TABLE, &table, &fds[..(edge.min(9) as usize)]);
        }
    }),
    ("more regions than there may be", |target| {
        let session = target.open(0);
        let ram = Ram::new();
        for number in 1..600 {
            let at = number * (1 << 30);
            let region = words(&[0, at, 4096, at, 0]);
            if !session.client.set(ADD_MEM_REG, &region, &[ram.file.as_fd()]) {
                break;
            }
        }
    }),
    ("logs of dirty pages", |target| {
        for size in EDGES {
            for offset in [0, 1, 4096, u64::MAX] {
                let session = target.open(LOG_ALL);
                let ram = Ram::new();
                session.client.set(SET_LOG_BASE, &words(&[size, offset]), &[ram.file.as_fd()]);
                let mut ring = session.ring(0);
                let at = [ring.descs(), ring.used(), ring.avail(), u64::MAX - 7];
                session.client.set(SET_VRING_ADDR, &addresses(0, 1, at), &[]);
                ring.offer(&session.ram, 0);
                session.stop(0);
            }
        }
    }),
    ("records of requests in flight", |target| {
        for size in EDGES {
            for queues in [0u16, 1, 2, 255, 0xffff] {
                let session = target.open(0);
                let payload = in_flight(size, 0, queues, RING);
                let _ = session.client.call(GET_INFLIGHT_FD, &payload);
                let ram = Ram::new();
                ram.put(BASE, &[0xa5; 4096]);
                session.client.set(SET_INFLIGHT_FD, &payload, &[ram.file.as_fd()]);
                let mut ring = session.ring(0);
                ring.offer(&session.ram, 0);
                session.stop(0);
            }
        }
    }),
    ("configuration", |target| {
        for edge in edges32() {
            for size in [0, 1, 60, 255, 256, 257] {
                for number in [GET_CONFIG, SET_CONFIG] {
                    let session = target.open(0);
                    let head = [edge, size, 0].iter().flat_map(|n| n.to_ne_bytes()).collect();
                    let payload = [head, vec![0xff; size as usize]].concat();
                    session.client.send(number, &payload, &[]);
                    let _ = session.client.stream.shutdown(std::net::Shutdown::Write);
                    session.client.drain();
                }
            }
        }
    }),
    ("translations", |target| {
        let session = target.open(PLATFORM);
        let _ring = session.ring(0);
        for edge in EDGES {
            for size in EDGES {
                for (access, kind) in [(3, 2), (0, 2), (255, 2), (1, 3), (0, 3), (0, 1), (0, 0)] {
                    let message = iotlb(edge, size, BASE, access, kind);
                    session.client.set(IOTLB_MSG, &message, &[]);
                }
            }
        }
    }),
    ("a flood of translations whose replies are not read", |target| {
        let session = target.open(PLATFORM);
        let mut ring = session.ring(0);
        let message = |page: u64| {
            let kind = if page.is_multiple_of(5) { 3 } else { 2 };
            let payload = iotlb(page << 12, 4096, BASE + ((page % 256) << 12), 3, kind);
            [header(IOTLB_MSG, 1, payload.len() as u32), payload].concat()
        };
        ring.offer(&session.ram, 0);
        pour(&session.client, &(0..5000).flat_map(message).collect::<Vec<u8>>());
    }),
    ("requests without an end, whose replies are not read", |target| {
        let client = Client::connect(&target.socket);
        pour(&client, &header(GET_FEATURES, 1, 0));
    }),
    ("a channel that is never read", |target| {
        let (session, ours) = target.open_with_channel();
        for _ in 0..200 {
            let mut ring = session.ring(0);
            ring.offer(&session.ram, 0);
            session.stop(0);
        }
        drop(ours);
    }),
    ("channels that change and end", |target| {
        let session = target.open(PLATFORM);
        let mut ring = session.ring(0);
        for _ in 0..200 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            assert!(session.client.set(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]));
            ring.offer(&session.ram, 0);
            drop(ours);
        }
    }),
    ("rings of which no translation comes", |target| {
        let (session, _channel) = target.open_with_channel();
        let _rings = [session.ring(0), session.ring(1)];
        // Longer than a neighbour may wait.
        std::thread::sleep(std::time::Duration::from_secs(3));
    }),
    ("channels that send nonsense", |target| {
        for byte in 0..100 {
            let session = target.open(PLATFORM);
            let mut ring = session.ring(0);
            let (ours, theirs) = UnixStream::pair().unwrap();
            session.client.set(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
            Client { stream: ours }.raw(&[byte; 100], &[]);
            ring.offer(&session.ram, 0);
            session.stop(0);
        }
    }),
];

#[test]
fn shared_memory_and_translations() {
    all(SHARING);
}
