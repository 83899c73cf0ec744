//! Bursts and peeks, in both formats.

use ringfence_mem::{Access, Translate};
use ringfence_virtq::{
    Chain, ChainFault, Desc, RingError, device,
    device::{Burst, Glimpse},
    driver, testing,
};

use crate::rig::{BASE, DATA, config, ram};

#[test]
fn a_burst_holds_what_single_calls_would_give() {
    for packed in [false, true] {
        let ram = ram();
        let size = if packed { 12 } else { 16 };
        let (mut driver, mut device) = testing::pair_of(&ram, BASE, config(size, packed));
        let table = ram.window(DATA + 0x1000, 64, Access::ReadWrite).unwrap();
        let three = [Desc::readable(DATA, 1), Desc::writable(DATA + 9, 4), Desc::writable(DATA, 2)];
        let mut burst = Burst::new();
        let mut out = [driver::Used::default(); 12];
        for round in 0..30 {
            let single = |at| (Desc::writable(DATA + at, 8), 100 + at);
            assert_eq!(driver.add_burst((0..3).map(single)), Ok(3));
            driver.add(&three, 200).unwrap();
            driver.add_indirect(DATA + 0x1000, &table, &three, 201).unwrap();
            assert_eq!(driver.add_burst([(Desc::readable(DATA, 0), 300)]), Ok(1));
            assert_eq!(device.pop_burst(&ram, 12, &mut burst), Ok(0), "not published");
            driver.publish();
            assert_eq!(device.pop_burst(&ram, 2, &mut burst), Ok(2));
            let mut heads: Vec<u16> = burst.iter().map(|taken| taken.head()).collect();
            assert_eq!(burst.descs(), [single(0).0, single(1).0]);
            assert_eq!(device.pop_burst(&ram, 100, &mut burst), Ok(4), "round {round}");
            assert_eq!((burst.len(), burst.is_empty()), (4, false));
            heads.extend(burst.iter().map(|taken| taken.head()));
            let chains: Vec<_> = burst.iter().collect();
            assert_eq!(chains[0].descs(), [single(2).0]);
            assert_eq!((chains[0].readable().len(), chains[0].writable().len()), (0, 1));
            for chain in &chains[1..3] {
                assert_eq!(chain.descs(), three);
                assert_eq!((chain.readable(), chain.writable()), (&three[..1], &three[1..]));
            }
            assert_eq!(burst.get(3).unwrap().readable(), [Desc::readable(DATA, 0)]);
            assert!(burst.get(4).is_none());
            assert_eq!(burst.descs().len(), 8);
            assert_eq!(device.pop_burst(&ram, 100, &mut burst), Ok(0));
            device.push_used_burst(heads.iter().map(|&head| (head, 0)));
            assert_eq!(driver.pop_burst(&mut out), Ok(0), "not published");
            let _ = device.publish_used();
            assert_eq!(driver.pop_burst(&mut out[..4]), Ok(4));
            assert_eq!(driver.pop_burst(&mut out[4..]), Ok(2));
            let tokens: Vec<u64> = out[..6].iter().map(|used| used.token).collect();
            assert_eq!(tokens, [100, 101, 102, 200, 201, 300]);
            assert_eq!(driver.free_descs(), size);
        }
        // No more is taken from the iterator than is added; the error names the refused buffer.
        let mut endless = (0..).map(|at| (Desc::readable(DATA + at, 1), at));
        assert_eq!(driver.add_burst(&mut endless), Ok(usize::from(size)));
        assert_eq!(endless.next().unwrap().1, u64::from(size));
        assert_eq!(driver.add_burst(&mut endless), Ok(0));
    }
}

#[test]
fn a_burst_that_is_not_given_back_grows_and_ends_before_what_is_at_fault() {
    for packed in [false, true] {
        let ram = ram();
        let (mut driver, mut device) = testing::pair_of(&ram, BASE, config(8, packed));
        let mut burst = Burst::new();
        let mut out = [driver::Used::default(); 8];
        let add = |driver: &mut driver::Queue, token: u64| {
            driver.add(&[Desc::readable(DATA + token, 1)], token).unwrap();
            driver.publish();
        };
        for round in 0..40 {
            add(&mut driver, 2 * round);
            assert_eq!(device.pop_more(&ram, 8, &mut burst), Ok(1));
            add(&mut driver, 2 * round + 1);
            assert_eq!(device.pop_more(&ram, 8, &mut burst), Ok(1));
            assert_eq!(device.pop_more(&ram, 8, &mut burst), Ok(0));
            // One chain stays from round to round.
            let kept = u64::from(round > 0);
            let addrs = burst.descs().into_iter().map(|desc| desc.addr - DATA);
            assert!(addrs.eq(2 * round - kept..2 * round + 2), "round {round}");
            let done = burst.len() - 1;
            device.push_used_burst(burst.heads().take(done).map(|head| (head, 0)));
            burst.forget(done);
            let _ = device.publish_used();
            assert_eq!(driver.pop_burst(&mut out), Ok(done));
            assert_eq!(usize::from(device.in_flight()), burst.len());
        }
        // A fault is reported when nothing comes before it, whatever the burst holds.
        let table = ram.window(DATA, 64, Access::ReadWrite).unwrap();
        driver.add_indirect(8, &table, &[Desc::readable(DATA, 1)], 99).unwrap();
        add(&mut driver, 100);
        assert!(device.pop_more(&ram, 8, &mut burst).is_err());
        assert_eq!(burst.len(), 1);
    }
}

#[test]
fn a_burst_ends_before_what_is_at_fault() {
    for packed in [false, true] {
        let ram = ram();
        let (mut driver, mut device) = testing::pair_of(&ram, BASE, config(8, packed));
        let (mut burst, mut chain) = (Burst::new(), Chain::new());
        let good = Desc::readable(DATA, 1);
        let table = ram.window(DATA, 64, Access::ReadWrite).unwrap();
        driver.add_burst([(good, 0), (good, 1)]).unwrap();
        // The device does not find the table yet; it may later.
        driver.add_indirect(8, &table, &[good], 2).unwrap();
        driver.add_burst([(good, 3)]).unwrap();
        driver.publish();
        assert_eq!(device.pop_burst(&ram, 8, &mut burst), Ok(2));
        for _ in 0..2 {
            let error = device.pop_burst(&ram, 8, &mut burst).unwrap_err();
            let fault = |fault| matches!(fault, ChainFault::IndirectUnreachable { addr: 8, .. });
            assert!(matches!(error, RingError::Chain { fault: f, .. } if fault(f)), "{error}");
            assert!(burst.is_empty() && device.broken().is_none());
        }
        assert!(device.pop(&ram, &mut chain).is_err());
        assert_eq!(device.in_flight(), 2);
        let refused = driver.add_burst([(good, 4), (Desc::readable(u64::MAX, 2), 5), (good, 6)]);
        assert_eq!(refused, Err(ringfence_virtq::AddError::Wraps { at: 1 }));
        assert_eq!(driver.in_flight(), 5);
    }
}

#[test]
fn peeking_shows_what_lies_ahead_and_changes_nothing() {
    for packed in [false, true] {
        let ram = ram();
        let (mut driver, mut device) = testing::pair_of(&ram, BASE, config(16, packed));
        let mut chain = Chain::new();
        let table = ram.window(DATA + 0x1000, 64, Access::ReadWrite).unwrap();
        let [read, write] = [Desc::readable(DATA, 100), Desc::writable(DATA + 500, 20)];
        driver.add(&[read], 0).unwrap();
        driver.add(&[read, write, write], 1).unwrap();
        driver.add_indirect(DATA + 0x1000, &table, &[read, write], 2).unwrap();
        driver.add_indirect(16, &table, &[read, write], 3).unwrap();
        driver.add(&[Desc::writable(u64::MAX, 5)], 4).unwrap_err();
        driver.add(&[write], 4).unwrap();
        driver.publish();
        assert!(device.pop(&ram, &mut chain).unwrap(), "the first is taken");
        let peek = |device: &mut device::Queue, ahead| {
            let mut seen = Vec::new();
            device.peek_from(&ram, 0, ahead, |glimpse| seen.push(glimpse));
            seen
        };
        let buffer = Glimpse::Buffer;
        let second = [buffer(read), buffer(write), buffer(write)];
        assert_eq!(peek(&mut device, 0), []);
        assert_eq!(peek(&mut device, 1), second);
        let table = |addr| Glimpse::Table { addr, len: 32 };
        let third = [table(DATA + 0x1000), buffer(read), buffer(write)];
        let fourth = [table(16), buffer(write)];
        for _ in 0..2 {
            let all = [&second[..], &third[..], &fourth[..]].concat();
            assert_eq!(peek(&mut device, u16::MAX), all, "a table that is not there is passed");
        }
        // Chains that were seen are skipped, and later ones are seen.
        let go_on = |device: &mut device::Queue, skip, ahead| {
            let mut seen = Vec::new();
            let next = device.peek_from(&ram, skip, ahead, |glimpse| seen.push(glimpse));
            (next, seen)
        };
        assert_eq!(go_on(&mut device, 0, 2), (2, [&second[..], &third[..]].concat()));
        assert_eq!(go_on(&mut device, 2, 64), (4, fourth.to_vec()));
        assert_eq!(go_on(&mut device, 4, 64), (4, vec![]));
        driver.add(&[read], 5).unwrap();
        driver.publish();
        assert_eq!(go_on(&mut device, 4, 64), (5, vec![buffer(read)]));
        assert_eq!((device.in_flight(), device.broken()), (1, None));
        assert!(device.pop(&ram, &mut chain).unwrap());
        assert_eq!(chain.descs(), [read, write, write]);
    }
}

#[test]
fn what_is_ready_is_about_what_was_published_and_not_taken() {
    for packed in [false, true] {
        let ram = ram();
        let size = if packed { 12 } else { 16 };
        let (mut driver, mut device) = testing::pair_of(&ram, BASE, config(size, packed));
        let (mut burst, mut out) = (Burst::new(), [driver::Used::default(); 16]);
        for round in 0..40 {
            let count = round % usize::from(size + 1);
            let buffers = (0..count as u64).map(|at| (Desc::readable(DATA, 1), at));
            assert_eq!(driver.add_burst(buffers), Ok(count));
            assert_eq!(device.ready(100), 0, "not published");
            driver.publish();
            let about = |device: &device::Queue, count: usize| {
                let ready = usize::from(device.ready(100));
                let least = if packed { count.div_ceil(2) } else { count };
                assert!((least..=count).contains(&ready), "{ready} of {count}, round {round}");
            };
            about(&device, count);
            let taken = device.pop_burst(&ram, count / 3, &mut burst).unwrap();
            about(&device, count - taken);
            device.push_used_burst(burst.heads().map(|head| (head, 0)));
            assert_eq!(device.pop_burst(&ram, count, &mut burst), Ok(count - taken));
            assert_eq!(device.ready(100), 0);
            device.push_used_burst(burst.heads().map(|head| (head, 0)));
            let _ = device.publish_used();
            assert_eq!(driver.pop_burst(&mut out), Ok(count));
        }
    }
    // An arbitrary index is believed no further than the ring is long, and breaks nothing here.
    let ram = ram();
    let (_, device) = testing::pair(&ram, BASE, 8, true);
    ram.write(device.config().avail + 2, &0x9999_u16.to_le_bytes()).unwrap();
    assert_eq!((device.ready(100), device.broken()), (8, None));
    assert_eq!(device.ready(3), 3);
}

#[test]
fn peeking_is_bounded_whatever_lies_there() {
    for packed in [false, true] {
        let ram = ram();
        let (mut driver, mut device) = testing::pair_of(&ram, BASE, config(1024, packed));
        let table = ram.window(DATA, 64, Access::ReadWrite).unwrap();
        // Each table has far more entries than its length states.
        for token in 0..100 {
            driver.add_indirect(DATA, &table, &[Desc::readable(DATA, 1)], token).unwrap();
        }
        driver.publish();
        for at in 0..100 {
            ram.write(BASE + 16 * at + 8, &(1024_u32 * 16).to_le_bytes()).unwrap();
        }
        let mut seen = 0;
        device.peek_from(&ram, 0, u16::MAX, |_| seen += 1);
        assert!(seen > 500 && seen <= 2 * device::PEEK_DESCS, "{seen}");
    }
    // A chain that loops, and an arbitrary index.
    let ram = ram();
    let (_, mut device) = testing::pair(&ram, BASE, 8, true);
    ram.write(BASE + 12, &1_u16.to_le_bytes()).unwrap();
    ram.write(device.config().avail + 2, &0x9999_u16.to_le_bytes()).unwrap();
    let mut seen = 0;
    let mut skip = device.peek_from(&ram, 0, u16::MAX, |_| seen += 1);
    assert_eq!((seen, device.broken()), (device::PEEK_DESCS, None));
    // Repeated calls come to an end.
    for _ in 0..8 {
        skip = device.peek_from(&ram, skip, u16::MAX, |_| seen += 1);
    }
    assert_eq!(device.peek_from(&ram, skip, u16::MAX, |_| panic!("seen before")), skip);
}
