//! Attacks by the content of rings.

use crate::{
    guest::{
        BASE, DATA, Desc, INDIRECT, INDIRECT_DESC, NEXT, PACKED, RING, Ring, SIZE, Session, WRITE,
    },
    service::{Attack, Target, all},
};

/// Starts a ring, lets `fill` write to it, and stops it.
fn with(target: &Target, features: u64, fill: impl Fn(&Session, &mut Ring)) {
    for index in 0..2 {
        let session = target.open(features);
        let mut ring = Ring::new(index);
        session.start(&ring, 0);
        fill(&session, &mut ring);
        ring.settle(&session.ram);
        session.stop(index);
    }
}

/// A chain, followed by two valid ones.
fn chain(target: &Target, features: u64, descs: &[Desc]) {
    with(target, features, |session, ring| {
        ring.place(&session.ram, 0, descs);
        ring.offer(&session.ram, 0);
        ring.place(&session.ram, 60, &[Desc(DATA, 16, NEXT, 61), Desc(DATA + 64, 1, WRITE, 0)]);
        ring.offer(&session.ram, 60);
        ring.offer(&session.ram, 60);
    });
}

const LENGTHS: [u32; 8] = [0, 1, 15, 16, 17, 4096, 0x7fff_ffff, u32::MAX];
const PLACES: [u64; 8] =
    [0, BASE - 1, BASE, DATA, BASE + SIZE - 1, BASE + SIZE, u64::MAX - 15, u64::MAX];

pub(crate) const RINGS: &[(&str, Attack)] = &[
    ("chains that end in themselves", |target| {
        chain(target, 0, &[Desc(DATA, 16, NEXT, 0)]);
        chain(target, 0, &[Desc(DATA, 16, NEXT, 1), Desc(DATA, 512, NEXT | WRITE, 0)]);
        chain(target, 0, &[Desc(DATA, 16, NEXT, RING - 1)]);
    }),
    ("chains that leave the table", |target| {
        for next in [RING, RING + 1, 0x7fff, 0x8000, 0xffff] {
            chain(target, 0, &[Desc(DATA, 16, NEXT, next)]);
        }
    }),
    ("heads that leave the table", |target| {
        for head in [RING, 0x7fff, 0x8000, 0xffff] {
            with(target, 0, |session, ring| ring.offer(&session.ram, head));
        }
    }),
    ("the same head again and again", |target| {
        with(target, 0, |session, ring| {
            ring.place(&session.ram, 0, &[Desc(DATA, 16, NEXT, 1), Desc(DATA + 64, 1, WRITE, 0)]);
            (0..500).for_each(|_| ring.offer(&session.ram, 0));
        });
    }),
    ("an index that leaps", |target| {
        for leap in [RING + 1, 0x7fff, 0x8000, 0xffff] {
            with(target, 0, |session, ring| {
                session.ram.put(ring.avail() + 2, &leap.to_le_bytes());
                ring.kick();
            });
        }
    }),
    ("an index that goes back and forth", |target| {
        with(target, 0, |session, ring| {
            for round in 0..300u16 {
                let index = if round % 2 == 0 { RING } else { 0 };
                session.ram.put(ring.avail() + 2, &index.to_le_bytes());
                ring.kick();
            }
        });
    }),
    ("lengths and places of each part", |target| {
        for len in LENGTHS {
            for at in PLACES {
                let status = Desc(DATA + 64, 1, WRITE, 0);
                chain(
                    target,
                    0,
                    &[Desc(at, len, NEXT, 1), Desc(DATA, 512, NEXT | WRITE, 2), status],
                );
                let data = Desc(at, len, NEXT | WRITE, 2);
                chain(target, 0, &[Desc(DATA, 16, NEXT, 1), data, status]);
                let status = Desc(at, len, WRITE, 0);
                chain(target, 0, &[Desc(DATA, 16, NEXT, 1), Desc(DATA, 512, NEXT, 2), status]);
            }
        }
    }),
    ("parts that may not be written, and parts in the wrong order", |target| {
        chain(target, 0, &[Desc(DATA, 16, 0, 0)]);
        chain(target, 0, &[Desc(DATA, 16, WRITE, 0)]);
        chain(target, 0, &[Desc(DATA, 16, NEXT | WRITE, 1), Desc(DATA, 16, 0, 0)]);
        let mixed =
            [Desc(DATA, 16, NEXT, 1), Desc(DATA, 1, NEXT | WRITE, 2), Desc(DATA, 512, 0, 0)];
        chain(target, 0, &mixed);
        for flags in [0x8, 0x10, 0x8000, 0xffff, INDIRECT | WRITE, INDIRECT | NEXT] {
            chain(target, 0, &[Desc(DATA, 16, flags, 1), Desc(DATA, 16, WRITE, 0)]);
        }
    }),
    ("a header in sixteen parts, and a chain as long as the ring", |target| {
        let parts: Vec<Desc> = (0..16).map(|at| Desc(DATA + at, 1, NEXT, at as u16 + 1)).collect();
        chain(target, 0, &[parts, vec![Desc(DATA + 64, 1, WRITE, 0)]].concat());
        let long: Vec<Desc> =
            (0..RING - 4).map(|at| Desc(DATA, 512, NEXT | WRITE, at + 1)).collect();
        chain(target, 0, &long);
    }),
    ("tables of descriptors", |target| {
        for len in LENGTHS {
            for at in PLACES {
                chain(target, INDIRECT_DESC, &[Desc(at, len, INDIRECT, 0)]);
            }
        }
    }),
    ("tables in tables, and without an end", |target| {
        with(target, INDIRECT_DESC, |session, ring| {
            for inner in [
                Desc(DATA, 16, INDIRECT, 0),
                Desc(DATA, 16, NEXT, 0),
                Desc(DATA, 16, NEXT, 0xffff),
                Desc(DATA, 16, NEXT | INDIRECT, 1),
            ] {
                session.ram.put(DATA, &inner.bytes().repeat(64));
                ring.place(&session.ram, 0, &[Desc(DATA, 1024, INDIRECT, 0)]);
                ring.offer(&session.ram, 0);
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
    }),
    ("rings over their own data", |target| {
        with(target, 0, |session, ring| {
            // A request with the ring itself as its data.
            let data = Desc(ring.descs(), 0x3000, NEXT | WRITE, 2);
            let chain = [Desc(DATA, 16, NEXT, 1), data, Desc(ring.used() + 2, 1, WRITE, 0)];
            ring.place(&session.ram, 0, &chain);
            session.ram.put(DATA, &[0; 16]);
            (0..10).for_each(|_| ring.offer(&session.ram, 0));
        });
    }),
    ("a ring that is written all the time", |target| {
        with(target, INDIRECT_DESC, |session, ring| {
            let mut random = 0x1234_5678_9abc_def1_u64;
            for _ in 0..2000 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let at = random % u64::from(RING);
                let addr = DATA + random % 4096;
                let flags = (random >> 20) as u16 & 7;
                let next = (random >> 30) as u16 % (RING + 2);
                ring.place(
                    &session.ram,
                    at as u16,
                    &[Desc(addr, (random >> 40) as u32 % 5000, flags, next)],
                );
                ring.offer(&session.ram, at as u16);
            }
        });
    }),
    ("packed rings of nonsense", |target| {
        for bits in [0x80u16, 0x8000, 0x8080, 0x8083, 0x8084, 0x0081, 0xffff] {
            for id in [0, RING, 0xffff] {
                with(target, PACKED | INDIRECT_DESC, |session, ring| {
                    for len in LENGTHS {
                        let table: Vec<Desc> = vec![Desc(DATA, len, id, bits); RING.into()];
                        ring.place(&session.ram, 0, &table);
                        ring.kick();
                    }
                });
            }
        }
    }),
];

#[test]
fn rings_full_of_nonsense() {
    all(RINGS);
}
