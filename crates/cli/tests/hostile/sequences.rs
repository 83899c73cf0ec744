//! Random sequences of messages and rings.

use std::os::fd::{AsFd as _, BorrowedFd};

use proptest::{
    prelude::*,
    strategy::{BoxedStrategy, ValueTree as _},
    test_runner::{Config, TestRunner},
};
use rustix::event::{EventfdFlags, eventfd};

use crate::{
    guest::{BASE, DATA, Desc, INDIRECT_DESC, LOG_ALL, PACKED, PLATFORM, RING, Ram, Ring, SIZE},
    honest::Device,
    service::{Service, Target},
    wire::{addresses, iotlb, request::*, state, words},
};

/// How many connections with a sequence each, on every kind of device.
const SEQUENCES: usize = 150;

#[derive(Clone, Debug)]
enum Step {
    /// A message: number, payload, how many descriptors and of which kind.
    Message(u32, Vec<u8>, usize, u8),
    /// A valid ring.
    Start(u32, u32),
    Descs(u32, u16, Vec<(u64, u32, u16, u16)>),
    Offer(u32, u16),
    /// Bytes anywhere in the memory.
    Write(u64, Vec<u8>),
    Cut(u64),
}

fn edge() -> BoxedStrategy<u64> {
    prop_oneof![
        4 => (0..SIZE).prop_map(|at| BASE + at),
        2 => 0..300u64,
        1 => (0..64u32).prop_map(|bit| 1 << bit),
        1 => any::<u64>(),
        1 => (0..5000u64).prop_map(|below| u64::MAX - below),
    ]
    .boxed()
}

fn number() -> BoxedStrategy<u32> {
    prop_oneof![5 => 0..4u32, 2 => 0..300u32, 1 => any::<u32>()].boxed()
}

fn message() -> BoxedStrategy<Step> {
    let of = |request, payload: BoxedStrategy<Vec<u8>>| {
        (payload, 0..3usize, 0..3u8)
            .prop_map(move |(payload, fds, kind)| Step::Message(request, payload, fds, kind))
            .boxed()
    };
    let pair = || (number(), number()).prop_map(|(one, other)| state(one, other)).boxed();
    let one = || edge().prop_map(|word| words(&[word])).boxed();
    let regions =
        |most| prop::collection::vec(edge(), 4..=most).prop_map(|all| words(&all)).boxed();
    let translation = (edge(), edge(), edge(), any::<u8>(), 0..6u8)
        .prop_map(|(iova, size, user, access, kind)| iotlb(iova, size, user, access, kind));
    let ring = (number(), 0..3u32, [edge(), edge(), edge(), edge()])
        .prop_map(|(index, flags, at)| addresses(index, flags, at));
    prop_oneof![
        of(SET_FEATURES, one()),
        of(SET_PROTOCOL_FEATURES, one()),
        of(SET_MEM_TABLE, regions(9)),
        of(ADD_MEM_REG, regions(5)),
        of(REM_MEM_REG, regions(5)),
        of(SET_LOG_BASE, regions(4)),
        of(SET_VRING_NUM, pair()),
        of(SET_VRING_BASE, pair()),
        of(SET_VRING_ENABLE, pair()),
        of(SET_VRING_ADDR, ring.boxed()),
        of(SET_VRING_KICK, one()),
        of(SET_VRING_CALL, one()),
        of(SET_VRING_ERR, one()),
        of(GET_VRING_BASE, pair()),
        of(IOTLB_MSG, translation.boxed()),
        of(GET_INFLIGHT_FD, regions(4)),
        of(SET_INFLIGHT_FD, regions(4)),
        of(SET_BACKEND_REQ_FD, Just(Vec::new()).boxed()),
        of(RESET_OWNER, Just(Vec::new()).boxed()),
        (0..64u32, prop::collection::vec(any::<u8>(), 0..64), 0..3usize, 0..3u8)
            .prop_map(|(request, payload, fds, kind)| Step::Message(request, payload, fds, kind)),
    ]
    .boxed()
}

fn step() -> BoxedStrategy<Step> {
    let desc = || (edge(), prop_oneof![0..600u32, any::<u32>()], 0..8u16, 0..RING + 2);
    prop_oneof![
        6 => message(),
        3 => (0..2u32, prop_oneof![4 => Just(0), 1 => any::<u32>()])
            .prop_map(|(index, base)| Step::Start(index, base)),
        4 => (0..2u32, 0..RING, prop::collection::vec(desc(), 1..6))
            .prop_map(|(ring, at, descs)| Step::Descs(ring, at, descs)),
        6 => (0..2u32, 0..RING + 1).prop_map(|(ring, head)| Step::Offer(ring, head)),
        2 => (0..SIZE - 64, prop::collection::vec(any::<u8>(), 1..64))
            .prop_map(|(at, bytes)| Step::Write(BASE + at, bytes)),
        1 => (0..SIZE).prop_map(Step::Cut),
    ]
    .boxed()
}

fn run(target: &Target, features: u64, steps: &[Step]) {
    let session = target.open(features);
    let mut rings = [Ring::new(0), Ring::new(1)];
    let (memory, event) = (Ram::new(), eventfd(0, EventfdFlags::empty()).unwrap());
    let (end, start) = rustix::pipe::pipe().unwrap();
    session.ram.put(DATA, &[0; 64]);
    for step in steps {
        match step {
            Step::Message(request, payload, count, kind) => {
                let fd = [memory.file.as_fd(), event.as_fd(), end.as_fd()][usize::from(*kind)];
                let fds: Vec<BorrowedFd<'_>> = vec![fd; *count];
                let mut payload = payload.clone();
                if *request == SET_PROTOCOL_FEATURES
                    && let Some(first) = payload.first_mut()
                {
                    // REPLY_ACK stays: without it no later message gets a reply.
                    *first |= 1 << 3;
                }
                // Some always get a reply: replies may then be to another request.
                session.client.set(*request, &payload, &fds);
            }
            Step::Start(index, base) => {
                let ring = &rings[*index as usize];
                session.start(ring, *base);
            }
            Step::Descs(ring, at, descs) => {
                let descs: Vec<Desc> = descs
                    .iter()
                    .map(|&(addr, len, flags, next)| Desc(addr, len, flags, next))
                    .collect();
                let at = (*at).min(RING - descs.len() as u16);
                rings[*ring as usize].place(&session.ram, at, &descs);
            }
            Step::Offer(ring, head) => rings[*ring as usize].offer(&session.ram, *head),
            Step::Write(at, bytes) => session.ram.put(*at, bytes),
            Step::Cut(len) => {
                memory.file.set_len(*len).unwrap();
                memory.file.set_len(SIZE).unwrap();
            }
        }
    }
    // All of it is read before the end, if it is read at all.
    let _ = session.client.stream.shutdown(std::net::Shutdown::Write);
    session.client.drain();
    drop(start);
}

#[test]
fn sequences_of_anything() {
    let mut runner = TestRunner::new(Config::default());
    let wanted = [0, INDIRECT_DESC, LOG_ALL, PLATFORM, PACKED | INDIRECT_DESC, PACKED | PLATFORM];
    let sequences = (prop::sample::select(wanted.to_vec()), prop::collection::vec(step(), 1..40));
    for device in [Device::Disk, Device::Guarded, Device::Net] {
        let mut service = Service::start(device);
        for _ in 0..SEQUENCES {
            let (features, steps) = sequences.new_tree(&mut runner).unwrap().current();
            let name = format!("{features:x} {steps:x?}");
            service.attack(&name, |target| run(target, features, &steps));
        }
        service.end();
    }
}
