//! Misses with updates that are late, in any order, missing, or for another access.

use std::time::Duration;

use proptest::{prelude::Rng, test_runner::TestRunner};
use ringfence_iotlb::IotlbConfig;
use ringfence_mem::{Access, Window};
use ringfence_virtq::{
    blk::Kind,
    layout::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE},
};

use super::*;

/// A request with its header, data and status on pages of their own, as a Linux guest's.
struct Fresh {
    pages: Vec<usize>,
    data: Window,
    status: Window,
}

impl Fresh {
    /// Lays one out in descriptors `at` and on, or in an indirect table on a page of its own.
    fn lay(
        behind: &mut Behind,
        queue: &RawQueue,
        at: u16,
        kind: Kind,
        sector: u64,
        table: bool,
    ) -> Fresh {
        let [header, data, status] = [(); 3].map(|()| behind.mapped());
        let bytes = [u64::from(kind.code()), sector].map(u64::to_le_bytes).concat();
        header.1.write(0, &bytes);
        status.1.write(0, &[0xee]);
        let write = if kind == Kind::In { DESC_F_WRITE } else { 0 };
        let descs = [
            desc_bytes(iova(header.0), 16, DESC_F_NEXT, at + 1),
            desc_bytes(iova(data.0), PAGE as u32, DESC_F_NEXT | write, at + 2),
            desc_bytes(iova(status.0), 1, DESC_F_WRITE, 0),
        ];
        let mut pages = vec![header.0, data.0, status.0];
        if table {
            let (number, window) = behind.mapped();
            let mut bytes = descs.concat();
            (bytes[14], bytes[30]) = (1, 2);
            window.write(0, &bytes);
            queue.desc(at, iova(number), bytes.len() as u32, DESC_F_INDIRECT, 0);
            pages.insert(0, number);
        } else {
            for (n, desc) in descs.iter().enumerate() {
                queue.page.write((usize::from(at) + n) * 16, desc);
            }
        }
        Fresh { pages, data: data.1, status: status.1 }
    }

    fn status(&self) -> u8 {
        let mut status = [0];
        self.status.read(0, &mut status);
        status[0]
    }
}

/// Takes `count` completions.
fn finish(queue: &mut RawQueue, count: usize) -> Vec<(u32, u32)> {
    (0..count).map(|_| queue.wait()).collect()
}

#[test]
fn what_is_missing_causes_a_miss_and_is_then_there() {
    // rule D16, rule D19, rule D23
    for workers in [1, 2] {
        let mut behind = Behind::new(workers, config(), ram_disk(1 << 20));
        let mut queues = [behind.queue(0), behind.queue(1)];
        for round in 0..50u8 {
            for queue in &mut queues {
                let sector = u64::from(queue.index) * 8;
                let out = Fresh::lay(&mut behind, queue, 0, Kind::Out, sector, round % 2 == 0);
                fill(&out.data, round);
                queue.push(0);
                assert_eq!(finish(queue, 1), [(0, 1)]);
                let back = Fresh::lay(&mut behind, queue, 0, Kind::In, sector, round % 3 == 0);
                queue.push(0);
                assert_eq!(finish(queue, 1), [(0, PAGE as u32 + 1)]);
                assert_eq!((out.status(), back.status()), (0, 0));
                assert!(holds(&back.data, round), "round {round}");
            }
        }
        assert_eq!(behind.options.figures.sum().failed, 0);
        assert_eq!(behind.timeouts(), 0);
    }
}

#[test]
fn all_misses_of_a_request_are_sent_at_once_and_once() {
    // rule D17
    let mut behind = Behind::new(1, IotlbConfig { again: LONG, ..config() }, ram_disk(1 << 20));
    let mut queue = behind.queue(0);
    queue.go_round();
    behind.updates(Updates::Held);
    behind.forget_missed();
    let requests: Vec<_> = (0..4)
        .map(|n| Fresh::lay(&mut behind, &queue, n * 3, Kind::In, u64::from(n), false))
        .collect();
    (0..4).for_each(|n| queue.push(n * 3));
    let pages: Vec<usize> = requests.iter().flat_map(|request| request.pages.clone()).collect();
    // No miss is resolved, and yet misses for every page of every request are sent.
    pages.iter().for_each(|&page| behind.wait_missed(page));
    behind.round(0);
    behind.settle();
    let mut missed: Vec<u64> = behind.missed().iter().map(|&(addr, _)| addr).collect();
    missed.sort_unstable();
    let mut wanted: Vec<u64> = pages.iter().map(|&page| iova(page)).collect();
    wanted.sort_unstable();
    assert_eq!(missed, wanted, "one miss for each page");
    assert_eq!(queue.take(), None);
    behind.updates(Updates::Now);
    behind.release(|_| ());
    finish(&mut queue, 4);
    assert!(requests.iter().all(|request| request.status() == 0));
}

#[test]
fn indirect_tables_behind_one_that_is_missing_cause_misses_too() {
    let mut behind = Behind::new(1, config(), ram_disk(1 << 20));
    let mut queue = behind.queue(0);
    queue.go_round();
    behind.updates(Updates::Held);
    let requests: Vec<_> =
        (0..8).map(|n| Fresh::lay(&mut behind, &queue, n, Kind::In, 0, true)).collect();
    (0..8).for_each(|n| queue.push(n));
    requests.iter().for_each(|request| behind.wait_missed(request.pages[0]));
    assert_eq!(behind.on_unit(0, |unit| unit.under_way(0)), 0, "one was taken without its table");
    behind.updates(Updates::Now);
    behind.release(|held| held.reverse());
    finish(&mut queue, 8);
    assert!(requests.iter().all(|request| request.status() == 0));
}

#[test]
fn chains_that_come_behind_one_that_waits_cause_misses_too() {
    let mut behind = Behind::new(1, config(), ram_disk(1 << 20));
    let mut queue = behind.queue(0);
    for round in 0..20 {
        behind.updates(Updates::Now);
        queue.go_round();
        behind.updates(Updates::Held);
        let first = Fresh::lay(&mut behind, &queue, 0, Kind::In, 0, true);
        queue.push(0);
        behind.wait_missed(first.pages[0]);
        // The worker is at it, or asleep, or on its way there.
        std::thread::sleep(Duration::from_micros(round * 20));
        let second = Fresh::lay(&mut behind, &queue, 1, Kind::In, 0, true);
        queue.push(1);
        behind.wait_missed(second.pages[0]);
        let third = Fresh::lay(&mut behind, &queue, 2, Kind::In, 0, false);
        queue.push(2);
        third.pages.iter().for_each(|&page| behind.wait_missed(page));
        assert_eq!(
            behind.on_unit(0, |unit| unit.under_way(0)),
            0,
            "one was taken without its table"
        );
        behind.updates(Updates::Now);
        behind.release(|_| ());
        finish(&mut queue, 3);
        assert_eq!([first, second, third].map(|request| request.status()), [0; 3]);
    }
}

#[test]
fn updates_in_any_order_do() {
    for seed in 0..20usize {
        let mut behind = Behind::new(1, config(), ram_disk(1 << 20));
        let mut queue = behind.queue(0);
        queue.go_round();
        behind.updates(Updates::Held);
        let requests: Vec<_> = (0..5)
            .map(|n| Fresh::lay(&mut behind, &queue, n * 3, Kind::In, 0, n % 2 == 0))
            .collect();
        (0..5).for_each(|n| queue.push(n * 3));
        behind.wait_missed(requests[4].pages[0]);
        let mut completed = 0;
        until("all completions", || {
            behind.release(|held| {
                held.reverse();
                let by = seed % held.len().max(1);
                held.rotate_left(by);
            });
            completed += usize::from(queue.take().is_some());
            completed == 5
        });
        assert!(requests.iter().all(|request| request.status() == 0));
    }
}

#[test]
fn a_translation_for_reading_does_not_wake_a_request_that_writes() {
    // rule D18
    let mut behind = Behind::new(1, config(), ram_disk(1 << 20));
    let mut queue = behind.queue(0);
    queue.go_round();
    behind.updates(Updates::Held);
    let request = Fresh::lay(&mut behind, &queue, 0, Kind::In, 0, false);
    behind.map(request.pages[1], Access::Read);
    queue.push(0);
    request.pages.iter().for_each(|&page| behind.wait_missed(page));
    // Acknowledged once: a second acknowledgement would refuse the miss.
    behind.updates(Updates::Never);
    behind.forget_missed();
    behind.release(|_| ());
    let page = iova(request.pages[1]);
    until("another miss", || behind.missed().iter().any(|miss| miss.0 == page));
    behind.round(0);
    assert_eq!(behind.on_unit(0, |unit| unit.under_way(0)), 1);
    assert!(behind.missed().contains(&(page, Access::Write)));
    behind.map(request.pages[1], Access::ReadWrite);
    behind.updates(Updates::Now);
    finish(&mut queue, 1);
    assert_eq!(request.status(), 0);
}

#[test]
fn a_miss_that_is_refused_when_it_is_sent_again_stalls_its_request_alone_and_not_for_ever() {
    // Header, data, status, or the table of all of them: what is missing, and what can still be
    // reported.
    for (table, missing, expected) in
        [(false, 0, (1, 1)), (false, 1, (1, 1)), (false, 2, (0, 0xee)), (true, 0, (0, 0xee))]
    {
        let mut behind = Behind::new(1, config(), ram_disk(1 << 20));
        let mut queue = behind.queue(0);
        queue.go_round();
        let lost = Fresh::lay(&mut behind, &queue, 0, Kind::In, 0, table);
        let page = lost.pages[missing];
        behind.front.table.lock().unwrap().remove(&iova(page));
        queue.push(0);
        behind.wait_missed(page);
        let mut failed = None;
        for n in 0..20 {
            let other = Fresh::lay(&mut behind, &queue, 3, Kind::In, n, false);
            queue.push(3);
            let mut completion = queue.wait();
            if completion.0 == 0 {
                // It is refused at some time, when the miss is sent again.
                failed = Some(completion);
                completion = queue.wait();
            }
            assert_eq!(completion, (3, PAGE as u32 + 1));
            assert_eq!(other.status(), 0);
        }
        let failed = failed.unwrap_or_else(|| queue.wait());
        assert_eq!(failed, (0, expected.0));
        assert_eq!(u32::from(lost.status()), expected.1);
        // However long it had waited, it was refused: nothing timed out.
        let totals = behind.options.figures.iotlb.totals();
        assert!(totals.refusals > 0 && totals.timeouts == 0, "{totals:?}");
        // And if it is mapped now, the next access finds it, however soon after the refusal.
        behind.map(page, Access::ReadWrite);
        queue.push(0);
        assert_eq!(finish(&mut queue, 1), [(0, PAGE as u32 + 1)]);
        assert_eq!(lost.status(), 0);
    }
}

#[test]
fn a_front_end_that_never_replies_costs_time_and_no_more() {
    let timeout = Duration::from_millis(200);
    let mut behind = Behind::new(1, IotlbConfig { timeout, ..config() }, ram_disk(1 << 20));
    let mut queue = behind.queue(0);
    behind.push(0);
    queue.go_round();
    behind.updates(Updates::Never);
    let lost = Fresh::lay(&mut behind, &queue, 0, Kind::In, 0, false);
    queue.push(0);
    assert_eq!(finish(&mut queue, 1), [(0, 0)]);
    assert_eq!((lost.status(), behind.timeouts()), (0xee, 1));
    behind.updates(Updates::Now);
    let next = Fresh::lay(&mut behind, &queue, 0, Kind::In, 0, false);
    // The first time, unless a busy machine sends the update too late: then it is there the next
    // time.
    until("a request whose misses are resolved", || {
        queue.push(0);
        finish(&mut queue, 1) == [(0, PAGE as u32 + 1)]
    });
    assert_eq!(next.status(), 0);
    let timeouts = behind.timeouts();
    // Not even its table: the chain is given back, and the ring goes on.
    behind.updates(Updates::Never);
    Fresh::lay(&mut behind, &queue, 0, Kind::In, 0, true);
    queue.push(0);
    assert_eq!(finish(&mut queue, 1), [(0, 0)]);
    assert_eq!(behind.timeouts(), timeouts + 1);
}

#[test]
fn a_channel_that_is_not_read_blocks_no_queue() {
    // rule D20
    let mut behind = Behind::new(1, config(), ram_disk(1 << 20));
    let mut queues = [behind.queue(0), behind.queue(1)];
    queues.iter_mut().for_each(RawQueue::go_round);
    behind.deaf(true);
    // One huge buffer after the other, none of it mapped: more misses than any socket holds.
    let [one, two] = &mut queues;
    for n in 0..8u64 {
        one.lay(Kind::In, 0, &[piece((n + 1) << 40, 1 << 19), piece((n + 9) << 40, 1 << 19)]);
        one.push(0);
        two.go_round();
        let mut capacity = [0; 8];
        behind.main().config(0, &mut capacity).unwrap();
        assert_eq!(u64::from_le_bytes(capacity), (1 << 20) / 512);
        behind.main().get_vring_base(0).unwrap();
        one.clear();
        one.start(&mut behind.main(), 0);
    }
    behind.deaf(false);
    one.go_round();
}

/// Numbers that are the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }
}

#[test]
fn arbitrary_chains_and_updates_harm_only_their_ring() {
    let first = TestRunner::default().rng().next_u64();
    for seed in 0..40 {
        let mut numbers = Numbers(first.wrapping_add(seed));
        let timeout = Duration::from_millis(20);
        let config =
            IotlbConfig { timeout, again: Duration::from_millis(10), misses: 64, ..config() };
        let mut behind = Behind::new(1, config, ram_disk(1 << 20));
        // On pages 0 and 1, which cause no misses when it matters.
        let mut hostile = behind.queue(0);
        let mut healthy = behind.queue(1);
        behind.push(1);
        healthy.go_round();
        let pages: Vec<usize> = (0..8).map(|_| behind.mapped().0).collect();
        // Some updates are for reading only, and some addresses lead nowhere.
        behind.map(pages[0], Access::Read);
        for _ in 0..10 {
            let updates = [Updates::Now, Updates::Held, Updates::Never];
            behind.updates(updates[numbers.below(3) as usize]);
            for at in 0..SIZE {
                let place = match numbers.below(6) {
                    0 => numbers.below(u64::MAX) << 31,
                    1 => u64::MAX - numbers.below(4096),
                    2 => hostile.bus + numbers.below(4096),
                    n => iova(pages[(n + numbers.below(5)) as usize % 8]) + numbers.below(4096),
                };
                let len = [0, 1, 16, 512, 4096, 70_000, u32::MAX][numbers.below(7) as usize];
                let flags = [0, 1, 1, 2, 3, 4, 5, 7][numbers.below(8) as usize];
                hostile.desc(at, place, len, flags, (at + 1) % SIZE);
            }
            for _ in 0..numbers.below(6) {
                hostile.push(numbers.below(SIZE.into()) as u16);
            }
            if numbers.below(3) == 0 {
                behind.invalidate_all();
            }
            behind.round(0);
            behind.release(|held| held.reverse());
        }
        behind.updates(Updates::Now);
        behind.push(1);
        healthy.go_round();
        behind.main().get_vring_base(0).unwrap();
        hostile.clear();
        hostile.start(&mut behind.main(), 0);
        behind.push(0);
        hostile.go_round();
    }
}
