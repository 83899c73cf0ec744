//! A peer that breaks one rule at a time: the error reports which, and where.

use ringfence_mem::Translate;
use ringfence_virtq::{
    Chain, ChainFault, Desc, RingError, device, driver,
    layout::{self, DESC_F_INDIRECT as INDIRECT, DESC_F_NEXT as NEXT, DESC_F_WRITE as WRITE},
    testing,
};

use crate::rig::{self, RAW as BASE, TABLE};

const SIZE: u16 = 8;

/// A device's end whose rings the test writes by hand.
struct Bench {
    ram: testing::Ram,
    config: device::RingConfig,
    queue: device::Queue,
    chain: Chain,
}

impl Bench {
    fn new() -> Bench {
        let ram = testing::Ram::new(BASE, 0x10000);
        let (_, config) = testing::areas(&ram, BASE, SIZE, true);
        let queue = device::Queue::new(config, &ram).unwrap();
        Bench { ram, config, queue, chain: Chain::new() }
    }

    /// Writes a descriptor into the table at `table`.
    fn desc(&self, table: u64, at: u16, addr: u64, len: u32, flags: u16, next: u16) {
        rig::write(&self.ram, table, at, (addr, len, flags, next));
    }

    /// Makes heads available from index 0 on.
    fn avail(&self, heads: &[u16]) {
        for (at, head) in heads.iter().enumerate() {
            self.ram.write(self.config.avail + 4 + 2 * at as u64, &head.to_le_bytes()).unwrap();
        }
        self.idx(heads.len() as u16);
    }

    fn idx(&self, idx: u16) {
        self.ram.write(self.config.avail + 2, &idx.to_le_bytes()).unwrap();
    }

    fn pop(&mut self) -> Result<bool, RingError> {
        self.queue.pop(&self.ram, &mut self.chain)
    }

    /// The fault of the chain that begins at descriptor 0; the queue must stay broken.
    fn fault(&mut self) -> ChainFault {
        self.avail(&[0]);
        let error = self.pop().unwrap_err();
        assert!(self.chain.descs().is_empty());
        let RingError::Chain { index: 0, head: 0, fault } = error else { panic!("{error}") };
        self.desc(self.config.desc, 0, 0, 0, 0, 0);
        if !matches!(fault, ChainFault::IndirectUnreachable { .. }) {
            assert_eq!(self.pop(), Err(error), "it stays broken");
            assert_eq!(self.queue.broken(), Some(error));
            assert_eq!(self.queue.revalidate(&self.ram), Err(error));
            assert!(self.queue.enable_kicks(), "a device that sleeps now would miss the error");
        }
        fault
    }
}

/// The fault of a chain of such descriptors (address 0x100, then flags, next and length), and of
/// such an indirect table at `TABLE`.
fn fault(descs: &[(u16, u16, u32)], table: &[(u16, u16, u32)]) -> ChainFault {
    let mut bench = Bench::new();
    for (at, &(flags, next, len)) in descs.iter().enumerate() {
        let addr = if flags & INDIRECT != 0 { TABLE } else { 0x100 };
        bench.desc(bench.config.desc, at as u16, addr, len, flags, next);
    }
    for (at, &(flags, next, len)) in table.iter().enumerate() {
        bench.desc(TABLE, at as u16, 0x100, len, flags, next);
    }
    bench.fault()
}

#[test]
fn a_chain_that_loops_is_refused() {
    assert_eq!(fault(&[(NEXT, 0, 1)], &[]), ChainFault::Loop { entries: 8 });
    let long = [(NEXT, 1, 1), (NEXT, 2, 1), (NEXT, 1, 1)];
    assert_eq!(fault(&long, &[]), ChainFault::Loop { entries: 8 });
    let table = [(NEXT, 1, 1), (NEXT, 0, 1)];
    assert_eq!(fault(&[(INDIRECT, 0, 32)], &table), ChainFault::Loop { entries: 2 });
}

#[test]
fn a_chain_as_long_as_its_table_is_taken() {
    let mut bench = Bench::new();
    for at in 0..SIZE {
        let more = if at + 1 < SIZE { NEXT } else { 0 };
        bench.desc(bench.config.desc, at, at.into(), 0, more, at + 1);
    }
    bench.avail(&[0]);
    assert_eq!(bench.pop(), Ok(true));
    assert_eq!(bench.chain.descs().len(), 8);
}

#[test]
fn a_head_or_next_outside_of_its_table_is_refused() {
    let next = ChainFault::Next { at: 0, next: 8, entries: 8 };
    assert_eq!(fault(&[(NEXT, 8, 1)], &[]), next);
    let next = ChainFault::Next { at: 1, next: 2, entries: 2 };
    assert_eq!(fault(&[(INDIRECT, 0, 32)], &[(NEXT, 1, 1), (NEXT, 2, 1)]), next);
    let mut bench = Bench::new();
    bench.avail(&[8]);
    let error = bench.pop().unwrap_err();
    let text = "chain at available index 0, head 8: the queue has 8 descriptors";
    assert_eq!(error.to_string(), text);
}

#[test]
fn an_indirect_descriptor_is_held_to_its_rules() {
    assert_eq!(fault(&[(INDIRECT | NEXT, 1, 32)], &[]), ChainFault::IndirectNext { at: 0 });
    assert_eq!(fault(&[(INDIRECT, 0, 16)], &[(INDIRECT, 0, 16)]), ChainFault::Nested { at: 0 });
    let too_long = u32::from(layout::MAX_INDIRECT) * 16 + 16;
    for len in [0, 1, 15, 17, too_long, u32::MAX, u32::MAX - 15] {
        let fault = fault(&[(NEXT, 1, 4), (INDIRECT, 0, len)], &[]);
        assert_eq!(fault, ChainFault::IndirectLength { at: 1, len });
    }
    let mut bench = Bench::new();
    bench.queue =
        device::Queue::new(device::RingConfig { indirect: false, ..bench.config }, &bench.ram)
            .unwrap();
    bench.desc(bench.config.desc, 0, TABLE, 16, INDIRECT, 0);
    assert_eq!(bench.fault(), ChainFault::NotNegotiated { at: 0 });
}

#[test]
fn a_table_after_buffers_is_taken_whatever_its_write_flag_says() {
    let mut bench = Bench::new();
    bench.desc(bench.config.desc, 0, 1, 1, NEXT, 3);
    bench.desc(bench.config.desc, 3, TABLE, 32, INDIRECT | WRITE, 0);
    bench.desc(TABLE, 0, 2, 2, NEXT, 1);
    bench.desc(TABLE, 1, 3, 3, WRITE, 0);
    bench.avail(&[0]);
    assert_eq!(bench.pop(), Ok(true));
    let descs = [Desc::readable(1, 1), Desc::readable(2, 2), Desc::writable(3, 3)];
    assert_eq!(bench.chain.descs(), descs);
}

#[test]
fn a_table_that_cannot_be_reached_leaves_the_chain_for_later() {
    let mut bench = Bench::new();
    bench.desc(bench.config.desc, 0, 0x10, 16, INDIRECT, 0);
    assert!(matches!(bench.fault(), ChainFault::IndirectUnreachable { addr: 0x10, .. }));
    assert_eq!((bench.queue.broken(), bench.queue.next_avail()), (None, 0));
    // `fault` has put a legal descriptor in its place: as if the translation had come.
    assert_eq!(bench.pop(), Ok(true));
    assert_eq!(bench.chain.head(), 0);
}

#[test]
fn readable_after_writable_is_refused() {
    let fault_of = fault(&[(WRITE | NEXT, 1, 1), (0, 0, 1)], &[]);
    assert_eq!(fault_of, ChainFault::Order { at: 1 });
    let fault_of = fault(&[(WRITE | NEXT, 1, 1), (INDIRECT, 0, 16)], &[(0, 0, 1)]);
    assert_eq!(fault_of, ChainFault::Order { at: 0 });
}

#[test]
fn lengths_that_do_not_add_up_are_refused() {
    let fault_of = fault(&[(NEXT, 1, u32::MAX), (WRITE, 0, 1)], &[]);
    assert_eq!(fault_of, ChainFault::TooLong { total: 1 << 32 });
    let mut bench = Bench::new();
    bench.desc(bench.config.desc, 0, u64::MAX, 2, 0, 0);
    assert_eq!(bench.fault(), ChainFault::Wraps { at: 0, addr: u64::MAX, len: 2 });
    // The last byte of the address space, and no bytes after it, are valid addresses.
    let mut bench = Bench::new();
    bench.desc(bench.config.desc, 0, u64::MAX, 0, NEXT, 1);
    bench.desc(bench.config.desc, 1, u64::MAX - 0xffff_fffe, u32::MAX, WRITE, 0);
    bench.avail(&[0]);
    assert_eq!(bench.pop(), Ok(true));
    assert_eq!(bench.chain.writable_len(), u64::from(u32::MAX));
}

#[test]
fn an_available_index_that_jumps_is_refused() {
    for idx in [9, 0x8000, 0xffff] {
        let mut bench = Bench::new();
        bench.idx(idx);
        let error = RingError::AvailJump { next: 0, idx, in_flight: 0, size: 8 };
        assert_eq!(bench.pop(), Err(error));
        bench.idx(1);
        assert_eq!(bench.pop(), Err(error), "it stays broken");
    }
    // Nor may it overtake those in flight.
    let mut bench = Bench::new();
    bench.avail(&[0, 1, 2]);
    assert_eq!((bench.pop(), bench.pop(), bench.pop()), (Ok(true), Ok(true), Ok(true)));
    bench.queue.push_used(1, 0);
    bench.idx(10);
    let error = bench.pop().unwrap_err();
    let text = "available index 10 at 3: 2 in flight, the queue holds 8";
    assert_eq!(error.to_string(), text);
    // Chains that were taken before can still be given back.
    bench.queue.push_used(0, 0);
    let _ = bench.queue.publish_used();
}

#[test]
fn a_head_in_flight_is_not_taken_again() {
    let mut bench = Bench::new();
    bench.avail(&[4, 4]);
    assert_eq!(bench.pop(), Ok(true));
    let fault = ChainFault::InFlight;
    assert_eq!(bench.pop(), Err(RingError::Chain { index: 1, head: 4, fault }));
}

#[test]
fn a_device_that_gives_back_what_it_has_not_breaks_the_drivers_queue() {
    let used = |idx: u16, id: u32, len: u32| {
        let ram = testing::Ram::new(BASE, 0x10000);
        let (mut queue, device) = testing::pair(&ram, BASE, SIZE, false);
        queue.add(&[Desc::readable(0, 4), Desc::writable(4, 4)], 5).unwrap();
        queue.publish();
        queue.add(&[Desc::writable(8, 8)], 6).unwrap();
        let ring = device.config().used;
        ram.write(ring + 4, &id.to_le_bytes()).unwrap();
        ram.write(ring + 8, &len.to_le_bytes()).unwrap();
        ram.write(ring + 2, &idx.to_le_bytes()).unwrap();
        let result = queue.pop();
        if let Err(error) = result {
            ram.write(ring + 2, &[0, 0]).unwrap();
            assert_eq!(queue.pop(), Err(error), "it stays broken");
            assert_eq!(queue.broken(), Some(error));
            let refused = ringfence_virtq::AddError::Broken(error);
            assert_eq!(queue.add(&[Desc::readable(0, 4)], 7), Err(refused));
            assert!(queue.enable_notifications());
        }
        result.map_err(|error| error.to_string())
    };
    assert_eq!(used(1, 0, 4), Ok(Some(driver::Used { token: 5, len: 4 })));
    let error = |text: &str| Err(text.to_owned());
    assert_eq!(used(2, 0, 0), error("used index 2 at 0: only 1 in flight"));
    assert_eq!(used(0xffff, 0, 0), error("used index 65535 at 0: only 1 in flight"));
    assert_eq!(used(1, 8, 0), error("used index 0: id 8 in a queue of 8"));
    assert_eq!(used(1, 0x1_0000, 0), error("used index 0: id 65536 in a queue of 8"));
    assert_eq!(used(1, 1, 0), error("used index 0: id 1 is not in flight"), "no head");
    assert_eq!(used(1, 2, 0), error("used index 0: id 2 is not in flight"), "not published");
    assert_eq!(used(1, 7, 0), error("used index 0: id 7 is not in flight"), "free");
    let text = "used index 0: 5 bytes written to id 0, which has room for 4";
    assert_eq!(used(1, 0, 5), error(text));
}

/// Such as rust-vmm's console.
#[test]
fn a_device_may_report_what_it_has_read_where_there_is_nothing_to_write() {
    for packed in [false, true] {
        let ram = testing::Ram::new(BASE, 0x10000);
        let (mut queue, mut device) = testing::pair_of(&ram, BASE, rig::config(SIZE, packed));
        queue.add(&[Desc::readable(0, 4)], 5).unwrap();
        queue.publish();
        let mut chain = Chain::new();
        assert_eq!(device.pop(&ram, &mut chain), Ok(true));
        device.push_used(chain.head(), 4);
        let _ = device.publish_used();
        assert_eq!(queue.pop(), Ok(Some(driver::Used { token: 5, len: 0 })));
    }
}
