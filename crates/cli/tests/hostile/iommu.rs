//! Attacks on the IOMMU of `guard`, by its own front end: the guest's disks are still served, as
//! far as the guest may use them.

use rustix::fd::AsFd as _;

use crate::{
    guest::{BASE, DATA, Desc, NEXT, Ring, SIZE, Session, WRITE},
    honest::Device,
    service::{Attack, Service, Target},
    wire::{request::*, words},
};

/// Puts a request with room for a reply of that many bytes into the ring.
pub(crate) fn submit(session: &Session, ring: &mut Ring, bytes: &[u8], room: u32) {
    let at = session.ram.data();
    session.ram.put(at, bytes);
    let reply = Desc(at + 0x8000, room, WRITE, 0);
    let chain = [Desc(at, bytes.len() as u32, NEXT, 1), reply];
    match (bytes.len(), room) {
        (0, _) => ring.place(&session.ram, 0, &[reply]),
        (_, 0) => ring.place(&session.ram, 0, &[Desc(at, bytes.len() as u32, 0, 0)]),
        _ => ring.place(&session.ram, 0, &chain),
    }
    ring.offer(&session.ram, 0);
}

/// The same, and waits for the status.
pub(crate) fn request(session: &Session, ring: &mut Ring, bytes: &[u8], room: u32) -> u8 {
    submit(session, ring, bytes, room);
    ring.wait(&session.ram);
    status(session)
}

/// The status in the last reply.
pub(crate) fn status(session: &Session) -> u8 {
    session.ram.get::<1>(session.ram.data() + 0x8000)[0]
}

fn open(target: &Target) -> (Session, Ring) {
    let session = Session::open(&target.folder.join("iommu"), FEATURES);
    let ring = session.ring(0);
    (session, ring)
}

/// All but those that change the layout of rings: PACKED, EVENT_IDX, IN_ORDER.
pub(crate) const FEATURES: u64 = !(1 << 34 | 1 << 29 | 1 << 35);

/// `struct virtio_iommu_req_map`: kind, domain, first, last, physical, flags.
pub(crate) fn map(domain: u32, first: u64, last: u64, phys: u64, flags: u32) -> Vec<u8> {
    let mut bytes = vec![3, 0, 0, 0];
    bytes.extend(domain.to_le_bytes());
    bytes.extend([first, last, phys].iter().flat_map(|word| word.to_le_bytes()));
    bytes.extend(flags.to_le_bytes());
    bytes
}

/// `struct virtio_iommu_req_unmap`.
pub(crate) fn unmap(domain: u32, first: u64, last: u64) -> Vec<u8> {
    let mut bytes = vec![4, 0, 0, 0];
    bytes.extend(domain.to_le_bytes());
    bytes.extend([first, last].iter().flat_map(|word| word.to_le_bytes()));
    bytes.extend([0; 4]);
    bytes
}

/// `struct virtio_iommu_req_attach`, or `_detach`.
pub(crate) fn attach(kind: u8, domain: u32, endpoint: u32, flags: u32) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.extend([domain, endpoint, flags, 0].iter().flat_map(|word| word.to_le_bytes()));
    bytes
}

const ATTACKS: &[(&str, Attack)] = &[
    ("requests of every kind and length", |target| {
        let (session, mut ring) = open(target);
        for kind in (0..16).chain([0x7f, 0x80, 0xff]) {
            for len in [0, 1, 3, 4, 16, 20, 36, 63, 64, 4096] {
                for room in [0, 1, 3, 4, 5, 4096] {
                    let mut bytes = vec![0xff; len];
                    bytes.iter_mut().take(1).for_each(|byte| *byte = kind);
                    if len + room as usize > 0 {
                        request(&session, &mut ring, &bytes, room);
                    }
                }
            }
        }
    }),
    ("mappings of everything and nothing", |target| {
        let (session, mut ring) = open(target);
        request(&session, &mut ring, &attach(1, 7, 0x30, 0), 4);
        let edges = [0, 1, 0xfff, 0x1000, BASE, 1 << 32, u64::MAX - 0xfff, u64::MAX];
        for first in edges {
            for last in edges {
                for phys in edges {
                    request(&session, &mut ring, &map(7, first, last, phys, 3), 4);
                }
            }
        }
    }),
    ("many mappings in domains that come and go", |target| {
        let (session, mut ring) = open(target);
        for number in 0..3000u64 {
            let (domain, first) = (number as u32 / 1000, number * 0x20_0000);
            request(&session, &mut ring, &attach(1, domain, 0x30, 0), 4);
            request(&session, &mut ring, &map(domain, first, first + 0xfff, BASE, 3), 4);
        }
    }),
    ("endpoints that come and go", |target| {
        let (session, mut ring) = open(target);
        for round in 0..300 {
            for endpoint in [0, 0x28, 0x30, 0x38, 0x40, 0xffff, u32::MAX] {
                let kind = 1 + round as u8 % 2;
                request(&session, &mut ring, &attach(kind, round % 5, endpoint, round % 3), 4);
            }
        }
    }),
    ("a bypass that is switched on and off", |target| {
        let (session, _ring) = open(target);
        // On at last, as it was.
        for value in (0..200).map(|round| round % 4).chain([1]) {
            let head = [36u32, 1, 0].iter().flat_map(|word| word.to_ne_bytes());
            session.client.set(SET_CONFIG, &head.chain([value]).collect::<Vec<u8>>(), &[]);
        }
    }),
    ("events for which there is no place", |target| {
        let (session, mut ring) = open(target);
        let mut events = session.ring(1);
        for (addr, len, flags) in [
            (DATA, 0, WRITE),
            (DATA, 4, WRITE),
            (DATA, 24, 0),
            (u64::MAX, 24, WRITE),
            (BASE + SIZE, 24, WRITE),
        ] {
            events.place(&session.ram, 0, &[Desc(addr, len, flags, 0)]);
            events.offer(&session.ram, 0);
        }
        request(&session, &mut ring, &attach(1, 1, 0x30, 0), 4);
    }),
    ("memory that goes while requests are there", |target| {
        for len in [SIZE / 2, 4096, 0] {
            let (session, mut ring) = open(target);
            session.ram.put(DATA, &attach(1, 1, 0x30, 0));
            let chain = [Desc(DATA, 20, NEXT, 1), Desc(DATA + 0x8000, 4, WRITE, 0)];
            ring.place(&session.ram, 0, &chain);
            ring.offer(&session.ram, 0);
            session.ram.file.set_len(len).unwrap();
            ring.kick();
            session.client.set(SET_MEM_TABLE, &session.ram.table(), &[session.ram.file.as_fd()]);
            session.client.set(SET_VRING_ENABLE, &words(&[1 << 32]), &[]);
            session.stop(0);
        }
    }),
];

#[test]
fn an_iommu_with_a_hostile_front_end() {
    let mut service = Service::start(Device::Guarded);
    for (name, attack) in ATTACKS {
        service.attack_iommu(name, *attack);
    }
    service.end();
}
