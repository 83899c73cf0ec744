//! A ring is described by several messages, in any order: whatever they hold, the device is only
//! called to start a valid ring, and any refusal ends the connection with the reason.

mod common;

use common::{Device, Event, VERSION_1, message, send};
use ringfence_mem::GuestRam;
use ringfence_vhost_user::{RingAddresses, ServeError, Server, WireError, msg::Request};
use std::{os::unix::net::UnixStream, sync::Arc};

const PACKED: u64 = 1 << 34;
/// The device's limit.
const MOST: u32 = 1024;

/// One message about a ring.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Message {
    Memory,
    Packed(bool),
    Num(u32),
    Base(u32),
    Addr(u64),
    Kick,
}

/// The server's state, as far as the ring is concerned.
#[derive(Default)]
struct Model {
    memory: bool,
    /// Whether packed rings were negotiated, if anything was.
    features: Option<bool>,
    size: Option<u32>,
    base: u32,
    addr: Option<u64>,
    running: bool,
}

impl Model {
    /// Whether the message is valid now.
    fn apply(&mut self, sent: Message) -> bool {
        let power = |size: u32| size.is_power_of_two();
        let is_packed = self.features == Some(true);
        match sent {
            Message::Memory => self.memory = true,
            Message::Packed(packed) => {
                if self.running && self.features != Some(packed) {
                    return false;
                }
                self.features = Some(packed);
            }
            Message::Num(size) => {
                if self.running || size == 0 || size > MOST || !(is_packed || power(size)) {
                    return false;
                }
                self.size = Some(size);
            }
            Message::Base(base) => {
                if self.running || !is_packed && base > 0xffff {
                    return false;
                }
                self.base = base;
            }
            Message::Addr(addr) => {
                if !addr.is_multiple_of(16) {
                    return false;
                }
                self.addr = Some(addr);
            }
            Message::Kick => {
                let (Some(size), true, true) = (self.size, self.memory, self.addr.is_some()) else {
                    return false;
                };
                let inside = |place: u32| place & 0x7fff < size;
                let good = match is_packed {
                    true => inside(self.base) && inside(self.base >> 16),
                    false => power(size) && self.base <= 0xffff,
                };
                if !good {
                    return false;
                }
                self.running = true;
            }
        }
        true
    }
}

/// Sends all that to a server, and compares the outcome with the model.
fn check(ram: &Arc<GuestRam>, messages: &[Message]) {
    let (stream, theirs) = UnixStream::pair().unwrap();
    let device = Device { features: VERSION_1 | PACKED, ..Device::default() };
    let mut server = Server::new(theirs, device);
    let (mut model, mut good) = (Model::default(), true);
    for &sent in messages {
        let request = match sent {
            Message::Memory => Request::SetMemTable(vec![ram.region()]),
            Message::Packed(packed) => {
                Request::SetFeatures(VERSION_1 | if packed { PACKED } else { 0 })
            }
            Message::Num(num) => Request::SetVringNum { ring: 1, num },
            Message::Base(base) => Request::SetVringBase { ring: 1, base },
            Message::Addr(at) => {
                let addresses = RingAddresses { desc: at, avail: at, used: at, log: None };
                Request::SetVringAddr { ring: 1, addresses }
            }
            Message::Kick => Request::SetVringKick { ring: 1, fd: false },
        };
        let memory = [ram.fd()];
        let fds = if sent == Message::Memory { &memory[..] } else { &[] };
        send(&stream, &message(&request, false), fds);
        good = good && model.apply(sent);
    }
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    match server.serve() {
        Ok(()) => assert!(good, "{messages:x?}"),
        Err(ServeError::Wire(WireError::Value { .. } | WireError::State { .. })) => {
            assert!(!good, "{messages:x?}");
        }
        Err(other) => panic!("{messages:x?}: {other}"),
    }
    let started = server.handler().events.iter().find_map(|event| match event {
        Event::Start { ring: 1, size, base, .. } => Some((u32::from(*size), *base)),
        _ => None,
    });
    let size = model.size.unwrap_or_default();
    assert_eq!(started, model.running.then_some((size, Some(model.base))), "{messages:x?}");
}

/// Calls `each` with all orders of `items`.
fn orders(items: &mut [Message], from: usize, each: &mut impl FnMut(&[Message])) {
    if from == items.len() {
        return each(items);
    }
    for other in from..items.len() {
        items.swap(from, other);
        orders(items, from + 1, each);
        items.swap(from, other);
    }
}

#[test]
fn whatever_the_messages_and_their_order_only_a_valid_ring_starts() {
    let ram = GuestRam::new(1 << 16, 0).unwrap();
    for packed in [false, true] {
        for num in [0, 1, 3, 16, 1000, MOST, MOST + 1, 0x8000, 0x1_0000, 0x1_0010, u32::MAX] {
            let at = num & 0x7fff;
            let places = [0, 0x8000, at, at | 0x8000, 0xffff].into_iter();
            let near = places.chain([at.saturating_sub(1), at.saturating_sub(1) | 0x8000]);
            let near: Vec<u32> = near.collect();
            for base in near.iter().flat_map(|high| near.iter().map(move |low| high << 16 | low)) {
                let mut messages =
                    [Message::Packed(packed), Message::Num(num), Message::Base(base)];
                orders(&mut messages, 0, &mut |messages| {
                    let [a, b, c] = messages else { unreachable!() };
                    check(&ram, &[*a, Message::Memory, *b, Message::Addr(64), *c, Message::Kick]);
                });
            }
        }
    }
}

#[test]
fn messages_of_a_ring_may_come_in_any_order_and_before_or_after_its_start() {
    let ram = GuestRam::new(1 << 16, 0).unwrap();
    let rings = [
        (false, 16, 7, 64),
        (true, 16, 0x8010_8000, 64),
        (true, 24, 0x8017_0000, 64),
        (true, 24, 0, 72),
    ];
    for (packed, num, base, addr) in rings {
        let packed = Message::Packed(packed);
        let mut messages = [
            packed,
            Message::Memory,
            Message::Num(num),
            Message::Base(base),
            Message::Addr(addr),
            Message::Kick,
        ];
        orders(&mut messages, 0, &mut |messages| check(&ram, messages));
        // The same and different values again, after a start.
        let again = [
            Message::Packed(false),
            Message::Packed(true),
            Message::Num(16),
            Message::Base(1),
            Message::Addr(80),
        ];
        for more in again {
            let all: Vec<Message> = messages.iter().copied().chain([more, Message::Kick]).collect();
            check(&ram, &all);
        }
    }
}
