//! The pending list by itself.

use std::sync::atomic::AtomicUsize;

use super::*;

const TIMES: Times = Times { again_ns: 20, refused_ns: 20 };

fn waiter() -> Arc<Waiter> {
    Waiter::new(Box::new(|| ()))
}

fn miss(iova: u64, access: Prot) -> Miss {
    Miss { iova: Iova(iova), access, again: None }
}

fn pages(first: u64, count: u64) -> Range {
    Range::from_len(Iova(first * PAGE), count * PAGE).unwrap()
}

/// The misses to send if `waiter` waits for `wanted` at that time.
fn note(misses: &Misses, wanted: &[Miss], waiter: &Arc<Waiter>, now_ns: u64) -> Vec<Miss> {
    let mut wanted = wanted.to_vec();
    misses.note(&mut wanted, Some(waiter), now_ns, |_| false);
    wanted
}

#[test]
fn one_question_for_a_page_and_an_access_however_many_want_it() {
    // rule D17
    let misses = Misses::new(100, TIMES);
    let (first, second) = (waiter(), waiter());
    let read = miss(0x1234, Prot::READ);
    let both = [read, miss(0x1fff, Prot::READ), miss(0x1000, Prot::WRITE)];
    assert_eq!(note(&misses, &both, &first, 0), [both[0], both[2]]);
    for now in 1..20 {
        assert_eq!(note(&misses, &both, &first, now), []);
        assert_eq!(note(&misses, &[miss(0x1800, Prot::READ)], &second, now), []);
    }
    assert_eq!(misses.open(), 2);
    // Sent again, with the address that was sent first.
    assert_eq!(
        note(&misses, &[miss(0x1800, Prot::READ)], &second, 20),
        [Miss { again: Some(3), ..read }]
    );
    assert_eq!(note(&misses, &[read], &first, 21), []);
    misses.answer(pages(1, 1), Prot::READ);
    assert_eq!((first.answers(), second.answers(), misses.open()), (1, 1, 1));
}

#[test]
fn an_answer_wakes_whom_it_satisfies_in_address_and_permission() {
    // rule D18
    let misses = Misses::new(100, TIMES);
    let [reads, writes, both, other] = [(); 4].map(|()| waiter());
    note(&misses, &[miss(0x1000, Prot::READ)], &reads, 0);
    note(&misses, &[miss(0x1000, Prot::WRITE)], &writes, 0);
    note(&misses, &[miss(0x1000, Prot::RW)], &both, 0);
    note(&misses, &[miss(0x2000, Prot::READ)], &other, 0);
    let answers = || [&reads, &writes, &both, &other].map(|waiter| waiter.answers());
    misses.answer(pages(0, 1), Prot::RW);
    assert_eq!(answers(), [0, 0, 0, 0]);
    misses.answer(pages(1, 1), Prot::READ);
    assert_eq!(answers(), [1, 0, 0, 0]);
    misses.answer(pages(0, 8), Prot::WRITE);
    assert_eq!(answers(), [1, 1, 0, 0]);
    misses.answer(Range::ALL, Prot::RW);
    assert_eq!((answers(), misses.open()), ([1, 1, 1, 1], 0));
}

#[test]
fn an_answer_for_part_of_a_page_leaves_nobody_behind() {
    let misses = Misses::new(100, TIMES);
    let (low, high) = (waiter(), waiter());
    note(&misses, &[miss(0x1000, Prot::READ)], &low, 0);
    note(&misses, &[miss(0x1800, Prot::READ)], &high, 0);
    misses.answer(Range::from_len(Iova(0x1800), 0x800).unwrap(), Prot::READ);
    assert_eq!((low.answers(), high.answers(), misses.open()), (0, 1, 1));
    note(&misses, &[miss(0x1900, Prot::READ)], &high, 0);
    // The miss is resolved, but not for all waiters: the others send a new one.
    misses.answer(Range::from_len(Iova(0x1000), 0x800).unwrap(), Prot::READ);
    assert_eq!((low.answers(), high.answers(), misses.open()), (1, 2, 0));
}

#[test]
fn a_waiter_is_woken_once_however_much_is_answered() {
    let wakes = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&wakes);
    let waiter = Waiter::new(Box::new(move || {
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }));
    let misses = Misses::new(100, TIMES);
    let wanted: Vec<Miss> = (0..50).map(|page| miss(page * PAGE, Prot::READ)).collect();
    assert_eq!(note(&misses, &wanted, &waiter, 0).len(), 50);
    misses.answer(Range::ALL, Prot::READ);
    assert_eq!((wakes.load(std::sync::atomic::Ordering::Relaxed), misses.open()), (1, 0));
}

#[test]
fn the_list_is_bounded_and_a_full_one_makes_room_for_those_who_wait() {
    // rule D17
    let misses = Misses::new(4, TIMES);
    let (many, late) = (waiter(), waiter());
    let wanted: Vec<Miss> = (0..100).map(|page| miss(page * PAGE, Prot::READ)).collect();
    for now in 0..10 {
        let asked = note(&misses, &wanted, &many, now);
        assert_eq!(asked.len(), if now == 0 { 4 } else { 0 });
        assert_eq!(misses.open(), 4);
    }
    assert_eq!(note(&misses, &[miss(1 << 40, Prot::READ)], &late, 10), []);
    let before = (many.answers(), late.answers());
    misses.answer(pages(0, 1), Prot::READ);
    assert_eq!((many.answers(), late.answers()), (before.0 + 1, before.1 + 1));
    assert_eq!(note(&misses, &[miss(1 << 40, Prot::READ)], &late, 11).len(), 1);
}

#[test]
fn what_nobody_answers_makes_room_once_nobody_wants_it() {
    // rule D17
    let misses = Misses::new(4, TIMES);
    let (gone, patient, late) = (waiter(), waiter(), waiter());
    let wanted: Vec<Miss> = (0..4).map(|page| miss(page * PAGE, Prot::READ)).collect();
    note(&misses, &wanted, &gone, 0);
    for now in [5, 10, 15] {
        note(&misses, &wanted[..1], &patient, now);
    }
    // All but the first were given up.
    let new = [miss(1 << 40, Prot::READ)];
    assert_eq!(note(&misses, &new, &late, 19), []);
    assert_eq!(note(&misses, &new, &late, 20), new);
    assert_eq!(misses.open(), 2);
    assert_eq!(patient.answers(), 0, "still waits");
    assert!(gone.answers() > 0, "if it does wait, it asks anew");
}

#[test]
fn a_refusal_is_for_those_who_waited_and_not_for_ever() {
    let misses = Misses::new(100, TIMES);
    let (waits, later) = (waiter(), waiter());
    let lack = |waiter, now| misses.lack((Iova(0x1000), Prot::WRITE), None, waiter, now);
    note(&misses, &[miss(0x1000, Prot::WRITE), miss(0x1000, Prot::READ)], &waits, 0);
    assert_eq!(lack(&waits, 1), Lack::Pending);
    assert_eq!(misses.refuse(pages(1, 1), Prot::WRITE, None, 1), [miss(0x1000, Prot::WRITE)]);
    assert_eq!(misses.refuse(pages(1, 1), Prot::WRITE, None, 1), [], "once");
    assert_eq!((waits.answers(), lack(&waits, 20)), (1, Lack::Refused));
    assert_eq!(misses.lack((Iova(0x1000), Prot::READ), None, &waits, 2), Lack::Pending);
    assert_eq!(lack(&later, 20), Lack::Pending, "there may be a translation by now");
    assert_eq!(lack(&waits, 21), Lack::Pending);
    assert_eq!(note(&misses, &[miss(0x1000, Prot::WRITE)], &later, 20).len(), 1);
    // Not both: one of them may be.
    assert_eq!(misses.refuse(Range::ALL, Prot::RW, None, 20), []);
    // No read access: so not both either.
    note(&misses, &[miss(0x1000, Prot::RW)], &waits, 20);
    assert_eq!(misses.refuse(Range::ALL, Prot::READ, None, 20).len(), 2);
}

#[test]
fn who_did_not_wait_is_not_refused() {
    let misses = Misses::new(100, TIMES);
    let mut ahead = vec![miss(0x5000, Prot::READ)];
    misses.note(&mut ahead, None, 0, |_| false);
    assert_eq!(ahead.len(), 1);
    misses.refuse(pages(5, 1), Prot::READ, None, 1);
    assert_eq!(misses.open(), 0);
    assert_eq!(misses.lack((Iova(0x5000), Prot::READ), None, &waiter(), 1), Lack::Pending);
}

/// Two accesses that share a waiter, and say since when they wait.
#[test]
fn a_refusal_is_seen_however_late_by_who_waited_and_by_nobody_else() {
    let misses = Misses::new(100, TIMES);
    let waiter = waiter();
    let read = [miss(0x1000, Prot::READ)];
    let lack = |since| misses.lack((Iova(0x1000), Prot::READ), Some(since), &waiter, 1 << 40);
    let first = misses.questions();
    note(&misses, &read, &waiter, 0);
    let second = misses.questions();
    // It waits for the same miss, which was sent before.
    assert_eq!(note(&misses, &read, &waiter, 1), []);
    assert_eq!(misses.refuse(pages(1, 1), Prot::READ, None, 2).len(), 1);
    assert_eq!((lack(first), lack(second)), (Lack::Refused, Lack::Pending));
    assert_eq!(lack(u64::MAX), Lack::Pending, "it has not waited at all");
    // It sends a new miss, and the first has not looked yet.
    assert_eq!(note(&misses, &read, &waiter, 3), read);
    assert_eq!((lack(first), lack(second)), (Lack::Refused, Lack::Pending));
    assert_eq!(misses.refuse(pages(1, 1), Prot::READ, None, 4).len(), 1);
    assert_eq!((lack(first), lack(second)), (Lack::Refused, Lack::Refused));
    // An update ends the refusal.
    misses.answer(pages(1, 1), Prot::READ);
    assert_eq!(lack(first), Lack::Pending);
}

/// Sent several times: each reply belongs to its number.
#[test]
fn an_answer_that_took_long_does_not_concern_who_came_meanwhile() {
    let misses = Misses::new(100, TIMES);
    let waiter = waiter();
    let read = [miss(0x1000, Prot::READ)];
    let lack = |since| misses.lack((Iova(0x1000), Prot::READ), Some(since), &waiter, 1 << 40);
    note(&misses, &read, &waiter, 0);
    let before = misses.questions();
    let first = note(&misses, &read, &waiter, 20)[0].again;
    let between = misses.questions();
    let second = note(&misses, &read, &waiter, 40)[0].again;
    assert!(first.is_some() && second > first);
    misses.refuse(pages(1, 1), Prot::READ, first, 41);
    assert_eq!((lack(before), lack(between)), (Lack::Refused, Lack::Pending));
}

/// A page was translated, unmapped and mapped again, and only then the reply arrives to a miss that
/// was sent in between.
#[test]
fn an_answer_to_an_older_question_concerns_nobody_who_asked_after_it() {
    let misses = Misses::new(100, TIMES);
    let waiter = waiter();
    let read = [miss(0x1000, Prot::READ)];
    let lack = |since| misses.lack((Iova(0x1000), Prot::READ), Some(since), &waiter, 1 << 40);
    note(&misses, &read, &waiter, 0);
    let old = note(&misses, &read, &waiter, 20)[0].again.unwrap();
    misses.answer(pages(1, 1), Prot::READ);
    let since = misses.questions();
    assert_eq!(note(&misses, &read, &waiter, 21), read, "a question of its own");
    assert_eq!(misses.refuse(pages(1, 1), Prot::READ, Some(old), 22), []);
    assert!(!misses.acknowledge(Iova(0x1000), Prot::READ, old));
    assert!(!misses.acknowledge(Iova(0x1000), Prot::READ, old), "nor counted");
    assert_eq!((lack(since), misses.open()), (Lack::Pending, 1));
    let new = note(&misses, &read, &waiter, 41)[0].again;
    assert_eq!(misses.refuse(pages(1, 1), Prot::READ, new, 42).len(), 1);
    assert_eq!(lack(since), Lack::Refused);
}

#[test]
fn what_could_not_be_sent_is_asked_by_who_looks_next() {
    let misses = Misses::new(100, TIMES);
    let (first, second) = (waiter(), waiter());
    let asked = note(&misses, &[miss(0x1000, Prot::READ)], &first, 0);
    note(&misses, &asked, &second, 0);
    misses.unsent(&asked);
    assert_eq!(note(&misses, &asked, &second, 1), asked, "not as asked again");
    misses.answer(pages(1, 1), Prot::READ);
    assert_eq!((first.answers(), second.answers()), (1, 1));
}

#[test]
fn what_came_before_it_was_noted_is_not_waited_for() {
    let misses = Misses::new(100, TIMES);
    let waiter = waiter();
    let mut wanted = vec![miss(0x1000, Prot::READ), miss(0x2000, Prot::READ)];
    misses.note(&mut wanted, Some(&waiter), 0, |miss| miss.iova.0 == 0x1000);
    assert_eq!(wanted, [miss(0x2000, Prot::READ)]);
    assert_eq!((waiter.answers(), misses.open()), (1, 1));
}

#[test]
fn an_acknowledgement_without_a_translation_counts_the_second_time() {
    let misses = Misses::new(100, TIMES);
    assert!(!misses.acknowledge(Iova(0x1000), Prot::WRITE, 1));
    note(&misses, &[miss(0x1000, Prot::WRITE)], &waiter(), 0);
    assert!(!misses.acknowledge(Iova(0x1000), Prot::READ, 2));
    assert!(!misses.acknowledge(Iova(0x1000), Prot::WRITE, 2));
    assert!(misses.acknowledge(Iova(0x1000), Prot::WRITE, 3));
}

#[test]
fn the_last_page_is_a_page() {
    // rule D30
    let misses = Misses::new(100, TIMES);
    let waiter = waiter();
    note(&misses, &[miss(u64::MAX, Prot::READ)], &waiter, 0);
    misses.answer(Range::new(Iova(u64::MAX - 0xfff), Iova(u64::MAX)).unwrap(), Prot::READ);
    assert_eq!((waiter.answers(), misses.open()), (1, 0));
}
