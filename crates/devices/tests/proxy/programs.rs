//! Random programs of a VMM before the proxy, whose guest goes on all the time: it stops the ring and
//! starts it, resets the device, takes memory away and gives it back, logs what is written, has what is in
//! flight unmapped and mapped elsewhere, and hangs up and begins anew, with what was in flight on record.
//! Each byte of its buffers' memory is judged, and each page of that which was written to is in the log.

use std::{
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use proptest::{collection::vec, prelude::*};
use ringfence_devices::proxy::{Connector, ProxyOptions};
use ringfence_iotlb::IotlbConfig;
use ringfence_mem::SharedFile;
use ringfence_run::PeerFd;
use ringfence_vhost_user::{
    F_LOG_ALL, F_PROTOCOL_FEATURES, Iotlb,
    msg::{Inflight, Request},
};

use crate::{
    F_EVENT_IDX, F_INDIRECT, F_PACKED, Far, RING_BYTES, Script,
    guest::{DATA, FIRST, Guest, LONG, RING_PAGES, SIZE, update},
};

const PAGE: u64 = 4096;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Submits so many chains, and takes back what there is.
    Submit(u8),
    /// The back end uses nothing from now on.
    Silence,
    /// It uses all that it has.
    Speak,
    /// The ring is stopped, and started where it was.
    Stop,
    /// The ring is disabled for a moment.
    Pause,
    Reset,
    /// The connection ends, and another begins.
    HangUp,
    /// The second region of memory goes, or comes back.
    Memory,
    /// What is written is logged from now on, or no longer.
    Log,
    /// A page that the back end has, and not written to, is mapped elsewhere.
    Remap,
}

#[derive(Clone, Debug)]
struct Setup {
    /// The features of the guest's ring and of the back end's.
    front: u64,
    back: u64,
    /// Whether there is an IOMMU in front of the proxy.
    translated: bool,
    /// Whether the VMM keeps a record of what is in flight.
    recorded: bool,
    seed: u64,
}

fn setup() -> impl Strategy<Value = Setup> {
    let ring = || {
        (any::<bool>(), any::<bool>()).prop_map(|(events, packed)| {
            (u64::from(events) * F_EVENT_IDX) | (u64::from(packed) * F_PACKED)
        })
    };
    // Tables are offered only if the back end takes them.
    (ring(), ring(), 0..3u32, any::<[bool; 2]>(), 0..u64::MAX / 2).prop_map(
        |(front, back, tables, [translated, recorded], seed)| {
            let front = front | (u64::from(tables > 1) * F_INDIRECT);
            let back = back | (u64::from(tables > 0) * F_INDIRECT);
            Setup { front, back, translated, recorded, seed }
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (1..8u8).prop_map(Step::Submit),
        3 => Just(Step::Silence),
        3 => Just(Step::Speak),
        2 => Just(Step::Stop),
        1 => Just(Step::Pause),
        1 => Just(Step::Reset),
        2 => Just(Step::HangUp),
        1 => Just(Step::Memory),
        1 => Just(Step::Log),
        4 => Just(Step::Remap),
    ]
}

struct Vmm {
    far: Far,
    connector: Arc<Connector>,
    setup: Setup,
    guest: Guest,
    record: Option<(Inflight, PeerFd)>,
    log: Option<SharedFile>,
    /// Whether there may be chains in flight that an earlier process had taken.
    again: bool,
    /// The pages in the second region, while that is away.
    away: Vec<usize>,
}

impl Vmm {
    fn new(setup: &Setup) -> Vmm {
        let far = Far::new(setup.back);
        let connector = far.connector();
        let guest = Guest::apart(setup.front, setup.seed);
        let (record, log, again, away) = (None, None, false, Vec::new());
        let mut vmm = Vmm { far, connector, setup: setup.clone(), guest, record, log, again, away };
        vmm.connect();
        vmm.new_record();
        vmm.guest.announce();
        vmm.guest.start(vmm.guest.position());
        vmm
    }

    fn connect(&mut self) {
        let again = Duration::from_millis(5);
        let config = IotlbConfig { timeout: LONG, again, ..IotlbConfig::default() };
        let iotlb = self.setup.translated.then_some(config);
        let options = ProxyOptions { pool_size: 1 << 20, iotlb, ..ProxyOptions::new("proxy", 1) };
        self.guest.connect(&self.connector, options);
    }

    fn new_record(&mut self) {
        if self.setup.recorded {
            self.record = self.guest.main().inflight(1, SIZE).unwrap();
            self.set_record();
        }
    }

    fn set_record(&mut self) {
        if let Some((place, file)) = &self.record {
            self.guest.main().request(Request::SetInflight(*place), &[file.as_fd()]).unwrap();
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Submit(count) => {
                for _ in 0..count {
                    self.guest.submit();
                }
                self.guest.publish();
                self.guest.reap(true);
            }
            Step::Silence if !self.guest.silent => {
                // Nothing that it has used waits for a translation.
                self.guest.wait(0, true);
                self.far.obeys(Script::Silent);
                self.guest.silent = true;
            }
            Step::Silence => {}
            Step::Speak => self.speak(),
            Step::Stop => self.stop(),
            Step::Pause => {
                self.guest.disable();
                self.guest.reap(true);
                self.guest.main().set_vring_enable(0, true).unwrap();
            }
            Step::Reset => {
                self.guest.reap(true);
                self.end_log();
                self.guest.reset();
                self.new_record();
                self.guest.start(self.guest.position());
            }
            Step::HangUp => self.hang_up(),
            Step::Memory => self.change_memory(),
            Step::Log if self.log.is_some() => self.end_log(),
            Step::Log => self.begin_log(),
            Step::Remap => self.remap(),
        }
        self.again &= self.guest.in_flight() > 0;
        self.guest.check();
        self.check_log();
    }

    fn stop(&mut self) {
        if !self.guest.silent {
            // No update comes while the ring stops.
            self.guest.wait(0, true);
        }
        self.again &= self.guest.in_flight() > 0;
        let base = self.guest.base();
        self.guest.reap(true);
        let Some(base) = base else {
            // Another host cannot go on with what an earlier process had taken. This one can.
            assert!(self.log.is_some() && self.again, "where it goes on");
            self.log = None;
            return self.hang_up();
        };
        if !self.again {
            assert_eq!(base, self.guest.position());
        }
        self.guest.start(base);
    }

    fn speak(&mut self) {
        self.guest.speaks();
        self.far.obeys(Script::Honest);
    }

    /// Without a record, what is in flight would be lost.
    fn hang_up(&mut self) {
        if self.record.is_none() {
            self.speak();
            self.guest.wait(0, true);
        }
        self.end_log();
        self.guest.hang_up();
        self.guest.reap(true);
        self.again = self.guest.in_flight() > 0;
        self.connect();
        self.set_record();
        self.guest.announce();
        self.guest.free.append(&mut self.away);
        self.guest.start(self.guest.position());
    }

    fn change_memory(&mut self) {
        let [_, second] = self.guest.regions();
        let ram = Arc::clone(&self.guest.ram);
        if !self.away.is_empty() {
            self.guest.main().request(Request::AddMemReg(second), &[ram.fd()]).unwrap();
            self.guest.free.append(&mut self.away);
            return;
        }
        // A driver has given up what it had there, and its IOMMU unmapped it.
        self.speak();
        self.guest.wait(0, true);
        let table = self.guest.table.lock().clone();
        let lies_there = |&page: &usize| table[page].is_some_and(|to| to >= FIRST - RING_PAGES);
        let (away, free) = self.guest.free.drain(..).partition(lies_there);
        (self.away, self.guest.free) = (away, free);
        for at in 0..self.away.len() {
            self.invalidate(self.away[at]);
        }
        self.guest.main().request(Request::RemMemReg(second), &[]).unwrap();
    }

    fn invalidate(&mut self, page: usize) {
        if self.setup.translated {
            let first = self.guest.ram.gpa() + (RING_PAGES + page) as u64 * PAGE;
            let last = first + (PAGE - 1);
            self.guest.main().iotlb(&Iotlb::Invalidate { first, last }).unwrap();
        }
    }

    /// Two pages change places, one of which a chain in flight is to have.
    fn remap(&mut self) {
        if !self.setup.translated {
            return;
        }
        let Some(busy) = self.guest.untouched() else { return };
        let at = self.guest.random(self.guest.free.len().max(1));
        let Some(&free) = self.guest.free.get(at) else { return };
        let mut table = self.guest.table.lock();
        let places = [busy, free].map(|page| table[page].take());
        drop(table);
        [busy, free].into_iter().for_each(|page| self.invalidate(page));
        let mut table = self.guest.table.lock();
        (table[busy], table[free]) = (places[1], places[0]);
        drop(table);
        if self.guest.random(2) == 0 {
            let to = places[1].expect("it was mapped");
            let update = update(&self.guest.ram, RING_PAGES + busy, RING_PAGES + to, 1);
            self.guest.main().iotlb(&update).unwrap();
        }
    }

    fn set_log(&mut self, on: bool) {
        let features = self.guest.features() | F_PROTOCOL_FEATURES;
        let features = features | if on { F_LOG_ALL } else { 0 };
        self.guest.main().set_features(features).unwrap();
    }

    fn begin_log(&mut self) {
        let pages = self.guest.ram.gpa() / PAGE + (RING_PAGES + DATA) as u64;
        let (log, file) = SharedFile::create(pages.div_ceil(8) as usize).unwrap();
        let place = Request::SetLogBase { len: log.len() as u64, offset: 0 };
        self.guest.main().request(place, &[file.as_fd()]).unwrap();
        self.set_log(true);
        self.guest.is_logged();
        self.log = Some(log);
    }

    fn end_log(&mut self) {
        if self.log.is_some() {
            self.guest.reap(true);
            self.check_log();
            self.set_log(false);
            self.log = None;
        }
    }

    fn check_log(&mut self) {
        let written = std::mem::take(&mut self.guest.written);
        let Some(log) = &self.log else { return };
        let first = self.guest.ram.gpa() / PAGE + RING_PAGES as u64;
        for page in written {
            let at = first as usize + page;
            let byte = log.u8_at(at / 8).load(Ordering::Relaxed);
            assert!(
                byte & (1 << (at % 8)) != 0,
                "page {page} was written to and is not in the log"
            );
        }
    }

    fn finish(mut self) {
        self.speak();
        self.guest.wait(0, true);
        self.guest.check();
        self.check_log();
        let bytes = self.far.seen.bytes();
        assert!(
            bytes[RING_BYTES..].iter().all(|&byte| byte == 0),
            "what is over stays in the pool"
        );
        assert!(!Guest::is_seen_in(&bytes));
        self.guest.hang_up();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_vmm_does_anything_in_any_order(setup in setup(), steps in vec(step(), 60)) {
        let mut vmm = Vmm::new(&setup);
        steps.into_iter().for_each(|step| vmm.take(step));
        vmm.finish();
    }
}
