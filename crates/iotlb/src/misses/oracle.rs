//! Accesses through the list, against a front end whose pages are smaller than ours.

use std::collections::{HashSet, VecDeque};

use proptest::prelude::*;

use super::*;

const TIMES: Times = Times { again_ns: 8, refused_ns: 8 };

/// Of the addresses that are accessed.
const BYTES: u64 = 2 * PAGE;

#[derive(Clone, Debug)]
enum Step {
    /// One that is not waiting begins to access this address.
    Begin {
        access: usize,
        iova: u64,
        numbered: bool,
    },
    Look {
        access: usize,
        sends: bool,
    },
    /// The front end answers a miss, or loses it.
    Answer {
        miss: usize,
        lost: bool,
    },
    /// The next message of the front end arrives, or any of its replies.
    Deliver {
        reply: Option<usize>,
    },
    Map {
        iova: u64,
        mapped: bool,
    },
    /// The IOTLB makes room.
    Evict {
        iova: u64,
    },
    Wait {
        ns: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let (access, iova, any_bool) = (0..4usize, 0..BYTES, any::<bool>);
    prop_oneof![
        3 => (access.clone(), iova.clone(), any_bool())
            .prop_map(|(access, iova, numbered)| Step::Begin { access, iova, numbered }),
        4 => (access, 0..8u8).prop_map(|(access, of)| Step::Look { access, sends: of > 0 }),
        3 => (0..4usize, 0..4u8).prop_map(|(miss, of)| Step::Answer { miss, lost: of == 0 }),
        3 => proptest::option::of(0..4usize).prop_map(|reply| Step::Deliver { reply }),
        1 => (iova.clone(), any_bool()).prop_map(|(iova, mapped)| Step::Map { iova, mapped }),
        1 => iova.prop_map(|iova| Step::Evict { iova }),
        2 => (1..=TIMES.again_ns).prop_map(|ns| Step::Wait { ns }),
    ]
}

struct Access {
    prot: Prot,
    waiter: Arc<Waiter>,
    /// Its address, since when it waits by the count of misses, and whether it may be refused.
    waits: Option<(u64, Option<u64>, bool)>,
    /// When it looked last, and how often its waiter had been woken before.
    looked: (u64, u64),
}

/// What the front end sends in this order, about its pages.
enum Message {
    Update(u64),
    Invalidate(u64),
    Refuse(Range, Prot),
}

struct World {
    misses: Misses,
    now_ns: u64,
    /// The front end's pages: their size, which of them are mapped and were ever unmapped, and which are
    /// in the IOTLB.
    size: u64,
    mapped: u64,
    unmapped: u64,
    arrived: HashSet<u64>,
    /// On their way to the front end, and from it.
    sent: Vec<Miss>,
    messages: VecDeque<Message>,
    /// Refusals of misses that were sent again.
    replies: Vec<Miss>,
    accesses: Vec<Access>,
}

impl World {
    fn is_mapped(&self, iova: u64) -> bool {
        self.mapped & 1 << (iova / self.size) != 0
    }

    /// Looks once; `sends`: there is room for a miss on the way to the front end.
    fn look(&mut self, access: usize, sends: bool) {
        let (now_ns, size, arrived) = (self.now_ns, self.size, &self.arrived);
        let Access { prot, waiter, waits, looked } = &mut self.accesses[access];
        *looked = (now_ns, waiter.updates());
        let &mut Some((iova, since, may_fail)) = waits else { return };
        let there = |iova: Iova| arrived.contains(&(iova.0 / size));
        if there(Iova(iova)) {
            *waits = None;
        } else if self.misses.is_refused((Iova(iova), *prot), since, waiter, || now_ns) {
            assert!(may_fail, "{iova:#x} was refused");
            *waits = None;
        } else {
            let mut wanted = vec![Miss { iova: Iova(iova), access: *prot, again: None }];
            self.misses.note(&mut wanted, waiter, now_ns, |miss| there(miss.iova));
            match sends {
                true => self.sent.append(&mut wanted),
                false => self.misses.unsent(&wanted),
            }
        }
    }

    /// Answers as front ends do: by an update, a refusal of the whole page, or a reply.
    fn answer(&mut self, miss: Miss) {
        let page = miss.page() * PAGE;
        let pages = Range::from_len(Iova(page), PAGE).unwrap();
        let mut in_page = (page..page + PAGE).step_by(self.size as usize);
        if self.is_mapped(miss.iova.0) {
            self.messages.push_back(Message::Update(miss.iova.0 / self.size));
        } else if miss.again.is_some() {
            self.replies.push(miss);
        } else if !in_page.any(|iova| self.is_mapped(iova)) {
            self.messages.push_back(Message::Refuse(pages, miss.access));
        }
    }

    fn deliver(&mut self) {
        match self.messages.pop_front() {
            Some(Message::Update(page)) => {
                self.arrived.insert(page);
                let range = Range::from_len(Iova(page * self.size), self.size).unwrap();
                self.misses.update(range, Prot::RW);
            }
            Some(Message::Invalidate(page)) => _ = self.arrived.remove(&page),
            Some(Message::Refuse(range, access)) => {
                self.misses.refuse(range, access, None, self.now_ns);
            }
            None => {}
        }
    }

    fn reply(&mut self, at: usize) {
        if at < self.replies.len() {
            let Miss { iova, access, again } = self.replies.swap_remove(at);
            self.misses.refuse(point(iova), access, again, self.now_ns);
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Begin { access, iova, numbered } => {
                let since = numbered.then(|| self.misses.count());
                // To those without a number, what was refused a moment ago is refused.
                let page = 1 << (iova / self.size);
                let may_fail = !self.is_mapped(iova) || !numbered && self.unmapped & page != 0;
                self.accesses[access].waits.get_or_insert((iova, since, may_fail));
            }
            Step::Look { access, sends } => self.look(access, sends),
            Step::Answer { miss, lost } => {
                if miss < self.sent.len() {
                    let miss = self.sent.swap_remove(miss);
                    if !lost || miss.again.is_some() {
                        self.answer(miss);
                    }
                }
            }
            Step::Deliver { reply: None } => self.deliver(),
            Step::Deliver { reply: Some(at) } => self.reply(at),
            Step::Map { iova, mapped: true } => {
                // What `Iotlb::refuse` demands of a front end.
                while self.messages.iter().any(|message| matches!(message, Message::Refuse(..))) {
                    self.deliver();
                }
                self.mapped |= 1 << (iova / self.size);
            }
            Step::Map { iova, mapped: false } => {
                let page = iova / self.size;
                self.mapped &= !(1 << page);
                self.unmapped |= 1 << page;
                self.messages.push_back(Message::Invalidate(page));
                let waits = self.accesses.iter_mut().filter_map(|access| access.waits.as_mut());
                waits
                    .filter(|(iova, ..)| iova / self.size == page)
                    .for_each(|(.., may_fail)| *may_fail = true);
            }
            Step::Evict { iova } => _ = self.arrived.remove(&(iova / self.size)),
            Step::Wait { ns } => self.now_ns += ns,
        }
    }
}

proptest! {
    /// Each access ends, as its own address has it, however slowly the threads look; they look when they
    /// are woken, and otherwise as often as `Times` has it.
    // rule D16
    // rule D18
    #[test]
    fn an_access_ends_as_its_own_address_has_it(
        shift in 9..=12u32,
        mapped: u64,
        most in 2..6usize,
        steps in proptest::collection::vec(step(), 0..120),
    ) {
        let waiters = [(); 3].map(|()| Waiter::new(Box::new(|| ())));
        // The last two share a waiter, as two chains of a queue do.
        let accesses = [(0, Prot::READ), (1, Prot::READ), (2, Prot::READ), (2, Prot::WRITE)];
        let accesses = accesses.map(|(waiter, prot)| {
            Access { prot, waiter: Arc::clone(&waiters[waiter]), waits: None, looked: (0, 0) }
        });
        let mut world = World {
            misses: Misses::new(most, TIMES, 7),
            now_ns: 0,
            size: 1 << shift,
            mapped,
            unmapped: !mapped,
            arrived: HashSet::new(),
            sent: Vec::new(),
            messages: VecDeque::new(),
            replies: Vec::new(),
            accesses: accesses.into(),
        };
        for step in steps {
            world.step(step);
            prop_assert!(world.misses.listed() <= most);
        }
        // From now on all is answered at once.
        for _ in 0..10 * TIMES.again_ns {
            world.now_ns += 1;
            std::mem::take(&mut world.sent).into_iter().for_each(|miss| world.answer(miss));
            while !world.messages.is_empty() {
                world.deliver();
            }
            while !world.replies.is_empty() {
                world.reply(0);
            }
            for access in 0..world.accesses.len() {
                let Access { waiter, looked: (at_ns, updates), .. } = &world.accesses[access];
                if waiter.updates() != *updates || world.now_ns + 1 >= at_ns + TIMES.again_ns {
                    world.look(access, true);
                }
            }
        }
        let waits = world.accesses.iter().filter_map(|access| access.waits);
        prop_assert_eq!(waits.collect::<Vec<_>>(), []);
    }
}
