//! The driver's end of a queue, split or packed, against a hostile device.
//!
//! The parsers are `virtq/src/driver/{end,names,split,packed}.rs`: what the device writes into the used
//! ring, or into the packed ring and its event structure. At first an honest device gives chains back, in
//! any order; then the input also writes bytes anywhere in the queue's memory, at any moment between
//! the driver's calls. Judged by a list of the chains in flight: a chain comes back at most once, only
//! once published, with its own token and with no more bytes than it has room for; descriptors are counted;
//! a broken queue stays broken and takes nothing. As long as the device was honest, what comes back is
//! what it gave back, in order, and nothing breaks.
#![no_main]

use std::{cell::RefCell, collections::VecDeque};

use libfuzzer_sys::fuzz_target;
use ringfence_mem::{Access, Translate};
use ringfence_virtq::{
    AddError, Chain, Desc, device, driver,
    driver::{QueueConfig, Used},
    testing::{Ram, pair_of},
};

const BASE: u64 = 0x1000;
const LEN: usize = 0x3000;
/// Indirect tables lie behind the rings.
const TABLES: u64 = BASE + 0x2000;

thread_local! {
    // Made once: a mapping for every run would take most of the time.
    static RAM: (Ram, RefCell<Chain>) = (Ram::new(BASE, LEN), RefCell::default());
}

/// A chain of the driver's.
struct Held {
    token: u64,
    room: u32,
    descs: u16,
    published: bool,
}

struct Bench<'r> {
    ram: &'r Ram,
    size: u16,
    driver: driver::Queue,
    /// `None` once it was not honest.
    device: Option<device::Queue>,
    /// What the honest device has taken: head, token, room.
    taken: Vec<(u16, u64, u32)>,
    /// What it has given back and the driver not taken.
    given: VecDeque<Used>,
    held: Vec<Held>,
    next: u64,
}

// Input: a byte of the size, a byte of flags; then steps of three bytes.
fuzz_target!(|data: &[u8]| {
    let Some((&[size, flags], steps)) = data.split_first_chunk() else { return };
    RAM.with(|(ram, chain)| run(ram, &mut chain.borrow_mut(), size, flags, steps));
});

fn run(ram: &Ram, chain: &mut Chain, size: u8, flags: u8, steps: &[u8]) {
    ram.write(BASE, &[0; LEN]).expect("all of the memory");
    let packed = flags & 1 != 0;
    let size = if packed { u16::from(size % 64) + 1 } else { 1 << (size % 7) };
    let config = QueueConfig { size, event_idx: flags & 2 != 0, packed };
    let (driver, device) = pair_of(ram, BASE, config);
    let mut bench = Bench {
        ram,
        size,
        driver,
        device: Some(device),
        taken: Vec::new(),
        given: VecDeque::new(),
        held: Vec::new(),
        next: 1,
    };
    for &[what, a, b] in steps.as_chunks().0 {
        match what % 11 {
            0 | 1 => bench.add(a, b),
            2 => bench.add_indirect(a, b),
            3 => bench.add_burst(a),
            4 => bench.publish(),
            5 | 6 => bench.pop(usize::from(a % 5)),
            7 => bench.give_back(chain, a, b),
            8 => {
                let at = BASE + u64::from(u16::from_le_bytes([a, what / 11]) % 0x800);
                bench.device = None;
                ram.write(at, &[b]).expect("it lies in the memory");
            }
            9 => {
                let _ = bench.driver.needs_kick();
                bench.driver.suppress_notifications();
            }
            _ => {
                let some = bench.driver.enable_notifications();
                assert!(bench.device.is_none() || some != bench.given.is_empty());
            }
        }
        bench.check();
    }
    bench.pop(usize::from(size) + 1);
    bench.check();
}

impl Bench<'_> {
    /// Notes what `add` returned for a chain that takes `descs` of the queue.
    fn added(&mut self, descs: u16, room: u32, result: Result<(), AddError>) {
        let free = self.free();
        match result {
            Ok(()) => {
                assert!(descs <= free);
                self.held.push(Held { token: self.next, room, descs, published: false });
                self.next += 1;
            }
            Err(AddError::Full { .. }) => assert!(descs > free),
            Err(AddError::TooMany { .. }) => assert!(descs > self.size || descs == 1),
            Err(AddError::Broken(why)) => assert_eq!(self.driver.broken(), Some(why)),
            Err(other) => panic!("{other}"),
        }
    }

    fn chain(a: u8, b: u8) -> ([Desc; 4], usize, u32) {
        let (count, readable) = (1 + usize::from(a % 4), usize::from(a / 4 % 4));
        let mut descs = [Desc::writable(BASE, u32::from(b)); 4];
        descs[..readable].iter_mut().for_each(|desc| desc.write = false);
        let room = count.saturating_sub(readable) as u32 * u32::from(b);
        (descs, count, room)
    }

    fn add(&mut self, a: u8, b: u8) {
        let (descs, count, room) = Self::chain(a, b);
        let result = self.driver.add(&descs[..count], self.next);
        self.added(count as u16, room, result);
    }

    fn add_indirect(&mut self, a: u8, b: u8) {
        let (descs, count, room) = Self::chain(a, b);
        let at = TABLES + self.next % 64 * 64;
        let table = self.ram.window(at, 64, Access::ReadWrite).expect("it lies in the memory");
        let result = self.driver.add_indirect(at, &table, &descs[..count], self.next);
        self.added(1, room, result);
    }

    fn add_burst(&mut self, a: u8) {
        let free = self.free();
        let burst = (0..u64::from(a % 8)).map(|n| (Desc::writable(BASE, 8), self.next + n));
        match self.driver.add_burst(burst) {
            Ok(count) => {
                assert_eq!(count, usize::from(free.min(u16::from(a % 8))));
                (0..count).for_each(|_| self.added(1, 8, Ok(())));
            }
            Err(AddError::Broken(why)) => assert_eq!(self.driver.broken(), Some(why)),
            Err(other) => panic!("{other}"),
        }
    }

    fn publish(&mut self) {
        self.driver.publish();
        self.held.iter_mut().for_each(|held| held.published = true);
    }

    fn pop(&mut self, most: usize) {
        let mut out = vec![Used::default(); most];
        let before = self.driver.broken();
        match self.driver.pop_burst(&mut out) {
            Ok(count) => {
                assert!(before.is_none());
                assert!(self.device.is_none() || count == most.min(self.given.len()));
                for used in &out[..count] {
                    let is_it = |held: &Held| held.token == used.token;
                    let at = self.held.iter().position(is_it).expect("it is in flight");
                    let held = self.held.swap_remove(at);
                    assert!(held.published && used.len <= held.room);
                    let given = self.given.pop_front();
                    assert!(self.device.is_none() || given == Some(*used));
                }
            }
            Err(why) => {
                assert!(self.device.is_none(), "the device was honest: {why}");
                assert_eq!(self.driver.broken(), Some(why));
                assert!(before.is_none_or(|before| before == why), "it stays broken");
            }
        }
    }

    /// The honest device takes all that is published, and gives one chain back.
    fn give_back(&mut self, chain: &mut Chain, a: u8, b: u8) {
        let Some(device) = &mut self.device else { return };
        while device.pop(self.ram, chain).expect("the driver is honest") {
            // Chains are taken in the order in which they were added.
            let is_new = |held: &&Held| !self.taken.iter().any(|it| it.1 == held.token);
            let is_given = |held: &Held| self.given.iter().any(|it| it.token == held.token);
            let new = self.held.iter().filter(|held| is_new(held) && !is_given(held));
            let held = new.min_by_key(|held| held.token).expect("it was added");
            assert!(held.published);
            assert_eq!(chain.writable_len(), u64::from(held.room));
            self.taken.push((chain.head(), held.token, held.room));
        }
        if self.taken.is_empty() {
            return;
        }
        let (head, token, room) = self.taken.remove(usize::from(a) % self.taken.len());
        let len = u32::from(b).min(room);
        device.push_used(head, len);
        let _ = device.publish_used();
        self.given.push_back(Used { token, len });
    }

    fn free(&self) -> u16 {
        self.size - self.held.iter().map(|held| held.descs).sum::<u16>()
    }

    fn check(&self) {
        assert_eq!(self.driver.free_descs(), self.free());
        assert_eq!(usize::from(self.driver.in_flight()), self.held.len());
        assert!(self.device.is_none() || self.driver.broken().is_none());
    }
}
