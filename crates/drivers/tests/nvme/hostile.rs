//! Broken or hostile controllers.

use std::sync::atomic::Ordering;

use proptest::prelude::*;
use ringfence_dma::Policy;
use ringfence_drivers::nvme::{Completion, Data, Error, Failure, Op};

use crate::{
    controller::{Character, Evil},
    rig::{Buffer, LIMIT, Queue, Rig, pattern},
};

fn rig(policy: Policy) -> Rig {
    Rig::with(policy, Character::GOOD)
}

/// Submits so many reads, and reaps until the queue fails or is idle.
fn reads(rig: &Rig, queue: &mut Queue, count: u64) -> (Vec<Completion<Buffer>>, Option<Error>) {
    let mut over = Vec::new();
    for n in 0..count {
        let data = Data::Buffer(Buffer::holding(0, &pattern(8192, n)));
        queue.submit(&rig.space(), Op::Read { lba: n * 16 }, data, n).unwrap();
    }
    let failed = queue.finish(|completion| over.push(completion)).err();
    (over, failed)
}

/// Every command comes back in the end, and nothing stays mapped.
fn all_come_back(rig: Rig, mut queue: Queue, mut over: Vec<Completion<Buffer>>, count: usize) {
    queue.abandon(|completion| over.push(completion)).unwrap();
    let mut tokens: Vec<u64> = over.iter().map(|completion| completion.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..count as u64).collect::<Vec<_>>());
    assert!(over.iter().all(|completion| matches!(completion.data, Data::Buffer(_))));
    drop(queue);
    drop(rig.disk);
    assert_eq!(rig.domain.mappings(), 0);
}

#[test]
fn completions_of_what_was_never_submitted_end_the_queue() {
    for id in [0xffff, 16, 15] {
        let rig = rig(Policy::StrictMap);
        let mut queue = rig.queue(16);
        rig.soft.be(Evil::Stray(id));
        let (over, failed) = reads(&rig, &mut queue, 8);
        assert_eq!(failed, Some(Error::Stray { queue: 1, id }));
        all_come_back(rig, queue, over, 8);
    }
}

#[test]
fn a_command_completes_once() {
    let rig = rig(Policy::StrictMap);
    let mut queue = rig.queue(16);
    rig.soft.be(Evil::Twice);
    let (over, failed) = reads(&rig, &mut queue, 8);
    // The second completion may come before the queue is found idle, or after it.
    let failed = failed.or_else(|| reads(&rig, &mut queue, 1).1);
    assert!(matches!(failed, Some(Error::Stray { queue: 1, .. })), "{failed:?}");
    drop(over);
    drop(queue);
    drop(rig.disk);
    assert_eq!(rig.domain.mappings(), 0);
}

#[test]
fn a_queue_full_of_lies_ends_it() {
    for word in [0, 3, 0xdead_beef, u32::MAX] {
        let rig = rig(Policy::StrictMap);
        let mut queue = rig.queue(16);
        rig.soft.be(Evil::Flood(word));
        let (over, failed) = reads(&rig, &mut queue, 8);
        assert!(matches!(failed, Some(Error::Stray { queue: 1, .. })), "{word:#x}: {failed:?}");
        all_come_back(rig, queue, over, 8);
    }
}

#[test]
fn failed_lost_and_silent_controllers_are_distinguished() {
    let timeout = Error::Timeout { queue: 1, after: LIMIT };
    for (evil, error) in
        [(Evil::Fatal, Error::Fatal), (Evil::Gone, Error::Gone), (Evil::Silent, timeout)]
    {
        let rig = rig(Policy::StrictMap);
        let mut queue = rig.queue(16);
        rig.soft.be(evil);
        let (over, failed) = reads(&rig, &mut queue, 8);
        assert_eq!(failed, Some(error));
        assert!(over.is_empty());
        if evil == Evil::Gone {
            // Its state is unknown: its memory stays out of its reach, and is not handed out.
            assert_eq!(queue.abandon(|_| unreachable!()), Err(Error::Gone));
            drop(queue);
            drop(rig.disk);
            assert_eq!(rig.domain.mappings(), 0);
        } else {
            all_come_back(rig, queue, over, 8);
        }
    }
}

#[test]
fn a_command_that_fails_is_not_an_error_of_the_queue() {
    let rig = rig(Policy::StrictMap);
    let mut queue = rig.queue(16);
    rig.soft.be(Evil::Status(0x4281));
    let (over, failed) = reads(&rig, &mut queue, 8);
    assert_eq!((over.len(), failed), (8, None));
    for completion in over {
        let Err(Failure::Status(status)) = completion.outcome else { panic!("{completion:?}") };
        assert_eq!((status.kind(), status.code()), (2, 0x81));
    }
    rig.soft.be(Evil::None);
    let (over, failed) = reads(&rig, &mut queue, 8);
    assert!(failed.is_none() && over.iter().all(|completion| completion.outcome.is_ok()));
}

/// A controller that completes commands first, and writes afterwards.
#[test]
fn what_came_back_is_out_of_reach() {
    for policy in [Policy::Strict, Policy::StrictMap, Policy::Bounce] {
        let rig = rig(policy);
        let mut queue = rig.queue(4);
        rig.soft.be(Evil::Late);
        let (over, failed) = reads(&rig, &mut queue, 4);
        assert_eq!((over.len(), failed), (4, None));
        // The device carries out its late writes before it looks at anything else. A flush: another
        // buffer would get the same addresses.
        rig.soft.be(Evil::None);
        let flushed = queue.carry_out(&rig.space(), Op::Flush, Data::None).unwrap();
        assert_eq!(flushed.outcome, Ok(()));
        for completion in over {
            let token = completion.token;
            let buffer = completion.data.into_buffer().unwrap();
            assert!(buffer.bytes() == pattern(8192, token), "{policy}: changed behind our back");
        }
        if policy != Policy::Bounce {
            assert!(rig.soft.faults() >= 4, "{policy}: {} faults", rig.soft.faults());
        }
    }
}

#[test]
fn an_admin_queue_that_lies_ends_the_start() {
    // The start fails before any lasting mapping, or the random data happens to be valid.
    for seed in 0..40 {
        let character = Character { identify: Some(seed), ..Character::GOOD };
        let rig = Rig::with(Policy::StrictMap, character);
        match &rig.disk {
            Ok(disk) => assert!(disk.namespaces().len() <= 1024),
            Err(error) => {
                assert!(matches!(error, Error::Nonsense(_)), "{error}");
                assert_eq!(rig.domain.mappings(), 0);
                assert_eq!(rig.soft.stats().stops.load(Ordering::Acquire), 1);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Whatever it does by chance, every command comes back once, and nothing stays mapped.
    #[test]
    fn no_controller_makes_the_driver_lose_or_double_a_buffer(
        seed in any::<u64>(),
        policy in prop::sample::select(vec![Policy::StrictMap, Policy::Strict]),
        rounds in 1..6_u64,
    ) {
        let rig = rig(policy);
        let mut queue = rig.queue(16);
        rig.soft.be(Evil::Dice(seed));
        for _ in 0..rounds {
            let (over, failed) = reads(&rig, &mut queue, 16);
            if failed.is_some() {
                all_come_back(rig, queue, over, 16);
                return Ok(());
            }
            prop_assert_eq!(over.len(), 16);
        }
        drop(queue);
        drop(rig.disk);
        prop_assert_eq!(rig.domain.mappings(), 0);
    }
}
