//! Written data is read back, whatever its layout in memory and the policy.

use std::sync::{Arc, atomic::Ordering};

use proptest::prelude::*;
use ringfence_dma::{Direction, Policy};
use ringfence_drivers::nvme::{Completion, Data, Failure, NotSubmitted, Op};

use crate::{
    controller::{BLOCK, Character},
    rig::{BLOCKS, Buffer, Queue, Rig, bytes, pattern},
};

fn ok<B>(completion: Completion<B>) -> Data<B> {
    assert_eq!(completion.outcome, Ok(()), "command {}", completion.token);
    completion.data
}

/// Writes and reads back, many at a time, with several sizes and offsets in a page.
fn write_and_read(rig: &Rig, queue: &mut Queue) {
    let space = rig.space();
    for (size, offset) in [(512, 0), (512, 3584), (4096, 0), (4096, 512), (12288, 4), (65536, 2048)]
    {
        let count = (16_usize).min(queue.room());
        let lba = |n: u64| n * (size / BLOCK) as u64;
        for n in 0..count as u64 {
            let data = Data::Buffer(Buffer::holding(offset, &pattern(size, n + size as u64)));
            queue.submit(&space, Op::Write { lba: lba(n) }, data, n).unwrap();
        }
        let mut over = 0;
        queue
            .finish(|completion| over += usize::from(ok(completion).into_buffer().is_some()))
            .unwrap();
        assert_eq!(over, count);
        for n in 0..count as u64 {
            let data = Data::Buffer(Buffer::new(offset, size));
            queue.submit(&space, Op::Read { lba: lba(n) }, data, n).unwrap();
        }
        queue
            .finish(|completion| {
                let token = completion.token;
                let expected = pattern(size, token + size as u64);
                assert!(bytes(ok(completion)) == expected, "{size} bytes of {token}");
            })
            .unwrap();
    }
}

#[test]
fn data_comes_back_under_every_policy() {
    for policy in Policy::ALL {
        let rig = Rig::new(policy);
        let mut queues: Vec<Queue> = [1, 7, 32].map(|depth| rig.queue(depth)).into();
        queues.iter_mut().for_each(|queue| write_and_read(&rig, queue));
        assert_eq!(rig.soft.faults(), 0, "{policy}");
        drop(queues);
        let stats = rig.device.stats();
        drop(rig.disk);
        if policy == Policy::StrictMap {
            assert_eq!(rig.domain.mappings(), 0, "nothing of a driver that is gone stays mapped");
        }
        // The policy was really in effect.
        match policy {
            Policy::Off => assert_eq!(stats.map_calls, 0),
            Policy::Bounce => assert!(stats.map_calls < 100, "{stats:?}"),
            Policy::Auto => {}
            _ => assert!(stats.map_calls >= 6 * 2, "{stats:?}"),
        }
    }
}

#[test]
fn the_longest_command_moves_as_much_as_a_list_of_a_page_describes() {
    for policy in [Policy::StrictMap, Policy::Bounce] {
        let rig = Rig::new(policy);
        let (mut queue, space) = (rig.queue(2), rig.space());
        let most = queue.max_transfer() as usize;
        assert_eq!(most, 2 << 20);
        // It begins within a page: one page more than the list has entries.
        let data = Data::Buffer(Buffer::holding(2048, &pattern(most, 1)));
        ok(queue.carry_out(&space, Op::Write { lba: 8 }, data).unwrap());
        let data = Data::Buffer(Buffer::new(512, most));
        let back = ok(queue.carry_out(&space, Op::Read { lba: 8 }, data).unwrap());
        assert!(bytes(back) == pattern(most, 1));
        assert!(rig.soft.disk()[8 * BLOCK..][..most] == pattern(most, 1));
        let data = Data::Buffer(Buffer::new(0, most + BLOCK));
        let refused = queue.carry_out(&space, Op::Read { lba: 0 }, data).unwrap();
        let why = NotSubmitted::TooLong { bytes: (most + BLOCK) as u64, most: most as u64 };
        assert_eq!(refused.outcome, Err(why.into()));
    }
}

#[test]
fn a_controllers_own_limit_of_a_transfer_is_kept() {
    let character = Character { mdts: 2, ..Character::GOOD };
    let rig = Rig::with(Policy::StrictMap, character);
    let (mut queue, space) = (rig.queue(2), rig.space());
    assert_eq!(queue.max_transfer(), 16 << 10);
    for (len, fits) in [(16 << 10, true), ((16 << 10) + BLOCK, false)] {
        let data = Data::Buffer(Buffer::new(2048, len));
        let completion = queue.carry_out(&space, Op::Write { lba: 0 }, data).unwrap();
        assert_eq!(completion.outcome.is_ok(), fits);
    }
}

#[test]
fn lists_pools_and_persistent_buffers_carry_data_too() {
    let rig = Rig::new(Policy::StrictMap);
    let mut queue: Queue<Vec<Buffer>> = rig.disk().queue(8).unwrap();
    let space = rig.space();
    let all = pattern(5 * 4096, 3);
    // Pieces of whole pages, except for the beginning of the first and the end of the last.
    let pieces = |with: &[u8]| {
        let (first, rest) = with.split_at(1024);
        let (second, third) = rest.split_at(8192);
        vec![Buffer::holding(3072, first), Buffer::holding(0, second), Buffer::holding(0, third)]
    };
    let list = Data::Buffer(pieces(&all));
    ok(queue.carry_out(&space, Op::Write { lba: 0 }, list).unwrap());
    assert!(rig.soft.disk()[..all.len()] == all);
    let list = Data::Buffer(pieces(&vec![0; all.len()]));
    let list = ok(queue.carry_out(&space, Op::Read { lba: 0 }, list).unwrap());
    let list = list.into_buffer().unwrap();
    assert_eq!(list.len(), 3);
    assert!(list.iter().flat_map(Buffer::bytes).eq(&all));

    let mut queue = rig.queue(8);

    let mut pooled = rig.device.take_buffer(8192, Direction::Bidirectional).unwrap();
    pooled.write(0, &pattern(8192, 4));
    let pooled = ok(queue.carry_out(&space, Op::Write { lba: 64 }, Data::Pooled(pooled)).unwrap());
    let Data::Pooled(pooled) = pooled else { panic!("{pooled:?}") };
    pooled.piece().fill(0);
    let pooled = ok(queue.carry_out(&space, Op::Read { lba: 64 }, Data::Pooled(pooled)).unwrap());
    assert!(bytes(pooled) == pattern(8192, 4));

    let arena = rig.device.map_persistent(Buffer::new(0, 1 << 16), Direction::Bidirectional);
    let arena = Arc::new(arena.unwrap());
    let before = rig.device.stats().map_calls;
    for n in 0..8 {
        let part = Data::Persistent(Arc::clone(&arena), n * 8192..(n + 1) * 8192);
        queue.submit(&space, Op::Read { lba: 64 }, part, n).unwrap();
    }
    queue.finish(|completion| assert!(matches!(ok(completion), Data::Persistent(..)))).unwrap();
    assert_eq!(rig.device.stats().map_calls, before, "mapped once for all");
    let beyond = Data::Persistent(Arc::clone(&arena), (1 << 16) - 512..(1 << 16) + 512);
    let refused = queue.carry_out(&space, Op::Read { lba: 0 }, beyond).unwrap();
    assert_eq!(refused.outcome, Err(NotSubmitted::Data.into()));
    drop(refused);
    let arena = Arc::into_inner(arena).unwrap().unmap().unwrap();
    assert!(arena.bytes().chunks(8192).all(|part| part == pattern(8192, 4)));
}

#[test]
fn what_is_published_together_shares_a_doorbell_and_a_sync() {
    let rig = Rig::new(Policy::StrictMap);
    let (mut queue, space) = (rig.queue(32), rig.space());
    let (doorbells, syncs) =
        (rig.soft.stats().doorbells.load(Ordering::Relaxed), rig.device.stats().map_syncs);
    for n in 0..32 {
        let data = Data::Buffer(Buffer::new(0, 4096));
        queue.submit(&space, Op::Write { lba: n * 8 }, data, n).unwrap();
    }
    assert_eq!(queue.room(), 0);
    let refused = queue.submit(&space, Op::Flush, Data::None, 0).unwrap_err();
    assert_eq!(refused.why, NotSubmitted::Full);
    queue.finish(|completion| drop(ok(completion))).unwrap();
    assert_eq!(rig.soft.stats().doorbells.load(Ordering::Relaxed) - doorbells, 1);
    assert_eq!(rig.device.stats().map_syncs - syncs, 1);
}

#[test]
fn commands_without_data_do_what_they_say() {
    let rig = Rig::new(Policy::StrictMap);
    let (mut queue, space) = (rig.queue(4), rig.space());
    let data = Data::Buffer(Buffer::holding(0, &[7; 4096]));
    ok(queue.carry_out(&space, Op::Write { lba: 0 }, data).unwrap());
    ok(queue.carry_out(&space, Op::Flush, Data::None).unwrap());
    assert_eq!(rig.soft.stats().flushes.load(Ordering::Relaxed), 1);
    let gone = Op::Deallocate { lba: 2, blocks: 4 };
    ok(queue.carry_out(&space, gone, Data::None).unwrap());
    let disk = rig.soft.disk();
    assert!(disk[..1024] == [7; 1024] && disk[1024..3072] == [0; 2048] && disk[3072] == 7);
}

#[test]
fn an_invalid_command_is_refused_before_it_reaches_the_controller() {
    let rig = Rig::new(Policy::StrictMap);
    let (mut queue, space) = (rig.queue(4), rig.space());
    let mut lists: Queue<Vec<Buffer>> = rig.disk().queue(4).unwrap();
    let there = space.blocks();
    let fetched = rig.soft.stats().commands.load(Ordering::Relaxed);
    let mut refused = |op, data| match queue.carry_out(&space, op, data).unwrap().outcome {
        Err(Failure::NotSubmitted(why)) => why,
        other => panic!("{op:?}: {other:?}"),
    };
    let buffer = |offset, len| Data::Buffer(Buffer::new(offset, len));
    let read = |lba| Op::Read { lba };
    let end = |lba, blocks| NotSubmitted::BeyondEnd { lba, blocks, there };
    assert_eq!(refused(read(there), buffer(0, 512)), end(there, 1));
    assert_eq!(refused(read(there - 1), buffer(0, 1024)), end(there - 1, 2));
    assert_eq!(refused(read(u64::MAX), buffer(0, 1024)), end(u64::MAX, 2));
    let all = Op::Deallocate { lba: 1, blocks: u32::MAX };
    assert_eq!(refused(all, Data::None), end(1, u32::MAX.into()));
    let odd = NotSubmitted::Blocks { bytes: 100, block: 512 };
    assert_eq!(refused(read(0), buffer(0, 100)), odd);
    let none = NotSubmitted::Blocks { bytes: 0, block: 512 };
    assert_eq!(refused(read(0), Data::None), none);
    assert_eq!(refused(Op::Flush, buffer(0, 512)), NotSubmitted::Data);
    // No PRP list can describe these: an odd address, and a piece that ends within a page.
    assert_eq!(refused(read(0), buffer(2, 512)), NotSubmitted::Shape);
    let list = Data::Buffer(vec![Buffer::new(0, 512), Buffer::new(0, 512)]);
    let refused = lists.carry_out(&space, read(0), list).unwrap().outcome;
    assert_eq!(refused, Err(NotSubmitted::Shape.into()));
    assert_eq!(rig.soft.stats().commands.load(Ordering::Relaxed), fetched);
    assert!(queue.is_idle() && queue.room() == 4);
}

#[derive(Clone, Debug)]
enum Step {
    Write { at: usize, blocks: usize, offset: usize, seed: u64 },
    Read { at: usize, blocks: usize, offset: usize },
    Deallocate { at: usize, blocks: usize },
    Finish,
}

fn step() -> impl Strategy<Value = Step> {
    let place = (0..BLOCKS - 64, 1..64_usize);
    let offset = (0..1024_usize).prop_map(|n| n * 4);
    prop_oneof![
        4 => (place.clone(), offset.clone(), any::<u64>())
            .prop_map(|((at, blocks), offset, seed)| Step::Write { at, blocks, offset, seed }),
        4 => (place.clone(), offset)
            .prop_map(|((at, blocks), offset)| Step::Read { at, blocks, offset }),
        1 => place.prop_map(|(at, blocks)| Step::Deallocate { at, blocks }),
        1 => Just(Step::Finish),
    ]
}

/// Hands out all commands in flight, and checks what was read.
fn settle(queue: &mut Queue, expected: &mut Vec<(std::ops::Range<usize>, Option<Vec<u8>>)>) {
    queue
        .finish(|completion| {
            let (_, read) = &expected[completion.token as usize];
            let read = read.clone();
            let data = ok(completion);
            if let Some(read) = read {
                assert!(bytes(data) == read);
            }
        })
        .unwrap();
    expected.clear();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Against a model disk, a vector; overlapping commands are not in flight together.
    #[test]
    fn a_disk_is_what_was_written_to_it(
        policy in prop::sample::select(vec![Policy::StrictMap, Policy::Bounce, Policy::LazyMqMap]),
        depth in 1..40_u32,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let rig = Rig::new(policy);
        let (mut queue, space) = (rig.queue(depth), rig.space());
        let mut model = vec![0; BLOCKS * BLOCK];
        let mut under_way: Vec<(std::ops::Range<usize>, Option<Vec<u8>>)> = Vec::new();
        for step in steps {
            let blocks = match &step {
                Step::Write { at, blocks, .. }
                | Step::Read { at, blocks, .. }
                | Step::Deallocate { at, blocks } => *at..at + blocks,
                Step::Finish => 0..0,
            };
            let meets = |other: &std::ops::Range<usize>| {
                other.start < blocks.end && blocks.start < other.end
            };
            if matches!(step, Step::Finish)
                || queue.room() == 0
                || under_way.iter().any(|(other, _)| meets(other))
            {
                settle(&mut queue, &mut under_way);
            }
            let place = blocks.start * BLOCK..blocks.end * BLOCK;
            let token = under_way.len() as u64;
            let lba = blocks.start as u64;
            match step {
                Step::Write { offset, seed, .. } => {
                    let with = pattern(place.len(), seed);
                    let data = Data::Buffer(Buffer::holding(offset, &with));
                    queue.submit(&space, Op::Write { lba }, data, token).unwrap();
                    model[place].copy_from_slice(&with);
                    under_way.push((blocks, None));
                }
                Step::Read { offset, .. } => {
                    let data = Data::Buffer(Buffer::new(offset, place.len()));
                    queue.submit(&space, Op::Read { lba }, data, token).unwrap();
                    under_way.push((blocks, Some(model[place].to_vec())));
                }
                Step::Deallocate { .. } => {
                    let gone = Op::Deallocate { lba, blocks: blocks.len() as u32 };
                    queue.submit(&space, gone, Data::None, token).unwrap();
                    model[place].fill(0);
                    under_way.push((blocks, None));
                }
                Step::Finish => {}
            }
            // Some are published early.
            if token.is_multiple_of(3) {
                queue.publish().unwrap();
            }
        }
        settle(&mut queue, &mut under_way);
        prop_assert!(rig.soft.disk() == model);
        prop_assert_eq!(rig.soft.faults(), 0);
    }
}
